# SPDX-License-Identifier: Apache-2.0
"""The arguments of the command line, and its help."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from .errors import ArgumentError, CompileError, TransformerRtcError, choices, nearest
from .settings import VARIABLES, parse_bytes
from .spec import DTYPES
from .version import __version__

__all__ = ["EXITS", "Command", "Misuse", "parser", "spelt_out", "told_of"]

# What runs a command, and returns how the process exits.
Command = Callable[[argparse.Namespace], int]

# What people call data types; the Python API takes the names of frameworks alone.
_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

_EXAMPLES = {
    "": """
  transformer-rtc demo
  transformer-rtc info
  transformer-rtc warmup rms_norm layer_norm --dtype bfloat16 --hidden 4096 8192 --architecture sm_90
  transformer-rtc tune rms_norm --dtype bfloat16 --hidden 5376
  transformer-rtc cache list
  transformer-rtc compile scale.cu --symbol scale --architecture sm_90
""",
    "info": """
  transformer-rtc info
  transformer-rtc info --json | jq .missing
""",
    "warmup": """
  transformer-rtc warmup rms_norm --dtype bfloat16 --hidden 4096
  transformer-rtc warmup gelu silu_and_mul --dtype bfloat16
  transformer-rtc warmup rms_norm --dtype bfloat16 --hidden 4096 --argument weight=float32 return_rstd=true
  TRANSFORMER_RTC_RECORD=manifest.jsonl python3 train.py
  transformer-rtc warmup --manifest manifest.jsonl --architecture sm_90 sm_100
""",
    "tune": """
  transformer-rtc tune rms_norm rms_norm_backward --dtype bfloat16 --hidden 5376 21504
  transformer-rtc tune --manifest manifest.jsonl --minutes 10
""",
    "cache": """
  transformer-rtc cache list
  transformer-rtc cache show rms_norm_forward_bf16_h4096
  transformer-rtc cache verify
  transformer-rtc cache prune --max-size 200M --unused-days 30
  transformer-rtc cache pack kernels.pack
  transformer-rtc cache unpack kernels.pack --folder /opt/transformer_rtc
""",
    "compile": """
  transformer-rtc compile scale.cu --symbol scale --architecture sm_90
  transformer-rtc compile scale.cu --symbol scale --field x:pointer factor:float32 --output scale.cubin
  transformer-rtc compile scale.cu --symbol scale -I include --option=-DWIDTH=4
""",
}

# What the command line calls arguments of the Python API, wherever a message has them, and at its start.
_NAMES = {
    "architectures": "--architecture",
    "dtypes": "--dtype",
    "hidden_sizes": "--hidden",
    "include_folders": "-I",
}
_FIRST_NAMES = {"operators": "operator", "threads": "--threads", "tuning": "--tuning", "symbol": "--symbol"}
# What somebody gave is quoted, and stays as it is.
_NAMED = re.compile(
    rf"""'[^']*'|"[^"]*"|(?<![\w./-])(?P<name>{"|".join(_NAMES)})(?![\w./-])"""
    rf"""|^(?P<first>{"|".join(_FIRST_NAMES)})(?= (?:has|is) )"""
)

# How every command exits.
EXITS = {
    0: "it was done",
    1: "something failed, is missing or is damaged",
    2: "a command or an argument is wrong, or a file that it names cannot be read",
    130: "it was interrupted",
}


class Misuse(Exception):
    """Arguments that are none.

    Attributes
    ----------
    usage : str
        How the command is used.
    told : str
        What is wrong.
    """

    def __init__(self, usage: str, told: str) -> None:
        super().__init__(told)
        self.usage, self.told = usage, told


class _Parser(argparse.ArgumentParser):
    """Raises what its base class would print, and end the process: a caller may have asked for JSON."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and refuse what is left over with the usage of the very command."""
        texts = sys.argv[1:] if args is None else list(args)
        found, left = super().parse_known_args(texts, namespace)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}{self._hint(texts, left[0])}")
        return found, left

    def _hint(self, texts: list[str], left: str) -> str:
        options = self._option_string_actions
        if left.startswith("-"):
            return nearest(left.partition("=")[0], options, "--")
        before = texts[: texts.index(left)]
        option = next((text for text in reversed(before) if text.startswith("-")), "")
        taken = before[::-1].index(option) if option else 0
        return f"; {option} takes one value" if taken and option in options and options[option].nargs is None else ""

    def error(self, message: str) -> NoReturn:
        raise Misuse(self.format_usage(), f"{self.prog}: error: {message}")


def spelt_out(dtype: str) -> str:
    """Return a data type's name, of a short one as of another."""
    return _SHORT_DTYPES.get(dtype, dtype)


def _dtype(text: str) -> str:
    from .arrays import dtype_id  # needs the native part, which the documentation does without

    name = spelt_out(text)
    try:
        dtype_id(name)
    except ArgumentError:
        names = [*(dtype.name for dtype in DTYPES.values()), *_SHORT_DTYPES]
        raise argparse.ArgumentTypeError(f"{text!r}{choices(text, names)}") from None
    return name


def told_of(error: TransformerRtcError) -> str:
    """Return what the command line says of an error: arguments are called as it calls them."""
    if isinstance(error, CompileError):  # which has a program
        return str(error)

    def name(match: re.Match[str]) -> str:
        return _NAMES.get(match["name"]) or _FIRST_NAMES.get(match["first"]) or match[0]

    return _NAMED.sub(name, str(error))


def _bytes(text: str) -> int:
    found = parse_bytes(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: bytes are meant, such as 1G, 500M or 0 for no limit")
    return found


def _number_of(unit: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        if not re.fullmatch(r"\d{1,6}(\.\d*)?|\.\d+", text, re.ASCII):
            raise argparse.ArgumentTypeError(f"{text!r}: {unit} are meant, such as 30 or 0.5")
        return float(text)

    return parse


def parser(runs: Mapping[str, Command]) -> argparse.ArgumentParser:
    """Return the parser of all commands.

    Parameters
    ----------
    runs : mapping of str to callable
        What runs each: by its name, and by ``"cache list"`` an action's.
    """

    def formatted(examples: str) -> dict[str, Any]:
        lines = [f"examples:{_EXAMPLES[examples].rstrip()}"]
        if not examples:
            width = max(len(variable.name) for variable in VARIABLES)
            lines += ["", "environment variables:"]
            for variable in VARIABLES:
                lines += textwrap.wrap(
                    variable.text,
                    width=110,
                    initial_indent=f"  {variable.name:{width}s}  ",
                    subsequent_indent=" " * (width + 4),
                )
            lines += ["", "it exits with:", *(f"  {code:<4d} {told}" for code, told in EXITS.items())]
        return {"epilog": "\n".join(lines), "formatter_class": argparse.RawDescriptionHelpFormatter}

    root = _Parser(
        prog="transformer-rtc",
        description="Transformer norm, softmax and activation kernels, compiled by NVRTC the first time they are used.",
        **formatted(""),
    )
    root.add_argument("--version", action="version", version=__version__)
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(to: Any, name: str, text: str, examples: str = "") -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = to.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", **(formatted(examples) if examples else {})
        )
        made.set_defaults(run=runs[f"cache {name}" if examples == "cache" else name])
        made.add_argument("--json", action="store_true", help="print one JSON document, also of a failure")
        return made

    command(
        commands,
        "demo",
        "run operators of each family, forward and backward, check them, and time them",
    )
    command(commands, "info", "print what was found, what is missing, and the command that mends it", "info")

    def described(made: argparse.ArgumentParser) -> None:
        made.add_argument("operator", nargs="*", help="such as rms_norm")
        made.add_argument(
            "--dtype", nargs="+", action="extend", default=[], type=_dtype,
            help="of x and of what has none of its own, such as bfloat16 or bf16",
        )  # fmt: skip
        made.add_argument(
            "--hidden", nargs="+", action="extend", default=[], type=int,
            help="columns of a row; `warmup` needs none for add, and for activations without row_scaling",
        )  # fmt: skip
        made.add_argument("--manifest", metavar="FILE", help="what a run has written under TRANSFORMER_RTC_RECORD")
        made.add_argument(
            "--argument", nargs="+", action="extend", default=[], metavar="NAME=VALUE",
            help="what a call gives besides: true, false, none or a data type",
        )  # fmt: skip
        made.add_argument("--per-head", action="store_true", help="each head has a weight of its own")

    made = command(commands, "warmup", "compile what is missing, before it is asked for", "warmup")
    described(made)
    made.add_argument("--architecture", nargs="+", action="extend", help="such as sm_90; by default this GPU's")
    made.add_argument("--sm-margin", action="store_true", help="calls leave multiprocessors free")
    made.add_argument("--whole-rows", action="store_true", help="no kernels for unaligned rows beside a call's own")
    made.add_argument("--tuning", metavar="FILE", help="what `tune` has written on the device that this is for")
    made.add_argument("--threads", type=int, metavar="N", help="compiles at a time; by default one for each core")
    made.add_argument("--quiet", action="store_true", help="show no progress")

    made = command(commands, "tune", "measure configurations on this GPU, and keep the faster ones", "tune")
    described(made)
    made.add_argument(
        "--minutes", type=_number_of("minutes"), default=3.0, help="no measurement begins after so many; 3 by default"
    )
    made.add_argument("--again", action="store_true", help="measure what is in the file, too")
    made.add_argument("--output", metavar="FILE", help="the tuning file; by default this GPU's, beside the disk cache")
    made.add_argument("--quiet", action="store_true", help="show no progress")

    text = "look at the disk cache, and tidy it up"
    caches = commands.add_parser("cache", help=text, description=f"L{text[1:]}.", **formatted("cache"))
    actions = caches.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (
        ("list", "print every entry"),
        ("show", "print what entries say of themselves"),
        ("verify", "check every entry, and delete what killed writers left; exit with 1 if one is damaged"),
        ("prune", "delete what is damaged, what killed writers left, and what is beyond the cache's size"),
        ("clear", "delete every entry"),
        ("pack", "write every entry into one file"),
        ("unpack", "put a pack's entries into the cache; from those only whose code you would run"),
    ):
        made = command(actions, name, text, "cache")
        made.add_argument("--folder", help="the cache's folder; by default TRANSFORMER_RTC_CACHE_DIR's")
        if name == "show":
            made.add_argument("name", help="how the entries' names start")
        if name in ("pack", "unpack"):
            made.add_argument("file", help="the pack")
        if name == "prune":
            made.add_argument("--max-size", type=_bytes, metavar="BYTES", help="of what stays, such as 500M")
            made.add_argument(
                "--unused-days", type=_number_of("days"), metavar="DAYS", help="delete what was not used for so long"
            )

    made = command(commands, "compile", "compile a kernel of your own, and print what it takes", "compile")
    made.add_argument("file", metavar="FILE.cu", help="CUDA C++; it may include headers")
    made.add_argument("--symbol", required=True, help='the name of its extern "C" __global__ function')
    made.add_argument("--architecture", help="such as sm_90; by default this GPU's")
    made.add_argument(
        "--field", nargs="+", action="extend", default=[], metavar="NAME:TYPE",
        help="of the struct Params: pointer, int64, int32, uint32 or float32",
    )  # fmt: skip
    made.add_argument(
        "-I", "--include", action="append", default=[], metavar="FOLDER",
        help="where its headers are looked for, after its own folder; once for each folder",
    )  # fmt: skip
    made.add_argument("--option", action="append", default=[], help="for NVRTC, such as --option=-lineinfo")
    made.add_argument("--output", metavar="FILE", help="where to write the cubin")
    return root
