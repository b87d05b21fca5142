# SPDX-License-Identifier: Apache-2.0
"""What a kernel is before it is compiled. Pure: no CUDA, no files."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from .errors import ArgumentError, shown

__all__ = [
    "ARCHITECTURES",
    "BFLOAT16",
    "BOOL",
    "FIRST_NVRTC",
    "FLOAT8_E4M3",
    "FLOAT8_E5M2",
    "FLOAT16",
    "FLOAT32",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "INTEGERS",
    "RESIDENT",
    "STATIC_ARCHITECTURES",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "DType",
    "DeviceLimits",
    "Field",
    "KernelSpec",
    "Params",
    "Target",
]


def is_name(name: object) -> bool:
    """Whether it can name a function or a variable of a kernel's text."""
    return isinstance(name, str) and name.isascii() and name.isidentifier()


def is_text(text: object) -> bool:
    """Whether a compiler can be given it."""
    if not isinstance(text, str) or "\0" in text:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:  # a half of a surrogate pair
        return False
    return True


class DType(NamedTuple):
    """A data type of array elements.

    Attributes
    ----------
    name : str
        As numpy and torch name it.
    id : int
        DLPack's type code * 256 + bits; kernels whose types are chosen at run time get it as their tag.
    symbol : str
        In a kernel's symbol.
    text : str
        In a kernel's text.
    bytes : int
        Size of an element.
    """

    name: str
    id: int
    symbol: str
    text: str
    bytes: int


FLOAT32 = DType("float32", 2 << 8 | 32, "f32", "float", 4)
FLOAT16 = DType("float16", 2 << 8 | 16, "f16", "trtc::float16", 2)
BFLOAT16 = DType("bfloat16", 4 << 8 | 16, "bf16", "trtc::bfloat16", 2)
FLOAT8_E4M3 = DType("float8_e4m3fn", 10 << 8 | 8, "e4m3", "trtc::float8_e4m3", 1)
FLOAT8_E5M2 = DType("float8_e5m2", 12 << 8 | 8, "e5m2", "trtc::float8_e5m2", 1)
INT8 = DType("int8", 0 << 8 | 8, "i8", "trtc::int8", 1)
INT16 = DType("int16", 0 << 8 | 16, "i16", "trtc::int16", 2)
INT32 = DType("int32", 0 << 8 | 32, "i32", "trtc::int32", 4)
INT64 = DType("int64", 0 << 8 | 64, "i64", "trtc::int64", 8)
UINT8 = DType("uint8", 1 << 8 | 8, "u8", "trtc::boolean", 1)
UINT16 = DType("uint16", 1 << 8 | 16, "u16", "trtc::uint16", 2)
UINT32 = DType("uint32", 1 << 8 | 32, "u32", "trtc::uint32", 4)
UINT64 = DType("uint64", 1 << 8 | 64, "u64", "trtc::uint64", 8)
BOOL = DType("bool", 6 << 8 | 8, "bool", "trtc::boolean", 1)

INTEGERS = (INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32, UINT64)
DTYPES = {dtype.id: dtype for dtype in (FLOAT32, FLOAT16, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, *INTEGERS, BOOL)}


# Bytes of shared memory that the system takes of a multiprocessor for each CTA. CUDA C++ Programming Guide.
SYSTEM_SHARED_MEMORY = 1024


class DeviceLimits(NamedTuple):
    """What a configuration may use of a device.

    Attributes
    ----------
    architecture : int
        Compute capability, 90 for 9.0.
    shared_memory_per_cta : int
        The most shared memory that a CTA can have, in bytes.
    max_cluster_size : int
        CTAs in the largest cluster; 1 where there are none.
    max_ctas_per_row : int
        CTAs that may wait for each other, in a cluster or a cooperative grid.
    """

    architecture: int
    shared_memory_per_cta: int
    max_cluster_size: int
    max_ctas_per_row: int = 16

    @property
    def shared_memory_of_multiprocessor(self) -> int:
        """Bytes that its CTAs have together, each with the system's for it."""
        return self.shared_memory_per_cta + SYSTEM_SHARED_MEMORY


class _Row(NamedTuple):
    shared_memory: int  # KiB, of a CTA that asks for the most
    cluster: int  # CTAs in the largest cluster
    threads: int  # of a multiprocessor, at a time
    ctas: int  # as well
    nvrtc: tuple[int, int]  # the first that compiles for it


# CUDA C++ Programming Guide, "Technical specifications per compute capability". Clusters above 8 CTAs are not portable:
# only where this table names them.
_TABLE = {
    80: _Row(163, 1, 2048, 32, (11, 0)),
    86: _Row(99, 1, 1536, 16, (11, 1)),
    87: _Row(163, 1, 1536, 16, (11, 4)),
    88: _Row(99, 1, 1536, 16, (13, 0)),
    89: _Row(99, 1, 1536, 24, (11, 8)),
    90: _Row(227, 16, 2048, 32, (11, 8)),
    100: _Row(227, 16, 2048, 32, (12, 8)),
    103: _Row(227, 8, 2048, 32, (12, 9)),
    110: _Row(227, 8, 1536, 24, (13, 0)),
    120: _Row(99, 8, 1536, 24, (12, 8)),
    121: _Row(99, 8, 1536, 24, (12, 9)),
}
# For compiling without a device; a device is asked.
ARCHITECTURES = {number: DeviceLimits(number, row.shared_memory * 1024, row.cluster) for number, row in _TABLE.items()}
# What the package brings compiled kernels for: one for each generation, as a wheel's size is limited.
STATIC_ARCHITECTURES = {number: ARCHITECTURES[number] for number in (80, 89, 90, 100, 120)}
# Threads and CTAs that a multiprocessor has at a time.
RESIDENT = {number: (row.threads, row.ctas) for number, row in _TABLE.items()}
FIRST_NVRTC = {number: row.nvrtc for number, row in _TABLE.items()}


class Target(NamedTuple):
    """What a kernel is compiled for.

    Attributes
    ----------
    architecture : int
        90 for compute capability 9.0.
    simulated : str
        Empty: a GPU. ``"fast"`` or ``"checked"``: the simulator, which runs it on the CPU.
    """

    architecture: int
    simulated: str = ""

    def __str__(self) -> str:
        return f"sm_{self.architecture}" + (f".{self.simulated}" if self.simulated else "")


# What struct and another package's __index__ or __float__ raise of a value that a field cannot hold.
_NO_NUMBER = (struct.error, TypeError, OverflowError, ValueError, RuntimeError)
_FIELD_TYPES = {  # text in the kernel, struct code
    "pointer": ("void*", "Q"),
    "int64": ("long long", "q"),
    "int32": ("int", "i"),
    "uint32": ("unsigned int", "I"),
    "float32": ("float", "f"),
}


class _Field(NamedTuple):
    name: str
    type: str
    source: str = ""


class Field(_Field):
    """A field of a kernel's parameters.

    Attributes
    ----------
    name : str
        In the kernel's text.
    type : str
        ``"pointer"``, ``"int64"``, ``"int32"``, ``"uint32"`` or ``"float32"``.
    source : str
        What an operator fills it with, such as ``"x.data"``. Empty: zero, or the caller's value.

    Raises
    ------
    ArgumentError
        If the name is not a name of C++, or the type is unknown.

    Examples
    --------
    >>> from transformer_rtc import Field, Params
    >>> print(Params([Field("x", "pointer"), Field("rows", "int64")]).text("Params"), end="")
    struct Params {
      void* x;
      long long rows;
    };
    static_assert(sizeof(Params) == 16, "packing");
    """

    __slots__ = ()

    def __new__(cls, name: str, type: str, source: str = "") -> Field:
        if not is_name(name):
            raise ArgumentError(f"name is {shown(name)}; it takes a name of C++'s, of a field")
        if not isinstance(type, str) or type not in _FIELD_TYPES:
            raise ArgumentError(f"field {name} has the type {shown(type)}; types are {', '.join(_FIELD_TYPES)}")
        return super().__new__(cls, name, type, source)


class Params:
    """The parameters of a kernel: one struct, passed by value, declared once.

    Parameters
    ----------
    fields : iterable of Field
        In their order in the struct. Each is aligned to its size, as C++ does.

    Attributes
    ----------
    fields : tuple of Field
        As they were given.
    offsets : dict of str to int
        Bytes before each field.
    size : int
        Bytes of the struct.

    Raises
    ------
    ArgumentError
        If one is no field, or two have one name.

    Examples
    --------
    >>> from transformer_rtc import Field, Params
    >>> params = Params([Field("columns", "int32"), Field("x", "pointer"), Field("eps", "float32")])
    >>> params.offsets, params.size
    ({'columns': 0, 'x': 8, 'eps': 16}, 24)
    """

    def __init__(self, fields: Iterable[Field]) -> None:
        try:
            self.fields: tuple[Field, ...] = tuple(fields)
        except TypeError:
            raise ArgumentError(f"fields is {shown(fields)}; it takes Fields") from None
        self.offsets: dict[str, int] = {}
        code = "<"
        end, alignment = 0, 1
        for field in self.fields:
            if not isinstance(field, Field):
                raise ArgumentError(f"fields has {shown(field)}; it takes Fields")
            if field.name in self.offsets:
                raise ArgumentError(f"two fields are named {field.name}")
            size = struct.calcsize("<" + _FIELD_TYPES[field.type][1])
            padding = -end % size
            code += f"{padding}x{_FIELD_TYPES[field.type][1]}"
            self.offsets[field.name] = end + padding
            end += padding + size
            alignment = max(alignment, size)
        self._struct = struct.Struct(f"{code}{-end % alignment}x")
        self.size: int = self._struct.size

    def text(self, name: str) -> str:
        """Return the definition of the struct `name` in CUDA C++, with an assertion of its size."""
        lines = "".join(f"  {_FIELD_TYPES[field.type][0]} {field.name};\n" for field in self.fields)
        return f'struct {name} {{\n{lines}}};\nstatic_assert(sizeof({name}) == {max(self.size, 1)}, "packing");\n'

    def pack(self, **values: float) -> bytes:
        """Return the struct's bytes.

        Parameters
        ----------
        **values : int or float
            One for each field; a pointer is an int.

        Raises
        ------
        ArgumentError
            If a field has no value, a value has no field, or a value does not fit its field.

        Examples
        --------
        >>> from transformer_rtc import Field, Params
        >>> Params([Field("columns", "int32"), Field("eps", "float32")]).pack(columns=258, eps=0.0).hex(" ", 4)
        '02010000 00000000'
        """
        if values.keys() != self.offsets.keys():
            raise ArgumentError(f"values for {', '.join(self.offsets)} expected; given: {', '.join(values)}")
        try:
            return self._struct.pack(*(values[field.name] for field in self.fields))
        except _NO_NUMBER as error:
            for field in self.fields:
                try:
                    struct.pack(_FIELD_TYPES[field.type][1], values[field.name])
                except _NO_NUMBER:
                    raise ArgumentError(
                        f"{field.name} must be of the type {field.type}; it is {shown(values[field.name])}"
                    ) from error
            raise


class KernelSpec:
    """Everything that changes a kernel's machine code but the architecture. Families of operators own the fields.

    Subclasses are hashable, and equal specs are one kernel.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> import numpy as np
    >>> from transformer_rtc import Field, KernelSpec, Params, SimulatedDevice, manager
    >>> @dataclass(frozen=True)
    ... class Fill(KernelSpec):
    ...     value: int
    ...     params = Params([Field("x", "pointer")])
    ...     @property
    ...     def symbol(self):
    ...         return f"fill_{self.value}"
    ...     @property
    ...     def program(self):
    ...         head = f'extern "C" __global__ void {self.symbol}(const Params p)'
    ...         return self.params.text("Params") + f"{head} {{ ((int*)p.x)[threadIdx.x] = {self.value}; }}"
    >>> x = np.zeros(4, np.int32)
    >>> manager.get(Fill(7), SimulatedDevice()).launch_plain((1, 1, 1), (4, 1, 1), {"x": x})
    >>> x
    array([7, 7, 7, 7], dtype=int32)
    """

    @property
    def symbol(self) -> str:
        """The kernel's one name: its entry, its cache file's stem, its line in a log. Injective."""
        raise NotImplementedError

    @property
    def params(self) -> Params:
        """The kernel's parameters."""
        raise NotImplementedError

    @property
    def program(self) -> str:
        """The text that NVRTC compiles: includes, the parameters, one ``extern "C"`` entry named `symbol`."""
        raise NotImplementedError

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC's options beyond those that every program gets."""
        return ()


@dataclass(frozen=True)
class TextSpec(KernelSpec):
    """A caller's own kernel.

    Parameters
    ----------
    text : str
        CUDA C++ with an ``extern "C" __global__`` entry named `name`. It may include headers of `include_folders`, of
        this package, and of NVIDIA's wheel of the CUDA runtime.
    name : str
        The entry.
    fields : tuple of Field
        The kernel's parameters, one struct by value. The text refers to it as ``Params``, which is defined before it.
    options : tuple of str
        NVRTC's options. Not those that name files: what the compiler reads is part of a cache entry's key.
    include_folders : tuple of str
        Where headers are looked for, in this order. They are kept as absolute paths.

    Raises
    ------
    ArgumentError
        If a value is not as described.

    Examples
    --------
    >>> from transformer_rtc import Field, TextSpec, manager
    >>> text = 'extern "C" __global__ void one(const Params p) { ((float*)p.x)[threadIdx.x] = ONE; }'
    >>> spec = TextSpec(text, "one", (Field("x", "pointer"),), ("-DONE=1.0f",))
    >>> manager.image(spec, 90).kind
    'cubin'
    """

    text: str
    name: str
    fields: tuple[Field, ...] = ()
    options: tuple[str, ...] = ()
    include_folders: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not is_text(self.text):
            raise ArgumentError(f"text is {shown(self.text)}; it takes CUDA C++")
        if not is_name(self.name):
            raise ArgumentError(f"name is {shown(self.name)}; it takes the name of a function")
        if not isinstance(self.fields, tuple):
            raise ArgumentError(f"fields is {shown(self.fields)}; it takes a tuple of Fields")
        if not isinstance(self.options, tuple) or not all(map(is_text, self.options)):
            raise ArgumentError(f"options is {shown(self.options)}; it takes a tuple of strings")
        if not isinstance(self.include_folders, tuple) or not all(map(is_text, self.include_folders)):
            raise ArgumentError(f"include_folders is {shown(self.include_folders)}; it takes a tuple of strings")
        # A manifest is read in another folder. Keys do not depend on it.
        object.__setattr__(self, "include_folders", tuple(map(os.path.abspath, self.include_folders)))
        self.params  # noqa: B018  (which checks the fields)

    @property
    def symbol(self) -> str:
        return self.name

    @property
    def params(self) -> Params:
        return Params(self.fields)

    @property
    def program(self) -> str:
        # Lines are counted as the caller does.
        return (self.params.text("Params") if self.fields else "") + "#line 1\n" + self.text
