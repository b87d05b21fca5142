# SPDX-License-Identifier: Apache-2.0
"""What compiles for a target: NVRTC for a GPU's, the host's C++ compiler for the simulator's."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

from . import compiler, static
from .checks import check_type, is_integer
from .compiler import Compiled
from .device import has_gpu
from .errors import ArgumentError, shown
from .spec import KernelSpec, Target

__all__ = ["CompileFunction", "NvrtcToolchain", "SimulatorToolchain", "Toolchain", "target_of", "toolchain_of"]


class CompileFunction(Protocol):
    """A compiler, called as `transformer_rtc.compiler.compile_program` is."""

    def __call__(
        self, symbol: str, program: str, headers: dict[str, str], options: tuple[str, ...], architecture: int
    ) -> Compiled: ...


class Toolchain:
    """What makes the images of some targets.

    Attributes
    ----------
    takes_others : bool
        Whether an image of the same source is as good that another version of the compiler made.
    has_cuda_headers : bool
        Whether a program may include headers of CUDA's.
    """

    takes_others: ClassVar[bool]
    has_cuda_headers: ClassVar[bool]

    def identity(self) -> str:
        """Return which compiler would compile, without opening it.

        Raises
        ------
        CompilerNotFoundError
            If there is none.
        """
        raise NotImplementedError

    def key_parts(self, target: Target) -> dict[str, object]:
        """Return what an image depends on besides its program, headers, options, architecture and compiler."""
        raise NotImplementedError

    def compile(
        self, symbol: str, program: str, headers: dict[str, str], options: tuple[str, ...], target: Target, report: bool
    ) -> Compiled:
        """Compile a program; with `report`, the log says what resources the kernel takes, where the compiler knows."""
        raise NotImplementedError

    def check_target(self, target: Target) -> None:
        """Refuse a target for which `compile` makes no machine code.

        Raises
        ------
        CompilerNotFoundError
            If the compiler is too old for it.
        """
        raise NotImplementedError

    def kind_of(self, image: bytes) -> str:
        """Return the kind of an image that this toolchain made: ``"cubin"``, ``"ptx"`` or ``"module"``."""
        raise NotImplementedError

    def compiles_beside(self) -> bool:
        """Whether several kernels of one call should be compiled at the same time now."""
        raise NotImplementedError

    def advice(self, why: str) -> str:
        """Return what a message adds of an image that is missing where `why` forbids to compile it; it may be empty."""
        raise NotImplementedError

    def prebuilt(self, family: str, target: Target) -> static.StaticImage | None:
        """Return the general kernels that came with the package; None: they are compiled like every other kernel.

        Raises
        ------
        StaticKernelError
            If they come with a package, and this installation has none for the target.
        """
        raise NotImplementedError


class NvrtcToolchain(Toolchain):
    """The toolchain of GPUs.

    Parameters
    ----------
    compile_program : callable
        The compiler.
    identity : callable
        Which compiler that is, without opening it.
    """

    takes_others = True
    has_cuda_headers = True

    def __init__(self, compile_program: CompileFunction, identity: Callable[[], str]) -> None:
        self._compile_program = compile_program
        self._identity = identity

    def identity(self) -> str:
        return self._identity()

    def key_parts(self, target: Target) -> dict[str, object]:
        return {}

    def compile(
        self, symbol: str, program: str, headers: dict[str, str], options: tuple[str, ...], target: Target, report: bool
    ) -> Compiled:
        if report:
            options = (*options, compiler.REPORT)
        return self._compile_program(symbol, program, headers, options, target.architecture)

    def check_target(self, target: Target) -> None:
        compiler.check_architecture(target.architecture)

    def kind_of(self, image: bytes) -> str:
        return "cubin" if image.startswith(b"\x7fELF") else "ptx"

    def compiles_beside(self) -> bool:
        # At the interpreter's end only one thread may compile.
        return not compiler.is_stopped()

    def advice(self, why: str) -> str:
        return ""

    def prebuilt(self, family: str, target: Target) -> static.StaticImage | None:
        return static.image(family, target.architecture)


class SimulatorToolchain(Toolchain):
    """The toolchain of simulated devices. Its module is imported when it is first used: most processes never do."""

    takes_others = False  # They are not shipped: they are code for this machine's CPU.
    has_cuda_headers = False  # They are for NVIDIA's compilers.

    def identity(self) -> str:
        from .simulator import toolchain

        return toolchain.compiler_identity()

    def key_parts(self, target: Target) -> dict[str, object]:
        from .simulator import toolchain

        return toolchain.key_parts(target)

    def compile(
        self, symbol: str, program: str, headers: dict[str, str], options: tuple[str, ...], target: Target, report: bool
    ) -> Compiled:
        from .simulator import toolchain

        return toolchain.compile_program(symbol, program, headers, options, target)

    def check_target(self, target: Target) -> None:
        return  # The same C++ compiler makes all of them.

    def kind_of(self, image: bytes) -> str:
        return "module"

    def compiles_beside(self) -> bool:
        return False  # Nobody waits for a GPU where kernels are simulated.

    def advice(self, why: str) -> str:
        sees = "" if has_gpu() else "This process sees no GPU: start the container with --gpus all. "
        return (
            f"\n{sees}The call would run in the simulator, whose modules no warm-up makes: run it once without {why} "
            f"to make this one"
        )

    def prebuilt(self, family: str, target: Target) -> static.StaticImage | None:
        return None


_SIMULATOR = SimulatorToolchain()


def toolchain_of(target: Target, nvrtc: Toolchain) -> Toolchain:
    """Return what compiles for a target, where `nvrtc` does for GPUs."""
    return _SIMULATOR if target.simulated else nvrtc


def target_of(spec: object, target: object) -> Target:
    """Return the target of an architecture, or the one that is given."""
    check_type(spec, KernelSpec, "spec")
    if isinstance(target, Target):
        return target
    if not is_integer(target, 1, 999):
        raise ArgumentError(f"target is {shown(target)}; it takes an architecture, such as 90, or a Target")
    return Target(target)  # type: ignore[arg-type]
