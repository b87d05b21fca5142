# SPDX-License-Identifier: Apache-2.0
"""The kinds of arguments that an operator declares, and the shapes of arrays in symbols. A leaf: no CUDA, no files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from .spec import DType

__all__ = [
    "Argument",
    "Array",
    "Choice",
    "Dimension",
    "Equal",
    "Flag",
    "Input",
    "Integer",
    "Margin",
    "Output",
    "OutputDType",
    "OutputWanted",
    "Real",
    "Result",
    "RowShape",
    "Selector",
    "Shape",
    "Size",
    "Stream",
    "Update",
    "size_of",
]


# ---- Shapes ----------------------------------------------------------------------------------------------------------


class Size(NamedTuple):
    """A dimension: a symbol's value times a number, or where there is no symbol, the number."""

    multiple: int
    symbol: str

    def __str__(self) -> str:
        if not self.symbol:
            return str(self.multiple)
        return self.symbol if self.multiple == 1 else f"{self.multiple}*{self.symbol}"


class Shape(NamedTuple):
    """A shape in symbols.

    Attributes
    ----------
    leading : bool
        Whether it begins with all dimensions of the operator's first array but the last one.
    sizes : tuple of Size
        What follows.
    """

    leading: bool
    sizes: tuple[Size, ...]

    def __str__(self) -> str:
        return f"[{', '.join((*(['...'] if self.leading else []), *map(str, self.sizes)))}]"


_SIZE = re.compile(r"(?:([1-9]\d*)\*)?([a-z]\w*)|([1-9]\d*)")


def size_of(text: str) -> Size:
    """Return the dimension that a word of a shape is."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no dimension; such are columns, 2*columns and 4")
    multiple, symbol, number = found.groups()
    return Size(int(multiple or 1), symbol) if symbol else Size(int(number), "")


# ---- Arguments -------------------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class Argument:
    """An argument of an operator's call.

    Attributes
    ----------
    name : str
        In requests and kernels' parameters.
    called : str
        What the user's function calls it, if that is not `name`.
    doc : str
        What the function's documentation says of it.
    """

    name: str
    _: KW_ONLY
    called: str = ""
    doc: str = ""

    @property
    def keyword(self) -> str:
        """What the user's function calls it."""
        return self.called or self.name

    @property
    def default(self) -> object:
        """Its default in the user's function; `Ellipsis`: there is none."""
        return None


@dataclass(eq=False, repr=False)
class Array(Argument):
    """An array: an input, an output, or what else a kernel gets a pointer to.

    Attributes
    ----------
    shape : str
        Dimensions in symbols, such as ``"... heads columns"``, ``"... 2*columns"``, ``"heads"``. Three dots are all
        dimensions of the operator's first array but its last; in the first array's own shape, the names behind them
        name its last dimensions. ``"columns | heads columns"``: one of two, the same for all arrays that have two.
        ``"() | 1"``: one element.
    dtypes : tuple of DType
        What it may hold.
    """

    shape: str
    dtypes: tuple[DType, ...]


@dataclass(eq=False, repr=False)
class Input(Array):
    """An array that is read.

    Attributes
    ----------
    optional : bool
        Whether it may be None.
    broadcast : bool
        Whether its dimensions before the last may be 1, or missing.
    usual : bool
        Whether a warm-up takes it to be there, if it is optional.
    refused : tuple of DType
        Those of `dtypes` that the family refuses after all, for it says why.
    usual_dtype : DType or None
        The data type that a warm-up takes it to have; None: that of the others, or the only one that it may have.
    """

    _: KW_ONLY
    optional: bool = False
    broadcast: bool = False
    usual: bool = False
    refused: tuple[DType, ...] = ()
    usual_dtype: DType | None = None

    @property
    def default(self) -> object:
        return None if self.optional else ...


@dataclass(eq=False, repr=False)
class Output(Array):
    """An array that is written and returned: the caller's, or one that is allocated.

    Attributes
    ----------
    like : str
        The earlier array whose data type it has by default; empty, or where that is None: the first one's.
    returned : str
        What the documentation calls what is returned.
    returned_doc : str
        What the documentation says of that.
    """

    _: KW_ONLY
    like: str = ""
    returned: str = ""
    returned_doc: str = ""


@dataclass(eq=False, repr=False)
class Update(Array):
    """An array that is read and written in place, if it is given.

    Attributes
    ----------
    over_rows : {"", "max"}
        How those of parts of the rows become that of all; empty: it does not depend on rows, if there are any.
    """

    _: KW_ONLY
    over_rows: str = ""


@dataclass(eq=False, repr=False)
class Result(Array):
    """An array that is allocated and returned where it is asked for, by a bool of the user's function.

    Attributes
    ----------
    like : str
        The earlier array whose data type it has by default.
    shape_of : str
        The earlier array whose shape it has, where that is broadcast.
    wanted_with : str
        By default it is returned where this array is given; empty: it is not.
    rereads : bool
        Whether a launch behind the one that writes the outputs reads the inputs for it.
    returned_doc : str
        What the documentation says of what is returned.
    """

    _: KW_ONLY
    like: str = ""
    shape_of: str = ""
    wanted_with: str = ""
    rereads: bool = False
    returned_doc: str = ""

    @property
    def keyword(self) -> str:
        return self.called or f"return_{self.name}"

    @property
    def default(self) -> object:
        return None if self.wanted_with else False


@dataclass(eq=False, repr=False)
class OutputDType(Argument):
    """The data type of outputs and results."""

    dtypes: tuple[DType, ...]
    of: tuple[str, ...]


@dataclass(eq=False, repr=False)
class OutputWanted(Argument):
    """Whether outputs are made and returned."""

    of: tuple[str, ...]

    @property
    def default(self) -> object:
        return True


@dataclass(eq=False, repr=False)
class Real(Argument):
    """A number that is finite in float32."""

    value: float
    _: KW_ONLY
    minimum: float | None = None

    @property
    def default(self) -> object:
        return self.value


@dataclass(eq=False, repr=False)
class Integer(Argument):
    """An integer of 32 bits; None is 0.

    Attributes
    ----------
    minimum, largest : int
        A smaller one is refused; a larger one is taken for `largest`.
    noun : str
        What it is, in messages.
    needs : str
        The choice without which it may not be given.
    needs_words : str
        What messages call that.
    """

    _: KW_ONLY
    minimum: int = -(2**31)
    largest: int = 2**31 - 1
    noun: str = "an integer of 32 bits"
    needs: str = ""
    needs_words: str = ""


class Flag(Argument):
    """A bool on which it depends which kernels there are."""

    @property
    def default(self) -> object:
        return False


class Equal(NamedTuple):
    """Two symbols that must have one value, and what a message says where they have not."""

    first: str
    second: str
    reason: str


@dataclass(eq=False, repr=False)
class Choice(Argument):
    """One of some words, or None: a flag, which is set where a word is given.

    Attributes
    ----------
    words : mapping of str to Equal or None
        Each word, and what it asks of the arrays' shapes.
    counts : tuple of str
        The dimensions in which a call counts from the first element: a part of one is not computed alone.
    """

    words: Mapping[str, Equal | None]
    _: KW_ONLY
    counts: tuple[str, ...] = ()


class Margin(Argument):
    """How many multiprocessors to leave free."""

    @property
    def default(self) -> object:
        return 0


class Stream(Argument):
    """The stream."""


# ---- Which dimensions are a row --------------------------------------------------------------------------------------


class Selector(Argument):
    """An argument of the user's function that says which dimensions are a row. The native call does not get it."""


class Dimension(Selector):
    """The dimension that is a row: arrays are viewed with it as the last one."""

    @property
    def default(self) -> object:
        return -1


class RowShape(Selector):
    """The sizes of the last dimensions, which are a row together: arrays are viewed with one dimension in their place.

    None: the last dimension is a row.
    """
