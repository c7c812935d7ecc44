"""Tests replace names of this package that exist: a test that needs a GPU would show it only there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = sorted(path for path in TESTS.rglob("*.py") if "monkeypatch.setattr(" in path.read_text())


def imported_modules(tree: ast.Module) -> dict[str, str]:
    """Names in the file that may be modules of the package, with the modules' names."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attn_backend")
        for alias in node.names
    }


def replaced_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The first two arguments of monkeypatch.setattr(module, "name", ...)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "monkeypatch.setattr":
            target, name, *_ = [*node.args, None, None]
            if isinstance(target, ast.Name) and isinstance(name, ast.Constant):
                yield target.id, name.value


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_replaced_names_exist(path: Path) -> None:
    tree = ast.parse(path.read_text())
    modules = imported_modules(tree)
    missing = []
    for target, name in replaced_names(tree):
        if target not in modules:
            continue
        try:
            module = import_module(modules[target])
        except ImportError:
            continue  # a class, or a module that needs an engine
        if not hasattr(module, name):
            missing.append(f"{modules[target]}.{name}")
    assert missing == []
