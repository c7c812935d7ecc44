"""Models that ship, models made from only a config, and unknown names."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from integration.model import REPOSITORY, resolve_model
from integration.smollm2 import add_heads, leave_out_layer


def test_a_config_without_weights_gets_a_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_BACKEND_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"vocab_size": 300, "bos_token_id": 298, "eos_token_id": [299, 1]})
    )
    model = resolve_model(str(folder), sys.executable)
    assert (model.name, model.random_weights) == ("tiny", True)
    assert json.loads((model.folder / "tokenizer_config.json").read_text())["eos_token"] == "t299"
    assert (model.folder / "config.json").is_file()
    assert not (folder / "tokenizer.json").exists()


def test_the_llama_shape_ships():
    config = json.loads((REPOSITORY / "integration/models/llama-3.1-8b/config.json").read_text())
    assert (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        config["vocab_size"],
    ) == (32, 8, 128, 128256)


@pytest.mark.parametrize(
    ("name", "title", "command"),
    [
        ("smollm2", "SmolLM2-135M-Instruct", ["integration.gguf_models", "smollm2"]),
        ("Gemma3-270M", "Gemma 3 270M", ["integration.gguf_models", "gemma3-270m"]),
        (
            "smollm2-4-kv-heads",
            "SmolLM2-135M-Instruct, 4 KV heads",
            ["integration.smollm2", "--kv-heads", "4"],
        ),
    ],
)
def test_the_engines_interpreter_converts_models(name, title, command, monkeypatch, tmp_path):
    monkeypatch.setenv("ATTN_BACKEND_CACHE", str(tmp_path))
    asked = []
    monkeypatch.setattr(
        "integration.model.subprocess.run",
        lambda words, **_: asked.append(words) or subprocess.CompletedProcess(words, len(asked) > 1),
    )
    model = resolve_model(name, "python-of-engine")
    assert asked == [["python-of-engine", "-m", *command]]
    assert (model.name, model.folder.parent, model.random_weights) == (title, tmp_path / "models", False)
    with pytest.raises(RuntimeError, match=f"{title} could not be prepared"):
        resolve_model(name, "python-of-engine")
    model.folder.mkdir(parents=True)
    assert resolve_model(name, "python-of-engine") == model


def test_an_unknown_model_is_refused():
    with pytest.raises(ValueError, match="model: 'no-such-model'"):
        resolve_model("no-such-model", sys.executable)


def save_small_llama(transformers, folder, layers):
    shape = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "vocab_size": 100,
    }
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**shape, num_hidden_layers=layers, tie_word_embeddings=True)
    )
    model.save_pretrained(folder)
    return model


def test_added_heads_change_no_logits(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = save_small_llama(transformers, tmp_path / "model", layers=2)
    add_heads(tmp_path / "model", tmp_path / "more", 4)
    more = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "more")
    assert (more.config.num_attention_heads, more.config.num_key_value_heads, more.config.head_dim) == (
        8,
        4,
        8,
    )
    tokens = torch.randint(100, (2, 17))
    with torch.no_grad():
        torch.testing.assert_close(more(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="kv_heads: 2, must be at least the 3 of"):
        add_heads(tmp_path / "model", tmp_path / "fewer", 2)


def test_a_copy_lacks_one_layer(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = save_small_llama(transformers, tmp_path / "model", layers=3)
    leave_out_layer(tmp_path / "model", tmp_path / "draft", 1)
    draft = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "draft")
    del model.model.layers[1]
    model.model.layers[1].self_attn.layer_idx = 1
    tokens = torch.randint(100, (2, 17))
    with torch.no_grad():
        torch.testing.assert_close(draft(tokens).logits, model(tokens).logits, rtol=0, atol=0)
