# SPDX-License-Identifier: Apache-2.0
"""What becomes of a tuning file. Kernels run in the simulator."""

from __future__ import annotations

import json
import os
import warnings

import numpy as np
import pytest
from cases import CASES
from stubs import Compiler

from transformer_rtc import ArgumentError, SimulatedDevice, record, tuning, using, warming, warmup
from transformer_rtc.cache import DiskCache
from transformer_rtc.declaration import declaration_of
from transformer_rtc.kernel_manager import KernelManager
from transformer_rtc.manifest import line, parse
from transformer_rtc.operator import Operator
from transformer_rtc.ops.norm.family import NormFamily
from transformer_rtc.request import Asked
from transformer_rtc.settings import Settings, read
from transformer_rtc.spec import ARCHITECTURES
from transformer_rtc.tuning import Tuning, TuningRow

DEVICE = "simulated sm_90"
(REQUEST,) = warming._requests("rms_norm", "float32", 1024, False, False, {})
OTHER = {"threads_per_row": 64, "rows_per_cta": 1, "vec_size": 4, "vectors_per_thread": 4, "in_shared": True}
ROW = TuningRow(REQUEST, OTHER, 0.1, 0.01)


# ---- Cases ---------------------------------------------------------------------------------------------------------


def test_what_changes_no_configuration_is_one_case():
    family = declaration_of("rms_norm").family
    (plain,) = warming._requests("rms_norm", "bfloat16", 4096, False, False, {})
    same = [plain._replace(unaligned=True), plain._replace(margin=True)]
    same += warming._requests("rms_norm", "float16", 4096, False, False, {"return_rstd": True})
    others = warming._requests("rms_norm", "bfloat16", 4096, True, False, {})
    others += warming._requests("rms_norm", "float32", 4096, False, False, {})
    others += warming._requests("rms_norm", "bfloat16", 2048, False, False, {})
    others += warming._requests("rms_norm", "bfloat16", 4096, False, False, {"out_dtype": "float32"})
    assert {family.case(request) for request in same} == {family.case(plain)}
    assert len({family.case(request) for request in (plain, *others)}) == 1 + len(others)
    for of_softmax in ({"causal": "aligned"}, {"mask": "bool"}, {}):
        (one,) = warming._requests("softmax", "bfloat16", 4096, False, False, of_softmax)
        assert declaration_of("softmax").family.case(one._replace(unaligned=True)) == (
            declaration_of("softmax").family.case(one)
        )


# ---- Files -----------------------------------------------------------------------------------------------------------


def test_a_file_is_read_as_it_was_written(tmp_path):
    rows = [ROW, *(TuningRow(case.request, None) for case in CASES[::50])]
    tuning.write(str(tmp_path / "new" / "t.jsonl"), Tuning(DEVICE, 90, rows))
    found = tuning.read(tmp_path / "new" / "t.jsonl")
    assert (found.device, found.architecture, found.rows) == (DEVICE, 90, tuple(rows))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["t.jsonl"]


HEADER = {"tuning": 1, "device": DEVICE, "architecture": 90}
GOOD = {"request": json.loads(line(Asked(REQUEST))), "config": OTHER, "gain": 0.1, "spread": 0.01}


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([], "first line must say 'tuning': 1"),
        ([{**HEADER, "tuning": 2}], "first line must say 'tuning': 1"),
        ([GOOD], ":1: it must be an object with architecture, device, tuning"),
        ([HEADER, "{"], ":2: it is no JSON"),
        ([HEADER, {**GOOD, "more": 1}], ":2: it must be an object with config, gain, request, spread"),
        ([HEADER, {**GOOD, "config": [1]}], ":2: it must have an operator's request"),
        ([HEADER, {**GOOD, "request": {**GOOD["request"], "operator": "x"}}], ":2: operator is 'x'"),
        *(([HEADER, {**GOOD, "gain": one}], ":2: gain and spread must be numbers") for one in ("much", True, np.nan)),
        ([{**HEADER, "architecture": "sm_90"}], ":1: architecture must be a number"),
    ],
)
def test_what_is_no_tuning_file_is_refused_with_its_line(lines, told, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines))
    with pytest.raises(ArgumentError) as raised:
        tuning.read(path)
    assert told in str(raised.value) and str(path) in str(raised.value)


def test_the_environment_says_which_file_is_read(tmp_path):
    for value, expected in (("", ""), ("off", "off"), (str(tmp_path / "t"), str(tmp_path / "t"))):
        assert read({"HOME": "/root", "TRANSFORMER_RTC_TUNING": value}).tuning == expected
    own, image = tmp_path / "own", tmp_path / "image"

    def files(value="", cache=own):
        options = Settings(False, cache and str(cache), "", "allow", 0, str(image), 0, None, value)
        return tuning.file_for("NVIDIA H100 80GB HBM3", options), tuning.files_for("NVIDIA H100 80GB HBM3", options)

    name = "tuning.NVIDIA-H100-80GB-HBM3.jsonl"
    # Only the first one is written.
    assert files() == (str(own / name), [str(own / name), str(image / name)])
    assert files(cache=None) == (None, [str(image / name)])
    assert files("off") == (None, []) and files("/a/file") == ("/a/file", ["/a/file"])
    own.mkdir()
    own.chmod(0o1777)
    assert files()[0] == str(own / f"transformer_rtc-{os.geteuid()}" / name)


def test_rows_of_an_image_hold_beside_one_s_own(tmp_path, monkeypatch):
    own, image = tmp_path / "own", tmp_path / "image"
    options = Settings(False, str(own), "", "allow", 0, str(image), 0, None)
    monkeypatch.setattr(tuning, "settings", options)
    (other,) = warming._requests("rms_norm", "float32", 512, False, False, {})
    image.mkdir()
    for folder, rows in ((image, [ROW, TuningRow(other, None, 0.5)]), (own, [ROW._replace(gain=0.7)])):
        tuning.write(tuning.files_for(DEVICE)[folder is image], Tuning(DEVICE, 90, rows))
        tuning.forget()
        found = tuning.tuning_of(DEVICE)
        assert found.row(other).gain == 0.5 and found.row(REQUEST).gain == rows[0].gain
    tuning.forget()
    # Readable by others, and in a folder that others do not write.
    assert (own.stat().st_mode & 0o022, os.stat(tuning.files_for(DEVICE)[0]).st_mode & 0o777) == (0, 0o644)


# ---- Calls -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """Give simulated devices a tuning file with such rows; and operators no plans."""

    def use(*rows, device=DEVICE):
        path = str(tmp_path / "t.jsonl")
        tuning.write(path, Tuning(device, 90, rows))
        monkeypatch.setattr(tuning, "settings", Settings(False, None, "", "allow", 0, None, 0, None, path))
        tuning.forget()

    yield use
    monkeypatch.undo()
    tuning.forget()


def called(x: np.ndarray, weight: np.ndarray, **device: object) -> tuple[np.ndarray, Asked]:
    """Call rms_norm anew on a simulated device; return y, and what was asked for."""
    declaration = declaration_of("rms_norm")
    values = {"x": x, "weight": weight, "eps": 1e-6, "weight_offset": 0.0}
    given = [values.get(argument.name, argument.default) for argument in declaration.arguments]
    with record() as entries, using(SimulatedDevice(**device)):
        y = Operator(declaration).call(*(None if value is ... else value for value in given))
    return y, entries[-1]


def test_a_call_has_the_configuration_of_its_device_s_file(tuned, rng):
    x, weight = rng.standard_normal((7, 1024), np.float32), rng.standard_normal(1024, np.float32)
    usual, asked = called(x, weight)
    assert asked.config is None
    tuned(ROW)
    y, asked = called(x, weight)
    assert asked.config == OTHER
    np.testing.assert_allclose(y, usual, rtol=1e-6)
    # Unaligned rows have the same one: a row's bits do not depend on where it lies.
    shifted = np.empty(7 * 1024 + 1, np.float32)[1:].reshape(7, 1024)
    shifted[...] = x
    again, asked = called(shifted, weight)
    assert asked.config == OTHER and asked.request.unaligned
    np.testing.assert_array_equal(again.view(np.uint32), y.view(np.uint32))
    # Others have the default one.
    assert called(x[:, :512].copy(), weight[:512])[1].config is None
    with pytest.warns(RuntimeWarning, match="this device is simulated sm_80"):
        assert called(x, weight, architecture=80)[1].config is None


@pytest.mark.parametrize(
    "config", [{**OTHER, "vectors_per_thread": 3}, {**OTHER, "stages": 400}, {"threads": 64}, {}, None], ids=str
)
def test_a_row_with_no_configuration_that_fits_changes_nothing(config, tuned, rng):
    tuned(TuningRow(REQUEST, config))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert called(np.ones((2, 1024), np.float32), np.ones(1024, np.float32))[1].config is None


def test_another_device_s_file_is_told_of_once_and_not_used(tuned):
    tuned(ROW, device="another")
    with pytest.warns(RuntimeWarning, match="is of 'another', and this device is simulated sm_90"):
        assert called(np.ones((2, 1024), np.float32), np.ones(1024, np.float32))[1].config is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        called(np.ones((2, 1024), np.float32), np.ones(1024, np.float32))


# ---- Warm-up ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiler(monkeypatch, tmp_path) -> Compiler:
    """Have warm-ups use a manager with an empty cache and a compiler that only counts."""
    made = Compiler()
    monkeypatch.setattr(warming, "manager", KernelManager(DiskCache(str(tmp_path / "cache")), made, lambda: "nvrtc 1"))
    return made


def symbols(config, unaligned=(False, True)) -> set[str]:
    kinds = [REQUEST._replace(unaligned=kind) for kind in unaligned]
    return {NormFamily().specialise(kind, ARCHITECTURES[90], config)[0][0].symbol for kind in kinds}


def test_a_warm_up_compiles_what_a_tuned_device_asks_for(compiler, tmp_path):
    path = tmp_path / "t.jsonl"
    tuning.write(str(path), Tuning("NVIDIA X", 90, [ROW]))
    other = tuning.config_of(REQUEST, ARCHITECTURES[90], OTHER)
    for given in ({"operators": "rms_norm", "dtypes": "float32", "hidden_sizes": 1024}, {"manifest": [Asked(REQUEST)]}):
        found = warmup(**given, architectures=["sm_90", "sm_80"], tuning=path)
        of = {name: {one.symbol for one in found if one.architecture == name} for name in ("sm_90", "sm_80")}
        assert of["sm_90"] == symbols(other) and of["sm_80"].isdisjoint(of["sm_90"])
    assert {one.symbol for one in warmup("rms_norm", "float32", 1024, architectures="sm_90")} == symbols(None)
    with pytest.raises(ArgumentError, match=r"tuning is a file for sm_90 \(NVIDIA X\), and not for sm_80"):
        warmup("rms_norm", "float32", 1024, architectures="sm_80", tuning=path)
    with pytest.raises(ArgumentError, match="tuning"):
        warmup("rms_norm", "float32", 1024, architectures="sm_80", tuning=3)


def test_a_manifest_s_line_says_which_configuration_a_request_had(compiler, tuned):
    tuned(ROW)
    _, entry = called(np.ones((2, 1024), np.float32), np.ones(1024, np.float32))
    assert parse(line(entry)) == entry and json.loads(line(entry))["config"] == OTHER
    found = warmup(manifest=[parse(line(entry))], architectures="sm_90", unaligned=False)
    assert {one.symbol for one in found} == symbols(tuning.config_of(REQUEST, ARCHITECTURES[90], OTHER), (False,))
    # Of a device where it does not fit, the default one.
    small = entry._replace(config={**OTHER, "ctas_per_row": 32})
    assert {one.symbol for one in warmup(manifest=[small], architectures="sm_90")} == symbols(None)
    with pytest.raises(ArgumentError, match="config is 3; it must be an object"):
        parse(json.dumps({**json.loads(line(entry)), "config": 3}))


@pytest.mark.parametrize("what", ["a folder of others", "a pipe"])
def test_a_tuning_file_is_read_as_entries_of_the_cache_are(what, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "settings", read({"TRANSFORMER_RTC_CACHE_DIR": str(tmp_path)}))
    path = tuning.files_for(DEVICE)[0]
    if what == "a pipe":
        os.mkfifo(path)  # which would be waited for
    else:
        tuning.write(path, Tuning(DEVICE, 90, [ROW]))
        os.chmod(tmp_path, 0o777)
    tuning.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert tuning.tuning_of(DEVICE) is tuning.EMPTY
    tuning.forget()
    if what != "a pipe":
        with pytest.raises(PermissionError):
            tuning.write(path, Tuning(DEVICE, 90, [ROW]))
