# SPDX-License-Identifier: Apache-2.0
"""Headers of a kernel of the user's own: which files are found, and that a key depends on each that is reached."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time

import numpy as np
import pytest
from processes import output

from transformer_rtc import Field, KernelManager, SimulatedDevice, cli, compiler, cuda_headers, includes, manifest
from transformer_rtc.cache import DiskCache
from transformer_rtc.errors import ArgumentError, CompileError, CompilerNotFoundError
from transformer_rtc.spec import Target, TextSpec

FIELDS = (Field("x", "pointer"),)
SM_90, SIMULATED = Target(90), Target(90, "checked")
FILES = {
    # Two files that are included as "config.h", and one that is reached in three ways.
    "include/top.h": '#pragma once\n#include "detail/one.h"\n#include <config.h>\n#include "../beside/two.h"\n',
    "include/config.h": "#pragma once\n#define CONFIG 1\n",
    "include/detail/one.h": '#pragma once\n#include "config.h"\n#define ONE DETAIL\nstruct Once {};\n',
    "include/detail/config.h": "#pragma once\n#define DETAIL 20\n",
    "include/never.h": "#error nobody includes it\n",
    "beside/two.h": '#pragma once\n#include "three.h"\n#define TWO 300\n',
    "beside/three.h": "#pragma once\n#define THREE 4000\n",
    "second/named.h": '#include "detail/one.h"\n#define NAMED 50000\n',
    "second/config.h": "#error the first folder has one\n",
    "second/chosen.h": "#define CHOSEN 600000\n",
}
TEXT = """
#include <top.h>
#include "named.h"
#define CHOICE OTHER
#define OTHER <chosen.h>
#include CHOICE
#include BY_OPTION
#if __has_include(<detail/one.h>) && !__has_include("not_there.h")
#include "platform.cuh"
#else
#include "not_there.h"
#endif
extern "C" __global__ void sums(const Params p) {
  static_cast<int*>(p.x)[0] = CONFIG + ONE + TWO + THREE + NAMED + CHOSEN;
}
"""
REACHED = [name for name in FILES if name not in ("include/never.h", "second/config.h")]


@pytest.fixture
def folder(tmp_path):
    """Return a folder with the files."""
    for name, text in FILES.items():
        (tmp_path / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / name).write_text(text)
    return tmp_path / "files"


def spec_of(folder, text=TEXT, symbol="sums") -> TextSpec:
    folders = (str(folder / "include"), str(folder / "second"))
    return TextSpec(text, symbol, FIELDS, ("-D", 'BY_OPTION="detail/config.h"'), folders)


def key_of(spec, target=SM_90) -> str:
    return KernelManager(DiskCache(None)).key(spec, target, "compiler")


def image_of(spec, target=SM_90):
    return KernelManager(DiskCache(None)).image(spec, target)


def run(spec, **options) -> int:
    x = np.zeros(1, np.int32)
    kernel = KernelManager(DiskCache(None)).get(spec, SimulatedDevice(checked=True, **options))
    kernel.launch_plain((1, 1, 1), (1, 1, 1), {"x": x})
    return int(x[0])


def test_headers_are_found_by_their_includer_their_folders_and_macros(folder):
    assert run(spec_of(folder)) == 654321
    image = image_of(spec_of(folder))
    assert image.kind == "cubin"
    assert (
        image.data
        == image_of(
            TextSpec(
                TEXT.split("#endif")[1].replace("CONFIG + ONE + TWO + THREE + NAMED + CHOSEN", "654321"), "sums", FIELDS
            )
        ).data
    )


@pytest.mark.parametrize("target", [SM_90, SIMULATED], ids=str)
def test_a_key_depends_on_each_file_that_is_reached_and_on_no_other_and_not_on_its_place(target, folder, tmp_path):
    key = key_of(spec_of(folder), target)
    for name in FILES:
        before = (folder / name).read_text()
        (folder / name).write_text(before + "// changed\n")
        assert (key_of(spec_of(folder), target) != key) == (name in REACHED), name
        (folder / name).write_text(before)
    assert key_of(spec_of(folder), target) == key
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert key_of(spec_of(tmp_path / "elsewhere"), target) == key


def test_another_process_hits_the_cache_until_a_reached_file_changes(folder, tmp_path):
    script = f"""
from transformer_rtc import Field, KernelManager, TextSpec
from transformer_rtc.cache import DiskCache
manager = KernelManager(DiskCache({str(tmp_path / "cache")!r}))
manager.image(TextSpec({TEXT!r}, "sums", (Field("x", "pointer"),), ("-DBY_OPTION=<config.h>",),
                       ({str(folder / "include")!r}, {str(folder / "second")!r})), 90)
print(manager.counts["compile"], "cuda.bindings.nvrtc" in opened())
"""
    assert [output(script).split()[0] for _ in range(2)] == ["1", "0"]
    (folder / "beside/three.h").write_text("#pragma once\n#define THREE 4001\n")
    assert [output(script).split()[0] for _ in range(2)] == ["1", "0"]


def test_one_process_gives_another_kernel_when_a_reached_file_changes(folder):
    manager, device = KernelManager(DiskCache(None)), SimulatedDevice(checked=True)
    spec, x = spec_of(folder), np.zeros(1, np.int32)

    def value():
        kernel = manager.compile(TEXT, "sums", FIELDS, device, spec.options, [folder / "include", folder / "second"])
        kernel.launch_plain((1, 1, 1), (1, 1, 1), {"x": x})
        return kernel, int(x[0])

    first, second = value(), value()
    assert first == second and first[1] == 654321
    (folder / "beside/three.h").write_text("#define THREE 5000\n")
    assert value()[1] == 655321


def test_a_kernel_without_headers_of_its_own_is_itself():
    for text in ("", '#include "platform.cuh"\n', '#if 0\n#include "no.h"\n#include <no>\n#include NO\n#endif\n'):
        spec = TextSpec(text + 'extern "C" __global__ void sums(const Params p) {}', "sums", FIELDS)
        assert includes.read(spec, of_cuda=True) is spec
        assert includes.read(spec, of_cuda=False) is spec


@pytest.mark.parametrize("target", [SM_90, SIMULATED], ids=str)
def test_a_missing_header_is_an_error_where_the_compiler_needs_it_which_names_it(target, folder):
    (folder / "include/top.h").write_text('#pragma once\n#include "stray.h"\n')
    with pytest.raises(CompileError) as caught:
        image_of(spec_of(folder), target)
    assert "stray.h is in no folder that include_folders names; given: " in str(caught.value)
    assert f"{folder / 'include'}, {folder / 'second'}" in str(caught.value)


@pytest.mark.parametrize("target", [SM_90, SIMULATED], ids=str)
def test_a_mistake_in_a_header_names_its_path_and_line(target, folder):
    (folder / "include/detail/one.h").write_text("#pragma once\n\nnonsense;\n")
    with pytest.raises(CompileError) as caught:
        image_of(spec_of(folder), target)
    path = str(folder / "include/detail/one.h")
    assert f"{path}(3)" in caught.value.log or f"{path}:3" in caught.value.log
    assert "#include <top.h>" in str(caught.value), "the text is the caller's own"


@pytest.mark.parametrize("include", ['"stray.h"', '"./stray.h"', "<stray.h>", '"../here/stray.h"', '"here/stray.h"'])
def test_no_file_of_the_current_folder_is_taken(include, folder, tmp_path, monkeypatch):
    here = tmp_path / "here"
    for place in (here, here / "detail", here / "here"):
        place.mkdir()
        (place / "stray.h").write_text("// no key would see it\n")
    monkeypatch.chdir(here)
    for name in ("include/top.h", "include/detail/one.h", "second/chosen.h"):
        (folder / name).write_text(f"#include {include}\n")
        with pytest.raises(CompileError, match="no folder that include_folders names"):
            image_of(spec_of(folder))


@pytest.mark.parametrize("target", [SM_90, SIMULATED], ids=str)
@pytest.mark.parametrize(
    "text",
    [
        '#include "{}"',
        "# /* of */ include <{}>",
        '%:include"{}"',
        '#inc\\\nlude "{}"',
        '/* of */ #include \\\n "{}"',
        '#if __has_include("{}")\n#endif',
        "#if __has_include/* of */ ( \\\n<{}>)\n#endif",
    ],
)
def test_a_header_that_is_included_by_its_path_is_refused(text, target, folder):
    (folder / "include/detail/one.h").write_text(f"// first\n  {text.format(folder / 'include/never.h')}\n")
    with pytest.raises(ArgumentError, match=r"sums includes a file by its path.*include_folders"):
        image_of(spec_of(folder), target)


@pytest.mark.parametrize("value", ['"/usr/include/stdio.h"', "FUNCTION(x)", "", '"../beside/two.h"', "(x) #x"])
def test_a_macro_that_cannot_be_followed_is_refused(value, folder):
    text = TEXT.replace("#define OTHER <chosen.h>", f"#define OTHER {value}".rstrip())
    with pytest.raises(ArgumentError, match=r"sums includes the macro (OTHER|CHOICE)"):
        image_of(spec_of(folder, text))


def test_a_name_of_two_files_by_macros_is_refused(folder):
    (folder / "include/detail/one.h").write_text('#define CHOICE_1 "config.h"\n#include CHOICE_1\n')
    (folder / "include/config.h").write_text('#define CHOICE_2 "config.h"\n#include CHOICE_2\n')
    with pytest.raises(ArgumentError, match=r"sums: macros name two files config\.h"):
        image_of(spec_of(folder))


def test_folders_that_are_none_and_files_that_are_no_text_are_refused(folder):
    def compiled(include_folders):
        device = SimulatedDevice()
        return KernelManager(DiskCache(None)).compile(TEXT, "sums", FIELDS, device, (), include_folders)

    for given in ("include", None, [b""], [3], ["a\0b"], {"include"}):
        with pytest.raises(ArgumentError, match="include_folders is"):
            compiled(given)
    with pytest.raises(ArgumentError, match=r"include_folders has .*top\.h', which is no folder"):
        compiled([folder / "include/top.h"])
    (folder / "include/top.h").write_bytes(b"// \xff\n")
    with pytest.raises(ArgumentError, match=r"the header .*top\.h cannot be read"):
        compiled([folder / "include"])


def test_an_include_path_among_the_options_is_refused_and_names_the_argument(folder):
    with pytest.raises(ArgumentError, match=r"-I/x makes NVRTC read files .*include_folders names folders"):
        image_of(TextSpec(TEXT, "sums", FIELDS, ("-I/x",)))


def test_a_manifest_has_the_folders(folder):
    spec = spec_of(folder)
    assert manifest.parse(manifest.line(spec)) == spec
    assert "include_folders" not in manifest.line(TextSpec(TEXT, "sums", FIELDS))
    with pytest.raises(ArgumentError, match="include_folders is 3; it must be strings"):
        manifest.parse(
            manifest.line(spec).replace('"include_folders": [', '"include_folders": 3, "_": [').split(', "_"')[0] + "}"
        )


def test_the_command_line_takes_folders_and_finds_what_lies_beside_the_file(folder, capsys):
    file = folder / "beside" / "sums.cu"
    file.write_text('#include "three.h"\n' + TEXT)
    arguments = ["compile", str(file), "--symbol", "sums", "--architecture", "sm_90", "--field", "x:pointer"]
    arguments += ["--option=-DBY_OPTION=<config.h>"]
    assert cli.main([*arguments, "-I", str(folder / "include"), f"--include={folder / 'second'}"]) == 0
    assert "registers" in capsys.readouterr().out
    assert cli.main(arguments) == 1
    told = capsys.readouterr().err
    assert f"{file}(3): catastrophic error" in told and "top.h is in no folder" in told


TARGETS = pytest.mark.parametrize("target", [SM_90, SIMULATED], ids=str)
NONE = '\nextern "C" __global__ void sums(const Params p) {}\n'
CHANGED = '\nextern "C" __global__ void sums(const Params p) { static_cast<int*>(p.x)[0] = VALUE; }\n'


@TARGETS
@pytest.mark.parametrize("more", ["", '#include "config.h"\n'], ids=["alone", "beside another"])
def test_a_macro_may_be_the_only_include_of_a_text_and_of_a_header(more, target, folder):
    (folder / "include/chain.h").write_text('#define NEXT "detail/config.h"\n#include NEXT\n')
    text = f"#define FIRST <chain.h>\n#include FIRST\n{more}#if DETAIL != 20\n#error\n#endif{NONE}"
    assert image_of(spec_of(folder, text), target).data


@TARGETS
@pytest.mark.parametrize("name", ['"../stray.h"', "<../stray.h>", '"a/../../stray.h"', '"../../stray.h"'])
def test_a_name_that_leaves_the_compilers_folder_finds_nothing(name, target, folder, tmp_path, monkeypatch):
    # The simulator compiles in a folder of its own below this one.
    below = tmp_path / "another" / "below"
    (below / "a").mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(below))
    for place in (below.parent, below):
        (place / "stray.h").write_text("#define FOUND 1\n")
    (folder / "include/top.h").write_text(f"#if __has_include({name})\n#error found\n#endif\n")
    assert image_of(spec_of(folder, f"#include <top.h>\n#if __has_include({name})\n#error found\n#endif{NONE}"), target)
    missing = re.escape(name[1:-1])
    for text in (f"#include {name}\n{NONE}", f'#include "second.h"{NONE}'):
        (folder / "include/second.h").write_text(f"#include {name}\n")
        with pytest.raises(CompileError, match=rf"\n{missing} is in no folder that include_folders names"):
            image_of(spec_of(folder, text), target)


@TARGETS
@pytest.mark.parametrize(
    "directive",
    [
        '#include /* of */ "mine.h"',
        '/* of */ # /* */ include "mine.h"',
        '#include \\\n "mine.h"',
        '\x0c#include\x0c"mine.h"',
        '/* over\nlines */ #include "mine.h"',
        '#inc\\\nlude "mine.h"',
        "#define H /* of */ <mine.h> // of\n#include /* */ H",
        '#define H \\\n  "mine.h"\n#include H',
        '#if __has_include(/* of */ "mine.h")\n#include "mine.h"\n#endif',
    ],
)
def test_directives_may_have_comments_continuations_and_form_feeds(directive, target, folder):
    (folder / "include/mine.h").write_bytes(b"\xef\xbb\xbf#define VALUE 1\n")
    spec = spec_of(folder, f"{directive}\n{CHANGED}")
    key = key_of(spec, target)
    assert image_of(spec, target).data
    (folder / "include/mine.h").write_text("#define VALUE 20\n")
    assert key_of(spec, target) != key


@TARGETS
def test_what_the_compiler_never_sees_is_not_refused(target, folder):
    (folder / "include/latin.h").write_bytes(b"// \xff\n")
    dead = '#define F(x) <x>\n#include F(a)\n#define UP "../up.h"\n#include UP\n#include "latin.h"\n'
    assert image_of(spec_of(folder, f"#if 0\n{dead}#endif\n/*\n{dead}*/\n{NONE}"), target).data
    with pytest.raises(CompileError, match="nonsense"):
        image_of(spec_of(folder, f"#if 0\n{dead}#endif\nnonsense;{NONE}"), target)
    with pytest.raises(ArgumentError, match=r"latin\.h cannot be read"):
        image_of(spec_of(folder, f'#include "latin.h"\n{NONE}'), target)


@TARGETS
def test_a_header_may_have_the_programs_name_and_those_of_the_simulators_texts(target, folder):
    for name in ("sums.cu", "prelude.h", "interface.h"):
        (folder / "include" / name).write_text(f"#define VALUE 1 // of {name}\n")
        spec = spec_of(folder, f'#include "{name}"{CHANGED}')
        key = key_of(spec, target)
        assert image_of(spec, target).data
        (folder / "include" / name).write_text("#define VALUE 200\n")
        assert key_of(spec, target) != key
    assert image_of(spec_of(folder, f'#define H "interface.h"\n#include H{CHANGED}'), target).data
    with pytest.raises(ArgumentError, match=r"a macro names a header as the program is named, sums\.cu"):
        image_of(spec_of(folder, f'#define H "sums.cu"\n#include H{CHANGED}'), target)


@TARGETS
def test_a_message_names_the_right_one_of_two_headers_of_which_one_name_begins_with_the_other(target, folder):
    (folder / "include/one").write_text('#include "one.h"\n')
    (folder / "second/one.h").write_text("\nnonsense;\n")
    with pytest.raises(CompileError) as caught:
        image_of(spec_of(folder, f'#include "one"{NONE}'), target)
    assert re.search(rf"{folder / 'second/one.h'}[:(]2", caught.value.log)
    assert "/nonexistent/" not in caught.value.log.replace("/nonexistent/sums.cu", "")


@TARGETS
def test_a_header_that_is_reached_by_two_paths_is_one(target, folder):
    (folder / "include/link").symlink_to(folder / "include/detail")
    spec = spec_of(folder, f'#include "detail/one.h"\n#include "link/one.h"{NONE}')
    assert image_of(spec, target).data


def test_a_symbol_that_is_in_no_text_is_refused_with_the_entries_of_headers(folder):
    (folder / "include/entry.h").write_text('extern "C" __global__ void other(const Params p) {}\n')
    for target in (SM_90, SIMULATED):
        with pytest.raises(ArgumentError, match=r'no extern "C" __global__ sums; its entries are: other$'):
            image_of(spec_of(folder, "#include <entry.h>\n"), target)


def test_what_was_followed_is_kept_until_a_file_is_changed_added_or_removed(folder, monkeypatch):
    past = time.time() - 100
    for name in FILES:
        os.utime(folder / name, (past, past))
    monkeypatch.setattr(includes, "_RACY_SECONDS", -100.0)  # what is as old as the files' last change is kept too
    spec, opened = spec_of(folder), []
    read = includes._read_text
    monkeypatch.setattr(includes, "_read_text", lambda path: opened.append(path) or read(path))
    first = includes.read(spec, of_cuda=False)
    assert len(opened) == len(REACHED)
    opened.clear()
    assert includes.read(spec_of(folder), of_cuda=False) is first and not opened
    text = (folder / "beside/three.h").read_text()
    (folder / "beside/three.h").write_text(text.replace("4000", "4001"))
    second = includes.read(spec, of_cuda=False)
    assert second != first and opened
    (folder / "include/named.h").write_text("#define NAMED 7\n")  # before the one in the second folder
    assert includes.read(spec, of_cuda=False) != second
    (folder / "include/named.h").unlink()
    assert includes.read(spec, of_cuda=False) == second


def test_a_file_that_was_changed_just_now_is_read_again(folder):
    for value in range(4010, 4030):
        (folder / "beside/three.h").write_text(f"#define THREE {value}\n")
        assert str(value) in "".join(includes.read(spec_of(folder), of_cuda=False).headers.values())


def test_include_folders_are_kept_as_absolute_paths_and_no_key_depends_on_them(folder, monkeypatch):
    monkeypatch.chdir(folder)
    options = ("-D", 'BY_OPTION="detail/config.h"')
    spec = TextSpec(TEXT, "sums", FIELDS, options, ("include", "second"))
    assert spec == spec_of(folder) and key_of(spec) == key_of(spec_of(folder))
    line = manifest.line(spec)
    monkeypatch.chdir("/")
    assert manifest.parse(line) == spec_of(folder) and key_of(manifest.parse(line))


# ---- CUDA's own ------------------------------------------------------------------------------------------------------

BF16 = """
#include <cuda_bf16.h>
#include "cuda_fp16.h"
#include <cuda_fp8.h>
extern "C" __global__ void halves(const Params p) {
  __nv_bfloat162* x = static_cast<__nv_bfloat162*>(p.x);
  x[threadIdx.x] = __hmul2(x[threadIdx.x], __float2bfloat162_rn(0.5f));
}
"""
HALVES = TextSpec(BF16, "halves", FIELDS)


def test_headers_of_cuda_come_from_the_wheel_of_nvrtcs_major_version():
    assert image_of(HALVES).kind == "cubin"
    read = includes.read(HALVES, of_cuda=True)
    found = [path for path in read.paths.values() if os.path.isabs(path)]  # but for those that are not there
    below = [wheel.below for wheel in cuda_headers.WHEELS[compiler.bindings_major()]]
    assert f"/{below[0]}/cuda_bf16.h" in "\n".join(found)
    assert all(any(f"/{folder}/" in path for folder in below) for path in found)


def test_a_header_of_ones_own_comes_before_cudas(folder):
    (folder / "include/cuda_bf16.h").write_text("#error of the user's\n")
    spec = TextSpec(BF16, "halves", FIELDS, (), (str(folder / "include"),))
    with pytest.raises(CompileError, match="of the user's"):
        image_of(spec)


def test_the_simulator_refuses_cudas_headers_but_where_the_text_leaves_them_out():
    with pytest.raises(ArgumentError, match=r"^halves includes cuda_bf16\.h, and the simulator cannot compile"):
        image_of(HALVES, SIMULATED)
    text = '#ifndef TRTC_SIMULATOR\n#include <cuda_bf16.h>\n#endif\nextern "C" __global__ void none(const Params p) {}'
    assert image_of(TextSpec(text, "none", FIELDS), SIMULATED).kind == "module"


def installed(folder, major) -> None:
    below = cuda_headers.WHEELS[major][0].below
    (folder / below).mkdir(parents=True)
    for header in ("cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h"):
        (folder / below / header).write_text("struct __nv_bfloat162 { int x; };\n" if "bf" in header else "")


def test_a_wheel_that_is_missing_or_of_another_major_version_is_one_clear_error(monkeypatch, tmp_path):
    major = compiler.bindings_major()
    other = "13" if major == "12" else "12"
    pip = cuda_headers.WHEELS[major][0].pip
    monkeypatch.setattr(compiler, "bindings_major", lambda: major)
    compiler.compiler_identity()
    with monkeypatch.context() as patch:
        compiler._open()
        patch.setattr(sys, "path", [str(tmp_path)])
        missing = f"^halves includes cuda_bf16.h, a header of CUDA {major}'s runtime, which is not installed"
        with pytest.raises(CompilerNotFoundError, match=f"{missing}: pip install {pip}$"):
            image_of(HALVES)
        installed(tmp_path, other)
        path = tmp_path / cuda_headers.WHEELS[other][0].below
        instead = f"{path} is of another version, which is not for NVRTC {major}"
        with pytest.raises(CompilerNotFoundError, match=rf"{instead}: pip install {pip}$"):
            image_of(HALVES)
        below = cuda_headers.WHEELS[major][0].below
        installed(tmp_path, major)
        assert cuda_headers.folders() == (os.path.join(str(tmp_path), below),)
        first = key_of(HALVES)
        (tmp_path / below / "cuda_fp8.h").write_text("// another version\n")
        assert key_of(HALVES) != first


@pytest.mark.parametrize(
    "name, pip",
    [
        ("cooperative_groups.h", "runtime"),
        ("mma.h", "runtime"),
        ("crt/mma.h", "nvcc|crt"),
        ("cub/cub.cuh", "cccl"),
        ("cuda/std/limits", "cccl"),
        ("nv/target", "cccl"),
        ("curand_kernel.h", "curand"),
    ],
)
def test_a_header_of_cuda_that_is_missing_names_its_wheel(name, pip, monkeypatch, tmp_path):
    text = f'#include <{name}>\nextern "C" __global__ void none(const Params p) {{}}'
    major = compiler.bindings_major()
    with pytest.raises(ArgumentError, match=f"^none includes {name}, and the simulator cannot compile CUDA's"):
        image_of(TextSpec(text, "none", FIELDS), SIMULATED)
    monkeypatch.setattr(compiler, "bindings_major", lambda: major)
    compiler.compiler_identity()
    compiler._open()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(CompilerNotFoundError, match=f"^none includes {name}, .*pip install '?nvidia-(cuda-)?({pip})"):
        image_of(TextSpec(text, "none", FIELDS))
    wheel = next(wheel for wheel in cuda_headers.WHEELS[major] if re.fullmatch(wheel.headers, name))
    (tmp_path / wheel.below / name).parent.mkdir(parents=True)
    (tmp_path / wheel.below / name).write_text("")
    assert image_of(TextSpec(text, "none", FIELDS)).kind == "cubin"


@TARGETS
@pytest.mark.parametrize("name", ["cstdint", "vector", "stdint.h", "type_traits"])
def test_a_header_of_the_standard_library_is_said_to_be_one(name, target):
    text = f'#include <{name}>\nextern "C" __global__ void none(const Params p) {{}}'
    with pytest.raises(CompileError, match=f"{name} is of the standard library, and .* has none"):
        image_of(TextSpec(text, "none", FIELDS), target)
