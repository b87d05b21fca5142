# SPDX-License-Identifier: Apache-2.0
"""The spec of addition's kernel."""

from __future__ import annotations

from dataclasses import dataclass

from ...request import LaunchRule
from ...spec import UINT8, DType, KernelSpec, Params
from ..programs import GEOMETRY, MINIMAL, column_strides, definitions, entry, pointers, present, row_fields
from ..tile import COLUMNS, TileConfig, vec_size_of

__all__ = ["FIELDS", "AddSpec"]

_INPUTS, _ROWS = ("x", "other"), ("x", "other", "out")
FIELDS = (*pointers(*_ROWS), *row_fields(*_ROWS), *column_strides(*_INPUTS), *GEOMETRY, *COLUMNS)
_PARAMS = Params(FIELDS)
# A mask's bytes are true or false elsewhere; here they are numbers.
_NUMBERS = {UINT8: UINT8._replace(text="trtc::uint8")}


@dataclass(frozen=True)
class AddSpec(KernelSpec):
    """A specialised kernel.

    Attributes
    ----------
    input, other, output : DType
        The data types of x, other and y.
    config : TileConfig
        What a CTA has.
    unaligned : bool
        Whether rows may have any length and begin anywhere. Else they are whole vectors at aligned addresses.
    """

    input: DType
    other: DType
    output: DType
    config: TileConfig
    unaligned: bool = False

    @property
    def _types(self) -> tuple[DType, DType, DType]:
        return self.input, self.other, self.output

    @property
    def symbol(self) -> str:
        how = present(unaligned=self.unaligned)
        return "_".join(("add", *(dtype.symbol for dtype in self._types), self.config.symbol, *how))

    @property
    def options(self) -> tuple[str, ...]:
        return MINIMAL

    @property
    def params(self) -> Params:
        return _PARAMS

    @property
    def _vec_size(self) -> int:
        return vec_size_of(self._types, self.unaligned)

    @property
    def program(self) -> str:
        types = dict(zip(("Input", "Other", "Output"), (_NUMBERS.get(one, one) for one in self._types), strict=True))
        return (
            f"{definitions(types, {}, self.config.numbers(self._vec_size))}\n"
            f"{self.params.text('Params')}\n"
            '#include "arithmetic/add.cu"\n'
            f"{entry(self.symbol, 'add', self.config.threads)}"
        )

    @property
    def launch_rule(self) -> LaunchRule:
        return self.config.rule(self._vec_size)
