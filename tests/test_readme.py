"""The examples of README.md run as they stand there, one after another, on a GPU; and on a CPU, where that is named instead."""

from __future__ import annotations

import re
from pathlib import Path

import torch

README = Path(__file__).resolve().parent.parent / "README.md"


def test_examples(device: torch.device) -> None:
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict[str, torch.Tensor] = {}
    shapes = []
    for example in examples:
        exec(example.replace('"cuda"', f'"{device.type}"'), names)
        assert not names["out"].isnan().any()
        shapes.append(tuple(names["out"].shape))
    assert shapes == [(701, 32, 128), (2, 32, 128)]
