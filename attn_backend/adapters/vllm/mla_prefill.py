"""Prefills of MLA over decompressed K and V: the new tokens among themselves, and over chunks of the cached
prefix, whose states the engine merges.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from attn_backend.adapters.vllm import compat
from attn_backend.adapters.vllm.memory import outside_memory_pools
from attn_backend.jit.manifest import HeadDims
from attn_backend.kernels.attention import Attention
from attn_backend.metadata.kv_cache import KVCache
from attn_backend.metadata.page_table import PageTable
from attn_backend.metadata.views import BSRView


class MlaPrefill(MLAPrefillBackend):
    """Takes the place, in a metadata builder, of the prefill backend that vLLM has chosen.

    V may be narrower than K: nothing is padded.

    The new tokens are planned once a step, for all layers. So is the only chunk of the prefix; where there
    are more, they take turns in one workspace, and each is planned when it runs: one small kernel beside
    those that gather, decompress and merge it.
    """

    def __init__(self, chosen: MLAPrefillBackend, new_tokens: Attention, context: Attention) -> None:
        """
        Args:
            chosen: by vLLM.
            new_tokens, context: attention of the heads of decompressed K and V.
        """
        super().__init__(
            num_heads=chosen.num_heads,
            scale=chosen.scale,
            kv_lora_rank=chosen.kv_lora_rank,
            qk_nope_head_dim=chosen.qk_nope_head_dim,
            qk_rope_head_dim=chosen.qk_rope_head_dim,
            v_head_dim=chosen.v_head_dim,
            vllm_config=chosen.vllm_config,
        )
        self._new_tokens = new_tokens
        self._context = context
        self._chunks: list[tuple[Tensor, Tensor]] = []
        self._planned_chunk = -1

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    def supports_out(self) -> bool:
        return True

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        """Plans the prefills of a batch."""
        super().prepare_metadata(prefill_metadata)
        starts = prefill_metadata.query_start_loc
        self._new_tokens.plan(BSRView(starts, PageTable.ragged(starts), causal=True))
        self._chunks = compat.context_chunks(prefill_metadata)
        self._planned_chunk = -1
        if self._chunks:
            self._plan_chunk(0)

    def _plan_chunk(self, number: int) -> None:
        query_starts, context_starts = self._chunks[number]
        self._context.plan(BSRView(query_starts, PageTable.ragged(context_starts), causal=False))
        self._planned_chunk = number

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """
        Args:
            q, k: [tokens, num_heads, columns of K], v: [tokens, num_heads, columns of V].
            out: [tokens, num_heads, columns of V], written.

        Returns:
            out; with return_softmax_lse also float32 [num_heads, tokens], natural.
        """
        if output_scale is not None:
            raise NotImplementedError("attn_backend does not quantize its output")
        o, lse = self._run(self._new_tokens, q, k, v, out, return_softmax_lse)
        return o if lse is None else (o, lse)

    def run_prefill_context_chunk(
        self, *args: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            q: of the chunk's requests; k, v and out as in run_prefill_new_tokens.
            kwargs: chunk, or what vLLM has in its place (compat.py).

        Returns:
            The output, and float32 [num_heads, tokens], natural.
        """
        number = compat.number_of_chunk(kwargs)
        if number != self._planned_chunk:
            self._plan_chunk(number)
        return self._run(self._context, q, k, v, out, True)

    def _run(
        self, attention: Attention, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, wants_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if wants_lse else None
        o = attention.run(
            q, KVCache.unchecked(k.unsqueeze(1), v.unsqueeze(1)), out=out, lse=lse, sm_scale=self.scale
        )
        return o, None if lse is None else lse.t().contiguous()


def make_prefill(
    chosen: MLAPrefillBackend,
    num_heads: int,
    widths: Any,
    dtype: torch.dtype,
    device: torch.device,
    max_rows: int,
    max_batch: int,
) -> MlaPrefill:
    """In the place of the prefill backend that vLLM has chosen. widths: vLLM's MLADims."""
    heads = HeadDims(widths.qk_nope_head_dim + widths.qk_rope_head_dim, widths.v_head_dim)

    def make() -> Attention:
        return Attention(
            num_heads,
            num_heads,
            heads.qk,
            head_dim_v=heads.v,
            dtype=dtype,
            device=device,
            max_rows=max_rows,
            max_batch=max_batch,
        )

    return MlaPrefill(chosen, outside_memory_pools(make, device), outside_memory_pools(make, device))
