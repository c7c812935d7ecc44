"""Draft models on this backend: EAGLE drafts tokens in consecutive steps, each with a plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .backend import SGLangAttentionBackend
from .plan import Step
from .support import check_drafts


class DraftStepsBackend:
    """The backends of `speculative_num_steps - 1` consecutive draft steps, one for each step. (The first
    token comes from the step before.)

    All steps are planned before the first one runs, in the captured graph where there is one.

    Raises:
        ValueError: the draft model is not supported.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, topk: int, num_steps: int) -> None:
        """
        Args:
            runner: of the draft model.
            topk: branches of each request's tree.
            num_steps: tokens of a branch.
        """
        check_drafts(runner)
        self.topk, self.speculative_num_steps = topk, num_steps
        self.page_size: int = runner.page_size or 1
        self.req_to_token_pool = runner.req_to_token_pool
        self.attn_backends = [SGLangAttentionBackend(runner, branches=topk) for _ in range(num_steps - 1)]

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs * self.topk, max_num_tokens)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """All is planned in the graph."""

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        batch_size: int = forward_batch.batch_size
        if batch_size == 0 or forward_batch.forward_mode.is_idle():
            for backend in self.attn_backends:
                backend.plan_step(None)
            return
        rows, lens = forward_batch.req_pool_indices[:batch_size], forward_batch.seq_lens[:batch_size]
        slots = None
        if self.topk > 1:
            slots = branch_slots(
                self.req_to_token_pool.req_to_token,
                rows,
                lens,
                self.topk,
                self.speculative_num_steps,
                self.page_size,
            )
            rows, lens = (
                torch.arange(batch_size * self.topk, device=rows.device),
                lens.repeat_interleave(self.topk),
            )
        for i, backend in enumerate(self.attn_backends):
            backend.plan_step(
                Step(len(rows), backend.one_row_each(len(rows)), 1, 1, lens + i + 1, rows, slots=slots)
            )


def branch_slots(
    req_to_token: Tensor, rows: Tensor, prefix_lens: Tensor, topk: int, num_steps: int, page_size: int
) -> Tensor:
    """The slots of each branch of each request's draft: its prefix, followed by the branch's own tokens.

    SGLang keeps the branches of a request after its prefix, each from the beginning of a page on. If the
    prefix ends within a page, all branches after the first begin with a copy of that page.

    Args:
        req_to_token: int32 [requests, max_tokens].
        rows: int32 or int64 [batch], of req_to_token.
        prefix_lens: int32 or int64 [batch], tokens before the draft.
        topk: branches of a request.
        num_steps: tokens of a branch.
        page_size: tokens.

    Returns:
        int32 [batch * topk, max_tokens], a row like one of req_to_token for each branch. Entries after its
        tokens are arbitrary slots.
    """
    max_tokens = req_to_token.shape[1]
    in_page = prefix_lens % page_size
    whole_pages = prefix_lens - in_page
    branch_len = torch.div(in_page + num_steps + page_size - 1, page_size, rounding_mode="floor") * page_size
    skipped = torch.arange(topk, device=rows.device) * branch_len[:, None]  # [batch, topk]
    columns = torch.arange(max_tokens, device=rows.device)
    moved = columns + torch.where(columns >= whole_pages[:, None, None], skipped[:, :, None], 0)
    return req_to_token[rows[:, None, None], moved.clamp_(max=max_tokens - 1)].view(-1, max_tokens)


def create_steps(factory: Any) -> DraftStepsBackend:
    """The backend of a draft model's consecutive steps. factory: SGLang's DraftBackendFactory."""
    return DraftStepsBackend(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)


def create_extend(factory: Any) -> SGLangAttentionBackend:
    """The backend of the draft model's passes over prompts and over accepted tokens.

    If the runner already has one of our backends, it serves these passes, too.
    """
    runner = factory.draft_model_runner
    of_runner = getattr(runner, "attn_backend", None)
    if isinstance(of_runner, SGLangAttentionBackend):
        return of_runner
    check_drafts(runner)
    return SGLangAttentionBackend(runner)
