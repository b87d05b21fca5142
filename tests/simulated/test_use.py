# SPDX-License-Identifier: Apache-2.0
"""The simulator as users of the operators meet it: the environment, and arrays of the host."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import reference
from norm_checks import first_of
from processes import output, run, shared

import transformer_rtc
from transformer_rtc import SimulatedDevice, errors, rms_norm, select, using
from transformer_rtc.errors import ArgumentError, SettingsError
from transformer_rtc.settings import read as read_settings
from transformer_rtc.spec import BFLOAT16, FLOAT16, FLOAT32

pytestmark = pytest.mark.usefixtures("kernels")
FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
CHECKED = SimulatedDevice(checked=True)


# ---- What the environment says ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "mode"), [("checked", "checked"), ("1", "fast")])
def test_the_environment_makes_operators_run_in_the_simulator(value, mode, tmp_path):
    # Warnings are errors: who asks for the simulator knows what it is for.
    text = """
import warnings
warnings.simplefilter("error")
import numpy as np, reference, transformer_rtc
from transformer_rtc import rms_norm
from transformer_rtc.spec import FLOAT32
targets = set()
transformer_rtc.manager.on_event(lambda event: targets.add(str(event.target)))
x = np.random.default_rng(0).standard_normal((5, 100), np.float32)
reference.assert_close(rms_norm(x), reference.rms_norm(x)[0], FLOAT32)
print(*targets)
"""
    assert output(text, {"PYTHONPATH": "."}, SIMULATE=value, **shared(tmp_path)) == f"sm_90.{mode}"


def test_another_value_of_the_variable_is_refused():
    for value in ("yes", "2", "CHECKED"):
        with pytest.raises(SettingsError, match=f"SIMULATE is {value!r}; it takes 0, 1, checked"):
            read_settings({"TRANSFORMER_RTC_SIMULATE": value}).check()


def test_static_kernels_and_the_simulator_cannot_both_be_forced():
    script = "import numpy, transformer_rtc; transformer_rtc.rms_norm(numpy.ones((3, 100), 'f'))"
    told = run(script, FORCE_STATIC="1", SIMULATE="checked").stderr
    assert "SettingsError: TRANSFORMER_RTC_SIMULATE" in told
    text = """
import transformer_rtc
for implementation in ("simulator", "rtc", transformer_rtc.SimulatedDevice()):
    try:
        with transformer_rtc.using(implementation):
            pass
    except transformer_rtc.SettingsError as error:
        assert "contradicts TRANSFORMER_RTC_FORCE_STATIC=1" in str(error)
        print("refused")
"""
    assert output(text, FORCE_STATIC="1").split() == ["refused"] * 3


_FALLBACK = """
import warnings
import numpy as np
from transformer_rtc import rms_norm
x = np.ones((3, 100), np.float32)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for _ in range(3):
        y = rms_norm(x)
assert np.allclose(y, 1)
for warning in told:
    print(warning.category.__name__, warning.filename == "<string>", "in a simulator" in str(warning.message))
"""


def test_without_a_driver_arrays_of_the_host_are_simulated_with_one_warning(tmp_path, without_driver):
    # It points at the caller's line.
    assert output(_FALLBACK, **shared(tmp_path)) == "RuntimeWarning True True"


def test_without_a_driver_and_a_compiler_the_error_names_both(tmp_path, without_driver):
    *_, last = run(_FALLBACK, {"PATH": "", "CXX": ""}, **shared(tmp_path)).stderr.splitlines()
    assert "DriverNotFoundError: rms_norm: x is on the host" in last
    assert "neither g++ nor clang++ is on PATH: install one" in last


@pytest.mark.parametrize("name", ["rtc", "static"])
def test_without_a_driver_an_implementation_that_was_named_is_not_replaced(name, without_driver):
    with using(name), pytest.raises(errors.DeviceNotFoundError, match="x is on the host, and is staged"):
        rms_norm(np.ones((3, 100), np.float32))


def test_the_simulator_is_an_implementation_where_a_compiler_is(monkeypatch):
    assert transformer_rtc.implementations(rms_norm)[-1] == "simulator"
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with contextlib.suppress(errors.DeviceNotFoundError):
        assert "simulator" not in transformer_rtc.implementations(rms_norm)


def test_without_a_driver_it_is_the_only_one(monkeypatch, without_driver):
    for operator in (rms_norm, transformer_rtc.add_rms_norm_backward):
        assert transformer_rtc.implementations(operator) == ["simulator"]
    with pytest.raises(errors.DeviceNotFoundError):
        transformer_rtc.implementations(rms_norm, 1)
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(errors.DeviceNotFoundError):
        transformer_rtc.implementations(rms_norm)


# ---- Arrays of the host ----------------------------------------------------------------------------------------------


@pytest.fixture(params=["simulator", CHECKED, SimulatedDevice(checked=True, static=True)], ids=str)
def simulator(request) -> Iterator[None]:
    """Run a test on simulated devices, without a warning."""
    with using(request.param), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("dtype", first_of(FLOATS))
def test_numpy_arrays(dtype, simulator, rng):
    x, weight = reference.random_rows(rng, (3, 4, 77), dtype), reference.random_weight(rng, 77, dtype)
    x.flags.writeable = False
    y, rstd = rms_norm(x, weight, return_rstd=True)
    expected, expected_rstd = reference.rms_norm(x, weight)
    assert (type(y), y.dtype, y.shape) == (np.ndarray, reference.NUMPY_TYPES[dtype], x.shape)
    assert (rstd.dtype, rstd.shape) == (np.float32, (3, 4))
    reference.assert_close(y, expected, dtype)
    reference.assert_close(rstd, expected_rstd, FLOAT32, "rstd")
    for out_type in (dtype, FLOATS[FLOATS.index(dtype) - 1]):
        numpy_type = reference.NUMPY_TYPES[out_type]
        y = rms_norm(x, weight, out_dtype=numpy_type)
        assert y.dtype == numpy_type
        out = np.full(x.shape, np.nan, numpy_type)
        assert rms_norm(x, weight, out=out) is out
        np.testing.assert_array_equal(out.view(np.uint8), y.view(np.uint8))


def test_arrays_that_speak_dlpack(simulator, rng):
    x = reference.random_rows(rng, (4, 100), FLOAT32)

    class Other:
        def __dlpack__(self, *, stream=None, max_version=None, **options):
            assert stream is None
            return x.__dlpack__()

        def __dlpack_device__(self):
            return x.__dlpack_device__()

    y = rms_norm(Other())
    assert type(y) is np.ndarray
    reference.assert_close(y, reference.rms_norm(x)[0], FLOAT32)


def test_outputs_that_overlap_or_cannot_be_written_are_refused(simulator):
    memory, out = np.zeros((5, 100), np.float32), np.zeros((5, 100), np.float32)
    out.flags.writeable = False
    overlapping = np.lib.stride_tricks.as_strided(np.zeros(199, np.float32), (5, 100), (4, 4))
    for x, given, message in (
        (memory[:4], memory[1:], "out must be x itself or not overlap it"),
        (memory, overlapping, "rows that overlap each other"),
        (memory, out, "out is read-only"),
    ):
        with pytest.raises(ArgumentError, match=message):
            rms_norm(x, out=given)


def test_using_is_left_as_it_was_found():
    before = select.chosen.get()
    with contextlib.suppress(KeyError), using(SimulatedDevice(architecture=120)):
        raise KeyError
    assert select.chosen.get() == before


def test_the_public_names_are_there():
    assert {"SimulatedDevice", "SimulationError"} <= set(transformer_rtc.__all__)
    assert str(SimulatedDevice(120)) == "the simulated sm_120"
