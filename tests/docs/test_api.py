"""The page of the API names everything that the package exports."""

from __future__ import annotations

from pathlib import Path

import attn_backend

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"


def test_every_public_name_is_on_the_page() -> None:
    shown = {
        line.removeprefix("::: attn_backend.")
        for line in PAGE.read_text().splitlines()
        if line.startswith("::: attn_backend.")
    }
    assert not set(attn_backend.__all__) - shown
