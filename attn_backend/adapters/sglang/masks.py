"""The masks of some steps: trees of drafts, and the items of prompts."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from torch import Tensor

from attn_backend.adapters.layers import Items

from .support import refuse

_ALL = 2**30  # longer than any prompt, so that no item follows it


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
