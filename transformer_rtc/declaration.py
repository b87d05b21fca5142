"""What an operator declares: its arguments, and the shapes of its arrays in symbols. A leaf: no CUDA, no files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from .spec import DType

if TYPE_CHECKING:
    from .request import Family

__all__ = [
    "Argument",
    "Array",
    "Choice",
    "Declaration",
    "Flag",
    "Input",
    "Integer",
    "Margin",
    "Output",
    "OutputDType",
    "OutputWanted",
    "Real",
    "Result",
    "Shape",
    "Size",
    "Stream",
    "Update",
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


_SIZE = re.compile(r"(?:(\d+)\*)?([a-z]\w*)|(\d+)")


def _size(text: str) -> Size:
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no dimension; such are columns, 2*columns and 4")
    multiple, symbol, number = found.groups()
    return Size(int(multiple or 1), symbol) if symbol else Size(int(number), "")


# What messages call one element of a dimension, where it is not the name without its last letter.
_NOUNS = {"hidden": "column", "queries": "query"}


def noun(symbol: str) -> str:
    """Return what a message calls one element of a dimension."""
    return _NOUNS.get(symbol, symbol.removesuffix("s"))


# ---- Arguments -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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
    usual_dtype : DType or None
        The data type that a warm-up takes it to have; None: that of the others, or the only one that it may have.
    """

    _: KW_ONLY
    optional: bool = False
    broadcast: bool = False
    usual: bool = False
    usual_dtype: DType | None = None

    @property
    def default(self) -> object:
        return None if self.optional else ...


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Update(Array):
    """An array that is read and written in place, if it is given."""


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class OutputDType(Argument):
    """The data type of outputs and results."""

    dtypes: tuple[DType, ...]
    of: tuple[str, ...]


@dataclass(frozen=True)
class OutputWanted(Argument):
    """Whether outputs are made and returned."""

    of: tuple[str, ...]

    @property
    def default(self) -> object:
        return True


@dataclass(frozen=True)
class Real(Argument):
    """A number that is finite in float32."""

    value: float
    _: KW_ONLY
    minimum: float | None = None

    @property
    def default(self) -> object:
        return self.value


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Choice(Argument):
    """One of some words, or None: a flag, which is set where a word is given.

    Attributes
    ----------
    words : mapping of str to Equal or None
        Each word, and what it asks of the arrays' shapes.
    """

    words: Mapping[str, Equal | None]


@dataclass(frozen=True)
class Margin(Argument):
    """How many multiprocessors to leave free."""

    name: str = "sm_margin"

    @property
    def default(self) -> object:
        return 0


@dataclass(frozen=True)
class Stream(Argument):
    """The stream."""

    name: str = "stream"


# ---- Declarations ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Declaration:
    """An operator, and the user's function that calls it: all that is said of both is said here.

    Attributes
    ----------
    name : str
        Of both.
    family : Family
        Who knows its kernels.
    arguments : tuple of Argument
        In the order of the native call. The first is an array of rows: its last dimension is a row.
    positional : tuple of str
        The names of what the user's function takes by position; the others are keywords.
    summary : str
        What the function's documentation begins with.
    buckets : sequence of int
        Numbers of columns, ascending to the largest that there may be: rows of up to one of them have the same kernels,
        which are asked for with it. Empty: each number of columns has its own.
    alias_of : str
        The operator whose kernels it asks for, of a function that calls the same arguments by other names.
    """

    name: str
    family: Family
    arguments: tuple[Argument, ...]
    _: KW_ONLY
    positional: tuple[str, ...]
    summary: str = ""
    buckets: Sequence[int] = ()
    alias_of: str = ""

    @property
    def operator(self) -> str:
        """The operator whose kernels it asks for."""
        return self.alias_of or self.name

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arguments that are arrays: those whose data types a request has, in its order."""
        return tuple(argument for argument in self.arguments if isinstance(argument, Array))

    @cached_property
    def flags(self) -> tuple[str, ...]:
        """The names of flags and choices."""
        return tuple(argument.name for argument in self.arguments if isinstance(argument, (Flag, Choice)))

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """The names of the first array's last dimensions, from the last one on."""
        return tuple(_size(word).symbol for word in reversed(self.arrays[0].shape.split()) if word != "...")

    @cached_property
    def conditional(self) -> frozenset[str]:
        """The symbols that are 1 unless an array has the second of two shapes."""
        named = [size.symbol for array in self.arrays[1:] for shape in self.shapes(array)[:1] for size in shape.sizes]
        also = [size.symbol for array in self.arrays[1:] for shape in self.shapes(array)[1:] for size in shape.sizes]
        return frozenset(also).difference(named, self.symbols[:1])

    def argument(self, name: str) -> Argument:
        """Return an argument by its name."""
        return next(argument for argument in self.arguments if argument.name == name)

    def about(self, kind: type[OutputDType] | type[OutputWanted], array: str) -> Argument | None:
        """Return the argument that says an output's data type, or whether it is wanted."""
        return next((one for one in self.arguments if isinstance(one, kind) and array in one.of), None)

    def shapes(self, array: Array) -> tuple[Shape, ...]:
        """Return the shapes that an array may have.

        Raises
        ------
        ValueError
            If one names what the first array does not have.
        """
        leading = list(reversed(self.symbols[1:]))
        found = []
        for text in array.shape.split(" | "):
            words = [] if text == "()" else text.split()
            starts = words[:1] == ["..."]
            sizes = [_size(word) for word in words[starts:]]
            if starts:
                # The names of leading dimensions are no more of them.
                while sizes and sizes[0].symbol in leading and sizes[0].multiple == 1:
                    del sizes[0]
            if any(size.symbol and size.symbol not in self.symbols for size in sizes):
                raise ValueError(f"{self.name}: {array.name} has the shape {text!r}, of dimensions that no array names")
            found.append(Shape(starts, tuple(sizes)))
        return tuple(found)

    @cached_property
    def signature(self) -> tuple[tuple[Argument, object], ...]:
        """The arguments in the order of the user's function, each with its default; `Ellipsis`: it has none."""
        first = [self.argument(name) for name in self.positional]
        others = [argument for argument in self.arguments if argument not in first]
        defaults = [argument.default for argument in first]
        # What comes before an argument that must be given must be given, too.
        last = max((place for place, default in enumerate(defaults) if default is ...), default=-1)
        defaults[: last + 1] = [...] * (last + 1)
        return (*zip(first, defaults, strict=True), *((argument, argument.default) for argument in others))

    @property
    def always(self) -> tuple[str, ...]:
        """The optional arrays that the user's function must be given, though perhaps as None."""
        return tuple(a.name for a, default in self.signature if isinstance(a, Input) and a.optional and default is ...)

    def alias(self, name: str, summary: str, positional: Sequence[str] = (), **called: Argument) -> Declaration:
        """Return a function that asks for the same kernels.

        Parameters
        ----------
        name : str
            Its name.
        summary : str
            What its documentation begins with.
        positional : sequence of str
            As `Declaration` has it; by default as here.
        **called : Argument
            Arguments that are called or documented otherwise, by their names.
        """
        return replace(
            self,
            name=name,
            alias_of=self.name,
            summary=summary,
            arguments=tuple(called.get(argument.name, argument) for argument in self.arguments),
            positional=tuple(positional) or self.positional,
        )
