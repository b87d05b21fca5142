"""One table of the arguments of every public function, with what each refuses."""

from __future__ import annotations

import inspect
from typing import Any

import ml_dtypes
import numpy as np

import transformer_rtc
from transformer_rtc import Field, LaunchConfig, SimulatedDevice, TextSpec, dispatch
from transformer_rtc.cache import DiskCache
from transformer_rtc.spec import DTYPES, Target

DEVICE = SimulatedDevice(static=True)
SHAPE = (2, 3, 8, 8)  # batch, heads, queries, keys


class Protocol:
    """An array of nobody's, that says of itself what it is told to."""

    def __init__(self, **answers: object) -> None:
        self.answers = answers

    def __dlpack_device__(self) -> object:
        return self._answer("device", (1, 0))

    def __dlpack__(self, **_: object) -> object:
        return self._answer("capsule", None)

    def _answer(self, name: str, otherwise: object) -> object:
        answer = self.answers.get(name, otherwise)
        if isinstance(answer, Exception):
            raise answer
        return answer


def interface(**changes: object) -> object:
    described = {"shape": SHAPE, "typestr": "<f4", "data": (4096, False), "version": 3, **changes}
    return type("Interface", (), {"__cuda_array_interface__": described})()


def ones(shape: tuple[int, ...] = SHAPE, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def used_capsule() -> object:
    capsule = ones().__dlpack__()
    np.from_dlpack(type("Once", (), {"__dlpack__": lambda *_, **__: capsule, "__dlpack_device__": lambda _: (1, 0)})())
    return capsule


def read_only(shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    array = ones(shape)
    array.flags.writeable = False
    return array


def misaligned(shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(4 * int(np.prod(shape)) + 1, np.uint8)[1:].view(np.float32).reshape(shape)


def of_type(shape: tuple[int, ...], *accepted: str) -> list[object]:
    """Return arrays of a right shape and of every data type but the accepted ones, among others that numpy has."""
    types = [np.float64, np.int32, np.uint16, np.complex64, "S4", "M8[s]", object, ml_dtypes.int4, [("a", "f4")]]
    for dtype in DTYPES.values():
        if dtype.name not in accepted:
            types.append(getattr(ml_dtypes, dtype.name, dtype.name))
    return [np.zeros(shape, dtype) for dtype in types]


FLOATS = ("float32", "float16", "bfloat16")
NO_ARRAYS: list[object] = [1.0, "x", [1.0, 2.0], (), {}, np.float32(1), np.float32, object(), np.dtype("f4")]


def arrays(shape: tuple[int, ...], *accepted: str) -> list[object]:
    """Return what is no good array of a shape, whatever it is for."""
    made = ones(shape)
    return [
        *NO_ARRAYS, *of_type(shape, *accepted), made.astype(">f4"), np.ma.MaskedArray(made), misaligned(shape),
    ]  # fmt: skip


ROWS = [
    *arrays(SHAPE, *FLOATS), ones((*SHAPE[:-1], 16))[..., ::2], ones(SHAPE)[..., ::-1],
    np.broadcast_to(np.float32(1), SHAPE), ones(()), ones((2, 3, 8, 0)),
]  # fmt: skip
FIRST = [
    *ROWS, None, Protocol(device=(8, 0)), Protocol(device=None), Protocol(device=KeyError("gone")),
    Protocol(device=("a", 0)), Protocol(), Protocol(capsule=KeyError("gone")), Protocol(capsule=OSError("gone")),
    Protocol(capsule=used_capsule()), interface(typestr="<f8"), interface(typestr=None), interface(shape=None),
    interface(shape=(-1, 8)), interface(shape=("a",)), interface(data=None), interface(data=(-1, False)),
    interface(data=(2**64, False)), interface(strides=(1,)), interface(strides=("a",) * 4), interface(stream="a"),
    interface(shape=(2**40, 2**40)), interface(mask=ones()), type("Bad", (), {"__cuda_array_interface__": 5})(),
]  # fmt: skip
OTHER_SHAPES = [ones((8,)), ones((3, 8, 8)), ones((2, 3, 8, 9)), ones((1, *SHAPE))]
MORE_ROWS = [*ROWS, *OTHER_SHAPES, None]
OPTIONAL_ROWS = [*ROWS, *OTHER_SHAPES]
OUT = [*arrays(SHAPE, *FLOATS, "float8_e4m3fn", "float8_e5m2", "int8"), *OTHER_SHAPES, read_only(),
       np.broadcast_to(np.float32(1), SHAPE)]  # fmt: skip
COLUMNS = [*arrays((8,), *FLOATS), ones((9,)), ones((3, 8)), ones((1, 8)), ones(()), ones((16,))[::2]]
VALUE = [*arrays((1,), "float32"), ones((2,)), ones((0,)), ones((1, 1))]
ROW_VALUES = [*arrays(SHAPE[:-1], "float32"), ones(SHAPE), ones((8,)), ones((2, 3, 16))[..., ::2]]
HEADS = [*arrays((3,), *FLOATS), ones((2,)), ones((3, 1)), ones(()), ones((6,))[::2]]
MASK = [*arrays(SHAPE, "bool", "uint8", *FLOATS), ones((2, 3, 8, 7), bool), ones((5, 8, 8), bool), ones((), bool),
        ones((2, 3, 8, 1), bool), ones((1, *SHAPE), bool), ones((2, 3, 8, 16), bool)[..., ::2]]  # fmt: skip
NO_NUMBER = [
    float("nan"), float("inf"), -float("inf"), 1e39, 10**400, "1", None, 1j, True, [1.0], object(),
    np.ones(2, np.float32), np.bool_(True), b"1",
]  # fmt: skip
NO_FLAG = [0, 1, "yes", "", None, 1.0, [], np.ones(2), object()]
NO_DTYPE = ["float64", np.int32, float, "nonsense", "", {}, 5, np.ones(3, np.float32), np.float32(1), "x.float32",
            "f4,{", ">f4", object(), [("a", "f4"), ("a", "f4")]]  # fmt: skip
NO_MARGIN = [-1, 0.5, True, "1", None, -(10**5000), [], object(), np.ones(2, int)]
NO_STREAM = [-1, 2**64, 1.5, True, "stream", [], object(), np.float32(1), 0,
             type("Stream", (), {"cuda_stream": -1})(), type("Stream", (), {"ptr": 2**64})(),
             type("Stream", (), {"__cuda_stream__": lambda self: (0, "handle")})()]  # fmt: skip

# What each argument of the operators refuses; of one name in several functions, for each of them.
OPERATORS: dict[str, list[Any]] = {
    "weight": COLUMNS, "bias": COLUMNS, "eps": [*NO_NUMBER, -1e-6, -1], "weight_offset": NO_NUMBER, "out": OUT,
    "residual": MORE_ROWS, "residual_out": [*OPTIONAL_ROWS, read_only()], "out_dtype": [*NO_DTYPE, "bool", "uint8"],
    "return_rstd": NO_FLAG, "return_mean": NO_FLAG, "row_scaling": NO_FLAG, "amax": [*VALUE, read_only((1,))],
    "scale_inv": [*VALUE, read_only((1,))], "sm_margin": NO_MARGIN, "stream": NO_STREAM, "dy": FIRST, "s": MORE_ROWS,
    "ds": OPTIONAL_ROWS, "mean": ROW_VALUES, "rstd": ROW_VALUES, "lse": ROW_VALUES, "dresidual": OPTIONAL_ROWS,
    "return_dx": NO_FLAG, "return_dweight": NO_FLAG, "return_dbias": NO_FLAG, "return_dsink": NO_FLAG,
    "return_dmask": NO_FLAG, "return_lse": NO_FLAG,
    "dweight_dtype": [*NO_DTYPE, "int8", "float8_e4m3fn"], "mask": MASK, "mask_keeps": NO_FLAG, "sink": HEADS,
    "causal": [True, False, 1, "", "causal", b"aligned", np.array(["aligned"]), [], object()],
    "window": [0, -1, True, 1.5, "4", -(10**5000), np.ones(2, int), [], object()],
    "y": MORE_ROWS, "x": MORE_ROWS,
}  # fmt: skip
# What else must be given where an argument is.
WITH: dict[str, dict[str, Any]] = {"window": {"causal": "aligned"}, "sink": {"lse": None}}

NO_INTEGER = [-1, 1.5, "1", None, True, 10**5000, [], object()]
NO_TEXT = [None, 5, b"text", "a\0b", "\ud800", []]
NO_PATH = [5.0, True, [], "", "a\0b", object()]
NO_SIZE = [None, 5, (1, 1), [1, 1, 1], (1, 1, -1), (1, 1, 2**32), (1.0, 1, 1), (True, 1, 1), "111"]
NO_DEVICE = [*NO_INTEGER, 2**31]
NO_SPEC = [None, "rms_norm", TextSpec, object()]
NO_CONFIG = [None, (1, 1, 1), {}, LaunchConfig]
NO_FIELDS = [None, 5, "ab", [5], ("x",), (("x", "int32"),), (Field("x", "int16"),), (Field("1x", "int32"),),
             (Field("x", "int32"), Field("x", "int32")), (Field(5, "int32"),), (Field("x", []),)]  # fmt: skip
NO_OPTIONS = [None, 5, "-G", (5,), ("a\0",)]
NO_NAME = ["", "a b", "1a", "ü", 5, None, b"f", "a\0"]
NO_PARAMS = [None, 5, "ab", {}, {"out": 0}, {"out": 0, "value": 1.5}, {"out": 0, "value": 2**31}, {1: 2}, b"",
             {"out": -1, "value": 1}, {"out": 0, "value": np.ones(2, int)}, {"out": 1.5, "value": 1}]  # fmt: skip
TEXT = 'extern "C" __global__ void store(const Params p) { *(int*)p.out = p.value; }'
FIELDS = (Field("out", "pointer"), Field("value", "int32"))
CONFIG = LaunchConfig((1, 1, 1), (1, 1, 1))
WARMUP = {"operators": "rms_norm", "dtypes": "float32", "hidden_sizes": 8, "architectures": "sm_90"}
LAUNCH = {"config": NO_CONFIG, "params": NO_PARAMS, "stream": [-1, 2**64, 1.5, "s", None, True]}
PLAIN = {"grid": NO_SIZE, "block": NO_SIZE, "params": NO_PARAMS, "stream": LAUNCH["stream"]}

# Of every other public function: a good call's arguments, and what each argument refuses.
OTHERS: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {
    "freeze": ({}, {}),
    "implementations": ({"op": transformer_rtc.rms_norm}, {"op": [None, "rms_norm", 5, print],
                                                           "device": NO_DEVICE}),
    "using": ({}, {"implementation": [None, "cuda", 5, ["rtc"], np.array(["rtc", "static"]), SimulatedDevice]}),
    "device_limits": ({}, {"device": NO_DEVICE}),
    "record": ({}, {"path": [*NO_PATH, "/", "/dev/null/x"]}),
    "warmup": (WARMUP, {
        "operators": [5, None, "norm", ["rms_norm", "norm"], print, object(), [[]]],
        "dtypes": [[], "float64", "int8", "nonsense", ["float32", "float64"], None],
        "hidden_sizes": [[], 0, -1, 2**30 + 1, 8.0, "8", True, None, [8, 8.0], np.ones((2, 2), int)],
        "manifest": [5, "", "a\0b", "/", "/nonexistent", ["line"]],
        "architectures": ["90", 90, ["sm_90", "sm_75"], [["sm_90"]]],
        "per_head": NO_FLAG, "sm_margin": NO_FLAG, "threads": [0, -1, 1.5, True, "2", 10**5000],
        "progress": ["yes", 1, None, []],
        "arguments": [{"weight": "float64"}, {"weight": 5}, {"gain": True}, {"return_rstd": "yes"},
                      {"out_dtype": np.ones(2)}, {"return_rstd": np.ones(2)}],
    }),
    "LaunchConfig": ({"grid": (1, 1, 1), "block": (1, 1, 1)}, {
        "grid": NO_SIZE, "block": NO_SIZE, "cluster": NO_SIZE, "dynamic_shared_memory": [*NO_INTEGER, 2**31],
        "cooperative": NO_FLAG,
    }),
    "SimulatedDevice": ({}, {
        "architecture": [75, 90.0, "90", None, []], "checked": NO_FLAG, "static": NO_FLAG,
        "order": ["fifo", 0, None, []], "seed": [*NO_INTEGER, 2**64],
        "multiprocessors": [*NO_INTEGER, 0, 1025],
    }),
    "Params": ({}, {"fields": NO_FIELDS}),
    "TextSpec": ({"text": TEXT, "name": "store"}, {
        "text": NO_TEXT, "name": NO_NAME, "fields": [*NO_FIELDS, list(FIELDS)], "options": [*NO_OPTIONS, ["-G"]],
    }),
    "KernelManager": ({"cache": DiskCache(None)}, {"cache": [None, "folder"], "compile_program": [None, 5],
                           "identity": [None, "12.9"], "options": [None, {}], "most_kernels": [None, 0, -1, 1.5, "5"]}),
    "KernelManager.compile": ({"text": TEXT, "symbol": "store", "fields": FIELDS, "device": DEVICE}, {
        "text": NO_TEXT, "symbol": NO_NAME, "fields": NO_FIELDS, "device": NO_DEVICE, "options": NO_OPTIONS,
    }),
    "KernelManager.get": ({"spec": TextSpec(TEXT, "store", FIELDS), "device": DEVICE},
                          {"spec": NO_SPEC, "device": NO_DEVICE}),
    "KernelManager.get_all": ({"specs": [TextSpec(TEXT, "store", FIELDS)], "device": DEVICE},
                              {"specs": [*NO_SPEC, *([spec] for spec in NO_SPEC)], "device": NO_DEVICE}),
    "KernelManager.is_compiled": ({"spec": TextSpec(TEXT, "store", FIELDS), "device": DEVICE},
                                  {"spec": NO_SPEC, "device": NO_DEVICE}),
    "KernelManager.image": ({"spec": TextSpec(TEXT, "store", FIELDS), "target": Target(90, "fast")},
                            {"spec": NO_SPEC, "target": NO_INTEGER}),
    "KernelManager.in_memory": ({"spec": TextSpec(TEXT, "store", FIELDS), "target": 90},
                                {"spec": NO_SPEC, "target": NO_INTEGER}),
    "KernelManager.on_event": ({}, {"callback": [None, 5, "print", Protocol()]}),
    "KernelManager.freeze": ({}, {}),
    "Kernel.launch": ({"config": CONFIG}, LAUNCH),
    "Kernel.launch_plain": ({"grid": (1, 1, 1), "block": (1, 1, 1)}, PLAIN),
    "Kernel.launch_cooperative": ({"grid": (1, 1, 1), "block": (1, 1, 1)}, PLAIN),
    "Kernel.prepare": ({}, {"config": NO_CONFIG}),
    "Kernel.max_active_ctas": ({"block": (1, 1, 1)}, {"block": NO_SIZE, "dynamic_shared_memory": NO_INTEGER}),
    "Kernel.max_active_clusters": ({"block": (1, 1, 1), "cluster": (1, 1, 1)}, {
        "block": NO_SIZE, "cluster": NO_SIZE, "dynamic_shared_memory": NO_INTEGER,
    }),
    "Kernel.set_cache_preference": ({}, {"preference": ["l2", "", None, 0, []]}),
    "pack": ({"cache": DiskCache(None), "path": "pack"}, {"cache": [None, "folder", 5], "path": NO_PATH}),
    "unpack": ({"cache": DiskCache(None), "path": "pack"}, {"cache": [None, "folder", 5], "path": NO_PATH}),
}  # fmt: skip

# What else a message may name: a part of what was given.
TOLD = {"params": "params|parameters|values|out|value", "fields": "fields?", "hidden_sizes": "hidden_sizes|hidden size",
        "dtypes": "dtypes|x"}  # fmt: skip

# What a caller only gets, or what is checked where it is used.
RESULTS = {"DeviceArray", "Event", "ManifestEntry", "WarmupRecord", "Kernel"}
BASES = {"KernelSpec", "Field"}
# Parts of the package call these with what they have made.
OWN = {"KernelManager.get_static", "KernelManager.key"}

FUNCTIONS = {name: getattr(transformer_rtc, name) for name in dispatch.forms()}


def parameters_of(name: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(FUNCTIONS[name]).parameters)


def refused_by(name: str, argument: str) -> list[Any]:
    """Return what an argument of an operator's function refuses."""
    parameters = parameters_of(name)
    if argument == next(iter(parameters)):
        return FIRST
    if argument == "scale":
        return NO_NUMBER if "softmax" in name else VALUE
    values = OPERATORS[argument]
    if argument == "mask" and "backward" in name:
        values = [*values, ones(SHAPE, bool), ones(SHAPE, np.uint8)]
    if parameters[argument].default is None:
        return [value for value in values if value is not None]
    return values


def good(name: str) -> dict[str, Any]:
    """Return the arguments of a call that is refused for nothing."""
    required = (name for name, found in parameters_of(name).items() if found.default is inspect.Parameter.empty)
    return {argument: ones() for argument in required}
