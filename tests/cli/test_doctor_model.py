"""attn-backend doctor --model: the answer for a checkpoint's configuration, without an engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import model_configs as configs
import pytest

from attn_backend import releases
from attn_backend.adapters.checkpoint import PARTLY, REFUSED, SERVED, Checkpoint, NotAConfiguration
from attn_backend.cli import model
from attn_backend.cli.main import main
from attn_backend.releases import RELEASES

NEWEST = {engine: versions[-1] for engine, versions in RELEASES.items()}
OWN = "its own kernels run all"

# model, answer and a part of the first reason: in vLLM and in SGLang, on a GPU, with default options
GRID: dict[str, tuple[configs.Config, tuple[str, str], tuple[str, str]]] = {
    "Llama 3": (configs.LLAMA_3, (SERVED, ""), (SERVED, "")),
    "Gemma 2": (configs.GEMMA_2, (SERVED, ""), (SERVED, "")),
    "Gemma 3": (configs.GEMMA_3, (SERVED, ""), (SERVED, "")),
    "Gemma 4, small": (configs.gemma_4(None), (SERVED, ""), (SERVED, "")),
    "Gemma 4, large": (
        configs.gemma_4("vision"),
        (SERVED, ""),
        (REFUSED, "prompts that are computed in chunks"),
    ),
    "gpt-oss": (configs.GPT_OSS, (SERVED, ""), (SERVED, "")),
    "MiMo V2": (configs.MIMO_V2, (SERVED, ""), (SERVED, "")),
    "DeepSeek V2": (configs.DEEPSEEK_V2, (SERVED, ""), (SERVED, "")),
    "DeepSeek V3": (configs.DEEPSEEK_V3, (SERVED, ""), (SERVED, "")),
    "DeepSeek V3.2": (configs.DEEPSEEK_V32, (SERVED, ""), (SERVED, "")),
    "GLM 5": (configs.GLM_5, (SERVED, ""), (SERVED, "")),
    "GLM 5 Next": (configs.GLM_5_NEXT, (REFUSED, "rows of 512"), (REFUSED, "other widths than 512 + 64")),
    "DeepSeek V4": (configs.DEEPSEEK_V4, (REFUSED, OWN), (REFUSED, OWN)),
    "DeepSeek V4.1": (configs.DEEPSEEK_V41, (REFUSED, OWN), (REFUSED, "which SGLang does not have")),
    "MiniCPM 3": (configs.MINICPM_3, (SERVED, ""), (REFUSED, "latents of 256 + 32 columns")),
    "Qwen3-Next": (configs.QWEN_3_NEXT, (SERVED, ""), (SERVED, "")),
    "Qwen3.5": (configs.QWEN_3_5, (SERVED, ""), (SERVED, "")),
    "Qwen4-Exp": (configs.QWEN_4_EXP, (REFUSED, OWN), (REFUSED, OWN)),
    "Kimi Linear": (configs.KIMI_LINEAR, (SERVED, ""), (REFUSED, "latents in a HybridLinearKVPool")),
    "MiniMax M2": (configs.MINIMAX_M2, (SERVED, ""), (SERVED, "")),
    "MiniMax M3": (configs.MINIMAX_M3, (PARTLY, ""), (PARTLY, "")),
    "Step 5": (configs.STEP_5, (REFUSED, OWN), (REFUSED, "which SGLang does not have")),
    "HY V4": (configs.HY_V4, (REFUSED, OWN), (REFUSED, "attention sinks")),
    "dots3": (configs.DOTS_3, (REFUSED, OWN), (REFUSED, OWN)),
    "Inkling": (configs.INKLING, (REFUSED, OWN), (REFUSED, "only accepts fa4 and triton")),
    "openPangu with sinks": (configs.PANGU, (REFUSED, OWN), (REFUSED, "which SGLang does not have")),
    "Falcon-H1": (configs.FALCON_H1, (SERVED, ""), (SERVED, "")),
    "Granite 4": (configs.GRANITE_4, (SERVED, ""), (SERVED, "")),
    "Nemotron-H": (configs.NEMOTRON_H, (SERVED, ""), (SERVED, "")),
    "Nemotron-H, listed": (configs.NEMOTRON_H_LISTED, (SERVED, ""), (SERVED, "")),
    "LFM2": (configs.LFM_2, (SERVED, ""), (SERVED, "")),
    "Rnj-1": (configs.RNJ_1, (REFUSED, "chunk_lookback = 1"), (SERVED, "")),
    "BERT": (configs.BERT, (SERVED, ""), (REFUSED, "bidirectional prompts in chunks")),
    "EmbeddingGemma": (configs.EMBEDDING_GEMMA, (SERVED, ""), (SERVED, "")),
    "Mamba 2": (configs.MAMBA, (SERVED, ""), (REFUSED, "the attention architecture SSM")),
    "heads of 100 columns": (configs.ODD_HEADS, (REFUSED, "head size 100"), (REFUSED, "heads of 100/100")),
}
CASES = [
    pytest.param(config, engine, answer, id=f"{name}-{engine}")
    for name, (config, *answers) in GRID.items()
    for engine, answer in zip(RELEASES, answers, strict=True)
]


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    def save(config: configs.Config) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return save


@pytest.mark.parametrize(("config", "engine", "expected"), CASES)
def test_answers(config: configs.Config, engine: str, expected: tuple[str, str]) -> None:
    verdict = model.judge(Checkpoint(config), engine, NEWEST[engine])
    answer, reason = expected
    assert verdict.answer == answer, verdict
    if answer == REFUSED:
        assert reason in verdict.refusals[0].what
        assert all(refusal.way_out for refusal in verdict.refusals)
    else:
        assert not verdict.refusals
        assert sorted({*verdict.ours, *verdict.others}) == [
            layer.index for layer in Checkpoint(config).layers
        ]
        assert bool(verdict.others) == (answer == PARTLY)


@pytest.mark.parametrize(
    ("config", "numbers"),
    [
        (configs.QWEN_3_NEXT, [3, 7]),
        (configs.QWEN_3_5, [3, 7]),
        (configs.KIMI_LINEAR, [3, 7]),
        (configs.GRANITE_4, [1, 3, 5, 7]),
        (configs.NEMOTRON_H, [3, 7]),
        (configs.LFM_2, [1, 3, 5, 7]),
        (configs.FALCON_H1, list(range(8))),
        (configs.MINIMAX_M2, list(range(8))),
        (configs.MAMBA, []),
    ],
    ids=lambda value: value["architectures"][0] if isinstance(value, dict) else "",
)
def test_layers_with_attention(config: configs.Config, numbers: list[int]) -> None:
    assert [layer.index for layer in Checkpoint(config).layers] == numbers


def test_each_kind_of_layer_has_its_heads() -> None:
    assert [str(layer.heads) for layer in Checkpoint(configs.gemma_4(None)).layers] == ["256", "512"] * 4
    assert {str(layer.heads) for layer in Checkpoint(configs.MIMO_V2).layers} == {"192_128"}
    assert {str(layer.heads) for layer in Checkpoint(configs.DEEPSEEK_V3).layers} == {"192_128"}
    assert {str(layer.heads) for layer in Checkpoint(configs.BERT).layers} == {"64"}


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (configs.gemma_4("vision"), "--chunked-prefill-size -1"),
        (configs.gemma_4("vision"), """--json-model-override-args '{"language_model_only": true}'"""),
        (configs.BERT, "--chunked-prefill-size=-1 --disable-radix-cache"),
        (configs.GEMMA_3, "--enable-multimodal --chunked_prefill_size -1"),
    ],
)
def test_a_way_out_leads_out(config: configs.Config, options: str) -> None:
    parsed = model.parse_options(options)
    assert model.judge(Checkpoint(config), "sglang", NEWEST["sglang"], "cuda", parsed).answer == SERVED
    if "enable-multimodal" in parsed:
        del parsed["chunked-prefill-size"]
        assert model.judge(Checkpoint(config), "sglang", NEWEST["sglang"], "cuda", parsed).answer == REFUSED


def test_all_reasons_are_told() -> None:
    verdict = model.judge(Checkpoint(configs.BERT), "sglang", NEWEST["sglang"])
    assert [refusal.way_out for refusal in verdict.refusals] == [
        "pass --chunked-prefill-size -1",
        "pass --disable-radix-cache",
    ]


@pytest.mark.parametrize(
    ("engine", "release", "config", "options", "answer"),
    [
        ("sglang", "0.5.21", configs.LLAMA_3, "", REFUSED),
        ("sglang", "0.5.22", configs.LLAMA_3, "", SERVED),
        ("sglang", "0.5.23", configs.DEEPSEEK_V32, "", REFUSED),
        ("vllm", "0.33.0", configs.DEEPSEEK_V32, "", REFUSED),
        ("vllm", "0.33.0", configs.DEEPSEEK_V3, "", SERVED),
        ("vllm", "0.33.0", configs.GEMMA_3, "", REFUSED),
        ("vllm", "0.33.0", configs.GEMMA_3, "--disable-chunked-mm-input", SERVED),
        ("vllm", "0.33.0", configs.gemma_4("vision"), "", REFUSED),
        ("vllm", "0.33.0", configs.gemma_4(None), "", SERVED),
    ],
)
def test_answers_on_a_cpu(
    engine: str, release: str, config: configs.Config, options: str, answer: str
) -> None:
    verdict = model.judge(Checkpoint(config), engine, release, "cpu", model.parse_options(options))
    assert verdict.answer == answer


@pytest.mark.parametrize(
    ("engine", "config", "cache", "answer"),
    [
        ("vllm", configs.LLAMA_3, "fp8_e5m2", SERVED),
        ("vllm", configs.LLAMA_3, "nvfp4", SERVED),
        ("vllm", configs.LLAMA_3, "nvfp4_4over6", REFUSED),
        ("vllm", configs.LLAMA_3, "fp8_ds_mla", REFUSED),
        ("vllm", configs.LLAMA_3, "int8_per_token_head", SERVED),
        ("vllm", configs.LLAMA_3, "int4_per_token_head", SERVED),
        ("vllm", configs.gemma_4(None), "int8_per_token_head", REFUSED),
        ("vllm", configs.gemma_4(None), "fp8", SERVED),
        ("vllm", configs.DEEPSEEK_V3, "fp8_per_token_head", REFUSED),
        ("vllm", configs.DEEPSEEK_V3, "fp8", SERVED),
        ("vllm", configs.DEEPSEEK_V3, "fp8_e5m2", REFUSED),
        ("vllm", configs.DEEPSEEK_V3, "fp8_ds_mla", REFUSED),
        ("vllm", configs.DEEPSEEK_V32, "fp8_ds_mla", SERVED),
        ("sglang", configs.LLAMA_3, "fp8_e4m3", SERVED),
        ("sglang", configs.LLAMA_3, "mxfp8", REFUSED),
        ("sglang", configs.LLAMA_3, "nvfp4", REFUSED),
        ("sglang", configs.LLAMA_3, "fp4_mx_block16", SERVED),
        ("sglang", configs.LLAMA_3 | {"head_dim": 96}, "fp4_mx_block16", REFUSED),
        ("sglang", configs.GEMMA_2, "fp4_mx_block16", SERVED),
        ("sglang", configs.DEEPSEEK_V3, "fp4_mx_block16", REFUSED),
        ("sglang", configs.GPT_OSS, "fp4_mx_block16", REFUSED),
        ("sglang", configs.LLAMA_3 | {"is_hybrid_swa": True}, "fp4_mx_block16", REFUSED),
    ],
)
def test_caches(engine: str, config: configs.Config, cache: str, answer: str) -> None:
    options = {"kv-cache-dtype": cache}
    assert model.judge(Checkpoint(config), engine, NEWEST[engine], "cuda", options).answer == answer


@pytest.mark.parametrize(
    ("config", "device", "options", "refusals"),
    [
        (configs.GPT_OSS, "cuda", "--disable-hybrid-swa-memory", []),
        (configs.LLAMA_3, "cuda", "--disaggregation-mode null", []),
        (configs.LLAMA_3, "cuda", "--enable-hierarchical-cache", ["leave out --enable-hierarchical-cache"]),
        (configs.LLAMA_3, "cuda", "--disaggregation-mode decode", ["leave out --disaggregation-mode"]),
        (
            configs.LLAMA_3,
            "cuda",
            "--speculative-algorithm DFLASH",
            ["pass --speculative-draft-kv-cache-dtype bfloat16 (from 0.5.18 on)"],
        ),
        (
            configs.LLAMA_3,
            "cuda",
            "--speculative-algorithm DFLASH --speculative-draft-kv-cache-dtype bfloat16",
            [],
        ),
        (configs.LLAMA_3, "cuda", "--radix-cache-backend flexkv", ["leave out --radix-cache-backend"]),
        (configs.LLAMA_3, "cpu", "", ["pass --kv-cache-dtype auto"]),
        (configs.DEEPSEEK_V3, "cuda", "", ["pass --kv-cache-dtype fp8_e4m3"]),
        (configs.MIMO_V2, "cuda", "", ["pass --disable-hybrid-swa-memory", "pass --kv-cache-dtype fp8_e4m3"]),
    ],
)
def test_fp4_in_sglang(config: configs.Config, device: str, options: str, refusals: list[str]) -> None:
    parsed = model.parse_options(f"--kv-cache-dtype fp4_mx_block16 {options}")
    verdict = model.judge(Checkpoint(config), "sglang", NEWEST["sglang"], device, parsed)
    assert [refusal.way_out for refusal in verdict.refusals] == refusals
    assert verdict.answer == (REFUSED if refusals else SERVED)


LAYERS_OF_MISTRAL = {"sliding_window": 4096}  # of all layers, whose kinds have no names
LAYERS_OF_QWEN_2 = {"sliding_window": 32768, "use_sliding_window": False}


@pytest.mark.parametrize(
    ("config", "cache", "release", "answer"),
    [
        (configs.GPT_OSS, "int4_per_token_head", "0.26.0", REFUSED),
        (configs.GPT_OSS, "int4_per_token_head", "0.27.1", REFUSED),
        (configs.GPT_OSS, "int4_per_token_head", "0.28.0", SERVED),
        (configs.GPT_OSS, "int8_per_token_head", "0.26.0", SERVED),
        (configs.GEMMA_2, "int4_per_token_head", "0.27.0", REFUSED),
        (configs.LLAMA_3, "int4_per_token_head", "0.26.0", SERVED),
        (configs.LLAMA_3 | LAYERS_OF_MISTRAL, "int4_per_token_head", "0.26.0", REFUSED),
        (configs.LLAMA_3 | LAYERS_OF_QWEN_2, "int4_per_token_head", "0.26.0", SERVED),
    ],
)
def test_int4_with_windows(config: configs.Config, cache: str, release: str, answer: str) -> None:
    verdict = model.judge(Checkpoint(config), "vllm", release, "cuda", {"kv-cache-dtype": cache})
    assert verdict.answer == answer
    for refusal in verdict.refusals:
        assert refusal.what == f"a KV cache of dtype {cache} in a layer with a sliding window"
        assert refusal.way_out.startswith("use vLLM 0.28 or later")


@pytest.mark.parametrize(
    ("config", "status", "text"),
    [
        (configs.LLAMA_3, 0, "served: all 8 attention layers (0-7)"),
        (
            configs.DEEPSEEK_V4,
            1,
            "refused: DeepseekV4ForCausalLM: its own kernels run all 8 attention layers",
        ),
        (
            configs.MINIMAX_M3,
            3,
            "partly ours: 3 of 8 attention layers (0-2). The model's own kernels run the others (3-7)",
        ),
    ],
)
def test_exit_status(
    config: configs.Config, status: int, text: str, saved: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["doctor", "--model", saved(config), "--engine", "vllm", "--release", "0.33.0"]
    assert main(command) == status
    assert text in capsys.readouterr().out
    assert main([*command, "--json"]) == status
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == config["architectures"][0]
    assert [found["answers"][0][name] for name in ("engine", "release", "device", "text")] == [
        *("vllm", "0.33.0", "cuda"),
        text,
    ]


def test_the_worst_of_several_answers_is_the_status(monkeypatch: pytest.MonkeyPatch, saved: Any) -> None:
    monkeypatch.setattr(model, "installed_release", lambda engine: None)
    assert main(["doctor", "--model", saved(configs.RNJ_1)]) == 1, "refused only in vLLM"
    assert main(["doctor", "--model", saved(configs.RNJ_1), "--engine", "sglang"]) == 0


def test_engines_that_are_answered_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "installed_release", {"sglang": "0.5.20"}.get)
    assert model.engines(None, None) == [("sglang", "0.5.20")]
    assert model.engines("vllm", None) == [("vllm", NEWEST["vllm"])]
    assert model.engines("sglang", "0.5.18") == [("sglang", "0.5.18")]
    monkeypatch.setattr(model, "installed_release", lambda engine: None)
    assert model.engines(None, None) == list(NEWEST.items())


def test_usage(saved: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", saved(configs.LLAMA_3), "--engine", "vllm"]) == 0
    assert "-> --attention-backend CUSTOM\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "mark", "status"),
    [(configs.LLAMA_3, "[--]", 4), (configs.MINIMAX_M3, "[--]", 4), (configs.ODD_HEADS, "[!!]", 1)],
)
@pytest.mark.parametrize("release", ["0.25.0", "0.33.1", "0.99.0"])
def test_unsupported_releases_are_no_success(
    config: configs.Config,
    mark: str,
    status: int,
    release: str,
    saved: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["doctor", "--model", saved(config), "--engine", "vllm", "--release", release]
    assert main(command) == status
    printed = capsys.readouterr().out
    assert next(line for line in printed.splitlines() if f"vllm {release}" in line).startswith(mark)
    assert f"{release} is not supported, {RELEASES['vllm'][0]} to {NEWEST['vllm']} are" in printed
    assert main([*command, "--json"]) == status
    assert not json.loads(capsys.readouterr().out)["answers"][0]["supported_release"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "nowhere"], "nowhere cannot be read"),
        (["--model", __file__], f"{__file__} cannot be read"),
        (["--release", "0.33.0"], "--release 0.33.0 needs --engine"),
        (["--server-args", "8"], "'8' follows no option"),
        (["--server-args", "--a 'b"], '--server-args is "--a \'b": No closing quotation'),
        (
            ["--engine", "sglang", "--server-args", "--chunked-prefill-size abc"],
            "--chunked-prefill-size is 'abc', must be an integer",
        ),
    ],
)
def test_wrong_arguments(
    arguments: list[str], text: str, saved: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--model", saved(configs.LLAMA_3), *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ("--kv-cache-dtype fp4_e2m1", "--kv-cache-dtype fp4_e2m1: use one of auto, bf16"),
        ("--speculative-algorithm dspark", "--speculative-algorithm DSPARK: use one of EAGLE"),
        ("--enable-unified-memory", "--enable-unified-memory: leave it out"),
        ("--dcp-size=2", "--dcp-size 2: pass --dcp-size 1"),
        ("--speculative-algorithm EAGLE3 --dcp-size 1 --kv-cache-dtype fp8_e5m2", ""),
    ],
)
def test_options_of_sglang(
    options: str, refused: str, saved: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["doctor", "--model", saved(configs.LLAMA_3), "--engine", "sglang", "--server-args", options]
    assert main(arguments) == (1 if refused else 0)
    what, _, advice = refused.partition(": ")
    printed = capsys.readouterr().out
    assert what in printed
    assert advice in printed


def test_one_flag_of_a_server(saved: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["doctor", "--model", saved(configs.LLAMA_3), "--engine", "sglang"]
    assert main([*arguments, "--server-args", "--enable-mis"]) == 0
    assert "served" in capsys.readouterr().out


@pytest.mark.parametrize("config", [{}, {"architectures": []}, {"hidden_size": 1}])
def test_no_configuration(config: configs.Config) -> None:
    with pytest.raises(NotAConfiguration, match="no architectures"):
        Checkpoint(config)


def test_no_engine_is_imported(saved: Any) -> None:
    """Both adapters answer in a process that must not import an engine."""
    script = (
        "import sys; sys.modules.update(vllm=None, sglang=None)\n"
        "from attn_backend.cli.main import main\n"
        f"sys.exit(main(['doctor', '--model', {saved(configs.MINIMAX_M3)!r}, '--engine', sys.argv[1]]))"
    )
    for engine in RELEASES:
        assert subprocess.run([sys.executable, "-c", script, engine], check=False).returncode == 3


def test_older_releases() -> None:
    assert releases.is_before("0.31.0", "0.32.0")
    assert releases.is_before("0.9.2", "0.32.0")
    assert not releases.is_before("0.32.0+cpu", "0.32.0")
    assert not releases.is_before("0.33.0rc1", "0.32.0")


@pytest.mark.parametrize(
    ("head_dim", "device", "is_told"), [(80, "cuda", True), (80, "cpu", False), (96, "cuda", False)]
)
def test_heads_whose_kernels_are_compiled_are_told(head_dim: int, device: str, is_told: bool) -> None:
    checkpoint = Checkpoint(configs.LLAMA_3 | {"head_dim": head_dim})
    notes = model.judge(checkpoint, "vllm", NEWEST["vllm"], device).notes
    assert any("no kernels for heads of 80" in note and "needs nvcc" in note for note in notes) == is_told


def test_classes_that_the_installed_engine_lacks_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, saved: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    registry = tmp_path / "packages" / "vllm" / "model_executor" / "models" / "registry.py"
    registry.parent.mkdir(parents=True)
    registry.write_text('{"LlamaForCausalLM": ("llama", "LlamaForCausalLM")}')
    (tmp_path / "packages" / "vllm" / "__init__.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(model, "installed_release", {"vllm": "0.33.0"}.get)
    for config, is_known in ((configs.LLAMA_3, True), (configs.GEMMA_2, False)):
        assert main(["doctor", "--model", saved(config)]) == 0
        assert ("has no class Gemma2ForCausalLM" in capsys.readouterr().out) != is_known
    assert main(["doctor", "--model", saved(configs.GEMMA_2), "--engine", "vllm", "--release", "0.32.0"]) == 0
    assert "has no class" not in capsys.readouterr().out, "another release than the installed one"
