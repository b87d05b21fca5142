# SPDX-License-Identifier: Apache-2.0
"""Bandwidth of the operators, beside the best copy of the run and every peer that can be imported.

GB/s counts each input read once and each output written once, the weights and their gradients included and one number a
row not; of a causal matrix, what is excluded is written and not read. The ceiling is the best copy with as many arrays
of rows read and written: torch's, or a kernel that only streams. Every provider allocates its outputs; a backward call
is given the statistics of the forward one where it takes them.

The L2 is flushed before every launch and providers are rotated. Bandwidth depends on where arrays lie, so all of it is
repeated at several placements; a provider's figure, and a copy's, is the median at its best one. Small batches are
timed inside a captured graph, where the L2 is warm.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import common
import transformer_engine_text
from bandwidth_arrays import TOLERANCES
from bandwidth_cases import OPERATORS, PLAIN, SHAPES, model_cases, typed_cases
from bandwidth_providers import OURS, STATIC
from bandwidth_report import joined, report
from bandwidth_timing import measure_all

EXAMPLES = """examples:
  python3 benchmarks/bandwidth.py --compile --json bandwidth.json --plot bandwidth.png
  python3 benchmarks/bandwidth.py --quick --only rms_norm_backward,layer_norm_backward --dtype bfloat16
  python3 benchmarks/bandwidth.py --quick --models --json models.json
  python3 benchmarks/bandwidth.py --quick --types
  python3 benchmarks/bandwidth.py --quick --compile --transformer-engine ../TransformerEngine --json all.json
  python3 benchmarks/bandwidth.py --from-json bf16.json fp32.json --plot both.png   # measures nothing: two runs as one
"""


def one_of(known: Mapping[str, str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        wrong = [name for name in text.split(",") if name not in known]
        if wrong:
            raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: not of {', '.join(known)}")
        return list(dict.fromkeys(known[name] for name in text.split(",")))

    return parse


def te_checkout(text: str) -> Path:
    folder = Path(text).resolve()
    try:
        transformer_engine_text.choose(folder, "rms_norm", "bfloat16", SHAPES[0][1])
    except transformer_engine_text.CheckoutError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    operators = one_of({name: name for name in OPERATORS})
    dtypes = one_of({"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"})
    parser.add_argument(
        "--only", type=operators, default=list(OPERATORS), metavar="NAME[,NAME]", help="operators; default: all"
    )
    parser.add_argument(
        "--dtype", type=dtypes, default=list(TOLERANCES), metavar="NAME[,NAME]", help="bf16, fp32; default: both"
    )
    parser.add_argument(
        "--models",
        action="store_true",
        help="sizes of well-known models and odd lengths instead, beside torch and --transformer-engine",
    )
    parser.add_argument(
        "--types", action="store_true", help="y of other types than x, and dresidual, instead, beside torch alone"
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, at one placement")
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile too, on a few shapes: a minute or two more"
    )
    parser.add_argument(
        "--transformer-engine",
        type=te_checkout,
        metavar="FOLDER",
        help="the norm kernels of this checkout of NVIDIA/TransformerEngine too, compiled by NVRTC",
    )
    parser.add_argument("--json", metavar="FILE", help="write every median and spread there")
    parser.add_argument("--plot", metavar="FILE", help="draw the ratio to the ceiling; needs matplotlib")
    parser.add_argument(
        "--from-json",
        nargs="+",
        metavar="FILE",
        help="report on what runs with --json wrote, a later one's cases instead of an earlier one's; measure nothing",
    )
    arguments = parser.parse_args()
    if arguments.from_json:
        runs = [json.loads(Path(file).read_text(encoding="utf-8")) for file in arguments.from_json]
        report(joined(runs), arguments.plot)
        return
    if arguments.models + arguments.types + arguments.compile > 1:
        parser.error("--models, --types, --compile: each measures other cases or peers; one of them")
    if arguments.models and not model_cases(arguments.only, arguments.dtype):
        parser.error(f"--models has no case of {', '.join(arguments.only)}: of {', '.join(PLAIN)}")
    if arguments.types and not typed_cases(arguments.only, arguments.dtype):
        parser.error(f"--types has no case of {', '.join(arguments.only)}: of {', '.join(PLAIN[:4])}")
    torch = common.torch_on_gpu()
    with torch.no_grad():
        result = measure_all(torch, arguments)
    report(result, arguments.plot)
    if any(
        name in found["failures"] for found in result["cases"] for name in (OURS, STATIC, "the case", "the process")
    ):
        sys.exit(1)


if __name__ == "__main__":
    main()
