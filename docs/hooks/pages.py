# SPDX-License-Identifier: Apache-2.0
"""Pages of the site that are no files of docs/: the repository's own pages, and the reference of all public names.

A link from one page to another is relative to the repository there, and to the site here; what is no page of the site,
such as a program, keeps its text and loses its link.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
# The repository's pages, and what the site calls them.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "measurements.md",
}
RESULTS = "benchmarks/results"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
# A word behind a fence's language is for tests and for CI; superfences takes such a fence for text.
FENCE = re.compile(r"^(```\w+) \w+$", re.MULTILINE)


def target_of(path: str) -> str | None:
    """Return what the site calls a file of the repository; None: it does not have it."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/") and path.endswith(".md"):
        return path.removeprefix("docs/")
    return f"results/{posixpath.basename(path)}" if path.startswith(RESULTS) and path.endswith(".png") else None


def with_links(text: str, source: str) -> str:
    """Return a page of the repository with the site's links and fences."""
    page = target_of(source)
    assert page is not None

    def link(found: re.Match[str]) -> str:
        image, words, to = found.groups()
        path, _, anchor = to.partition("#")
        if "://" in to or not path:
            return found[0]
        target = target_of(posixpath.normpath(posixpath.join(posixpath.dirname(source), path)))
        if target is None:
            return words
        relative = posixpath.relpath(target, posixpath.dirname(page) or ".")
        return f"{image}[{words}]({relative}{'#' if anchor else ''}{anchor})"

    return FENCE.sub(r"\1", LINK.sub(link, text))


def names_in(module: str) -> list[str]:
    """Return the names that a module's `__all__` lists."""
    tree = ast.parse((ROOT / "transformer_rtc" / module).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            assert isinstance(node.value, ast.List)
            return [one.value for one in node.value.elts if isinstance(one, ast.Constant)]
    raise ValueError(f"{module} has no __all__")


def reference() -> dict[str, str]:
    """Return the pages of the reference by their names."""
    operators = ["# Operators\n"]
    for api in sorted(ROOT.glob("transformer_rtc/ops/*/api.py")):
        family = api.parent.name
        operators.append(f"## {family.capitalize()}\n")
        names = names_in(f"ops/{family}/api.py")
        operators += [f"::: transformer_rtc.ops.{family}.api.{name}\n" for name in names]
    # Where each name is defined: the package imports some of them later.
    places = {
        "arrays.device_array": ["DeviceArray"],
        "device": ["device_limits"],
        "events": ["Event"],
        "kernel_manager": ["KernelManager"],
        "launch": ["Kernel", "LaunchConfig"],
        "manifest": ["ManifestEntry"],
        "recording": ["record"],
        "select": ["implementations", "using"],
        "signatures": ["ArrayLike"],
        "simulator.device": ["SimulatedDevice"],
        "spec": ["Field", "KernelSpec", "Params", "TextSpec"],
        "warming": ["WarmupRecord", "warmup"],
        "errors": names_in("errors.py"),
    }
    described = {name for names in places.values() for name in names} | {"__version__", "freeze", "manager"}
    missing = set(names_in("__init__.py")) - described
    if missing:
        raise ValueError(f"the reference lacks {', '.join(sorted(missing))}")
    package = ["# Package\n", "`manager` is the process's `KernelManager`, and `freeze` is its method.\n"]
    package += [f"::: transformer_rtc.{module}.{name}\n" for module, names in places.items() for name in names]
    of_torch = ["# torch\n", *(f"::: transformer_rtc.torch.{place}\n" for place in _places_in_torch())]
    for module in _of_torch("_MODULES"):
        of_torch.append(f"## {module}\n")
        of_torch += [f"::: transformer_rtc.torch.{module}.{name}\n" for name in names_in(f"torch/{module}.py")]
    return {
        "reference/operators.md": "\n".join(operators),
        "reference/package.md": "\n".join(package),
        "reference/torch.md": "\n".join(of_torch),
    }


def _places_in_torch() -> list[str]:
    return [f"{module}.{name}" for name, module in _of_torch("_LATER").items()]


def _of_torch(variable: str) -> Any:
    """Return the value of a variable of `transformer_rtc.torch`."""
    tree = ast.parse((ROOT / "transformer_rtc" / "torch" / "__init__.py").read_text(encoding="utf-8"))
    assigned = (node for node in tree.body if isinstance(node, ast.Assign))
    return next(ast.literal_eval(node.value) for node in assigned if ast.unparse(node.targets[0]) == variable)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and plots that are no files of docs/."""
    for source, target in PAGES.items():
        text = with_links((ROOT / source).read_text(encoding="utf-8"), source)
        files.append(File.generated(config, target, content=text))
    for name, text in reference().items():
        files.append(File.generated(config, name, content=text))
    for plot in sorted((ROOT / RESULTS).glob("*.png")):
        files.append(File.generated(config, f"results/{plot.name}", content=plot.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Give a file of docs/ the site's links."""
    path = page.file.src_path
    if page.file.generated_by is not None:
        return markdown
    return with_links(markdown, f"docs/{path}")
