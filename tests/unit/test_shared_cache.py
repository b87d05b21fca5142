# SPDX-License-Identifier: Apache-2.0
"""A cache folder that many processes, users and machines share."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import runpy
import stat
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from stubs import KEYS, WAIT, in_processes, until_killed

from transformer_rtc import cache_locks
from transformer_rtc.cache import DiskCache, digest
from transformer_rtc.cache_entry import parse_entry

KEY, OTHER, *_ = KEYS
PAYLOAD = bytes(range(16))
# Its storms in small; by hand they are large.
STRESS = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "cache_stress.py"))
MANY = pytest.mark.thorough


@pytest.fixture
def cache(tmp_path) -> DiskCache:
    return DiskCache(str(tmp_path / "cache"))


# ---- One compile in all ---------------------------------------------------------------------------------------------


def test_many_processes_compile_each_key_once(tmp_path):
    cache, path = str(tmp_path / "cache"), tmp_path / "log"
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    assert in_processes(6, lambda _: STRESS["use"](cache, 8, 0.02, log)) == [0] * 6
    os.close(log)
    assert Counter(line.split()[1] for line in path.read_text().splitlines()) == {str(n): 1 for n in range(8)}
    assert DiskCache(cache).size()[0] == 8


@pytest.mark.parametrize("rounds", [10, pytest.param(200, marks=MANY)])
def test_who_is_killed_blocks_nobody_and_costs_one_compile(rounds, rng):
    source, found = random.Random(int(rng.integers(2**32))), Counter()
    # On a loaded machine some end before they are killed: not if a compile takes long enough.
    for attempt in range(7):
        found.update(STRESS["killed_winners"](rounds, 3, 8, source, 0.004 * 2**attempt))
        if found["killed"] >= rounds / 2:
            break
    assert found["killed"] >= rounds / 2 and found["extra_compiles"] <= found["killed"]


@pytest.mark.parametrize("rounds", [300, pytest.param(10_000, marks=MANY)])
def test_no_damage_whatever_makes_a_wrong_entry(rounds, rng):
    found = STRESS["damage"](rounds, random.Random(int(rng.integers(2**32))))
    assert found["misses"] == rounds and all(found[kind] for kind in ("bit flipped", "cut short", "swapped", "spliced"))


def refuse(code: int):
    """Return what the system does where it refuses something."""

    def fail(*_):
        raise OSError(code, os.strerror(code))

    return fail


def writer(cache: DiskCache):
    """Have a process write an entry, half of it, until it is killed."""

    def work(pause):
        def half(*arguments, **options):
            file = open(*arguments, **options)  # noqa: SIM115
            file.write(b"half")
            file.flush()
            pause()

        cache_locks.open = half
        cache.put("kernel", KEY, PAYLOAD, {})

    return until_killed(work)


def holder(cache: DiskCache):
    """Have a process hold a key's lock until it is killed."""

    def work(pause):
        with DiskCache(cache.folder).claim("kernel", KEY) as found:
            assert found is None
            pause()

    return until_killed(work)


def half_written(cache: DiskCache) -> list[str]:
    return sorted(name for name in os.listdir(cache.folder) if name.endswith(".tmp"))


def test_what_a_killed_writer_leaves_is_abandoned_and_what_a_writer_has_is_not(cache):
    cache.put("kernel", OTHER, PAYLOAD, {})
    assert cache.abandoned() == []
    with writer(cache) as kill, writer(cache):
        for name in half_written(cache):  # a locked file has a writer however old it is
            os.utime(os.path.join(cache.folder, name), (1, 1))
        assert len(half_written(cache)) == 2 and cache.abandoned() == []
        pid = kill()
        (name,) = cache.abandoned()
        assert f".{pid}." in name and cache.remove(name)
        assert len(half_written(cache)) == 1 and cache.abandoned() == []


def test_who_looks_at_a_file_does_not_take_its_lock(cache, monkeypatch):
    """A writer that finds its file locked waits until whoever looks has looked."""
    flock, seen = fcntl.flock, []

    def busy_twice(descriptor, operation):
        seen.append(operation)
        if len(seen) <= 2:
            raise BlockingIOError(errno.EWOULDBLOCK, "busy")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", busy_twice)
    cache.put("kernel", KEY, PAYLOAD, {})
    assert len(seen) == 3 and cache.writable and cache.get("kernel", KEY) == PAYLOAD
    assert not cache_locks.held


@pytest.mark.filterwarnings("error")
def test_what_another_host_takes_for_abandoned_is_written_again(cache, monkeypatch):
    replace, deleted = os.replace, []

    def deleted_once(source, target):
        if not deleted:
            deleted.append(source)
            os.unlink(source)
        replace(source, target)

    monkeypatch.setattr(os, "replace", deleted_once)
    cache.put("kernel", KEY, PAYLOAD, {})
    assert deleted and cache.writable and cache.get("kernel", KEY) == PAYLOAD
    assert half_written(cache) == [] and not cache_locks.held


def test_a_child_does_not_keep_the_lock_of_its_parents_file(cache, monkeypatch):
    replace, seen = os.replace, []

    def forked(source, target):
        seen.append((len(cache_locks.held), in_processes(1, lambda _: os._exit(len(cache_locks.held)))))
        replace(source, target)

    monkeypatch.setattr(os, "replace", forked)
    cache.put("kernel", KEY, PAYLOAD, {})
    assert seen == [(1, [0])] and cache.get("kernel", KEY) == PAYLOAD and not cache_locks.held


def test_without_locks_only_its_age_says_that_a_file_is_abandoned(cache, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", refuse(errno.ENOLCK))
    cache.put("kernel", KEY, PAYLOAD, {})
    path = cache.path("kernel", OTHER) + ".1.0123abcd.tmp"
    Path(path).touch()
    assert cache.abandoned() == []
    os.utime(path, (1, 1))
    assert cache.abandoned() == [os.path.basename(path)]


def test_a_lock_is_waited_for_no_longer_than_allowed(cache):
    with holder(cache):
        start = time.monotonic()
        with DiskCache(cache.folder, lock_seconds=0.3).claim("kernel", KEY) as found:
            assert found is None and 0.3 <= time.monotonic() - start < WAIT


def test_nobody_waits_for_who_cannot_write(cache, monkeypatch):
    def lock_bytes() -> int:
        return os.stat(os.path.join(cache.folder, "locks", KEY[:3])).st_size

    with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match="[Qq]uota exceeded"):
        patch.setattr(os, "replace", refuse(errno.EDQUOT))
        with cache.claim("kernel", KEY):
            cache.put("kernel", KEY, PAYLOAD, {})
    assert lock_bytes() == 1
    with holder(cache):
        start = time.monotonic()
        with DiskCache(cache.folder, lock_seconds=WAIT).claim("kernel", KEY) as found:
            assert found is None and time.monotonic() - start < WAIT / 2
    # Who can write takes it back.
    assert lock_bytes() == 0


def test_who_waits_takes_what_appears_without_waiting_for_the_lock(cache):
    with holder(cache):
        timer = threading.Timer(0.2, cache.put, ("kernel", KEY, PAYLOAD, {}))
        timer.start()
        start = time.monotonic()
        with DiskCache(cache.folder, lock_seconds=WAIT).claim("kernel", KEY) as found:
            assert found == PAYLOAD and time.monotonic() - start < WAIT / 2
        timer.join()


def test_a_forked_child_does_not_keep_its_parents_lock(cache):
    with cache.claim("kernel", KEY) as found, until_killed(lambda pause: pause()):
        assert found is None
        (lock,) = os.listdir(os.path.join(cache.folder, "locks"))
        descriptor = next(iter(cache_locks.held))
        # As the kernel does when the parent is killed: no unlock, only the parent's descriptor is closed.
        cache_locks.held.discard(descriptor)
        os.close(descriptor)
        with open(os.path.join(cache.folder, "locks", lock)) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_lock_files_stay_and_are_few(cache):
    for number in range(3):
        for stem, key in (("kernel", KEY), (f"kernel{number}", KEY[:3] + OTHER)):
            with cache.claim(stem, key) as found:
                assert found is None
    assert os.listdir(os.path.join(cache.folder, "locks")) == [KEY[:3]]
    cache.put("kernel", KEY, PAYLOAD, {})
    cache.clear()
    cache.prune()
    assert os.listdir(cache.folder) == ["locks"]


def test_a_hit_takes_no_lock_and_lists_nothing(cache, monkeypatch):
    cache.put("kernel", KEY, PAYLOAD, {})
    for module, name in ((fcntl, "flock"), (os, "listdir"), (os, "scandir"), (os, "utime")):
        monkeypatch.setattr(module, name, pytest.fail)
    assert cache.get("kernel", KEY) == PAYLOAD and cache.get("kernel", OTHER) is None


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF])
def test_a_file_system_without_locks_is_gone_on_without(cache, monkeypatch, code):
    monkeypatch.setattr(fcntl, "flock", refuse(code))
    with cache.claim("kernel", KEY) as found:
        assert found is None
    cache.put("kernel", KEY, PAYLOAD, {})
    assert cache.get("kernel", KEY) == PAYLOAD


def test_a_claim_ends_however_its_block_does(cache):
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), DiskCache(cache.folder, lock_seconds=0).claim("kernel", KEY):
            assert cache_locks.held
            raise KeyboardInterrupt
        assert not cache_locks.held


# ---- Who may write there --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
def test_a_folder_that_others_may_write_to_is_refused_with_one_warning(cache, mode):
    cache.put("kernel", KEY, PAYLOAD, {})
    os.chmod(cache.folder, mode)
    other = DiskCache(cache.folder)
    with pytest.warns(RuntimeWarning, match=rf"does not use .*others may write to it \(mode {mode:04o}") as caught:
        for _ in range(2):
            assert other.get("kernel", KEY) is None
            with other.claim("kernel", OTHER) as found:
                assert found is None
            other.put("kernel", OTHER, PAYLOAD, {})
    assert len(caught) == 1 and os.listdir(cache.folder) == [os.path.basename(cache.path("kernel", KEY))]
    os.chmod(cache.folder, 0o755)
    assert DiskCache(cache.folder).get("kernel", KEY) == PAYLOAD


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("umask", [0, 0o077])
def test_in_a_sticky_folder_one_of_the_users_own_is_used(tmp_path, umask):
    os.chmod(tmp_path, 0o1777)
    before = os.umask(umask)
    try:
        first = DiskCache(str(tmp_path))
        with first.claim("kernel", KEY):
            first.put("kernel", KEY, PAYLOAD, {})
    finally:
        os.umask(before)
    assert os.listdir(tmp_path) == [f"transformer_rtc-{os.geteuid()}"]
    assert stat.S_IMODE(os.stat(first.folder).st_mode) == 0o700 and len(first.names()) == 1
    assert DiskCache(str(tmp_path)).get("kernel", KEY) == first.get("kernel", KEY) == PAYLOAD


def replaced(folder: str) -> None:
    os.rename(folder, f"{folder}.moved")
    os.symlink(f"{folder}.moved", folder)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda folder: os.chmod(folder, 0o750), "it is not this user's alone .mode 0750; chmod 700 mends it.*pod"),
        (replaced, "it is no folder"),
    ],
    ids=["mode", "link"],
)
def test_the_users_own_folder_in_a_sticky_one_is_looked_at_at_each_opening(spoil, told, tmp_path):
    os.chmod(tmp_path, 0o1777)
    cache = DiskCache(str(tmp_path))
    cache.put("kernel", KEY, PAYLOAD, {})
    assert cache.get("kernel", KEY) == PAYLOAD
    spoil(cache.folder)
    with pytest.warns(RuntimeWarning, match=told) as caught:
        assert cache.get("kernel", KEY) is None is cache.get("kernel", KEY)
    assert len(caught) == 1 and cache.refusal()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
@pytest.mark.parametrize("above", [True, False])
def test_another_users_sticky_folder_or_folder_in_one_is_refused(above, tmp_path):
    os.chmod(tmp_path, 0o1777)
    cache = DiskCache(str(tmp_path))
    cache.put("kernel", KEY, PAYLOAD, {})
    os.chown(tmp_path if above else cache.folder, 12345, -1)
    with pytest.warns(RuntimeWarning, match="it belongs to user 12345, and this is user 0"):
        assert DiskCache(str(tmp_path)).get("kernel", KEY) is None


def test_a_folder_of_another_user_is_refused_and_one_of_root_is_not(cache, monkeypatch):
    cache.put("kernel", KEY, PAYLOAD, {})
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    other = DiskCache(cache.folder)
    if me == 0:
        assert other.get("kernel", KEY) == PAYLOAD
        os.chown(cache.folder, me + 2, -1)
        other = DiskCache(cache.folder)
    with pytest.warns(RuntimeWarning, match=r"it belongs to user \d+, and this is user"):
        assert other.get("kernel", KEY) is None


def test_a_pipe_or_an_entry_that_others_may_write_to_is_a_miss_that_the_next_write_replaces(cache):
    cache.put("kernel", KEY, PAYLOAD, {})
    path = cache.path("kernel", KEY)
    for spoil in (lambda: os.chmod(path, 0o666), lambda: (os.unlink(path), os.mkfifo(path, 0o600))):
        spoil()
        assert cache.get("kernel", KEY) is None
        cache.put("kernel", KEY, PAYLOAD, {})
        assert cache.get("kernel", KEY) == PAYLOAD


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_nobody_else_may_write_whatever_the_umask(tmp_path, umask):
    folder = tmp_path / "not" / "there yet"
    before = os.umask(umask)
    try:
        cache = DiskCache(str(folder))
        with cache.claim("kernel", KEY):
            cache.put("kernel", KEY, PAYLOAD, {})
        assert DiskCache(str(folder)).get("kernel", KEY) == PAYLOAD
    finally:
        os.umask(before)
    made = [folder.parent, folder, *folder.rglob("*")]
    assert len(made) == 5
    for path in made:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o755 if path.is_dir() else 0o644) & ~umask, path


def test_a_read_only_folder_is_read_and_costs_one_warning():
    def work(_):
        if os.geteuid() == 0:  # to whom no folder is read-only: nobody
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        other = DiskCache(cache.folder)
        assert other.get("kernel", KEY) == PAYLOAD
        with pytest.warns(RuntimeWarning, match="cannot write its kernel cache") as caught:
            for _ in range(2):
                with other.claim("kernel", OTHER) as found:
                    assert found is None
                    other.put("kernel", OTHER, b"x", {})
        assert len(caught) == 1 and other.get("kernel", OTHER) is None and not other.writable

    with tempfile.TemporaryDirectory() as folder:  # to which every user has a way, unlike to pytest's
        os.chmod(folder, 0o755)
        cache = DiskCache(os.path.join(folder, "cache"))
        cache.put("kernel", KEY, PAYLOAD, {})
        os.chmod(cache.folder, 0o555)
        assert in_processes(1, work) == [0]
        os.chmod(cache.folder, 0o755)


# ---- A second folder ------------------------------------------------------------------------------------------------


def test_a_second_folder_is_read_after_the_first_and_never_written(cache, tmp_path):
    image = DiskCache(str(tmp_path / "image"))
    image.put("kernel", KEY, PAYLOAD, {})
    os.utime(image.path("kernel", KEY), (0, 0))
    before = [(entry.name, entry.stat().st_mtime) for entry in os.scandir(image.folder)]
    both = DiskCache(cache.folder, image.folder)
    assert both.get("kernel", KEY) == PAYLOAD and both.get("kernel", OTHER) is None
    with both.claim("kernel", OTHER) as found:
        assert found is None
        both.put("kernel", OTHER, b"own", {})
    both.put("kernel", KEY, b"nearer", {})
    assert both.get("kernel", KEY) == b"nearer" and both.get("kernel", OTHER) == b"own"
    both.clear()
    assert both.get("kernel", KEY) == PAYLOAD
    assert [(entry.name, entry.stat().st_mtime) for entry in os.scandir(image.folder)] == before


def test_a_second_folder_that_is_not_there_costs_one_warning(cache, tmp_path):
    cache.put("kernel", KEY, PAYLOAD, {})
    both = DiskCache(cache.folder, str(tmp_path / "absent"))
    with pytest.warns(RuntimeWarning, match=r"no read-only kernel cache: .*absent.*READ_ONLY_CACHE_DIR") as caught:
        assert both.get("kernel", OTHER) is None and both.get_any("kernel", "source") is None
    assert len(caught) == 1 and both.get("kernel", KEY) == PAYLOAD


@pytest.mark.filterwarnings("error")
def test_a_second_folder_serves_where_there_is_no_first(cache):
    cache.put("kernel", KEY, PAYLOAD, {})
    alone = DiskCache(None, cache.folder)
    assert alone.get("kernel", KEY) == PAYLOAD
    alone.put("kernel", OTHER, PAYLOAD, {})
    assert alone.get("kernel", OTHER) is None


def test_an_entry_of_any_compiler_is_of_the_same_source_and_the_oldest_ones(cache):
    for number, compiler in enumerate(("nvrtc 13.0", "nvrtc 12.9", "nvrtc 12.10")):
        cache.put("kernel", digest({"n": number}), compiler.encode(), {"source": "source", "compiler": compiler})
    assert cache.get_any("kernel", "source") == b"nvrtc 12.9"
    assert cache.get_any("kernel", "another") is None and cache.get_any("kern", "source") is None


# ---- Size -----------------------------------------------------------------------------------------------------------


def fill(cache: DiskCache, count: int, size: int) -> list[str]:
    """Put entries, of which the first was used least recently; return their keys."""
    keys, now = [digest({"filled": number}) for number in range(count)], time.time()
    for number, key in enumerate(keys):
        cache.put("kernel", key, bytes(size), {})
        os.utime(cache.path("kernel", key), (now - 1000 + number,) * 2)
    return keys


def test_what_was_not_used_for_longest_is_deleted_first(cache):
    keys = fill(cache, 20, 10_000)
    small = DiskCache(cache.folder, max_bytes=100_000)
    small.put("kernel", OTHER, PAYLOAD, {})
    left = [small.get("kernel", key) is not None for key in keys]
    assert left == sorted(left) and 4 < sum(left) <= 8
    assert small.size()[1] <= 100_000 and small.get("kernel", OTHER) == PAYLOAD


def test_the_size_stays_near_its_limit(cache):
    small = DiskCache(cache.folder, max_bytes=200_000)
    for number in range(200):
        small.put("kernel", digest({"n": number}), bytes(3000), {})
        assert small.size()[1] <= 200_000 * 65 // 64 + 4000
    assert small.size()[1] > 150_000


def test_an_entry_larger_than_the_limit_stays_until_the_next_one(cache):
    small = DiskCache(cache.folder, max_bytes=100)
    for key in KEYS:
        small.put("kernel", key, bytes(1000), {})
        assert [other for other in KEYS if small.get("kernel", other) == bytes(1000)] == [key]
        os.utime(small.path("kernel", key), (0, 0))


def test_a_reader_of_what_is_deleted_reads_on(cache):
    cache.put("kernel", KEY, PAYLOAD, {})
    with open(cache.path("kernel", KEY), "rb") as reader:
        first = reader.read(10)
        assert len(cache.prune(unused_seconds=-1)) == 1
        found = parse_entry(first + reader.read())
    assert found and found[1] == PAYLOAD and cache.get("kernel", KEY) is None


def test_a_hit_is_noted_at_most_once_a_minute_and_keeps_an_entry_from_being_pruned(cache):
    cache.put("kernel", KEY, PAYLOAD, {"source": "source"})
    path, now = cache.path("kernel", KEY), time.time()
    for age, noted in ((50, False), (70, True), (25 * 3600, True)):
        os.utime(path, (now - age,) * 2)
        assert cache.get("kernel", KEY) == PAYLOAD
        assert (os.stat(path).st_mtime >= now - 1) == noted
    assert cache.prune(unused_seconds=3600) == []
    os.utime(path, (now - 7200,) * 2)
    assert cache.get_any("kernel", "source") == PAYLOAD and cache.prune(unused_seconds=3600) == []
    os.utime(path, (now - 7200,) * 2)
    assert cache.prune(unused_seconds=3600) == [os.path.basename(path)]


def test_what_killed_writers_left_is_deleted_once_it_is_old(cache):
    cache.put("kernel", KEY, PAYLOAD, {})
    left = [Path(f"{cache.path('kernel', KEY)}.{number}.0123abcd.tmp") for number in (1, 2)]
    foreign = [Path(cache.folder, name) for name in ("notes.tmp", "README", "x.0123456789abcdef")]
    for path in left + foreign:
        path.write_bytes(b"half")
    for path in [left[0], *foreign]:
        os.utime(path, (0, 0))
    DiskCache(cache.folder, max_bytes=10**9).put("kernel", OTHER, PAYLOAD, {})
    assert [path.exists() for path in left + foreign] == [False, True, True, True, True]
    assert len(cache.clear()) == 3 and sorted(Path(cache.folder).iterdir()) == sorted(foreign)


def test_only_entries_are_ever_deleted(cache):
    cache.put("kernel", KEY, PAYLOAD, {})
    outside = os.path.join(os.path.dirname(cache.folder), "x." + KEY[:24])
    for path in (outside, os.path.join(cache.folder, "notes")):
        Path(path).write_bytes(b"precious")
    for name in ("notes", "", ".", "locks", f"../x.{KEY[:24]}", outside):
        assert not cache.remove(name)
    assert os.path.exists(outside) and cache.remove(os.path.basename(cache.path("kernel", KEY)))
    assert os.listdir(cache.folder) == ["notes"] and not cache.remove(os.path.basename(cache.path("kernel", KEY)))


def test_an_entry_under_anothers_name_is_told_as_damaged(cache):
    for key in (KEY, OTHER):
        cache.put("kernel", key, PAYLOAD, {"symbol": "kernel"})
    os.replace(cache.path("kernel", OTHER), cache.path("other", OTHER))
    names = [os.path.basename(cache.path(stem, key)) for stem, key in (("kernel", KEY), ("other", OTHER))]
    assert [(entry.name, entry.about is None) for entry in cache.entries()] == [(names[0], False), (names[1], True)]
    assert cache.entries()[0].about["symbol"] == "kernel" and cache.names() == names
    assert cache.read(names[0]) is not None and cache.read(names[1]) is None


def test_pruning_by_size_and_by_age(cache):
    keys = fill(cache, 10, 1000)
    size = cache.size()[1]
    assert cache.prune(max_bytes=size) == []
    assert len(cache.prune(max_bytes=size // 2)) == 5
    assert cache.prune(unused_seconds=1100) == []
    assert cache.prune(unused_seconds=993.5) == [os.path.basename(cache.path("kernel", key)) for key in keys[5:7]]
    assert len(cache.prune(unused_seconds=950)) == 3 and cache.size() == (0, 0)
    fill(cache, 2, 1000)
    assert len(cache.prune(max_bytes=1)) == 2 and cache.size() == (0, 0)
