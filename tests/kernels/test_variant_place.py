"""The module that a message names for a variant: importing it must give the variant, without running the
program.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attn_backend import Variant
from attn_backend.kernels.variant import place_of
from attn_backend.variants import builtin

MASKS = """
from attn_backend import Variant

def fading(score, b, h, q_idx, kv_idx):
    return score * 0.5

FADING = Variant.from_functions(fading)
"""
PROGRAM = """
from attn_backend.kernels.variant import place_of
{}
place = place_of({})
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path, with a module that makes a variant; its imports are removed afterwards."""
    (tmp_path / "place_masks.py").write_text(MASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("place_")]:
        del sys.modules[name]


def program(folder: Path, imports: str, expression: str) -> tuple[str, str]:
    """The result of place_of() for an expression in a program that runs as __main__."""
    path = folder / "place_program.py"
    path.write_text(PROGRAM.format(imports, expression))
    place: tuple[str, str] = runpy.run_path(str(path), run_name="__main__")["place"]
    return place


@pytest.mark.parametrize(
    "imports", ["from place_masks import FADING as USED", "from place_masks import *\nUSED = FADING"]
)
@pytest.mark.parametrize("first", ["place_masks", "place_serving"])
def test_the_module_that_makes_a_variant_is_named(first: str, imports: str, modules: Path) -> None:
    """Not a module that imports it, regardless of the import order."""
    (modules / "place_serving.py").write_text(imports.split("\n", maxsplit=1)[0] + "\n")
    importlib.import_module(first)
    serving = importlib.import_module("place_serving")
    variant = getattr(serving, "USED", None) or serving.FADING
    assert place_of(variant) == ("place_masks:FADING", "")


def test_the_program_is_not_named_for_what_it_imports(modules: Path) -> None:
    for imports, expression in (
        ("from place_masks import FADING", "FADING"),
        ("import place_masks", "place_masks.FADING"),
    ):
        assert program(modules, imports, expression) == ("place_masks:FADING", "")


def test_the_program_is_named_for_what_it_makes(modules: Path) -> None:
    place, note = program(modules, MASKS, "FADING")
    assert place == "place_program:FADING"
    assert (
        note == f", in {modules.resolve()}; that imports place_program.py, whose main part must be under `if "
        f"__name__ == '__main__'`"
    )
    made = runpy.run_module("place_program", run_name="__main__", alter_sys=True)
    assert made["place"] == ("place_program:FADING", ""), "python -m"


def test_what_no_module_has_is_said(modules: Path) -> None:
    made = Variant.from_functions(lambda score, b, h, q_idx, kv_idx: score * 0.25)
    place, note = place_of(made)
    assert place == "MODULE:OBJECT"
    assert note.startswith(
        ", where MODULE:OBJECT is a module that has this variant, or a function without arguments that makes "
        "it"
    )
    assert place_of(builtin.sliding_window(7)) == (place, note), "a built-in that needs arguments"
    assert place_of(builtin.soft_cap(5.0)) == ("attn_backend.variants.builtin:soft_cap", ""), (
        "its number is a parameter: the kernel is the same"
    )
    assert place_of(builtin.alibi()) == ("attn_backend.variants.builtin:alibi", "")
