"""The runs of `integration.features.serve`: the engine features of each server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

ON_BOTH = ("cpu", "cuda")


@dataclass(frozen=True)
class Run:
    """
    Attributes:
        arguments: of the server. {folder} is the models' folder, {scratch} an empty one, {port} a free port,
            the same for all servers of a run.
        on: additional arguments, only on that device.
        asks: the requested models of integration/features/model.py, one after the other, all on one server;
            "adapter" is "model" with LoRA.
        counts: a counter of the server, and perhaps one of its labels. It must not be 0 in the end, which
            shows that the feature was in use.
        logs: a regular expression that its log must match in the end, for the same purpose.
        environment: of the server.
        package: required by the engine.
        prefill: arguments (instead of `arguments`) of another server that computes the prompts: the server
            gets their KV from it.
        ranks: number of GPUs that it takes on GPUs.
        since: the engine's first release with the feature on this backend; None: all known releases.
        devices: the devices on which the engine has the feature.
    """

    engine: str
    arguments: tuple[str, ...]
    on: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    asks: tuple[str, ...] = ("model",)
    counts: tuple[str, ...] | None = None
    logs: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    package: str | None = None
    prefill: tuple[str, ...] | None = None
    ranks: int = 1
    since: str | None = None
    devices: tuple[str, ...] = ON_BOTH


def _connector(name: str, **more: object) -> tuple[str, str]:
    return "--kv-transfer-config", json.dumps({"kv_connector": name, "kv_role": "kv_both", **more})


def _drafts(**config: object) -> tuple[str, str]:
    return "--speculative-config", json.dumps(config)


def _draft_model(**config: object) -> tuple[str, str]:
    """Also selects this backend for the draft: for most drafts vLLM would choose one by itself."""
    return _drafts(attention_backend="CUSTOM", **config)


def _drafts_in_sglang(algorithm: str, draft: str, tokens: int = 4, branches: int = 1) -> tuple[str, ...]:
    """Three steps; DFLASH uses one.

    SGLang counts verified drafts only with metrics enabled.
    """
    steps = (
        "--speculative-num-steps",
        "3",
        "--speculative-eagle-topk",
        str(branches),
        "--speculative-num-draft-tokens",
        str(tokens),
    )
    return (
        "--speculative-algorithm",
        algorithm,
        "--speculative-draft-model-path",
        draft,
        *steps,
        "--enable-metrics",
    )


def _transfers(role: str) -> tuple[str, ...]:
    return (
        "--disaggregation-mode",
        role,
        "--disaggregation-transfer-backend",
        "nixl",
        "--disaggregation-bootstrap-port",
        "{port}",
    )


DCP = ("--tensor-parallel-size", "2", "--decode-context-parallel-size", "2")
LORA = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", "adapter={folder}/adapter")
LORA_IN_SGLANG = ("--enable-lora", "--lora-paths", "adapter={folder}/adapter")
# vLLM makes the buffers between pipeline stages during warm-up, which --enforce-eager skips on a CPU. Mode 1
# is only torch.compile.
PIPELINE_ON_CPU = ("--no-enforce-eager", "--compilation-config", '{"mode": 1}')
# The connector writes when the prompts first arrive, and reads when they arrive again.
FOLDER_STORE = (
    "--no-enable-prefix-caching",
    *_connector("ExampleConnector", kv_connector_extra_config={"shared_storage_path": "{scratch}"}),
)
# The GPU has room for 512 tokens. Prompts and answers, not counting shared parts, have more than 700.
OFFLOADING = (
    "--kv-offloading-size",
    "1",
    "--kv-offloading-backend",
    "native",
    "--num-gpu-blocks-override",
    "32",
)
HICACHE = (
    "--enable-hierarchical-cache",
    "--hicache-ratio",
    "4",
    "--max-total-tokens",
    "512",
    "--enable-metrics",
)
NIXL = {"cpu": _connector("NixlConnector", kv_buffer_device="cpu"), "cuda": _connector("NixlConnector")}
NGRAM = _drafts(method="ngram", num_speculative_tokens=4, prompt_lookup_max=4, prompt_lookup_min=1)
NGRAM_IN_SGLANG = (
    "--speculative-algorithm",
    "NGRAM",
    "--speculative-num-draft-tokens",
    "8",
    "--enable-metrics",
)
# A draft with windows in some layers needs vLLM's second model runner, which needs Triton, and a CPU has
# none.
DFLASH = {
    "cpu": _draft_model(method="dflash", model="{folder}/dflash-windows", num_speculative_tokens=3),
    "cuda": _draft_model(method="dflash", model="{folder}/dflash", num_speculative_tokens=3),
}
ACCEPTED = ("vllm:spec_decode_num_accepted_tokens_total",)
DRAFTED = ("vllm:spec_decode_num_draft_tokens_total",)
DFLASH_ON_OURS = r"DFLASH draft runner\. attention_backend=attn_backend"
VERIFIED = ("sglang:spec_verify_calls_total",)
FROM_ELSEWHERE = ("vllm:external_prefix_cache_hits_total",)
FROM_THE_HOST = ("sglang:cached_tokens_total", 'cache_source="host"')

# The checkpoint declares the cache's type.
FLOAT8_CACHE = r"kv_cache_dtype=fp8"
FLOAT8_CACHE_IN_SGLANG = r"KV Cache is allocated\. dtype: torch\.float8_e4m3fn"
FUSED = (
    "--compilation-config",
    '{"mode": 3, "pass_config": {"fuse_attn_quant": true}, "cudagraph_mode": "FULL_DECODE_ONLY"}',
)
FUSED_OUTPUTS = r"fusion pass matches: .*'attn_quant_fusion': [1-9]"

RUNS: dict[str, Run] = {
    "vllm-tensor-parallel": Run(
        "vllm",
        ("--tensor-parallel-size", "2", *LORA, *NGRAM),
        asks=("model", "adapter"),
        counts=ACCEPTED,
        ranks=2,
    ),
    "vllm-tensor-parallel-mla": Run("vllm", ("--tensor-parallel-size", "2"), asks=("deepseek",), ranks=2),
    "vllm-pipeline": Run(
        "vllm",
        ("--pipeline-parallel-size", "2", *FOLDER_STORE),
        on={"cpu": PIPELINE_ON_CPU},
        asks=("model", "model"),
        counts=FROM_ELSEWHERE,
        ranks=2,
    ),
    "vllm-decode-context-parallel": Run(
        "vllm", DCP, asks=("one-kv-head", "one-kv-head"), ranks=2, devices=("cuda",)
    ),
    # New prompts are decompressed. When repeated, they follow a cached prefix, whose latents all ranks
    # gather.
    "vllm-decode-context-parallel-mla": Run(
        "vllm", DCP, asks=("deepseek", "deepseek"), ranks=2, devices=("cuda",)
    ),
    "vllm-data-parallel": Run("vllm", ("--data-parallel-size", "2"), ranks=2),
    "vllm-lora": Run("vllm", LORA, asks=("model", "adapter")),
    "vllm-ngram": Run("vllm", NGRAM, counts=ACCEPTED),
    "vllm-folder": Run("vllm", FOLDER_STORE, asks=("model", "model"), counts=FROM_ELSEWHERE),
    "vllm-offloading": Run(
        "vllm", OFFLOADING, asks=("model", "model"), counts=FROM_ELSEWHERE, devices=("cuda",)
    ),
    "vllm-nixl": Run("vllm", (), on=NIXL, counts=FROM_ELSEWHERE, package="nixl", prefill=()),
    "vllm-draft-model": Run(
        "vllm",
        _draft_model(method="draft_model", model="{folder}/model", num_speculative_tokens=3),
        counts=ACCEPTED,
    ),
    "vllm-eagle": Run(
        "vllm", _draft_model(method="eagle", model="{folder}/eagle", num_speculative_tokens=3), counts=DRAFTED
    ),
    "vllm-mtp": Run(
        "vllm", _draft_model(method="mtp", num_speculative_tokens=2), asks=("mimo",), counts=DRAFTED
    ),
    "vllm-dflash": Run("vllm", (), on=DFLASH, counts=DRAFTED),
    "vllm-float8-cache": Run("vllm", (), asks=("float8-cache", "float8-cache"), logs=FLOAT8_CACHE),
    # the second time the KV comes from files
    "vllm-token-scales": Run(
        "vllm",
        ("--kv-cache-dtype", "int8_per_token_head", *FOLDER_STORE),
        asks=("token-scales-int8", "token-scales-int8"),
        counts=FROM_ELSEWHERE,
        logs="kv_cache_dtype=int8_per_token_head",
    ),
    "vllm-token-scales-float8": Run(
        "vllm",
        ("--kv-cache-dtype", "fp8_per_token_head"),
        asks=("token-scales-float8", "token-scales-float8"),
        logs="kv_cache_dtype=fp8_per_token_head",
    ),
    "vllm-float8-outputs": Run("vllm", (), asks=("float8-outputs",), logs=FLOAT8_CACHE, devices=("cuda",)),
    "vllm-fused-outputs": Run(
        "vllm",
        FUSED,
        asks=("float8-outputs",),
        logs=FUSED_OUTPUTS,
        environment={"VLLM_LOGGING_LEVEL": "DEBUG"},
        devices=("cuda",),
    ),
    "sglang-float8-cache": Run(
        "sglang", (), asks=("float8-cache", "float8-cache"), logs=FLOAT8_CACHE_IN_SGLANG, devices=("cuda",)
    ),
    "sglang-tensor-parallel": Run("sglang", ("--tp-size", "2"), ranks=2),
    # New prompts are decompressed; when repeated, from the cache, they stay in latents. On a CPU vLLM caches
    # no latents.
    "sglang-tensor-parallel-mla": Run("sglang", ("--tp-size", "2"), asks=("deepseek", "deepseek"), ranks=2),
    "sglang-pipeline": Run("sglang", ("--pp-size", "2"), ranks=2),
    "sglang-data-parallel": Run("sglang", ("--dp-size", "2"), ranks=2),
    "sglang-lora": Run(
        "sglang", LORA_IN_SGLANG, on={"cpu": ("--lora-backend", "torch_native")}, asks=("model", "adapter")
    ),
    "sglang-ngram": Run("sglang", NGRAM_IN_SGLANG, counts=VERIFIED),
    "sglang-standalone": Run("sglang", _drafts_in_sglang("STANDALONE", "{folder}/model"), counts=VERIFIED),
    "sglang-standalone-tree": Run(
        "sglang", _drafts_in_sglang("STANDALONE", "{folder}/model", tokens=8, branches=2), counts=VERIFIED
    ),
    "sglang-eagle": Run("sglang", _drafts_in_sglang("EAGLE", "{folder}/eagle-sglang"), counts=VERIFIED),
    "sglang-dflash": Run(
        "sglang",
        _drafts_in_sglang("DFLASH", "{folder}/dflash"),
        counts=VERIFIED,
        logs=DFLASH_ON_OURS,
        since="0.5.20",
    ),
    # The text of SGLang's warm-up has no token in this model's tokenizer, and a step without tokens ends
    # SGLang.
    "sglang-mtp": Run(
        "sglang",
        (*_drafts_in_sglang("NEXTN", "{folder}/mimo"), "--skip-server-warmup"),
        asks=("mimo",),
        counts=VERIFIED,
    ),
    "sglang-hicache": Run(
        "sglang", HICACHE, asks=("model", "model"), counts=FROM_THE_HOST, devices=("cuda",)
    ),
    "sglang-nixl": Run(
        "sglang", _transfers("decode"), package="nixl", prefill=_transfers("prefill"), devices=("cuda",)
    ),
}
