from __future__ import annotations

import functools
import re

import pytest
from cases import CASES, FAMILY, Case

from transformer_rtc import compiler, sources
from transformer_rtc.spec import ARCHITECTURES, BFLOAT16, BOOL, DTYPES, FLOAT32, UINT8, Field, Params, TextSpec

TEXTS = sources.texts()
HEADERS = sorted(name for name in TEXTS if name.endswith(".cuh"))
# What only a CUDA compiler knows.
PLATFORM = (
    r"__CUDA_ARCH__|\b(threadIdx|blockIdx|blockDim|gridDim|warpSize)\b|__shfl\w*|__shared__|__sync\w+|__nanosleep"
    r"|__global__|__device__|__f?mul\w*_r[nzud]|__umulhi|__cvta\w*|__grid_constant__"
)


def code(text: str) -> str:
    """Return a text without its comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


@functools.cache
def specs():
    return {spec for case in CASES for limits in ARCHITECTURES.values() for spec, _ in case.stages(limits)}


def compile_text(text: str, architecture: int = 80) -> compiler.Compiled:
    return compiler.compile_program("test", text, sources.included(text), (), architecture)


def test_the_sources_are_the_files_of_the_two_folders():
    assert {"norm_forward.cu", "platform.cuh", "ptx.cuh"} <= TEXTS.keys()
    assert all(text.strip() for text in TEXTS.values())


@functools.cache
def programs() -> dict[str, str]:
    return {spec.symbol: spec.program for spec in specs()}


def test_a_program_has_one_entry_and_it_is_named_as_the_symbol():
    for symbol, program in programs().items():
        assert re.findall(r"TRTC_ENTRY\b.*?\bvoid (\w+)\(", program) == [symbol]
        assert len(re.findall(r"TRTC_ENTRY|extern\s*\"C\"|__global__", program)) == 1


def test_the_general_program_has_each_entry_once():
    wanted = {kernel.symbol for case in CASES for kernel, _ in case.general_stages()}
    found = re.findall(r"TRTC_ENTRY\b.*?\bvoid (\w+)\(", FAMILY.static_program())
    assert sorted(found) == sorted(wanted)


def test_only_the_platform_header_says_what_an_entry_is():
    assert {name for name, text in TEXTS.items() if 'extern "C"' in code(text)} == {"platform.cuh"}


def test_programs_and_texts_include_only_our_texts():
    for text in (*TEXTS.values(), FAMILY.static_program(), *programs().values()):
        for line in re.findall(r"^\s*#\s*include\b(.*)$", code(text), re.MULTILINE):
            match = re.fullmatch(r'\s*"([^"]+)"\s*', line)
            assert match, f"#include{line}"
            assert match[1] in TEXTS


def test_what_a_program_includes_is_found_through_every_header():
    for program in (*programs().values(), FAMILY.static_program()):
        found = sources.included(program)
        assert found == {name: TEXTS[name] for name in found}
        for text in (program, *found.values()):
            assert set(re.findall(r'^\s*#\s*include\s*"([^"]+)"', code(text), re.MULTILINE)) <= found.keys()


def test_a_text_outside_of_the_packages_is_not_found():
    assert sources.included('#include "stdio.h"\n#include <types.cuh>\n') == {}


def test_every_header_guards_itself_and_compiles_alone():
    for name in HEADERS:
        assert "#pragma once" in TEXTS[name]
        compile_text(f'#include "{name}"\n#include "{name}"\n')


def test_inline_assembly_is_in_one_header():
    assert {name for name, text in TEXTS.items() if re.search(r"\basm\b", code(text))} == {"ptx.cuh"}


def test_what_only_a_cuda_compiler_knows_is_in_two_headers():
    found = {name: re.findall(PLATFORM, code(text)) for name, text in TEXTS.items()}
    assert {name for name, matches in found.items() if matches} <= {"platform.cuh", "ptx.cuh"}, found
    assert not re.search(PLATFORM, "".join(programs().values()) + FAMILY.static_program())


def test_the_compilers_architecture_macro_is_read_once():
    assert len(re.findall("__CUDA_ARCH__", code("".join(TEXTS.values())))) == 1


def test_the_tags_of_data_types_in_the_text_are_those_of_the_package():
    body = re.search(r"enum class Dtype : int \{(.*?)\}", code(TEXTS["any_row.cuh"]), re.DOTALL)
    assert body
    names = set(re.findall(r"(\w+) =", body[1]))
    # A mask's type is of no account to a kernel.
    numbers = [dtype for dtype in DTYPES.values() if dtype not in (BOOL, UINT8)]
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


def without_clusters():
    """Yield each case's launches where CTAs that share a row are no cluster."""
    for case in CASES:
        for limits in ARCHITECTURES.values():
            yield from case.stages(limits._replace(max_cluster_size=1))


def exchanged(program: str) -> tuple[int, int]:
    """Return how many values a row's CTAs tell each other, and in how many buffers, as the kernel's text has it."""
    flag = {name: value == "true" for name, value in re.findall(r"(\w+) = (true|false),", program)}
    lag, together = (int(re.search(rf"\b{name} = (\d+),", program)[1]) for name in ("lag", "together"))
    buffers = 2 + 2 * lag
    if "norm_forward" in program:
        return together * (3 if flag["centred"] else 1), buffers
    finds = flag["needs_x"] and not flag["has_statistics"]
    return (5 if finds else 2) if flag["centred"] else 2 if finds else 1, buffers


def test_the_workspace_of_a_launch_is_the_size_of_its_struct():
    sizes = {
        (rule.ctas_per_row, *exchanged(spec.program), rule.workspace_bytes)
        for spec, rule in without_clusters()
        if rule.ctas_per_row > 1
    }
    # Of one row; and 3 for each of two rows that are worked on together.
    assert {values for _, values, *_ in sizes} == {1, 2, 3, 5, 6}
    text = '#include "reduce.cuh"\n'
    for ctas, values, buffers, size in sizes:
        text += f'static_assert(sizeof(trtc::GridWorkspace<{buffers}, {values * ctas}>) == {size}, "");\n'
    compile_text(text)


@pytest.mark.parametrize(
    ("operator", "hidden", "dtype", "columns"),
    [
        ("layer_norm_backward", 25600, BFLOAT16, 12800),  # of 13312
        ("layer_norm_backward", 29632, BFLOAT16, 14848),  # lines of 128 bytes
        ("rms_norm_backward", 20449, FLOAT32, 2560),  # Vecs of 16 bytes
        ("layer_norm", 65536, BFLOAT16, 8192),
    ],
)
def test_the_ctas_of_a_row_have_about_as_much_of_it_as_each_other(operator, hidden, dtype, columns):
    given = {"dy": dtype, "dweight": dtype} if operator.endswith("backward") else {}
    case = Case(64, hidden, dtype, dtype, dtype, operator=operator, **given)
    (spec, rule), *_ = case.stages(ARCHITECTURES[90])
    assert rule.ctas_per_row > 1 and -(-hidden // columns) == rule.ctas_per_row
    program = spec.program + f'static_assert(trtc::NormConfig<Traits>::slice == {columns}, "");\n'
    compiler.compile_program(spec.symbol, program, sources.included(program), spec.options, 90)


def test_a_launch_has_a_workspace_exactly_where_its_kernel_has_a_field_for_it():
    for case in CASES:
        for limits in ARCHITECTURES.values():
            for clusters in {limits.max_cluster_size, 1}:
                for spec, rule in case.stages(limits._replace(max_cluster_size=clusters)):
                    fields = [field.name for field in spec.params.fields if field.source == "workspace"]
                    assert bool(fields) == (rule.workspace_bytes > 0) == (rule.ctas_per_row > 1 and not rule.clusters)


def test_partial_sums_are_kept_exactly_where_a_second_launch_adds_them_up():
    for case in CASES:
        for limits in ARCHITECTURES.values():
            stages = case.stages(limits)
            sums = (case.dweight is not None) + (case.dbias is not None)
            (first, rule), *others = stages
            assert len(others) == (sums > 0) and (rule.partial_bytes > 0) == (sums > 0)
            for spec, of_columns in others:
                assert of_columns.columns_per_cta > 0 and rule.columns_per_cta == 0
                for kernel in (first, spec):
                    assert "partials" in [field.source for field in kernel.params.fields]
            if sums:
                # As trtc::partial_offset lays them out: rows of whole vectors of 8.
                assert rule.partial_bytes % (sums * 32 * -(-case.hidden // 8)) == 0


def test_the_text_of_parameters_has_the_size_and_the_offsets_that_packing_has():
    fields = tuple(
        Field(f"{kind}_{i}", kind)
        for i, kind in enumerate(
            ("int32", "pointer", "float32", "int64", "uint32", "int32", "float32", "pointer", "int32")
        )
    )
    params = Params(fields)
    text = TextSpec("", "kernel", fields).program
    for name, offset in params.offsets.items():
        # NVRTC's own operator: it has no offsetof.
        text += f'static_assert(__INTADDR__(&((Params*)0)->{name}) == {offset}, "{name}");\n'
    compile_text(text)


def test_parameters_fit_the_native_calls_buffer():
    from transformer_rtc import _native

    for spec in specs():
        assert spec.params.size + 8 <= _native.MAX_PARAMETER_BYTES
