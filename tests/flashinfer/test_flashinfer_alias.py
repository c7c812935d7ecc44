"""flashinfer_alias/, and how engines bypass the public API of FlashInfer's wrappers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import forked_python
import pytest
import torch
from flashinfer_oracle import check, make_batch, workspace

from attn_backend import flashinfer
from attn_backend.flashinfer import features

ROOT = Path(__file__).resolve().parents[2]
# The names that engines' FlashInfer backends import (vLLM 0.26 to 0.33, SGLang 0.5.17 to 0.5.23,
# mini-sglang).
NAMES = {
    "flashinfer": [
        "BatchAttentionWithAttentionSinkWrapper",
        "BatchDecodeWithPagedKVCacheWrapper",
        "BatchMLAPagedAttentionWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
        "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
        "MultiLevelCascadeAttentionWrapper",
        "fast_decode_plan",
        "get_seq_lens",
        "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
        "top_k",
        "mm_fp4",
    ],
    "flashinfer.cascade": ["merge_state", "merge_states"],
    "flashinfer.decode": [
        "fast_decode_plan",
        "trtllm_batch_decode_with_kv_cache",
        "trtllm_batch_decode_with_kv_cache_mla",
        "_grouped_size_compiled_for_decode_kernels",
    ],
    "flashinfer.mla": ["BatchMLAPagedAttentionWrapper", "trtllm_batch_decode_with_kv_cache_mla"],
    "flashinfer.prefill": [
        "cudnn_batch_prefill_with_kv_cache",
        "trtllm_batch_context_with_kv_cache",
        "BatchPrefillWithRaggedKVCacheWrapper",
    ],
    "flashinfer.sampling": ["top_k_top_p_sampling_from_logits", "min_p_sampling_from_probs", "softmax"],
    "flashinfer.utils": ["FP4Tensor"],
    "flashinfer.autotuner": [
        "autotune",
        "AutoTuner",
        "get_autotune_process_group",
        "set_autotune_process_group",
    ],
    "flashinfer.comm.mnnvl": ["CommBackend"],
    "flashinfer.fp4_quantization": ["block_scale_interleave"],
    "flashinfer.fused_moe": ["trtllm_fp4_block_scale_moe", "convert_to_block_layout"],
    "flashinfer.fused_moe.core": ["get_w2_permute_indices_with_cache"],
    "flashinfer.gemm": ["gemm_fp8_nt_groupwise", "fp8_blockscale_gemm_sm90"],
    "flashinfer.jit.core": ["logger"],
    "flashinfer.jit.env": ["FLASHINFER_WORKSPACE_DIR"],
}
IMPORTS = [f"from {module} import {', '.join(names)}" for module, names in NAMES.items()]


def run_with_alias(code: str) -> str:
    first = f"import sys; sys.path.insert(0, {str(ROOT / 'flashinfer_alias')!r})\n"
    return forked_python.run(first + code, [], dict(os.environ))


def test_names_of_engines() -> None:
    code = "\n".join(
        [
            *IMPORTS,
            "import importlib.util, flashinfer",
            "print(importlib.util.find_spec('flashinfer.decode').origin)",
        ]
    )
    same = (
        "print(flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper.__module__, "
        "flashinfer.BatchDecodeWithPagedKVCacheWrapper.__module__)"
    )
    origin, module, top, version = run_with_alias(f"{code}\n{same}\nprint(flashinfer.__version__)").split()
    assert version == flashinfer.__version__
    assert Path(origin) == ROOT / "flashinfer_alias" / "flashinfer" / "decode.py"
    assert module == top == "attn_backend.flashinfer.decode"


def test_modules_of_missing_names_have_nothing_else() -> None:
    modules = [name for name in NAMES if name.removeprefix("flashinfer.") in features.NAMES]
    code = (
        f"import importlib\nfor name in {modules}: print(*(x for x in vars(importlib.import_module(name)) "
        f"if not x.startswith('__')))"
    )
    for module, line in zip(modules, run_with_alias(code).splitlines(), strict=True):
        names = features.NAMES[module.removeprefix("flashinfer.")]
        assert set(line.split()) - {"core"} == {"_names_of", *names}
    code = (
        "from importlib.util import find_spec; print(find_spec('flashinfer.norm'), "
        "find_spec('flashinfer.activation'))"
    )
    assert run_with_alias(code).split() == ["None", "None"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
def test_vllm_imports_its_backend() -> None:
    code = (
        "import vllm.v1.attention.backends.flashinfer as backend; "
        "print(backend.BatchPrefillWithPagedKVCacheWrapper.__module__)"
    )
    assert run_with_alias(code).split()[-1] == "attn_backend.flashinfer.prefill"


@pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="needs setuptools")
def test_the_distribution_has_flashinfers_name(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "flashinfer"):
        (source / name).symlink_to(ROOT / "flashinfer_alias" / name)
    options = [
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--target",
        str(tmp_path / "site"),
    ]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)
    assert [path.name for path in (tmp_path / "site").glob("*.dist-info")] == [
        f"flashinfer_python-{flashinfer.__version__}.dist-info"
    ]
    assert (tmp_path / "site" / "flashinfer" / "triton" / "cascade.py").exists()


def buffers(rows: int, pages: int, device: str) -> list[torch.Tensor]:
    """CUDA graph buffers: qo_indptr, kv_indptr, kv_indices, last_page_len."""
    return [
        torch.zeros(length, dtype=torch.int32, device=device) for length in (rows + 1, rows + 1, pages, rows)
    ]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang")
def test_sglangs_own_plan_for_graphs() -> None:
    """SGLang fills the wrapper's buffers and calls the planner of FlashInfer's kernels itself."""
    backend = pytest.importorskip("sglang.srt.layers.attention.flashinfer_backend")
    if not hasattr(backend, "fast_prefill_plan"):
        pytest.skip("this release of SGLang has no plan of its own")
    first, second = (make_batch([2, 2, 2], lens, page_size=1) for lens in ([7, 20, 33], [12, 3, 40]))
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace("cpu"), "NHD", True, *buffers(3, 100, "cpu"), backend="fa2"
    )
    wrapper.plan(first.qo_indptr, *first.tables(), *first.shape, 1, causal=True)
    host = {
        "qo_indptr_host": second.qo_indptr,
        "kv_indptr_host": second.tables()[0],
        "kv_lens_host": torch.tensor([12, 3, 40], dtype=torch.int32),
    }
    dtypes = {"q_data_type": second.q.dtype, "kv_data_type": second.q.dtype}
    backend.fast_prefill_plan(
        wrapper,
        second.qo_indptr,
        *second.tables(),
        *second.shape,
        1,
        causal=True,
        **dtypes,
        **host,
        max_q_len=2,
        max_kv_len=40,
    )
    check(wrapper.run(second.q, second.paged()), second.expected(causal=True))


def test_what_engines_read_of_wrappers() -> None:
    batch = make_batch([3, 1], [9, 20])
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"))
    assert prefill._cached_module is None
    prefill.plan(
        batch.qo_indptr,
        *batch.tables(),
        *batch.shape,
        batch.page_size,
        causal=True,
        window_left=5,
        logits_soft_cap=3.0,
        sm_scale=0.2,
    )
    assert (
        prefill._causal,
        prefill._window_left,
        prefill._logits_soft_cap,
        prefill._sm_scale,
        prefill._backend,
    ) == (True, 5, 3.0, 0.2, "fa2")
    assert prefill._cached_module is not None
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    decode._int_workspace_buffer = prefill._int_workspace_buffer
    batch = make_batch([1, 1], [9, 20])
    decode.plan(*batch.tables(), *batch.shape, batch.page_size, sm_scale=0.3)
    assert (decode._window_left, decode._logits_soft_cap, decode._sm_scale) == (-1, 0.0, 0.3)
    check(decode.run(batch.q, batch.paged(), return_lse=True), batch.expected(sm_scale=0.3))
