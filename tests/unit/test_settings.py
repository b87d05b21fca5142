# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import warnings

import pytest
from processes import CALLS, output, run

from transformer_rtc import settings as module
from transformer_rtc.errors import SettingsError
from transformer_rtc.settings import Settings, read


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("FORCE_STATIC", "yes", "0, 1"),
        ("ON_COMPILE", "never", "allow, warn, error"),
        ("LOG", "3", "0, 1, 2"),
        ("COMPANION", "0", "on, off"),
        *(("CACHE_SIZE", size, "bytes, such as 1G") for size in ("1.5G", "-1", "much", "1GB", "٣")),
    ],
)
def test_a_malformed_variable_is_an_error_that_names_it_and_what_it_takes(name, value, accepted):
    with pytest.raises(SettingsError, match=f"TRANSFORMER_RTC_{name} is '{value}'; it takes {accepted}"):
        read({f"TRANSFORMER_RTC_{name}": value}).check()


def test_all_that_is_wrong_is_told_at_once_and_has_its_default():
    found = read({"TRANSFORMER_RTC_LOG": "3", "TRANSFORMER_RTC_CACHE_SIZE": "big", "TRANSFORMER_RTC_SIMULATE": "1"})
    assert (found.log, found.cache_bytes, found.simulate) == (0, 2**30, "1")
    with pytest.raises(SettingsError, match=r"CACHE_SIZE is 'big'; .*; TRANSFORMER_RTC_LOG is '3'"):
        found.check()


def test_a_relative_folder_is_a_problem_where_there_is_no_current_folder(monkeypatch):
    def missing():
        raise FileNotFoundError

    monkeypatch.setattr(os, "getcwd", missing)
    found = read({"TRANSFORMER_RTC_CACHE_DIR": "here"})
    assert found.cache_dir is None and found.problems == (
        "TRANSFORMER_RTC_CACHE_DIR is 'here', and there is no current folder any more",
    )


def test_a_misspelt_variable_is_warned_of_once_with_the_nearest_of_ours(monkeypatch):
    monkeypatch.setattr(module, "_warned", False)
    given = read({"TRANSFORMER_RTC_CACHEDIR": "/x", "TRANSFORMER_RTC_QQ": "1", "TRANSFORMER_RTC_LOG": "1"})
    with pytest.warns(RuntimeWarning) as caught:
        given.check()
    assert [str(one.message) for one in caught] == [
        "transformer_rtc: TRANSFORMER_RTC_CACHEDIR is no variable of transformer_rtc; "
        "did you mean TRANSFORMER_RTC_CACHE_DIR?",
        "transformer_rtc: TRANSFORMER_RTC_QQ is no variable of transformer_rtc",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given.check()


def test_a_bad_variable_kills_no_import_and_each_use_is_refused(tmp_path):
    calls = (
        "lambda: t.rms_norm(host)", "lambda: t.using('simulator').__enter__()", "lambda: t.implementations(t.rms_norm)",
        "lambda: t.warmup('rms_norm', 'float32', 64, architectures='sm_90')",
        "lambda: t.manager.image(t.TextSpec('extern \"C\" __global__ void mine() {}', 'mine'), 90)",
    )  # fmt: skip
    script = f"{CALLS}\nfor call in ({', '.join(calls)}): print(told_by(call))"
    told = output(script, LOG="loud", CACHE_DIR=str(tmp_path)).splitlines()
    assert told == ["SettingsError TRANSFORMER_RTC_LOG is 'loud'; it takes 0, 1, 2"] * len(calls)


def test_info_tells_of_bad_and_misspelt_variables_and_goes_on(tmp_path):
    script = "from transformer_rtc.cli import main; print(main(['info']))"
    done = run(script, ON_COMPILE="never", ONCOMPILE="1", CACHE_DIR=str(tmp_path))
    told = [line.split(maxsplit=1)[1] for line in done.stdout.splitlines()[:-1]]
    assert "a setting that is accepted: TRANSFORMER_RTC_ON_COMPILE is 'never'; it takes allow, warn, error" in told
    assert (
        "TRANSFORMER_RTC_ONCOMPILE is no variable of transformer_rtc; did you mean TRANSFORMER_RTC_ON_COMPILE?" in told
    )
    assert done.stdout.splitlines()[-1] == "1" and "disk cache" in done.stdout and done.stderr == ""


def test_variables_are_read():
    defaults = Settings(False, "/cache/transformer_rtc", "", "allow", 0, None, 2**30, None)
    assert read({"HOME": "/nowhere", "XDG_CACHE_HOME": "/cache"}) == defaults
    given = {
        "FORCE_STATIC": "1", "CACHE_DIR": "/here", "ON_COMPILE": "warn", "LOG": "2", "READ_ONLY_CACHE_DIR": "/image",
        "CACHE_SIZE": "3m", "RECORD": "/manifest",
    }  # fmt: skip
    expected = Settings(True, "/here", "", "warn", 2, "/image", 3 * 2**20, "/manifest")
    assert read({f"TRANSFORMER_RTC_{name}": value for name, value in given.items()}) == expected
    assert read({"TRANSFORMER_RTC_CACHE_DIR": "", "TRANSFORMER_RTC_LOG": ""}).cache_dir is None
    assert [read({"TRANSFORMER_RTC_COMPANION": value}).companion for value in ("", "on", "off")] == [True, True, False]
    for value, simulate in {"": "", "0": "", "1": "1", "checked": "checked"}.items():
        assert read({"TRANSFORMER_RTC_SIMULATE": value}).simulate == simulate
    with pytest.raises(SettingsError, match="SIMULATE=1 contradicts TRANSFORMER_RTC_FORCE_STATIC=1"):
        read({"TRANSFORMER_RTC_SIMULATE": "1", "TRANSFORMER_RTC_FORCE_STATIC": "1"}).check()


def test_folders_are_absolute_and_never_below_the_current_folder_for_want_of_a_home(monkeypatch):
    assert read({"TRANSFORMER_RTC_CACHE_DIR": "here"}).cache_dir == os.path.join(os.getcwd(), "here")
    home = os.path.expanduser("~")
    assert read({"TRANSFORMER_RTC_CACHE_DIR": "~/cache"}).cache_dir == os.path.join(home, "cache")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it gives a user whom no database knows
    assert read({"XDG_CACHE_HOME": "relative"}).cache_dir == f"/tmp/transformer_rtc-{os.geteuid()}"
    assert read({"TMPDIR": "/scratch"}).cache_dir == f"/scratch/transformer_rtc-{os.geteuid()}"
