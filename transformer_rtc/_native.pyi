# SPDX-License-Identifier: Apache-2.0
"""The native module's interface: see native/*.hpp."""

from collections.abc import Callable, Sequence
from typing import Any

OLDEST_DRIVER: int
MAX_PARAMETER_BYTES: int
MOST_COLUMNS: int
MOST_PLANS: int

_Dim3 = tuple[int, int, int]

def driver_version() -> int: ...
def device_count() -> int: ...
def device_attribute(ordinal: int, id: int) -> int: ...
def device_name(ordinal: int) -> str: ...
def device_memory(ordinal: int) -> int: ...
def current_device() -> int: ...
def current_context() -> int: ...
def set_current_context(context: int) -> None: ...
def pointer_device(pointer: int) -> int: ...
def stream_on_device(ordinal: int, stream: int) -> bool: ...
def stream_capturing(ordinal: int, stream: int) -> bool: ...
def own_stream(ordinal: int) -> int: ...
def order_streams(ordinal: int, earlier: int, later: int) -> None: ...
def synchronize_stream(ordinal: int, stream: int) -> None: ...
def dtype_name(dtype: int) -> str: ...
def to_dlpack(buffer: Buffer, shape: Sequence[int], dtype: int) -> object: ...
def read_dlpack(capsule: object) -> tuple[int, tuple[int, ...], tuple[int, ...], int, int, int, bool]: ...

class Launcher: ...

class PythonLauncher(Launcher):
    def __init__(
        self,
        zero: Callable[[int, int], None],
        launch: Callable[[_Dim3, _Dim3, _Dim3, int, bool, bytes, int, Any], None],
        parameter_bytes: int,
    ) -> None: ...

class Function(Launcher):
    def __init__(self, ordinal: int, image: bytes, symbol: str) -> None: ...
    @property
    def device(self) -> int: ...
    def attribute(self, id: int) -> int: ...
    def set_attribute(self, id: int, value: int) -> None: ...
    def set_cache_preference(self, preference: int) -> None: ...
    def max_active_ctas(self, block: _Dim3, dynamic_shared_memory: int) -> int: ...
    def max_active_clusters(self, block: _Dim3, cluster: _Dim3, dynamic_shared_memory: int) -> int: ...
    def parameter_bytes(self) -> int: ...
    def launch(
        self,
        grid: _Dim3,
        block: _Dim3,
        cluster: _Dim3,
        dynamic_shared_memory: int,
        cooperative: bool,
        params: bytes,
        stream: int,
    ) -> None: ...

class Buffer:
    def __init__(self, ordinal: int, bytes: int) -> None: ...
    @property
    def pointer(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def device(self) -> int: ...
    def copy_from_host(self, offset: int, host: int, bytes: int, stream: int) -> None: ...
    def copy_to_host(self, offset: int, host: int, bytes: int, stream: int) -> None: ...

class Event:
    def __init__(self, ordinal: int, stream: int) -> None: ...
    def done(self) -> bool: ...
    def precede(self, stream: int) -> None: ...

class View:
    def __init__(
        self, data: int, shape: Sequence[int], strides: Sequence[int], dtype: int, device: int, read_only: bool
    ) -> None: ...

class Kind:
    INPUT: Kind
    OUTPUT: Kind
    UPDATE: Kind
    RESULT: Kind
    OUTPUT_DTYPE: Kind
    OUTPUT_WANTED: Kind
    REAL: Kind
    INTEGER: Kind
    FLAG: Kind
    CHOICE: Kind
    SM_MARGIN: Kind
    STREAM: Kind

class Source:
    DATA: Source
    OUTER_STRIDE: Source
    INNER_STRIDE: Source
    COLUMN_STRIDE: Source
    STRIDE: Source
    LEADING_STRIDE: Source
    DTYPE: Source
    ARRAY_ROWS: Source
    REAL: Source
    INTEGER: Source
    FLAG: Source
    SIZE: Source
    MAGIC: Source
    SHIFT: Source
    DIFFERENCE: Source
    ROWS: Source
    INNER_COUNT: Source
    INNER_MAGIC: Source
    INNER_SHIFT: Source
    GROUPS: Source
    WORKSPACE: Source
    PARTIALS: Source
    ROW_PARTIALS: Source
    CONSTANT: Source
    SHARERS: Source

class Shape:
    def __init__(self, leading: bool, sizes: Sequence[tuple[int, int]], words: str) -> None: ...

class Symbol:
    def __init__(self, name: str, noun: str, conditional: bool) -> None: ...

class Word:
    def __init__(self, text: str, equal: tuple[int, int] | None = None, reason: str = "") -> None: ...

class Argument:
    shapes: Sequence[Shape]
    dtypes: Sequence[int]
    optional: bool
    broadcast: bool
    rereads: bool
    like: int
    shape_of: int
    wanted_with: int
    of: Sequence[int]
    minimum: float
    largest: int
    noun: str
    needs: int
    needs_words: str
    words: Sequence[Word]

    def __init__(self, kind: Kind, name: str, called: str) -> None: ...

class Stage:
    def __init__(
        self,
        launcher: Launcher,
        block: _Dim3,
        cluster: _Dim3,
        dynamic_shared_memory: int,
        cooperative: bool,
        fields: Sequence[tuple[Source, int, int, int]],
        *,
        early: bool = False,
        columns_per_cta: int = 0,
        per: int = -1,
        rows_of: int = -1,
        row_groups: int = 0,
    ) -> None: ...

class Plan:
    ANY_GROUPS: int

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        multiprocessors: int,
        rows_per_cta: int = 1,
        elements_per_cta: int = 0,
        ctas_per_row: int = 1,
        max_groups: int = ...,
        workspace_bytes: int = 0,
        partial_bytes: int = 0,
        row_bytes: int = 0,
        turn_bytes: int = 0,
        vec_size: int = 1,
        whole: int = -1,
    ) -> None: ...

class Operator:
    def __init__(
        self,
        name: str,
        arguments: Sequence[Argument],
        symbols: Sequence[Symbol],
        plan: Callable[[int, int, int, tuple[int, ...], int, bool, bool, int], Plan],
        check: Callable[[int, int, int, tuple[int, ...], int, bool, bool, int], int],
        slow_call: Callable[[tuple[Any, ...], bool], object],
        gradient: Callable[..., object] | None,
        dispatch: Callable[..., object] | None,
        framework_of: Callable[[type, str], tuple[object, bool, object]],
        implementation: object,
        buckets: Sequence[int] = (),
        split_by: int = -1,
        broadcasts: Sequence[int] = (),
        elementwise: bool = False,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    def forget_plans(self) -> None: ...
    def run_views(
        self,
        views: Sequence[tuple[View, object] | None],
        arguments: Sequence[object],
        allocate: Callable[[tuple[int, ...], int, int], tuple[object, int]],
        stream: int,
        graph_memory: bool = False,
    ) -> object: ...
    def entry(self, direct: bool = False) -> Callable[..., object]: ...

def promoted(a: int, b: int) -> int: ...
def deferred_entry(make: Callable[[], Operator]) -> Callable[..., Any]: ...

class Gradient:
    def __init__(
        self,
        forward: Operator,
        backward: Operator,
        *,
        inputs: Sequence[int],
        unusual: Sequence[int],
        needed: Sequence[int],
        numbers: Sequence[int],
        kept: Sequence[int],
        results: Sequence[int],
        given: Sequence[int],
        prepare: Callable[[tuple[Any, ...]], tuple[Any, ...]],
        forward_steps: Callable[[tuple[bool, ...], tuple[Any, ...]], tuple[Any, ...]],
        backward_steps: Callable[[tuple[bool, ...], tuple[Any, ...], tuple[bool, ...]], tuple[Any, ...]],
        slow_backward: Callable[..., object],
        is_grad_enabled: Callable[[], bool],
        implementation: object,
    ) -> None: ...
    def begin(self, apply: Callable[..., object]) -> None: ...
    @property
    def call(self) -> Callable[..., Any]: ...
    @property
    def forward(self) -> Callable[..., Any]: ...
    @property
    def backward(self) -> Callable[..., Any]: ...
