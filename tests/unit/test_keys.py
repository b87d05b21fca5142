# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
import dataclasses
import itertools
import os
import random
import re
import subprocess
import sys

import cases
import numpy as np
import pytest
from cases import BACKWARD, CASES, FORWARD, NORMS
from hypothesis import given
from hypothesis import strategies as st

from transformer_rtc import _native, compiler, sources
from transformer_rtc.arguments import Input
from transformer_rtc.cache import DiskCache
from transformer_rtc.declaration import declaration_of
from transformer_rtc.errors import ArgumentError
from transformer_rtc.kernel_manager import KernelManager
from transformer_rtc.ops.norm.backward import BackwardSpec, FinishSpec
from transformer_rtc.ops.norm.config import NormConfig
from transformer_rtc.ops.norm.kernels import ForwardSpec
from transformer_rtc.spec import (
    BFLOAT16,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    INT8,
    STATIC_ARCHITECTURES,
    Field,
    Params,
    Target,
    TextSpec,
)

CONFIG = NormConfig(threads_per_row=64, rows_per_cta=1, vec_size=8, vectors_per_thread=2, ctas_per_row=4, clusters=True)
BASE = ForwardSpec(
    norm="rms_norm", input=BFLOAT16, weight=BFLOAT16, bias=BFLOAT16, residual=BFLOAT16, adds="before",
    sum=BFLOAT16, rounds=False, output=BFLOAT16, stores=(), scale=False, per_head=False, repeats=False, hidden=4096,
    config=CONFIG,
)  # fmt: skip
BACK = BackwardSpec(
    norm="rms_norm", gradient=BFLOAT16, input=BFLOAT16, weight=BFLOAT16, residual=BFLOAT16, output=BFLOAT16,
    dweight=True, dbias=True, statistics=True, per_head=False, hidden=4096,
    config=dataclasses.replace(CONFIG, in_shared=True, stages=3),
)  # fmt: skip
FINISH = FinishSpec(BFLOAT16, BFLOAT16, 1, 32)
BASES = (BASE, BACK, FINISH)
TEXT = TextSpec('#include "platform.cuh"\nextern "C" __global__ void kernel() {}', "kernel")
INTEGERS = [field.name for field in dataclasses.fields(NormConfig) if field.type == "int"]
BOOLEANS = [field.name for field in dataclasses.fields(NormConfig) if field.type == "bool"]


def key(spec, architecture=90, identity="nvrtc 1") -> str:
    return KernelManager(DiskCache(None)).key(spec, Target(architecture), identity)


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
    **dict.fromkeys(("input", "gradient", "sum"), _TYPES),
    **dict.fromkeys(("weight", "bias", "residual", "dweight", "dbias"), (*_TYPES, None)),
    "output": (*_TYPES, FLOAT8_E4M3, FLOAT8_E5M2, INT8),
    **dict.fromkeys(("scale", "per_head", "repeats", "rounds", "statistics", "unaligned"), (False, True)),
}


def values_of(base, name: str):
    if isinstance(base, BackwardSpec):
        if name in ("dweight", "dbias"):
            return False, True
        return (*_TYPES, None) if name in ("output", "residual") else VALUES_OF[name]
    # A residual that nothing adds, and none where one is added, is no kernel.
    return _TYPES if name == "residual" else VALUES_OF[name]


def _axes():
    """Yield kernels that differ in one field."""
    for base in BASES:
        for field in dataclasses.fields(base):
            now = getattr(base, field.name)
            for value in values_of(base, field.name) if field.name != "config" else ():
                if value != now:
                    yield base, dataclasses.replace(base, **{field.name: value})
        config = getattr(base, "config", None)
        for name in (*INTEGERS, *BOOLEANS) if config else ():
            # Rows in turn are always in shared memory, and forward is given no statistics.
            if not (name == "in_shared" and config.stages) and not (name == "statistics_ahead" and base is BASE):
                now = getattr(config, name)
                other = not now if name in BOOLEANS else 2 * now or 2
                yield base, dataclasses.replace(base, config=dataclasses.replace(config, **{name: other}))
    yield BASE, dataclasses.replace(BASE, adds="", residual=None, sum=None)


def test_what_changes_the_machine_code_changes_symbol_and_key():
    assert len(INTEGERS) + len(BOOLEANS) == len(dataclasses.fields(NormConfig))
    symbols = [other.symbol for _, other in _axes()]
    assert len(set(symbols)) == len(symbols) > 100
    for base, other in _axes():
        assert other.symbol != base.symbol
        # Not by its name alone.
        assert other.program.replace(other.symbol, base.symbol) != base.program, other.symbol
        assert key(other) != key(base)


def test_text_options_fields_architecture_and_compiler_change_the_key_and_not_the_symbol():
    changes = {"text": TEXT.text + "\n"}, {"options": ("-lineinfo",)}, {"fields": (Field("n", "int32"),)}
    others = [key(dataclasses.replace(TEXT, **change)) for change in changes]
    assert len({key(TEXT), *others, key(TEXT, architecture=100), key(TEXT, identity="nvrtc 2")}) == 6


def test_an_entry_is_named_by_symbol_architecture_and_key(tmp_path):
    def compile_program(symbol, program, headers, options, architecture):
        return compiler.Compiled(b"\x7fELF", "cubin", "", "nvrtc 1")

    KernelManager(DiskCache(str(tmp_path)), compile_program, lambda: "nvrtc 1").image(BASE, 100)
    (name,) = (name for name in os.listdir(tmp_path) if name != "locks")
    assert f"{BASE.symbol}.sm_100.{key(BASE, architecture=100)}".startswith(name)
    assert len(name) - len(f"{BASE.symbol}.sm_100.") == 24


def test_the_packages_own_options_change_the_key(monkeypatch):
    before = key(BASE)
    monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "--maxrregcount=32"))
    assert key(BASE) != before


def test_a_header_changes_the_keys_of_those_that_include_it_and_no_others(monkeypatch):
    texts, before = dict(sources.texts()), (key(TEXT), key(BASE))
    for name, kept in (
        ("row_reduce.cuh", (True, False)),
        ("platform.cuh", (False, False)),
        ("another.cuh", (True, True)),
    ):
        changed = {**texts, name: texts.get(name, "") + "\n"}
        monkeypatch.setattr(sources, "texts", lambda: changed)  # noqa: B023
        assert (key(TEXT) == before[0], key(BASE) == before[1]) == kept, name


def test_a_key_is_the_same_in_another_process():
    # Nothing that Python randomizes for each process, such as the order of a set, may be in it.
    script = (
        "from test_keys import CASES, STATIC_ARCHITECTURES, key\n"
        "for case in CASES[::20]: print(key(case.specialise(STATIC_ARCHITECTURES[90])[0]))"
    )
    path = os.pathsep.join((os.path.dirname(__file__), os.path.dirname(cases.__file__)))
    runs = [
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}, text=True,
            check=True, capture_output=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert runs[0] == runs[1] != ""


def view(rows=3, hidden=256, offset=0, padding=0, heads=1, dtype=BFLOAT16) -> _native.View:
    shape = (rows, heads, hidden) if heads > 1 else (rows, hidden)
    strides = (heads * hidden + padding, hidden, 1) if heads > 1 else (hidden + padding, 1)
    return _native.View(4096 + offset * dtype.bytes, shape, strides, dtype.id, 0, False)


def columns(*shape: int) -> _native.View:
    return _native.View(1 << 40, shape, (256, 1)[-len(shape) :], BFLOAT16.id, 0, False)


@pytest.mark.parametrize("operator", NORMS)
def test_rows_places_and_numbers_ask_for_the_same_kernel(check, operator):
    names = [
        argument.name
        for argument in declaration_of(operator).arguments
        if isinstance(argument, Input) and argument.shape.startswith("... ")
    ]
    options = {"weight": columns(256)} | ({"dweight": False} if operator in BACKWARD else {})

    def plan(values=(), **given):
        rows = {name: view(**given) for name in names}
        return check(**{"x": None, **rows, **options, **dict(values)}, operator=operator)

    base = plan()
    assert base == plan(rows=100_000) == plan(padding=13) == plan(offset=1) == plan(heads=8, padding=512)
    assert base == plan({"eps": 1e-3}) == plan({"weight_offset": 1.0})
    # The comparison can fail: what does change the kernel is seen.
    of_all = [base, plan(dtype=FLOAT32), plan({"weight": None}), plan({"weight": None}, hidden=257)]
    of_all.append(plan({"out_dtype": "float32"}))
    of_all.append(plan({"rstd": True} if operator in FORWARD else {"dweight": True}))
    assert len(set(of_all)) == len(of_all)


def test_heads_and_a_margin_ask_for_kernels_of_their_own(check):
    x = view(heads=8)
    plans = [check(x, columns(256)), check(x, columns(8, 256)), check(x, columns(256), sm_margin=3)]
    assert len(set(plans)) == 3
    # Not how many heads, nor how many multiprocessors.
    assert check(view(heads=9), columns(9, 256)) == plans[1]
    assert check(x, columns(256), sm_margin=4) == plans[2]


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
            return dataclasses.replace(spec, adds="", residual=None, sum=None)
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


def test_a_kernel_is_a_function_of_types_columns_and_limits_and_its_symbol_is_of_it_alone():
    found, general = {}, {kernel.symbol for case in CASES for kernel, _ in case.general_stages()}
    for case, limits in itertools.product(CASES, STATIC_ARCHITECTURES.values()):
        for part in (limits, limits._replace(max_ctas_per_row=2)):
            stages, again = case.stages(part), case._replace(rows=case.rows + 1020).stages(part)
            assert stages == again and hash(stages) == hash(again)
            for spec, _ in stages:
                assert found.setdefault(spec.symbol, spec) == spec
                assert spec.symbol not in general
    assert general


def _integers(bits: int, signed: bool):
    return st.integers(-(2 ** (bits - 1)) * signed, 2 ** (bits - signed) - 1)


KINDS = {
    "pointer": (ctypes.c_void_p, _integers(64, signed=False)),
    "int64": (ctypes.c_int64, _integers(64, signed=True)),
    "int32": (ctypes.c_int32, _integers(32, signed=True)),
    "uint32": (ctypes.c_uint32, _integers(32, signed=False)),
    "float32": (ctypes.c_float, st.floats(width=32, allow_nan=False)),
}


@given(st.data(), st.lists(st.sampled_from(list(KINDS)), max_size=12))
def test_parameters_are_packed_as_a_c_compiler_lays_them_out(data, types):
    fields = [Field(f"f{i}", kind) for i, kind in enumerate(types)]
    params = Params(fields)
    layout = type("Layout", (ctypes.Structure,), {"_fields_": [(f.name, KINDS[f.type][0]) for f in fields]})
    assert params.size == ctypes.sizeof(layout)
    assert params.offsets == {f.name: getattr(layout, f.name).offset for f in fields}
    values = {f.name: data.draw(KINDS[f.type][1]) for f in fields}
    packed = layout.from_buffer_copy(params.pack(**values))
    for field in fields:
        found = getattr(packed, field.name)
        assert (found or 0) == values[field.name]  # ctypes reads a null pointer as None
    text = params.text("Some")
    assert re.findall(r"(\w+);", text) == [field.name for field in fields]
    assert f"sizeof(Some) == {max(params.size, 1)}," in text


@pytest.mark.parametrize(
    ("types", "what"),
    [
        (["int16"], r"field n has the type 'int16'.*pointer, int64"),
        (["int32", "float32"], "two fields are named n"),
    ],
)
def test_fields_of_an_unknown_type_or_of_one_name_are_refused(types, what):
    with pytest.raises(ArgumentError, match=what):
        Params(Field("n", kind) for kind in types)


@pytest.mark.parametrize("values", [{"a": 1}, {"a": 1, "b": 2, "c": 3}, {}])
def test_a_missing_value_and_one_too_many_are_refused(values):
    with pytest.raises(ArgumentError, match="values for a, b expected"):
        Params((Field("a", "int32"), Field("b", "int32"))).pack(**values)


def test_padding_is_zero_so_that_equal_values_are_equal_bytes():
    packed = Params((Field("a", "int32"), Field("p", "pointer"), Field("b", "float32"))).pack(a=-1, p=2**64 - 1, b=1.0)
    assert packed == np.int32(-1).tobytes() + bytes(4) + b"\xff" * 8 + np.float32(1).tobytes() + bytes(4)
