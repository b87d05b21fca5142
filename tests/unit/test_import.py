# SPDX-License-Identifier: Apache-2.0
"""What `import transformer_rtc` says where it cannot be done."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "transformer_rtc"


@pytest.fixture
def error_of(tmp_path):
    """Return what says how a copy of the package's first modules fails, beside a native module of some text."""
    (tmp_path / "transformer_rtc").mkdir()
    for name in ("__init__.py", "errors.py"):
        shutil.copy(PACKAGE / name, tmp_path / "transformer_rtc")

    def error_of(native: str | None) -> str:
        if native is not None:
            (tmp_path / "transformer_rtc" / "_native.py").write_text(native)
        script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import transformer_rtc"
        # Without site, which finds the installed package first.
        done = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True)
        assert done.returncode == 1 and "circular" not in done.stderr
        return done.stderr.splitlines()[-1]

    return error_of


def test_a_clone_without_an_install_says_so(error_of):
    assert error_of(None) == (
        "ImportError: transformer_rtc is not installed: run pip install -e '.[cu12]' in the clone"
    )


def test_a_native_module_that_cannot_be_loaded_says_why(error_of):
    assert error_of("raise ImportError('libstdc++.so.6: no such file', name='_native')") == (
        "ImportError: libstdc++.so.6: no such file"
    )
