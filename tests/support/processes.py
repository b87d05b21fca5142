"""Scripts in Python processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

# `opened()` is what a process has opened of driver, compiler, bindings and frameworks.
OPENED = (
    "def opened():\n"
    "    import re, sys\n"
    "    maps = open('/proc/self/maps').read()\n"
    "    found = {name for name in ('libnvrtc', 'libcuda.so') if name in maps}\n"
    "    return found | {name for name in sys.modules if re.match('(cuda[.]|torch|cupy|jax|ml_dtypes)', name)}\n"
)


def run_python(script: str, **variables: str) -> str:
    """Return what a script prints, in a process without our environment variables but those that are given."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRANSFORMER_RTC_")}
    done = subprocess.run(
        [sys.executable, "-c", OPENED + script], env={**environment, **variables}, cwd=os.path.dirname(__file__),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(script: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a script with settings of ours: ``CACHE_DIR`` is TRANSFORMER_RTC_CACHE_DIR."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRANSFORMER_RTC_")}
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**environment, **{f"TRANSFORMER_RTC_{name}": value for name, value in settings.items()}},
        cwd=os.path.dirname(__file__),  # not a source tree: Python would import from it
        capture_output=True,
        text=True,
        timeout=300,
    )


def output(script: str, **settings: str) -> str:
    """Return what such a script prints; it must not fail."""
    done = run(script, **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
