# SPDX-License-Identifier: Apache-2.0
"""Stress the shared cache: one compile for many processes, killed ones, damaged entries, and the cost of a hit.

Needs no GPU. Prints what it measured, and exits with 1 if anything was not as it must be.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from transformer_rtc import cli
from transformer_rtc.cache import DiskCache, digest
from transformer_rtc.cache_entry import parse_entry

WORKER = """
import sys
from transformer_rtc.cache import DiskCache
from transformer_rtc.kernel_manager import KernelManager
from transformer_rtc.declaration import declaration_of
from transformer_rtc.request import Request
from transformer_rtc.spec import ARCHITECTURES, BFLOAT16
folder, keys = sys.argv[1], int(sys.argv[2])
manager = KernelManager(DiskCache(folder))
arrays = declaration_of("rms_norm").arrays
dtypes = {array.name: BFLOAT16 if array.name in ("x", "weight", "out") else None for array in arrays}
for number in range(keys):
    request = Request("rms_norm", dtypes, 256 * (number + 1), False, False)
    ((spec, _),) = declaration_of("rms_norm").family.specialise(request, ARCHITECTURES[90])
    manager.image(spec, 90)
print(manager.counts["compile"])
"""


def key_of(number: int) -> str:
    return digest({"number": number})


def wanted_of(number: int) -> bytes:
    return f"code of {number} ".encode() * 20_000


def processes(count: int, keys: int) -> dict[str, object]:
    """Have processes that start together compile the same kernels by NVRTC, into one empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        cache = os.path.join(folder, "cache")
        start = time.perf_counter()
        running = [
            subprocess.Popen([sys.executable, "-c", WORKER, cache, str(keys)], stdout=subprocess.PIPE, text=True)
            for _ in range(count)
        ]
        compiles = [int(process.communicate()[0]) for process in running]
        seconds = time.perf_counter() - start
        assert all(process.returncode == 0 for process in running)
        entries = DiskCache(cache).size()[0]
    assert sum(compiles) == entries == keys, (compiles, entries)
    return {"processes": count, "keys": keys, "compiles": sum(compiles), "seconds": seconds}


def use(folder: str, keys: int, seconds: float, log: int) -> None:
    """Use every key as a process does that needs kernels; each compile is a line: who, and of which."""
    cache = DiskCache(folder, lock_seconds=60)
    for number in range(keys):
        stem, key = f"kernel{number}", key_of(number)
        found = cache.get(stem, key)
        if found is None:
            with cache.claim(stem, key) as found:
                if found is None:
                    os.write(log, f"{os.getpid()} {number}\n".encode())
                    time.sleep(seconds)
                    found = wanted_of(number)
                    cache.put(stem, key, found, {})
        if found != wanted_of(number):
            os._exit(3)  # a wrong kernel
    os._exit(0)


def verify(folder: str, entries: int) -> int:
    """Verify a folder as a person does, and return how many half-written files that deleted. Nothing else is left."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert cli.main(["cache", "verify", "--folder", folder, "--json"]) == 0
    told = json.loads(printed.getvalue())
    assert told["entries"] == entries and len(set(os.listdir(folder)) - {"locks"}) == entries, told
    return len(told["removed"])


def killed_winners(
    rounds: int, count: int, keys: int, source: random.Random, compile_seconds: float = 0.004
) -> dict[str, object]:
    """Kill the process that compiles, at a random moment, in each round: the others finish, with one more compile."""
    most, killed, extra, left = 0.0, 0, 0, 0
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            cache, path = os.path.join(folder, "cache"), os.path.join(folder, "log")
            log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            start = time.perf_counter()
            children = set()
            for _ in range(count):
                child = os.fork()
                if child == 0:
                    try:
                        use(cache, keys, compile_seconds, log)
                    finally:
                        os._exit(4)
                children.add(child)
            turn = source.randrange(keys)  # in whose compile, or just after it
            while len(lines := Path(path).read_text().split("\n")) <= turn + 1:
                time.sleep(0.0003)
            winner = int(lines[turn].split()[0])
            time.sleep(source.uniform(0, 2 * compile_seconds))
            os.kill(winner, signal.SIGKILL)  # its status is not read yet: the number is still its own
            codes = {child: os.waitpid(child, 0)[1] for child in children}
            most = max(most, time.perf_counter() - start)
            os.close(log)
            died = codes.pop(winner) != 0
            killed += died
            assert not any(codes.values()), codes
            compiles = Counter(line.split()[1] for line in Path(path).read_text().splitlines())
            assert len(compiles) == keys and compiles.total() <= keys + 1, compiles
            extra += compiles.total() - keys
            left += verify(cache, keys)
            for number in range(keys):
                assert DiskCache(cache).get(f"kernel{number}", key_of(number)) == wanted_of(number)
    return {
        "rounds": rounds, "processes": count, "keys": keys, "killed": killed, "extra_compiles": extra,
        "half_written_files": left, "wrong_entries": 0, "longest_round_seconds": most,
    }  # fmt: skip


def damage(rounds: int, source: random.Random) -> dict[str, object]:
    """Flip bits, cut, swap and splice entries: each must be a miss."""
    with tempfile.TemporaryDirectory() as folder:
        cache = DiskCache(os.path.join(folder, "cache"))
        keys = [key_of(number) for number in range(8)]
        for key in keys:
            cache.put("kernel", key, source.randbytes(30_000), {"symbol": "kernel", "target": "sm_90"})
        files = {key: Path(cache.path("kernel", key)).read_bytes() for key in keys}
        done: Counter[str] = Counter()
        while done.total() < rounds:
            key, other = source.sample(keys, 2)
            kind = source.choice(("bit flipped", "cut short", "swapped", "spliced"))
            data = bytearray(files[key])
            if kind == "bit flipped":
                bit = source.randrange(8 * len(data))
                data[bit // 8] ^= 1 << bit % 8
            elif kind == "cut short":
                del data[source.randrange(len(data)) :]
            elif kind == "swapped":
                data = bytearray(files[other])
            else:
                at = source.randrange(200, len(data))
                data[at:] = files[other][at:]
                if data == files[key]:
                    continue
            path = Path(cache.path("kernel", key))
            path.write_bytes(data)
            assert cache.get("kernel", key) is None, kind
            path.write_bytes(files[key])
            found = parse_entry(files[key])
            assert found and cache.get("kernel", key) == found[1]
            done[kind] += 1
    return {"rounds": rounds, "misses": done.total(), "wrong": 0, **done}


def hits(sizes: tuple[int, ...]) -> list[dict[str, object]]:
    """Time a hit of a kernel of 30 KB beside more and more entries."""
    found: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        cache = DiskCache(os.path.join(folder, "cache"))
        made = 0
        for size in sizes:
            for number in range(made, size):
                cache.put(f"kernel{number}", key_of(number), os.urandom(30_000), {})
            made = size
            asked = [(f"kernel{number}", key_of(number)) for number in range(10)]
            times = []
            for _ in range(400):
                for stem, key in asked:
                    start = time.perf_counter()
                    assert cache.get(stem, key) is not None
                    times.append((time.perf_counter() - start) * 1e6)
            found.append({"entries": size, "median_microseconds": statistics.median(times)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=32)
    parser.add_argument("--keys", type=int, default=20)
    parser.add_argument("--kills", type=int, default=1000, help="rounds in which the compiling process is killed")
    parser.add_argument("--damage", type=int, default=10_000, help="damaged entries")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", help="where to write the results")
    arguments = parser.parse_args()
    results = {
        "one_compile": processes(arguments.processes, arguments.keys),
        "hits": hits((10, 1000, 10_000)),
        "damage": damage(arguments.damage, random.Random(arguments.seed)),
        "killed_winners": killed_winners(arguments.kills, 6, 5, random.Random(arguments.seed)),
    }
    print(json.dumps(results, indent=2))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
