# SPDX-License-Identifier: Apache-2.0
"""Right kernels, and seeded faults: each is one change of a right kernel's text, of a header's, or of the launch.

Subjects have rows of them. An indented line goes on with the row before. A row is

    KINDS: NAME | CHANGE | CHANGE @ PLACE | PLACE

KINDS
    A report of any of these kinds of SimulationError is right. `early` is `race uninitialised`: where a barrier is
    missing, a thread may read before another one has written, or race with it. `remote` is `early` where the memory is
    another CTA's, which may have exited: `exited_shared_memory` too.
CHANGE
    In the kernel's text, else in the header that has it; what it names is there once. `\\n` ends a line.
    `OLD => NEW`            a part of the text
    `-TEXT`                 the line with this text goes
    `-TEXT after CONTEXT`   the first such line behind the context goes
    `launch NAME=VALUE`     an attribute of the subject; of an array: so many zeros
    `orders ORDER ORDER`    those that show the fault, where not all do
    `missed WHY`            checked mode does not report it
PLACE
    What only one line of the changed texts has: a report is at one of these lines, and so is its other party. `+` is
    the line that the last change is in, `...` stands for the subject's places, `*` for any place. Without places, they
    are the subject's, or `+` where it has none.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import kernel_cache
import numpy as np
import reference

from transformer_rtc import Field, KernelManager, LaunchConfig, SimulatedDevice, SimulationError, sources
from transformer_rtc.ops.norm.config import NormConfig
from transformer_rtc.ops.norm.kernels import ForwardSpec
from transformer_rtc.simulator.device import ORDERS
from transformer_rtc.spec import FLOAT32, DType, KernelSpec, TextSpec

PTX = '#include "ptx.cuh"'
_C_TYPES = {"f4": "float", "i4": "int", "u4": "unsigned"}


@functools.cache
def manager() -> KernelManager:
    return kernel_cache.manager()


@functools.cache
def device(order: str) -> SimulatedDevice:
    return SimulatedDevice(checked=True, order=order, seed=1)


def guarded(array: np.ndarray) -> np.ndarray:
    """Return a copy that is aligned to 64 bytes, and far from other arrays."""
    memory = np.zeros(array.nbytes + 4096, np.uint8)
    start = 2048 + -(memory.ctypes.data + 2048) % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def floats(count: int) -> np.ndarray:
    """Return small integers: every order of additions gives the same sum."""
    return (np.arange(count) * 7 % 23).astype(np.float32)


def relaxed_cells(cells: np.ndarray, rounds: int) -> np.ndarray:
    for _ in range(rounds):
        cells = np.roll(cells, 1) + np.roll(cells, -1)
    return cells


@dataclass(frozen=True, eq=False)
class Subject:
    """A right kernel, and a launch of it. Its arrays and scalars are variables of their names in `text`."""

    outputs: Mapping[str, np.ndarray]  # what it must write
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)  # what it may only read
    start: Mapping[str, np.ndarray] = field(default_factory=dict)  # what outputs and scratch memory hold before
    scalars: Mapping[str, int] = field(default_factory=dict)
    head: str = ""
    grid: int | tuple[int, int, int] = 1
    block: int | tuple[int, int, int] = 32
    cluster: int = 1
    dynamic: int = 0
    cooperative: bool = False
    padding: int = 0  # elements between the rows of outputs of two dimensions
    text: str = ""
    at: str = ""  # places of the faults whose rows have none
    faults: str = ""

    @property
    def _arrays(self) -> dict[str, np.ndarray]:
        return {**self.inputs, **self.outputs, **self.start}

    @property
    def spec(self) -> KernelSpec:
        fields = [Field(name, "pointer") for name in self._arrays]
        fields += [Field(name, "int64") for name in self.scalars]
        types = {name: _C_TYPES[array.dtype.str[1:]] for name, array in self._arrays.items()}
        pointers = "".join(f"  {type}* {name} = static_cast<{type}*>(params.{name});\n" for name, type in types.items())
        scalars = "".join(f"  const long long {name} = params.{name};\n" for name in self.scalars)
        text = (
            f'{self.head}\nextern "C" __global__ void kernel(Params params) {{\n{pointers}{scalars}'
            "  const int thread = static_cast<int>(threadIdx.x), block = static_cast<int>(blockIdx.x);\n"
            f"{self.text}}}\n"
        )
        return TextSpec(text, "kernel", tuple(fields))

    @property
    def config(self) -> LaunchConfig:
        grid, block = (size if isinstance(size, tuple) else (size, 1, 1) for size in (self.grid, self.block))
        return LaunchConfig(grid, block, (self.cluster, 1, 1), self.dynamic, self.cooperative)

    def values(self) -> dict[str, Any]:
        """Return the arguments of a launch."""
        values: dict[str, Any] = {}
        for name, array in self._arrays.items():
            before = self.start.get(name, np.full_like(array, 77)) if name in self.outputs else array
            if self.padding and array.ndim == 2:
                before = np.pad(before, ((0, 0), (0, self.padding)))
            values[name] = guarded(before)[..., : array.shape[-1]]
            values[name].setflags(write=name not in self.inputs)
        return values | self.scalars

    def check(self, values: Mapping[str, Any]) -> None:
        for name, expected in self.outputs.items():
            np.testing.assert_array_equal(values[name], expected, name)


@dataclass(frozen=True, eq=False)
class Norm:
    """A kernel of this package on rows of random numbers, divided as no dispatch would, so that little does."""

    rows: int
    hidden: int
    norm_config: NormConfig
    groups: int  # of CTAs; where rows are more, there are several to each
    faults: str
    dtype: DType = FLOAT32
    weight: bool = True
    rstd: bool = False
    shift: int = 0  # elements of x beyond an aligned address
    whole: int = 0  # whether the kernel is that for whole rows wherever these lie
    padding: int = 0  # elements between rows of y
    norm: str = "rms_norm"
    at = "*"

    @property
    def spec(self) -> KernelSpec:
        unaligned = self.shift > 0 or (self.hidden | self.padding) % self.norm_config.vec_size != 0
        return ForwardSpec(
            norm=self.norm, input=self.dtype, weight=self.dtype if self.weight else None, bias=None, residual=None,
            adds="", sum=None, rounds=False, output=self.dtype, stores=("rstd",) if self.rstd else (), scale=False,
            per_head=False, repeats=False, hidden=self.hidden, config=self.norm_config,
            unaligned=unaligned and not self.whole,
        )  # fmt: skip

    @property
    def config(self) -> LaunchConfig:
        rule = self.spec.launch_rule
        grid, cluster = rule.ctas_per_row * self.groups, rule.ctas_per_row if rule.clusters else 1
        sizes = (grid, 1, 1), (rule.threads, 1, 1), (cluster, 1, 1)
        return LaunchConfig(*sizes, rule.dynamic_shared_memory, cooperative=rule.ctas_per_row > cluster)

    @functools.cached_property
    def _random(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(7)
        x = reference.random_rows(rng, (self.rows, self.hidden), self.dtype)
        return x, reference.random_weight(rng, self.hidden, self.dtype)

    def values(self) -> dict[str, Any]:
        """Return the arguments of a launch."""
        x, weight = self._random
        shifted = guarded(np.zeros(x.size + self.shift, x.dtype))[self.shift :].reshape(x.shape)
        shifted[...] = x
        weight = guarded(weight)
        for array in (shifted, weight):
            array.setflags(write=False)
        out = guarded(np.zeros((self.rows, self.hidden + self.padding), x.dtype))
        values = {
            "x": shifted, "out": out[:, : self.hidden], "x_outer_stride": self.hidden, "x_inner_stride": 0,
            "out_outer_stride": self.hidden + self.padding, "out_inner_stride": 0, "rows": self.rows,
            "inner_count": 1, "inner_magic": 0, "inner_shift": 0, "eps": 1e-6, "weight_offset": 0.0,
        }  # fmt: skip
        if self.weight:
            values["weight"] = weight
        if self.rstd:
            values["rstd"] = guarded(np.zeros(self.rows, np.float32))
        if self.spec.launch_rule.workspace_bytes:
            values["workspace"] = guarded(np.zeros(self.spec.launch_rule.workspace_bytes * self.groups, np.uint8))
        return values

    def check(self, values: Mapping[str, Any]) -> None:
        x, weight = self._random[0], self._random[1] if self.weight else None
        if self.norm == "layer_norm":
            expected = reference.forward(True, x, weight, out=self.dtype)
            reference.assert_within(values["out"], expected["out"], self.dtype)
            return
        y, rstd = reference.rms_norm(x, weight)
        reference.assert_close(values["out"], y, self.dtype)
        if self.rstd:
            reference.assert_close(values["rstd"], rstd, FLOAT32)


class _Changed(KernelSpec):
    """A spec with another program. Equal to no other: their headers may differ."""

    def __init__(self, spec: KernelSpec, program: str) -> None:
        self._spec, self._program = spec, program

    symbol = property(lambda self: self._spec.symbol)
    params = property(lambda self: self._spec.params)
    options = property(lambda self: self._spec.options)
    program = property(lambda self: self._program)


def _place(texts: Mapping[str, str], part: str) -> tuple[str, int]:
    """Return the file and the offset of what is there once: in all texts, or in the first one."""
    first, *_ = texts
    found = [first] if part in texts[first] else [file for file, text in texts.items() if part in text]
    count = sum(texts[file].count(part) for file in found)
    assert count == 1, f"{part!r} is there {count} times, in {found}"
    return found[0], texts[found[0]].index(part)


def _change(texts: dict[str, str], change: str) -> tuple[str, int]:
    """Change a text; return where that is."""
    if change.startswith("-"):
        gone, _, context = change[1:].partition(" after ")
        file, at = _place(texts, context or gone)
        text, at = texts[file], texts[file].index(gone, at + len(context))
        old, new, at = text[text.rindex("\n", 0, at) : text.index("\n", at)], "", text.rindex("\n", 0, at)
    else:
        old, new = (part.strip(" ") for part in f"{change} ".split(" => "))
        file, at = _place(texts, old)
    assert old != new, change
    texts[file] = texts[file][:at] + new + texts[file][at + len(old) :]
    return file, at


def _line_of(text: str, at: int) -> int:
    """Return the line of an offset, as a compiler counts: the last #line before it says where."""
    before = text[:at]
    start = before.rfind("\n#line ") + 1
    said = int(before[start:].split()[1]) - 2 if start else 0
    return said + before[start:].count("\n") + 1


@dataclass(frozen=True, eq=False)
class Fault:
    """A row of the subject `of`. Its own `subject` has the launch that is changed."""

    of: str
    subject: Subject | Norm
    kinds: list[str]
    name: str
    changes: list[str]
    places: list[str]
    orders: list[str]
    missed: str

    @functools.cached_property
    def made(self) -> tuple[dict[str, str], set[tuple[str, int]]]:
        """What is compiled, the kernel's text first, and each (file, line) where it may be reported; none: anywhere."""
        program = self.subject.spec.program
        texts = {f"{self.subject.spec.symbol}.cu": program, **sources.included(program)}
        changed = [_change(texts, change) for change in self.changes]
        found = [changed[-1] if place == "+" else _place(texts, place) for place in self.places if place != "*"]
        return texts, {(file.rpartition("/")[2], _line_of(texts[file], at)) for file, at in found}

    @functools.cached_property
    def _spec(self) -> KernelSpec:
        return _Changed(self.subject.spec, next(iter(self.made[0].values())))

    def report(self, order: str) -> SimulationError | None:
        texts, spec = self.made[0], self._spec  # of the sources as they are
        with mock.patch.object(sources, "texts", lambda: texts):
            kernel = manager().get(spec, device(order))
        try:
            kernel.launch(self.subject.config, self.subject.values())
        except SimulationError as error:
            return error
        return None


def _launched(subject: Subject | Norm, name: str, value: str) -> Subject | Norm:
    if isinstance(subject, Subject) and name in subject.start:
        return replace(subject, start={**subject.start, name: np.zeros(int(value), subject.start[name].dtype)})
    return replace(subject, **{name: type(getattr(subject, name))(int(value))})


def faults_of(of: str, right: Subject | Norm) -> Iterator[Fault]:
    """Yield a subject's rows."""
    for row in re.sub(r"\n +", " ", right.faults).strip().splitlines():
        about, _, at = row.replace("\\n", "\n").partition(" @ ")
        head, *fields = (part.strip(" ") for part in f"{about} ".split(" | "))
        kinds, name = head.split(": ", 1)
        subject, changes, said = right, [], {"orders": " ".join(ORDERS), "missed": ""}
        for part in fields:
            word, _, rest = part.partition(" ")
            if word == "launch":
                subject = _launched(subject, *rest.split("="))
            elif word in said:
                said[word] = rest
            else:
                changes.append(part)
        places = (at or right.at or "+").replace("...", right.at).split(" | ")
        kinds = kinds.replace("remote", "early exited_shared_memory").replace("early", "race uninitialised")
        yield Fault(of, subject, kinds.split(), name, changes, places, said["orders"].split(), said["missed"])
