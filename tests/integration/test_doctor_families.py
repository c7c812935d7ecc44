"""`attn-backend doctor --model` answers "served" for the families that both engines serve in the tests."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from attn_backend.adapters.checkpoint import SERVED, Checkpoint
from attn_backend.cli.model import judge
from attn_backend.releases import RELEASES
from integration.tiny_models.families import FAMILIES

CASES = [
    (family, engine, device)
    for family in FAMILIES.values()
    for engine in family.engines
    for device in ("cuda", "cpu")
    if device == "cuda" or family.runs_on_cpu(engine)
]


def options_of(arguments: dict[str, Any]) -> dict[str, str]:
    """Options of the command line for arguments of an engine in Python."""
    return {
        name.replace("_", "-"): "" if value is True else str(value)
        for name, value in arguments.items()
        if value is not False
    }


@pytest.mark.parametrize(
    ("family", "engine", "device"), CASES, ids=lambda value: getattr(value, "name", value)
)
def test_families_that_are_served(family: Any, engine: str, device: str) -> None:
    config, kind = family.make()
    described = config.to_dict() | {"architectures": [kind.__name__]}
    options = options_of(family.engines[engine])
    verdict = judge(Checkpoint(described), engine, RELEASES[engine][-1], device, options)
    assert (verdict.answer, verdict.refusals) == (SERVED, ())
    assert verdict.ours
