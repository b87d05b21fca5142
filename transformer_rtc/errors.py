"""Every exception that this package raises on purpose."""

from __future__ import annotations

__all__ = [
    "AllocationError",
    "ArgumentError",
    "CompileError",
    "CompilerNotFoundError",
    "DeviceNotFoundError",
    "DriverError",
    "DriverNotFoundError",
    "LaunchError",
    "SettingsError",
    "StaticKernelError",
    "TransformerRtcError",
    "UnexpectedCompileError",
]


class TransformerRtcError(Exception):
    """Base class of this package's exceptions."""


class ArgumentError(TransformerRtcError, ValueError):
    """An argument that an operator does not accept. Raised before anything is launched."""


class AllocationError(TransformerRtcError, MemoryError):
    """A framework's allocator gave no memory for an output."""


class SettingsError(TransformerRtcError, ValueError):
    """An environment variable or a setting that is malformed or contradicts another."""


class DeviceNotFoundError(TransformerRtcError, RuntimeError):
    """There is no such CUDA device."""


class DriverNotFoundError(DeviceNotFoundError):
    """There is no NVIDIA driver on this machine."""


class DriverError(TransformerRtcError, RuntimeError):
    """The NVIDIA driver is too old, or refused a call."""


class LaunchError(TransformerRtcError, RuntimeError):
    """A kernel that cannot be launched as asked, such as a cooperative grid that is too large to be resident."""


class StaticKernelError(TransformerRtcError, RuntimeError):
    """The installation has no static kernel for an operator and an architecture."""


class CompilerNotFoundError(TransformerRtcError, ImportError):
    """NVRTC or its Python bindings are not installed."""


class UnexpectedCompileError(TransformerRtcError, RuntimeError):
    """A kernel would have to be compiled while compiles are forbidden."""


class CompileError(TransformerRtcError, RuntimeError):
    """NVRTC refused a program.

    Attributes
    ----------
    symbol : str
        The kernel's name.
    options : tuple of str
        NVRTC's options.
    source : str
        The program, without the headers it includes.
    log : str
        NVRTC's log.
    versions : dict of str to str
        The versions of what took part.
    """

    def __init__(self, symbol: str, options: tuple[str, ...], source: str, log: str, versions: dict[str, str]) -> None:
        self.symbol, self.options, self.source, self.log, self.versions = symbol, options, source, log, versions
        numbered = "\n".join(f"{number:4d} | {line}" for number, line in enumerate(source.splitlines(), 1))
        found = ", ".join(f"{name} {version}" for name, version in versions.items())
        super().__init__(
            f"NVRTC could not compile {symbol}\n{log.strip()}\n\noptions: {' '.join(options)}\n"
            f"versions: {found}\nprogram:\n{numbered}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.symbol, self.options, self.source, self.log, self.versions)
