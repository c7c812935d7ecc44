"""Decode context parallelism: each rank of a group holds a part of every request's KV, and all of them
together attend to it.

`--cp-kv-cache-interleave-size` tokens lie on one rank, as many on the next one, and so on around. A row
attends to this rank's part with the heads of all ranks, and vLLM merges the states over the ranks. No mask
may cut the part, since its positions differ from the request's:

- If every request has a single token, it sees all KV of the ranks, the token itself included.
- Otherwise a row attends twice. It attends to its context, the tokens before the step, with the heads of all
  ranks. It attends to the step's tokens with this rank's heads: every rank has them in the forward's K and V.
  merge_state() merges the two states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from attn_backend.kernels.attention import Attention
from attn_backend.kernels.native import is_captured
from attn_backend.kernels.states import merge_state
from attn_backend.metadata.kv_cache import KVCache


class ContextParallel:
    """The ranks that share the KV of a group of layers, as this one sees them."""

    def __init__(
        self,
        group: Any,
        interleave: int,
        combine: Callable[..., tuple[Tensor, Tensor]],
        max_batch: int,
        device: torch.device,
    ) -> None:
        """
        Args:
            group: vLLM's GroupCoordinator.
            interleave: tokens of a request that lie side by side on one rank.
            combine: vLLM's merge of states over the ranks (compat.combine_of_ranks).
        """
        self.size: int = group.world_size
        self._group = group
        self._interleave = interleave
        self._combine = combine
        # captured graphs read this tensor
        self._local_lens = torch.zeros(max_batch, dtype=torch.int32, device=device)

    def local_lens(self, query_start_loc: Tensor, seq_lens: Tensor, *, single_tokens: bool) -> Tensor:
        """The tokens on this rank that attend() reads, int32 [requests]; valid until the next call.

        Args:
            query_start_loc: int32 [requests + 1], seq_lens: int32 [requests]; on the device.
            single_tokens: as the next attend() gets it.
        """
        lens = self._local_lens[: seq_lens.shape[0]]
        read = seq_lens if single_tokens else (seq_lens - query_start_loc.diff()).clamp_(min=0)
        lens.copy_(get_dcp_local_seq_lens(read, self.size, self._group.rank_in_group, self._interleave))
        return lens

    def attend(
        self,
        new_tokens: Attention,
        context: Attention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache,
        out: Tensor,
        *,
        has_context: bool,
        single_tokens: bool,
        **options: Any,
    ) -> None:
        """
        Args:
            new_tokens: planned for this rank's heads, over the step's own tokens.
            context: planned for the heads of all ranks, over local_lens().
            q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, columns of K, of V], the step's, which the
                cache has, too; cache: of the layer.
            out: [tokens, heads, columns of V], written.
            has_context: False: no request has tokens before the step. All ranks must agree: they then
                exchange nothing, unless a graph is captured, which serves other batches, too.
            single_tokens: every request has one token. new_tokens is not read.
            options: of both runs.
        """
        step = KVCache.from_ragged(k, v)
        if not has_context and not single_tokens and not is_captured(q.device):
            new_tokens.run(q, step, out=out, **options)
            return
        q_of_all = self._group.all_gather(q.contiguous(), dim=1)
        part, part_lse = context.run(q_of_all, cache, return_lse=True, **options)
        of_context, context_lse = self._combine(part, part_lse, self._group, return_lse=True)
        if single_tokens:
            out.copy_(of_context)
            return
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        new_tokens.run(q, step, out=out, lse=lse, **options)
        merge_state(out, lse, of_context, context_lse.contiguous(), out=out, out_lse=lse)


def has_context(common_attn_metadata: CommonAttentionMetadata) -> bool:
    """Whether a request may have tokens before the step.

    It reads only host values, which are the same on all ranks.
    """
    cm = common_attn_metadata
    upper_bounds = cm.seq_lens_cpu_upper_bound
    if upper_bounds is None or cm.max_query_len <= 1:
        return True
    return bool((upper_bounds != cm.query_start_loc_cpu[: upper_bounds.shape[0] + 1].diff()).any())
