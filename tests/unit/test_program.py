# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import functools
import re

import kernel_cache
import pytest
from cases import CASES, FAMILY, Case

from transformer_rtc import _native, compiler, sources
from transformer_rtc.declaration import declaration_of
from transformer_rtc.ops.norm.config import NormConfig
from transformer_rtc.spec import (
    ARCHITECTURES,
    BFLOAT16,
    BOOL,
    DTYPES,
    FLOAT32,
    INT8,
    INTEGERS,
    STATIC_ARCHITECTURES,
    Field,
    Params,
    TextSpec,
)

TEXTS = sources.texts()
# What a family's kernels share, in its folder, is for one configuration.
HEADERS = sorted(name for name in TEXTS if name.endswith(".cuh") and "/" not in name)
# What only a CUDA compiler knows.
PLATFORM = (
    r"__CUDA_ARCH__|\b(threadIdx|blockIdx|blockDim|gridDim|warpSize)\b|__shfl\w*|__shared__|__sync\w+|__nanosleep"
    r"|__global__|__device__|__f?mul\w*_r[nzud]|__umulhi|__cvta\w*|__grid_constant__"
)
INCLUDE = re.compile(r"^\s*#\s*include\b\s*(.*?)\s*$", re.MULTILINE)
ENTRY = re.compile(r"TRTC_ENTRY\b.*?\bvoid (\w+)\(")


def code(text: str) -> str:
    """Return a text without its comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


@functools.cache
def stages():
    """Return each case with each architecture's limits and its launches."""
    return [(case, limits, case.stages(limits)) for case in CASES for limits in STATIC_ARCHITECTURES.values()]


@functools.cache
def specs():
    return {spec.symbol: spec for *_, launches in stages() for spec, _ in launches}


@functools.cache
def programs() -> dict[str, str]:
    return {symbol: spec.program for symbol, spec in specs().items()}


def compile_text(text: str) -> compiler.Compiled:
    return kernel_cache.compile_with_report("test", text, (), 80)


def test_the_sources_are_the_files_of_the_two_folders():
    assert {"norm/forward_shared.cu", "platform.cuh", "ptx.cuh"} <= TEXTS.keys()
    assert all(text.strip() for text in TEXTS.values())


def test_a_program_has_one_entry_and_it_is_named_as_the_symbol():
    for symbol, program in programs().items():
        assert ENTRY.findall(program) == [symbol]
        assert len(re.findall(r"TRTC_ENTRY|extern\s*\"C\"|__global__", program)) == 1


def test_the_general_program_has_each_entry_once():
    wanted = {kernel.symbol for case in CASES for kernel, _ in case.general_stages()}
    assert sorted(ENTRY.findall(FAMILY.static_program())) == sorted(wanted)


def test_programs_and_texts_include_only_our_texts_and_these_are_found_through_every_header():
    for program in (*programs().values(), FAMILY.static_program()):
        found = sources.included(program)
        assert found == {name: TEXTS[name] for name in found}
        for text in (program, *found.values()):
            assert {name.strip('"') for name in INCLUDE.findall(code(text))} <= found.keys()
    for name in INCLUDE.findall(code("\n".join((*TEXTS.values(), *programs().values())))):
        assert re.fullmatch(r'"[^"]+"', name) and name.strip('"') in TEXTS


def test_a_text_outside_of_the_packages_is_not_found():
    assert sources.included('#include "stdio.h"\n#include <types.cuh>\n') == {}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_guards_itself_and_compiles_alone(name):
    assert "#pragma once" in TEXTS[name]
    compile_text(f'#include "{name}"\n#include "{name}"\n')


@pytest.mark.parametrize(
    ("what", "where"),
    [
        (r'extern "C"', {"platform.cuh"}),
        (r"\basm\b", {"ptx.cuh"}),  # inline assembly
        (PLATFORM, {"platform.cuh", "ptx.cuh"}),
    ],
)
def test_what_only_a_cuda_compiler_knows_is_in_few_headers(what, where):
    assert {name for name, text in TEXTS.items() if re.search(what, code(text))} == where
    assert not re.search(what, code("".join(programs().values()) + FAMILY.static_program()))


def test_the_compilers_architecture_macro_is_read_once():
    assert len(re.findall("__CUDA_ARCH__", code("".join(TEXTS.values())))) == 1


def test_the_tags_of_data_types_in_the_text_are_those_of_the_package():
    body = re.search(r"enum class Dtype : int \{(.*?)\}", code(TEXTS["any_row.cuh"]), re.DOTALL)
    names = set(re.findall(r"(\w+) =", body[1]))
    # A mask's type is of no account to a kernel, and other integers have no rows.
    numbers = [dtype for dtype in DTYPES.values() if dtype not in (BOOL, *INTEGERS) or dtype is INT8]
    tags = {dtype.text.removeprefix("trtc::") if dtype.bytes == 1 else dtype.name: dtype for dtype in numbers}
    assert names == {"absent", *tags}
    asserts = [f'static_assert(int(trtc::Dtype::{tag}) == {dtype.id}, "");' for tag, dtype in tags.items()]
    asserts += [f'static_assert(sizeof({dtype.text}) == {dtype.bytes}, "");' for dtype in tags.values()]
    asserts += ['static_assert(int(trtc::Dtype::absent) == 0, "");']
    compile_text('#include "any_row.cuh"\n' + "\n".join(asserts))


def test_a_static_assert_is_compiled_at_all():
    # What the tests around this one rely on.
    with pytest.raises(compiler.CompileError, match="told you"):
        compile_text('static_assert(sizeof(int) == 5, "told you");')


def exchanged(program: str) -> tuple[int, int]:
    """Return how many values a row's CTAs tell each other, and in how many buffers, as the kernel's text has it."""
    of = {name: int(value) for name, value in re.findall(r"(?:#define |  )(\w+)(?: =)? (\d+)", program)}
    buffers = 2 + 2 * of["LAG"]
    if "NEEDS_X" not in of:
        return of["ROWS_PER_PASS"] * (3 if of["CENTRED"] else 1), buffers
    finds = of["NEEDS_X"] and not of["HAS_STATISTICS"]
    return (5 if finds else 2) if of["CENTRED"] else 2 if finds else 1, buffers


def test_the_workspace_of_a_launch_is_as_large_as_its_kernel_has_it():
    sizes = {
        (rule.ctas_per_row, *exchanged(spec.program), rule.workspace_bytes)
        for case, limits, _ in stages()
        for spec, rule in case.stages(limits._replace(max_cluster_size=1))
        if rule.ctas_per_row > 1
    }
    # No rule chooses it: two rows together, whose CTAs meet in global memory.
    case = Case(64, 16384, BFLOAT16, BFLOAT16, BFLOAT16, operator="layer_norm")
    pairs = NormConfig(256, 1, 8, 4, 2, in_shared=True, rows_per_pass=2)
    ((spec, rule),) = declaration_of(case.operator).family.specialise(case.request, ARCHITECTURES[80], pairs)
    sizes.add((2, *exchanged(spec.program), rule.workspace_bytes))
    # Of one row; and 3 for each of two rows that are worked on together.
    assert {values for _, values, *_ in sizes} == {1, 2, 3, 5, 6}
    text = '#include "row_reduce.cuh"\n'
    for ctas, values, buffers, size in sorted(sizes):
        text += f'static_assert(4 * trtc::grid_workspace_words({ctas}, {buffers}, {values}) == {size}, "");\n'
    compile_text(text)


@pytest.mark.parametrize(
    ("operator", "hidden", "dtype", "columns"),
    [
        ("layer_norm_backward", 25600, BFLOAT16, 12800),  # of 13312
        ("layer_norm_backward", 29632, BFLOAT16, 14848),  # lines of 128 bytes
        ("rms_norm_backward", 20449, FLOAT32, 5116),  # Vecs of 16 bytes
        ("layer_norm", 65536, BFLOAT16, 8192),
    ],
)
def test_the_ctas_of_a_row_have_about_as_much_of_it_as_each_other(operator, hidden, dtype, columns):
    given = {"dy": dtype, "dweight": dtype} if operator.endswith("backward") else {}
    case = Case(64, hidden, dtype, dtype, dtype, operator=operator, **given)
    (spec, rule), *_ = case.stages(ARCHITECTURES[90])
    assert rule.ctas_per_row > 1 and -(-hidden // columns) == rule.ctas_per_row
    program = spec.program + f'namespace trtc {{ static_assert(SLICE == {columns}, ""); }}\n'
    kernel_cache.compile_with_report(spec.symbol, program, spec.options, 90)


def test_a_launch_has_a_workspace_exactly_where_its_kernel_has_a_field_for_it():
    for case, limits, launches in stages():
        for spec, rule in (*launches, *case.stages(limits._replace(max_cluster_size=1))):
            fields = [field.name for field in spec.params.fields if field.source == "workspace"]
            assert bool(fields) == (rule.workspace_bytes > 0) == (rule.ctas_per_row > 1 and not rule.clusters)


def test_partial_sums_are_kept_exactly_where_a_second_launch_adds_them_up():
    for case, _, launches in stages():
        sums = (case.dweight is not None) + (case.dbias is not None)
        (first, rule), *others = launches
        assert len(others) == (sums > 0) and (rule.partial_bytes > 0) == (sums > 0)
        for spec, of_columns in others:
            assert of_columns.columns_per_cta > 0 and rule.columns_per_cta == 0
            for kernel in (first, spec):
                assert "partials" in [field.source for field in kernel.params.fields]
        if sums:
            # As trtc::partial_offset lays them out: rows of whole vectors of 8.
            assert rule.partial_bytes % (sums * 32 * -(-case.hidden // 8)) == 0


def test_the_text_of_parameters_has_the_size_and_the_offsets_that_packing_has():
    kinds = ("int32", "pointer", "float32", "int64", "uint32", "int32", "float32", "pointer", "int32")
    fields = tuple(Field(f"{kind}_{i}", kind) for i, kind in enumerate(kinds))
    text = TextSpec("", "kernel", fields).program
    for name, offset in Params(fields).offsets.items():
        # NVRTC's own operator: it has no offsetof.
        text += f'static_assert(__INTADDR__(&((Params*)0)->{name}) == {offset}, "{name}");\n'
    compile_text(text)


def test_parameters_fit_the_native_calls_buffer():
    assert all(spec.params.size + 8 <= _native.MAX_PARAMETER_BYTES for spec in specs().values())
