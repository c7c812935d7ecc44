"""The features that the backend claims to support."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.v1", reason="needs vLLM")

from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, MultipleOf

from attn_backend.adapters.vllm.backend import AttnBackend, CpuAttnBackend
from attn_backend.adapters.vllm.metadata import AttnMetadataBuilder

OTHER_BACKEND = "choose another --attention-backend"
LLAMA = {
    "head_size": 128,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": DeviceCapability(9, 0),
    "attn_type": "decoder",
}


def reasons(backend: type[AttnBackend] = AttnBackend, **changes: Any) -> list[str]:
    """The reasons why vLLM would refuse the backend; skips if this release does not check."""
    asked = inspect.signature(AttentionBackend.validate_configuration).parameters
    for name in changes:
        if name not in asked:
            pytest.skip(f"this release of vLLM does not ask about {name}")
    return backend.validate_configuration(**{**LLAMA, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_size": 64},
        {"head_size": 256},
        {"head_size": 80},
        {"dtype": torch.float16},
        {"kv_cache_dtype": None},
        {"kv_cache_dtype": "bfloat16"},
        {"kv_cache_dtype": "float16"},
        {"dtype": torch.float16, "kv_cache_dtype": "float16"},
        {"dtype": torch.float16, "kv_cache_dtype": "bfloat16"},
        {"block_size": None},
        {"block_size": 48},
        {"block_size": 256},
        {"has_sliding_window": True},
        {"use_non_causal": True},
        {"use_non_causal": True, "has_sliding_window": True},
        {"has_sink": True, "head_size": 64, "has_sliding_window": True},
        {"use_mm_prefix": True, "head_size": 256},
        {"attn_type": "encoder_only", "head_size": 64},
        {"attn_type": "encoder_decoder", "head_size": 64},
        {"use_kv_connector": True},
        {"use_adaptive_verification": True},
        {"use_dcp": True},
        {"use_batch_invariant": True},
        {"device_capability": DeviceCapability(8, 0)},
        {"device_capability": DeviceCapability(10, 0)},
    ],
    ids=str,
)
def test_accepts(changes: dict[str, Any]) -> None:
    assert reasons(**changes) == []


@pytest.mark.parametrize(
    ("changes", "reason", "way_out"),
    [
        ({"head_size": 320}, "head_size", OTHER_BACKEND),
        ({"dtype": torch.float32}, "dtype", "pass --dtype bfloat16"),
        ({"kv_cache_dtype": "nvfp4_4over6"}, "kv_cache_dtype", "pass --kv-cache-dtype fp8_e4m3 or auto"),
        ({"block_size": 8}, "block_size", "pass --block-size 16"),
        ({"block_size": 24}, "block_size", "pass --block-size 16"),
        ({"use_mla": True}, "MLA", OTHER_BACKEND),
        ({"use_sparse": True}, "sparse", OTHER_BACKEND),
        ({"attn_type": "encoder"}, "attention type encoder", OTHER_BACKEND),
        ({"use_pcp": True}, "PCP", OTHER_BACKEND),
        ({"use_rswa": True}, "R-SWA", OTHER_BACKEND),
        ({"device_capability": DeviceCapability(7, 5)}, "compute capability", OTHER_BACKEND),
    ],
    ids=str,
)
def test_refuses(changes: dict[str, Any], reason: str, way_out: str) -> None:
    assert reasons(**changes) == [f"{reason} not supported: {way_out}"]


@pytest.mark.parametrize(
    ("head_size", "supported"),
    [
        (8, True),
        (80, True),
        (96, True),
        (256, True),
        (4, False),
        (100, False),
        (264, False),
        (512, True),
        (520, False),
    ],
)
def test_head_sizes_on_a_cpu(head_size: int, supported: bool) -> None:
    assert CpuAttnBackend.supports_head_size(head_size) == supported
    assert CpuAttnBackend.supports_dtype(torch.float32)


def test_block_sizes_with_and_without_a_spec() -> None:
    """Older releases pass nothing, newer ones the spec of the KV cache."""
    ask = AttnBackend.get_supported_kernel_block_sizes
    for sizes in (ask(), ask(None), ask(kv_cache_spec=None)):
        assert [size.base for size in sizes if isinstance(size, MultipleOf)] == [16]
    assert AttnBackend.get_preferred_block_size(16) == 16


def test_the_cache_is_packed() -> None:
    assert AttnBackend.get_kv_cache_shape(100, 16, 8, 128, cache_dtype_str="auto") == (100, 8, 16, 256)


@pytest.mark.parametrize(
    ("layout", "order", "layered"),
    [("NHD", (0, 2, 1, 3), (1, 0, 3, 2, 4)), ("HND", (0, 1, 2, 3), (1, 2, 0, 3, 4))],
)
def test_memory_order_where_vllm_asks_for_it(
    layout: str, order: tuple[int, ...], layered: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.attention.backends import utils

    monkeypatch.setattr(utils, "get_kv_cache_layout", lambda: layout, raising=False)
    assert AttnBackend.get_kv_cache_stride_order() == order
    assert AttnBackend.get_kv_cache_stride_order(include_num_layers_dimension=True) == layered


def test_memory_order_where_vllm_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import utils

    monkeypatch.delattr(utils, "get_kv_cache_layout", raising=False)
    with pytest.raises(NotImplementedError):
        AttnBackend.get_kv_cache_stride_order()


def test_every_batch_may_be_a_full_cuda_graph() -> None:
    assert AttnMetadataBuilder.get_cudagraph_support(None, None) == AttentionCGSupport.ALWAYS
    assert not AttnBackend.forward_includes_kv_cache_update
