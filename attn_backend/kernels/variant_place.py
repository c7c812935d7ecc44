"""Where `attn-backend compile --variant MODULE:OBJECT` finds a variant that this process has."""

from __future__ import annotations

import ast
import inspect
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..variants import Variant

_UNKNOWN = "MODULE:OBJECT"


def place_of(variant: Variant) -> tuple[str, str]:
    """(MODULE:OBJECT, what a message must add to the command): of the module that makes the variant, else of
    one that imports it from there.

    The program itself comes last: the command would import it, and so run it. A built-in without arguments
    needs no module that has it.
    """
    found = [
        (module, name)
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType)
        for name, value in list(vars(module).items())
        if value is variant
    ]
    found = [
        (module, name)
        for module, name in found
        if getattr(module, "__spec__", None) or getattr(module, "__file__", None)
    ]
    if not found:
        return _of_builtin(variant)
    module, name = min(found, key=lambda place: (place[0].__name__ == "__main__", _is_imported(*place)))
    if module.__name__ != "__main__":
        return f"{module.__name__}:{name}", ""
    if module.__spec__ is not None:  # python -m
        return f"{module.__spec__.name}:{name}", ""
    file = Path(str(module.__file__)).resolve()
    return (
        f"{file.stem}:{name}",
        f", in {file.parent}; that imports {file.name}, whose main part must be under `if __name__ == "
        f"'__main__'`",
    )


def _of_builtin(variant: Variant) -> tuple[str, str]:
    from ..variants import builtin

    if variant.name in builtin.__all__:
        with suppress(TypeError):  # it needs arguments
            if getattr(builtin, variant.name)().source == variant.source:
                return f"{builtin.__name__}:{variant.name}", ""
    return (
        _UNKNOWN,
        f", where {_UNKNOWN} is a module that has this variant, or a function without arguments that makes "
        f"it, such as my_module:my_variant",
    )


def _is_imported(module: ModuleType, name: str) -> bool:
    """Whether the module has the name from another one, by its source; False where that is not known."""
    try:
        nodes = list(ast.walk(ast.parse(inspect.getsource(module))))
    except (OSError, TypeError, SyntaxError):
        return False
    imported = [alias for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    return any((alias.asname or alias.name) in (name, "*") for alias in imported)
