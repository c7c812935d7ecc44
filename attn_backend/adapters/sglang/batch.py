"""Turns SGLang's ForwardBatch into a Step, from which plans are made.

Its drafts may be trees, its prompts may have items or images: their masks are read here, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from torch import Tensor

from attn_backend.adapters.layers import Items, Spans

from . import compat
from .support import drafts_are_trees, refuse, verified_tokens, wants_spans

_ALL = 2**30  # longer than any prompt, so that no item follows it


@dataclass(frozen=True, eq=False)
class Step:
    """A step's batch. Its tensors stay where the engine keeps them."""

    num_rows: int  # of Q
    qo_indptr: Tensor  # int32 [batch + 1]
    qo_lens: Tensor | int  # [batch], or the one length of all
    max_qo_len: int
    kv_lens: Tensor  # [batch], new tokens included
    rows: Tensor  # [batch], of req_to_token
    encoder_lens: Tensor | None = None  # [batch], tokens of the encoder, which come first in req_to_token
    items: Items | None = None  # with --enable-mis
    spans: Spans | None = None  # spans of image tokens, which see each other
    has_prefixes: bool = True  # whether a request may have tokens that are not in Q
    tree: Tensor | None = None  # TreeMask.visible, where the new tokens are trees
    slots: Tensor | None = None  # instead of req_to_token: see drafts.branch_slots()


class BatchReader:
    """Makes a Step of a ForwardBatch.

    New tensors lie in buffers that captured graphs read at every replay.
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

    def read(self, forward_batch: Any) -> Step | None:
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

    def _read_rows(self, forward_batch: Any) -> Step | None:
        mode = forward_batch.forward_mode
        batch_size: int = forward_batch.batch_size
        if batch_size == 0 or mode.is_idle():
            return None
        rows, kv_lens = forward_batch.req_pool_indices[:batch_size], forward_batch.seq_lens[:batch_size]
        if mode.is_decode():
            return Step(batch_size, self.one_row_each(batch_size), 1, 1, kv_lens, rows)
        if mode.is_target_verify():
            return self._read_drafts(forward_batch.spec_info, kv_lens, rows)
        if mode.is_dllm_extend():
            refuse(f"the forward mode {mode.name}")
        qo_lens = forward_batch.extend_seq_lens[:batch_size]
        num_rows = forward_batch.positions.shape[0]
        host_lens = forward_batch.extend_seq_lens_cpu
        max_qo_len = num_rows if host_lens is None else int(max(host_lens))
        prefix_lens = forward_batch.extend_prefix_lens_cpu
        has_prefixes = prefix_lens is None or any(prefix_lens)
        return Step(
            num_rows,
            self._prefix_sum(qo_lens),
            qo_lens,
            max_qo_len,
            kv_lens,
            rows,
            has_prefixes=has_prefixes,
        )

    def _read_drafts(self, spec_info: Any, prefix_lens: Tensor, rows: Tensor) -> Step:
        batch_size, draft_len = rows.shape[0], int(spec_info.draft_token_num)
        tree = None if is_chain(spec_info) else self.trees.of_step(batch_size, draft_len).visible
        qo_indptr = torch.arange(
            0, (batch_size + 1) * draft_len, draft_len, dtype=torch.int32, device=self._device
        )
        return Step(
            batch_size * draft_len, qo_indptr, draft_len, draft_len, prefix_lens + draft_len, rows, tree=tree
        )

    def _fill_spans(self, forward_batch: Any, batch: Step) -> Spans:
        spans = self._spans
        if spans.max_rows < batch.num_rows:  # no graph has this size
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
        # a single prompt waits for this: the launch of a copy takes less time than the launch of a scan
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


class TreeMask:
    """The trees of a verifying step: which of its request's draft tokens a draft token sees. All of them see
    the request's own tokens.

    The tensor keeps its address, so captured graphs see every step's trees.

    SGLang hands over either only these cells, or rows that begin with a cell for each earlier token of the
    request. EAGLE's draft writes the first form directly into `visible`, which it finds as the backend's
    `verify_mask`.

    Attributes:
        visible: bool [max_batch * num_nodes, num_nodes]: whether a row of Q sees a node of its request's
            tree.
        num_nodes: draft tokens of a request, the root among them.
        offered: `visible` in SGLang's form.
    """

    def __init__(self, max_batch: int, num_nodes: int, is_chain: bool, device: torch.device) -> None:
        """is_chain: drafts have no branches: no kernel reads the mask, although SGLang writes it."""
        self.num_nodes = num_nodes
        self.visible = torch.ones(max_batch * num_nodes, num_nodes, dtype=torch.bool, device=device)
        self.offered = VerifyMask(
            buffer=self.visible.view(-1), mode=TreeMaskMode.QLEN_ONLY, max_bs=max_batch, is_read=not is_chain
        )

    def fill(self, mask: Tensor, prefix_lens: Tensor, has_prefixes: bool) -> None:
        """Copies the mask of a step. Does not wait for the device.

        Args:
            mask: bool, flat. It may be too short for a graph's padding requests, which get its last cell.
            prefix_lens: int32 or int64 [batch], tokens of each request before its tree.
            has_prefixes: whether each row of `mask` begins with a cell for each of those.
        """
        if mask.data_ptr() == self.visible.data_ptr():
            return
        batch, nodes = prefix_lens.shape[0], self.num_nodes
        target = self.visible[: batch * nodes].view(-1)
        columns = torch.arange(nodes, device=mask.device)
        if has_prefixes:
            row_lens = prefix_lens.to(torch.int64) + nodes
            begin = torch.cumsum(row_lens * nodes, 0) - row_lens * nodes
            cells = (
                (begin + prefix_lens)[:, None, None] + columns[:, None] * row_lens[:, None, None] + columns
            )
        else:
            cells = torch.arange(batch * nodes * nodes, device=mask.device)
        torch.index_select(mask, 0, cells.flatten().clamp_(max=mask.shape[0] - 1), out=target)


class TreeMasks:
    """The masks of a server's drafts: one mask for captured graphs, and a larger mask for larger steps."""

    def __init__(self, max_batch: int, num_nodes: int, are_trees: bool, device: torch.device) -> None:
        """num_nodes: draft tokens of a request; 0: none are verified."""
        self._are_trees = are_trees
        self._device = device
        self._mask = TreeMask(max_batch, num_nodes, not are_trees, device) if num_nodes else None
        self._large: TreeMask | None = None

    @property
    def offered(self) -> VerifyMask | None:
        """Where SGLang's drafts write their masks."""
        return None if self._mask is None else self._mask.offered

    def of_step(self, batch_size: int, num_nodes: int) -> TreeMask:
        """The mask of a step with drafts that are trees.

        Raises:
            ValueError: the server's settings have no such trees, so no layer has a plan for them.
        """
        if self._mask is None or not self._are_trees or num_nodes != self._mask.num_nodes:
            refuse(
                f"drafts that are trees of {num_nodes} tokens: the server's settings say nothing of them",
                "use --speculative-eagle-topk 1",
            )
        if batch_size * num_nodes <= self._mask.visible.shape[0]:
            return self._mask
        if self._large is None or batch_size * num_nodes > self._large.visible.shape[0]:
            self._large = TreeMask(2 * batch_size, num_nodes, False, self._device)
        return self._large

    def take(self, spec_info: Any, prefix_lens: Tensor) -> None:
        """Copies the masks of a step's drafts, if they are trees.

        Args:
            prefix_lens: int32 or int64 [batch], tokens of each request before its draft.
        """
        if spec_info is None or spec_info.custom_mask is None or is_chain(spec_info):
            return
        mask = self.of_step(prefix_lens.shape[0], int(spec_info.draft_token_num))
        mask.fill(spec_info.custom_mask, prefix_lens, _has_prefixes(spec_info, self._device))


def is_chain(spec_info: Any) -> bool:
    """Whether the drafts of a verifying step have no branches, so that a causal mask suffices.

    Only EAGLE's drafts have a number of branches.
    """
    return getattr(spec_info, "topk", None) == 1 or spec_info.draft_token_num == 1


def _has_prefixes(spec_info: Any, device: torch.device) -> bool:
    """Whether SGLang has made the long form of masks.

    EAGLE writes the short form, into `verify_mask`. NGRAM writes the long form, but on a CPU the short form.
    """
    return device.type == "cuda" and getattr(spec_info, "topk", None) is None


def items_of(forward_batch: Any, batch_size: int, device: torch.device) -> Items:
    """The items of a step (--enable-mis): a prompt, then items between delimiters, which do not see each
    other.

    It also moves the positions of their tokens, as SGLang's FlashInfer backend does: each item continues the
    prompt.

    Lengths and delimiters are on the host, so nothing waits for the device.

    Args:
        forward_batch: of SGLang; `multi_item_delimiter_indices` has the places of each request's delimiters
            among its new tokens, or is None.
    """
    delimiters = forward_batch.multi_item_delimiter_indices
    if delimiters is None or not forward_batch.forward_mode.is_extend():
        return Items(
            torch.full((batch_size,), _ALL, dtype=torch.int32, device=device),
            torch.zeros(batch_size, 1, dtype=torch.uint16, device=device),
        )
    lens = forward_batch.extend_seq_lens_cpu
    prefixes = forward_batch.extend_prefix_lens_cpu or [0] * batch_size
    prefix_len, in_items, moved = [], [], []
    begin = 0
    for new_len, cached, places in zip(lens, prefixes, delimiters, strict=True):
        first = int(places[0]) if len(places) else new_len
        offsets = torch.arange(new_len - first)
        last_delimiter = (
            places[(torch.searchsorted(places - first, offsets, right=True) - 1).clamp(min=0)] - first
            if len(places)
            else offsets
        )
        in_item = offsets - last_delimiter
        prefix_len.append(cached + first if len(places) else _ALL)
        in_items.append(in_item)
        moved.append((begin + first, begin + new_len, cached + first - 1 + in_item))
        begin += new_len
    longest = max(1, *(len(in_item) for in_item in in_items))
    table = torch.zeros(batch_size, longest, dtype=torch.uint16)
    for row, in_item in zip(table, in_items, strict=True):
        row[: len(in_item)] = in_item.to(torch.uint16)
    for start, end, positions in moved:
        forward_batch.positions[start:end] = positions.to(device, non_blocking=True)
    return Items(
        torch.tensor(prefix_len, dtype=torch.int32).to(device, non_blocking=True),
        table.to(device, non_blocking=True),
    )
