# SPDX-License-Identifier: Apache-2.0
"""The command line: ``transformer-rtc``, or ``python3 -m transformer_rtc``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from . import _native, archive, cli_compile, cli_parser, info, progress, tuner
from .cache import DiskCache
from .cache_entry import Entry
from .cli_output import Failure, emit, size_text, table
from .device import device_of
from .errors import ArgumentError, SettingsError, TransformerRtcError, choices
from .kernel_manager import manager
from .manifest import request_fields
from .settings import settings
from .tuning import file_for
from .warming import WarmupRecord, argument_names, record_line, requests_of, warmup

__all__ = ["main"]


# ---- demo, info, warmup ---------------------------------------------------------------------------------------------


def _demo(arguments: argparse.Namespace) -> int:
    from . import demo

    return demo.run(arguments.json)


def _info(arguments: argparse.Namespace) -> int:
    found = info.gather()
    emit(arguments, found, info.lines(found))
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
        if name not in argument_names():
            raise ArgumentError(f"--argument has {name}{choices(name, sorted(argument_names()))}")
        found[name] = words.get(value.lower(), cli_parser.spelt_out(value))
    return found


def _shown_of(
    arguments: argparse.Namespace,
    unit: str,
    to_stderr: Callable[[Any], str],
    to_stdout: Callable[[Any], str],
    header: Sequence[str] = (),
) -> tuple[Callable[[Any, int, int], None] | None, bool]:
    """Return what shows each record when it is made, and whether that was its line of the result, too."""
    if arguments.quiet:
        return None, False
    if arguments.json or progress.has_bar():
        return progress.shown(unit, to_stderr), False

    def show(record: Any, done: int, total: int) -> None:
        if record is not None:
            for line in (*(header if done == 1 else ()), to_stdout(record)):
                print(line, flush=True)

    return show, True


def _warmup(arguments: argparse.Namespace) -> int:
    given = _named_arguments(arguments.argument)
    told_of, is_told = _shown_of(arguments, "kernel", record_line, _record_line, [_RECORD_HEADER])
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
        progress=told_of or False,
        **given,
    )
    statuses = ("compiled", "cached", "missing", "failed")
    counts = {status: sum(record.status == status for record in records) for status in statuses}
    kept = counts["compiled"] == 0 or manager.cache.writable
    found = {"records": [record._asdict() for record in records], **counts, "kept": kept}
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    if not kept:
        where = manager.cache.folder or "a cache: there is no folder"
        found["error"] = f"what was compiled could not be kept in {where}"
    emit(arguments, found, [*([] if is_told else [_RECORD_HEADER, *map(_record_line, records)]), summary])
    if not kept and not arguments.json:
        print(f"transformer-rtc: {found['error']}", file=sys.stderr)
    return 1 if counts["missing"] or counts["failed"] or not kept else 0


def _tune(arguments: argparse.Namespace) -> int:
    given = _named_arguments(arguments.argument)
    described = (arguments.operator, arguments.dtype, arguments.hidden)
    requests = requests_of(*described, manifest=arguments.manifest, per_head=arguments.per_head, **given)
    path = arguments.output or file_for(device_of(_native.current_device()).product)
    told_of, is_told = _shown_of(arguments, "request", tuner.sentence, tuner.sentence)
    records, left = tuner.tune(requests, _native.current_device(), path, arguments.minutes, arguments.again, told_of)
    found = {"file": path, "records": list(map(tuner.document, records)), "left": list(map(request_fields, left))}
    faster = sum(record.row is not None and record.row.config is not None for record in records)
    told = [
        *([] if is_told else map(tuner.sentence, records)),
        f"{faster} of {len(records)} are faster by a row of {path}",
    ]
    told += [f"{len(left)} were not measured in {arguments.minutes:g} minutes: run the command again"] if left else []
    emit(arguments, found, told)
    return 1 if any(record.problem for record in records) else 0


_RECORD_HEADER = f"{'status':8s}  {'time':>11s}  {'for':6s}  kernel"


def _record_line(record: WarmupRecord) -> str:
    error = record.error.strip().partition("\n")[0]
    return f"{record.status:8s}  {record.milliseconds:8.1f} ms  {record.architecture:6s}  {record.symbol}" + (
        f": {error}" if error else ""
    )


# ---- cache ----------------------------------------------------------------------------------------------------------


def _cache_of(arguments: argparse.Namespace) -> DiskCache:
    if arguments.folder is not None:
        return DiskCache(os.path.abspath(arguments.folder))
    settings.check()
    if manager.cache.folder is None:
        raise SettingsError("there is no disk cache: TRANSFORMER_RTC_CACHE_DIR is empty; --folder names one")
    return manager.cache


def _entry_document(entry: Entry) -> dict[str, Any]:
    known = entry.about or {}
    return {
        "name": entry.name,
        **{name: known.get(name) or None for name in ("symbol", "target", "kind", "compiler", "version", "key")},
        "bytes": entry.bytes,
        "used": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.used)),
        "damaged": entry.about is None,
    }


_ENTRY_HEADERS = (">size", "last used", "entry", "what it is")


def _entry_cells(entry: Entry) -> tuple[str, ...]:
    known = entry.about or {}
    compiler = known.get("version") or known.get("compiler", "")
    what = f"{known.get('kind', '')} by {compiler}" if entry.about else "damaged"
    return size_text(entry.bytes), time.strftime("%Y-%m-%d", time.gmtime(entry.used)), entry.name, what


def _readable_cache_of(arguments: argparse.Namespace) -> DiskCache:
    """Return the cache, whose entries can be read: else they would be taken for damaged."""
    cache = _cache_of(arguments)
    if arguments.folder is not None and not os.path.isdir(cache.folder or ""):
        raise Failure(f"there is no folder {cache.folder}")
    if reason := cache.refusal():
        raise Failure(f"the folder {cache.folder} is not used: {reason}")
    return cache


def _existing_cache_of(arguments: argparse.Namespace) -> DiskCache:
    cache = _readable_cache_of(arguments)
    if not os.path.isdir(cache.folder or ""):
        raise Failure(f"there is no folder {cache.folder}")
    return cache


def _list(arguments: argparse.Namespace) -> int:
    cache = _readable_cache_of(arguments)
    found, told = _listed(cache.folder, cache.entries())
    found["read_only"] = None
    if folder := cache.read_only:
        reason = folder.refusal() if os.path.isdir(folder.path) else "it is not there"
        found["read_only"], more = _listed(folder.path, [] if reason else folder.entries())
        told += [*more[:-1], f"{more[-1]}, which is only read" + (f" and is not used: {reason}" if reason else "")]
    emit(arguments, found, told)
    return 0


def _listed(folder: str | None, entries: Sequence[Entry]) -> tuple[dict[str, Any], list[str]]:
    total = sum(entry.bytes for entry in entries)
    return {"folder": folder, "bytes": total, "entries": list(map(_entry_document, entries))}, [
        *table(_ENTRY_HEADERS, list(map(_entry_cells, entries))),
        f"{len(entries)} entries, {size_text(total)} in {folder}",
    ]


def _show(arguments: argparse.Namespace) -> int:
    cache = _cache_of(arguments)
    entries = [entry for entry in cache.entries() if entry.name.startswith(arguments.name)]
    if not entries:
        raise Failure(f"no entry's name in {cache.folder} starts with {arguments.name!r}")
    documents = [_entry_document(entry) | {"path": os.path.join(cache.folder or "", entry.name)} for entry in entries]
    told = []
    for document in documents:
        shown = {"size" if name == "bytes" else name: value for name, value in document.items()}
        shown["size"] = size_text(document["bytes"])
        told += [f"{name:9s} {value}" for name, value in shown.items() if value is not None] + [""]
    emit(arguments, {"entries": documents}, told[:-1])
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    cache = _existing_cache_of(arguments)
    removed = _remove_abandoned(cache)
    entries = cache.entries()
    damaged = [entry.name for entry in entries if entry.about is None]
    emit(
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
    cache = _readable_cache_of(arguments)
    removed = _remove_abandoned(cache)
    removed += [entry.name for entry in cache.entries() if entry.about is None and cache.remove(entry.name)]
    seconds = None if arguments.unused_days is None else arguments.unused_days * 86400.0
    removed += cache.prune(arguments.max_size, seconds)
    return _tell_removed(arguments, cache, removed)


def _clear(arguments: argparse.Namespace) -> int:
    cache = _readable_cache_of(arguments)
    return _tell_removed(arguments, cache, cache.clear())


def _tell_removed(arguments: argparse.Namespace, cache: DiskCache, removed: list[str]) -> int:
    left, size = cache.size()
    emit(
        arguments,
        {"folder": cache.folder, "removed": removed, "entries": left, "bytes": size},
        [*(f"removed {name}" for name in removed), f"{len(removed)} removed; {left} entries, {size_text(size)} stay"],
    )
    return 0


def _pack(arguments: argparse.Namespace) -> int:
    packed, left_out = archive.pack(_existing_cache_of(arguments), arguments.file)
    emit(
        arguments,
        {"file": arguments.file, "packed": packed, "left_out": left_out},
        [
            *(f"left out {name}: {reason}" for name, reason in left_out.items()),
            f"{len(packed)} entries in {arguments.file}",
        ],
    )
    return 0


def _unpack(arguments: argparse.Namespace) -> int:
    cache = _cache_of(arguments)
    try:
        with open(arguments.file, "rb"):
            pass
    except OSError as error:
        raise ArgumentError(f"{arguments.file} cannot be read: {error}") from error
    added, kept = archive.unpack(cache, arguments.file)
    emit(
        arguments,
        {"folder": cache.folder, "added": added, "kept": kept},
        [f"{len(added)} entries added to {cache.folder}, {len(kept)} were there"],
    )
    return 0


# ---- main -----------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    actions = (("list", _list), ("show", _show), ("verify", _verify), ("prune", _prune), ("clear", _clear),
               ("pack", _pack), ("unpack", _unpack))  # fmt: skip
    return cli_parser.parser(
        {"demo": _demo, "info": _info, "warmup": _warmup, "tune": _tune, "compile": cli_compile.run}
        | {f"cache {name}": run for name, run in actions}
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    arguments : sequence of str, optional
        Those of the process by default.

    Returns
    -------
    int
        As `cli_parser.EXITS` says. A failure is told on stderr, or by one JSON document on stdout.
    """
    texts = sys.argv[1:] if arguments is None else list(arguments)
    as_json = "--json" in texts

    def failed(error: BaseException, told: str, line: str) -> None:
        if as_json:
            print(json.dumps({"error": told, "type": type(error).__name__}, indent=2))
        elif line:
            print(line, file=sys.stderr)

    try:
        given = _parser().parse_args(texts)
        code: int = given.run(given)
        sys.stdout.flush()
    except cli_parser.Misuse as error:
        failed(error, str(error), f"{error.usage}{error}")
        return 2
    except (TransformerRtcError, Failure) as error:
        cause = (isinstance(error, Failure) and error.error) or error
        told = cli_parser.told_of(error) if isinstance(error, TransformerRtcError) else str(error)
        failed(cause, told, f"transformer-rtc: {told}")
        return 2 if isinstance(cause, ArgumentError) else 1
    except KeyboardInterrupt as error:
        failed(error, "interrupted", "")
        return 130
    except BrokenPipeError:  # as by head: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code
