# SPDX-License-Identifier: Apache-2.0
"""Scripts in processes of their own on fake_driver.cpp, which stands for a driver and two GPUs."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import kernel_cache
import pytest
from processes import CALLS, environment, shared

# What the scripts begin with.
ON_FAKE_DRIVER = f"""{CALLS}
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
driver.fake_stream.restype, driver.fake_end_capture.restype = ctypes.c_size_t, ctypes.c_char_p
driver.fake_called.restype = ctypes.c_char_p
stream_of = driver.fake_stream
right = lambda y: np.asarray(y).size > 0  # kernels do nothing
begin = lambda stream, mode=0: driver.fake_begin_capture(ctypes.c_void_p(stream), mode)
end = lambda stream: driver.fake_end_capture(ctypes.c_void_p(stream))
def array(*shape, made_on=None):
    made = t.DeviceArray(_native.Buffer(0, 4 * int(np.prod(shape))), shape, 32 | 2 << 8, 1)
    if made_on is not None:
        made.made_on(made_on)
    return made
class Interface:
    def __init__(self, array, stream):
        self.array, self.__cuda_array_interface__ = array, {{**array.__cuda_array_interface__, "stream": stream}}
mine = lambda: t.manager.compile('extern "C" __global__ void mine() {{}}', "mine", (), 0)
"""
_SOURCE = Path(__file__).with_name("fake_driver.cpp")
_OPTIONS = ("-std=c++17", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")


def _library(shared: Path) -> Path:
    """Return the folder of the library, which one worker compiles for all, and for later runs."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    content = hashlib.sha256(_SOURCE.read_bytes() + repr((compiler, *_OPTIONS)).encode()).hexdigest()
    folder = shared / f"fake_driver.{content[:24]}"
    folder.mkdir(parents=True, exist_ok=True)
    library, half = folder / "libcuda.so.1", folder / "half"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            subprocess.run([compiler, *_OPTIONS, "-o", str(half), str(_SOURCE)], check=True)
            half.rename(library)
    return folder


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Return what runs a script on the fake driver, and returns the lines it prints.

    It fails where the script does, and where it writes to stderr. Kernels come from the folder that all tests share,
    unless the script is given another CACHE_DIR.
    """
    own = tmp_path_factory.mktemp("fake_driver")
    folder = _library(Path(kernel_cache.folder or own))

    def run(script: str, ptx_version: str = "90", **settings: str) -> list[str]:
        # A free-threaded Python turns the GIL on too, and warns.
        variables = {"LD_LIBRARY_PATH": str(folder), "FAKE_PTX_VERSION": ptx_version, "PYTHON_GIL": "1"}
        done = subprocess.run(
            [sys.executable, "-c", ON_FAKE_DRIVER + textwrap.dedent(script)],
            env=environment(**(shared(own) | settings)) | variables,
            cwd=own,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout.splitlines()

    return run
