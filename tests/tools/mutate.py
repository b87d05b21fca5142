# SPDX-License-Identifier: Apache-2.0
"""Breaks the kernels' texts in one place at a time, and says which of the broken ones no test notices. Run by hand.

    python tests/tools/mutate.py --limit 100 --jobs 2                    # by the tests of `pytest`
    python tests/tools/mutate.py --limit 100 --thorough --sample-seed 1  # by those of `pytest -m ''`

First the tests run on the texts as they are, which tells what each of them compiles and runs. Then each mutant is
judged by the tests that read its text, those that have code of its line first, until one fails. Each survivor is to be
read: it is equivalent, or visible only in speed, or a gap.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from mutants import Mutant, Text

from transformer_rtc import sources

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Only these read the kernels' texts.
FOLDERS = ("tests/simulated", "tests/compiled", "tests/unit")
OUTCOMES = ("compile", "checks", "survived", "failed")
# Seconds: no mutant's tests take so long, with their compiles.
TIMEOUT = 1800


class Known(NamedTuple):
    """What the tests do on the texts as they are.

    Attributes
    ----------
    tests : dict
        For each test's id its ``seconds``, ``files`` and ``modules``.
    lines : dict
        For each module the (file, line) that it has code of.
    """

    tests: dict[str, dict[str, Any]]
    lines: dict[str, set[tuple[str, int]]]

    def order(self, mutant: Mutant) -> list[str]:
        """Return the tests that read a mutant's text: those with code of its line first, then the quickest."""
        place = (mutant.file, mutant.line)
        having = {name for name, lines in self.lines.items() if place in lines}
        of_text = [test for test, known in self.tests.items() if mutant.file in known["files"]]
        return sorted(
            of_text, key=lambda test: (having.isdisjoint(self.tests[test]["modules"]), self.tests[test]["seconds"])
        )


def run_pytest(arguments: Iterable[str], environment: dict[str, str], seconds: float | None = None) -> tuple[int, str]:
    """Return pytest's exit status, and what it printed; after so many seconds it and what it started are killed."""
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "mutated", *arguments], cwd=ROOT, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
    return process.returncode, printed


def tier_of(options: argparse.Namespace) -> list[str]:
    if not options.thorough:
        return []
    seed = () if options.sample_seed is None else ("--sample-seed", str(options.sample_seed))
    return ["-m", "", *seed]


def measure(options: argparse.Namespace) -> Known:
    """Run the tests on the texts as they are: they must pass."""
    with tempfile.TemporaryDirectory() as folder:
        status, printed = run_pytest([f"-n{options.jobs}", *tier_of(options), *FOLDERS], {"MUTATION_RECORD": folder})
        if status != 0:
            sys.exit(f"the tests fail on the texts as they are:\n{printed[-4000:]}")
        found = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    known = Known({}, {})
    for part in found:
        known.tests.update(part["tests"])
        known.lines.update({name: {(file, line) for file, line in lines} for name, lines in part["lines"].items()})
    return known


def judge(mutant: Mutant, known: Known, options: argparse.Namespace) -> dict[str, Any]:
    """Run the tests on a mutant until one fails, and return what became of it."""
    tests, start = known.order(mutant), time.perf_counter()
    found: dict[str, Any] | None = {"outcome": "survived", "test": "", "detail": "no test reads this text"}
    with tempfile.TemporaryDirectory() as folder:
        result, given = Path(folder, "result.json"), Path(folder, "mutant.json")
        given.write_text(json.dumps({"file": mutant.file, "text": mutant.text, "tests": tests, "result": str(result)}))
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        if tests:
            command = ["-n0", "-x", *tier_of(options), *files]
            status, printed = run_pytest(command, {"MUTATION_MUTANT": str(given)}, TIMEOUT)
            found = json.loads(result.read_text()) if result.exists() else None
        if found is None:
            # The process crashed, or was killed; else pytest itself has failed, which says nothing of the mutant.
            outcome = "checks" if status < 0 else "failed"
            found = {"outcome": outcome, "test": "", "detail": f"pytest ended with {status}: {printed[-200:]}"}
    return {**mutant._replace(text="")._asdict(), **found, "seconds": round(time.perf_counter() - start, 1)}


def report(results: Iterable[dict[str, Any]]) -> None:
    """Print a table by file, and every survivor, in Markdown."""
    results = sorted(results, key=lambda result: (result["file"], result["line"], result["mutated"]))
    print("| file | mutants | seen by compile | seen by the checks | survived | pytest failed |")
    print("|---|--:|--:|--:|--:|--:|")
    for file in [*dict.fromkeys(result["file"] for result in results), "all"]:
        counts = collections.Counter(result["outcome"] for result in results if file in (result["file"], "all"))
        print(f"| {file} | {counts.total()} | " + " | ".join(str(counts[outcome]) for outcome in OUTCOMES) + " |")
    print("\n| place | mutation | mutated line | tests |\n|---|---|---|---|")
    for result in results:
        if result["outcome"] in ("survived", "failed"):
            cells = [f"{result['file']}:{result['line']}", f"`{result['what']}`", f"`{result['mutated']}`"]
            print("| " + " | ".join(cell.replace("|", "\\|") for cell in [*cells, result["detail"]]) + " |")


def drawn(options: argparse.Namespace) -> list[Mutant]:
    """Return the mutants to judge: those of a file of results, or all of the texts, in a random order."""
    texts = sources.texts()
    every = [mutant for name in options.files or sorted(texts) for mutant in Text(name, texts[name]).mutants()]
    if options.mutants:
        wanted = {
            (found["file"], found["line"], found["what"], found["mutated"])
            for found in json.loads(options.mutants.read_text())
        }
        return [mutant for mutant in every if (mutant.file, mutant.line, mutant.what, mutant.mutated) in wanted]
    random.Random(options.seed).shuffle(every)
    return every[: options.limit]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--files", nargs="+", help="only these, such as norms.cuh; all by default")
    parser.add_argument("--limit", type=int, help="so many mutants, drawn at random")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no mutant after so many")
    parser.add_argument("--seed", type=int, default=0, help="of the order, and of that draw")
    parser.add_argument("--mutants", type=Path, help="judge those of a file that --json wrote")
    parser.add_argument("--thorough", action="store_true", help="judge by the tests of `pytest -m ''`")
    parser.add_argument("--sample-seed", type=int, help="of the thorough tests")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", type=Path, help="where to write every mutant and what became of it")
    parser.add_argument("--list", action="store_true", help="only print the mutants")
    options = parser.parse_args()
    unknown = set(options.files or ()) - sources.texts().keys()
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(sorted(sources.texts()))}")
    mutants = drawn(options)
    if options.list:
        for mutant in sorted(mutants):
            print(f"{mutant.file}:{mutant.line}: {mutant.what}\n    - {mutant.original}\n    + {mutant.mutated}")
        return
    end = time.monotonic() + 60 * options.minutes
    known = measure(options)
    print(f"{len(known.tests)} tests, {sum(t['seconds'] for t in known.tests.values()):.0f} s", file=sys.stderr)
    results = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        pending = [pool.submit(judge, mutant, known, options) for mutant in mutants]
        for number, done in enumerate(concurrent.futures.as_completed(pending), 1):
            results.append(done.result())
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))
            if time.monotonic() > end:
                pool.shutdown(wait=True, cancel_futures=True)
                results = [one.result() for one in pending if one.done() and not one.cancelled()]
                break
            if number % 10 == 0:
                counts = collections.Counter(result["outcome"] for result in results)
                print(f"{number} of {len(mutants)}: {dict(counts)}", file=sys.stderr, flush=True)
    report(results)


if __name__ == "__main__":
    main()
