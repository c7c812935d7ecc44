"""examples/transformers_attention.py: greedy tokens in float32 equal those from transformers' own
attention."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
PATH = Path(__file__).resolve().parents[2] / "examples" / "transformers_attention.py"
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
MODELS = {
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "Mistral, window 16": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, sliding_window=16)
    ),
}
NEW_TOKENS = 10


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PATH.parent))
    module = import_module(PATH.stem)
    module.register()
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_tokens(example: ModuleType, name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    prompts = [torch.randint(1, SIZES["vocab_size"], (length,)).tolist() for length in example.PROMPT_LENS]
    expected = example.generated(model, prompts, "sdpa", NEW_TOKENS)
    assert len({token for tokens in expected for token in tokens}) > NEW_TOKENS, (
        "tokens that would not show a difference"
    )
    assert example.generated(model, prompts, "attn_backend", NEW_TOKENS) == expected
    assert example.generated(model, prompts[:1], "attn_backend", NEW_TOKENS) == expected[:1]
    if name == "Llama":
        assert example.generated_continuously(model, prompts, NEW_TOKENS) == expected
