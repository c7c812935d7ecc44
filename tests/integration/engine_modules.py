"""Modules, classes and functions of an engine release, read from its sources and never imported."""

from __future__ import annotations

import ast
import zipfile
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple


class Parameters(NamedTuple):
    """The parameters of a function, without self."""

    names: list[str]  # positional ones, then keyword-only ones
    num_positional: int
    num_required: int  # of the positional ones
    required_named: list[str]
    has_args: bool
    has_kwargs: bool


class Release:
    """Attributes:
    archive: a zip file with paths as in the installed package.
    """

    def __init__(self, archive: Path) -> None:
        self._zip = zipfile.ZipFile(archive)
        self._paths = set(self._zip.namelist())
        self._modules: dict[str, ast.Module | None] = {}

    def module(self, name: str) -> ast.Module | None:
        """None: the stored sources have no such module."""
        if name not in self._modules:
            path = next(
                (
                    path
                    for path in (f"{name.replace('.', '/')}.py", f"{name.replace('.', '/')}/__init__.py")
                    if path in self._paths
                ),
                None,
            )
            self._modules[name] = None if path is None else ast.parse(self._zip.read(path))
        return self._modules[name]

    def find(self, module: str, name: str, depth: int = 0) -> ast.AST | None:
        """The meaning of `name` in a module: a class, a function, or an assignment. Imports are followed.

        A dotted name is looked up in classes.
        """
        first, _, rest = name.partition(".")
        found = self._find_first(module, first, depth)
        if rest:
            return self.member(module, found, rest) if isinstance(found, ast.ClassDef) else None
        return found

    def _find_first(self, module: str, name: str, depth: int) -> ast.AST | None:
        tree = self.module(module)
        if tree is None or depth > 6:
            return None
        for node in _statements(tree.body):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return node
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in [
                target.id for target in _targets(node) if isinstance(target, ast.Name)
            ]:
                return node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        origin = _absolute(module, node, self._is_package(module))
                        return (
                            self.find(origin, alias.name, depth + 1)
                            or self.module(f"{origin}.{alias.name}")
                            or (None if origin.split(".")[0] in module else node)
                        )
        return self.module(f"{module}.{name}")

    def _is_package(self, module: str) -> bool:
        return f"{module.replace('.', '/')}/__init__.py" in self._paths

    def member(self, module: str, class_: ast.ClassDef, name: str, depth: int = 0) -> ast.AST | None:
        """A method, a field or an attribute of a class: from the class, from an assignment to self in a
        method, or from a base.
        """
        for node in _statements(class_.body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return node
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in [
                target.id for target in _targets(node) if isinstance(target, ast.Name)
            ]:
                return node
        if name in _assigned_to_self(class_):
            return _assigned_to_self(class_)[name]
        for base in class_.bases if depth < 6 else []:
            base_name = base.value if isinstance(base, ast.Subscript) else base
            home, found = (
                self._home(module, base_name.id) if isinstance(base_name, ast.Name) else (module, None)
            )
            member = self.member(home, found, name, depth + 1) if isinstance(found, ast.ClassDef) else None
            if member is not None:
                return member
        return None

    def _home(self, module: str, name: str) -> tuple[str, ast.AST | None]:
        """The module that defines `name` of `module`, and its definition."""
        tree = self.module(module)
        for node in _statements(tree.body) if tree else []:
            if isinstance(node, ast.ImportFrom) and name in [
                alias.asname or alias.name for alias in node.names
            ]:
                origin = _absolute(module, node, self._is_package(module))
                return self._home(
                    origin, next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
                )
        return module, self.find(module, name)

    def parameters(self, path: str) -> Parameters | None:
        """The parameters of "module:name" or "module:Class.name"; None if the function does not exist."""
        module, _, name = path.partition(":")
        found = self.find(module, name)
        # the method of a list
        if (
            isinstance(found, ast.Assign)
            and isinstance(found.value, ast.Attribute)
            and found.value.attr == "extend"
        ):
            return Parameters(["iterable"], 1, 1, [], False, False)
        return parameters_of(found) if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) else None

    def abstract_methods(self, path: str) -> list[str]:
        module, _, name = path.partition(":")
        class_ = self.find(module, name)
        assert isinstance(class_, ast.ClassDef)
        return [
            node.name
            for node in class_.body
            if isinstance(node, ast.FunctionDef)
            and any("abstractmethod" in ast.unparse(mark) for mark in node.decorator_list)
        ]

    @cached_property
    def fields(self) -> set[str]:
        """Names of all class fields in the sources of SGLang's arguments."""
        names = [
            path
            for path in self._paths
            if "/arg_groups/" in path
            or path.endswith("/server_args.py")
            or path.endswith("/runtime_context.py")
        ]
        trees = [ast.parse(self._zip.read(path)) for path in names]
        return {
            node.target.id
            for tree in trees
            for node in ast.walk(tree)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Parameters:
    arguments = function.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    is_static = any(ast.unparse(mark) == "staticmethod" for mark in function.decorator_list)
    if positional[:1] in (["self"], ["cls"]) and not is_static:
        positional = positional[1:]
    named = [argument.arg for argument in arguments.kwonlyargs]
    required_named = [
        name for name, default in zip(named, arguments.kw_defaults, strict=True) if default is None
    ]
    required = len(positional) - len(arguments.defaults)
    return Parameters(
        positional + named,
        len(positional),
        max(required, 0),
        required_named,
        arguments.vararg is not None,
        arguments.kwarg is not None,
    )


@cache
def _assigned_to_self(class_: ast.ClassDef) -> dict[str, ast.Attribute]:
    """The attributes that methods assign to self."""
    attributes = [
        node
        for node in ast.walk(class_)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    ]
    return {
        node.attr: node for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements of a module or a class, including those inside `if` and `try`."""
    found: list[ast.stmt] = []
    for node in body:
        found.append(node)
        for part in ("body", "orelse", "finalbody") if isinstance(node, ast.If | ast.Try | ast.With) else ():
            found += _statements(getattr(node, part, []))
        for handler in node.handlers if isinstance(node, ast.Try) else []:
            found += _statements(handler.body)
    return found


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _absolute(module: str, node: ast.ImportFrom, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])
