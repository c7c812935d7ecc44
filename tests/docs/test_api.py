"""The pages of the API name everything that the package exports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import attn_backend

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_public_name_has_its_docstring_on_the_page() -> None:
    shown = {
        line.removeprefix("::: attn_backend.")
        for line in (DOCS / "api_reference.md").read_text().splitlines()
        if line.startswith("::: attn_backend.")
    }
    assert not set(attn_backend.__all__) - shown


@pytest.mark.parametrize("name", [*attn_backend.__all__])
def test_every_public_name_belongs_to_a_task(name: str) -> None:
    assert re.search(rf"\b{name}\b", (DOCS / "api.md").read_text())
