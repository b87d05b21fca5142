from __future__ import annotations

import ctypes
import dataclasses
import itertools
import os
import re

import numpy as np
import pytest
from cases import CASES, FAMILY, FLOATS
from hypothesis import given
from hypothesis import strategies as st

from transformer_rtc import _native, compiler, sources
from transformer_rtc.cache import DiskCache
from transformer_rtc.manager import KernelManager
from transformer_rtc.ops.norms import NormConfig, NormSpec
from transformer_rtc.spec import ARCHITECTURES, BFLOAT16, FLOAT16, FLOAT32, Field, Params, TextSpec

CONFIG = NormConfig(threads_per_row=64, rows_per_cta=1, vector=8, steps=2, ctas_per_row=4)
BASE = NormSpec("rms_norm_forward", BFLOAT16, BFLOAT16, BFLOAT16, False, 4096, CONFIG)
TEXT = TextSpec('#include "platform.cuh"\nextern "C" __global__ void kernel() {}', "kernel")
INTEGERS = [field.name for field in dataclasses.fields(NormConfig) if field.type == "int"]
BOOLEANS = [field.name for field in dataclasses.fields(NormConfig) if field.type == "bool"]


def entry(folder, spec, architecture=90, identity="nvrtc 1") -> str:
    """Return the name under which a kernel is kept on disk: its symbol, architecture and key."""

    def compile_program(symbol, program, headers, options, architecture):
        return compiler.Compiled(b"\x7fELF", "cubin", "", identity)

    folder = str(folder / str(len(os.listdir(folder))))
    KernelManager(DiskCache(folder), compile_program, lambda: identity).image(spec, architecture)
    (name,) = os.listdir(folder)
    return name


def key(*arguments, **options) -> str:
    return entry(*arguments, **options).rsplit(".", 1)[-1]


def _axes():
    yield "operator", {"operator": "other_norm_forward"}
    for name in ("input", "weight", "output"):
        for dtype in (FLOAT32, FLOAT16):
            yield f"{name} {dtype.name}", {name: dtype}
    yield "no weight", {"weight": None}
    yield "rstd", {"rstd": True}
    yield "hidden", {"hidden": 4097}
    for name in INTEGERS:
        yield name, {"config": dataclasses.replace(CONFIG, **{name: 2 * getattr(CONFIG, name)})}
    for name in BOOLEANS:
        yield name, {"config": dataclasses.replace(CONFIG, **{name: not getattr(CONFIG, name)})}


AXES = dict(_axes())


def test_configurations_have_no_field_of_another_type():
    assert len(INTEGERS) + len(BOOLEANS) == len(dataclasses.fields(NormConfig))


@pytest.mark.parametrize("axis", AXES)
def test_what_changes_the_machine_code_changes_symbol_and_key(axis, tmp_path):
    other = dataclasses.replace(BASE, **AXES[axis])
    assert other.symbol != BASE.symbol
    assert key(tmp_path, other) != key(tmp_path, BASE)


def test_every_axis_leads_to_a_symbol_of_its_own():
    symbols = [dataclasses.replace(BASE, **change).symbol for change in AXES.values()]
    assert len(set(symbols)) == len(symbols)


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(TEXT, text=TEXT.text + "\n"),
        dataclasses.replace(TEXT, options=("-lineinfo",)),
        dataclasses.replace(TEXT, fields=(Field("n", "int32"),)),
    ],
    ids=["text", "options", "fields"],
)
def test_text_options_and_fields_change_the_key_of_a_callers_kernel(other, tmp_path):
    assert key(tmp_path, other) != key(tmp_path, TEXT)


def test_architecture_and_compiler_change_the_key_and_not_the_symbol(tmp_path):
    base = entry(tmp_path, BASE)
    assert base.startswith(f"{BASE.symbol}.sm_90.")
    assert entry(tmp_path, BASE, architecture=100).startswith(f"{BASE.symbol}.sm_100.")
    keys = {key(tmp_path, BASE), key(tmp_path, BASE, architecture=100), key(tmp_path, BASE, identity="nvrtc 2")}
    assert len(keys) == 3


def test_the_packages_own_options_change_the_key(tmp_path, monkeypatch):
    before = key(tmp_path, BASE)
    monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "--maxrregcount=32"))
    assert key(tmp_path, BASE) != before


def test_a_header_changes_the_keys_of_those_that_include_it_and_no_others(tmp_path, monkeypatch):
    texts = dict(sources.texts())
    before = key(tmp_path, TEXT), key(tmp_path, BASE)
    monkeypatch.setattr(sources, "texts", lambda: {**texts, "reduce.cuh": texts["reduce.cuh"] + "\n"})
    assert (key(tmp_path, TEXT) == before[0], key(tmp_path, BASE) == before[1]) == (True, False)
    monkeypatch.setattr(sources, "texts", lambda: {**texts, "platform.cuh": texts["platform.cuh"] + "\n"})
    assert (key(tmp_path, TEXT) == before[0], key(tmp_path, BASE) == before[1]) == (False, False)
    monkeypatch.setattr(sources, "texts", lambda: {**texts, "another.cuh": "#error\n"})
    assert (key(tmp_path, TEXT), key(tmp_path, BASE)) == before


def test_a_key_is_the_same_in_another_process(tmp_path):
    # Nothing that Python randomizes for each process, such as the order of a set, may be in it.
    import subprocess
    import sys

    script = (
        "from transformer_rtc.manager import KernelManager; from transformer_rtc.cache import DiskCache\n"
        "from transformer_rtc.spec import ARCHITECTURES, Target\nfrom cases import CASES\n"
        "manager = KernelManager(DiskCache(None))\n"
        "for c in CASES[::20]: print(manager._key(c.specialise(ARCHITECTURES[90])[0], Target(90), 'nvrtc'))"
    )
    here = os.path.dirname(__file__)
    runs = [
        subprocess.run(
            [sys.executable, "-c", script], cwd=here, env={**os.environ, "PYTHONHASHSEED": seed}, text=True, check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert runs[0] == runs[1] != ""


def view(rows=3, hidden=256, offset=0, padding=0, heads=1, dtype=BFLOAT16) -> _native.View:
    shape = (rows, heads, hidden) if heads > 1 else (rows, hidden)
    strides = (heads * hidden + padding, hidden, 1) if heads > 1 else (hidden + padding, 1)
    return _native.View(4096 + offset * dtype.bytes, shape, strides, dtype.id, 0, False)


@pytest.mark.parametrize(
    ("other", "values"),
    [
        ({"rows": 100_000}, {}),
        ({"padding": 13}, {}),
        ({"heads": 8, "padding": 512}, {}),
        ({"offset": 1}, {}),
        ({}, {"eps": 1e-3}),
        ({}, {"weight_offset": 1.0}),
    ],
    ids=["rows", "stride", "two strides", "alignment", "eps", "weight_offset"],
)
def test_rows_strides_alignment_and_numbers_ask_for_the_same_kernel(check, other, values):
    weight = _native.View(1 << 40, (256,), (1,), BFLOAT16.id, 0, False)
    base = check(view(), weight)
    assert check(view(**other), weight, **values) == base
    # The comparison can fail: what does change the kernel is seen.
    assert check(view(dtype=FLOAT32), weight) != base != check(view(), weight, rstd=True)
    assert check(view(), None) != base != check(view(), weight, out_dtype="float32")


def test_a_kernel_is_a_function_of_types_columns_and_limits():
    for case in CASES:
        for limits in ARCHITECTURES.values():
            (spec, rule), (again, rule_again) = case.specialise(limits), case.specialise(limits)
            assert spec == again and hash(spec) == hash(again) and rule == rule_again
            assert spec == case._replace(rows=case.rows + 1000).specialise(limits)[0]


def _specs():
    for operator, x, weight, out, rstd, hidden in itertools.product(
        ("rms_norm_forward", "rms_norm_forward_rstd"), FLOATS, (*FLOATS, None), FLOATS, (False, True), (1, 11, 111)
    ):
        for integers in itertools.product((1, 11), repeat=len(INTEGERS)):
            config = NormConfig(**dict(zip(INTEGERS, integers, strict=True)))
            for booleans in itertools.product((False, True), repeat=len(BOOLEANS)):
                flags = dict(zip(BOOLEANS, booleans, strict=True))
                if config.ctas_per_row == 1 and flags["clusters"]:
                    continue  # clusters of one CTA: the same program
                if operator.endswith("rstd") and (integers[0] == 1 or x is not FLOAT16):
                    continue  # enough of a name that ends like another's field
                yield NormSpec(operator, x, weight, out, rstd, hidden, dataclasses.replace(config, **flags))


def test_no_two_kernels_share_a_symbol_and_each_is_an_identifier():
    found = {}
    for spec in _specs():
        assert found.setdefault(spec.symbol, spec) == spec
    assert len(found) > 20_000
    assert all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", symbol) for symbol in found)


def test_specialised_and_general_kernels_have_different_symbols():
    special = {case.specialise(limits)[0].symbol for case in CASES for limits in ARCHITECTURES.values()}
    general = {FAMILY.static({"x": case.x}, case.hidden)[0].symbol for case in CASES}
    assert general and not special & general


C_TYPES = {
    "pointer": ctypes.c_void_p,
    "int64": ctypes.c_int64,
    "int32": ctypes.c_int32,
    "uint32": ctypes.c_uint32,
    "float32": ctypes.c_float,
}
VALUES = {
    "pointer": st.integers(0, 2**64 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "uint32": st.integers(0, 2**32 - 1),
    "float32": st.floats(width=32, allow_nan=False),
}


@given(st.data(), st.lists(st.sampled_from(list(C_TYPES)), max_size=12))
def test_parameters_are_packed_as_a_c_compiler_lays_them_out(data, types):
    fields = [Field(f"f{i}", kind) for i, kind in enumerate(types)]
    params = Params(fields)
    layout = type("Layout", (ctypes.Structure,), {"_fields_": [(f.name, C_TYPES[f.type]) for f in fields]})
    assert params.size == ctypes.sizeof(layout)
    assert params.offsets == {f.name: getattr(layout, f.name).offset for f in fields}
    values = {f.name: data.draw(VALUES[f.type]) for f in fields}
    packed = layout.from_buffer_copy(params.pack(**values))
    for field in fields:
        found = getattr(packed, field.name)
        assert (found or 0) == values[field.name]  # ctypes reads a null pointer as None


@given(st.lists(st.sampled_from(list(C_TYPES)), max_size=12))
def test_the_text_of_parameters_declares_the_fields_in_their_order(types):
    fields = [Field(f"f{i}", kind) for i, kind in enumerate(types)]
    text = Params(fields).text("Some")
    assert re.findall(r"(\w+);", text) == [field.name for field in fields]
    assert f"sizeof(Some) == {max(Params(fields).size, 1)}," in text


def test_an_unknown_field_type_is_refused_with_those_that_are_known():
    with pytest.raises(ValueError, match=r"field n has the type 'int16'.*pointer, int64"):
        Params((Field("n", "int16"),))


def test_two_fields_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two fields are named n"):
        Params((Field("n", "int32"), Field("n", "float32")))


@pytest.mark.parametrize("values", [{"a": 1}, {"a": 1, "b": 2, "c": 3}, {}])
def test_a_missing_value_and_one_too_many_are_refused(values):
    with pytest.raises(TypeError, match="values for a, b expected"):
        Params((Field("a", "int32"), Field("b", "int32"))).pack(**values)


def test_padding_is_zero_so_that_equal_values_are_equal_bytes():
    packed = Params((Field("a", "int32"), Field("p", "pointer"), Field("b", "float32"))).pack(a=-1, p=2**64 - 1, b=1.0)
    assert packed == np.int32(-1).tobytes() + bytes(4) + b"\xff" * 8 + np.float32(1).tobytes() + bytes(4)
