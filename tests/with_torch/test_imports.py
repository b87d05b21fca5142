# SPDX-License-Identifier: Apache-2.0
"""What is imported when: torch and this package in either order, and nothing that an eager process does not need."""

from __future__ import annotations

import pytest
from processes import output, shared

BOTH = {
    "torch first": "import sys\nimport torch\nimport transformer_rtc as t\n",
    "torch last": "import sys\nimport transformer_rtc as t\nassert 'torch' not in sys.modules\nimport torch\n",
}
HEAVY = "{'torch._dynamo', 'torch._inductor', 'torch.distributed.tensor'} & set(sys.modules)"

EAGER = f"""
x = torch.randn(4, 64, requires_grad=True)
weight = torch.nn.Parameter(torch.ones(64))
before = {HEAVY}
y = t.rms_norm(x, weight)
y.sum().backward()
with torch.no_grad():
    assert t.rms_norm(x, weight).equal(y)
assert weight.grad.isfinite().all()
assert torch.ops.transformer_rtc.rms_norm(x, weight)[0].equal(y)
assert {HEAVY} == before, {HEAVY}
"""

COMPILED = """
import inspect
call = torch.compile(lambda x, weight: t.rms_norm(x, weight) * 2, fullgraph=True, backend="aot_eager")
x, weight = torch.randn(4, 64, requires_grad=True), torch.ones(64, requires_grad=True)
found = call(x, weight)
found.sum().backward()
assert found.equal(t.rms_norm(x, weight) * 2) and x.grad is not None
import torch.distributed.tensor
from torch._dynamo import polyfills
# What was waited for has its own loader, and nothing is waited for any more.
for name in ("torch", "torch._dynamo", "torch.distributed.tensor"):
    module = sys.modules[name]
    loader = module.__loader__
    assert module.__spec__.loader is loader and type(loader).__module__ != "transformer_rtc.imports"
    assert "import" in inspect.getsource(module)
assert not any(type(finder).__module__ == "transformer_rtc.imports" for finder in sys.meta_path)
"""


@pytest.mark.parametrize(("order", "script"), [
    pytest.param("torch first", EAGER, id="eager, torch first"),
    pytest.param("torch last", COMPILED, id="compiled, torch last"),
    pytest.param("torch last", EAGER, id="eager, torch last", marks=pytest.mark.thorough),
    pytest.param("torch first", COMPILED, id="compiled, torch first", marks=pytest.mark.thorough),
])  # fmt: skip
def test_either_may_be_imported_first(order, script, tmp_path):
    output(BOTH[order] + script, SIMULATE="1", **shared(tmp_path))


HOOKS = """
import importlib, importlib.util, pathlib, sys, warnings
import transformer_rtc
from transformer_rtc.imports import when_imported

sys.path.insert(0, FOLDER)
for name in ("plain", "failing", "broken"):
    pathlib.Path(FOLDER, f"{name}.py").write_text("raise ValueError('mine')" if name == "broken" else "value = 1")
told = []
when_imported("plain", lambda: told.append(sys.modules["plain"].value))
when_imported("failing", lambda: 1 / 0)
when_imported("broken", lambda: told.append("broken"))
spec = importlib.util.find_spec("plain")
assert spec.loader.get_source("plain") == "value = 1" and told == []  # asked for, and not imported
import plain
assert told == [1]
importlib.reload(plain)
assert told == [1]
when_imported("plain", lambda: told.append("now"))
assert told == [1, "now"]
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import failing
assert failing.value == 1 and [str(one.message)[:40] for one in seen] == ["transformer_rtc does not work with this "]
for _ in range(2):
    try:
        import broken
    except ValueError as error:
        assert str(error) == "mine"
assert told == [1, "now"]
"""


def test_an_import_goes_on_whatever_waits_for_it(tmp_path):
    output(f"FOLDER = {str(tmp_path)!r}\n{HOOKS}")


def test_the_package_alone_imports_no_torch():
    script = "import sys, transformer_rtc\nprint(sorted(name for name in sys.modules if name.startswith('torch')))"
    assert output(script) == "[]"


def test_a_package_that_may_not_be_imported_is_not_waited_for():
    assert (
        output("import sys\nsys.modules['torch'] = None\nimport transformer_rtc as t\nprint(t.__name__)")
        == "transformer_rtc"
    )
