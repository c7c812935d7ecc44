"""flashinfer.sparse: block-sparse attention. Each row of blocks sees some blocks of tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..kernels.attention import FLOAT8_Q_DTYPES
from ..metadata import BSRView, KVCache
from ..validation import refuse, require
from .arguments import (
    DType,
    PosEncoding,
    Scale,
    csr_on_device,
    dtype_of,
    heads_of,
    indptr_of,
    on_device,
    pack_custom_mask,
    pos_encoding,
)
from .features import not_supported, refuse_given
from .page import get_seq_lens
from .wrapper import Logits, Wrapper, plain_logits

__all__ = ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper", "convert_bsr_mask_layout"]


def convert_bsr_mask_layout(mask: Tensor, indptr: Tensor) -> Tensor:
    """Converts a mask of blocks, bool [blocks, R, C], to attention's layout: for each row of blocks, its R
    rows with all columns, flattened.

    Args:
        indptr: int32 [rows of blocks + 1]: row i has the blocks indptr[i]:indptr[i + 1].
    """
    rows = [mask[begin:end].transpose(0, 1).reshape(-1) for begin, end in pairwise(indptr.tolist())]
    return torch.cat(rows) if rows else mask.reshape(-1)


class _Sparse(Wrapper):
    def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, backend=backend)

    run: Any  # of the subclass
    _num_rows: int  # rows of Q in the last plan, and tokens
    _num_tokens: int

    def _check_lengths(self, dim: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Refuses tensors whose lengths differ from the plan: rows beyond the plan would never be written,
        and tokens of other KV heads would be read.
        """
        for name, tensor, planned in (
            ("q", q, self._num_rows),
            ("k", k, self._num_tokens),
            ("v", v, self._num_tokens),
        ):
            if tensor.shape[dim] != planned:
                refuse(f"{name}.shape[{dim}]", tensor.shape[dim], f"{planned}, as planned")

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        sm_scale: Scale | None = None,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        scale_q: Tensor | None = None,
        scale_k: Tensor | None = None,
        scale_v: Tensor | None = None,
    ) -> Any:
        """`run`, for code that predates it.

        Options that change the result must be given to `plan`; use_fp16_qk_reduction is not used.
        """
        refuse_given(
            logits_soft_cap=logits_soft_cap,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            scale_q=scale_q,
            scale_k=scale_k,
            scale_v=scale_v,
        )
        if pos_encoding_mode != "NONE":
            not_supported(f"pos_encoding_mode = {pos_encoding_mode!r} of forward()")
        self._sm_scale = sm_scale
        return self.run(q, k, v)


class BlockSparseAttentionWrapper(_Sparse):
    """Rows of Q in blocks of R, tokens in blocks of C: a BSR matrix, whose blocks are pages in this package.

    Args:
        float_workspace_buffer: any tensor on the device.
        backend: "auto", "fa2" or "fa3": equivalent here.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: an argument is not supported; the message names it.
    """

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: Tensor | None = None,
        packed_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: Scale | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        non_blocking: bool = True,
        block_mask: Tensor | None = None,
    ) -> None:
        """Plans a matrix.

        Args:
            indptr: int32 [ceil(M / R) + 1], indices: int32 [blocks]: block column of each block.
            M, N: rows of Q, tokens. R, C: rows and tokens of a block; C divides N.
            mask: bool [blocks, R, C], inside of blocks; packed_mask: uint8, each row of blocks starting at a
                new byte.
            causal: a row sees the tokens up to its position among the tokens of its blocks, as in FlashInfer.

        Raises:
            ValueError: an argument is wrong.
            NotImplementedError: an argument is not supported; the message names it.
        """
        refuse_given(block_mask=block_mask)
        if N % C:
            refuse("N", N, f"a multiple of C = {C}")
        if dtype_of("q_data_type", q_data_type) in FLOAT8_Q_DTYPES:
            o_data_type = o_data_type or "float16"
        elif o_data_type == "float16":  # FlashInfer's default, for any Q
            o_data_type = None
        self._heads = heads_of(
            self.device, num_qo_heads, num_kv_heads, head_dim, None, q_data_type, kv_data_type, o_data_type
        )
        self._rows = self._num_rows = M
        self._sm_scale, self._page_size, self._num_tokens = sm_scale, C, N
        block_rows = len(indptr) - 1
        qo_indptr = (torch.arange(block_rows + 1, dtype=torch.int32, device=indptr.device) * R).clamp_(max=M)
        last_page_len = torch.full((block_rows,), C, dtype=torch.int32, device=indptr.device)
        if mask is not None and packed_mask is None:
            mask = convert_bsr_mask_layout(mask, indptr)
        kv_lens = get_seq_lens(indptr, last_page_len, C) * (indptr[1:] > indptr[:-1])
        packed, mask_indptr = pack_custom_mask(
            mask, packed_mask, qo_indptr, kv_lens, self.device, non_blocking
        )
        logits = Logits(logits_soft_cap or 0.0, _pos_encoding(pos_encoding_mode), packed, mask_indptr)
        table = csr_on_device(indptr, indices, last_page_len, C, self.device, non_blocking)
        view = BSRView(
            on_device(qo_indptr, self.device, non_blocking), table, causal=causal and packed is None
        )
        self._plan_view(view, logits)

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale_q: Tensor | None = None,
        scale_k: Tensor | None = None,
        scale_v: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Runs the last plan: q [M, num_qo_heads, head_dim], k and v [N, num_kv_heads, head_dim]. scale_q,
        scale_k, scale_v: factors of float8 numbers: float32 [1] or [heads].

        Returns:
            The output in q's shape; with return_lse also the base-2 lse, float32 [M, num_qo_heads].

        Raises:
            ValueError: an argument is wrong, or there is no plan yet.
            NotImplementedError: an argument is not supported; the message names it.
        """
        self._check_planned()
        self._check_lengths(0, q, k, v)
        kv = KVCache.from_slots(k, v, self._page_size)
        return self._planned.run(
            q,
            kv.k,
            kv.v,
            self._scales(scale_q, scale_k),
            out=out,
            lse=lse,
            return_lse=return_lse,
            v_scale=scale_v,
        )


class VariableBlockSparseAttentionWrapper(_Sparse):
    """A matrix with blocks of any size, separate for each KV head.

    Args:
        float_workspace_buffer: any tensor on the device.
        backend: "auto", "fa2" or "fa3": equivalent here.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: an argument is not supported; the message names it.
    """

    def plan(
        self,
        block_mask_map: Tensor,
        block_row_sz: Tensor,
        block_col_sz: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: Scale | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
    ) -> None:
        """Plans a matrix for each KV head.

        Waits for the device, because the number of visible blocks determines a length.

        Args:
            block_mask_map: bool [num_kv_heads, block rows, block columns]: which blocks are visible.
            block_row_sz: int32 [num_kv_heads, block rows], rows of each; block_col_sz: int32 [num_kv_heads,
                block columns], tokens of each. Their sums are the same for all heads.

        Raises:
            ValueError: an argument is wrong.
            NotImplementedError: an argument is not supported; the message names it.
        """
        if num_qo_heads % num_kv_heads:
            refuse("num_qo_heads", num_qo_heads, f"a multiple of num_kv_heads = {num_kv_heads}")
        if block_mask_map.shape != (num_kv_heads, block_row_sz.shape[-1], block_col_sz.shape[-1]):
            refuse(
                "block_mask_map",
                block_mask_map,
                f"of shape {[num_kv_heads, block_row_sz.shape[-1], block_col_sz.shape[-1]]}",
            )
        self._num_rows, self._num_tokens = (
            _sum_of_heads("block_row_sz", block_row_sz),
            _sum_of_heads("block_col_sz", block_col_sz),
        )
        group_size = num_qo_heads // num_kv_heads
        self._num_kv_heads = num_kv_heads
        # Each (head, block row) is a request, whose pages are tokens of a cache with one head.
        self._heads = heads_of(self.device, group_size, 1, head_dim, None, q_data_type, kv_data_type)
        self._sm_scale = sm_scale
        is_seen = block_mask_map.bool()
        qo_indptr = indptr_of(block_row_sz.flatten())
        kv_indptr = indptr_of((is_seen * block_col_sz[:, None, :]).sum(-1).flatten())
        first_tokens = (block_col_sz.flatten().cumsum(0) - block_col_sz.flatten()).view(block_col_sz.shape)
        head, _, column = is_seen.nonzero(as_tuple=True)
        lengths = block_col_sz[head, column]
        ends = lengths.cumsum(0)
        num_entries = int(ends[-1]) if len(ends) else 0
        begins = torch.repeat_interleave(
            first_tokens[head, column] - (ends - lengths), lengths, output_size=num_entries
        )
        kv_indices = (begins + torch.arange(num_entries, device=begins.device)).to(torch.int32)
        last_page_len = torch.ones(len(kv_indptr) - 1, dtype=torch.int32, device=kv_indptr.device)
        table = csr_on_device(kv_indptr, kv_indices, last_page_len, 1, self.device, non_blocking)
        view = BSRView(on_device(qo_indptr, self.device, non_blocking), table, causal=causal)
        self._rows = int(qo_indptr[-1])
        self._plan_view(view, plain_logits(logits_soft_cap, _pos_encoding(pos_encoding_mode)))

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Runs the last plan: q [num_qo_heads, qo_len, head_dim], k and v [num_kv_heads, kv_len, head_dim].

        Returns:
            The output in q's shape; with return_lse also the base-2 lse, float32 [num_qo_heads, qo_len].
            Written to `out` and `lse` if given.

        Raises:
            ValueError: an argument that is wrong, or no plan yet.
        """
        self._check_planned()
        self._check_lengths(1, q, k, v)
        heads, qo_len, head_dim = q.shape
        by_kv_head = (self._num_kv_heads, heads // self._num_kv_heads, qo_len)
        rows = q.reshape(*by_kv_head, head_dim).transpose(1, 2).reshape(-1, by_kv_head[1], head_dim)
        kv = KVCache.from_slots(k.reshape(-1, 1, head_dim), v.reshape(-1, 1, head_dim))
        result = self._planned.run(rows, kv.k, kv.v, self._scales(), return_lse=return_lse or lse is not None)
        out_rows, lse_rows = result if isinstance(result, tuple) else (result, None)
        by_head = (
            out_rows.view(self._num_kv_heads, qo_len, by_kv_head[1], head_dim)
            .transpose(1, 2)
            .reshape(q.shape)
        )
        out = by_head if out is None else out.copy_(by_head)
        if lse_rows is None:
            return out
        lse_by_head = (
            lse_rows.view(self._num_kv_heads, qo_len, by_kv_head[1]).transpose(1, 2).reshape(heads, qo_len)
        )
        lse = lse_by_head if lse is None else lse.copy_(lse_by_head)
        return (out, lse) if return_lse else out


def _sum_of_heads(name: str, sizes: Tensor) -> int:
    """The total size of a KV head's blocks, which must be equal for all KV heads: they share one tensor."""
    sums = sizes.sum(-1).tolist()
    require(len(set(sums)) == 1, f"{name}.sum(-1)", sums, "the same for each KV head")
    return int(sums[0])


def _pos_encoding(mode: str) -> PosEncoding:
    pos = pos_encoding(mode)
    if pos.rope is not None:  # the tokens that a row of blocks sees are not consecutive
        not_supported(f"pos_encoding_mode = {mode!r} with sparse blocks")
    return pos
