"""The table of models that choose their attention kernels themselves."""

from __future__ import annotations

from pathlib import Path

import model_configs as configs
import pytest

from attn_backend.adapters.checkpoint import PARTLY, REFUSED, SERVED, Checkpoint
from attn_backend.adapters.own_kernels import OWN_KERNELS, Choice, Missing, judge
from attn_backend.adapters.served import report_layers
from attn_backend.releases import RELEASES

ROOT = Path(__file__).resolve().parents[2]
OTHER = "another backend"


def matrix(with_lines: bool = False) -> str:
    """The models, as a Markdown table for docs/engines/limits.md.

    Args:
        with_lines: also the files and lines that choose the kernels, for docs/reports/models.md.
    """
    lines = [f"| model | vLLM {RELEASES['vllm'][-1]} | SGLang {RELEASES['sglang'][-1]} |", "|---|---|---|"]
    for entry in OWN_KERNELS:
        lines.append(
            f"| {entry.models} | {_cell(entry.vllm, with_lines)} | {_cell(entry.sglang, with_lines)} |"
        )
    return "\n".join(lines)


def _cell(choice: Choice | Missing | None, with_lines: bool) -> str:
    if choice is None:
        return "served"
    if isinstance(choice, Missing):
        return "no such model"
    files = ", ".join(f"`{where}`" for where in choice.where)
    return f"{choice.shown}: {files}" if files and with_lines else choice.shown


def test_the_documentation_has_the_table() -> None:
    for page, with_lines in (("engines/limits.md", False), ("reports/models.md", True)):
        assert f"\n\n{matrix(with_lines)}\n\n" in (ROOT / "docs" / page).read_text(), page


@pytest.mark.parametrize("engine", RELEASES)
def test_each_architecture_has_one_entry(engine: str) -> None:
    choices = [entry.choice(engine) for entry in OWN_KERNELS]
    names = [name for choice in choices if choice is not None for name in choice.architectures]
    assert len(names) == len({*names})
    for choice in choices:
        if choice is not None and not isinstance(choice, Missing):
            assert choice.where or "refused" in choice.shown


@pytest.mark.parametrize(
    ("config", "field", "engine"),
    [
        (configs.QWEN_4_EXP, "indexer_n_heads", "vllm"),
        (configs.QWEN_4_EXP, "indexer_n_heads", "sglang"),
        (configs.HY_V4, "learnable_sink", "vllm"),
        (configs.PANGU, "param_sink_number", "vllm"),
        (configs.MINIMAX_M3, "sparse_attention_config", "vllm"),
    ],
)
def test_checkpoints_without_the_feature_are_ours(config: configs.Config, field: str, engine: str) -> None:
    assert judge(engine, Checkpoint(config), OTHER).answer in (REFUSED, PARTLY)
    without = {name: value for name, value in config.items() if name != field}
    if "text_config" in config:
        without["text_config"] = {
            name: value for name, value in config["text_config"].items() if name != field
        }
    assert judge(engine, Checkpoint(without), OTHER).answer == SERVED


def test_the_way_out_is_that_of_the_start() -> None:
    """The adapters refuse such a model once it is built, with the same advice."""
    (refusal,) = judge("vllm", Checkpoint(configs.STEP_5), OTHER).refusals
    with pytest.raises(RuntimeError) as raised:
        report_layers(0, {"THEIRS": ["layers.0"]}, None)  # type: ignore[arg-type]
    assert str(raised.value).endswith(refusal.way_out)
