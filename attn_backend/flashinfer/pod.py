"""flashinfer.pod: a prefill and a batch of decodes in one call.

Here these are two runs. BatchAttention runs a mixed batch in one plan.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from .arguments import DType, PagedKV
from .decode import BatchDecodeWithPagedKVCacheWrapper
from .features import refuse_given
from .prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache
from .wrapper import CompositeWrapper

__all__ = ["BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"]

_Result = Tensor | tuple[Tensor, Tensor]


class PODWithPagedKVCacheWrapper(CompositeWrapper):
    """The prefill of one request over its own K and V, and decodes over a paged cache.

    Args: as in BatchDecodeWithPagedKVCacheWrapper.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: an argument is not supported; the message names it.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        jit_args: list[Any] | None = None,
    ) -> None:
        refuse_given(jit_args=jit_args)
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer, kv_layout, use_cuda_graph, True, *buffers
        )

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._decode.is_cuda_graph_enabled

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: DType | None = "float16",
        kv_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Plans the decodes, like BatchDecodeWithPagedKVCacheWrapper.plan."""
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        options: dict[str, Any] = {
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
            "data_type": data_type,
        }
        options |= {
            "rope_scale": rope_scale,
            "rope_theta": rope_theta,
            "sm_scale": sm_scale,
            "non_blocking": non_blocking,
        }
        self._decode.plan(indptr, indices, last_page_len, *shape, pos_encoding_mode, window_left, **options)

    begin_forward = plan

    def run(
        self,
        q_p: Tensor,
        k_p: Tensor,
        v_p: Tensor,
        q_d: Tensor,
        paged_kv_cache_d: PagedKV,
        custom_mask_p: Tensor | None = None,
        packed_custom_mask_p: Tensor | None = None,
        causal_p: bool = False,
        kv_layout_p: str = "NHD",
        pos_encoding_mode_p: str = "NONE",
        sm_scale_p: float | None = None,
        window_left_p: int = -1,
        rope_scale_p: float | None = None,
        rope_theta_p: float | None = None,
        return_lse_p: bool = False,
        custom_mask_d: Tensor | None = None,
        packed_custom_mask_d: Tensor | None = None,
        causal_d: bool = False,
        kv_layout_d: str = "NHD",
        pos_encoding_mode_d: str = "NONE",
        sm_scale_d: float | None = None,
        window_left_d: int = -1,
        rope_scale_d: float | None = None,
        rope_theta_d: float | None = None,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
        *args: Any,
    ) -> tuple[_Result, _Result]:
        """Runs the prefill (arguments ..._p, as in single_prefill_with_kv_cache) and the decodes (..._d).

        As in FlashInfer, the plan's layout, positions, window and scale apply to the decodes, and no lse is
        returned.

        Returns:
            (output of the prefill, output of the decodes).
        """
        refuse_given(
            custom_mask_d=custom_mask_d, packed_custom_mask_d=packed_custom_mask_d, args=args or None
        )
        out_p = single_prefill_with_kv_cache(
            q_p,
            k_p,
            v_p,
            custom_mask=custom_mask_p,
            packed_custom_mask=packed_custom_mask_p,
            causal=causal_p,
            kv_layout=kv_layout_p,
            pos_encoding_mode=pos_encoding_mode_p,
            sm_scale=sm_scale_p,
            window_left=window_left_p,
            rope_scale=rope_scale_p,
            rope_theta=rope_theta_p,
        )
        out_d = self._decode.run(q_d, paged_kv_cache_d, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        return out_p, out_d


class BatchPODWithPagedKVCacheWrapper(CompositeWrapper):
    """Prefills and decodes over paged caches.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: an argument is not supported; the message names it.
    """

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._plan_prefill: Callable[..., None]
        self._has_mask = False
        self._decode = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return False

    def plan(
        self,
        qo_indptr_p: Tensor,
        kv_indptr_p: Tensor,
        kv_indices_p: Tensor,
        last_page_len_p: Tensor,
        qo_indptr_d: Tensor,
        kv_indptr_d: Tensor,
        kv_indices_d: Tensor,
        last_page_len_d: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: DType | None = "float16",
        kv_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Plans the prefills (arguments ..._p, as in BatchPrefillWithPagedKVCacheWrapper.plan) and the
        decodes (..._d).
        """
        options: dict[str, Any] = {
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim_qk": head_dim,
            "page_size": page_size,
            "pos_encoding_mode": pos_encoding_mode,
            "window_left": window_left,
            "sm_scale": sm_scale,
            "rope_scale": rope_scale,
            "rope_theta": rope_theta,
            "q_data_type": q_data_type or data_type or "float16",
            "kv_data_type": kv_data_type or data_type,
            "non_blocking": non_blocking,
        }
        self._decode.plan(qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d, **options)
        self._plan_prefill = partial(
            self._prefill.plan, qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p, **options
        )
        self._plan_prefill()
        self._has_mask = False

    begin_forward = plan

    def run(
        self,
        q_p: Tensor,
        paged_kv_cache_p: PagedKV,
        q_d: Tensor,
        paged_kv_cache_d: PagedKV,
        custom_mask_p: Tensor | None = None,
        packed_custom_mask_p: Tensor | None = None,
        causal_p: bool = False,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
    ) -> tuple[_Result, _Result]:
        """Runs the prefills and the decodes. causal_p and the masks apply to the prefills.

        A run with a mask, or with a new causal_p, plans the prefills again.

        Returns:
            (output of the prefills, output of the decodes); with return_lse ((outputs), (base-2 lse of both,
            float32 [rows, num_qo_heads])).
        """
        has_mask = custom_mask_p is not None or packed_custom_mask_p is not None
        if has_mask or self._has_mask:
            self._plan_prefill(custom_mask=custom_mask_p, packed_custom_mask=packed_custom_mask_p)
        self._has_mask = has_mask
        self._prefill.set_causal(causal_p)
        result_p = self._prefill.run(q_p, paged_kv_cache_p, return_lse=return_lse)
        result_d = self._decode.run(
            q_d, paged_kv_cache_d, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse
        )
        if not return_lse:
            return result_p, result_d
        return (result_p[0], result_d[0]), (result_p[1], result_d[1])
