"""The report of layers that other backends serve."""

from __future__ import annotations

import pytest

from attn_backend.adapters.served import shortened


@pytest.mark.parametrize(
    ("names", "short"),
    [
        ([], ""),
        (["layers.7.attn"], "layers.7.attn"),
        (["layers.10.attn", "layers.2.attn", "layers.3.attn", "layers.4.attn"], "layers.{2-4,10}.attn"),
        (["a.0.b", "c.0.d", "a.1.b", "lone"], "lone, a.{0-1}.b, c.0.d"),
        (["layers.0.mtp.1", "layers.1.mtp.1"], "layers.{0-1}.mtp.1"),
    ],
)
def test_names_are_shortened(names: list[str], short: str) -> None:
    assert shortened(names) == short
