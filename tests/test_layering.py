"""Allowed dependencies: imports of the package, includes of csrc/."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "attn_backend"
ENGINES = {"vllm", "sglang", "sgl_kernel"}
FILES = sorted(PACKAGE.rglob("*.py"))

# Parts of the package that each part may import, besides itself.
MAY_IMPORT = {
    # attn_backend/__init__.py: the public names; releases.py
    "attn_backend": {"kernels", "metadata", "variants"},
    "__main__": {"cli"},
    "machine": set(),
    "settings": {"machine"},
    "validation": set(),
    "stored_formats": set(),
    "metadata": {"stored_formats", "validation"},
    "variants": {"settings", "validation"},
    "jit": {"settings", "stored_formats"},
    "kernels": {"jit", "metadata", "settings", "stored_formats", "validation", "variants"},
    "adapters": {"attn_backend", "jit", "kernels", "metadata", "settings", "validation", "variants"},
    "flashinfer": {"jit", "kernels", "metadata", "validation", "variants"},
    "cli": {
        "adapters",
        "attn_backend",
        "jit",
        "kernels",
        "machine",
        "metadata",
        "settings",
        "stored_formats",
        "validation",
        "variants",
    },
}


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of every import in a file, including importlib.import_module("name"); relative
    imports are resolved.
    """
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            name = ".".join(part for part in (start, node.module) if part)
            yield node.lineno, name
            # `from .. import kernels` imports a part by its name.
            yield from ((node.lineno, f"{name}.{alias.name}") for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str)
        ):
            function = (
                node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            )
            if function in ("import_module", "__import__"):
                yield node.lineno, node.args[0].value


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path) -> set[str]:
    """Our modules that a file imports, except imports only for type checkers."""
    typing_only = {
        line
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    modules = {module_of(file) for file in FILES}
    statements: dict[int, set[str]] = {}
    for line, name in imported(path):
        if name in modules and line not in typing_only:
            statements.setdefault(line, set()).add(name)
    # `from .part import module` needs the module, but not its package, which does not import it
    return {
        name
        for names in statements.values()
        for name in names
        if not any(other.startswith(f"{name}.") for other in names)
    } - {module_of(path)}


def part_of(path: Path) -> str:
    """A key of MAY_IMPORT; 'attn_backend' for another file directly in the package."""
    inside = path.relative_to(PACKAGE).with_suffix("").parts
    return inside[0] if inside[0] in MAY_IMPORT else "attn_backend"


def part_of_name(name: str) -> str | None:
    """The part that an imported name belongs to; None if it is not ours."""
    parts = name.split(".")
    if parts[0] != "attn_backend":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else "attn_backend"


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_finds_files() -> None:
    assert {part_of(path) for path in FILES} >= {"attn_backend", "metadata", "kernels"}
    assert "attn_backend.metadata.views" in {name for _, name in imported(PACKAGE / "metadata" / "values.py")}


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_arrows_point_one_way(path: Path) -> None:
    part = part_of(path)
    allowed = MAY_IMPORT[part] | {part}
    wrong = [
        (line, name)
        for line, name in imported(path)
        if part_of_name(name) is not None and part_of_name(name) not in allowed
    ]
    assert not wrong, f"{ids(path)} ({part}) may import {sorted(allowed)}"


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_engines_are_imported_by_their_adapter_only(path: Path) -> None:
    inside = path.relative_to(PACKAGE).parts
    own = inside[1] if inside[0] == "adapters" and len(inside) > 2 else None
    engines = {name.split(".")[0] for _, name in imported(path)} & ENGINES
    assert engines <= ({own} | ({"sgl_kernel"} if own == "sglang" else set())), (
        f"{ids(path)} imports {engines}"
    )
    others = {
        name
        for _, name in imported(path)
        if name.startswith("attn_backend.adapters.") and own and name.split(".")[2] not in (own, "__init__")
    }
    assert not {name for name in others if (PACKAGE / "adapters" / name.split(".")[2]).is_dir()}, (
        "one adapter imports the other"
    )


@pytest.mark.parametrize("path", sorted((PACKAGE / "adapters").rglob("*.py")), ids=ids)
def test_only_compat_knows_an_engine_s_version(path: Path) -> None:
    if path.name == "compat.py":
        return
    attributes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    versions = [node.lineno for node in attributes if node.attr in ("__version__", "__version_tuple__")]
    reads = [
        (line, name)
        for line, name in imported(path)
        if re.search(r"importlib[._]metadata|packaging\.version|__version__|(vllm|sglang)\.version", name)
    ]
    assert not versions, f"lines {versions}"
    assert not reads


TESTS = sorted((ROOT / "tests").rglob("*.py"))


@pytest.mark.parametrize("path", [*FILES, *TESTS], ids=ids)
def test_nothing_imports_integration_or_benchmarks(path: Path) -> None:
    # except by their own tests
    foreign = {name for name in ("integration", "benchmarks") if ROOT / "tests" / name not in path.parents}
    assert not [(line, name) for line, name in imported(path) if name.split(".")[0] in foreign]


@pytest.mark.parametrize("path", TESTS, ids=ids)
def test_tests_share_helpers_only(path: Path) -> None:
    """No test imports another test or changes the state of a helper, since other tests of the process read
    it."""
    tests = {path.stem for path in TESTS if path.name.startswith("test_")}
    helpers = {path.stem for path in TESTS} - tests
    assert not [(line, name) for line, name in imported(path) if name.split(".")[0] in tests]
    patched = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") == "setattr"
        and isinstance(node.args[0], ast.Name)
        and node.args[0].id in helpers & {name for _, name in imported(path)}
        and not any(keyword.arg == "raising" for keyword in node.keywords)  # adds a name
    ]
    assert not patched


@pytest.mark.parametrize(
    "path", sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file()), ids=ids
)
def test_no_torch_header(path: Path) -> None:
    assert not re.findall(r'#\s*include\s*[<"](?:torch|ATen|c10|caffe2|pybind11)[/.].*', path.read_text())


# Subjects of csrc/ that each may include, besides itself. runtime launches all of them.
MAY_INCLUDE = {
    "common": set(),
    "cache": {"common"},
    "planner": {"common"},
    "attention": {"common", "cache", "planner"},
    "sampling": {"common"},
    "runtime": {"common", "cache", "planner", "attention", "sampling"},
}
HOST_FOLDERS = {"cpu", "host", "runtime"}


def sources(*suffixes: str) -> list[Path]:
    return sorted(path for path in CSRC.rglob("*") if path.suffix in suffixes)


def included(path: Path) -> list[Path]:
    return [Path(name) for name in re.findall(r'#\s*include\s*"([^"]+)"', path.read_text())]


@pytest.mark.parametrize("path", sources(".h", ".cuh", ".cu", ".cpp"), ids=ids)
def test_subjects_include_one_way(path: Path) -> None:
    subject = path.relative_to(CSRC).parts[0]
    wrong = [str(name) for name in included(path) if name.parts[0] not in MAY_INCLUDE[subject] | {subject}]
    assert not wrong, f"{ids(path)} may include {sorted(MAY_INCLUDE[subject])}"


@pytest.mark.parametrize(
    "path", [path for path in sources(".h") if not HOST_FOLDERS & set(path.relative_to(CSRC).parts)], ids=ids
)
def test_shared_headers_include_shared_headers_only(path: Path) -> None:
    """They compile with nvcc and g++, for host and device."""
    wrong = [str(name) for name in included(path) if name.suffix != ".h" or HOST_FOLDERS & set(name.parts)]
    assert not wrong


def test_finds_lazy_imports() -> None:
    assert "attn_backend.kernels.native" in imported_modules(PACKAGE / "cli" / "doctor.py")


def test_no_import_cycle() -> None:
    """Lazy imports count: if two modules need each other, they should be one, or a third module should have
    the shared code."""
    graph = {module_of(path): imported_modules(path) for path in FILES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for other in sorted(graph.get(module, ())):
                visit(other, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())
