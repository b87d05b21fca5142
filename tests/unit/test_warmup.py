# SPDX-License-Identifier: Apache-2.0
"""What a run records, and what a warm-up makes of that or of a description."""

from __future__ import annotations

import inspect
import itertools
import json
import sys
import threading
import time
import types
from collections import Counter

import calls
import numpy as np
import pytest
from cases import CASES
from processes import output
from stubs import WAIT, Compiler, in_threads, without_gpu

import transformer_rtc
from transformer_rtc import compiler as rtc
from transformer_rtc import manifest, operator, record, rms_norm, usage, using, warming, warmup
from transformer_rtc.cache import DiskCache
from transformer_rtc.declaration import declaration_of, declarations
from transformer_rtc.errors import ArgumentError, CompileError, DeviceNotFoundError, UnexpectedCompileError
from transformer_rtc.kernel_manager import KernelManager
from transformer_rtc.manifest import ManifestEntry, line, parse
from transformer_rtc.request import Asked
from transformer_rtc.spec import ARCHITECTURES, Field, TextSpec

OWN = TextSpec(
    'extern "C" __global__ void f(Params p) {}\n// é \n', "f", (Field("x", "pointer"), Field("n", "int32")), ("-G",)
)
RMS = {"operators": "rms_norm", "dtypes": "float32", "hidden_sizes": 8}


@pytest.fixture
def compiler(monkeypatch, tmp_path) -> Compiler:
    """Have warm-ups use a manager with an empty cache and a compiler that only counts."""
    made = Compiler()
    manager = KernelManager(DiskCache(str(tmp_path / "cache")), made, lambda: "nvrtc 1")
    monkeypatch.setattr(warming, "manager", manager)
    return made


@pytest.fixture
def fresh(monkeypatch) -> None:
    """Have nobody told of what is asked for yet."""
    monkeypatch.setattr(usage, "observers", [])


# ---- Lines ----------------------------------------------------------------------------------------------------------


def test_every_request_and_kernel_of_ones_own_is_a_line_and_back():
    entries = [Asked(case.request._replace(unaligned=most == 4), most) for case in CASES for most in (16, 4)]
    for entry in (*entries, OWN, TextSpec("", "f")):
        found = parse(line(entry))
        assert found == entry and "\n" not in line(entry)
        if isinstance(entry, Asked):
            assert list(found.request.dtypes) == list(entry.request.dtypes)


@pytest.mark.parametrize("flags", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize("name", ["softmax", "log_softmax_backward"])
def test_every_request_of_softmax_is_of_a_bucket_and_a_line_and_back(name, flags):
    for columns in (1, 64, 65, 5000, 2**30):
        (request,) = warming._requests(name, "bfloat16", columns, False, False, flags)
        assert request.columns == min(b for b in declaration_of(name).buckets if b >= columns)
        assert request.flags == frozenset(flags) and parse(line(Asked(request))) == Asked(request)
        assert parse(line(Asked(request._replace(columns=columns)))) == Asked(request)


KERNEL = {"kernel": "f", "text": "", "fields": [], "options": []}
GOOD = {"operator": "rms_norm", "dtypes": {"x": "float32", "out": "float32"}, "columns": 8}


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ([], "must be an object"),
        (GOOD | {"more": 1}, "must be an object"),
        ({"operator": "rms_norm", "columns": 8}, "must be an object"),
        (GOOD | {"operator": "quick"}, "operator is 'quick'; it takes .*rms_norm"),
        (GOOD | {"operator": "rmsnorm"}, "operator is 'rmsnorm'; did you mean rms_norm[?] It takes .*rms_norm"),
        (GOOD | {"operator": ["rms_norm"]}, "operator is"),
        (GOOD | {"dtypes": []}, "dtypes is"),
        (GOOD | {"dtypes": {"z": "float32"}}, "it must have data types of x, weight"),
        (GOOD | {"dtypes": {"x": "float64", "out": "float32"}}, "the data type of x is 'float64'"),
        (GOOD | {"dtypes": {"x": "int8", "out": "float32"}}, "x must be one of float32, float16"),
        (GOOD | {"dtypes": {"x": "float32"}}, "out must have a data type"),
        (GOOD | {"columns": "8"}, "columns is '8'; it must be an integer"),
        (GOOD | {"columns": True}, "columns is True"),
        (GOOD | {"columns": 0}, "it must be from 1 to 1073741824"),
        (GOOD | {"columns": 2**30 + 1}, "it must be from 1 to 1073741824"),
        (GOOD | {"margin": 1}, "margin is 1; it must be true or false"),
        (GOOD | {"unaligned": "no"}, "unaligned is 'no'; it must be true or false"),
        (GOOD | {"flags": ["causal"]}, "it must be some of: round_before_weight"),
        (GOOD | {"operator": "layer_norm", "flags": ["causal"]}, "it must be some of: none"),
        (GOOD | {"operator": "softmax", "flags": "causal"}, "it must be some of: mask_keeps, causal"),
        (GOOD | {"per_head": True}, "per_head needs a weight"),
        (GOOD | {"max_ctas_per_row": 0}, "max_ctas_per_row is 0"),
        (KERNEL | {"more": 1}, "must be an object"),
        (KERNEL | {"kernel": "a b"}, "name is 'a b'; it takes the name of a function"),
        (KERNEL | {"kernel": None}, "name is None"),
        (KERNEL | {"text": 1}, "text is 1; it takes CUDA"),
        (KERNEL | {"options": "-G"}, "options is '-G'; it must be strings"),
        (KERNEL | {"fields": [["x"]]}, "it must be pairs of a name and a type"),
        (KERNEL | {"fields": [["x", "half"]]}, "field x has the type 'half'"),
    ],
)
def test_a_line_that_is_none_is_refused_by_its_place(entry, told, tmp_path):
    text = entry if isinstance(entry, str) else json.dumps(entry)
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

seeds = itertools.count(1_000_000)


@pytest.fixture
def asked_by(monkeypatch):
    """Return what tells what a call asks for, on the CPU; nothing is compiled, and nothing is run."""
    monkeypatch.setattr(operator, "manager", KernelManager(DiskCache(None)))
    operator.manager.freeze()

    def asked_by(call) -> ManifestEntry:
        # A device of its own: no plan is there yet.
        with (
            transformer_rtc.using(transformer_rtc.SimulatedDevice(seed=next(seeds))),
            pytest.raises(UnexpectedCompileError, match=r"freeze\(\)") as caught,
        ):
            call()
        assert caught.value.manifest_line not in str(caught.value)  # no warm-up makes a simulator's module
        return parse(caught.value.manifest_line)

    return asked_by


def test_a_frozen_call_names_the_line_that_warms_it_up(rng, asked_by):
    for case in CASES[:: len(CASES) // 40]:
        case = case.shorter(4 * case.hidden)
        given, outputs = calls.make_inputs(rng, case), calls.made_values(case)
        assert asked_by(lambda case=case, given=given, outputs=outputs: calls.call(case, given, outputs)) == Asked(
            case.request
        )


# What a description names, of every function that takes it. per_head, sm_margin and heads are none of theirs.
DESCRIPTIONS = [
    {},
    {"out_dtype": "float32", "causal": True},
    {"causal": "aligned"},
    {"causal": "upper_triangular"},
    {"mask": True, "mask_keeps": True, "return_lse": True},
    {"mask": "float32", "sink": True, "mask_keeps": False, "heads": 3},
    {"mask": True, "causal": True},
    {"sink": "float32", "lse": True, "heads": 3},
    {"sink": True, "lse": True, "return_dsink": False, "heads": 3},
    {"mask": "float32", "sink": True, "lse": True, "heads": 3},
    {"mask": "bfloat16", "return_dmask": False},
    {"weight": None, "sm_margin": True},
    {"weight": "float32"},
    {"bias": True, "per_head": True},
    {"bias": None, "out_dtype": "float32", "return_rstd": True},
    {"return_mean": True, "out_dtype": "float8_e4m3fn", "scale": True, "amax": True},
    {"row_scaling": True, "out_dtype": "int8"},
    {"return_dx": False, "rstd": True, "return_dbias": True},
    {"return_dweight": False, "rstd": True},
    {"dresidual": "float32", "rstd": True},
    {"return_dbias": False, "dweight_dtype": "float32", "per_head": True},
    {"out_dtype": "bfloat16"},
    {"out_dtype": "float32"},
    {"approximate": "tanh"},
    {"out_dtype": "float8_e5m2", "scale": True, "scale_inv": True},
    {"up": True},
    {"up": "float32", "out_dtype": "float8_e5m2", "row_scaling": True},
    {"up": "bfloat16", "return_dup": False},
]


def parameters_of(name: str) -> set[str]:
    return set(inspect.signature(getattr(transformer_rtc, name)).parameters)


def call_of(name: str, given: dict[str, object]):
    """Return a call with arrays of the types that a warm-up of float16 and 64 columns is given."""
    function, takes, hidden = getattr(transformer_rtc, name), parameters_of(name), 64
    queries = hidden if given.get("causal") == "upper_triangular" else 2
    columns = (3, hidden) if given.get("per_head") else (hidden,)
    rows = (2, 3, queries, hidden) if given.get("heads") else (queries, *columns)
    arrays = dict.fromkeys(("weight", "bias"), (columns, np.float16)) | {"dresidual": (rows, np.float16)}
    arrays |= dict.fromkeys(("rstd", "mean", "lse"), (rows[:-1], np.float32))
    arrays |= {"up": (rows, np.float16)}
    arrays |= dict.fromkeys(("scale", "amax", "scale_inv"), ((1,), np.float32))
    arrays |= {"sink": ((3,), np.float16), "mask": ((1, hidden), np.bool_ if "mask_keeps" in takes else np.float16)}
    keywords: dict[str, object] = {}
    for key, value in ({"weight": True, "bias": "return_mean" in takes} | given).items():
        if key in arrays and key in takes and value:
            keywords[key] = np.ones(arrays[key][0], arrays[key][1] if value is True else value)
        elif key in takes and key not in arrays:
            keywords[key] = (
                {"causal": "aligned", "sm_margin": 4, "approximate": "tanh"}.get(key, value) if value is True else value
            )
    first = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    # Some hold two parts of a row unless one of them is given.
    declaration = declarations()[name]
    sizes = {one.keyword: declaration.shapes(one)[0].sizes[-1:] for one in declaration.arrays}
    whole = {one.keyword: declaration.shapes(one)[0].leading for one in declaration.arrays}
    shapes = [
        (*(rows[:-1] if whole[p.name] else ()), declaration.parts(size, keywords) * hidden)
        for p in first
        for size in sizes[p.name]
    ]
    return lambda: function(*(np.ones(shape, np.float16) for shape in shapes), **keywords)


@pytest.mark.parametrize("name", list(declarations()))
def test_a_description_asks_for_what_the_call_does(name, asked_by):
    takes, seen = parameters_of(name) | {"heads"}, 0
    for given in DESCRIPTIONS:
        if given.keys() - {"per_head"} <= takes:
            if "rstd" in given and "mean" in takes:  # which go together
                given = given | {"mean": True}
            flags = [given.get(flag, False) for flag in ("per_head", "sm_margin")]
            arguments = {key: value for key, value in given.items() if key not in ("per_head", "sm_margin", "heads")}
            (request,) = warming._requests(name, "float16", 64, *flags, arguments)
            assert asked_by(call_of(name, given)) == Asked(request), given
            seen += 1
    assert seen >= 3


# ---- Records --------------------------------------------------------------------------------------------------------

ASKED = [Asked(case.request) for case in CASES[:50]]


def observe(*numbers: int) -> None:
    for number in numbers:
        usage.observe(ASKED[number])


def test_a_kernel_of_ones_own_is_recorded_and_warmed_up_like_an_operators(fresh, compiler, tmp_path, monkeypatch):
    without_gpu(monkeypatch)
    given, manager = (OWN.text, OWN.name, OWN.fields, 0, OWN.options), warming.manager
    stop = manager.freeze()
    with pytest.raises(UnexpectedCompileError) as caught:
        manager.compile(*given)
    stop()
    assert parse(caught.value.manifest_line) == OWN
    _, line, command = str(caught.value).splitlines()
    assert line == f"The line of a manifest that warms it up: {caught.value.manifest_line}"
    assert command == "The command: transformer-rtc warmup --manifest FILE --architecture sm_90"
    path = tmp_path / "manifest"
    path.write_text(caught.value.manifest_line)
    assert [each[:3] for each in warmup(manifest=path, architectures="sm_90")] == [("f", "sm_90", "compiled")]
    manager.freeze()
    with record() as entries:
        for _ in range(3):
            manager.compile(*given)
    assert entries == [OWN] and compiler.symbols == ["f"]


def test_a_record_is_of_what_its_block_asks_for(fresh, tmp_path):
    path = tmp_path / "manifest"
    observe(0)
    with record(path) as entries:
        assert entries == [] == manifest.read(path)
        observe(1, 1, 0, 2)
        assert entries == [ASKED[1], ASKED[0], ASKED[2]] == manifest.read(path)
    observe(3)
    assert len(manifest.read(path)) == 3 == len(entries)


def test_a_record_has_calls_that_were_made_before(tmp_path):
    x = np.ones((2, 64), np.float32)
    with using("simulator"):
        for columns in (64, 48):
            rms_norm(x[:, :columns], x[0, :columns])
        for _ in range(2):
            with record() as entries:
                rms_norm(x, x[0])
            assert [entry.request.columns for entry in entries] == [64]


def test_a_record_adds_to_a_file_what_it_lacks(fresh, tmp_path):
    path = tmp_path / "manifest"
    path.write_text(line(ASKED[1]))  # its writer was killed before the line's end
    with record(path):
        observe(0, 1)
    assert path.read_text().split("\n") == [line(ASKED[1]), line(ASKED[0]), ""]


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
        assert in_threads(8, lambda _: observe(*range(50))) == [None] * 8
    assert len(path.read_text().splitlines()) == 50 == len(manifest.read(path))


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
    path = tmp_path / "manifest"
    for to in (path, path, tmp_path / "missing" / "manifest"):
        told = output(script, ON_COMPILE="error", SIMULATE="1", CACHE_DIR="", RECORD=str(to))
        assert told.splitlines() == path.read_text().splitlines() and len(told.splitlines()) == 2


# ---- Warm-up --------------------------------------------------------------------------------------------------------


def test_a_warm_up_compiles_what_is_missing_and_says_so(compiler):
    def run():
        return warmup(["rms_norm", transformer_rtc.add_rms_norm_backward], ["bfloat16", "float32"], [64, 128],
                      architectures=["sm_80", "sm_90"])  # fmt: skip

    first, wanted = run(), set()
    forms = (("rms_norm", {}), ("rms_norm_backward", {"dresidual": True}))
    axes = itertools.product((80, 90), ("bfloat16", "float32"), (64, 128), forms, (False, True))
    for architecture, dtype, hidden, form, unaligned in axes:
        (request,) = warming._requests(form[0], dtype, hidden, False, False, form[1])
        asked = request._replace(unaligned=unaligned)
        specs = declaration_of(form[0]).family.specialise(asked, ARCHITECTURES[architecture])
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
    wanted = {
        spec.symbol
        for case in CASES[::25]
        for most in (16, 2)
        for spec, _ in case.stages(ARCHITECTURES[100]._replace(max_ctas_per_row=most))
    }
    for given in (path, str(path), entries):
        found = warmup(manifest=given, architectures="sm_100", unaligned=False)
        assert {each.symbol for each in found} == wanted and len(found) == len(wanted)
    assert Counter(compiler.symbols) == dict.fromkeys(wanted, 1)


def test_a_warm_up_is_of_whole_rows_and_of_others_unless_told_otherwise(compiler):
    def symbols(**given):
        return [found.symbol for found in warmup(**given, architectures="sm_90")]

    asked = {"operators": "softmax", "dtypes": "float32", "hidden_sizes": 2048}
    (whole,) = symbols(**asked, unaligned=False)
    assert symbols(**asked) == [whole, f"{whole}_unaligned"]
    entry = parse('{"operator": "softmax", "dtypes": {"x": "float32", "out": "float32"}, "columns": 2048, '
                  '"unaligned": true}')  # fmt: skip
    assert symbols(manifest=[entry], unaligned=False) == [f"{whole}_unaligned"]
    assert symbols(manifest=[entry]) == [whole, f"{whole}_unaligned"]


@pytest.mark.parametrize("name", ["gelu", "silu_and_mul", "silu_and_mul_backward", "add"])
def test_kernels_of_every_length_need_no_hidden_size(name, compiler):
    found = {record.symbol for record in warmup(name, "bfloat16", architectures="sm_90")}
    assert len(found) == 2
    for columns in (7, 11008, 2**20):
        assert {one.symbol for one in warmup(name, "bfloat16", columns, architectures="sm_90")} == found
        assert len(compiler.calls) == 2


def test_compiles_run_at_the_same_time(compiler):
    together = threading.Barrier(3)
    compiler.during = lambda symbol: together.wait(WAIT)
    found = warmup("rms_norm", "float32", [64, 128, 256], architectures="sm_90", unaligned=False, threads=3)
    assert [each.status for each in found] == ["compiled"] * 3


def test_one_failure_is_told_and_stops_no_other(compiler):
    def fail(symbol):
        if "h128" in symbol:
            raise CompileError(symbol, (), "", "log", {})

    compiler.during, seen = fail, []
    progress = lambda *told: seen.append(told)  # noqa: E731
    found = warmup("rms_norm", "float32", [64, 128, 256], architectures="sm_90", unaligned=False, progress=progress)
    assert [each.status for each in found] == ["compiled", "failed", "compiled"]
    assert "could not compile" in found[1].error and found[0].error == ""
    assert sorted(told[0] for told in seen) == sorted(found) and [told[1:] for told in seen] == [(1, 3), (2, 3), (3, 3)]


def test_progress_is_lines_without_tqdm(compiler, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    warmup("rms_norm", "float32", 64, architectures="sm_90", unaligned=False, progress=True)
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("[1/1] compiled rms_norm_forward_f32_h64")


def test_progress_is_a_bar_with_tqdm(compiler, capsys, monkeypatch):
    told = []

    def bar(total, **_):
        told.append(total)
        return types.SimpleNamespace(update=lambda: told.append("one"), close=lambda: told.append("closed"))

    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=bar))
    warmup("rms_norm", "float32", [64, 128], architectures="sm_90", unaligned=False, progress=True)
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
    ("version", "architecture", "told"),
    [
        ("12.8", "sm_103", "NVRTC 12.8 does not compile for sm_103; NVRTC 12.9 or later does: "),
        ("12.8", "sm_121", "NVRTC 12.8 does not compile for sm_121; NVRTC 12.9 or later does: "),
        ("12.9", "sm_110", "NVRTC 12.9 does not compile for sm_110; NVRTC 13.0 or later does: "),
    ],
)
def test_an_nvrtc_that_is_too_old_for_an_architecture_says_which_is_not(
    version, architecture, told, compiler, monkeypatch
):
    nvrtc = types.SimpleNamespace(architectures=(80, 86, 90, 100))
    monkeypatch.setattr(rtc, "_opened", types.SimpleNamespace(nvrtc=nvrtc, version=version))
    for done in warmup(**RMS, architectures=["sm_86", architecture]):
        if done.architecture == architecture:
            assert (done.status, done.error) == ("failed", told + "pip install 'transformer_rtc[cu13]'")
        else:
            assert done.status == "compiled"
    assert {called for _, called, _ in compiler.calls} == {86}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "there is nothing to warm up"),
        ({"dtypes": "float32"}, "none is named"),
        ({"weight": None}, "none is named"),
        ({"operators": "norm"}, "operators has 'norm'; did you mean rms_norm[?] It takes .*rms_norm"),
        ({"operators": "quick"}, "operators has 'quick'; it takes .*rms_norm"),
        ({"operators": len}, "operators has <built-in function len>"),
        ({"operators": 5}, "operators has 5"),
        ({"operators": "rms_norm"}, "needs dtypes and hidden_sizes"),
        *(({"operators": name, "dtypes": "float32"}, f"{name} needs dtypes and hidden_sizes")
          for name in ("rms_norm", "softmax")),
        ({"operators": "silu_and_mul", "dtypes": "float16", "out_dtype": "int8", "row_scaling": True},
         "silu_and_mul needs dtypes and hidden_sizes"),
        ({"operators": "gelu"}, "gelu needs dtypes and hidden_sizes"),
        (RMS | {"dtypes": "float64"}, "data type must be one of"),
        (RMS | {"dtypes": "int8"}, "x must be one of float32, float16, bfloat16"),
        (RMS | {"hidden_sizes": "8"}, "hidden_sizes has '8'; it takes integers"),
        (RMS | {"hidden_sizes": 8.0}, "hidden_sizes has 8.0"),
        (RMS | {"hidden_sizes": True}, "hidden_sizes has True"),
        (RMS | {"hidden_sizes": [8, 0]}, "must be from 1 to 1073741824"),
        (RMS | {"quick": 1}, "quick is no argument of these operators; it takes .*return_rstd"),
        (RMS | {"return_rstt": 1}, "return_rstt is no argument of .*; did you mean return_rstd[?] It takes amax"),
        (RMS | {"operators": "layernorm"}, "operators has 'layernorm'; did you mean layer_norm[?] It takes .*rms_norm"),
        (RMS | {"weight": 3}, "weight is 3; it takes a data"),
        (RMS | {"out_dtype": "int8"}, "needs row_scaling"),
        (RMS | {"per_head": True, "weight": None}, "per_head"),
        (RMS | {"operators": "add_rms_norm", "residual": None}, "residual must have"),
        (RMS | {"operators": "softmax", "causal": "lower"},
         "causal is 'lower'; it takes True, False, 'upper_triangular', 'aligned' or None"),
        (RMS | {"operators": "softmax", "return_lse": "aligned"},
         "return_lse is 'aligned'; it takes True, False or None"),
        (RMS | {"architectures": "sm_70"}, "sm_80, sm_86, sm_87, sm_88, sm_89"),
        (RMS | {"architectures": 90}, "architectures has 90"),
        (RMS | {"threads": 0}, "threads is 0"),
        ({"manifest": 5}, "manifest has 5"),
        ({"manifest": ["line"]}, "manifest has 'line'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_compiled(given, told, compiler):
    with pytest.raises(ArgumentError, match=told):
        warmup(**{"architectures": "sm_90", **given})
    assert compiler.symbols == []


def test_without_a_gpu_an_architecture_must_be_named(compiler, without_driver):
    with pytest.raises(DeviceNotFoundError, match="give architectures, such as 'sm_90'"):
        warmup(**RMS)
