"""Which of the engines' features work with this backend, and what shows it: the matrix of docs/engines.md."""

from __future__ import annotations

from dataclasses import dataclass

ADAPTERS = "tests/adapters"
TINY_MODELS = "tests/integration/test_tiny_models_cpu.py::test_answers_are_those_of_the_reference"
DRAFTS = "tests/integration/test_serving_cpu.py::test_drafts_change_no_token"
NO_OPTION = "has no such option"


@dataclass(frozen=True)
class Feature:
    """
    Attributes:
        vllm, sglang: "works", "refused", "not run", ... and what is to be said of it.
        vllm_shown, sglang_shown: what shows it: tests (FILE::NAME), runs of `integration.features.serve`, or programs that are run by hand (FILE).
    """

    name: str
    vllm: str
    sglang: str
    vllm_shown: tuple[str, ...] = ()
    sglang_shown: tuple[str, ...] = ()


FEATURES = (
    Feature("tensor parallel 2", "works", "works", ("vllm-tensor-parallel",), ("sglang-tensor-parallel",)),
    Feature("pipeline parallel 2", "works; on a CPU not with `--enforce-eager`", "works", ("vllm-pipeline",), ("sglang-pipeline",)),
    Feature("data parallel 2", "works", "works", ("vllm-data-parallel",), ("sglang-data-parallel",)),
    Feature(
        "decode context parallel 2",
        "works in the adapter; refused on CPUs",
        "refused",
        (f"{ADAPTERS}/vllm/test_vllm_dcp.py::test_random_batches", f"{ADAPTERS}/vllm/test_vllm_dcp.py::test_deployments_that_are_refused"),
        (f"{ADAPTERS}/sglang/test_sglang_support.py::test_refused_options",),
    ),
    Feature("multi-item scoring", NO_OPTION, "works", (), (TINY_MODELS,)),
    Feature("LoRA", "works", "tried once on a CPU (below)", ("vllm-tensor-parallel",)),
    Feature(
        "KV in host memory (OffloadingConnector, HiCache)",
        "not run: vLLM cannot on a CPU",
        "works in the adapter; SGLang cannot on a CPU",
        (),
        (f"{ADAPTERS}/sglang/test_sglang_backend.py::test_a_prefix_that_is_still_being_loaded",),
    ),
    Feature("KV connector to a folder (ExampleConnector)", "works", NO_OPTION, ("vllm-pipeline",)),
    Feature(
        "prefill and decode on two servers (PD)",
        "works, through NIXL",
        "not run: SGLang cannot on a CPU, whose transfers want memory of a GPU",
        ("vllm-nixl",),
    ),
    Feature(
        "halves of a step that overlap (DBO, TBO)",
        "works in the adapter; vLLM cannot on a CPU",
        "works in the adapter",
        (f"{ADAPTERS}/vllm/test_vllm_attention.py::test_halves_of_a_step_that_overlap",),
        (f"{ADAPTERS}/sglang/test_sglang_backend.py::test_halves_of_a_step_that_overlap",),
    ),
    Feature(
        "full CUDA graphs",
        "works, any batch",
        "works: decode, verify and draft steps",
        (f"{ADAPTERS}/vllm/test_vllm_backend.py::test_every_batch_may_be_a_full_cuda_graph",),
        (f"{ADAPTERS}/sglang/test_sglang_backend.py::test_captured_decode",),
    ),
    Feature(
        "piecewise CUDA graphs",
        "works",
        "works",
        (f"{ADAPTERS}/vllm/test_vllm_attention.py::test_padding_of_a_piecewise_graph",),
        (f"{ADAPTERS}/sglang/test_sglang_backend.py::test_writes_into_the_buffer_that_the_engine_gives", "integration/sglang_attention_kit.py"),
    ),
    Feature(
        "`--disable-cascade-attn`",
        "says nothing: it is vLLM's default. `ATTN_BACKEND_CASCADE=0` is ours",
        "`ATTN_BACKEND_CASCADE=0`",
        (f"{ADAPTERS}/vllm/test_vllm_attention.py::test_what_the_environment_says",),
        (f"{ADAPTERS}/sglang/test_sglang_support.py::test_what_the_environment_says",),
    ),
    Feature("n-gram drafts", "works", "works, as trees", ("vllm-tensor-parallel",), (DRAFTS,)),
    Feature("draft models", "works", "works", ("vllm-draft-model",), (DRAFTS,)),
    Feature(
        "EAGLE and MTP chains",
        "works: EAGLE; MTP not run",
        "works in the adapter",
        ("vllm-eagle",),
        (f"{ADAPTERS}/sglang/test_sglang_trees.py::test_steps_of_a_draft_model",),
    ),
    Feature("trees of drafts", "has none", "works", (), (DRAFTS, f"{ADAPTERS}/sglang/test_sglang_trees.py::test_trees_are_verified")),
    Feature(
        "verification by `chain_speculative_sampling`",
        "not used: vLLM's rejection sampler verifies",
        "not used: SGLang verifies by itself",
        (f"{ADAPTERS}/vllm/test_vllm_sampler.py::test_v1_warm_up_and_speculative_decoding_stay_vllms",),
    ),
)


def matrix() -> str:
    """The features as a Markdown table, with what shows them."""
    lines = ["| feature | vLLM | shown by | SGLang | shown by |", "|---|---|---|---|---|"]
    for feature in FEATURES:
        cells = (feature.name, feature.vllm, _names(feature.vllm_shown), feature.sglang, _names(feature.sglang_shown))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _names(shown: tuple[str, ...]) -> str:
    """Tests by their names alone, which say more than their files do."""
    return ", ".join(f"`{name.rpartition('::')[2]}`" for name in shown)
