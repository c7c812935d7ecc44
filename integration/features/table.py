"""The engine features that work with this backend: the matrix of docs/engines.md.

It is built from the last results of tests and servers (integration/features/outcomes.py).

python -m integration.features.table            # prints it
"""

from __future__ import annotations

from dataclasses import dataclass

from integration.features.outcomes import DEVICE_NAMES, ENGINE_NAMES, Outcomes, Seen, read_outcomes

ADAPTERS = "tests/adapters"
TINY_MODELS = "tests/integration/test_tiny_models_cpu.py::test_answers_are_those_of_the_reference"
DRAFTS = "tests/integration/test_serving_cpu.py::test_drafts_change_no_token"


@dataclass(frozen=True)
class Cell:
    """
    Attributes:
        shown: its evidence: runs of `integration.features.serve`, and tests (FILE::NAME).
        says: the entry if all of these succeeded on the devices where they ran; without any, always.
        no_cpu: why a CPU cannot show a feature that runs only on GPUs.
        option: the engine's option that enables it; for drafts, the method or algorithm.
    """

    shown: tuple[str, ...] = ()
    says: str = "works"
    no_cpu: str = ""
    option: str = ""


@dataclass(frozen=True)
class Feature:
    name: str
    vllm: Cell
    sglang: Cell

    def cell(self, engine: str) -> Cell:
        return self.vllm if engine == "vllm" else self.sglang


NO_OPTION = Cell(says="has no such option")
TP, TP_IN_SGLANG, DCP = "--tensor-parallel-size", "--tp-size", "--decode-context-parallel-size"


FEATURES: tuple[Feature, ...] = (
    Feature(
        "tensor parallel 2",
        Cell(("vllm-tensor-parallel",), option=TP),
        Cell(("sglang-tensor-parallel",), option=TP_IN_SGLANG),
    ),
    Feature(
        "tensor parallel 2, MLA",
        Cell(("vllm-tensor-parallel-mla",), option=TP),
        Cell(("sglang-tensor-parallel-mla",), option=TP_IN_SGLANG),
    ),
    Feature(
        "pipeline parallel 2",
        Cell(
            ("vllm-pipeline",),
            "works; on a CPU not with `--enforce-eager`",
            option="--pipeline-parallel-size",
        ),
        Cell(("sglang-pipeline",), option="--pp-size"),
    ),
    Feature(
        "data parallel 2",
        Cell(("vllm-data-parallel",), option="--data-parallel-size"),
        Cell(("sglang-data-parallel",), option="--dp-size"),
    ),
    Feature(
        "decode context parallel 2",
        Cell(
            (
                "vllm-decode-context-parallel",
                f"{ADAPTERS}/vllm/test_vllm_dcp.py::test_random_batches",
                f"{ADAPTERS}/vllm/test_vllm_dcp.py::test_deployments_that_are_refused",
            ),
            "works; refused on CPUs",
            option=DCP,
        ),
        Cell((f"{ADAPTERS}/sglang/test_sglang_support.py::test_refused_options",), "refused: `--dcp-size 1`"),
    ),
    Feature(
        "decode context parallel 2, MLA",
        Cell(
            (
                "vllm-decode-context-parallel-mla",
                f"{ADAPTERS}/vllm/test_vllm_dcp.py::test_deployments_that_are_refused",
            ),
            "works; refused on CPUs",
            option=DCP,
        ),
        Cell((f"{ADAPTERS}/sglang/test_sglang_support.py::test_refused_options",), "refused: `--dcp-size 1`"),
    ),
    Feature("multi-item scoring", NO_OPTION, Cell((TINY_MODELS,), option="--enable-mis")),
    Feature(
        "LoRA", Cell(("vllm-lora",), option="--enable-lora"), Cell(("sglang-lora",), option="--enable-lora")
    ),
    Feature(
        "KV in host memory (OffloadingConnector, HiCache)",
        Cell(
            ("vllm-offloading",),
            no_cpu="`vllm/v1/kv_offload/cpu/spec.py` (0.32) wants a GPU",
            option="--kv-offloading-size",
        ),
        Cell(
            (
                f"{ADAPTERS}/sglang/test_sglang_backend.py::test_a_prefix_that_is_still_being_loaded",
                "sglang-hicache",
            ),
            no_cpu="it asks CUDA's runtime to pin memory, `sglang/srt/mem_cache/pool_host/common.py` "
            "(0.5.23)",
            option="--enable-hierarchical-cache",
        ),
    ),
    Feature(
        "KV connector to a folder (ExampleConnector)",
        Cell(("vllm-pipeline", "vllm-folder"), option="--kv-transfer-config"),
        NO_OPTION,
    ),
    Feature(
        "prefill and decode on two servers (PD)",
        Cell(("vllm-nixl",), "works, through NIXL", option="--kv-transfer-config"),
        Cell(
            ("sglang-nixl",),
            "works, through NIXL",
            no_cpu="`sglang/srt/disaggregation/nixl/conn.py` (0.5.23) takes the memory of pools for that of "
            "a GPU",
            option="--disaggregation-mode",
        ),
    ),
    Feature(
        "halves of a step that overlap (DBO, TBO)",
        Cell(
            (f"{ADAPTERS}/vllm/test_vllm_attention.py::test_halves_of_a_step_that_overlap",),
            "works in the adapter; vLLM cannot on a CPU",
            option="--enable-dbo",
        ),
        Cell(
            (f"{ADAPTERS}/sglang/test_sglang_backend.py::test_halves_of_a_step_that_overlap",),
            "works in the adapter",
            option="--enable-two-batch-overlap",
        ),
    ),
    Feature(
        "full CUDA graphs",
        Cell(
            (f"{ADAPTERS}/vllm/test_vllm_backend.py::test_every_batch_may_be_a_full_cuda_graph",),
            "works, any batch",
        ),
        Cell(
            (f"{ADAPTERS}/sglang/test_sglang_backend.py::test_captured_decode",),
            "works: decode, verify and draft steps",
        ),
    ),
    Feature(
        "piecewise CUDA graphs",
        Cell((f"{ADAPTERS}/vllm/test_vllm_attention.py::test_padding_of_a_piecewise_graph",)),
        Cell(
            (f"{ADAPTERS}/sglang/test_sglang_backend.py::test_writes_into_the_buffer_that_the_engine_gives",)
        ),
    ),
    Feature(
        "`--disable-cascade-attn`",
        Cell(
            (f"{ADAPTERS}/vllm/test_vllm_plugin.py::test_vllms_own_option_is_obeyed",),
            "obeyed where it is typed; `ATTN_BACKEND_CASCADE=0` is ours",
        ),
        Cell(
            (f"{ADAPTERS}/sglang/test_sglang_support.py::test_what_the_environment_says",),
            "`ATTN_BACKEND_CASCADE=0`",
        ),
    ),
    Feature(
        "an 8-bit cache and its scales, of the checkpoint",
        Cell(("vllm-float8-cache",)),
        Cell(
            ("sglang-float8-cache",),
            no_cpu="SGLang refuses 8-bit caches there to all backends but its `intel_amx`",
        ),
    ),
    Feature(
        "8-bit outputs of attention (`fuse_attn_quant`)",
        Cell(("vllm-float8-outputs", "vllm-fused-outputs"), no_cpu="vLLM has no such pass there"),
        NO_OPTION,
    ),
    Feature(
        "n-gram drafts",
        Cell(("vllm-tensor-parallel", "vllm-ngram"), option="ngram"),
        Cell((DRAFTS, "sglang-ngram"), "works, as trees", option="NGRAM"),
    ),
    Feature(
        "draft models",
        Cell(("vllm-draft-model",), option="draft_model"),
        Cell((DRAFTS, "sglang-standalone"), option="STANDALONE"),
    ),
    Feature(
        "EAGLE chains",
        Cell(("vllm-eagle",), option="eagle"),
        Cell(
            ("sglang-eagle", f"{ADAPTERS}/sglang/test_sglang_trees.py::test_steps_of_a_draft_model"),
            option="EAGLE",
        ),
    ),
    Feature(
        "DFLASH blocks",
        Cell(("vllm-dflash",), option="dflash"),
        Cell(("sglang-dflash",), "works from 0.5.20 on", option="DFLASH"),
    ),
    Feature("MTP chains", Cell(("vllm-mtp",), option="mtp"), Cell(("sglang-mtp",), option="NEXTN")),
    Feature(
        "trees of drafts",
        Cell(says="has none"),
        Cell(
            (
                DRAFTS,
                "sglang-standalone-tree",
                f"{ADAPTERS}/sglang/test_sglang_trees.py::test_trees_are_verified",
            ),
            option="--speculative-eagle-topk",
        ),
    ),
    Feature(
        "verification by `chain_speculative_sampling`",
        Cell(
            (f"{ADAPTERS}/vllm/test_vllm_sampler.py::test_v1_warm_up_and_speculative_decoding_stay_vllms",),
            "not used: vLLM's rejection sampler verifies",
        ),
        Cell(says="not used: SGLang verifies by itself"),
    ),
)


VLLM_SERVED = f"{ADAPTERS}/vllm/test_vllm_served.py"
SGLANG_SERVED = f"{ADAPTERS}/sglang/test_sglang_served.py"
# Models that choose their own kernels, whatever the user chose (docs/engines.md has the files and lines).
FEATURES += (
    Feature(
        "DeepSeek V4 and V4.1, Qwen4-Exp, dots3: own kernels",
        Cell(
            (
                f"{VLLM_SERVED}::test_a_model_with_its_own_kernels_is_refused",
                f"{VLLM_SERVED}::test_what_counts_as_an_attention_layer",
            ),
            "refused at start",
        ),
        Cell((f"{SGLANG_SERVED}::test_a_model_that_replaces_the_backend_is_refused",), "refused at start"),
    ),
    Feature(
        "Step 5: own kernels",
        Cell((f"{VLLM_SERVED}::test_a_model_with_its_own_kernels_is_refused",), "refused at start"),
        Cell(says="has no such model"),
    ),
    Feature(
        "HY V4 with sinks: own kernels",
        Cell((f"{VLLM_SERVED}::test_a_model_with_its_own_kernels_is_refused",), "refused at start"),
        Cell(says="not served: sinks over selected tokens are refused at start"),
    ),
    Feature(
        "Inkling: own kernels",
        Cell((f"{VLLM_SERVED}::test_a_model_with_its_own_kernels_is_refused",), "refused at start"),
        Cell(says="not served: SGLang accepts only `fa4` and `triton`"),
    ),
    Feature(
        "MiniMax M3: sparse layers with own kernels",
        Cell(
            (f"{VLLM_SERVED}::test_layers_of_other_backends_are_named",),
            "dense layers are ours; a warning names the others",
        ),
        Cell(
            (f"{SGLANG_SERVED}::test_sparse_layers_of_others_are_named",),
            "dense layers are ours; a warning names the others",
        ),
    ),
)


def named(engine: str) -> list[str]:
    """The evidence for an engine's features, without duplicates."""
    return list(dict.fromkeys(one for feature in FEATURES for one in feature.cell(engine).shown))


def matrix(outcomes: Outcomes) -> str:
    """The features as a Markdown table, with their evidence and releases."""
    lines = ["| feature | vLLM | shown by | SGLang | shown by |", "|---|---|---|---|---|"]
    for feature in FEATURES:
        cells = [
            part
            for engine in ENGINE_NAMES
            for part in (_says(feature.cell(engine), outcomes), _shown(feature.cell(engine), outcomes))
        ]
        lines.append(f"| {' | '.join([feature.name, *cells])} |")
    return "\n".join(lines)


def _seen(name: str, outcomes: Outcomes) -> list[Seen]:
    return [outcomes[device][name] for device in DEVICE_NAMES if name in outcomes[device]]


def _says(cell: Cell, outcomes: Outcomes) -> str:
    option = f"`{cell.option}`: " if cell.option else ""
    because = f"; a CPU cannot: {cell.no_cpu}" if cell.no_cpu else ""
    if any(not _seen(one, outcomes) for one in cell.shown):
        return f"{option}not run{because}"
    failed = [seen for one in cell.shown for seen in _seen(one, outcomes) if not seen.ok]
    if failed:
        return f"{option}failed{f' on an {failed[0].gpu}' if failed[0].gpu else ''}: {failed[0].reason}"
    return f"{option}{cell.says}{because}"


def _shown(cell: Cell, outcomes: Outcomes) -> str:
    """Tests by their names without files, which add little. Consecutive entries with the same releases name
    them once, after the last.
    """
    when = ["; ".join(seen.when for seen in _seen(one, outcomes)) for one in cell.shown]
    shown = []
    for one, of_this, of_next in zip(cell.shown, when, [*when, ""][1:], strict=True):
        shown.append(
            f"`{one.rpartition('::')[2]}`{f' ({of_this})' if of_this and of_this != of_next else ''}"
        )
    return ", ".join(shown)


if __name__ == "__main__":
    print(matrix(read_outcomes()))
