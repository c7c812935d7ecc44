"""Sparse attention over latents: each row of a step attends to the tokens that the engine's indexer has
selected for it (DeepSeek V3.2, GLM 5).
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_backend.adapters.layers import LayerSpec, attention_of
from attn_backend.kernels.attention import MAX_CUDA_BATCH, MAX_CUDA_INVARIANT_BATCH
from attn_backend.kernels.selection import SelectedTokens
from attn_backend.metadata.kv_cache import KVCache
from attn_backend.metadata.views import BSRView


class SelectedAttention:
    """A plan for the rows of a step, and room for the slots that they attend to.

    The layers take turns: each run writes its own slots. Runs skip negative entries and tokens that a row
    does not see, at any place.

    Every tensor that runs read keeps its address, so captured graphs serve later steps. A step with too many
    rows is split: each layer plans the parts when it runs them, which no graph may capture.
    """

    def __init__(
        self,
        num_heads: int,
        topk: int,
        *,
        max_rows: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None,
        device: torch.device,
        batch_invariant: bool = False,
    ) -> None:
        """
        Args:
            num_heads: query heads.
            topk: most tokens that a row attends to.
            max_rows: most rows of a step.
            dtype: of Q and the output.
            kv_dtype: of the latents (`Attention`); None: dtype.
            batch_invariant: a row's bits depend on itself, on the number of tokens that it sees and on which
                of them are selected, in whatever order.
        """
        self.max_rows = min(max_rows, MAX_CUDA_INVARIANT_BATCH if batch_invariant else MAX_CUDA_BATCH)
        self.attention = attention_of(
            LayerSpec(num_heads, 1, 576, head_dim_v=512, kv_dtype=kv_dtype),
            dtype=dtype,
            device=device,
            max_rows=self.max_rows,
            max_batch=self.max_rows,
            batch_invariant=batch_invariant,
            cascade=False,
        )
        self._batch_invariant = batch_invariant
        self._slots = torch.full((self.max_rows, topk), -1, dtype=torch.int32, device=device)
        self._lens = torch.zeros(max(max_rows, 1), dtype=torch.int32, device=device)
        self._counts = torch.zeros_like(self._lens)
        self._num_rows = 0
        self._first_planned = 0

    def plan(self, lens: Tensor) -> None:
        """
        Plans the rows of a step, on the current stream, without waiting for it. If the step is split, it
        plans the first part.

        Args:
            lens: int32 or int64 [rows], how many tokens each row sees. A layer selects some of them, at most
                topk.
        """
        self._num_rows = num_rows = lens.shape[0]
        kept = self._lens[:num_rows].copy_(lens)
        torch.clamp(kept, 0, self._slots.shape[1], out=self._counts[:num_rows])
        if num_rows > 0:
            self._plan_part(0, min(num_rows, self.max_rows))

    def _plan_part(self, begin: int, end: int) -> None:
        self.attention.plan(BSRView.selected(self._slots[: end - begin], self._counts[begin:end]))
        self._first_planned = begin

    def run(
        self,
        q: Tensor,
        kv: KVCache,
        indices: Tensor,
        block_table: Tensor | None = None,
        requests: Tensor | None = None,
        *,
        q_rope: Tensor | None = None,
        lse: Tensor | None = None,
        sm_scale: float,
    ) -> Tensor:
        """
        Args:
            q: [rows, num_heads, 576], the step's rows, or the first of them; [rows, num_heads, 512] with
                q_rope, the other columns.
            kv: a layer's latents.
            indices, block_table, requests: as `SelectedTokens` has them, with the pages of kv. Without a
                block_table, indices are slots.
            lse: float32 [rows, num_heads], written.

        Returns:
            [rows, num_heads, 512]
        """
        num_rows = q.shape[0]
        out = q.new_empty(num_rows, q.shape[1], 512)
        slots = kv.by_slot()
        if self._batch_invariant:
            indices = indices.sort(dim=-1).values  # top-k kernels leave them in any order
        for begin in range(0, num_rows, self.max_rows):
            end = min(begin + self.max_rows, num_rows)
            if self._first_planned != begin:
                self._plan_part(begin, min(begin + self.max_rows, self._num_rows))
            part = slice(begin, end)
            selected = SelectedTokens(indices[part])
            if block_table is not None:
                of_part = None if requests is None else requests[part]
                selected = SelectedTokens(
                    indices[part], block_table, of_part, kv.page_size, kv.page_stride, self._lens[part]
                )
            self.attention.run(
                q[part],
                slots,
                q_rope=None if q_rope is None else q_rope[part],
                out=out[part],
                lse=None if lse is None else lse[part],
                sm_scale=sm_scale,
                selected=selected,
            )
        return out


def count_visible(num_rows: int, requests: Tensor, qo_indptr: Tensor, kv_lens: Tensor) -> Tensor:
    """How many tokens each row sees under a causal mask. Reads nothing on the host.

    Args:
        num_rows: of the step, padding after the last request included, which gets 0.
        requests: int32 [num_rows], the request of each row.
        qo_indptr: int32 [batch + 1].
        kv_lens: int32 or int64 [batch], tokens of each request, the step's included.

    Returns:
        [num_rows], of kv_lens' dtype.
    """
    rows = torch.arange(num_rows, device=kv_lens.device)
    requests = requests[:num_rows].long()
    seen = kv_lens[requests] - qo_indptr[requests + 1] + rows + 1
    return torch.where(rows < qo_indptr[-1], seen.clamp(min=0), 0)
