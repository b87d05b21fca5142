from __future__ import annotations

import os

import pytest

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
        read({f"TRANSFORMER_RTC_{name}": value})


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
        read({"TRANSFORMER_RTC_SIMULATE": "1", "TRANSFORMER_RTC_FORCE_STATIC": "1"})


def test_folders_are_absolute_and_never_below_the_current_folder_for_want_of_a_home(monkeypatch):
    assert read({"TRANSFORMER_RTC_CACHE_DIR": "here"}).cache_dir == os.path.join(os.getcwd(), "here")
    home = os.path.expanduser("~")
    assert read({"TRANSFORMER_RTC_CACHE_DIR": "~/cache"}).cache_dir == os.path.join(home, "cache")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it gives a user whom no database knows
    assert read({"XDG_CACHE_HOME": "relative"}).cache_dir == f"/tmp/transformer_rtc-{os.geteuid()}"
    assert read({"TMPDIR": "/scratch"}).cache_dir == f"/scratch/transformer_rtc-{os.geteuid()}"
