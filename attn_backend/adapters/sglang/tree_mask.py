"""Speculative drafts that are trees: which of its request's draft tokens a draft token sees. All of them see the request's own tokens."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from torch import Tensor


class TreeMask:
    """The trees of a verifying step, where kernels read them. The tensor stays where it is, so captured graphs see every step's.

    SGLang hands over either these cells alone, or rows with a cell for each token of the request before them. EAGLE's draft writes the first form right
    into `visible`, which it finds as the backend's `verify_mask`.

    Attributes:
        visible: bool [max_batch * num_nodes, num_nodes]: whether a row of Q sees a node of its request's tree.
        num_nodes: draft tokens of a request, the root among them.
        offered: what SGLang is told of `visible`.
    """

    def __init__(self, max_batch: int, num_nodes: int, is_chain: bool, device: torch.device) -> None:
        """is_chain: drafts have no branches, so that nobody reads the mask, though SGLang writes it."""
        self.num_nodes = num_nodes
        self.visible = torch.ones(max_batch * num_nodes, num_nodes, dtype=torch.bool, device=device)
        self.offered = VerifyMask(buffer=self.visible.view(-1), mode=TreeMaskMode.QLEN_ONLY, max_bs=max_batch, is_read=not is_chain)

    def fill(self, mask: Tensor, prefix_lens: Tensor, has_prefixes: bool) -> None:
        """Takes over the mask of a step. Does not wait for the device.

        Args:
            mask: bool, flat. What is missing at its end, for the requests that a graph is padded with, is its last cell.
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
            cells = (begin + prefix_lens)[:, None, None] + columns[:, None] * row_lens[:, None, None] + columns
        else:
            cells = torch.arange(batch * nodes * nodes, device=mask.device)
        torch.index_select(mask, 0, cells.flatten().clamp_(max=mask.shape[0] - 1), out=target)


def is_chain(spec_info: Any) -> bool:
    """Whether the drafts of a verifying step have no branches: a causal mask is all that they need. Only EAGLE's say how many they have."""
    return getattr(spec_info, "topk", None) == 1 or spec_info.draft_token_num == 1


def mask_has_prefixes(spec_info: Any, device: torch.device) -> bool:
    """Which form of mask SGLang has made. EAGLE and its like write the short one, into `verify_mask`. NGRAM writes the long one, but on a CPU the short one."""
    return device.type == "cuda" and getattr(spec_info, "topk", None) is None
