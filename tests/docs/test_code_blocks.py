"""Every Python block of docs/ and README.md runs unchanged, in page order, on a CPU, and on a GPU if
available.

A block that needs more declares it in a comment on the line before it: `<!-- needs: gpu -->`, `<!-- needs:
vllm -->` (any module that may be missing).
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"(?:<!-- needs: (\w+) -->\n)?```python\n(.*?)```", re.DOTALL)
# Fences at any depth, except those of languages that are not Python.
OTHER_FENCE = r"^ *```(?!(?:bash|console|text|cpp|json|yaml|dockerfile)\n)\w"
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "```python" in page.read_text()
]


def is_there(needed: str) -> bool:
    return torch.cuda.is_available() if needed == "gpu" else find_spec(needed) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run(page: Path, device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    left_out = []
    for needed, block in BLOCK.findall(page.read_text()):
        if needed and not is_there(needed):
            left_out.append(needed)
            continue
        code = block.replace('"cuda"', f'"{device.type}"').replace(
            'device = "cpu"', f'device = "{device.type}"'
        )
        expected = re.findall(
            r"^# (.*)", "".join(re.findall(r"^print\(.*\n((?:# .*\n)+)", block, re.MULTILINE)), re.MULTILINE
        )
        exec(compile(code, str(page), "exec"), names)
        said = capsys.readouterr().out.splitlines()
        assert not expected or said == expected, "the comment below a print() is what it prints"
    for name in ("out", "tokens"):
        if isinstance(names.get(name), torch.Tensor):
            assert not names[name].isnan().any()
    if left_out:
        pytest.skip(f"blocks that need {', '.join(left_out)} did not run; the others did")


def test_no_block_hides() -> None:
    """A fence in another form would not be found."""
    assert {page.name for page in PAGES} >= {
        "pytorch.md",
        "errors_pytorch.md",
        "capacity.md",
        "variants.md",
        "worked_example.md",
        "flashinfer.md",
    }
    for page in PAGES:
        fences = len(re.findall(OTHER_FENCE, page.read_text(), re.MULTILINE))
        assert fences == len(BLOCK.findall(page.read_text())), page
