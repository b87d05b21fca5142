"""The command line: ``transformer-rtc``, or ``python3 -m transformer_rtc``."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from . import _native, archive, compiler, info, progress, sources, tuner
from .cache import DiskCache
from .cache_entry import Entry
from .device import device_limits, device_of
from .errors import ArgumentError, SettingsError, TransformerRtcError
from .kernel_manager import manager
from .manifest import request_fields
from .settings import parse_bytes
from .spec import Field, TextSpec
from .tuning import file_for
from .version import __version__
from .warming import WarmupRecord, argument_names, requests_of, warmup

__all__ = ["main"]

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
""",
}


class _Failure(Exception):
    """What the command line itself finds wrong."""


def _emit(arguments: argparse.Namespace, document: object, lines: Sequence[str]) -> None:
    if arguments.json:
        print(json.dumps(document, indent=2))
    else:
        for line in lines:
            print(line)


# ---- demo, info, warmup ---------------------------------------------------------------------------------------------


def _demo(arguments: argparse.Namespace) -> int:
    from . import demo

    return demo.run(arguments.json)


def _info(arguments: argparse.Namespace) -> int:
    found = info.gather()
    _emit(arguments, found, info.lines(found))
    return 1 if found["missing"] else 0


def _named_arguments(texts: Sequence[str]) -> dict[str, object]:
    words = {"true": True, "false": False, "none": None}
    found: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ArgumentError(
                f"--argument is {text!r}; it takes name=value, such as return_rstd=true or weight=float32"
            )
        found[name] = words.get(value.lower(), value)
    return found


def _warmup(arguments: argparse.Namespace) -> int:
    given = _named_arguments(arguments.argument)
    for name in given.keys() - argument_names():
        raise ArgumentError(f"--argument has {name}; it takes {', '.join(sorted(argument_names()))}")
    records = warmup(
        arguments.operator,
        arguments.dtype,
        arguments.hidden,
        manifest=arguments.manifest,
        architectures=arguments.architecture,
        per_head=arguments.per_head,
        sm_margin=arguments.sm_margin,
        unaligned=not arguments.whole_rows,
        tuning=arguments.tuning,
        threads=arguments.threads,
        progress=not arguments.quiet,
        **given,
    )
    counts = {status: sum(record.status == status for record in records) for status in ("compiled", "cached", "failed")}
    kept = counts["compiled"] == 0 or manager.cache.writable
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    _emit(
        arguments,
        {"records": [record._asdict() for record in records], **counts, "kept": kept},
        [*(_record_line(record) for record in records), summary],
    )
    if not kept:
        raise _Failure(
            f"what was compiled could not be kept in {manager.cache.folder or 'a cache: there is no folder'}"
        )
    return 1 if counts["failed"] else 0


def _tune(arguments: argparse.Namespace) -> int:
    given = _named_arguments(arguments.argument)
    described = (arguments.operator, arguments.dtype, arguments.hidden)
    requests = requests_of(*described, manifest=arguments.manifest, per_head=arguments.per_head, **given)
    path = arguments.output or file_for(device_of(_native.current_device()).product)
    told_of = None if arguments.quiet else progress.shown("request", tuner.sentence)
    records, left = tuner.tune(requests, _native.current_device(), path, arguments.minutes, arguments.again, told_of)
    found = {"file": path, "records": list(map(tuner.document, records)), "left": list(map(request_fields, left))}
    faster = sum(record.row is not None and record.row.config is not None for record in records)
    told = [*map(tuner.sentence, records), f"{faster} of {len(records)} are faster by a row of {path}"]
    told += [f"{len(left)} were not measured in {arguments.minutes:g} minutes: run the command again"] if left else []
    _emit(arguments, found, told)
    return 1 if any(record.problem for record in records) else 0


def _record_line(record: WarmupRecord) -> str:
    error = record.error.strip().partition("\n")[0]
    return f"{record.status:8s} {record.milliseconds:8.1f} ms  {record.architecture:6s} {record.symbol}" + (
        f": {error}" if error else ""
    )


# ---- cache ----------------------------------------------------------------------------------------------------------


def _cache_of(arguments: argparse.Namespace) -> DiskCache:
    if arguments.folder is not None:
        return DiskCache(os.path.abspath(arguments.folder))
    if manager.cache.folder is None:
        raise SettingsError("there is no disk cache: TRANSFORMER_RTC_CACHE_DIR is empty; --folder names one")
    return manager.cache


def _entry_document(entry: Entry) -> dict[str, Any]:
    known = entry.about or {}
    return {
        "name": entry.name,
        **{name: known.get(name) for name in ("symbol", "target", "kind", "compiler", "key")},
        "bytes": entry.bytes,
        "used": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.used)),
        "damaged": entry.about is None,
    }


def _entry_line(entry: Entry) -> str:
    known = entry.about or {}
    what = f"{known.get('kind', '')} by {known.get('compiler', '')}" if entry.about else "damaged"
    day = time.strftime("%Y-%m-%d", time.gmtime(entry.used))
    return f"{entry.bytes:10d}  {day}  {entry.name}  {what}"


def _list(arguments: argparse.Namespace) -> int:
    cache = _cache_of(arguments)
    entries = cache.entries()
    total = sum(entry.bytes for entry in entries)
    _emit(
        arguments,
        {"folder": cache.folder, "bytes": total, "entries": [_entry_document(entry) for entry in entries]},
        [*map(_entry_line, entries), f"{len(entries)} entries, {total} bytes in {cache.folder}"],
    )
    return 0


def _show(arguments: argparse.Namespace) -> int:
    cache = _cache_of(arguments)
    entries = [entry for entry in cache.entries() if entry.name.startswith(arguments.name)]
    if not entries:
        raise _Failure(f"no entry's name in {cache.folder} starts with {arguments.name!r}")
    documents = [_entry_document(entry) | {"path": os.path.join(cache.folder or "", entry.name)} for entry in entries]
    told = []
    for document in documents:
        told += [f"{name:9s} {value}" for name, value in document.items() if value is not None] + [""]
    _emit(arguments, {"entries": documents}, told[:-1])
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    cache = _cache_of(arguments)
    removed = _remove_abandoned(cache)
    entries = cache.entries()
    damaged = [entry.name for entry in entries if entry.about is None]
    _emit(
        arguments,
        {"folder": cache.folder, "entries": len(entries), "damaged": damaged, "removed": removed},
        [
            *(f"removed {name}" for name in removed),
            *(f"damaged {name}" for name in damaged),
            f"{len(entries)} entries, {len(damaged)} damaged",
        ],
    )
    return 1 if damaged else 0


def _remove_abandoned(cache: DiskCache) -> list[str]:
    return [name for name in cache.abandoned() if cache.remove(name)]


def _prune(arguments: argparse.Namespace) -> int:
    cache = _cache_of(arguments)
    removed = _remove_abandoned(cache)
    removed += [entry.name for entry in cache.entries() if entry.about is None and cache.remove(entry.name)]
    seconds = None if arguments.unused_days is None else arguments.unused_days * 86400.0
    removed += cache.prune(arguments.max_size, seconds)
    return _tell_removed(arguments, cache, removed)


def _clear(arguments: argparse.Namespace) -> int:
    cache = _cache_of(arguments)
    return _tell_removed(arguments, cache, cache.clear())


def _tell_removed(arguments: argparse.Namespace, cache: DiskCache, removed: list[str]) -> int:
    left, size = cache.size()
    _emit(
        arguments,
        {"folder": cache.folder, "removed": removed, "entries": left, "bytes": size},
        [*(f"removed {name}" for name in removed), f"{len(removed)} removed; {left} entries, {size} bytes stay"],
    )
    return 0


def _pack(arguments: argparse.Namespace) -> int:
    cache = _cache_of(arguments)
    packed, left_out = archive.pack(cache, arguments.file)
    _emit(
        arguments,
        {"file": arguments.file, "packed": packed, "left_out": left_out},
        [
            *(f"left out {name}: damaged, or a module of the simulator" for name in left_out),
            f"{len(packed)} entries in {arguments.file}",
        ],
    )
    return 0


def _unpack(arguments: argparse.Namespace) -> int:
    cache = _cache_of(arguments)
    added, kept = archive.unpack(cache, arguments.file)
    _emit(
        arguments,
        {"folder": cache.folder, "added": added, "kept": kept},
        [f"{len(added)} entries added to {cache.folder}, {len(kept)} were there"],
    )
    return 0


# ---- compile --------------------------------------------------------------------------------------------------------


def _architecture(name: str | None) -> int:
    if name is None:
        return device_limits(_native.current_device()).architecture
    match = re.fullmatch(r"sm_(\d{2,3})", name, re.ASCII)
    if not match:
        raise ArgumentError(f"--architecture is {name!r}; it takes one such as sm_90")
    return int(match[1])


def _field(text: str) -> Field:
    name, _, kind = text.partition(":")
    return Field(name, kind)


def resources(log: str, symbol: str) -> dict[str, int]:
    """Return what the compiler's report says that a kernel takes; nothing where it does not mention it."""
    _, _, after = log.partition(f"Compiling entry function '{symbol}'")
    mine, _, _ = after.partition("Compiling entry function")
    patterns = {
        "registers": r"Used (\d+) registers",
        "static_shared_memory": r"(\d+) bytes smem",
        "stack": r"(\d+) bytes stack frame",
        "spill_stores": r"(\d+) bytes spill stores",
        "spill_loads": r"(\d+) bytes spill loads",
    }
    found = {name: re.search(pattern, mine) for name, pattern in patterns.items()}
    return {name: int(match[1]) if match else 0 for name, match in found.items()} if mine else {}


def _compile(arguments: argparse.Namespace) -> int:
    try:
        with open(arguments.file, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise _Failure(f"{arguments.file} cannot be read: {error}") from error
    spec = TextSpec(text, arguments.symbol, tuple(map(_field, arguments.field)), tuple(arguments.option))
    program = spec.program
    architecture = _architecture(arguments.architecture)
    start = time.perf_counter()
    made = compiler.compile_program(
        spec.symbol, program, sources.included(program), (*spec.options, compiler.REPORT), architecture
    )
    elapsed = (time.perf_counter() - start) * 1e3
    entries = re.findall(r"Compiling entry function '([^']+)'", made.log)
    if made.kind == "ptx":
        entries = re.findall(r"\.entry\s+(\w+)", made.image.decode(errors="replace"))
    if spec.symbol not in entries:
        which = ", ".join(entries) or "none"
        raise _Failure(f'{arguments.file} has no extern "C" __global__ {spec.symbol}; its entries are: {which}')
    if arguments.output:
        try:
            with open(arguments.output, "wb") as output:
                output.write(made.image)
        except OSError as error:
            raise _Failure(f"{arguments.output} cannot be written: {error}") from error
    document = {
        "symbol": spec.symbol,
        "architecture": f"sm_{architecture}",
        "kind": made.kind,
        "bytes": len(made.image),
        "milliseconds": elapsed,
        "compiler": made.compiler,
        **resources(made.log, spec.symbol),
        "output": arguments.output,
    }
    _emit(arguments, document, [f"{name:21s} {value}" for name, value in document.items() if value is not None])
    return 0


# ---- The parser -----------------------------------------------------------------------------------------------------


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


def _parser() -> argparse.ArgumentParser:
    def formatted(examples: str) -> dict[str, Any]:
        layout = argparse.RawDescriptionHelpFormatter
        return {"epilog": f"examples:{_EXAMPLES[examples].rstrip()}", "formatter_class": layout}

    parser = argparse.ArgumentParser(
        prog="transformer-rtc",
        description="Transformer norm, softmax and activation kernels, compiled by NVRTC the first time they are used.",
        **formatted(""),
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        to: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, examples: str | None = None
    ) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = to.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", **(formatted(examples) if examples else {})
        )
        made.set_defaults(run=run)
        made.add_argument("--json", action="store_true", help="print one JSON document")
        return made

    command(commands, "demo", _demo, "compile, run and check the operators at the shapes of well-known models")
    command(commands, "info", _info, "print what was found, what is missing, and the command that mends it", "info")

    def described(made: argparse.ArgumentParser) -> None:
        made.add_argument("operator", nargs="*", help="such as rms_norm")
        made.add_argument(
            "--dtype", nargs="+", action="extend", default=[], help="of x and of what has none of its own"
        )
        made.add_argument("--hidden", nargs="+", action="extend", default=[], type=int, help="columns of a row")
        made.add_argument("--manifest", metavar="FILE", help="what a run has written under TRANSFORMER_RTC_RECORD")
        made.add_argument(
            "--argument", nargs="+", action="extend", default=[], metavar="NAME=VALUE",
            help="what a call gives besides: true, false, none or a data type",
        )  # fmt: skip
        made.add_argument("--per-head", action="store_true", help="each head has a weight of its own")

    made = command(commands, "warmup", _warmup, "compile what is missing, before it is asked for", "warmup")
    described(made)
    made.add_argument("--architecture", nargs="+", action="extend", help="such as sm_90; by default this GPU's")
    made.add_argument("--sm-margin", action="store_true", help="calls leave multiprocessors free")
    made.add_argument("--whole-rows", action="store_true", help="no kernels for unaligned rows beside a call's own")
    made.add_argument("--tuning", metavar="FILE", help="what `tune` has written on the device that this is for")
    made.add_argument("--threads", type=int, metavar="N", help="compiles at a time; by default one for each core")
    made.add_argument("--quiet", action="store_true", help="show no progress")

    made = command(commands, "tune", _tune, "measure configurations on this GPU, and keep the faster ones", "tune")
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
    for name, run, text in (
        ("list", _list, "print every entry"),
        ("show", _show, "print what entries say of themselves"),
        ("verify", _verify, "check every entry, and delete what killed writers left; exit with 1 if one is damaged"),
        ("prune", _prune, "delete what is damaged, what killed writers left, and what is beyond the cache's size"),
        ("clear", _clear, "delete every entry"),
        ("pack", _pack, "write every entry into one file"),
        ("unpack", _unpack, "put a pack's entries into the cache; from those only whose code you would run"),
    ):
        made = command(actions, name, run, text, "cache")
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

    made = command(commands, "compile", _compile, "compile a kernel of your own, and print what it takes", "compile")
    made.add_argument("file", metavar="FILE.cu", help="CUDA C++; it may include this package's headers")
    made.add_argument("--symbol", required=True, help='the name of its extern "C" __global__ function')
    made.add_argument("--architecture", help="such as sm_90; by default this GPU's")
    made.add_argument(
        "--field", nargs="+", action="extend", default=[], metavar="NAME:TYPE",
        help="of the struct Params: pointer, int64, int32, uint32 or float32",
    )  # fmt: skip
    made.add_argument("--option", action="append", default=[], help="for NVRTC, such as --option=-lineinfo")
    made.add_argument("--output", metavar="FILE", help="where to write the cubin")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    arguments : sequence of str, optional
        Those of the process by default.

    Returns
    -------
    int
        0: it was done. 1: something failed, is missing or is damaged. 130: it was interrupted. Arguments that are none
        exit with 2.
    """
    given = _parser().parse_args(arguments)
    try:
        code: int = given.run(given)
        sys.stdout.flush()
    except (TransformerRtcError, _Failure) as error:
        print(f"transformer-rtc: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as by head: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code
