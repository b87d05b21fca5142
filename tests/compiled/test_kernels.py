from __future__ import annotations

import itertools
import pickle
import re
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from cases import (
    BACKWARD,
    BY_ROW,
    CASES,
    FAMILY,
    FORWARD,
    Case,
    compiled_cases,
    division_of,
    features,
    layout_of,
    scaled_rows,
)

from transformer_rtc import compiler, sources, static
from transformer_rtc.dispatch import Request, operators
from transformer_rtc.errors import ArgumentError, CompileError, CompilerNotFoundError
from transformer_rtc.ops import norm_configurations
from transformer_rtc.ops.norm_general import GeneralSpec
from transformer_rtc.ops.norm_kernels import BackwardSpec
from transformer_rtc.ops.softmax_kernels import BUCKETS, SoftmaxConfig
from transformer_rtc.spec import ARCHITECTURES, BFLOAT16, BOOL, FLOAT8_E4M3, FLOAT16, FLOAT32

EMPTY = 'extern "C" __global__ void kernel() {}'
_CONSTANT_BASE = 352  # bytes of constant bank 0 before the parameters, on sm_80 and sm_89
_INFO_MAX_THREADS, _INFO_PARAMETER_BYTES = 0x05, 0x19  # EIATTR_* of a cubin's .nv.info sections


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


SPILLS = ("stack frame", "spill stores", "spill loads")


def most_spilled(symbol: str, architecture: int) -> int:
    """Return the bytes that a thread may spill: none forward on the architecture that the tables were tuned on.

    A backward kernel's partial sums fill the registers, and other architectures get other code from the same tables.
    Nor have softmax's 1024 threads of 32 elements registers to spare, and of a thread's row of log_softmax ptxas spills
    16 bytes at 64 registers, unasked. What adds up gradients over rows has.
    """
    if "_gradient_" in symbol:
        return 0
    full = "softmax" in symbol and ("_t1024_" in symbol or "_tiled" in symbol)
    return 0 if architecture == 90 and "forward" in symbol and not full else 256


def complaints(name: str, stage, limits) -> list[str]:
    """Compile a kernel, and return what is wrong with it."""
    spec, rule = stage
    architecture = limits.architecture
    program = spec.program
    options = (*spec.options, compiler.REPORT)
    try:
        compiled = compiler.compile_program(spec.symbol, program, sources.included(program), options, architecture)
    except CompileError as error:
        return [str(error)]
    if "warning" in compiled.log:
        return [compiled.log]
    found = report(compiled.log, spec.symbol)
    info = kernel_info(compiled.image)
    if list(info) != [spec.symbol]:
        return [f"entries {list(info)} instead of {spec.symbol}"]
    # As a constexpr of a namespace or class makes them, which no kernel reads: each load would allocate and fill them.
    if b".nv.global" in compiled.image:
        return [f"{spec.symbol} has variables in global memory"]
    info = info[spec.symbol]
    wrong = [f"{what}: {found[what]}" for what in SPILLS if found[what] > most_spilled(spec.symbol, architecture)]
    size = int.from_bytes(info[_INFO_PARAMETER_BYTES], "little")
    if size != spec.params.size:
        wrong.append(f"parameters of {size} bytes, described {spec.params.size}")
    if architecture < 90 and found["cmem[0]"] != _CONSTANT_BASE + spec.params.size:
        wrong.append(f"cmem[0] {found['cmem[0]']}, parameters {spec.params.size}")
    threads = struct.unpack("<III", info[_INFO_MAX_THREADS])
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
    return [f"{name} sm_{architecture} {spec.symbol}: {what}" for what in wrong]


def compile_all(cases, limits) -> list[str]:
    # Each kernel once, whatever calls it. NVRTC runs without the GIL.
    kernels = {stage[0].symbol: (case.name, stage) for case in cases for stage in case.stages(limits)}
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda kernel: complaints(*kernel, limits), kernels.values())
        return list(itertools.chain.from_iterable(found))


@pytest.mark.parametrize(("hidden", "dtype"), [(4096, BFLOAT16), (16384, BFLOAT16), (65536, BFLOAT16), (8192, FLOAT32)])
def test_layer_norm_has_registers_for_whatever_its_columns_and_residual_are(hidden, dtype):
    # Kernels that keep eight Vecs of the weight and bias on their way, some of which are told to do with few registers.
    types = (None, BFLOAT16, FLOAT32)
    cases = [
        Case(64, hidden, dtype, weight, dtype, True, operator, bias=bias, residual=residual)
        for weight, bias in itertools.product(types, types)
        for operator, residual in (("layer_norm", None), ("add_layer_norm", dtype), ("layer_norm_add", dtype))
    ]
    wrong = compile_all(cases, ARCHITECTURES[90])
    assert not wrong, "\n".join(wrong)


OF_BYTES = {2: BFLOAT16, 4: FLOAT32}


def backward_of_width(norm: str, dtype, hidden: int) -> Case:
    """Return a call of backward with rows of one type, saved statistics and all gradients."""
    centred = norm == "layer_norm"
    return Case(
        64, hidden, dtype, dtype, dtype, operator=f"{norm}_backward", dy=dtype, dweight=dtype,
        dbias=dtype if centred else None, rstd=True, mean=centred,
    )  # fmt: skip


def test_sizes_of_well_known_models_are_divided_as_their_lines_say():
    cases = []
    tables = (("", norm_configurations._FORWARD_SIZES), ("_backward", norm_configurations._BACKWARD_SIZES))
    for suffix, table in tables:
        for (norm, size), entries in table.items():
            dtype, centred = OF_BYTES[size], norm == "layer_norm"
            entries = [entry for entry in entries if entry.clusters is not False]
            assert len({(entry.vectors, entry.alone) for entry in entries}) == len(entries)
            alone = {entry.vectors for entry in entries if entry.alone}
            for entry in entries:
                hidden = entry.vectors * 16 // size
                case = Case(64, hidden, dtype, dtype, dtype, operator=norm + suffix, bias=dtype if centred else None)
                if entry.vectors in alone and not entry.alone:  # a line for rows with a residual
                    case = case._replace(operator=f"add_{norm}", residual=dtype)
                if suffix:
                    case = backward_of_width(norm, dtype, hidden)
                config = case.stages(ARCHITECTURES[90])[0][0].config
                taken = (config.ctas_per_row, config.threads_per_row, config.steps, config.rows_per_cta)
                assert taken == (entry.ctas, entry.threads, entry.steps, entry.rows), hidden
                assert (config.in_shared, config.stages, config.together, config.bulk, config.statistics_ahead) == (
                    entry.in_shared, entry.stages, entry.together, entry.bulk, entry.ahead,
                ), hidden  # fmt: skip
                cases.append(case)
    wrong = compile_all(cases, ARCHITECTURES[90])
    assert not wrong, "\n".join(wrong)


def with_wide_columns(case: Case) -> Case:
    return case._replace(weight=FLOAT32, bias=FLOAT32 if case.bias else None)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES.keys() - {90}))
def test_rows_with_scales_of_one_cta_compile_for_other_architectures(architecture):
    # Their threads fill the registers, of which other architectures' code takes more or fewer.
    limits = ARCHITECTURES[architecture]
    wrong = compile_all([with_wide_columns(case) for entry, case in scaled_rows() if entry.ctas == 1], limits)
    assert not wrong, "\n".join(wrong)


def test_rows_with_scales_are_divided_as_their_lines_say_and_wide_columns_do_not_spill():
    cases = []
    for entry, case in scaled_rows():
        config = case.stages(ARCHITECTURES[90])[0][0].config
        taken = (config.ctas_per_row, config.threads_per_row, config.steps, config.in_shared, config.stages)
        assert taken == (entry.ctas, entry.threads, entry.steps, entry.in_shared, entry.stages), case.hidden
        cases += [case, with_wide_columns(case)]
    wrong = compile_all(cases, ARCHITECTURES[90])
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "name", ["_FORWARD", "_BACKWARD", "_FORWARD_SIZES", "_BACKWARD_SIZES", "_ROW_SCALED_FORWARD", "_ROW_SCALED_SIZES"]
)
def test_lines_are_in_the_order_of_their_lengths(name):
    # The first that is long enough is taken.
    for entries in getattr(norm_configurations, name).values():
        lengths = [entry.vectors for entry in entries]
        assert lengths == sorted(lengths)


def test_rows_of_backward_of_other_sizes_are_divided_as_the_next_longer_line_says():
    limits, cases = ARCHITECTURES[90], []
    for (norm, size), lines in norm_configurations._BACKWARD.items():
        alone = {entry.vectors for entry in norm_configurations._BACKWARD_SIZES[norm, size]}
        for vectors in {entry.vectors for entry in lines}:
            entry = next(entry for entry in lines if entry.vectors == vectors)
            case = backward_of_width(norm, OF_BYTES[size], (vectors - (vectors in alone)) * 16 // size)
            config = case.stages(limits)[0][0].config
            taken = (config.ctas_per_row, config.steps, config.stages, config.bulk, config.statistics_ahead)
            assert taken == (entry.ctas, entry.steps, entry.stages, entry.bulk, entry.ahead), case.name
            cases.append(case)
    wrong = compile_all(cases, limits)
    assert not wrong, "\n".join(wrong)


def test_the_longest_rows_of_every_line_of_forward_spill_nothing():
    cases = [
        Case(64, entry.vectors * 16 // size - less, OF_BYTES[size], OF_BYTES[size], OF_BYTES[size], operator=norm)
        for (norm, size), lines in norm_configurations._FORWARD.items()
        for entry in lines
        for less in (0, 16 // size)
    ]
    wrong = compile_all(cases, ARCHITECTURES[90])
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", (BFLOAT16, FLOAT32))
def test_layer_norm_of_a_size_that_no_line_has_fills_its_ctas(dtype, rng):
    limits, one = ARCHITECTURES[90], norm_configurations._MOST_VECTORS_OF_ONE
    sizes = norm_configurations._FITTED_VECTORS
    for vectors in sizes:
        least_filled = 0.8 if vectors <= one else norm_configurations._LEAST_FILLED
        hidden = vectors * 16 // dtype.bytes
        config = norm_configurations.configure("layer_norm", hidden, (dtype,), (dtype, dtype), dtype, dtype, limits)
        assert least_filled <= hidden / (config.ctas_per_row * config.chunk) <= 1, hidden
    drawn = [int(vectors) * 16 // dtype.bytes for vectors in rng.choice(sizes, 6)] + [40000 * 2 // dtype.bytes]
    # Bytes of a row: of 300 divisions, those for which the compiler spilled before it was told of registers, or before
    # they were divided otherwise; and pairs of short rows. Then columns: lines for float32 rows that are longer.
    spilled = 5120, 7680, 11344, 15360, 18048, 23040, 24560, 27648, 32256, 43008, 86016, 139264, 147456, 172032
    drawn += [*(size // dtype.bytes for size in (2032, *spilled)), 73728, 139264, 147456]
    cases = [
        Case(64, hidden, dtype, dtype, out, rstd=rstd, operator="layer_norm", bias=dtype)
        for hidden, out, rstd in itertools.product(drawn, (FLOAT32, BFLOAT16, FLOAT8_E4M3), (False, True))
    ]
    wrong = compile_all(cases, limits)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", (BFLOAT16, FLOAT32))
@pytest.mark.parametrize("norm", ("rms_norm", "layer_norm"))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_ragged_row_fills_its_ctas(architecture, norm, dtype, rng):
    limits = ARCHITECTURES[architecture]
    columns = (dtype, dtype) if norm == "layer_norm" else (dtype,)
    ragged = []
    for hidden in range(4113 // dtype.bytes | 1, 400_000 // dtype.bytes, 254):
        config = norm_configurations.configure(norm, hidden, (dtype,), columns, dtype, dtype, limits)
        if config.ragged:
            assert config.steps * config.vector * dtype.bytes >= 80, hidden  # of a thread: five whole vectors
            assert 0.79 <= hidden / (config.ctas_per_row * config.chunk) <= 1, hidden
            ragged.append(hidden)
    assert len(ragged) > 100
    cases = [
        Case(64, int(hidden), dtype, dtype, out, operator=norm, bias=dtype if norm == "layer_norm" else None)
        for hidden, out in itertools.product(rng.choice(ragged, 4, replace=False), (dtype, FLOAT8_E4M3))
    ]
    wrong = compile_all(cases, limits)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_configuration_compiles_within_the_limits(architecture):
    cases = compiled_cases(architecture)
    limits = ARCHITECTURES[architecture]
    # No way to divide a row that the table of cases reaches is left out.
    assert {division_of(case, limits) for case in cases} == {division_of(case, limits) for case in CASES}
    wrong = compile_all(cases, limits)
    assert not wrong, "\n".join(wrong)


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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_of_softmax_compiles_within_the_limits(architecture):
    # Not each on each: each bucket on two of them.
    limits, turn = ARCHITECTURES[architecture], list(ARCHITECTURES).index(architecture)
    kernels = {}
    for request in softmax_requests()[turn :: 2 if architecture == 90 else 5]:
        for stage in operators()[request.operator].family.specialise(request, limits):
            kernels[stage[0].symbol] = (request.operator, stage)
    assert len(kernels) > 15
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda kernel: complaints(*kernel, limits), kernels.values())
        wrong = list(itertools.chain.from_iterable(found))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("architecture", (80, 90, 100))
def test_a_kernel_waits_for_the_launch_before_it_before_any_access(architecture):
    # Its launch may begin early, but for architectures whose text does not wait.
    limits = ARCHITECTURES[architecture]
    norms = [case.request for case in CASES if case.hidden in (128, 4096, 16411, 65536)]
    specs = {
        spec.symbol: spec
        for request in (*norms, *softmax_requests()[:: len(BUCKETS)])
        for spec, rule in operators()[request.operator].family.specialise(request, limits)
        if rule.early or pytest.fail(spec.symbol)
    }
    assert len(specs) > 40
    access = re.compile(r"\b(ld|st|red|atom|cp)\.[\w.:]*global")

    def complaint(spec) -> str:
        headers = sources.included(spec.program)
        text = compiler.compile_program(
            spec.symbol, spec.program, headers, spec.options, architecture, ptx=True
        ).image.decode()
        wait, lets = (text.find(f"griddepcontrol.{what};") for what in ("wait", "launch_dependents"))
        if architecture < 90:
            return spec.symbol if max(wait, lets) != -1 else ""
        # Only backward, where its own second launch is next, which is told to spread.
        followed = isinstance(spec, BackwardSpec) and (spec.dweight or spec.dbias) and not spec.per_head
        expected = 0 < wait < access.search(text).start() and (lets > wait) == bool(followed)
        return "" if expected else spec.symbol

    with ThreadPoolExecutor() as pool:
        wrong = list(filter(None, pool.map(complaint, specs.values())))
    assert not wrong, "\n".join(wrong)


def shared_by(ctas: int, limits) -> list[Case]:
    """Return a case of each division of a row among so many CTAs."""
    found = {}
    for case in CASES:
        if case.specialise(limits)[1].ctas_per_row == ctas:
            found.setdefault((division_of(case, limits), case.x.bytes), case)
    return list(found.values())


def test_rows_of_several_ctas_compile_for_a_cooperative_launch_where_there_are_clusters():
    # A part of a GPU may hold no cluster: dispatch falls back to this.
    limits = ARCHITECTURES[90]._replace(max_cluster_size=1)
    cases = [case for ctas in (2, 4, 8, 16) for case in shared_by(ctas, limits)]
    assert {case.backward for case in cases} == {False, True}
    wrong = compile_all(cases, limits)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("clusters", [8, 4, 2])
def test_rows_of_several_ctas_compile_for_smaller_clusters(clusters):
    limits = ARCHITECTURES[90]._replace(max_cluster_size=clusters)
    cases = shared_by(clusters, limits)
    assert cases
    wrong = compile_all(cases, limits)
    assert not wrong, "\n".join(wrong)


def test_every_case_is_compiled_for_some_architecture():
    compiled = {case for architecture in ARCHITECTURES for case in compiled_cases(architecture)}
    assert compiled == set(CASES) and len({case.name for case in CASES}) == len(CASES)


def test_every_operator_type_and_option_is_tried_with_every_way_to_hold_a_row():
    seen: dict[tuple[bool, str], set] = {}
    for case in CASES:
        seen.setdefault((case.backward, layout_of(case, ARCHITECTURES[90])), set()).update(features(case))
    layouts = ("warps", "ragged", "shared cluster", "ragged cluster")
    assert seen.keys() >= {*itertools.product((False, True), layouts), (True, "shared"), (True, "general")}
    for backward in (False, True):
        of_all = set.union(*(found for (of, _), found in seen.items() if of == backward))
        for (of, layout), found in seen.items():
            # Rows in turn, or together, are not for every option, nor at every size; and only rows with a scale are in
            # registers of several CTAs.
            if of == backward and not layout.startswith(("in turn", "together", "registers cluster")):
                assert found == of_all, f"{layout}: {of_all - found}"
    assert {one[1] for one in seen[False, "registers cluster"] if one[0] == "scaling"} == {BY_ROW}


def test_every_operator_is_tried_with_every_way_to_hold_a_row_without_clusters():
    seen: dict[tuple[bool, str], set] = {}
    for case in CASES:
        seen.setdefault((case.backward, layout_of(case, ARCHITECTURES[80])), set()).add(case.operator)
    assert seen.keys() >= set(itertools.product((False, True), ("shared grid", "ragged grid")))
    for (backward, layout), found in seen.items():
        if not layout.startswith(("in turn", "together")):
            assert found == set(BACKWARD if backward else FORWARD), layout


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("architecture", [80, 89])
def test_what_was_measured_as_clusters_gives_no_row_more_ctas_without_them(architecture, norm, dtype, monkeypatch):
    limits, full, table = ARCHITECTURES[architecture], 16 // dtype.bytes, (norm, dtype.bytes)

    def configs(widths):
        return {
            hidden: norm_configurations.configure_backward(norm, hidden, (dtype,) * 3, (dtype,), dtype, limits)
            for hidden in widths
        }

    sizes, lines = norm_configurations._BACKWARD_SIZES, norm_configurations._BACKWARD
    entries, anywhere = sizes[table], tuple(entry for entry in lines[table] if not entry.clusters)
    assert any(entry.ctas > 1 for entry in entries) and anywhere != lines[table]
    exact = configs(entry.vectors * full for entry in entries)
    others = configs(range(full, 132000 // dtype.bytes, 31 * full))
    assert all(exact.values()) and len(others) > 100
    monkeypatch.setitem(lines, table, anywhere)
    assert configs(others) == others
    monkeypatch.setitem(sizes, table, ())
    for hidden, config in configs(exact).items():
        assert exact[hidden].ctas_per_row <= config.ctas_per_row, hidden


@pytest.mark.parametrize("architecture", [80, 89])
def test_widths_that_clusters_divide_otherwise_are_divided_as_their_lines_say_without_them(architecture):
    limits, cases = ARCHITECTURES[architecture], []
    for (norm, size), entries in norm_configurations._BACKWARD_SIZES.items():
        for entry in (entry for entry in entries if entry.clusters is False):
            case = backward_of_width(norm, OF_BYTES[size], entry.vectors * 16 // size)
            config = case.stages(limits)[0][0].config
            if architecture == 80:  # what an L40S has of shared memory is less
                taken = (config.ctas_per_row, config.threads_per_row, config.steps, config.stages)
                assert taken == (entry.ctas, entry.threads, entry.steps, entry.stages), case.hidden
            cases.append(case)
    wrong = compile_all(cases, limits)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("architecture", "hidden", "dtype", "weight", "residual"),
    [
        (80, 10081, BFLOAT16, FLOAT32, BFLOAT16),
        (89, 9579, BFLOAT16, BFLOAT16, None),
        (90, 350001, BFLOAT16, FLOAT32, BFLOAT16),
        (120, 48001, FLOAT32, None, None),
        (90, 102400, FLOAT32, FLOAT32, FLOAT32),
    ],
)
def test_the_longest_rows_leave_room_for_their_sums(architecture, hidden, dtype, weight, residual):
    # The largest that fit, whose statistics are found: six sums go from thread to thread in shared memory, or five from
    # CTA to CTA.
    limits = ARCHITECTURES[architecture]
    case = Case(
        4, hidden, dtype, weight, dtype, False, "layer_norm_backward", dy=dtype, residual=residual, dweight=FLOAT32,
        dbias=FLOAT32,
    )  # fmt: skip
    assert not complaints(case.name, case.stages(limits)[0], limits)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_general_kernels_compile_with_next_to_no_spills(architecture):
    program = FAMILY.static_program()
    compiled = compiler.compile_program("static", program, sources.included(program), (compiler.REPORT,), architecture)
    assert compiled.kind == "cubin" and b".nv.global" not in compiled.image
    info = kernel_info(compiled.image)
    for kernel, rule in {stage for case in CASES for stage in case.general_stages()}:
        found = report(compiled.log, kernel.symbol)
        assert max(found[what] for what in SPILLS) <= 64, kernel.symbol
        assert int.from_bytes(info[kernel.symbol][_INFO_PARAMETER_BYTES], "little") == kernel.params.size
        assert struct.unpack("<III", info[kernel.symbol][_INFO_MAX_THREADS]) == (rule.threads, 1, 1)
        assert found["smem"] + rule.dynamic_shared_memory <= ARCHITECTURES[architecture].shared_memory_per_cta


@pytest.mark.parametrize(("dtype", "weight"), [(FLOAT16, FLOAT16), (FLOAT32, FLOAT32), (BFLOAT16, FLOAT32)])
@pytest.mark.parametrize("operator", BACKWARD)
def test_the_general_kernel_of_a_call_spills_nothing(operator, dtype, weight):
    case = Case(4, 524288, dtype, weight, dtype, False, operator, dy=dtype, dweight=weight)
    (spec, rule), finish = case.stages(ARCHITECTURES[90])
    assert isinstance(spec, GeneralSpec) and isinstance(finish[0], GeneralSpec)
    assert not complaints(case.name, (spec, rule), ARCHITECTURES[90])
    compiled = compiler.compile_program(
        spec.symbol, spec.program, sources.included(spec.program), (*spec.options, compiler.REPORT), 90
    )
    found = report(compiled.log, spec.symbol)
    assert not any(found[what] for what in ("spill stores", "spill loads"))


def test_the_general_kernels_partial_sums_take_no_more_memory_than_rows_in_float32():
    found = [(case.hidden, case.general()[1]) for case in CASES if case.backward and not case.heads]
    assert {rule.rows_per_cta for _, rule in found} == {2}
    for hidden, rule in found:
        assert rule.partial_bytes <= 4 * rule.rows_per_cta * -(-hidden // 8) * 8, hidden


def test_the_general_kernels_compile_to_ptx():
    program = FAMILY.static_program()
    compiled = compiler.compile_program(
        "static", program, sources.included(program), (), static.PTX_ARCHITECTURE, ptx=True
    )
    assert compiled.kind == "ptx" and compiled.image.endswith(b"\0")
    text = compiled.image.decode()
    assert f".target sm_{static.PTX_ARCHITECTURE}" in text
    wanted = {kernel.symbol for case in CASES for kernel, _ in case.general_stages()}
    assert set(re.findall(r"\.entry (\w+)", text)) == wanted


def test_what_was_built_into_the_package_is_what_the_sources_compile_to():
    if not static.available():
        pytest.skip("this installation was built without static kernels")
    for architecture in ARCHITECTURES:
        image, kind = static.image(FAMILY.name, architecture)
        # Operators that share a kernel fill its parameters from arrays of their own: of one size.
        sizes = {(kernel.symbol, kernel.params.size) for case in CASES for kernel, _ in case.general_stages()}
        assert kind == "cubin"
        info = kernel_info(image)
        found = {(symbol, int.from_bytes(of[_INFO_PARAMETER_BYTES], "little")) for symbol, of in info.items()}
        assert found == sizes


@pytest.mark.parametrize(("architecture", "name"), [(86, "sm_80"), (121, "sm_120"), (103, "sm_100"), (90, "sm_90")])
def test_a_static_cubin_runs_on_later_minor_revisions(architecture, name):
    if not static.available():
        pytest.skip("this installation was built without static kernels")
    assert static.image("norms", architecture) == static.image("norms", int(name[3:]))


def test_a_newer_architecture_gets_the_static_ptx_and_an_older_one_a_refusal():
    if not static.available():
        pytest.skip("this installation was built without static kernels")
    assert static.image("norms", 130).kind == "ptx"
    with pytest.raises(
        static.StaticKernelError, match=r"no static kernel of norms for compute capability 7\.5.*Rebuild"
    ):
        static.image("norms", 75)


def test_an_installation_without_static_kernels_says_how_to_rebuild(monkeypatch, tmp_path):
    monkeypatch.setattr(static, "_FOLDER", str(tmp_path / "absent"))
    assert not static.available() and static.manifest() == {}
    with pytest.raises(static.StaticKernelError, match="TRANSFORMER_RTC_STATIC_KERNELS"):
        static.image("norms", 90)


def test_an_architecture_newer_than_nvrtc_gets_ptx_of_the_newest_one_that_runs_there():
    newest = max(compiler._open().architectures)
    compiled = compiler.compile_program("kernel", EMPTY, {}, (), newest + 100)
    assert compiled.kind == "ptx"
    assert compiled.image.endswith(b"\0") and f".target sm_{newest}" in compiled.image.decode()
    assert compiler.compile_program("kernel", EMPTY, {}, (), newest).kind == "cubin"


def test_an_architecture_older_than_nvrtc_knows_is_an_error():
    with pytest.raises(CompileError, match="sm_20"):
        compiler.compile_program("kernel", EMPTY, {}, (), 20)


def test_the_same_program_gives_the_same_bytes():
    spec, _ = CASES[0].specialise(ARCHITECTURES[90])
    images = [
        compiler.compile_program(spec.symbol, spec.program, sources.included(spec.program), (), 90).image
        for _ in range(2)
    ]
    assert images[0] == images[1]


@pytest.fixture
def compile_error():
    source = 'extern "C" __global__ void broken() {\n  nonsense;\n}'
    with pytest.raises(CompileError) as caught:
        compiler.compile_program("broken", source, {}, ("-lineinfo",), 90)
    return caught.value


def test_a_compile_error_carries_all_that_a_report_needs(compile_error):
    error = compile_error
    assert error.symbol == "broken" and "nonsense" in error.log and "nonsense;" in error.source
    assert {"--gpu-architecture=sm_90", "-lineinfo", *compiler.OPTIONS} <= set(error.options)
    assert {"transformer_rtc", "python", "nvrtc", "cuda_bindings"} <= error.versions.keys()
    message = str(error)
    for part in (error.symbol, error.log.strip(), *error.options, "   2 |   nonsense;"):
        assert part in message
    for name, version in error.versions.items():
        assert f"{name} {version}" in message


def test_a_compile_error_survives_pickling(compile_error):
    copy = pickle.loads(pickle.dumps(compile_error))
    assert type(copy) is CompileError and str(copy) == str(compile_error)
    assert vars(copy) == vars(compile_error)


@pytest.fixture
def not_opened(monkeypatch):
    """Have the compiler look for NVRTC anew, in folders that a test names."""
    monkeypatch.setattr(compiler, "_opened", None)
    for variable in ("LD_LIBRARY_PATH", "CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    compiler.compiler_identity.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    compiler.compiler_identity.cache_clear()


def test_without_bindings_the_error_says_which_extra_to_install(not_opened, tmp_path):
    not_opened.setattr(sys, "path", [str(tmp_path)])
    for call in (compiler.compiler_identity, lambda: compiler.compile_program("kernel", EMPTY, {}, (), 90)):
        with pytest.raises(
            CompilerNotFoundError, match=r"cuda-python is not installed.*transformer_rtc\[cu12\].*\[cu13\]"
        ):
            call()


@pytest.mark.parametrize("major", ["12", "13"])
def test_without_nvrtc_the_error_says_which_extra_to_install(not_opened, tmp_path, major):
    (tmp_path / f"cuda_bindings-{major}.9.1.dist-info").mkdir()
    not_opened.setattr(sys, "path", [str(tmp_path)])
    # A toolkit of the machine that runs this must not be found.
    not_opened.setattr(compiler.os.path, "exists", lambda path: False)
    with pytest.raises(CompilerNotFoundError, match=rf"NVRTC {major} is not installed.*transformer_rtc\[cu12\]"):
        compiler.compiler_identity()


def test_bindings_of_an_unknown_version_are_named(not_opened, tmp_path):
    (tmp_path / "cuda_bindings-11.8.0.dist-info").mkdir()
    not_opened.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(CompilerNotFoundError, match=r"cuda-bindings 11\.8\.0 is installed.*transformer_rtc\[cu12\]"):
        compiler.compiler_identity()


def test_the_identity_is_the_distributions_version_else_the_librarys_path_size_and_time(not_opened, tmp_path):
    (tmp_path / "cuda_bindings-12.9.1.dist-info").mkdir()
    not_opened.setattr(sys, "path", [str(tmp_path)])
    library = tmp_path / "libnvrtc.so.12"
    library.write_bytes(b"12345")
    not_opened.setenv("LD_LIBRARY_PATH", f":{tmp_path}")
    identity = compiler.compiler_identity()
    assert str(library) in identity and " 5 " in identity and str(library.stat().st_mtime_ns) in identity
    (tmp_path / "nvidia_cuda_nvrtc_cu12-12.9.86.dist-info").mkdir()
    compiler.compiler_identity.cache_clear()
    assert compiler.compiler_identity() == "nvidia_cuda_nvrtc_cu12 12.9.86"


def test_the_promised_identity_is_that_of_what_compiles():
    assert compiler.compile_program("kernel", EMPTY, {}, (), 90).compiler == compiler.compiler_identity()


# NVRTC takes these with one dash or two, and after blanks.
FILE_OPTIONS = (
    *("-I/tmp", "-I", " -I/tmp", "--include-path=/tmp", "-include-path=/tmp", "--pre-include=x.h", "-include=x.h"),
    *("--pch", "-pch", "--create-pch=x", "--use-pch=x", "--pch-dir=/tmp", "-pch-dir=/tmp"),
)


@pytest.mark.parametrize("option", FILE_OPTIONS)
def test_an_option_that_names_files_is_refused(option):
    with pytest.raises(ArgumentError, match=f"the option {option} makes NVRTC read files"):
        compiler.compile_program("kernel", EMPTY, {}, (option,), 90)


def includes_a_file(include: str) -> bool:
    try:
        compiler.compile_program("kernel", f"#include {include}\n{EMPTY}", {}, (), 90)
    except CompileError as error:
        assert "could not open" in error.log or "cannot open" in error.log
        return False
    return True


@pytest.mark.parametrize("include", ['"stray.h"', '"./stray.h"', "<stray.h>", '"../folder/stray.h"'])
def test_a_file_of_the_current_folder_is_not_included(include, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    (tmp_path / "folder" / "stray.h").write_text("// no cache key would see it\n")
    assert not includes_a_file(include)


@pytest.mark.parametrize("quotes", ['""', "<>"])
def test_a_file_of_an_absolute_path_is_refused(quotes, tmp_path):
    (tmp_path / "stray.h").write_text("// no cache key would see it\n")
    with pytest.raises(ArgumentError, match="includes a file by its path"):
        includes_a_file(f"{quotes[0]}{tmp_path}/stray.h{quotes[1]}")


def test_a_file_in_the_current_folder_does_not_replace_a_header_of_ours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in sources.texts():
        (tmp_path / name).write_text("#error a stray file\n")
    spec, _ = CASES[0].specialise(ARCHITECTURES[90])
    compiler.compile_program(spec.symbol, spec.program, sources.included(spec.program), (), 90)


def test_other_threads_run_while_nvrtc_compiles():
    spec, _ = next(case for case in CASES if case.backward).specialise(ARCHITECTURES[90])
    seconds = []

    def compile_one():
        start = time.perf_counter()
        compiler.compile_program(spec.symbol, spec.program, sources.included(spec.program), (), 90)
        seconds.append(time.perf_counter() - start)

    compile_one()  # opens NVRTC
    thread = threading.Thread(target=compile_one)
    thread.start()
    longest, last = 0.0, time.perf_counter()
    while thread.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    # With the GIL held, this thread would have stood still for all of it.
    assert longest < seconds[-1] / 2


@pytest.mark.parametrize("most", (8, 4, 2, 1))
@pytest.mark.parametrize("hidden", (40000, 524288, 1048577))
@pytest.mark.parametrize("operator", ["rms_norm", "layer_norm_backward"])
def test_fewer_ctas_that_can_wait_for_each_other_still_hold_every_row(operator, most, hidden):
    # A small GPU, or a part of one: a plan is made again with half as many until they are resident.
    limits = ARCHITECTURES[80]._replace(max_ctas_per_row=most)
    dweight = FLOAT32 if operator.endswith("backward") else None
    case = Case(1, hidden, FLOAT32, FLOAT32, FLOAT32, operator=operator, dweight=dweight)
    stage = case.specialise(limits)
    assert stage[1].ctas_per_row <= most
    assert stage[1].cooperative == (stage[1].ctas_per_row > 1)
    assert not complaints(case.name, stage, limits)
