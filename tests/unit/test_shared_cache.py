"""A cache folder that many processes, users and machines share."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter

import pytest

from transformer_rtc import cache as cache_module
from transformer_rtc.cache import DiskCache, digest, encode_entry, parse_entry

KEY, OTHER = digest({"a": 1}), digest({"a": 2})
PAYLOAD = bytes(range(16))
WAIT = 60  # seconds after which a test that hangs fails
HERE = os.path.dirname(__file__)
# What a process does that needs kernels: each compile is a line in a file.
WORKER = """
import os, sys, time
from transformer_rtc.cache import DiskCache, digest
folder, log, keys, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
cache = DiskCache(folder, lock_seconds=60)
for number in range(keys):
    stem, key = f"kernel{number}", digest({"number": number})
    wanted = f"code of {number} ".encode() * 2000
    found = cache.get(stem, key)
    if found is None:
        with cache.claim(stem, key) as found:
            if found is None:
                descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                os.write(descriptor, f"{number}\\n".encode())
                os.close(descriptor)
                time.sleep(seconds)
                found = wanted
                cache.put(stem, key, wanted, {})
    assert found == wanted
"""


@pytest.fixture
def cache(tmp_path) -> DiskCache:
    return DiskCache(str(tmp_path / "cache"))


def start_workers(tmp_path, count: int, keys: int, seconds: float) -> list[subprocess.Popen]:
    arguments = [str(tmp_path / "cache"), str(tmp_path / "log"), str(keys), str(seconds)]
    return [subprocess.Popen([sys.executable, "-c", WORKER, *arguments]) for _ in range(count)]


def compiles(tmp_path) -> Counter[str]:
    return Counter((tmp_path / "log").read_text().split())


# ---- One compile in all ---------------------------------------------------------------------------------------------


def test_many_processes_compile_each_key_once(tmp_path):
    running = start_workers(tmp_path, 6, 8, 0.02)
    assert [process.wait(WAIT) for process in running] == [0] * 6
    assert compiles(tmp_path) == {str(number): 1 for number in range(8)}
    assert DiskCache(str(tmp_path / "cache")).size()[0] == 8


def test_who_is_killed_blocks_nobody_and_costs_one_compile(tmp_path, rng):
    killed = 0
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        doomed, *others = start_workers(folder, 3, 4, 0.01)
        time.sleep(float(rng.uniform(0.05, 0.25)))
        doomed.kill()
        assert [process.wait(WAIT) for process in others] == [0, 0]
        killed += doomed.wait() == -signal.SIGKILL
        found = compiles(folder)
        assert len(found) == 4 and found.total() <= 5, found
    assert killed


def start(script: str, cache: DiskCache, key: str, told: str) -> subprocess.Popen:
    """Return a process that is given the folder and a key, once it has told so much."""
    process = subprocess.Popen([sys.executable, "-c", script, cache.folder, key], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == f"{told}\n"
    return process


def without_locks(monkeypatch, code: int) -> None:
    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", fail)


def start_writer(cache: DiskCache) -> subprocess.Popen:
    """Return a process that writes an entry until it is killed."""
    script = (
        "import sys, time; from transformer_rtc import cache\n"
        "class File:\n"
        "    def __init__(self, *a, **k): self.file = open(*a, **k)\n"
        "    def __enter__(self): return self\n"
        "    def __exit__(self, *_): pass\n"
        "    def write(self, data): self.file.write(data[:8]); self.file.flush(); print(flush=True); time.sleep(600)\n"
        "cache.open = File\n"
        "cache.DiskCache(sys.argv[1]).put('kernel', sys.argv[2], b'code', {})"
    )
    return start(script, cache, KEY, "")


def half_written(cache: DiskCache) -> list[str]:
    return sorted(name for name in os.listdir(cache.folder) if name.endswith(".tmp"))


def test_what_a_killed_writer_leaves_is_abandoned_and_what_a_writer_has_is_not(cache):
    cache.put("kernel", OTHER, PAYLOAD, {})
    assert cache.abandoned() == []
    writers = [start_writer(cache) for _ in range(2)]
    try:
        assert len(half_written(cache)) == 2 and cache.abandoned() == []
        writers[0].kill()
        writers[0].wait()
        (name,) = cache.abandoned()
        assert f".{writers[0].pid}." in name and cache.remove(name)
        assert len(half_written(cache)) == 1 and cache.abandoned() == []
    finally:
        for process in writers:
            process.kill()
            process.communicate()


def test_a_locked_file_has_a_writer_however_old_it_is(cache):
    cache.put("kernel", OTHER, PAYLOAD, {})
    writer = start_writer(cache)
    try:
        (name,) = half_written(cache)
        os.utime(os.path.join(cache.folder, name), (1, 1))
        assert cache.abandoned() == []
    finally:
        writer.kill()
        writer.communicate()
    assert cache.abandoned() == [name]


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
    assert not cache_module._held


def test_what_another_host_takes_for_abandoned_is_written_again(cache, monkeypatch):
    replace, deleted = os.replace, []

    def deleted_once(source, target):
        if not deleted:
            deleted.append(source)
            os.unlink(source)
        replace(source, target)

    monkeypatch.setattr(os, "replace", deleted_once)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.put("kernel", KEY, PAYLOAD, {})
    assert deleted and cache.writable and cache.get("kernel", KEY) == PAYLOAD
    assert half_written(cache) == [] and not cache_module._held


def test_a_child_does_not_keep_the_lock_of_its_parents_file(cache, monkeypatch):
    replace = os.replace

    def forked(source, target):
        child = os.fork()
        if child == 0:
            os._exit(1 if cache_module._held else 0)
        assert len(cache_module._held) == 1
        assert os.waitpid(child, 0)[1] == 0
        replace(source, target)

    monkeypatch.setattr(os, "replace", forked)
    cache.put("kernel", KEY, PAYLOAD, {})
    assert cache.get("kernel", KEY) == PAYLOAD and not cache_module._held


def test_without_locks_only_its_age_says_that_a_file_is_abandoned(cache, monkeypatch):
    without_locks(monkeypatch, errno.ENOLCK)
    cache.put("kernel", KEY, PAYLOAD, {})
    assert cache.get("kernel", KEY) == PAYLOAD
    path = cache.path("kernel", OTHER) + ".1.0123abcd.tmp"
    with open(path, "wb"):
        pass
    assert cache.abandoned() == []
    os.utime(path, (1, 1))
    assert cache.abandoned() == [os.path.basename(path)]


def hold(cache: DiskCache, key: str) -> subprocess.Popen:
    """Return a process that holds a key's lock until it is killed."""
    script = (
        "import sys, time; from transformer_rtc.cache import DiskCache\n"
        "with DiskCache(sys.argv[1]).claim('kernel', sys.argv[2]) as found:\n"
        "    print(found, flush=True); time.sleep(600)"
    )
    return start(script, cache, key, "None")


def test_a_lock_is_waited_for_no_longer_than_allowed(cache):
    holder = hold(cache, KEY)
    try:
        start = time.monotonic()
        with DiskCache(cache.folder, lock_seconds=0.3).claim("kernel", KEY) as found:
            assert found is None and 0.3 <= time.monotonic() - start < WAIT
    finally:
        holder.kill()
        holder.communicate()


def test_nobody_waits_for_who_cannot_write(cache, monkeypatch):
    def fail(*_):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    def lock_bytes() -> int:
        return os.stat(os.path.join(cache.folder, "locks", KEY[:3])).st_size

    with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match="Disk quota exceeded"):
        patch.setattr(os, "replace", fail)
        with cache.claim("kernel", KEY):
            cache.put("kernel", KEY, PAYLOAD, {})
    assert lock_bytes() == 1
    holder = hold(cache, KEY)
    try:
        start = time.monotonic()
        with DiskCache(cache.folder, lock_seconds=WAIT).claim("kernel", KEY) as found:
            assert found is None and time.monotonic() - start < WAIT / 2
    finally:
        holder.kill()
        holder.communicate()
    # Who can write takes it back.
    assert lock_bytes() == 0


def test_who_waits_takes_what_appears_without_waiting_for_the_lock(cache):
    holder = hold(cache, KEY)
    try:
        timer = threading.Timer(0.2, cache.put, ("kernel", KEY, PAYLOAD, {}))
        timer.start()
        with DiskCache(cache.folder, lock_seconds=WAIT).claim("kernel", KEY) as found:
            assert found == PAYLOAD and holder.poll() is None
        timer.join()
    finally:
        holder.kill()
        holder.communicate()


def test_a_forked_child_does_not_keep_its_parents_lock(cache):
    with cache.claim("kernel", KEY) as found:
        assert found is None
        (reading, writing), (told, tell) = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            os.write(tell, b"x")
            os.close(writing)
            os.read(reading, 1)  # until the parent lets go
            os._exit(0)
        os.close(reading)
        assert os.read(told, 1) == b"x"
        (lock,) = os.listdir(os.path.join(cache.folder, "locks"))
        descriptor = next(iter(cache_module._held))
        # As the kernel does when the parent is killed: no unlock, only the parent's descriptor is closed.
        cache_module._held.discard(descriptor)
        os.close(descriptor)
        with open(os.path.join(cache.folder, "locks", lock)) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for descriptor in (writing, told, tell):
        os.close(descriptor)
    os.waitpid(child, 0)


def test_lock_files_stay_and_are_few(cache):
    for number in range(3):
        with cache.claim("kernel", KEY) as found:
            assert found is None
        with cache.claim(f"kernel{number}", KEY[:3] + OTHER) as found:
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
    without_locks(monkeypatch, code)
    with cache.claim("kernel", KEY) as found:
        assert found is None
    cache.put("kernel", KEY, PAYLOAD, {})
    assert cache.get("kernel", KEY) == PAYLOAD


def test_a_claim_ends_however_its_block_does(cache):
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), DiskCache(cache.folder, lock_seconds=0).claim("kernel", KEY):
            assert cache_module._held
            raise KeyboardInterrupt
        assert not cache_module._held


# ---- Who may write there --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o720, 0o702])
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


def test_an_entry_that_others_may_write_to_is_a_miss_that_the_next_write_replaces(cache):
    cache.put("kernel", KEY, PAYLOAD, {})
    os.chmod(cache.path("kernel", KEY), 0o666)
    assert cache.get("kernel", KEY) is None
    cache.put("kernel", KEY, PAYLOAD, {})
    assert cache.get("kernel", KEY) == PAYLOAD


def test_a_pipe_in_an_entrys_place_is_a_miss(cache):
    cache.put("kernel", OTHER, PAYLOAD, {})
    os.mkfifo(cache.path("kernel", KEY), 0o600)
    assert cache.get("kernel", KEY) is None


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


def as_user(script: str, *arguments: str) -> str:
    """Run a script as a user to whom a folder can be read-only: nobody, if this is root."""
    # First come the imports: another user may not reach this Python's files.
    drop = (
        "import os, sys, warnings; from transformer_rtc.cache import DiskCache, digest; digest({})\n"
        "warnings.simplefilter('always')\n"
        "if os.geteuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", drop + script, *arguments], capture_output=True, text=True, timeout=WAIT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_read_only_folder_is_read_and_costs_one_warning(tmp_path):
    if os.geteuid() == 0:
        for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
            os.chmod(folder, 0o755)
    cache = DiskCache(str(tmp_path / "cache"))
    cache.put("kernel", KEY, PAYLOAD, {})
    os.chmod(cache.folder, 0o555)
    script = (
        "_, folder, key, other = sys.argv; cache = DiskCache(folder); print(cache.get('kernel', key))\n"
        "for _ in range(2):\n"
        "    with cache.claim('kernel', other) as found: print(found); cache.put('kernel', other, b'x', {})\n"
        "print(cache.get('kernel', other), cache.writable)"
    )
    told = as_user(script, cache.folder, KEY, OTHER)
    assert told.startswith(f"{PAYLOAD!r}\nNone\nNone\nNone False\n"), told
    assert told.count("RuntimeWarning") == 1 and "cannot write its kernel cache" in told


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


def test_a_second_folder_serves_where_there_is_no_first(cache):
    cache.put("kernel", KEY, PAYLOAD, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone = DiskCache(None, cache.folder)
        assert alone.get("kernel", KEY) == PAYLOAD
        alone.put("kernel", OTHER, PAYLOAD, {})
    assert alone.get("kernel", OTHER) is None


def test_an_entry_of_any_compiler_is_of_the_same_source_and_the_oldest_ones(cache):
    for number, compiler in enumerate(("nvrtc 13.0", "nvrtc 12.9", "nvrtc 12.10")):
        about = {"source": "source", "compiler": compiler}
        cache.put("kernel", digest({"n": number}), compiler.encode(), about)
    assert cache.get_any("kernel", "source") == b"nvrtc 12.9"
    assert cache.get_any("kernel", "another") is None and cache.get_any("kern", "source") is None


# ---- Size -----------------------------------------------------------------------------------------------------------


def filled(folder: str, count: int, size: int, **options) -> tuple[DiskCache, list[str]]:
    """Return a cache with entries, of which the first was used least recently, and their keys."""
    cache, keys = DiskCache(folder, **options), [digest({"n": number}) for number in range(count)]
    now = time.time()
    for number, key in enumerate(keys):
        cache.put("kernel", key, bytes(size), {})
        os.utime(cache.path("kernel", key), (now - 1000 + number,) * 2)
    return cache, keys


def test_what_was_not_used_for_longest_is_deleted_first(cache):
    _, keys = filled(cache.folder, 20, 10_000)
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
    small.put("kernel", KEY, bytes(1000), {})
    assert small.get("kernel", KEY) == bytes(1000)
    os.utime(small.path("kernel", KEY), (0, 0))
    small.put("kernel", OTHER, bytes(1000), {})
    assert small.get("kernel", KEY) is None and small.get("kernel", OTHER) == bytes(1000)


def test_a_reader_of_what_is_deleted_reads_on(cache):
    cache.put("kernel", KEY, PAYLOAD, {})
    with open(cache.path("kernel", KEY), "rb") as reader:
        first = reader.read(10)
        assert len(cache.prune(unused_seconds=-1)) == 1
        found = parse_entry(first + reader.read())
    assert found and found[1] == PAYLOAD and cache.get("kernel", KEY) is None


def test_a_hit_is_noted_at_most_once_a_day(cache):
    cache.put("kernel", KEY, PAYLOAD, {})
    path, now = cache.path("kernel", KEY), time.time()
    for age, noted in ((23 * 3600, False), (25 * 3600, True)):
        os.utime(path, (now - age,) * 2)
        assert cache.get("kernel", KEY) == PAYLOAD
        assert (os.stat(path).st_mtime >= now - 1) == noted


def test_what_killed_writers_left_is_deleted_once_it_is_old(cache):
    cache.put("kernel", KEY, PAYLOAD, {})
    left = [f"{cache.path('kernel', KEY)}.{number}.0123abcd.tmp" for number in (1, 2)]
    foreign = [os.path.join(cache.folder, name) for name in ("notes.tmp", "README", "x.0123456789abcdef")]
    for path in left + foreign:
        with open(path, "wb") as file:
            file.write(b"half")
    for path in [left[0], *foreign]:
        os.utime(path, (0, 0))
    DiskCache(cache.folder, max_bytes=10**9).put("kernel", OTHER, PAYLOAD, {})
    assert [os.path.exists(path) for path in left + foreign] == [False, True, True, True, True]
    assert len(cache.clear()) == 3
    assert sorted(os.listdir(cache.folder)) == sorted(os.path.basename(path) for path in foreign)


def test_only_entries_are_ever_deleted(cache):
    cache.put("kernel", KEY, PAYLOAD, {})
    outside = os.path.join(os.path.dirname(cache.folder), "x." + KEY[:24])
    for path in (outside, os.path.join(cache.folder, "notes")):
        with open(path, "wb") as file:
            file.write(b"precious")
    for name in ("notes", "", ".", "locks", f"../x.{KEY[:24]}", outside):
        assert not cache.remove(name)
    assert os.path.exists(outside) and cache.remove(os.path.basename(cache.path("kernel", KEY)))
    assert os.listdir(cache.folder) == ["notes"] and not cache.remove(os.path.basename(cache.path("kernel", KEY)))


def test_an_entry_under_anothers_name_is_told_as_damaged(cache):
    cache.put("kernel", KEY, PAYLOAD, {"symbol": "kernel"})
    cache.put("kernel", OTHER, PAYLOAD, {"symbol": "kernel"})
    os.replace(cache.path("kernel", OTHER), cache.path("other", OTHER))
    names = [os.path.basename(cache.path(stem, key)) for stem, key in (("kernel", KEY), ("other", OTHER))]
    assert [(entry.name, entry.about and entry.about["symbol"]) for entry in cache.entries()] == [
        (names[0], "kernel"),
        (names[1], None),
    ]
    assert cache.read(names[0]) is not None and cache.read(names[1]) is None and cache.names() == names


def test_pruning_by_size_and_by_age(cache):
    _, keys = filled(cache.folder, 10, 1000)
    size = cache.size()[1]
    assert cache.prune(max_bytes=size) == []
    assert len(cache.prune(max_bytes=size // 2)) == 5
    assert cache.prune(unused_seconds=1100) == []
    assert cache.prune(unused_seconds=993.5) == [os.path.basename(cache.path("kernel", key)) for key in keys[5:7]]
    assert len(cache.prune(unused_seconds=950)) == 3 and cache.size() == (0, 0)
    filled(cache.folder, 2, 1000)
    assert len(cache.prune(max_bytes=1)) == 2 and cache.size() == (0, 0)


# ---- Damage ---------------------------------------------------------------------------------------------------------


def test_no_damage_whatever_makes_a_wrong_entry(cache, request):
    """Bits, cuts and swaps at random; benchmarks/cache_stress.py does ten thousand."""
    seed = request.config.getoption("--seed") or random.SystemRandom().randrange(2**32)
    print(f"random data of --seed {seed}")
    damage(cache, random.Random(seed), 300)


def damage(cache: DiskCache, source: random.Random, rounds: int) -> Counter[str]:
    """Damage entries in `rounds` ways; each must be a miss, or the untouched bytes."""
    keys = [digest({"n": number}) for number in range(8)]
    for key in keys:
        cache.put("kernel", key, source.randbytes(5000), {"symbol": "kernel"})
    files = {}
    for key in keys:
        with open(cache.path("kernel", key), "rb") as file:
            files[key] = file.read()
    done: Counter[str] = Counter()
    for _ in range(rounds):
        key, other = source.sample(keys, 2)
        kind = source.choice(("flip", "cut", "swap", "splice", "append"))
        data = bytearray(files[key])
        if kind == "flip":
            bit = source.randrange(8 * len(data))
            data[bit // 8] ^= 1 << bit % 8
        elif kind == "cut":
            del data[source.randrange(len(data)) :]
        elif kind == "swap":
            data = bytearray(files[other])
        elif kind == "splice":
            at = source.randrange(1, len(data) - 5100)
            data[at:] = files[other][at:]
            if data in (files[key], files[other]):
                continue
        else:
            data += source.randbytes(1 + source.randrange(100))
        with open(cache.path("kernel", key), "wb") as file:
            file.write(data)
        assert cache.get("kernel", key) is None, kind
        with open(cache.path("kernel", key), "wb") as file:
            file.write(files[key])
        done[kind] += 1
    for key in keys:
        found = parse_entry(files[key])
        assert found and cache.get("kernel", key) == found[1]
    return done


def sha(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def test_an_entry_whose_header_lies_is_none():
    about = {"stem": "kernel", "key": KEY, "bytes": len(PAYLOAD)}
    assert parse_entry(encode_entry(about, PAYLOAD)) == (about, PAYLOAD)
    nested = b"[" * 100_000
    assert parse_entry(encode_entry({}, b"").partition(b"\n")[0] + b"\n" + sha(nested) + b"\n" + nested) is None
    for lie in ({"bytes": 15}, {"bytes": "16"}, {"key": 1}, {"stem": None}):
        assert parse_entry(encode_entry(about | lie, PAYLOAD)) is None
