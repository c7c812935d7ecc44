"""The tables of engine features: yes or no for users in docs/engines.md, and the evidence in
docs/reports/features.md.

They are built from the last results of tests and servers (integration/features/outcomes.py).

python -m integration.features.table            # writes them into both pages
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from attn_backend.adapters.own_kernels import ENGINE_NAMES as WRITTEN
from integration.environment import REPOSITORY
from integration.features.outcomes import DEVICE_NAMES, ENGINE_NAMES, Outcomes, Seen, read_outcomes

USERS_PAGE = REPOSITORY / "docs" / "engines.md"
REPORT = REPOSITORY / "docs" / "reports" / "features.md"
ADAPTERS = "tests/adapters"
TINY_MODELS = "tests/integration/test_tiny_models_cpu.py::test_answers_are_those_of_the_reference"
KERNELS = "tests/kernels"
DRAFTS = "tests/integration/test_serving_cpu.py::test_drafts_change_no_token"

OWN_SCALES = (  # int4 and FP4 caches: attention, vLLM's layouts, and the bytes that vLLM writes
    f"{KERNELS}/test_token_scales.py::test_random_cases",
    f"{KERNELS}/test_token_scales.py::test_the_layout_of_the_engine",
    f"{KERNELS}/test_append_token_scales.py::test_append_writes_what_the_engine_writes",
)


@dataclass(frozen=True)
class Cell:
    """
    Attributes:
        shown: its evidence: runs of `integration.features.serve`, and tests (FILE::NAME).
        works: the answer if all of these succeeded on the devices where they ran. None: the engine has no
            such feature.
        note: a condition or a reason.
        no_cpu: why a CPU cannot show a feature that runs only on GPUs.
        option: the engine's option that enables it; for drafts, the method or algorithm.
        since: the first release in which it works; empty: the oldest supported release.
    """

    shown: tuple[str, ...] = ()
    works: bool | None = True
    note: str = ""
    no_cpu: str = ""
    option: str = ""
    since: str = ""


@dataclass(frozen=True)
class Feature:
    name: str
    vllm: Cell
    sglang: Cell

    def cell(self, engine: str) -> Cell:
        return self.vllm if engine == "vllm" else self.sglang


MISSING = Cell(works=None)
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
            note="without `--enforce-eager` on a CPU",
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
            note="on GPUs",
            option=DCP,
        ),
        Cell(
            (f"{ADAPTERS}/sglang/test_sglang_support.py::test_refused_options",), False, "pass `--dcp-size 1`"
        ),
    ),
    Feature(
        "decode context parallel 2, MLA",
        Cell(
            (
                "vllm-decode-context-parallel-mla",
                f"{ADAPTERS}/vllm/test_vllm_dcp.py::test_deployments_that_are_refused",
            ),
            note="on GPUs",
            option=DCP,
        ),
        Cell(
            (f"{ADAPTERS}/sglang/test_sglang_support.py::test_refused_options",), False, "pass `--dcp-size 1`"
        ),
    ),
    Feature("multi-item scoring", MISSING, Cell((TINY_MODELS,), option="--enable-mis")),
    Feature(
        "LoRA", Cell(("vllm-lora",), option="--enable-lora"), Cell(("sglang-lora",), option="--enable-lora")
    ),
    Feature(
        "KV in host memory (OffloadingConnector, HiCache)",
        Cell(
            ("vllm-offloading",),
            no_cpu="`vllm/v1/kv_offload/cpu/spec.py` (0.32) needs a GPU",
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
        "KV connector to disk (ExampleConnector)",
        Cell(("vllm-pipeline", "vllm-folder"), option="--kv-transfer-config"),
        MISSING,
    ),
    Feature(
        "prefill/decode disaggregation (PD)",
        Cell(("vllm-nixl",), note="through NIXL", option="--kv-transfer-config"),
        Cell(
            ("sglang-nixl",),
            note="through NIXL",
            no_cpu="`sglang/srt/disaggregation/nixl/conn.py` (0.5.23) expects the pools in GPU memory",
            option="--disaggregation-mode",
        ),
    ),
    Feature(
        "overlapped micro-batches (DBO, TBO)",
        Cell(
            (f"{ADAPTERS}/vllm/test_vllm_attention.py::test_halves_of_a_step_that_overlap",),
            note="adapter tests only",
            no_cpu="vLLM turns it off there",
            option="--enable-dbo",
        ),
        Cell(
            (f"{ADAPTERS}/sglang/test_sglang_backend.py::test_halves_of_a_step_that_overlap",),
            note="adapter tests only",
            option="--enable-two-batch-overlap",
        ),
    ),
    Feature(
        "full CUDA graphs",
        Cell(
            (f"{ADAPTERS}/vllm/test_vllm_backend.py::test_every_batch_may_be_a_full_cuda_graph",),
            note="any batch",
        ),
        Cell(
            (f"{ADAPTERS}/sglang/test_sglang_backend.py::test_captured_decode",),
            note="decode, verify and draft steps",
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
        "switch for the cascade",
        Cell(
            (f"{ADAPTERS}/vllm/test_vllm_plugin.py::test_vllms_own_option_is_obeyed",),
            option="--disable-cascade-attn",
        ),
        Cell(
            (f"{ADAPTERS}/sglang/test_sglang_support.py::test_what_the_environment_says",),
            option="ATTN_BACKEND_CASCADE=0",
        ),
    ),
    Feature(
        "8-bit cache with the checkpoint's scales",
        Cell(("vllm-float8-cache",)),
        Cell(
            ("sglang-float8-cache",),
            no_cpu="SGLang has 8-bit caches there only for `intel_amx`",
        ),
    ),
    Feature(
        "8-bit cache with a scale for each token and head",
        Cell(
            ("vllm-token-scales", "vllm-token-scales-float8"),
            note="also `fp8_per_token_head`",
            option="int8_per_token_head",
        ),
        MISSING,
    ),
    Feature(
        "4-bit cache with a scale for each token and head",
        Cell(
            (
                f"{ADAPTERS}/vllm/test_vllm_token_scales.py::test_mixed_batch",
                f"{ADAPTERS}/vllm/test_vllm_token_scales.py::test_windows_and_soft_caps",
                *OWN_SCALES,
            ),
            note="with windows from 0.28.0 on",
            option="int4_per_token_head",
        ),
        MISSING,
    ),
    Feature(
        "4-bit cache with a scale for 16 columns (FP4)",
        Cell(
            (f"{ADAPTERS}/vllm/test_vllm_token_scales.py::test_mixed_batch", *OWN_SCALES),
            note="from 0.28.0 on; with int8 K from 0.33.0 on",
            option="nvfp4",
        ),
        Cell(
            (
                f"{ADAPTERS}/sglang/test_sglang_fp4.py::test_serving",
                f"{ADAPTERS}/sglang/test_sglang_fp4.py::test_drafts",
                f"{KERNELS}/test_append_token_scales.py::test_sglang_quantizes_the_same",
            ),
            note="adapter and kernel tests only",
            option="fp4_mx_block16",
        ),
    ),
    Feature(
        "8-bit attention outputs",
        Cell(
            ("vllm-float8-outputs", "vllm-fused-outputs"),
            no_cpu="vLLM has no such pass there",
            option="fuse_attn_quant",
        ),
        MISSING,
    ),
    Feature(
        "n-gram drafts",
        Cell(("vllm-tensor-parallel", "vllm-ngram"), option="ngram"),
        Cell((DRAFTS, "sglang-ngram"), note="as trees", option="NGRAM"),
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
        Cell(("vllm-dflash",), option="dflash", since="0.32.0"),
        Cell(("sglang-dflash",), option="DFLASH", since="0.5.20"),
    ),
    Feature("MTP chains", Cell(("vllm-mtp",), option="mtp"), Cell(("sglang-mtp",), option="NEXTN")),
    Feature(
        "draft trees",
        MISSING,
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
        "draft verification by this package's sampler",
        Cell(
            (f"{ADAPTERS}/vllm/test_vllm_sampler.py::test_v1_warm_up_and_speculative_decoding_stay_vllms",),
            False,
            "vLLM's rejection sampler verifies",
        ),
        Cell(works=False, note="SGLang verifies"),
    ),
)


VLLM_SERVED = f"{ADAPTERS}/vllm/test_vllm_served.py"
SGLANG_SERVED = f"{ADAPTERS}/sglang/test_sglang_served.py"
# Evidence for models that choose their own kernels, whatever the user chose. Users see them in the table of
# attn_backend/adapters/own_kernels.py.
OWN_KERNELS: tuple[Feature, ...] = (
    Feature(
        "DeepSeek V4 and V4.1, Qwen4-Exp, dots3: own kernels",
        Cell(
            (
                f"{VLLM_SERVED}::test_a_model_with_its_own_kernels_is_refused",
                f"{VLLM_SERVED}::test_what_counts_as_an_attention_layer",
            ),
        ),
        Cell((f"{SGLANG_SERVED}::test_a_model_that_replaces_the_backend_is_refused",)),
    ),
    Feature(
        "Step 5: own kernels",
        Cell((f"{VLLM_SERVED}::test_a_model_with_its_own_kernels_is_refused",)),
        MISSING,
    ),
    Feature(
        "HY V4 with sinks: own kernels",
        Cell((f"{VLLM_SERVED}::test_a_model_with_its_own_kernels_is_refused",)),
        Cell(works=False),
    ),
    Feature(
        "Inkling: own kernels",
        Cell((f"{VLLM_SERVED}::test_a_model_with_its_own_kernels_is_refused",)),
        Cell(works=False),
    ),
    Feature(
        "MiniMax M3: sparse layers with own kernels",
        Cell(
            (f"{VLLM_SERVED}::test_layers_of_other_backends_are_named",),
        ),
        Cell(
            (f"{SGLANG_SERVED}::test_sparse_layers_of_others_are_named",),
        ),
    ),
)


def named(engine: str) -> list[str]:
    """The evidence for an engine's features, without duplicates."""
    return list(
        dict.fromkeys(one for feature in (*FEATURES, *OWN_KERNELS) for one in feature.cell(engine).shown)
    )


def overview(outcomes: Outcomes) -> str:
    """The features of both engines as a Markdown table for users."""
    lines = [f"| feature | {' | '.join(WRITTEN[engine] for engine in ENGINE_NAMES)} |", "|---|---|---|"]
    for feature in FEATURES:
        answers = (_answer(feature.cell(engine), engine, outcomes) for engine in ENGINE_NAMES)
        lines.append(f"| {feature.name} | {' | '.join(answers)} |")
    return "\n".join(lines)


def evidence(engine: str, outcomes: Outcomes) -> str:
    """What shows the features of an engine, with releases, dates and GPUs, as a Markdown table."""
    lines = [f"| {WRITTEN[engine]} | shown by | why not on a CPU |", "|---|---|---|"]
    for feature in (*FEATURES, *OWN_KERNELS):
        cell = feature.cell(engine)
        if cell.shown:
            lines.append(f"| {feature.name} | {_shown(cell, outcomes)} | {cell.no_cpu} |")
    return "\n".join(lines)


def tables(outcomes: Outcomes) -> dict[Path, list[str]]:
    """The tables of each page."""
    return {
        USERS_PAGE: [overview(outcomes)],
        REPORT: [evidence(engine, outcomes) for engine in ENGINE_NAMES],
    }


def replaced(text: str, table: str) -> str:
    """The text of a page with a new version of a table, which is found by its first line.

    Raises:
        ValueError: the page has no such table, or several.
    """
    header = table.partition("\n")[0]
    pages, count = re.subn(
        rf"^{re.escape(header)}\n(?:\|.*\n)*", lambda _: f"{table}\n", text, flags=re.MULTILINE
    )
    if count != 1:
        raise ValueError(f"the page has {count} tables with the first line {header!r}, must have 1")
    return pages


def _seen(name: str, outcomes: Outcomes) -> list[Seen]:
    return [outcomes[device][name] for device in DEVICE_NAMES if name in outcomes[device]]


def _answer(cell: Cell, engine: str, outcomes: Outcomes) -> str:
    if cell.works is None:
        return f"not in {WRITTEN[engine]}"
    if any(not _seen(one, outcomes) for one in cell.shown):
        return "not run"
    failed = [seen for one in cell.shown for seen in _seen(one, outcomes) if not seen.ok]
    if failed:
        return f"failed{f' on an {failed[0].gpu}' if failed[0].gpu else ''}: {failed[0].reason}"
    answer = "yes" if cell.works else "no"
    option = f": `{cell.option}`" if cell.option else ""
    since = f"from {cell.since} on" if cell.works and cell.since else ""
    return "; ".join(filter(None, (f"{answer}{option}", cell.note, since)))


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


def main() -> None:
    for page, made in tables(read_outcomes()).items():
        text = page.read_text()
        for table in made:
            text = replaced(text, table)
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
