# SPDX-License-Identifier: Apache-2.0
"""Times the providers of bandwidth.py's cases."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import common
import transformer_engine_text
from bandwidth_arrays import Arrays, Expected, check, expected, make_arrays
from bandwidth_cases import Case, cases, model_cases, typed_cases
from bandwidth_providers import (
    COMPILED,
    COPIES,
    COPY,
    OURS,
    TE_KERNELS,
    TORCH,
    Bind,
    Call,
    Maker,
    UnsupportedError,
    available,
    has_te_kernels,
    reason,
)
from tqdm import tqdm

WARM_UP = 3
AWAKE = 1500  # flushes before anything is measured: a third of a second, in which an idle GPU raises its clocks
# So large a flush hides what the host needs to put a launch, or autograd's several, on the stream.
FLUSH_BYTES = 1 << 30
GRAPH_CALLS = 20
GRAPH_REPLAYS = 50


class Provided:
    """The providers of a case, but for those that fail."""

    def __init__(self, torch: Any, case: Case, makers: Mapping[str, Maker]) -> None:
        self._torch, self._case = torch, case
        self._binds: dict[str, Bind] = {}
        self.failures: dict[str, str] = {}
        for name, make in makers.items():
            if name != COMPILED or case.compiled:
                try:
                    self._binds[name] = make(torch, case)
                except UnsupportedError:
                    continue
                except Exception as error:  # a peer may refuse a case in any way
                    self.failures[name] = reason(error)

    def calls(self, arrays: Arrays, wanted: Expected | None = None) -> dict[str, Call]:
        """Return each provider's call; with `wanted`, only of those whose results are right."""
        found: dict[str, Call] = {}
        for name, bind in list(self._binds.items()):
            try:
                call = bind(arrays)
                problem = None
                if wanted is not None and name.startswith(COPY):
                    call()
                    self._torch.cuda.synchronize()
                elif wanted is not None:
                    problem = check(self._torch, call, self._case, arrays, wanted)
            except Exception as error:
                problem = reason(error)
            if problem:
                self.failures[name] = problem
                del self._binds[name]
            else:
                found[name] = call
        return found


def measure(
    torch: Any, case: Case, makers: Mapping[str, Maker], placements: int, repetitions: int, flush: common.L2Flush
) -> dict[str, Any]:
    provided = Provided(torch, case, {**makers, **COPIES})
    measured: list[dict[str, Any]] = []
    held = []
    for placement in range(placements):
        arrays = make_arrays(torch, case)
        calls = provided.calls(arrays, expected(torch, case, arrays) if placement == 0 else None)
        common.time_rotated(torch, calls, WARM_UP, flush)
        times = common.time_rotated(torch, calls, repetitions, flush)
        measured.append({name: common.spread(values) for name, values in times.items()})
        # Keeps this placement's inputs, and takes the memory its outputs had: the next one is elsewhere.
        held.append((arrays, torch.empty_like(arrays.read[0])))
    return {"us_by_placement": measured, "failures": provided.failures}


def measure_small(torch: Any, case: Case, makers: Mapping[str, Maker]) -> dict[str, Any]:
    """Return device us per call of a captured graph's replays."""
    provided = Provided(torch, case, makers)
    arrays = make_arrays(torch, case)
    replays: dict[str, Call] = {}
    graphs = []
    for name, call in provided.calls(arrays, expected(torch, case, arrays)).items():
        for _ in range(WARM_UP):
            call()
        torch.cuda.synchronize()
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(GRAPH_CALLS):
                    call()
            graph.replay()
            torch.cuda.synchronize()
        except Exception as error:
            provided.failures[name] = reason(error)
            continue
        graphs.append(graph)
        replays[name] = graph.replay
    times = common.time_rotated(torch, replays, GRAPH_REPLAYS, lambda _: torch.cuda.synchronize())
    per_call = {name: common.spread([time / GRAPH_CALLS for time in values]) for name, values in times.items()}
    return {"us_by_placement": [per_call], "failures": provided.failures}


def measure_all(torch: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    placements, repetitions = (1, 8) if arguments.quick else (2, 20)
    makers, absent = available(torch, arguments.compile, arguments.transformer_engine)
    flush = common.L2Flush(torch, FLUSH_BYTES)
    for value in range(AWAKE):
        flush(value)
    environment = common.environment()
    if arguments.transformer_engine:
        environment["versions"][TE_KERNELS] = transformer_engine_text.version(arguments.transformer_engine)
    result: dict[str, Any] = {
        "environments": [environment],
        "placements": placements,
        "repetitions": repetitions,
        "absent": absent,
        "cases": [],
    }
    if arguments.models or arguments.types:
        makers = {name: make for name, make in makers.items() if name in (OURS, TORCH, TE_KERNELS)}
    choose = model_cases if arguments.models else typed_cases if arguments.types else cases
    found = choose(arguments.only, arguments.dtype)
    if arguments.transformer_engine:
        major, minor = torch.cuda.get_device_capability()
        wanted = [(case.operator, case.dtype, case.hidden) for case in found if has_te_kernels(case)]
        transformer_engine_text.compile_at_once(arguments.transformer_engine, wanted, 10 * major + minor)
    progress = tqdm(found, desc="bandwidth", unit="case")
    for case in progress:
        progress.set_postfix_str(f"{case.operator} {case.dtype} {case.shape}")
        broken = False
        try:
            if case.kind == "small":
                measured = measure_small(torch, case, makers)
            else:
                measured = measure(torch, case, makers, placements, repetitions, flush)
        except Exception as error:  # such as of memory: the next case may well fit
            measured = {"us_by_placement": [], "failures": {"the case": reason(error)}}
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception as error:  # a kernel has failed, and this process can launch no more
            measured["failures"]["the process"] = reason(error)
            broken = True
        result["cases"].append({"case": case._asdict(), **measured})
        common.write_json(arguments.json, result)
        if broken:
            break
    return result
