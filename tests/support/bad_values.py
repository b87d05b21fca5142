# SPDX-License-Identifier: Apache-2.0
"""One table of what every argument of every public function refuses: (message, values) by argument.

A message is a regular expression, filled in with str.format: {name} of the argument, {first} of the operator's first
one, {accepted} data types, and of the value its {shape}, its {dtype}, its {type} or all of it: {value}.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from typing import Any, NamedTuple

import ml_dtypes
import native_calls
import numpy as np

import transformer_rtc
from transformer_rtc import Field, LaunchConfig, SimulatedDevice, TextSpec, _native
from transformer_rtc.arguments import (
    Argument,
    Array,
    Choice,
    Dimension,
    Input,
    Integer,
    Margin,
    Output,
    OutputDType,
    Real,
    Result,
    RowShape,
    Stream,
    Update,
)
from transformer_rtc.arrays.dtypes import TYPESTRS, dtype_id
from transformer_rtc.cache import DiskCache
from transformer_rtc.declaration import Declaration, declaration_of, declarations
from transformer_rtc.errors import ArgumentError, shown
from transformer_rtc.spec import DTYPES, Target

DEVICE = SimulatedDevice(static=True)
SHAPE = (2, 3, 8, 8)  # batch, heads, queries, keys

# ---- Arrays ----------------------------------------------------------------------------------------------------------

# DLPack's numbers of data types.
NUMBERS = {dtype.name: dtype.id for dtype in DTYPES.values()} | {
    "float64": 2 << 8 | 64, "int32": 32, "uint16": 1 << 8 | 16, "complex64": 5 << 8 | 64,
    "type 99 of 4 bits": 99 << 8 | 4,
}  # fmt: skip


class Stub(NamedTuple):
    """An array: native checks see it as a view of memory that is not there, functions as numpy's if it has such."""

    shape: tuple[int, ...] = SHAPE
    dtype: str = "float32"
    strides: tuple[int, ...] | None = None  # in elements
    offset: int = 0  # bytes from where elements may lie
    read_only: bool = False
    device: int = 0
    memory: bool = True

    def view(self, at: int) -> _native.View:
        at = at + self.offset if self.memory else 0
        return native_calls.view(self.shape, NUMBERS[self.dtype], at, self.strides, self.device, self.read_only)

    def numpy(self) -> np.ndarray | None:
        if self.device or not self.memory or math.prod(self.shape) > 2**20 or "type" in self.dtype:
            return None
        dtype = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))
        strides = None if self.strides is None else [stride * dtype.itemsize for stride in self.strides]
        # As much on both sides as the largest strides need.
        memory, middle = np.ones(1 << 17, np.uint8), 1 << 16
        made = np.ndarray(self.shape, dtype, memory, middle + self.offset, strides)
        made.flags.writeable = not self.read_only
        return made


class Protocol:
    """An array of nobody's, that says of itself what it is told to."""

    def __init__(self, device: object = (1, 0), capsule: object = None) -> None:
        self.device, self.capsule = device, capsule

    def __dlpack_device__(self) -> object:
        return self._answer(self.device)

    def __dlpack__(self, **_: object) -> object:
        return self._answer(self.capsule)

    def _answer(self, answer: object) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer


def interface(**changes: object) -> object:
    described = {"shape": SHAPE, "typestr": "<f4", "data": (4096, False), "version": 3, **changes}
    return type("Interface", (), {"__cuda_array_interface__": described})()


def stream_object(**attributes: object) -> object:
    return type("Stream", (), attributes)()


def used_capsule() -> object:
    capsule = np.ones(3).__dlpack__()
    np.from_dlpack(type("Once", (), {"__dlpack__": lambda *_, **__: capsule, "__dlpack_device__": lambda _: (1, 0)})())
    return capsule


# ---- The operators' arguments, by their roles ------------------------------------------------------------------------

Rows = list[tuple[Any, ...]]  # (message, value, value, ...)


def any_array(*shape: int) -> Rows:
    """Return what is no good array, whatever it is for."""
    packed = np.zeros(shape, np.dtype([("pad", "u1"), ("x", "f4")]))["x"]
    return [
        (r"must be an array \(.*\); it is a {type}", 1.0, "x", [1.0, 2.0], (), {}, b"four", object(), np.float32(1),
         np.float32, np.dtype("f4")),
        ("must have the machine's byte order; it is >f4", np.ones(shape, ">f4")),
        (r"must have no mask; pass its \.filled\(\)", np.ma.MaskedArray(np.ones(shape, np.float32))),
        ("must have strides that are multiples of its elements' size", packed),
        ("must be aligned to its elements of 4 bytes", Stub(shape, offset=1), Stub(shape, offset=2)),
        ("has elements, but no memory", Stub(shape, memory=False)),
    ]  # fmt: skip


def later(*shape: int) -> Rows:
    """Return what is no good array behind the first one."""
    return [
        *any_array(*shape),
        ("must be on the device of {first}, cuda:0; it is on cuda:1", Stub(shape, device=1)),
        (r"must be of the same framework as the numpy\.ndarray before it; it is a {type}", Protocol()),
    ]


def shapes(*given: tuple[int, ...]) -> list[Stub]:
    return [Stub(shape) for shape in given]


def strided(*given: tuple[int, ...], shape: tuple[int, ...] = SHAPE) -> list[Stub]:
    return [Stub(shape, strides=strides) for strides in given]


LAST = (
    r"must be contiguous in its last dimension; there its stride is {stride}: pass {name}\.contiguous\(\)",
    *strided((384, 128, 16, 2), (192, 64, 8, -1), (192, 64, 8, 0), (192, 64, 1, 8)),
)
SOLID = r"must be contiguous: pass {name}\.contiguous\(\)"
COLUMNS = (
    r"must have the shape \(8,\), one element for each column of {first}, or \(8, 8\), such a row for each head; it "
)
READ_ONLY = "is read-only"
OTHER_DTYPE = "must be one of {accepted}; it is "
NO_ACCESS = "gives no access to its memory: "
FIRST: Rows = [
    *any_array(*SHAPE), LAST,
    ("must have at least one dimension", Stub(())),
    (r"must have 1 to 2\^30 elements in its last dimension; it has 0", *shapes((2, 3, 8, 0), (0, 0))),
    (r"must have 1 to 2\^30 elements in its last dimension; it has 1073741825", Stub((1, 2**30 + 1))),
    (r"(and \w+ )*must have leading dimensions that collapse to at most two strides", *strided((1024, 256, 8, 1)),
     Stub((2, 2, 2, 2, 64), strides=(0, 1000, 640, 0, 1))),
    (r"must be on a CUDA GPU or the host; its DLPack device type is 8", Protocol((8, 0))),
    (NO_ACCESS, Protocol(None), Protocol(("a", 0)), Protocol(), Protocol(capsule=used_capsule())),
    (NO_ACCESS + ".*gone", Protocol(KeyError("gone")),
     *(Protocol(capsule=error("gone")) for error in (BufferError, RuntimeError, ValueError, OSError))),
    (OTHER_DTYPE + "(float64|complex64|complex128)",
     *(Protocol(capsule=np.zeros(3, dtype).__dlpack__()) for dtype in (np.float64, np.complex64, np.complex128))),
    (rf"must have elements of {re.escape(', '.join(TYPESTRS))} and no mask; they are ", interface(typestr="<f8"),
     interface(typestr=">f4"), interface(typestr="|V2"), interface(typestr=None), interface(mask=np.ones(1))),
    ("has no valid __cuda_array_interface__: ", interface(shape=None), interface(shape=("a",)), interface(data=None),
     interface(strides=("a",) * 4), interface(stream="a"), type("Bad", (), {"__cuda_array_interface__": 5})()),
    ("must lie in memory that can be addressed; it is at ", interface(shape=(-1, 8)), interface(data=(-1, False)),
     interface(data=(2**64, False)), interface(shape=(2**40, 2**40))),
    ("has 4 dimensions and 1 strides", interface(strides=(1,))),
]  # fmt: skip
ROWS: Rows = [
    *later(*SHAPE), LAST,
    (r"must have the shape of {first}, \(2, 3, 8, 8\); it has {shape}",
     *shapes((8,), (3, 8, 8), (2, 3, 8, 9), (2, 3, 7, 8), (1, *SHAPE))),
]  # fmt: skip
VALUE: Rows = [*later(1), (r"must have the shape \(\) or \(1,\); it has {shape}", *shapes((2,), (0,), (1, 1), (2, 3)))]
REAL: Rows = [
    ("must be a real number; it is of type {kind}", "1", b"1", None, 1j, True, [1.0], object(), np.ones(2, np.float32),
     np.bool_(True)),
    ("must be finite; it is -?nan in float32", float("nan"), float("-nan")),
    ("must be finite; it is inf in float32", float("inf"), 1e39, 3.5e38, 1e300),
    ("must be finite; it is -inf in float32", -float("inf"), -1e39),
    ("must be finite in float32; it is {value}", 10**400, 10**5000),
]  # fmt: skip
FLAG: Rows = [("must be True or False; it is {value}", 0, 1, "yes", "", None, 1.0, [], np.ones(2), object())]
MARGIN: Rows = [("must be a non-negative integer; it is {value}", -1, 0.5, True, "1", None, -(10**30), -(10**5000), [],
                 object(), np.ones(2, int))]  # fmt: skip
BY_KIND: dict[str, Rows] = {
    "rows": ROWS,
    "broadcast": [
        *later(*SHAPE), LAST,
        (r"must have a shape that is broadcast with that of {first}, \(2, 3, 8, 8\); it has {shape}",
         *shapes((2, 3, 8, 9), (2, 3, 7, 8), (5, 8, 8))),
    ],
    "rows_out": [
        *ROWS, (READ_ONLY, Stub(read_only=True)),
        ("has rows that overlap each other",
         *strided((0, 64, 8, 1), (192, 64, 0, 1), (192, 64, 7, 1), (189, 63, 8, 1), (191, 64, 8, 1))),
    ],
    "columns": [
        *later(8), (COLUMNS + "has {shape}", *shapes((7,), (9,), (3, 8), (1, 8), (), (0,))),
        (SOLID, *strided((2,), (-1,), (0,), shape=(8,)), *strided((9, 1), (1, 8), (0, 1), shape=(8, 8))),
    ],
    "column_values": [
        *later(8),
        (r"must have the shape \(8,\), one element for each column of {first}; it has {shape}",
         *shapes((7,), (9,), (3, 8), (1, 8), (), (0,))),
        (SOLID, *strided((2,), (-1,), (0,), shape=(8,))),
    ],
    "row_inputs": [
        *later(*SHAPE[:-1]),
        (r"must have the shape \(2, 3, 8\), one element for each row of {first}; it has {shape}",
         *shapes(SHAPE, (8,), (48,))),
        (SOLID, *strided((48, 16, 2), (30, 9, 1), (1, 2, 6), shape=SHAPE[:-1])),
    ],
    "value": VALUE,
    "value_out": [*VALUE, (READ_ONLY, Stub((1,), read_only=True))],
    "head_values": [
        *later(3), (r"must have one element for each head of {first} \[\.\.\., heads, queries, keys\], whose shape is "
                    r"\(2, 3, 8, 8\); it has {shape}", *shapes((2,), (3, 1), (2, 3), ())),
        (SOLID, *strided((2,), (0,), shape=(3,))),
    ],
    "mask": [
        *later(*SHAPE), LAST,
        (r"must have the shape of {first}, \(2, 3, 8, 8\), or one that is broadcast to it along dimensions before the "
         "last; it has {shape}", *shapes((2, 3, 8, 7), (5, 8, 8), (), (2, 3, 8, 1), (1, *SHAPE))),
    ],
    "real": REAL,
    "non_negative": [*REAL, ("must not be negative; it is {value}", -1e-6, -1)],
    "dtype": [(OTHER_DTYPE + "{value}", "float64", "uint128", "nonsense", "", "x.float32", "f4,{", ">f4", complex,
                   float, 5, {}, object(), np.complex64, ml_dtypes.float8_e4m3fnuz, np.ones(3, np.float32),
                   np.float32(1), [("a", "f4"), ("a", "f4")])],
    "sm_margin": MARGIN,
    "stream": [
        (r"must be a handle \(an int\), or have __cuda_stream__, \.cuda_stream or \.ptr; it is {value}", -1, 2**64, 1.5,
         True, "stream", [], object(), np.float32(1), stream_object(cuda_stream=-1), stream_object(cuda_stream=None),
         stream_object(ptr=2**64), stream_object(ptr="x"), stream_object(__cuda_stream__=(1, 5)),
         type("Stream", (), {"__cuda_stream__": lambda self: (0, 77)}),  # a class, and no instance
         *(stream_object(__cuda_stream__=lambda self, answer=answer: answer)
           for answer in (5, (0,), (0, "handle"), (0, 1, 2), (0, None)))),
        ("must be None: the simulator has no streams", 0),
    ],
    "choice": [("must be {words} or None; it is {value}", True, False, 1, "", "causal", "lower",
                b"aligned", np.array(["aligned"]), [], object())],
    "integer": [("must be a number of keys of at least 1; it is {value}", 0, -1, True, 0.5, "4", -(10**5000), [],
                 object(), np.ones(2, int))],
    "flag": FLAG,
    "dimension": [(r"must be an integer from -4 to 3, as {first} has the shape \(\d, 3, 8, 8\); it is {value}", 4, -5,
                   True, 1.0, "1", None, (1,), [], 10**5000, np.float32(1), np.bool_(True), np.ones(2, int), object())],
    "row_shape": [
        ("must be a positive integer, or a tuple of them that is not empty; it is {value}", 0, -8, (0, 8), True,
         (True, 8), 8.0, (8.0, 8), "8", (None, 8), (), [], {}, np.ones(2, int), object(), (8, (8,))),
        (r"must be the last dimensions of {first}, whose shape is \(\d, 3, 8, 8\); it is {value}", 7, (3,), (3, 8),
         [7, 8], (5, 2, 3, 8, 8), 10**30),
    ],
    # None is the default.
    "wanted with": [(message, *(value for value in values if value is not None)) for message, *values in FLAG],
}  # fmt: skip
_KNOWN = [dtype.name for dtype in DTYPES.values()]
FUNCTIONS = {name: getattr(transformer_rtc, name) for name in declarations()}


def kind_of(argument: Argument) -> str:
    """Return of what kind an argument is, as `BY_KIND` has it."""
    match argument:
        case Input(broadcast=True):
            return "mask"
        case Array(shape="() | 1"):
            return "value" if isinstance(argument, Input) else "value_out"
        case Input(shape="..."):
            return "row_inputs"
        case Input() if " | " in argument.shape:
            return "columns"
        case Input(shape="columns"):
            return "column_values"
        case Input() if argument.shape == "heads":
            return "head_values"
        case Real(minimum=0):
            return "non_negative"
        case Result() if argument.wanted_with:
            return "wanted with"
    kinds = {Input: "rows", Output: "rows_out", Real: "real", OutputDType: "dtype", Choice: "choice",
             Integer: "integer", Margin: "sm_margin", Stream: "stream", Dimension: "dimension",
             RowShape: "row_shape"}  # fmt: skip
    return kinds.get(type(argument), "flag")


def _accepted(declaration: Declaration, argument: Argument, value: object) -> bool:
    """Whether an operator takes what others refuse: no columns, or arrays that are broadcast to one shape."""
    if not isinstance(value, Stub):
        with contextlib.suppress(ArgumentError):
            return isinstance(argument, OutputDType) and DTYPES[dtype_id(value)] in argument.dtypes
        return False
    if declaration.elementwise and argument is declaration.arrays[0] and value.shape[-1:] == (0,):
        return True
    if argument.name not in declaration.broadcasts:
        return False
    return value.shape == SHAPE and value.strides is not None and value.strides[-1] == 0


def _rows_of(declaration: Declaration, argument: Argument) -> Rows:
    first = argument is declaration.arguments[0]
    rows = FIRST if first else BY_KIND["broadcast" if argument.name in declaration.broadcasts else kind_of(argument)]
    rows = [(message, *(one for one in values if not _accepted(declaration, argument, one)))
            for message, *values in rows]  # fmt: skip
    if declaration.broadcasts and argument.name not in declaration.broadcasts:
        rows = [(message.replace("the shape of {first}", "the shape that the inputs are broadcast to"), *values)
                for message, *values in rows]  # fmt: skip
    if not isinstance(argument, (Array, OutputDType)) or isinstance(argument, Result):
        return rows
    accepted = [dtype.name for dtype in argument.dtypes]
    if isinstance(argument, OutputDType):
        return [*rows, (OTHER_DTYPE + r"\w+$", *(name for name in _KNOWN if name not in accepted))]
    shape = next(value.shape for _, *values in rows for value in values if isinstance(value, Stub))
    others = [Stub(shape, name) for name in NUMBERS if name not in accepted]
    of_numpy = [np.zeros(shape, dtype) for dtype in ("S4", "M8[s]", object, ml_dtypes.int4, [("a", "f4")])]
    required = isinstance(argument, Input) and not argument.optional
    return [
        *rows,
        (OTHER_DTYPE + "{dtype}", *others, *of_numpy),
        *([("must be an array; it is None", None)] if required else []),
    ]


def filled(message: str, value: object, name: str, first: str = "", accepted: str = "", words: str = "") -> str:
    """Return the regular expression of what is told of a value."""
    type_ = f"{type(value).__module__}.{type(value).__qualname__}"
    told = {
        "name": name, "first": first, "accepted": accepted, "words": words, "value": shown(value),
        "type": type_, "kind": type_.removeprefix("builtins."),
        "shape": getattr(value, "shape", ""), "dtype": getattr(value, "dtype", ""),
        "stride": value.strides[-1] if isinstance(value, Stub) and value.strides else "",
    }  # fmt: skip
    return message.format(**{word: re.escape(str(text)) for word, text in told.items()})


def _refused(argument: Argument, name: str, first: str, rows: Rows) -> list[tuple[Any, str]]:
    accepted = ", ".join(dtype.name for dtype in getattr(argument, "dtypes", ()))
    words = ", ".join(f"'{word}'" for word in getattr(argument, "words", ()))
    return [
        (value, f"{name} {filled(message, value, name, first, accepted, words)}")
        for message, *values in rows
        for value in values
    ]


def refused_views(operator: str, name: str) -> list[tuple[Any, str]]:
    """Return (value, message) of what an operator's native checks refuse: arrays as `Stub`."""
    first, *_ = described = declaration_of(operator).arguments
    argument = next(one for one in described if one.name == name)
    found = _refused(argument, argument.keyword, first.keyword, _rows_of(declaration_of(operator), argument))
    is_array = isinstance(argument, (Input, Output, Update))
    return [pair for pair in found if not is_array or isinstance(pair[0], Stub)]


def refused_values(name: str, keyword: str) -> list[tuple[Any, str]]:
    """Return (value, message) of what a function refuses."""
    parameters = parameters_of(name)
    declaration = declarations()[name]
    selector = [declaration.selector] if declaration.selector else []
    argument = next(one for one in (*declaration.arguments, *selector) if one.keyword == keyword)
    rows = _rows_of(declaration, argument)
    found = []
    for value, message in _refused(argument, keyword, next(iter(parameters)), rows):
        of = value.numpy() if isinstance(value, Stub) else value
        if of is not None or (value is None and parameters[keyword].default is not None):
            found.append((of, message))
    return found


def parameters_of(name: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(FUNCTIONS[name]).parameters)


def refused_by(name: str, argument: str) -> list[Any]:
    """Return what an argument of an operator's function refuses."""
    return [value for value, _ in refused_values(name, argument)]


def good(name: str, shape: tuple[int, ...] = SHAPE) -> dict[str, Any]:
    """Return the arguments of a call that is refused for nothing, with rows of this shape."""
    required = [one for one, found in parameters_of(name).items() if found.default is inspect.Parameter.empty]
    split_by = declarations()[name].split_by  # with which all arrays of rows have one width
    arrays = {one.keyword: one for one in declarations()[name].arrays}
    needed = (*required, *([split_by] if split_by else []))
    return {keyword: np.ones(native_calls.shape_of(arrays[keyword], shape), np.float32) for keyword in needed}


# ---- Other functions -------------------------------------------------------------------------------------------------


def takes(accepted: str, *values: object) -> Rows:
    return [("{name} is {value}; it takes " + accepted, *values)]


NO_INTEGER = [-1, 1.5, "1", None, True, 10**5000, [], object(), np.ones(2, int)]
NO_DEVICE = takes("the ordinal of a GPU", *NO_INTEGER, 2**31)
NO_FLAG = takes("True or False", *FLAG[0][1:])
NO_PATH = takes("the path of a file", 5.0, True, [], "", "a\0b", object())
NO_SIZE = takes("a tuple of three integers from 0 to", None, 5, (1, 1), [1, 1, 1], (1, 1, -1), (1, 1, 2**32),
                (1.0, 1, 1), (True, 1, 1), "111")  # fmt: skip
NO_MEMORY = takes("an integer from 0 to 2147483647", *NO_INTEGER)
NO_SPEC = takes("a KernelSpec", None, "rms_norm", TextSpec, object())
NO_CONFIG = takes("a LaunchConfig", None, (1, 1, 1), {}, LaunchConfig)
NO_CACHE = takes("a DiskCache", None, "folder", 5)
NO_TARGET = takes("an architecture, such as 90, or a Target", *NO_INTEGER)
NO_TEXT = takes(r"CUDA C\+\+", None, 5, b"text", "a\0b", "\ud800", [])
NAMES = ["", "a b", "1a", "ü", 5, None, b"f", "a\0"]
BAD_FIELDS: Rows = [
    ("fields has .*; it takes Fields", ("x",), (("x", "int32"),)),
    ("two fields are named x", (Field("x", "int32"), Field("x", "int32"))),
]  # fmt: skip
NO_FIELDS = [*takes("a tuple of Fields", None, 5, "ab"), *BAD_FIELDS]
OPTIONS = [None, 5, "-G", (5,), ("a\0",)]
STREAM = takes("an integer from 0 to 18446744073709551615", -1, 2**64, 1.5, "s", None, True)
NO_PARAMS: Rows = [
    ("store: params is {value}; it takes bytes, or values by their names", None, 5, "ab", {1: 2}),
    ("values for out, value expected; given: ", {}, {"out": 0}),
    ("value must be of the type int32; it is ", {"out": 0, "value": 1.5}, {"out": 0, "value": 2**31},
     {"out": 0, "value": np.ones(2, int)}, {"out": 0, "value": "1"}),
    ("store takes 16 bytes of parameters; 0 were given", b""),
    ("out must be of the type pointer; it is -1", {"out": -1, "value": 1}),
    ("store: out must be an address or a numpy array; it is ", {"out": 1.5, "value": 1}),
]  # fmt: skip
TEXT = 'extern "C" __global__ void store(const Params p) { *(int*)p.out = p.value; }'
FIELDS = (Field("out", "pointer"), Field("value", "int32"))
CONFIG = LaunchConfig((1, 1, 1), (1, 1, 1))
SPEC = TextSpec(TEXT, "store", FIELDS)
WARMUP = {"operators": "rms_norm", "dtypes": "float32", "hidden_sizes": 8, "architectures": "sm_90"}
LAUNCH = {"config": NO_CONFIG, "params": NO_PARAMS, "stream": STREAM}
PLAIN = {"grid": NO_SIZE, "block": NO_SIZE, "params": NO_PARAMS, "stream": STREAM}
ONE = {"grid": (1, 1, 1), "block": (1, 1, 1)}

# Of every other public function: a good call's arguments, and what each argument refuses.
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Rows]]] = {
    "freeze": ({}, {}),
    "implementations": ({"op": transformer_rtc.rms_norm}, {
        "op": takes(r".*\brms_norm, .* of transformer_rtc", None, "rms_norm", 5, print), "device": NO_DEVICE,
    }),
    "using": ({}, {"implementation": takes("rtc, static, simulator or a SimulatedDevice", None, "cuda", 5, ["rtc"],
                                           np.array(["rtc", "static"]), SimulatedDevice)}),
    "device_limits": ({}, {"device": NO_DEVICE}),
    "record": ({}, {"path": [*NO_PATH, ("path is {value}, which cannot be written: ", "/", "/dev/null/x")]}),
    "warmup": (WARMUP, {
        "operators": [(r"operators has .*[;?] [iI]t takes .*\brms_norm, ", 5, None, "norm", ["rms_norm", "norm"], print,
                       object(), [[]])],
        "dtypes": [
            ("rms_norm needs dtypes and hidden_sizes, such as ", []),
            ("dtypes has '?(float64|nonsense|None)'?: a data type must be one of .*; it is ", "float64", "nonsense",
             ["float32", "float64"], None),
            ("rms_norm: x must be one of float32, float16, bfloat16; it is int8", "int8"),
        ],
        "hidden_sizes": [
            ("rms_norm needs dtypes and hidden_sizes, such as ", []),
            ("rms_norm: a hidden size is {value}; it must be from 1 to 1073741824", 0, -1, 2**30 + 1),
            ("hidden_sizes has .*; it takes integers", 8.0, "8", True, None, [8, 8.0], np.ones((2, 2), int)),
        ],
        "manifest": [
            ("manifest has .*; it takes a file's path, or what record", 5, ["line"]),
            *takes("the path of a file", "", "a\0b"),
            ("the manifest .* cannot be read: ", "/", "/nonexistent"),
        ],
        "architectures": [("architectures has .*; it takes sm_80, ", "90", 90, ["sm_90", "sm_75"], [["sm_90"]])],
        "per_head": NO_FLAG, "sm_margin": NO_FLAG, "unaligned": NO_FLAG,
        "tuning": [
            *takes("the path of a file", "", "a\0b", 5),
            ("the tuning file .* cannot be read: ", "/", "/nonexistent"),
        ],
        "threads": takes("a positive integer, or None", 0, -1, 1.5, True, "2", 10**5000),
        "progress": takes("True, False or a callable", "yes", 1, None, []),
        "arguments": [
            ("rms_norm: (weight|out_dtype) is .*; it takes a data type, True, False or None", {"weight": "float64"},
             {"weight": 5}, {"out_dtype": np.ones(2)}),
            ("rms_norm: return_rstd is .*; it takes True, False or None", {"return_rstd": "yes"},
             {"return_rstd": np.ones(2)}),
            ("gain is no argument of these operators; it takes amax, ", {"gain": True}),
        ],
    }),
    "LaunchConfig": (ONE, {"grid": NO_SIZE, "block": NO_SIZE, "cluster": NO_SIZE, "dynamic_shared_memory": NO_MEMORY,
                           "cooperative": NO_FLAG}),
    "SimulatedDevice": ({}, {
        "architecture": takes("80, 86, 87, 88, 89, 90, ", 75, 90.0, "90", None, []),
        "checked": NO_FLAG, "static": NO_FLAG,
        "order": takes("first_in, last_in, random", "fifo", 0, None, []),
        "seed": takes("an integer from 0 to 18446744073709551615", *NO_INTEGER, 2**64),
        "multiprocessors": takes("an integer from 1 to 1024", *NO_INTEGER, 0, 1025),
        "endless_seconds": takes("an integer from 1 to 1000000", *NO_INTEGER, 0, 1.5),
    }),
    "Field": ({"name": "x", "type": "int32"}, {
        "name": takes(r"a name of C\+\+'s", *NAMES),
        "type": [("field x has the type {value}; types are pointer, int64, ", "int16", "", None, [])],
        "source": [],
    }),
    "Params": ({}, {"fields": [*takes("Fields", None, 5), *BAD_FIELDS, ("fields has ", "ab", [5])]}),
    "TextSpec": ({"text": TEXT, "name": "store"}, {
        "text": NO_TEXT, "name": takes("the name of a function", *NAMES),
        "fields": [*NO_FIELDS, *takes("a tuple of Fields", [5], list(FIELDS))],
        "options": takes("a tuple of strings", *OPTIONS, ["-G"]),
        "include_folders": takes("a tuple of strings", *OPTIONS, ["folder"]),
    }),
    "KernelManager": ({"cache": DiskCache(None)}, {
        "cache": NO_CACHE, "compile_program": takes("a callable", None, 5),
        "identity": takes("a callable", None, "12.9"), "options": takes("a Settings", None, {}),
        "most_kernels": takes("an integer from 1 to 2147483647", None, 0, -1, 1.5, "5"),
    }),
    "KernelManager.compile": ({"text": TEXT, "symbol": "store", "fields": FIELDS, "device": DEVICE}, {
        "text": NO_TEXT, "symbol": takes("the name of the entry", *NAMES),
        "fields": [*NO_FIELDS, ("fields has 5", [5])], "device": NO_DEVICE,
        "options": takes("a tuple of strings", *OPTIONS),
        "include_folders": takes("a tuple or list of paths", None, 5, "folder", {"folder"}),
    }),
    "KernelManager.get": ({"spec": SPEC, "device": DEVICE}, {"spec": NO_SPEC, "device": NO_DEVICE}),
    "KernelManager.get_all": ({"specs": [SPEC], "device": DEVICE}, {
        "specs": [*takes("a tuple or list of KernelSpec", *NO_SPEC[0][1:]),
                  ("specs is .*; it takes a KernelSpec", *([spec] for spec in NO_SPEC[0][1:]))],
        "device": NO_DEVICE,
    }),
    "KernelManager.is_compiled": ({"spec": SPEC, "device": DEVICE}, {"spec": NO_SPEC, "device": NO_DEVICE}),
    "KernelManager.image": ({"spec": SPEC, "target": Target(90, "fast")}, {
        "spec": NO_SPEC, "target": NO_TARGET, "cubin": NO_FLAG,
    }),
    "KernelManager.in_memory": ({"spec": SPEC, "target": 90}, {"spec": NO_SPEC, "target": NO_TARGET}),
    "KernelManager.on_event": ({}, {"callback": takes("a callable", None, 5, "print", Protocol())}),
    "KernelManager.freeze": ({}, {}),
    "Kernel.launch": ({"config": CONFIG}, LAUNCH),
    "Kernel.launch_plain": (ONE, PLAIN),
    "Kernel.launch_cooperative": (ONE, PLAIN),
    "Kernel.prepare": ({}, {"config": NO_CONFIG}),
    "Kernel.max_active_ctas": ({"block": (1, 1, 1)}, {"block": NO_SIZE, "dynamic_shared_memory": NO_MEMORY}),
    "Kernel.max_active_clusters": ({"block": (1, 1, 1), "cluster": (1, 1, 1)}, {
        "block": NO_SIZE, "cluster": NO_SIZE, "dynamic_shared_memory": NO_MEMORY,
    }),
    "Kernel.set_cache_preference": ({}, {"preference": takes("none, shared, l1, equal", "l2", "", None, 0, [])}),
    "pack": ({"cache": DiskCache(None), "path": "pack"}, {"cache": NO_CACHE, "path": NO_PATH}),
    "unpack": ({"cache": DiskCache(None), "path": "pack"}, {"cache": NO_CACHE, "path": NO_PATH}),
}  # fmt: skip

# What a caller only gets, or what is checked where it is used.
NOT_CALLED = {"DeviceArray", "Event", "ManifestEntry", "WarmupRecord", "Kernel", "KernelSpec", "manager"}
NOT_CALLED |= {"ArrayLike", "__version__", *transformer_rtc.errors.__all__}
# Parts of the package call these with what they have made.
OWN = {"KernelManager.get_static", "KernelManager.key"}
