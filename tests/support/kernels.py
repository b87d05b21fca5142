# SPDX-License-Identifier: Apache-2.0
"""The one table of kernels that NVRTC compiles, and what a cubin and ptxas say of one."""

from __future__ import annotations

import functools
import heapq
import itertools
import json
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import kernel_cache
from add_checks import pairs, promoted
from cases import BACKWARD, CASES, Case, division_of, scaled_rows

from transformer_rtc import compiler, manifest, sources
from transformer_rtc.cache import digest
from transformer_rtc.declaration import MOST_COLUMNS, declaration_of
from transformer_rtc.errors import CompileError
from transformer_rtc.ops import shipped
from transformer_rtc.ops.activation import general as activation_general
from transformer_rtc.ops.activation.family import OPERATORS as ACTIVATIONS
from transformer_rtc.ops.arithmetic import general as arithmetic_general
from transformer_rtc.ops.general import GeneralKernel, general_program
from transformer_rtc.ops.norm import general as norm_general
from transformer_rtc.ops.softmax import general as softmax_general
from transformer_rtc.ops.softmax.config import BUCKETS, SoftmaxConfig
from transformer_rtc.request import LaunchRule, Request
from transformer_rtc.spec import (
    ARCHITECTURES,
    BFLOAT16,
    BOOL,
    FLOAT8_E4M3,
    FLOAT16,
    FLOAT32,
    INT8,
    STATIC_ARCHITECTURES,
    DeviceLimits,
    DType,
    KernelSpec,
    TextSpec,
)


class Kernel(NamedTuple):
    """A kernel that is compiled, how it is launched, and the device that it is for."""

    spec: KernelSpec
    rule: LaunchRule
    limits: DeviceLimits

    @property
    def name(self) -> str:
        return f"sm_{self.limits.architecture}-{self.spec.symbol}"


# ---- Calls whose kernels are compiled --------------------------------------------------------------------------------

_TUNED = ARCHITECTURES[90]  # what the rule was fitted to
_COMMON_SIZES = (
    *(256 << shift for shift in range(11)),
    *(576, 640, 768, 1152, 1536, 2304, 2560, 2880, 3072, 3584, 3840, 4608, 5120, 5376, 6144, 7168, 9216, 10240, 12288),
    *(13824, 14336, 18432, 20480, 25600, 28672, 30720, 49152, 57344, 73728, 98304, 139264, 196608),
)


def compiled_cases(architecture: int) -> Iterable[Case]:
    """Return an architecture's share of the cases, and one for every other way to divide a row."""
    limits, turn = ARCHITECTURES[architecture], list(STATIC_ARCHITECTURES).index(architecture)
    share = CASES[turn :: len(STATIC_ARCHITECTURES)]
    first = {division_of(case, limits): case for case in (*CASES[::-1], *share[::-1])}
    return dict.fromkeys((*share, *first.values()))


def call(operator: str, hidden: int, dtype: DType, column: DType | None = None, **others: Any) -> Case:
    """Return a call with rows of one type and all that belongs to the operator; backward of given statistics."""
    column = column or dtype
    bias, residual = column if "layer" in operator else None, dtype if "add" in operator else None
    if operator.endswith("backward"):
        given = {"dy": dtype, "dweight": column, "dbias": bias, "rstd": True, "mean": bias is not None}
    else:
        given = {"bias": bias, "residual": residual}
    return Case(4, hidden, dtype, column, dtype, operator=operator)._replace(**given | others)


def _common_rows() -> Iterator[Case]:
    """Yield calls with rows of powers of two, and of the widths of well-known models."""
    for hidden, dtype, norm in itertools.product(_COMMON_SIZES, (BFLOAT16, FLOAT32), ("rms_norm", "layer_norm")):
        yield call(norm, hidden, dtype, bias=None)
        yield call(f"add_{norm}", hidden, dtype)
        yield call(f"{norm}_backward", hidden, dtype)


def _scaled_rows() -> Iterator[Case]:
    """Yield calls with a scale for each row and columns of either type."""
    for case in scaled_rows():
        for column in (case.x, FLOAT32):
            yield case._replace(weight=column, bias=column if case.bias else None)


def _once_spilled() -> Iterator[Case]:
    """Yield calls of LayerNorm for which the compiler spilled before it was told of registers, and of long rows.

    First those that keep eight Vecs of the weight and bias on their way; then rows of so many bytes, or columns.
    """
    for hidden, dtype in ((4096, BFLOAT16), (16384, BFLOAT16), (65536, BFLOAT16), (8192, FLOAT32)):
        for weight, bias in itertools.product((None, BFLOAT16, FLOAT32), repeat=2):
            for operator in ("layer_norm", "add_layer_norm", "layer_norm_add"):
                yield call(operator, hidden, dtype, rstd=True, weight=weight, bias=bias)
    spilled = 5120, 7680, 11344, 15360, 18048, 23040, 24560, 27648, 32256, 43008, 86016, 139264, 147456, 172032
    for dtype in (BFLOAT16, FLOAT32):
        sizes = *(size // dtype.bytes for size in (2032, 80000, *spilled)), 73728, 139264, 147456
        for hidden, out, rstd in itertools.product(sizes, (FLOAT32, BFLOAT16, FLOAT8_E4M3), (False, True)):
            yield call("layer_norm", hidden, dtype, out=out, rstd=rstd)


def _edges() -> Iterator[tuple[Case, DeviceLimits]]:
    """Yield calls at the end of what fits."""
    # The longest rows whose statistics are found: six sums go from thread to thread in shared memory, or five from CTA
    # to CTA.
    for architecture, hidden, dtype, weight, residual in (
        (80, 10081, BFLOAT16, FLOAT32, BFLOAT16),
        (89, 9579, BFLOAT16, BFLOAT16, None),
        (90, 350001, BFLOAT16, FLOAT32, BFLOAT16),
        (120, 48001, FLOAT32, None, None),
        (90, 102400, FLOAT32, FLOAT32, FLOAT32),
    ):
        found = {"rstd": False, "mean": False, "weight": weight, "residual": residual}
        yield call("layer_norm_backward", hidden, dtype, FLOAT32, **found), ARCHITECTURES[architecture]
    # Rows that no CTAs hold with their sums.
    for dtype, weight in ((FLOAT16, FLOAT16), (FLOAT32, FLOAT32), (BFLOAT16, FLOAT32)):
        for operator in BACKWARD:
            yield call(operator, 524288, dtype, weight, rstd=False, mean=False, dbias=None), _TUNED
    # A small GPU, or a part of one: a plan is made again with half as many CTAs until they are resident.
    for hidden, most in itertools.product((40000, 524288, 1048577), (8, 4, 2, 1)):
        few = ARCHITECTURES[80]._replace(max_ctas_per_row=most)
        yield call("rms_norm", hidden, FLOAT32), few
        yield call("layer_norm_backward", hidden, FLOAT32, rstd=False, mean=False, dbias=None), few
    # A part of a GPU may hold no cluster, or only smaller ones: an operator falls back to a cooperative launch.
    for cluster, ctas in ((1, 2), (1, 4), (1, 8), (1, 16), (8, 8), (4, 4), (2, 2)):
        part, shared = _TUNED._replace(max_cluster_size=cluster), {}
        for case in CASES:
            if case.specialise(part)[1].ctas_per_row == ctas:
                shared.setdefault((division_of(case, part), case.x.bytes), case)
        yield from ((case, part) for case in shared.values())


def calls(architecture: int) -> Iterator[tuple[Case, DeviceLimits]]:
    """Yield every call of a norm whose kernels are compiled for an architecture, and the device or a part of one."""
    limits = ARCHITECTURES[architecture]
    found = list(compiled_cases(architecture))
    if limits is _TUNED:
        found += [*CASES, *_common_rows(), *_once_spilled(), *_scaled_rows()]
    else:
        found += [case for case in _scaled_rows() if case.hidden <= 8192 and case.weight is FLOAT32]
    yield from ((case, limits) for case in found)
    yield from (edge for edge in _edges() if edge[1].architecture == architecture)


def softmax_requests() -> list[Request]:
    """Return one for each bucket, direction and type, and the options in turn."""
    flags = [frozenset(), frozenset({"causal"}), frozenset({"mask_keeps"}), frozenset({"causal", "mask_keeps"})]
    drawn = itertools.cycle(
        {"mask": mask, "sink": sink, "lse": lse}
        for mask, sink, lse in itertools.product((None, BOOL, FLOAT32, BFLOAT16), (None, FLOAT16), (None, FLOAT32))
    )
    found = []
    for number, (name, columns, dtype) in enumerate(
        itertools.product(("softmax", "log_softmax"), BUCKETS, (FLOAT32, BFLOAT16))
    ):
        none = {"mask": None, "sink": None, "lse": None}
        found.append(Request(name, {"x": dtype, "out": dtype, **none}, columns, False, False))
        options, out = next(drawn), (FLOAT32, FLOAT16, BFLOAT16)[number % 3]
        kept = flags[number % 4] if options["mask"] is BOOL else flags[number % 2]
        found.append(Request(name, {"x": dtype, "out": out, **options}, columns, False, False, kept))
        given = {"dy": dtype, "y": dtype, "out": dtype, "sink": None, "lse": None, "dsink": None, "dmask": None}
        if number % 3 == 0:
            given |= {"sink": FLOAT16, "lse": FLOAT32, "dsink": FLOAT16}
        if number % 3 == 1 or number % 6 == 0:
            given |= {"mask": out, "dmask": out}
        found.append(Request(f"{name}_backward", given, columns, False, False, flags[number // 2 % 2]))
        given |= {"out": out, "dy": (FLOAT32, FLOAT16, BFLOAT16)[number // 2 % 3] if given["dmask"] else dtype}
        found.append(Request(f"{name}_backward", given, columns, False, False, flags[number % 2]))
    return found


def activation_requests() -> list[Request]:
    """Return one for each operator and type, with the options in turn."""
    found = []
    both = [frozenset[str](), frozenset({"approximate"})]
    kinds = [(name, flags) for name, of in ACTIVATIONS.items() for flags in both[: 1 + (of.function == "gelu")]]
    for number, ((name, flags), columns, dtype) in enumerate(
        itertools.product(kinds, (1024, 40_000), (FLOAT32, BFLOAT16, FLOAT16))
    ):
        of = ACTIVATIONS[name]
        up = dtype if of.gated and number % 3 else None
        dtypes: dict[str, DType | None] = {"x": dtype, **({"up": up} if of.gated else {})}
        if of.backward:
            dtypes = {"dy": dtype, **dtypes, "out": dtype, **({"dup": up} if of.gated else {})}
            found.append(Request(name, dtypes, columns, False, False, flags))
            continue
        none = {"scale": None, "amax": None, "scale_inv": None, **({"row_scale": None} if of.gated else {})}
        found.append(Request(name, {**dtypes, "out": dtype, **none}, columns, False, False, flags))
        scaled = {"scale": FLOAT32, "amax": FLOAT32, "scale_inv": FLOAT32}
        if of.gated and number % 2:
            scaled = {"row_scale": FLOAT32}
        out = (FLOAT8_E4M3, INT8)[number // 2 % 2]
        found.append(Request(name, {**dtypes, "out": out, **none, **scaled}, columns, False, False, flags))
    return found


def add_requests() -> list[Request]:
    """Return one for each of some types."""
    some = list(pairs())[::7]
    types = [{"x": x, "other": other, "out": out or promoted(x, other)} for x, other, out in some]
    return [Request("add", one, MOST_COLUMNS, False, False) for one in types]


def shipped_requests(architecture: int) -> list[Request]:
    """Return a request of each case that has a configuration of its own."""
    rows = shipped.rows_of(architecture).values()
    return [manifest.parse(json.dumps(row["request"])).request for row in rows]


def kernels_of(request: Request, limits: DeviceLimits) -> list[Kernel]:
    stages = declaration_of(request.operator).family.specialise(request, limits)
    return [Kernel(spec, rule, limits) for spec, rule in stages]


@functools.cache
def general_kernels() -> dict[str, tuple[KernelSpec, LaunchRule]]:
    """Return the kernels that are compiled when the package is built, each alone: whole modules take long."""
    families: tuple[tuple[str, dict[str, GeneralKernel], Iterable[Request]], ...] = (
        ("norm_general.cu", norm_general.kernels(), (case.request for case in CASES)),
        ("softmax_general.cu", softmax_general.KERNELS, softmax_requests()),
        ("activation_general.cu", activation_general.KERNELS, activation_requests()),
        ("arithmetic_general.cu", arithmetic_general.KERNELS, add_requests()),
    )
    found: dict[str, tuple[KernelSpec, LaunchRule]] = {}
    for source, kernels, requests in families:
        for request in requests:
            for (symbol, _), rule in declaration_of(request.operator).family.static(request):
                text = general_program(source, {symbol: kernels[symbol]})
                found[symbol] = TextSpec(text, symbol, kernels[symbol].params.fields), rule
    return found


@functools.cache
def table(architecture: int) -> tuple[Kernel, ...]:
    """Return every kernel that is compiled for an architecture once, whatever calls it."""
    limits, turn = ARCHITECTURES[architecture], list(STATIC_ARCHITECTURES).index(architecture)
    found = {}
    for case, part in calls(architecture):
        for spec, rule in case.stages(part):
            found.setdefault(spec.symbol, Kernel(spec, rule, part))
    for request in shipped_requests(architecture):
        for unaligned in (False, True):
            asked = request._replace(unaligned=unaligned)
            found |= {kernel.spec.symbol: kernel for kernel in kernels_of(asked, limits)}
    for request in (*activation_requests(), *add_requests())[turn :: len(STATIC_ARCHITECTURES)]:
        for unaligned in (False, True):
            asked = request._replace(unaligned=unaligned)
            found |= {kernel.spec.symbol: kernel for kernel in kernels_of(asked, limits)}
    # Not each on each: every other one on the architecture that the rule was fitted to.
    for number, request in enumerate(softmax_requests()[turn :: 2 if limits is _TUNED else len(STATIC_ARCHITECTURES)]):
        asked = request._replace(unaligned=number % 3 == 0)
        found |= {kernel.spec.symbol: kernel for kernel in kernels_of(asked, limits)}
    return *found.values(), *(Kernel(*general, limits) for general in general_kernels().values())


# ---- Which of them stand for the others ------------------------------------------------------------------------------

_NUMBERS = ("stages", "rows_per_pass", "ctas_per_row")
_MORE_THAN_ONE = ("chunks", "rows_per_cta")
_LAYOUT = ("unaligned", "clusters", "cluster", "grid", "chunked", "tiled", "persistent", "prefetched", *_NUMBERS)


def _call(program: str) -> tuple[str, str]:
    """Return the template that a kernel calls, and its arguments."""
    return re.search(r"trtc::(\w+)(?:<(.*)>)?\(params\)", program).groups("")


def template_of(spec: KernelSpec) -> str:
    return _call(spec.program)[0]


def _features(spec: KernelSpec) -> set[tuple[str, ...]]:
    """Return what a kernel's text makes of its template: how it divides a row, and every two of its other traits."""
    program = spec.program
    template, arguments = _call(program)
    text = program.lower()
    # A plain kernel's macros that are 1, or a template's traits that are true.
    flags = re.findall(r"#define (\w+) 1\n", text) or re.findall(r"(\w+) = true,", text)
    numbers = {name: int(value) for name, value in re.findall(r"(\w+) = (\d+),", text)}
    if not numbers:
        values = enumerate(re.sub(r"trtc::\w+|float", "", arguments).split(", "))
        return {(template, f"{place}: {value}") for place, value in values}
    layout = [name if name in flags else f"{name} {numbers[name]}" for name in _LAYOUT if name in (*flags, *numbers)]
    found = [*flags, *re.findall(r"using (?:input|output) = (?:.*8|float);", text)]
    found += [f"{name} {numbers[name]}" for name in _NUMBERS if name in numbers]
    found += [f"{name} > 1" for name in _MORE_THAN_ONE if numbers.get(name, 1) > 1]
    return {(template, *layout), *((template, *pair) for pair in itertools.combinations(found, 2))}


def covering(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Return few of them that have together whatever features they all have."""
    features = [_features(kernel.spec) for kernel in kernels]
    left, found = set().union(*features), []
    most = [(-len(of), number) for number, of in enumerate(features)]
    heapq.heapify(most)
    while left:
        _, number = heapq.heappop(most)
        new = len(features[number] & left)
        if most and new < -most[0][0]:
            heapq.heappush(most, (-new, number))
            continue
        found.append(kernels[number])
        left -= features[number]
    return found


# ---- What the compiler made of one -----------------------------------------------------------------------------------

INFO_MAX_THREADS, INFO_PARAMETER_BYTES = 0x05, 0x19  # EIATTR_* of a cubin's .nv.info sections
SPILLS = ("stack frame", "spill stores", "spill loads")
_CONSTANT_BASE = 352  # bytes of constant bank 0 before the parameters, on sm_80 and sm_89


def kernel_info(cubin: bytes) -> dict[str, dict[int, bytes]]:
    """Return the attributes of each kernel in a cubin, from its ELF sections .nv.info.<symbol>."""
    (sections_at,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, sections_at + i * size) for i in range(count)]
    names_at = sections[names_index][4]
    found = {}
    for name_at, _, _, _, offset, length in sections:
        start = names_at + name_at
        name = cubin[start : cubin.index(b"\0", start)].decode()
        if not name.startswith(".nv.info."):
            continue
        attributes, at = {}, offset
        while at < offset + length:
            form, attribute = cubin[at], cubin[at + 1]
            # Form 4 has a length and bytes; the others two bytes of value.
            extent = struct.unpack_from("<H", cubin, at + 2)[0] + 2 if form == 4 else 2
            attributes[attribute] = cubin[at + 4 : at + 2 + extent] if form == 4 else cubin[at + 2 : at + 4]
            at += 2 + extent
        found[name.removeprefix(".nv.info.")] = attributes
    return found


def report(log: str, symbol: str) -> dict[str, int]:
    """Return ptxas's resource report of a kernel."""
    text = log[log.index(f"Compiling entry function '{symbol}'") :]
    text = text.split("Compiling entry function")[1]
    found = {
        what: int(number) for number, what in re.findall(r"(\d+) bytes (stack frame|spill stores|spill loads)", text)
    }
    assert len(found) == 3, log
    found["registers"] = int(re.search(r"Used (\d+) registers", text)[1])
    for what in ("smem", r"cmem\[0\]"):
        match = re.search(rf"(\d+) bytes {what}", text)
        found[what.replace("\\", "")] = int(match[1]) if match else 0
    return found


# Forward kernels of cases with nearly all options at once, and the bytes that they spill where the rule was fitted.
_SPILLED = {
    "add_rms_norm_forward_bf16_weight_f32_bias_f32_residual_f16_out_e5m2_amax_scale_inv_scale_heads_persistent_h64": 12,
    "add_layer_norm_forward_f16_bias_f32_residual_f32_out_e5m2_scale_h257": 8,
    "layer_norm_forward_bf16_bias_f16_out_i8_rstd_row_scale_heads_h1048577": 256,  # of rows that are read twice
}


def most_spilled(kernel: Kernel, what: str) -> int:
    """Return the bytes that a thread may spill: none forward on the architecture that the rule was fitted to.

    A backward kernel's partial sums fill the registers, and other architectures get other code by the same rule.
    Nor have softmax's 1024 threads of 32 elements registers to spare, and of a thread's row of log_softmax, and of a
    masked one at 64 registers, ptxas spills 16 bytes, unasked. What adds up gradients over rows has.
    """
    symbol, tuned = kernel.spec.symbol, kernel.limits.architecture == 90
    if isinstance(kernel.spec, TextSpec):
        return 64
    if "_gradient" in symbol:
        return 0
    known = [most for start, most in _SPILLED.items() if symbol.startswith(f"{start}_")]
    if tuned and known:
        return known[0]
    full = "softmax" in symbol and ("_t1024_" in symbol or "_tiled" in symbol)
    if "log_softmax_forward" in symbol and "_mask_" in symbol and not full:
        return 16
    return 0 if tuned and "forward" in symbol and not full else 256


def complaints(kernel: Kernel) -> list[str]:
    """Compile a kernel, and return what is wrong with it."""
    spec, rule, limits = kernel
    try:
        compiled = kernel_cache.compile_with_report(spec.symbol, spec.program, spec.options, limits.architecture)
    except CompileError as error:
        return [str(error)]
    if "warning" in compiled.log:
        return [compiled.log]
    found, info = report(compiled.log, spec.symbol), kernel_info(compiled.image)
    if compiled.kind != "cubin" or list(info) != [spec.symbol]:
        return [f"{compiled.kind} with the entries {list(info)} instead of {spec.symbol}"]
    # As a constexpr of a namespace or class makes them, which no kernel reads: each load would allocate and fill them.
    wrong = ["variables in global memory"] if b".nv.global" in compiled.image else []
    wrong += [f"{what}: {found[what]}" for what in SPILLS if found[what] > most_spilled(kernel, what)]
    size = int.from_bytes(info[spec.symbol][INFO_PARAMETER_BYTES], "little")
    if size != spec.params.size:
        wrong.append(f"parameters of {size} bytes, described {spec.params.size}")
    if limits.architecture < 90 and found["cmem[0]"] != _CONSTANT_BASE + spec.params.size:
        wrong.append(f"cmem[0] {found['cmem[0]']}, parameters {spec.params.size}")
    threads = struct.unpack("<III", info[spec.symbol][INFO_MAX_THREADS])
    # Softmax's staged kernels are for any number of warps up to so many.
    most = SoftmaxConfig.MOST_STAGED_THREADS if "staged" in spec.symbol else rule.threads
    if threads != (most, 1, 1) or not 32 <= rule.threads <= min(most, 1024) or rule.threads % 32:
        wrong.append(f"launch bounds {threads}, rule {rule.threads}")
    # Whole register allocations of 8, in a file of 64 Ki.
    if -(-found["registers"] // 8) * 8 * rule.threads > 65536:
        wrong.append(f"{found['registers']} registers for {rule.threads} threads")
    shared = found["smem"] + rule.dynamic_shared_memory
    if shared > limits.shared_memory_per_cta:
        wrong.append(f"{found['smem']} + {rule.dynamic_shared_memory} bytes of shared memory")
    if found["smem"] > 48 * 1024:
        wrong.append(f"{found['smem']} bytes of static shared memory")
    if rule.clusters and rule.ctas_per_row > limits.max_cluster_size:
        wrong.append(f"a cluster of {rule.ctas_per_row}")
    return [f"{kernel.name}: {what}" for what in wrong]


def ptx_of(spec: KernelSpec, architecture: int) -> str:
    """Return what NVRTC makes of a kernel before ptxas, from the shared folder where a run before has left it."""
    headers, cache = sources.included(spec.program), kernel_cache.disk_cache()
    parts = {
        "program": spec.program, "headers": headers, "options": [*compiler.OPTIONS, *spec.options],
        "architecture": architecture, "compiler": compiler.compiler_identity(),
    }  # fmt: skip
    stem, key = f"ptx.{spec.symbol}.sm_{architecture}", digest(parts)
    found = cache.get(stem, key)
    if found is None:
        found = compiler.compile_program(spec.symbol, spec.program, headers, spec.options, architecture, ptx=True).image
        cache.put(stem, key, found, {"symbol": spec.symbol})
    return found.decode()
