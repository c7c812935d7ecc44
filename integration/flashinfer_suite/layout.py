"""A copy of FlashInfer's tests whose imports lead to attn_backend.flashinfer."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE = "attn_backend.flashinfer"
# The tests to run; docs/reports/flashinfer.md lists the others.
_TESTS = tuple(
    f"tests/attention/test_{name}.py"
    for name in (
        "alibi",
        "attention_sink",
        "batch_attention",
        "batch_decode_kernels",
        "batch_invariant_fa2",
        "batch_prefill",
        "batch_prefill_kernels",
        "block_sparse",
        "decode_fp8_calibration_scale",
        "decode_prefill_lse",
        "deepseek_mla",
        "fp8_prefill",
        "hopper",
        "hopper_fp8_attention",
        "hopper_fp8_sliding_window",
        "logits_cap",
        "mla_decode_kernel",
        "mla_page",
        "non_contiguous_decode",
        "non_contiguous_prefill",
        "page",
        "rope",
        "shared_prefix_kernels",
        "single_prefill",
        "sliding_window",
        "tensor_cores_decode",
        "workspace_size",
    )
) + tuple(
    f"tests/utils/test_{name}.py"
    for name in (
        "jit_example",
        "logits_processor",
        "pod_kernels",
        "quantization",
        "sampling",
        "triton_cascade",
    )
)
# Functions compared with the references in FlashInfer's traces: two small cases each.
_TRACES = tuple(
    f"tests/trace/test_{name}_reference_correctness.py"
    for name in (
        "append_paged_kv_cache",
        "append_paged_mla_kv_cache",
        "apply_llama31_rope",
        "apply_llama31_rope_inplace",
        "apply_llama31_rope_pos_ids",
        "apply_llama31_rope_pos_ids_inplace",
        "apply_rope",
        "apply_rope_inplace",
        "apply_rope_pos_ids",
        "apply_rope_pos_ids_inplace",
        "apply_rope_with_cos_sin_cache",
        "apply_rope_with_cos_sin_cache_inplace",
        "batch_attention_run",
        "batch_pod_run",
        "block_sparse_run",
        "chain_speculative_sampling",
        "merge_state",
        "merge_state_in_place",
        "merge_states",
        "min_p_sampling",
        "mla_rope_quantize_fp8",
        "multi_level_cascade_run",
        "pod_with_paged_kv_cache_run",
        "rope_quantize_fp8",
        "rope_quantize_fp8_append_paged_kv_cache",
        "sampling_from_logits",
        "sampling_from_probs",
        "single_decode",
        "single_prefill",
        "softmax",
        "top_k_mask_logits",
        "top_k_renorm_probs",
        "top_k_sampling",
        "top_k_top_p_sampling",
        "top_k_top_p_sampling_from_logits",
        "top_p_renorm_probs",
        "top_p_sampling",
        "var_block_sparse_run",
    )
)
FILES = _TESTS + _TRACES
# The counted tests of each line of the table.
LINES = {name: (name,) for name in _TESTS} | {"tests/trace/test_*_reference_correctness.py": _TRACES}
# Files next to the tests. jit_utils.py is replaced: it lists kernels to compile in advance.
HELPERS = (
    *(
        f"tests/test_helpers/{name}.py"
        for name in (
            "alibi_reference",
            "rope_reference",
            "sink_attention_reference",
            "test_helpers",
            "utils_fp4",
        )
    ),
    "tests/trace/reference_utils.py",
)
# The traces' inputs and references, by the names of modules: attn_backend.flashinfer.trace in the copy.
TRACE_MODULES = (
    *(f"trace/{name}" for name in ("__init__", "solution", "template")),
    *(
        f"trace/templates/{name}"
        for name in ("__init__", "_init_helpers", "attention", "cascade", "page", "rope", "sampling")
    ),
)
# Text that tests pass to jit_args.
_DECLARATIONS = "flashinfer/jit/attention/variants.py"

_IMPORT = re.compile(r"^(\s*)import flashinfer(\.[\w.]+)?( as \w+)?\s*$", re.MULTILINE)
_FROM = re.compile(r"^(\s*)from flashinfer\b", re.MULTILINE)
_DEVICES = (
    (re.compile(r"""(["'])cuda(?::\d)?\1(?!, "cutile")"""), '"cpu"'),  # not the backend of that name
    (re.compile(r'f"cuda:\{\w+\}"'), '"cpu"'),
    (re.compile(r"torch\.cuda\.current_device\(\)"), "0"),
    (re.compile(r"\.cuda\((device=dev_id)?\)"), ""),
    (re.compile(r"\bdev_id = 0\b"), 'dev_id = "cpu"'),
    (re.compile(r"\.to\(0\)"), '.to("cpu")'),
    (re.compile(r"\bdevice=0\b"), 'device="cpu"'),
)


def redirected(source: str, device: str) -> str:
    """The source of a test with `flashinfer` replaced, and for a CPU also the device."""
    source = _FROM.sub(rf"\1from {PACKAGE}", source)
    source = _IMPORT.sub(_import, source)
    if device == "cpu":
        for pattern, replacement in _DEVICES:
            source = pattern.sub(replacement, source)
    return source


def _import(match: re.Match[str]) -> str:
    indent, module, alias = match.group(1), match.group(2) or "", match.group(3)
    if alias:
        return f"{indent}import {PACKAGE}{module}{alias}"
    return (
        f"{indent}import {PACKAGE}{module}; flashinfer = {PACKAGE}"
        if not module
        else f"{indent}import {PACKAGE}{module}; import {PACKAGE} as flashinfer"
    )


def missing_files(checkout: Path) -> list[str]:
    """The files that a checkout should have but lacks."""
    wanted = (*FILES, *HELPERS, *(f"flashinfer/{name}.py" for name in TRACE_MODULES), _DECLARATIONS)
    return [name for name in wanted if not (checkout / name).is_file()]


def lay_out(checkout: Path, folder: Path, device: str) -> None:
    """Writes the copy into an empty folder: the tests, and modules/, in which plugin.py finds modules of
    FlashInfer.
    """
    copies = {name: name for name in (*FILES, *HELPERS)} | {
        f"flashinfer/{name}.py": f"modules/{name}.py" for name in TRACE_MODULES
    }
    for name, copy in copies.items():
        (folder / copy).parent.mkdir(parents=True, exist_ok=True)
        (folder / copy).write_text(redirected((checkout / name).read_text(), device))
    for package in ("tests", "tests/attention", "tests/trace", "tests/utils", "tests/test_helpers"):
        (folder / package / "__init__.py").touch()
    shutil.copy(HERE / "jit_utils.py", folder / "tests" / "test_helpers" / "jit_utils.py")
    shutil.copy(HERE / "plugin.py", folder / "conftest.py")
    shutil.copy(checkout / _DECLARATIONS, folder / "flashinfer_declarations.py")
    (folder / "pytest.ini").write_text("[pytest]\nnorecursedirs = test_helpers\n")
