"""How an operator runs: its descriptor, the plan behind each of its calls, and which implementation is chosen."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from . import _native, arrays, compiler, static, usage
from .device import Device, device_limits, device_of, is_simulated
from .errors import (
    ArgumentError,
    CompilerNotFoundError,
    DeviceNotFoundError,
    LaunchError,
    SettingsError,
    StaticKernelError,
    UnexpectedCompileError,
    shown,
)
from .kernel_manager import manager
from .launch import Kernel, LaunchConfig
from .request import Argument, Asked, Family, LaunchRule, Request
from .settings import settings
from .simulator import SimulatedDevice
from .spec import DTYPES, Params

__all__ = ["Operator", "implementations", "using"]

# A plan is keyed with the implementation's place in this list.
IMPLEMENTATIONS = ("rtc", "static", "simulator")
_RTC, _STATIC, _SIMULATOR = range(3)
# "simulator", and from there on every other simulated device that was used.
_simulated = [SimulatedDevice(checked=settings.simulate == "checked")]
_chosen: ContextVar[int] = ContextVar(
    "transformer_rtc.implementation",
    default=_STATIC if settings.force_static else _SIMULATOR if settings.simulate else _RTC,
)


_NO_ARRAYS = ("real", "non_negative", "integer", "flag", "square", "dtype_out", "wanted", "sm_margin", "stream")


def native_arguments(
    arguments: Sequence[Argument],
) -> list[tuple[_native.Role, str, str, list[int], bool, int, list[int]]]:
    """Return a descriptor as the native operator takes it: arrays by their numbers."""
    names = [argument.name for argument in arguments if argument.role not in _NO_ARRAYS]
    return [
        (
            getattr(_native.Role, argument.role.upper()),
            argument.name,
            argument.keyword,
            [dtype.id for dtype in argument.dtypes],
            argument.optional,
            names.index(argument.like, 0, names.index(argument.name)) if argument.like else 0,
            [names.index(name) for name in argument.of],
        )
        for argument in arguments
    ]


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
    buckets : sequence of int
        Numbers of columns, ascending to the largest that there may be: rows of up to one of them have the same kernels,
        which are asked for with it. Empty: each number of columns has its own.
    form_of : str
        The operator whose kernels it asks for, of a function that calls the same arguments by other names.
    """

    def __init__(
        self,
        name: str,
        family: Family,
        arguments: Sequence[Argument],
        buckets: Sequence[int] = (),
        form_of: str = "",
    ) -> None:
        self.name = name
        self.asks_for = form_of or name
        self.family = family
        self.arguments = tuple(arguments)
        self.buckets = tuple(buckets)
        self._arrays = [argument.name for argument in arguments if argument.role not in _NO_ARRAYS]
        self._reals = [argument.name for argument in arguments if argument.role in ("real", "non_negative")]
        self._integers = [argument.name for argument in arguments if argument.role == "integer"]
        self._flags = [argument.name for argument in arguments if argument.role == "flag"]
        self.native: _native.Operator = _native.Operator(
            name,
            native_arguments(arguments),
            self._plan,
            self._check,
            lambda values: arrays.call(self.native, self.arguments, values, _simulating_on_host),
            arrays.framework_of,
            _chosen,
            self.buckets,
        )
        self.call: Callable[..., object] = self.native.entry()
        if not form_of:
            _operators[name] = self

    def _asked(
        self,
        implementation: int,
        device: int,
        dtype_ids: tuple[int, ...],
        columns: int,
        per_head: bool,
        margin: bool,
        flags: int,
    ) -> tuple[Request, Device]:
        """Return what the native call asks a plan for, and where it would run."""
        dtypes = {name: DTYPES.get(dtype) for name, dtype in zip(self._arrays, dtype_ids, strict=True)}
        flagged = frozenset(name for number, name in enumerate(self._flags) if flags >> number & 1)
        request = Request(self.asks_for, dtypes, columns, per_head, margin, flagged)
        simulated = _simulated[implementation - _SIMULATOR] if implementation >= _SIMULATOR else None
        if simulated and device != arrays.HOST:
            raise ArgumentError(
                f"{self.name}: {self.arguments[0].name} is on cuda:{device}; the simulator takes arrays of the host"
            )
        return request, device_of(simulated or device)

    def _check(self, *key: Any) -> int:
        """Refuse what a plan would be refused for, without a kernel; return how many multiprocessors there are."""
        request, on = self._asked(*key)
        self.family.check(request)
        return on.multiprocessors

    def _plan(self, implementation: int, *key: Any) -> _native.Plan:
        request, on = self._asked(implementation, *key)
        if on.static or implementation == _STATIC:
            program = self.family.static_program
            entries = self.family.static(request)
            usage.observe(Asked(request))
            return self._native_plan(
                [
                    (manager.get_static(self.family.name, entry.symbol, entry.params, on, program), entry.params, rule)
                    for entry, rule in entries
                ]
            )
        limits = on.limits
        while True:
            stages = self.family.specialise(request, limits)
            asked = Asked(request, limits.max_ctas_per_row)
            usage.observe(asked)
            try:
                loaded = manager.get_all([spec for spec, _ in stages], on)
                kernels = [(kernel, spec.params, rule) for kernel, (spec, rule) in zip(loaded, stages, strict=True)]
            except UnexpectedCompileError as error:
                from .manifest import line

                raise error.asked_by(line(asked)) from None
            try:
                return self._native_plan(kernels)
            except LaunchError:
                # A small GPU, or a part of one, may not hold so many CTAs together.
                fewer = max(rule.ctas_per_row for _, rule in stages) // 2
                if fewer == 0 or fewer >= limits.max_ctas_per_row:
                    raise
                limits = limits._replace(max_ctas_per_row=fewer)

    def _native_plan(self, kernels: Sequence[tuple[Kernel, Params, LaunchRule]]) -> _native.Plan:
        # Operators that share a general kernel fill its parameters from arrays of their own: not kernel.params.
        stages, resident = [], []
        for kernel, params, rule in kernels:
            ctas = (1, rule.ctas_per_row, 1) if rule.row_groups else (rule.ctas_per_row, 1, 1)
            shared = rule.dynamic_shared_memory
            if rule.spread_ctas:
                shared = 2 * shared // (math.ceil(rule.spread_ctas / kernel.multiprocessors) + 1)
            config = LaunchConfig(
                grid=ctas,
                block=(rule.threads, 1, 1),
                cluster=ctas if rule.clusters else (1, 1, 1),
                dynamic_shared_memory=shared,
                cooperative=rule.cooperative,
            )
            resident.append(kernel.prepare(config))
            # Those without a source, of arrays that this operator does not have, are zero.
            fields = [self._fill(field.source, params.offsets[field.name]) for field in params.fields if field.source]
            stages.append(
                _native.Stage(
                    kernel.launcher,
                    config.block,
                    config.cluster,
                    config.dynamic_shared_memory,
                    config.cooperative,
                    fields,
                    rule.columns_per_cta,
                    rule.early,
                    rule.row_groups,
                )
            )
        kernel, _, rule = kernels[0]
        if rule.cooperative and resident[0] < rule.ctas_per_row:
            raise LaunchError(
                f"{kernel.symbol}: {rule.ctas_per_row} CTAs must be resident together; {kernel.where} can hold "
                f"{resident[0]}"
            )
        in_turn = rule.cooperative or rule.persistent
        return _native.Plan(
            stages,
            rule.rows_per_cta,
            rule.ctas_per_row,
            resident[0] // rule.ctas_per_row if in_turn else _native.Plan.ANY_GROUPS,
            rule.workspace_bytes,
            rule.partial_bytes,
            rule.whole_heads,
            kernel.multiprocessors,
            rule.row_bytes,
            rule.group_unit,
            rule.turn_bytes,
        )

    def _fill(self, source: str, offset: int) -> tuple[_native.Source, int, int]:
        """Return what fills a field: ``"x.data"`` is the pointer of the array x, ``"rows"`` their number."""
        owner, _, what = source.rpartition(".")
        if owner:
            return getattr(_native.Source, what.upper()), self._arrays.index(owner), offset
        for kind, names in (
            (_native.Source.REAL, self._reals),
            (_native.Source.INTEGER, self._integers),
            (_native.Source.FLAG, self._flags),
        ):
            if what in names:
                return kind, names.index(what), offset
        return getattr(_native.Source, what.upper()), 0, offset


_told = False


def _simulating_on_host() -> contextlib.AbstractContextManager[None] | None:
    """Return the context in which arrays of the host are simulated; None: they are staged through a GPU.

    Raises
    ------
    DeviceNotFoundError
        If there is no GPU and nothing that stands in for one.
    """
    global _told
    if _chosen.get() >= _SIMULATOR:
        return contextlib.nullcontext()
    try:
        _native.current_device()
    except DeviceNotFoundError as error:
        if _chosen.get() != _RTC:
            raise
        from .simulator import toolchain

        try:
            toolchain.compiler_identity()
        except CompilerNotFoundError as missing:
            raise type(error)(f"{error}; {missing}") from error
        if not _told:
            _told = True
            warnings.warn(
                f"transformer_rtc runs its kernels on the CPU, in a simulator that is made for correctness and not for "
                f"speed: {error}. TRANSFORMER_RTC_SIMULATE=1 asks for it without this warning",
                RuntimeWarning,
                stacklevel=5,
            )
        return using("simulator")
    return None


class Form(NamedTuple):
    """A public function that calls another one's operator.

    Attributes
    ----------
    operator : str
        That operator's name.
    gives : tuple of str
        Which of its optional arrays are always there.
    """

    operator: str
    gives: tuple[str, ...] = ()


_operators: dict[str, Operator] = {}
_forms: dict[str, Form] = {}


def operators() -> dict[str, Operator]:
    """Return every operator by its name."""
    return dict(_operators)


def forms() -> dict[str, Form]:
    """Return every public function by its name, those that call another one's operator included."""
    return {**{name: Form(name) for name in _operators}, **_forms}


def add_form(name: str, operator: str, *gives: str) -> None:
    """Name a public function that calls another one's operator."""
    _forms[name] = Form(operator, gives)


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
        has kernels for the device: compiled when the package was built. ``"simulator"`` where a C++ compiler is: arrays
        of the host, on the CPU, which is the only one on a machine without a GPU.

    Raises
    ------
    ArgumentError
        If `op` is no operator of this package.
    DeviceNotFoundError
        If there is no such device.
    """
    name = getattr(op, "__name__", None)
    form = forms().get(name) if isinstance(name, str) else None
    if form is None:
        raise ArgumentError(f"op is {shown(op)}; it takes {', '.join(forms())} of transformer_rtc")
    operator = _operators[form.operator]
    from .simulator import toolchain

    simulator = []
    if not settings.force_static:
        with contextlib.suppress(CompilerNotFoundError):
            toolchain.compiler_identity()
            simulator.append("simulator")
    try:
        architecture = device_limits(device).architecture
    except DeviceNotFoundError:
        if device == 0 and simulator:
            return simulator
        raise
    found = []
    if not settings.force_static:
        with contextlib.suppress(CompilerNotFoundError):
            compiler.compiler_identity()
            found.append("rtc")
    with contextlib.suppress(StaticKernelError):
        static.image(operator.family.name, architecture)
        found.append("static")
    return found + simulator


@contextlib.contextmanager
def using(implementation: str | SimulatedDevice) -> Iterator[None]:
    """Choose how operators run within a ``with`` block, in this thread or task.

    Parameters
    ----------
    implementation : str or SimulatedDevice
        ``"rtc"``, ``"static"`` or ``"simulator"``; or a simulated device, which says how to simulate.

    Raises
    ------
    ArgumentError
        If there is no such implementation.
    SettingsError
        If the environment forces another one.
    """
    named = isinstance(implementation, str) and implementation in IMPLEMENTATIONS
    if not named and not is_simulated(implementation):
        raise ArgumentError(
            f"implementation is {shown(implementation)}; it takes {', '.join(IMPLEMENTATIONS)} or a SimulatedDevice"
        )
    if settings.force_static and implementation != "static":
        raise SettingsError(f"using({implementation!r}) contradicts TRANSFORMER_RTC_FORCE_STATIC=1")
    if not isinstance(implementation, str):
        if implementation not in _simulated:
            _simulated.append(implementation)
        number = _SIMULATOR + _simulated.index(implementation)
    else:
        number = IMPLEMENTATIONS.index(implementation)
    token = _chosen.set(number)
    try:
        yield
    finally:
        _chosen.reset(token)
