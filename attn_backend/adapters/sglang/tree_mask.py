"""Speculative drafts that are trees: which of its request's draft tokens a draft token sees.

All of them see the request's own tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from torch import Tensor

from .support import refuse


class TreeMask:
    """The trees of a verifying step, where kernels read them.

    The tensor stays where it is, so captured graphs see every step's.

    SGLang hands over either these cells alone, or rows with a cell for each token of the request before them.
    EAGLE's draft writes the first form right into `visible`, which it finds as the backend's `verify_mask`.

    Attributes:
        visible: bool [max_batch * num_nodes, num_nodes]: whether a row of Q sees a node of its request's
            tree.
        num_nodes: draft tokens of a request, the root among them.
        offered: what SGLang is told of `visible`.
    """

    def __init__(self, max_batch: int, num_nodes: int, is_chain: bool, device: torch.device) -> None:
        """is_chain: drafts have no branches, so that no kernel reads the mask, though SGLang writes it."""
        self.num_nodes = num_nodes
        self.visible = torch.ones(max_batch * num_nodes, num_nodes, dtype=torch.bool, device=device)
        self.offered = VerifyMask(
            buffer=self.visible.view(-1), mode=TreeMaskMode.QLEN_ONLY, max_bs=max_batch, is_read=not is_chain
        )

    def fill(self, mask: Tensor, prefix_lens: Tensor, has_prefixes: bool) -> None:
        """Takes over the mask of a step. Does not wait for the device.

        Args:
            mask: bool, flat. What is missing at its end, for the requests that a graph is padded with, is its
                last cell.
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
    """The masks of the drafts that a server verifies: one that captured graphs read, and a larger one for
    steps for which no graph was captured.
    """

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
            ValueError: the server's settings say nothing of such trees, so no layer has a plan for them.
        """
        if self._mask is None or not self._are_trees or num_nodes != self._mask.num_nodes:
            raise refuse(
                f"drafts that are trees of {num_nodes} tokens: the server's settings say nothing of them",
                "use --speculative-eagle-topk 1",
            )
        if batch_size * num_nodes <= self._mask.visible.shape[0]:
            return self._mask
        if self._large is None or batch_size * num_nodes > self._large.visible.shape[0]:
            self._large = TreeMask(2 * batch_size, num_nodes, False, self._device)
        return self._large

    def take(self, spec_info: Any, prefix_lens: Tensor) -> None:
        """Takes over the masks of a step's drafts, if they are trees. prefix_lens: int32 or int64 [batch],
        tokens of each request before its draft.
        """
        if spec_info is None or spec_info.custom_mask is None or is_chain(spec_info):
            return
        mask = self.of_step(prefix_lens.shape[0], int(spec_info.draft_token_num))
        mask.fill(spec_info.custom_mask, prefix_lens, _has_prefixes(spec_info, self._device))


def is_chain(spec_info: Any) -> bool:
    """Whether the drafts of a verifying step have no branches: a causal mask is all that they need.

    Only EAGLE's say how many they have.
    """
    return getattr(spec_info, "topk", None) == 1 or spec_info.draft_token_num == 1


def _has_prefixes(spec_info: Any, device: torch.device) -> bool:
    """Which form of mask SGLang has made.

    EAGLE and its like write the short one, into `verify_mask`. NGRAM writes the long one, but on a CPU the
    short one.
    """
    return device.type == "cuda" and getattr(spec_info, "topk", None) is None
