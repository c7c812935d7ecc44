"""One step as the engine describes it: SGLang's ForwardBatch in the terms of plans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_backend.adapters.spans import Spans

from . import compat
from .items import Items, items_of
from .support import drafts_are_trees, refuse, verified_tokens, wants_spans
from .tree_mask import TreeMasks, is_chain


@dataclass(frozen=True, eq=False)
class Batch:
    """A step. Its tensors stay where the engine keeps them."""

    num_rows: int  # of Q
    qo_indptr: Tensor  # int32 [batch + 1]
    qo_lens: Tensor | int  # [batch], or the one length of all
    max_qo_len: int
    kv_lens: Tensor  # [batch], new tokens included
    rows: Tensor  # [batch], of req_to_token
    encoder_lens: Tensor | None = None  # [batch], tokens of the encoder, which come first in req_to_token
    items: Items | None = None  # with --enable-mis
    spans: Spans | None = None  # where images see both sides
    has_prefixes: bool = True  # whether a request may have tokens that are not in Q
    tree: Tensor | None = None  # TreeMask.visible, where the new tokens are trees
    slots: Tensor | None = None  # instead of req_to_token: see branch_slots
    # prompts or chunks of them, maybe decodes beside them; also a draft model's tokens after a verification
    is_extend: bool = False


class BatchReader:
    """Makes a Batch of a ForwardBatch.

    What it adds lies in buffers that captured graphs read at every replay.
    """

    def __init__(self, runner: Any, device: torch.device) -> None:
        self._device = device
        self._is_encoder_decoder = bool(runner.model_config.is_encoder_decoder)
        self._has_items = bool(compat.setting("exec.features.enable_mis", False))
        self._has_spans = wants_spans(runner)
        self._draft_tokens = verified_tokens(runner)

    def allocate(self, max_rows: int, max_batch: int) -> None:
        """Makes the buffers, before anything is captured."""
        self._max_batch = max_batch
        self._arange = torch.arange(max_batch + 1, dtype=torch.int32, device=self._device)
        self._qo_indptr = torch.zeros(max_batch + 1, dtype=torch.int32, device=self._device)
        self._one_qo_indptr, self._one_qo_len = self._qo_indptr[:2], self._qo_indptr[1:2]
        self.trees = TreeMasks(max_batch, self._draft_tokens, drafts_are_trees(), self._device)
        self._spans = Spans(max_rows if self._has_spans else 0, self._device)
        self._large_spans: Spans | None = None

    def read(self, forward_batch: Any) -> Batch | None:
        """None: there is nothing to attend to."""
        batch = self._read_rows(forward_batch)
        if batch is None:
            return None
        if self._is_encoder_decoder:
            batch = replace(batch, encoder_lens=forward_batch.encoder_lens[: batch.rows.shape[0]])
        if self._has_items:
            batch = replace(batch, items=items_of(forward_batch, batch.rows.shape[0], self._device))
        if self._has_spans:
            batch = replace(batch, spans=self._fill_spans(forward_batch, batch))
        return batch

    def one_row_each(self, batch_size: int) -> Tensor:
        """int32 [batch_size + 1], the qo_indptr of a step with one token of each request."""
        if batch_size > self._max_batch:
            return torch.arange(batch_size + 1, dtype=torch.int32, device=self._device)
        return self._arange[: batch_size + 1]

    def _read_rows(self, forward_batch: Any) -> Batch | None:
        mode = forward_batch.forward_mode
        batch_size: int = forward_batch.batch_size
        if batch_size == 0 or mode.is_idle():
            return None
        rows, kv_lens = forward_batch.req_pool_indices[:batch_size], forward_batch.seq_lens[:batch_size]
        if mode.is_decode():
            return Batch(batch_size, self.one_row_each(batch_size), 1, 1, kv_lens, rows)
        if mode.is_target_verify():
            return self._read_drafts(forward_batch.spec_info, kv_lens, rows)
        if mode.is_dllm_extend():
            raise refuse(f"the forward mode {mode.name}")
        qo_lens = forward_batch.extend_seq_lens[:batch_size]
        num_rows = forward_batch.positions.shape[0]
        host_lens = forward_batch.extend_seq_lens_cpu
        max_qo_len = num_rows if host_lens is None else int(max(host_lens))
        prefix_lens = forward_batch.extend_prefix_lens_cpu
        has_prefixes = prefix_lens is None or any(prefix_lens)
        return Batch(
            num_rows,
            self._prefix_sum(qo_lens),
            qo_lens,
            max_qo_len,
            kv_lens,
            rows,
            has_prefixes=has_prefixes,
            is_extend=True,
        )

    def _read_drafts(self, spec_info: Any, prefix_lens: Tensor, rows: Tensor) -> Batch:
        batch_size, draft_len = rows.shape[0], int(spec_info.draft_token_num)
        tree = None if is_chain(spec_info) else self.trees.of_step(batch_size, draft_len).visible
        qo_indptr = torch.arange(
            0, (batch_size + 1) * draft_len, draft_len, dtype=torch.int32, device=self._device
        )
        return Batch(
            batch_size * draft_len, qo_indptr, draft_len, draft_len, prefix_lens + draft_len, rows, tree=tree
        )

    def _fill_spans(self, forward_batch: Any, batch: Batch) -> Spans:
        spans = self._spans
        if spans.max_rows < batch.num_rows:  # no graph was captured for so many
            if self._large_spans is None or self._large_spans.max_rows < batch.num_rows:
                self._large_spans = Spans(2 * batch.num_rows, self._device)
            spans = self._large_spans
        if is_uniform(forward_batch.forward_mode):  # may be inside a graph
            spans.clear(batch.num_rows)
        else:
            spans.fill(compat.image_spans(forward_batch), batch.qo_indptr, batch.kv_lens)
        return spans

    def _prefix_sum(self, lens: Tensor) -> Tensor:
        batch_size = lens.shape[0]
        # a prompt that is computed alone waits for this: a copy is launched sooner than a scan
        if batch_size == 1:
            self._one_qo_len.copy_(lens)
            return self._one_qo_indptr
        fits = batch_size <= self._max_batch
        indptr = (
            self._qo_indptr[: batch_size + 1]
            if fits
            else torch.zeros(batch_size + 1, dtype=torch.int32, device=self._device)
        )
        torch.cumsum(lens, dim=0, dtype=torch.int32, out=indptr[1:])
        return indptr


def is_uniform(mode: Any) -> bool:
    """Whether all requests of a step in this mode have the same number of rows, so that it may run as a
    captured graph of a fixed batch size.
    """
    return bool(mode.is_decode_or_idle() or mode.is_target_verify())
