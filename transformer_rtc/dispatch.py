"""How an operator runs: its descriptor, the plan behind each of its calls, and which implementation is chosen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple, Protocol

from . import _native, arrays, compiler, static
from .errors import ArgumentError, CompilerNotFoundError, LaunchError, SettingsError, StaticKernelError
from .launch import Kernel, LaunchConfig, device_limits
from .manager import manager
from .settings import settings
from .spec import DTYPES, DeviceLimits, DType, KernelSpec, Params

__all__ = ["Argument", "Family", "LaunchRule", "Operator", "implementations", "using"]

# A plan is keyed with the implementation's place in this list.
IMPLEMENTATIONS = ("rtc", "static")
_chosen: ContextVar[int] = ContextVar(
    "transformer_rtc.implementation", default=IMPLEMENTATIONS.index("static" if settings.force_static else "rtc")
)


class Argument(NamedTuple):
    """An argument of an operator's call.

    Attributes
    ----------
    name : str
        As the user knows it.
    role : str
        ``"rows"``: an input array [..., columns]; the first argument is one. ``"columns"``: an input array [columns].
        ``"real"``: a float. ``"rows_out"``: an output array like the first input. ``"dtype_out"``: the data type of the
        output before it. ``"row_values"``: whether to return an output [...] with one value a row. ``"stream"``.
    dtypes : tuple of DType
        What an array may hold; of ``"row_values"``, the one it holds.
    optional : bool
        Whether an input array may be None.
    """

    name: str
    role: str
    dtypes: tuple[DType, ...] = ()
    optional: bool = False


class LaunchRule(NamedTuple):
    """How a kernel is launched, but for the number of rows.

    Attributes
    ----------
    threads : int
        Of a CTA.
    rows_per_cta, ctas_per_row : int
        One of them is 1.
    clusters : bool
        Whether the CTAs of a row are a cluster; else, if there are several, the launch is cooperative.
    dynamic_shared_memory : int
        Bytes of a CTA.
    workspace_bytes : int
        Of each group of CTAs that shares a row, zeroed before each launch.
    """

    threads: int
    rows_per_cta: int = 1
    ctas_per_row: int = 1
    clusters: bool = False
    dynamic_shared_memory: int = 0
    workspace_bytes: int = 0


class StaticKernel(NamedTuple):
    """An entry of a family's static module."""

    symbol: str
    params: Params


class Family(Protocol):
    """What a family of operators provides: pure functions of types, columns and limits."""

    name: str

    def specialise(
        self, dtypes: dict[str, DType | None], columns: int, limits: DeviceLimits
    ) -> tuple[KernelSpec, LaunchRule]:
        """Return the kernel for these arguments: the types of present arrays by name, None for absent ones."""
        ...

    def static(self, dtypes: dict[str, DType | None], columns: int) -> tuple[StaticKernel, LaunchRule]:
        """Return the general kernel for these arguments."""
        ...

    def static_program(self) -> str:
        """Return the text of the module of general kernels."""
        ...


class Operator:
    """An operator's native call, and the plans behind it.

    Parameters
    ----------
    name : str
        As the user knows it.
    family : Family
        Who knows its kernels.
    arguments : sequence of Argument
        In the order of the call.
    """

    def __init__(self, name: str, family: Family, arguments: Sequence[Argument]) -> None:
        self.name = name
        self.family = family
        self.arguments = tuple(arguments)
        self._arrays = [argument.name for argument in arguments if argument.role not in ("real", "dtype_out", "stream")]
        self._reals = [argument.name for argument in arguments if argument.role == "real"]
        self.native: _native.Operator = _native.Operator(
            name,
            [
                (
                    getattr(_native.Role, argument.role.upper()),
                    argument.name,
                    [dtype.id for dtype in argument.dtypes],
                    argument.optional,
                )
                for argument in arguments
            ],
            self._plan,
            lambda values: arrays.call(self.native, self.arguments, values),
            arrays.framework_of,
            _chosen,
        )
        self.call: Callable[..., object] = self.native.entry()
        _operators[name] = self

    def _plan(self, implementation: int, device: int, dtype_ids: tuple[int, ...], columns: int) -> _native.Plan:
        dtypes = {name: DTYPES.get(dtype) for name, dtype in zip(self._arrays, dtype_ids, strict=True)}
        if IMPLEMENTATIONS[implementation] == "static":
            entry, rule = self.family.static(dtypes, columns)
            kernel = manager.get_static(self.family.name, entry.symbol, entry.params, device)
            return self._native_plan(kernel, rule)
        limits = device_limits(device)
        while True:
            spec, rule = self.family.specialise(dtypes, columns, limits)
            kernel = manager.get(spec, device)
            try:
                return self._native_plan(kernel, rule)
            except LaunchError:
                # A small GPU, or a part of one, may not hold so many CTAs together.
                if rule.ctas_per_row == 1:
                    raise
                limits = limits._replace(max_ctas_per_row=rule.ctas_per_row // 2)

    def _native_plan(self, kernel: Kernel, rule: LaunchRule) -> _native.Plan:
        cooperative = rule.ctas_per_row > 1 and not rule.clusters
        config = LaunchConfig(
            grid=(rule.ctas_per_row, 1, 1),
            block=(rule.threads, 1, 1),
            cluster=(rule.ctas_per_row if rule.clusters else 1, 1, 1),
            dynamic_shared_memory=rule.dynamic_shared_memory,
            cooperative=cooperative,
        )
        resident = kernel.prepare(config)
        if cooperative and resident < rule.ctas_per_row:
            raise LaunchError(
                f"{kernel.symbol}: {rule.ctas_per_row} CTAs must be resident together; cuda:{kernel.device} can hold "
                f"{resident}"
            )
        return _native.Plan(
            kernel.function,
            config.block,
            config.cluster,
            config.dynamic_shared_memory,
            cooperative,
            [self._fill(field.source, kernel.params.offsets[field.name]) for field in kernel.params.fields],
            rule.rows_per_cta,
            rule.ctas_per_row,
            resident // rule.ctas_per_row if cooperative else 2**31 - 1,
            rule.workspace_bytes,
        )

    def _fill(self, source: str, offset: int) -> tuple[_native.Source, int, int]:
        """Return what fills a field: ``"x.data"`` is the pointer of the array x, ``"rows"`` their number."""
        owner, _, what = source.rpartition(".")
        kind = getattr(_native.Source, (what if owner or what not in self._reals else "real").upper())
        if owner:
            return kind, self._arrays.index(owner), offset
        return kind, self._reals.index(what) if what in self._reals else 0, offset


_operators: dict[str, Operator] = {}


def operators() -> dict[str, Operator]:
    """Return every operator by its name."""
    return dict(_operators)


def implementations(op: Callable[..., object], device: int = 0) -> list[str]:
    """Return how an operator can run on a device.

    Parameters
    ----------
    op : callable
        An operator of this package, such as `rms_norm`.
    device : int
        The device's ordinal.

    Returns
    -------
    list of str
        ``"rtc"`` where NVRTC is installed and not forbidden: compiled at run time. ``"static"`` where the installation
        has kernels for the device: compiled when the package was built.

    Raises
    ------
    ArgumentError
        If `op` is no operator of this package.
    DeviceNotFoundError
        If there is no such device.
    """
    operator = _operators.get(getattr(op, "__name__", ""))
    if operator is None:
        raise ArgumentError(f"op is {op!r}; it takes {', '.join(_operators)} of transformer_rtc")
    architecture = device_limits(device).architecture
    found = []
    if not settings.force_static:
        with contextlib.suppress(CompilerNotFoundError):
            compiler.compiler_identity()
            found.append("rtc")
    with contextlib.suppress(StaticKernelError):
        static.image(operator.family.name, architecture)
        found.append("static")
    return found


@contextlib.contextmanager
def using(implementation: str) -> Iterator[None]:
    """Choose how operators run within a ``with`` block, in this thread or task.

    Parameters
    ----------
    implementation : str
        ``"rtc"`` or ``"static"``.

    Raises
    ------
    ArgumentError
        If there is no such implementation.
    SettingsError
        If the environment forces another one.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ArgumentError(f"implementation is {implementation!r}; it takes {', '.join(IMPLEMENTATIONS)}")
    if settings.force_static and implementation != "static":
        raise SettingsError(f"using({implementation!r}) contradicts TRANSFORMER_RTC_FORCE_STATIC=1")
    token = _chosen.set(IMPLEMENTATIONS.index(implementation))
    try:
        yield
    finally:
        _chosen.reset(token)
