# SPDX-License-Identifier: Apache-2.0
"""The general kernels as the package is built with them."""

from __future__ import annotations

import re

import pytest
from kernels import INFO_PARAMETER_BYTES, general_kernels, kernel_info

from transformer_rtc import static
from transformer_rtc.declaration import declarations
from transformer_rtc.spec import STATIC_ARCHITECTURES

FAMILIES = {declaration.family.name for declaration in declarations().values()}

built = pytest.mark.skipif(not static.available(), reason="this installation was built without static kernels")


@built
@pytest.mark.parametrize("architecture", STATIC_ARCHITECTURES)
def test_what_was_built_into_the_package_is_what_the_sources_compile_to(architecture):
    found = {}
    for family in FAMILIES:
        image, kind = static.image(family, architecture)
        assert kind == "cubin" and b".nv.global" not in image
        for symbol, attributes in kernel_info(image).items():
            found[symbol] = int.from_bytes(attributes[INFO_PARAMETER_BYTES], "little")
    # Operators that share a kernel fill its parameters from arrays of their own: of one size.
    assert found == {symbol: spec.params.size for symbol, (spec, _) in general_kernels().items()}


@built
@pytest.mark.parametrize(("architecture", "name"), [(86, "sm_80"), (121, "sm_120"), (103, "sm_100"), (90, "sm_90")])
def test_a_static_cubin_runs_on_later_minor_revisions(architecture, name):
    assert static.image("norms", architecture) == static.image("norms", int(name[3:]))


@built
def test_a_newer_architecture_gets_the_static_ptx_and_an_older_one_a_refusal():
    entries = []
    for family in FAMILIES:
        image, kind = static.image(family, 130)
        text = image.decode()
        assert kind == "ptx" and text.endswith("\0") and f".target sm_{static.PTX_ARCHITECTURE}" in text
        entries += re.findall(r"\.entry (\w+)", text)
    assert sorted(entries) == sorted(general_kernels())
    refusal = r"no static kernel of norms for compute capability 7\.5.*Rebuild"
    with pytest.raises(static.StaticKernelError, match=refusal):
        static.image("norms", 75)


def test_an_installation_without_static_kernels_says_how_to_rebuild(monkeypatch, tmp_path):
    monkeypatch.setattr(static, "_FOLDER", str(tmp_path / "absent"))
    assert not static.available() and static.manifest() == {}
    with pytest.raises(static.StaticKernelError, match="TRANSFORMER_RTC_STATIC_KERNELS"):
        static.image("norms", 90)
