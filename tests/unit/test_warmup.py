"""What a run records, and what a warm-up makes of that or of a description."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import types
from collections import Counter

import calls
import numpy as np
import pytest
from cases import CASES
from processes import run_python

import transformer_rtc
from transformer_rtc import dispatch, manifest, record, usage, warming, warmup
from transformer_rtc.cache import DiskCache
from transformer_rtc.compiler import Compiled
from transformer_rtc.dispatch import Asked
from transformer_rtc.errors import ArgumentError, CompileError, DeviceNotFoundError, UnexpectedCompileError
from transformer_rtc.manager import KernelManager
from transformer_rtc.manifest import ManifestEntry, line, parse
from transformer_rtc.spec import ARCHITECTURES, Field, TextSpec

WAIT = 60


class Compiler:
    """Counts compiles, and does what a test has it do."""

    def __init__(self) -> None:
        self.symbols: list[str] = []
        self.during = lambda symbol: None

    def __call__(self, symbol, program, headers, options, architecture):
        self.symbols.append(symbol)
        self.during(symbol)
        return Compiled(b"\x7fELF " + symbol.encode(), "cubin", "", "nvrtc 1")


@pytest.fixture
def compiler(monkeypatch, tmp_path) -> Compiler:
    """Have warm-ups use a manager with an empty cache and a compiler that only counts."""
    made = Compiler()
    manager = KernelManager(DiskCache(str(tmp_path / "cache")), made, lambda: "nvrtc 1")
    monkeypatch.setattr(warming, "manager", manager)
    return made


# ---- Lines ----------------------------------------------------------------------------------------------------------


def test_every_request_is_a_line_and_back():
    for case in CASES:
        for most in (16, 4):
            entry = Asked(case.request, most)
            found = parse(line(entry))
            assert found == entry and list(found.request.dtypes) == list(case.request.dtypes)
            assert "\n" not in line(entry)


OWN = TextSpec(
    'extern "C" __global__ void f(Params p) {}\n// é \n',
    "f",
    (Field("x", "pointer"), Field("n", "int32")),
    ("-lineinfo",),
)


def test_a_kernel_of_ones_own_is_a_line_and_back():
    for spec in (OWN, TextSpec("", "f")):
        assert parse(line(spec)) == spec and "\n" not in line(spec)


def test_every_request_of_softmax_is_a_line_and_back():
    for name in ("softmax", "log_softmax_backward"):
        for flags in ({}, {"causal": True}):
            for columns in (1, 64, 65, 5000, 2**30):
                (request,) = warming._requests(name, "bfloat16", columns, False, False, flags)
                assert request.columns == min(b for b in dispatch.operators()[name].buckets if b >= columns)
                assert request.flags == frozenset(flags) and parse(line(Asked(request))) == Asked(request)


def test_a_line_of_any_number_of_columns_asks_for_its_bucket():
    entry = parse('{"operator": "softmax", "dtypes": {"x": "float32", "out": "float32"}, "columns": 1000, "flags": []}')
    assert entry.request.columns == 1024


KERNEL = {"kernel": "f", "text": "", "fields": [], "options": []}
GOOD = {"operator": "rms_norm", "dtypes": {"x": "float32", "out": "float32"}, "columns": 8}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "must be an object"),
        (json.dumps(GOOD | {"more": 1}), "must be an object"),
        (json.dumps({"operator": "rms_norm", "columns": 8}), "must be an object"),
        (json.dumps(GOOD | {"operator": "norm"}), "operator is 'norm'; it must be one of rms_norm"),
        (json.dumps(GOOD | {"operator": ["rms_norm"]}), "operator is"),
        (json.dumps(GOOD | {"dtypes": []}), "dtypes is"),
        (json.dumps(GOOD | {"dtypes": {"z": "float32"}}), "it must have data types of x, weight"),
        (json.dumps(GOOD | {"dtypes": {"x": "float64", "out": "float32"}}), "the data type of x is 'float64'"),
        (json.dumps(GOOD | {"dtypes": {"x": "int8", "out": "float32"}}), "x must be one of float32, float16"),
        (json.dumps(GOOD | {"dtypes": {"x": "float32"}}), "out must have a data type"),
        (json.dumps(GOOD | {"columns": "8"}), "columns is '8'; it must be an integer"),
        (json.dumps(GOOD | {"columns": True}), "columns is True"),
        (json.dumps(GOOD | {"columns": 0}), "it must be from 1 to 1073741824"),
        (json.dumps(GOOD | {"columns": 2**30 + 1}), "it must be from 1 to 1073741824"),
        (json.dumps(GOOD | {"margin": 1}), "margin is 1; it must be true or false"),
        (json.dumps(GOOD | {"flags": ["causal"]}), "it must be some of: none"),
        (json.dumps(GOOD | {"operator": "softmax", "flags": "causal"}), "it must be some of: mask_keeps, causal"),
        (json.dumps(GOOD | {"per_head": True}), "per_head needs a weight"),
        (json.dumps(KERNEL | {"more": 1}), "must be an object"),
        (json.dumps(KERNEL | {"kernel": "a b"}), "name is 'a b'; it takes the name of a function"),
        (json.dumps(KERNEL | {"kernel": None}), "name is None"),
        (json.dumps(KERNEL | {"text": 1}), "text is 1; it takes CUDA"),
        (json.dumps(KERNEL | {"options": "-G"}), "options is '-G'; it must be strings"),
        (json.dumps(KERNEL | {"fields": [["x"]]}), "it must be pairs of a name and a type"),
        (json.dumps(KERNEL | {"fields": [["x", "half"]]}), "field x has the type 'half'"),
        (json.dumps(GOOD | {"max_ctas_per_row": 0}), "max_ctas_per_row is 0"),
    ],
)
def test_a_line_that_is_none_is_refused_by_its_place(text, told, tmp_path):
    with pytest.raises(ArgumentError, match=f"there:3: .*{told}"):
        parse(text, "there:3")
    if text:
        path = tmp_path / "manifest"
        path.write_text(f"{json.dumps(GOOD)}\n\n{text}\n")
        with pytest.raises(ArgumentError, match=r"manifest:3: "):
            warmup(manifest=path, architectures="sm_90")


@pytest.mark.parametrize("make", [None, lambda path: path.write_bytes(b"\xff"), lambda path: path.mkdir()])
def test_a_manifest_that_cannot_be_read_is_refused(make, tmp_path):
    path = tmp_path / "manifest"
    if make:
        make(path)
    with pytest.raises(ArgumentError, match=r"the manifest .* cannot be read"):
        manifest.read(path)


# ---- What a run asks for --------------------------------------------------------------------------------------------


def asked_by(call) -> ManifestEntry:
    """Return what a call asks for, on the CPU; nothing is compiled, and nothing is run."""
    stop = transformer_rtc.freeze()
    try:
        # A device of its own: no plan is there yet.
        with (
            transformer_rtc.using(transformer_rtc.SimulatedDevice(seed=next(seeds))),
            pytest.raises(UnexpectedCompileError, match=r"freeze\(\)") as caught,
        ):
            call()
    finally:
        stop()
    assert caught.value.manifest_line in str(caught.value)
    return parse(caught.value.manifest_line)


seeds = iter(range(1_000_000, 2_000_000))


@pytest.fixture
def empty_cache(monkeypatch):
    monkeypatch.setattr(dispatch, "manager", KernelManager(DiskCache(None)))
    monkeypatch.setattr(transformer_rtc, "freeze", dispatch.manager.freeze)


def test_a_frozen_call_names_the_line_that_warms_it_up(rng, empty_cache):
    for case in CASES[:: len(CASES) // 40]:
        case = case.shorter(4 * case.hidden)
        given, outputs = calls.make_inputs(rng, case), calls.made_values(case)
        found = asked_by(lambda case=case, given=given, outputs=outputs: calls.call(case, given, outputs))
        assert found == Asked(case.request)


def call_arguments(
    name: str, given: dict[str, object], hidden: int, heads: int
) -> tuple[list[object], dict[str, object]]:
    """Return arrays of the types that a warm-up of float16 is given."""
    rows, columns = (2, heads, hidden) if heads else (2, hidden), (heads, hidden) if heads else (hidden,)
    first = {"add_": 3 if "backward" in name else 2}.get(
        name[:4], 2 if "backward" in name or name.endswith("_add") else 1
    )
    keywords: dict[str, object] = {"sm_margin": 4 if given.get("sm_margin") else 0}
    shapes = {"weight": columns, "bias": columns, "dresidual": rows, "rstd": rows[:-1], "mean": rows[:-1]}
    optional = {"weight": True, "bias": "layer_norm" in name and "backward" not in name}
    shapes |= {"mask": (1, hidden), "sink": (heads,), "lse": rows[:-1]}
    if "softmax" in name:
        queries = hidden if given.get("causal") == "upper_triangular" else 2
        rows = (2, heads, queries, hidden) if heads else (queries, hidden)
        shapes["lse"] = rows[:-1]
        optional = {}
        keywords.pop("sm_margin")
        given = {key: "aligned" if key == "causal" and value is True else value for key, value in given.items()}
    for key, value in (optional | given).items():
        if key in ("sm_margin", "per_head", "heads"):
            continue
        default = np.float32 if key in ("rstd", "mean", "lse", "scale", "amax", "scale_inv") else np.float16
        default = np.bool_ if key == "mask" and "backward" not in name else default
        if key in shapes or key in ("scale", "amax", "scale_inv"):
            if value:
                keywords[key] = np.ones(shapes.get(key, (1,)), default if value is True else value)
        else:
            keywords[key] = value
    return [np.ones(rows, np.float16) for _ in range(first)], keywords


PUBLIC = tuple(dispatch.forms())
NORMS = [name for name in PUBLIC if "softmax" not in name]
SOFTMAX = [name for name in PUBLIC if "softmax" in name]
FORMS = [
    *((name, {}) for name in PUBLIC),
    *((name, {"out_dtype": "float32", "causal": True}) for name in SOFTMAX),
    *((name, {"causal": mode}) for name in SOFTMAX for mode in ("aligned", "upper_triangular")),
    *((name, {"mask": True, "mask_keeps": True, "return_lse": True}) for name in SOFTMAX if "backward" not in name),
    *((name, {"mask": "float32", "sink": True, "heads": 3}) for name in SOFTMAX if "backward" not in name),
    *((name, {"sink": "float32", "lse": True, "heads": 3}) for name in SOFTMAX if "backward" in name),
    ("softmax_backward", {"sink": True, "lse": True, "return_dsink": False, "heads": 3}),
    *((name, {"mask": True, "causal": True}) for name in SOFTMAX if "backward" in name),
    ("softmax_backward", {"mask": "float32", "sink": True, "lse": True, "heads": 3}),
    ("log_softmax_backward", {"mask": "bfloat16", "return_dmask": False}),
    *((name, {"weight": None, "sm_margin": True}) for name in NORMS),
    *((name, {"weight": "float32"}) for name in NORMS),
    *((name, {"per_head": True, "bias": True}) for name in NORMS if "backward" not in name),
    *((name, {"bias": None, "out_dtype": "float32", "return_rstd": True}) for name in NORMS if "backward" not in name),
    ("layer_norm", {"return_mean": True, "out_dtype": "float8_e4m3fn", "scale": True, "amax": True}),
    ("add_rms_norm", {"row_scaling": True, "out_dtype": "int8"}),
    ("rms_norm_backward", {"return_dx": False, "rstd": True, "return_dbias": True}),
    ("layer_norm_backward", {"return_dweight": False, "rstd": True, "mean": True, "dresidual": "float32"}),
    ("add_layer_norm_backward", {"return_dbias": False, "dweight_dtype": "float32", "per_head": True}),
]


@pytest.mark.parametrize(("name", "given"), FORMS, ids=str)
def test_a_description_asks_for_what_the_call_does(name, given, empty_cache):
    heads = 3 if given.get("per_head") else given.get("heads", 0)
    positional, keywords = call_arguments(name, given, 64, heads)
    found = asked_by(lambda: getattr(transformer_rtc, name)(*positional, **keywords))
    flags = {flag: given.get(flag, False) for flag in ("per_head", "sm_margin")}
    arguments = {key: value for key, value in given.items() if key not in (*flags, "heads")}
    (request,) = warming._requests(name, "float16", 64, flags["per_head"], flags["sm_margin"], arguments)
    assert found == Asked(request)


def test_a_kernel_of_ones_own_is_recorded_and_warmed_up_like_an_operators(fresh, compiler, tmp_path, monkeypatch):
    module = sys.modules["transformer_rtc.manager"]
    monkeypatch.setattr(module.gpu, "load", lambda symbol, *_: symbol)
    monkeypatch.setattr(module, "device_limits", lambda device: ARCHITECTURES[90])
    given = (OWN.text, OWN.name, OWN.fields, 0, OWN.options)
    manager = warming.manager
    stop = manager.freeze()
    with pytest.raises(UnexpectedCompileError) as caught:
        manager.compile(*given)
    stop()
    assert parse(caught.value.manifest_line) == OWN
    path = tmp_path / "manifest"
    path.write_text(caught.value.manifest_line)
    assert [each[:3] for each in warmup(manifest=path, architectures="sm_90")] == [("f", "sm_90", "compiled")]
    manager.freeze()
    with record() as entries:
        for _ in range(3):
            manager.compile(*given)
    assert entries == [OWN] and compiler.symbols == ["f"]


# ---- Records --------------------------------------------------------------------------------------------------------


def observe(*numbers: int) -> None:
    for number in numbers:
        usage.observe(Asked(CASES[number].request))


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(usage, "asked", [])
    monkeypatch.setattr(usage, "observers", [])


def test_a_record_is_of_all_that_the_process_used_until_its_end(fresh, tmp_path):
    path = tmp_path / "manifest"
    observe(0)
    with record(path) as entries:
        assert entries == [Asked(CASES[0].request)] == manifest.read(path)
        observe(1, 1, 0, 2)
        assert entries == [Asked(CASES[number].request) for number in (0, 1, 2)] == manifest.read(path)
    observe(3)
    assert len(manifest.read(path)) == 3 == len(entries)
    with record() as entries:
        assert len(entries) == 4


def test_a_record_adds_to_a_file_what_it_lacks(fresh, tmp_path):
    path = tmp_path / "manifest"
    path.write_text(line(Asked(CASES[1].request)))  # its writer was killed before the line's end
    with record(path):
        observe(0, 1)
    assert path.read_text().split("\n") == [line(Asked(CASES[number].request)) for number in (1, 0)] + [""]


class Yielding(set):
    """Lets other threads run between a look and what follows it."""

    def __contains__(self, value: object) -> bool:
        found = super().__contains__(value)
        time.sleep(0.0001)
        return found


def test_many_threads_record_each_line_once(fresh, tmp_path):
    path = tmp_path / "manifest"
    with record(path):
        usage.observers[-1].__self__._seen = Yielding()
        start = threading.Barrier(8)
        threads = [threading.Thread(target=lambda: (start.wait(WAIT), observe(*range(50)))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
    assert Counter(path.read_text().splitlines()).total() == 50 == len(manifest.read(path))


@pytest.mark.parametrize("path", ["missing/manifest", "."])
def test_a_record_that_cannot_be_written_is_refused(path, tmp_path):
    with pytest.raises(ArgumentError, match=r"path is .*, which cannot be written"), record(tmp_path / path):
        pytest.fail("it went on")


def test_the_environment_records_a_process_and_never_fails_it(tmp_path):
    script = (
        "import numpy as np, transformer_rtc, warnings\n"
        "from transformer_rtc import UnexpectedCompileError\n"
        "x = np.ones((2, 64), np.float32)\n"
        "for call in (transformer_rtc.rms_norm, transformer_rtc.layer_norm):\n"
        "    try: call(x)\n"
        "    except UnexpectedCompileError as error: print(error.manifest_line)\n"
    )
    variables = {
        "TRANSFORMER_RTC_ON_COMPILE": "error",
        "TRANSFORMER_RTC_SIMULATE": "1",
        "TRANSFORMER_RTC_CACHE_DIR": "",
    }
    path = tmp_path / "manifest"
    for _ in range(2):
        told = run_python(script, **variables, TRANSFORMER_RTC_RECORD=str(path))
        assert told == path.read_text() and told.count("\n") == 2
    assert run_python(script, **variables, TRANSFORMER_RTC_RECORD=str(tmp_path / "missing" / "manifest")) == told


# ---- Warm-up --------------------------------------------------------------------------------------------------------


def test_a_warm_up_compiles_what_is_missing_and_says_so(compiler):
    def run():
        return warmup(["rms_norm", transformer_rtc.add_rms_norm_backward], ["bfloat16", "float32"], [64, 128],
                      architectures=["sm_80", "sm_90"])  # fmt: skip

    first = run()
    wanted = set()
    for architecture in (80, 90):
        for dtype in ("bfloat16", "float32"):
            for hidden in (64, 128):
                for operator, more in (("rms_norm", {}), ("rms_norm_backward", {"dresidual": True})):
                    (request,) = warming._requests(operator, dtype, hidden, False, False, more)
                    family = dispatch.operators()[operator].family
                    specs = family.specialise(request, ARCHITECTURES[architecture])
                    wanted |= {(spec.symbol, f"sm_{architecture}") for spec, _ in specs}
    assert {(found.symbol, found.architecture) for found in first} == wanted and len(first) == len(wanted)
    assert {found.status for found in first} == {"compiled"} and all(found.milliseconds > 0 for found in first)
    assert Counter(compiler.symbols) == Counter(symbol for symbol, _ in wanted)
    again = run()
    assert [found[:2] for found in again] == [found[:2] for found in first]
    assert {found.status for found in again} == {"cached"} and len(compiler.symbols) == len(wanted)


def test_a_warm_up_by_a_manifest_makes_what_its_calls_need(compiler, tmp_path):
    entries = [Asked(case.request, most) for case in CASES[::25] for most in (16, 2)]
    path = tmp_path / "manifest"
    path.write_text("".join(f"{line(entry)}\n" for entry in entries))
    for given in (path, str(path), entries):
        found = warmup(manifest=given, architectures="sm_100")
        wanted = {
            spec.symbol
            for case in CASES[::25]
            for most in (16, 2)
            for spec, _ in case.stages(ARCHITECTURES[100]._replace(max_ctas_per_row=most))
        }
        assert {each.symbol for each in found} == wanted and len(found) == len(wanted)
    assert Counter(compiler.symbols) == dict.fromkeys(wanted, 1)


def test_compiles_run_at_the_same_time(compiler):
    together = threading.Barrier(3)
    compiler.during = lambda symbol: together.wait(WAIT)
    found = warmup("rms_norm", "float32", [64, 128, 256], architectures="sm_90", threads=3)
    assert [each.status for each in found] == ["compiled"] * 3


def test_one_failure_is_told_and_stops_no_other(compiler):
    def fail(symbol):
        if "h128" in symbol:
            raise CompileError(symbol, (), "", "log", {})

    compiler.during = fail
    seen = []
    found = warmup(
        "rms_norm", "float32", [64, 128, 256], architectures="sm_90", progress=lambda *told: seen.append(told)
    )
    assert [each.status for each in found] == ["compiled", "failed", "compiled"]
    assert "could not compile" in found[1].error and found[0].error == ""
    assert sorted(told[0] for told in seen) == sorted(found) and [told[1:] for told in seen] == [(1, 3), (2, 3), (3, 3)]


def test_progress_is_lines_without_tqdm(compiler, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    warmup("rms_norm", "float32", 64, architectures="sm_90", progress=True)
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("[1/1] compiled rms_norm_forward_f32_h64")


def test_progress_is_a_bar_with_tqdm(compiler, capsys, monkeypatch):
    told = []

    class Bar:
        def __init__(self, total, **_):
            told.append(total)

        def update(self):
            told.append("one")

        def close(self):
            told.append("closed")

    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=Bar))
    warmup("rms_norm", "float32", [64, 128], architectures="sm_90", progress=True)
    assert told == [2, "one", "one", "closed"] and capsys.readouterr() == ("", "")


def test_a_progress_that_raises_ends_the_warm_up(compiler):
    def stop(*_):
        raise KeyboardInterrupt

    compiler.during = lambda symbol: time.sleep(0.02)
    sizes = range(64, 512, 2)
    with pytest.raises(KeyboardInterrupt):
        warmup("rms_norm", "float32", sizes, architectures="sm_90", progress=stop, threads=1)
    assert len(compiler.symbols) < len(sizes)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "there is nothing to warm up"),
        ({"dtypes": "float32"}, "none is named"),
        ({"weight": None}, "none is named"),
        ({"operators": "norm"}, "operators has 'norm'; it takes rms_norm"),
        ({"operators": len}, "operators has <built-in function len>"),
        ({"operators": 5}, "operators has 5"),
        ({"operators": "rms_norm"}, "needs dtypes and hidden_sizes"),
        ({"operators": "rms_norm", "dtypes": "float64", "hidden_sizes": 8}, "data type must be one of"),
        ({"operators": "rms_norm", "dtypes": "int8", "hidden_sizes": 8}, "x must be one of float32, float16, bfloat16"),
        (
            {"operators": "rms_norm", "dtypes": "float32", "hidden_sizes": "8"},
            "hidden_sizes has '8'; it takes integers",
        ),
        ({"operators": "rms_norm", "dtypes": "float32", "hidden_sizes": 8.0}, "hidden_sizes has 8.0"),
        ({"operators": "rms_norm", "dtypes": "float32", "hidden_sizes": True}, "hidden_sizes has True"),
        ({"operators": "rms_norm", "dtypes": "float32", "hidden_sizes": [8, 0]}, "must be from 1 to 1073741824"),
        ({"operators": "rms_norm", "dtypes": "float32", "hidden_sizes": 8, "wait": 1}, "wait is no argument of these"),
        (
            {"operators": "rms_norm", "dtypes": "float32", "hidden_sizes": 8, "weight": 3},
            "weight is 3; it takes a data",
        ),
        (
            {"operators": "softmax", "dtypes": "float32", "hidden_sizes": 8, "causal": "lower"},
            "causal is 'lower'; it takes True, False, 'upper_triangular', 'aligned' or None",
        ),
        (
            {"operators": "softmax", "dtypes": "float32", "hidden_sizes": 8, "return_lse": "aligned"},
            "return_lse is 'aligned'; it takes True, False or None",
        ),
        ({"operators": "rms_norm", "dtypes": "float32", "hidden_sizes": 8, "out_dtype": "int8"}, "needs row_scaling"),
        (
            {"operators": "rms_norm", "dtypes": "float32", "hidden_sizes": 8, "per_head": True, "weight": None},
            "per_head",
        ),
        ({"operators": "add_rms_norm", "dtypes": "float32", "hidden_sizes": 8, "residual": None}, "residual must have"),
        ({"operators": "rms_norm", "dtypes": "float32", "hidden_sizes": 8, "architectures": "sm_70"}, "sm_80, sm_89"),
        (
            {"operators": "rms_norm", "dtypes": "float32", "hidden_sizes": 8, "architectures": 90},
            "architectures has 90",
        ),
        ({"operators": "rms_norm", "dtypes": "float32", "hidden_sizes": 8, "threads": 0}, "threads is 0"),
        ({"manifest": 5}, "manifest has 5"),
        ({"manifest": ["line"]}, "manifest has 'line'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_compiled(given, told, compiler):
    with pytest.raises(ArgumentError, match=told):
        warmup(**{"architectures": "sm_90", **given})
    assert compiler.symbols == []


def test_without_a_gpu_an_architecture_must_be_named(compiler, without_driver):
    with pytest.raises(DeviceNotFoundError, match="name the architectures, such as 'sm_90'"):
        warmup("rms_norm", "float32", 64)


def test_a_warm_up_by_nvrtc_leaves_nothing_to_compile(tmp_path):
    variables = {"TRANSFORMER_RTC_CACHE_DIR": str(tmp_path)}
    script = (
        "import transformer_rtc as t; from collections import Counter\n"
        "found = t.warmup([t.rms_norm, t.layer_norm_backward], 'float16', 256, architectures='sm_90')\n"
        "print(dict(Counter(each.status for each in found)), sorted(opened()))"
    )
    assert run_python(script, **variables).startswith("{'compiled': 3} ['cuda.bindings'")
    variables["TRANSFORMER_RTC_ON_COMPILE"] = "error"
    assert run_python(script, **variables) == "{'cached': 3} []\n"
    assert len([name for name in os.listdir(tmp_path) if name != "locks"]) == 3
