"""The command line: ``python3 -m transformer_rtc demo`` and ``info``."""

from __future__ import annotations

import argparse
import sys

from . import demo, info
from .version import __version__


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m transformer_rtc",
        description="Transformer norm kernels that are compiled by NVRTC the first time they are used.",
        epilog="examples:\n  python3 -m transformer_rtc demo\n  python3 -m transformer_rtc info",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{demo,info}")
    commands.add_parser("demo", help="compile, run and check the operators at the shapes of well-known models")
    commands.add_parser("info", help="print what was found, what is missing, and the command that mends it")
    command = parser.parse_args().command
    return demo.run() if command == "demo" else info.run()


if __name__ == "__main__":
    sys.exit(main())
