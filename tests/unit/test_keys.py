from __future__ import annotations

import ctypes
import dataclasses
import itertools
import os
import random
import re

import cases
import numpy as np
import pytest
from cases import BACKWARD, CASES, FORWARD
from hypothesis import given
from hypothesis import strategies as st

from transformer_rtc import _native, compiler, dispatch, sources
from transformer_rtc.cache import DiskCache
from transformer_rtc.errors import ArgumentError
from transformer_rtc.manager import KernelManager
from transformer_rtc.ops.norm_configurations import NormConfig
from transformer_rtc.ops.norm_general import GeneralSpec
from transformer_rtc.ops.norm_kernels import BackwardSpec, FinishSpec, ForwardSpec
from transformer_rtc.spec import (
    ARCHITECTURES,
    BFLOAT16,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    INT8,
    Field,
    Params,
    TextSpec,
)

CONFIG = NormConfig(threads_per_row=64, rows_per_cta=1, vector=8, steps=2, ctas_per_row=4, clusters=True)
BASE = ForwardSpec(
    norm="rms_norm", input=BFLOAT16, weight=BFLOAT16, bias=BFLOAT16, residual=BFLOAT16, adds="before", output=BFLOAT16,
    stores=(), scale=False, per_head=False, repeats=False, hidden=4096, config=CONFIG,
)  # fmt: skip
BACK = BackwardSpec(
    norm="rms_norm", gradient=BFLOAT16, input=BFLOAT16, weight=BFLOAT16, residual=BFLOAT16, output=BFLOAT16,
    dweight=True, dbias=True, statistics=True, per_head=False, hidden=4096,
    config=dataclasses.replace(CONFIG, in_shared=True, stages=3),
)  # fmt: skip
FINISH = FinishSpec(BFLOAT16, BFLOAT16, 1, 32)
BASES = {"forward": BASE, "backward": BACK, "finish": FINISH}
TEXT = TextSpec('#include "platform.cuh"\nextern "C" __global__ void kernel() {}', "kernel")
INTEGERS = [field.name for field in dataclasses.fields(NormConfig) if field.type == "int"]
BOOLEANS = [field.name for field in dataclasses.fields(NormConfig) if field.type == "bool"]


def entry(folder, spec, architecture=90, identity="nvrtc 1") -> str:
    """Return the name under which a kernel is kept on disk: its symbol, architecture and key."""

    def compile_program(symbol, program, headers, options, architecture):
        return compiler.Compiled(b"\x7fELF", "cubin", "", identity)

    folder = str(folder / str(len(os.listdir(folder))))
    KernelManager(DiskCache(folder), compile_program, lambda: identity).image(spec, architecture)
    (name,) = (name for name in os.listdir(folder) if name != "locks")
    return name


def key(*arguments, **options) -> str:
    return entry(*arguments, **options).rsplit(".", 1)[-1]


STORES = ("mean", "rstd", "amax", "scale_inv", "row_scale")
_TYPES = (FLOAT32, FLOAT16, BFLOAT16)
# What each field of a kernel's description may be.
VALUES_OF = {
    "norm": ("rms_norm", "layer_norm"),
    "adds": ("before", "after"),
    "stores": tuple(itertools.chain.from_iterable(itertools.combinations(STORES, count) for count in range(6))),
    "hidden": (1, 11, 111, 4096),
    "rows_per_group": (1, 8, 11),
    "columns": (8, 32, 128),
    **dict.fromkeys(("input", "gradient"), _TYPES),
    **dict.fromkeys(("weight", "bias", "residual", "dweight", "dbias"), (*_TYPES, None)),
    "output": (*_TYPES, FLOAT8_E4M3, FLOAT8_E5M2, INT8),
    **dict.fromkeys(("scale", "per_head", "repeats", "statistics"), (False, True)),
}


def values_of(base, name: str):
    if isinstance(base, BackwardSpec):
        if name in ("dweight", "dbias"):
            return False, True
        return (*_TYPES, None) if name in ("output", "residual") else VALUES_OF[name]
    # A residual that nothing adds, and none where one is added, is no kernel.
    return _TYPES if name == "residual" else VALUES_OF[name]


def _axes():
    for kind, base in BASES.items():
        for field in dataclasses.fields(base):
            now = getattr(base, field.name)
            if field.name == "config":
                for name in INTEGERS:
                    other = {name: 2 * getattr(now, name) or 2}
                    yield f"{kind} config.{name}", (base, {"config": dataclasses.replace(now, **other)})
                for name in BOOLEANS:
                    if name == "in_shared" and now.stages:
                        continue  # rows in turn are always there
                    if name == "statistics_ahead" and isinstance(base, ForwardSpec):
                        continue  # it is given none
                    yield f"{kind} config.{name}", (
                        base, {"config": dataclasses.replace(now, **{name: not getattr(now, name)})}
                    )  # fmt: skip
                continue
            for value in values_of(base, field.name):
                if value != now:
                    yield f"{kind} {field.name} {getattr(value, 'name', value)}", (base, {field.name: value})
    yield "forward adds nothing", (BASE, {"adds": "", "residual": None})


AXES = dict(_axes())


def test_configurations_have_no_field_of_another_type():
    assert len(INTEGERS) + len(BOOLEANS) == len(dataclasses.fields(NormConfig))


@pytest.mark.parametrize("axis", AXES)
def test_what_changes_the_machine_code_changes_symbol_and_key(axis, tmp_path):
    base, change = AXES[axis]
    other = dataclasses.replace(base, **change)
    assert other.symbol != base.symbol
    # Not by its name alone.
    assert other.program.replace(other.symbol, base.symbol) != base.program
    assert key(tmp_path, other) != key(tmp_path, base)


def test_every_axis_leads_to_a_symbol_of_its_own():
    symbols = [dataclasses.replace(base, **change).symbol for base, change in AXES.values()]
    assert len(set(symbols)) == len(symbols)


ARRAYS = ("dy", "x", "weight", "mean", "rstd", "dresidual", "out", "dweight", "dbias")


def general(types, name="rms_norm_backward_wide", columns=524288) -> GeneralSpec:
    """Return the kernel of a call with arrays of these types."""
    dtypes = {array: types.get(array) for array in ARRAYS}
    return GeneralSpec.of(name, dispatch.Request("rms_norm_backward", dtypes, columns, False, False))


def test_calls_share_a_general_kernel_whatever_arrays_they_have(tmp_path):
    every = general(dict.fromkeys(ARRAYS, BFLOAT16) | {"mean": FLOAT32, "rstd": FLOAT32, "dweight": FLOAT32})
    few = general({"dy": FLOAT16, "x": FLOAT16})
    operators_own = GeneralSpec(few.name, ("dy", "x", "out"), few.rows)
    assert few.params.fields != operators_own.params.fields
    assert every.params.size == few.params.size == operators_own.params.size
    assert key(tmp_path, every) == key(tmp_path, few) == key(tmp_path, operators_own)


def test_a_general_kernel_has_the_text_of_rows_that_a_call_can_have(tmp_path):
    half = general({"dy": BFLOAT16, "x": BFLOAT16, "dweight": FLOAT32})
    single = general(dict.fromkeys(ARRAYS, FLOAT32))
    others = [
        general({"dy": BFLOAT16, "x": BFLOAT16, array: dtype})
        for array, dtype in (("weight", FLOAT32), ("dresidual", FLOAT16), ("out", FLOAT32), ("x", FLOAT16))
    ]
    others += [general({"dy": dtype, "x": dtype}, columns=524284) for dtype in (BFLOAT16, FLOAT32)]
    assert [spec.rows for spec in (half, single, *others)] == ["half", "float", *["any"] * 6]
    found = [half, single, others[0], GeneralSpec(half.name, half.arrays), general({}, "norm_backward_finish")]
    found.append(general({"dy": FLOAT32, "x": FLOAT32}, "layer_norm_backward_wide"))
    assert len({key(tmp_path, spec) for spec in found}) == len(found)
    assert len({spec.symbol for spec in found}) == len(found)
    # Nothing depends on the types there.
    for name in ("norm_backward_finish", "rms_norm_backward_wide_heads", "layer_norm_forward_long"):
        assert general({"x": FLOAT32, "dy": FLOAT32}, name).symbol == name


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
        "for c in CASES[::20]: print(manager.key(c.specialise(ARCHITECTURES[90])[0], Target(90), 'nvrtc'))"
    )
    here = os.path.dirname(cases.__file__)
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


@pytest.mark.parametrize("operator", [*FORWARD, *BACKWARD])
def test_rows_and_places_ask_for_the_same_kernel_whatever_the_operator(check, operator):
    names = [argument.name for argument in dispatch.operators()[operator].arguments if argument.role == "rows"]
    options = {"dweight": False} if operator in BACKWARD else {}

    def plan(**given):
        return check(**{"x": None, **{name: view(**given) for name in names}}, operator=operator, **options)

    base = plan()
    assert plan(rows=100_000) == plan(padding=13) == plan(offset=1) == plan(heads=8, padding=512) == base
    assert plan(hidden=257) != base != plan(dtype=FLOAT32)


def test_heads_and_a_margin_ask_for_kernels_of_their_own(check):
    x = view(heads=8)
    of_all, of_heads = (_native.View(1 << 40, shape, strides, BFLOAT16.id, 0, False)
                        for shape, strides in (((256,), (1,)), ((8, 256), (256, 1))))  # fmt: skip
    plans = [check(x, of_all), check(x, of_heads), check(x, of_all, sm_margin=3)]
    assert len(set(plans)) == 3
    # Not how many heads, nor how many multiprocessors.
    of_more = _native.View(1 << 40, (9, 256), (256, 1), BFLOAT16.id, 0, False)
    assert check(view(heads=9), of_more) == plans[1]
    assert check(x, of_all, sm_margin=4) == plans[2]


def test_a_kernel_is_a_function_of_types_columns_and_limits():
    for case in CASES[::3]:
        for limits in ARCHITECTURES.values():
            stages, again = case.stages(limits), case.stages(limits)
            assert stages == again and hash(stages) == hash(again)
            assert stages == case._replace(rows=case.rows + 1020).stages(limits)


def _specs():
    """Draw kernels: thousands, and from each one others that differ in one field."""
    drawn = random.Random(0)

    def config():
        values = {name: drawn.choice((1, 2, 11, 16)) for name in INTEGERS}
        values["stages"] = drawn.choice((0, 0, 1, 11))
        flags = {name: drawn.random() < 0.5 for name in BOOLEANS}
        flags["clusters"] &= values["ctas_per_row"] > 1  # clusters of one CTA: the same program
        flags["in_shared"] |= values["stages"] > 0
        return NormConfig(**values, **flags)

    def canonical(spec):
        if isinstance(spec, ForwardSpec) and drawn.random() < 0.3:
            return dataclasses.replace(spec, adds="", residual=None)
        if isinstance(spec, BackwardSpec) and spec.output is None:
            return dataclasses.replace(spec, weight=None, residual=None)
        return spec

    for base in (BASE, BACK):
        names = [field.name for field in dataclasses.fields(base) if field.name != "config"]
        for _ in range(1200):
            spec = type(base)(**{name: drawn.choice(values_of(base, name)) for name in names}, config=config())
            yield canonical(spec)
            for name in names:
                yield canonical(dataclasses.replace(spec, **{name: drawn.choice(values_of(base, name))}))
            yield canonical(dataclasses.replace(spec, config=config()))
    types = (*_TYPES, None)
    for arguments in itertools.product(types, types, (1, 8, 11), (8, 32, 128)):
        yield FinishSpec(*arguments)


def test_no_two_kernels_share_a_symbol_and_each_is_an_identifier():
    found = {}
    for spec in _specs():
        assert found.setdefault(spec.symbol, spec) == spec
    assert len(found) > 15_000
    assert all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", symbol) for symbol in found)


def test_a_symbol_of_any_case_is_of_one_kernel():
    # The second launch of rows that do not fit on the chip is shared by both norms.
    found = {}
    for case in CASES:
        for limits in ARCHITECTURES.values():
            for spec, _ in case.stages(limits._replace(max_ctas_per_row=2)):
                assert found.setdefault(spec.symbol, spec) == spec
    assert isinstance(found["norm_backward_finish"], GeneralSpec)


def test_specialised_and_general_kernels_have_different_symbols():
    special = {
        spec.symbol
        for case in CASES
        for limits in ARCHITECTURES.values()
        for spec, _ in case.stages(limits)
        if not isinstance(spec, GeneralSpec)
    }
    general = {kernel.symbol for case in CASES for kernel, _ in case.general_stages()}
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
    with pytest.raises(ArgumentError, match=r"field n has the type 'int16'.*pointer, int64"):
        Params((Field("n", "int16"),))


def test_two_fields_of_one_name_are_refused():
    with pytest.raises(ArgumentError, match="two fields are named n"):
        Params((Field("n", "int32"), Field("n", "float32")))


@pytest.mark.parametrize("values", [{"a": 1}, {"a": 1, "b": 2, "c": 3}, {}])
def test_a_missing_value_and_one_too_many_are_refused(values):
    with pytest.raises(ArgumentError, match="values for a, b expected"):
        Params((Field("a", "int32"), Field("b", "int32"))).pack(**values)


def test_padding_is_zero_so_that_equal_values_are_equal_bytes():
    packed = Params((Field("a", "int32"), Field("p", "pointer"), Field("b", "float32"))).pack(a=-1, p=2**64 - 1, b=1.0)
    assert packed == np.int32(-1).tobytes() + bytes(4) + b"\xff" * 8 + np.float32(1).tobytes() + bytes(4)
