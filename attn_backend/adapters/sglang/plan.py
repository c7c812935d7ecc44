"""Plans of a step: the layers with one key share one."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_backend import Attention, BSRView, PageTable
from attn_backend.adapters.layer_variants import variant_of, visibility_of
from attn_backend.adapters.options import use_cascade
from attn_backend.adapters.plan_key import PlanKey

from . import compat
from .batch import Batch
from .support import tree_key


class Plan:
    """What the layers of one key share.

    Attributes:
        attention: captured by graphs: never replaced once there are any.
        of_trees: for steps that verify trees; None: there are no such steps.
        of_extends: for steps that extend, whose queries have the cache's 8 bits; None: theirs have 16, too.
        current: the Attention that holds this step's plan; None: there is no plan yet, or these layers take
            no part in this step.
        logits_soft_cap: what this step's runs are given.
        arguments: the variant's arguments in the runs of this step, without ALiBi slopes: each layer adds its
            own.
    """

    def __init__(
        self,
        key: PlanKey,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        max_batch: int,
        nodes_of_trees: int = 0,
        float8_extends: bool = False,
    ) -> None:
        """
        Args:
            dtype: of the model.
            nodes_of_trees: tokens of the trees that are verified; 0: there are none.
            float8_extends: see rounds_queries().

        Raises:
            ValueError: these layers cannot be served, or not with trees.
        """
        self.key = key
        self.attention = Attention(
            key.num_qo_heads,
            key.num_kv_heads,
            key.head_dim,
            head_dim_v=key.head_dim_v,
            dtype=dtype,
            q_dtype=key.kv_dtype if key.float8_q else None,
            kv_dtype=key.kv_dtype,
            device=device,
            max_rows=max_rows,
            max_batch=max_batch,
            cascade=use_cascade(),
            batch_invariant=compat.deterministic(),
            variant=variant_of(key),
            sinks=key.has_sinks,
        )
        self.of_trees = (
            Plan(tree_key(key), dtype, device, max_batch * nodes_of_trees, max_batch)
            if nodes_of_trees
            else None
        )
        self.of_extends = (
            Plan(key._replace(float8_q=True), dtype, device, max_rows, max_batch) if float8_extends else None
        )
        self.current: Attention | None = None
        self.logits_soft_cap = 0.0
        self.arguments: dict[str, Tensor | int] | None = None
        self._nodes_of_trees = nodes_of_trees
        self._large: Attention | None = None  # for steps beyond the bounds of `attention`

    def grow(self, max_rows: int, max_batch: int) -> None:
        """Makes room before anything is captured."""
        self.attention = self.attention.with_room(max_rows=max_rows, max_batch=max_batch)
        if self.of_trees is not None:
            self.of_trees.grow(max_batch * self._nodes_of_trees, max_batch)
        if self.of_extends is not None:
            self.of_extends.grow(max_rows, max_batch)

    def make(self, batch: Batch, table: PageTable, tokens_before: Tensor | None) -> Attention:
        """Plans a step. table, tokens_before: see page_table()."""
        planned = self
        if batch.tree is not None:
            assert self.of_trees is not None
            planned = self.of_trees
        elif batch.is_extend and self.of_extends is not None:
            planned = self.of_extends
        key = planned.key
        self.current = planned._attention_for(batch)
        self.logits_soft_cap = 0.0 if key.needs_variant else key.logits_soft_cap  # a variant knows its own
        self.arguments = _arguments(key, batch)
        causal, window = visibility_of(key, causal=True)
        view = BSRView(
            batch.qo_indptr,
            table,
            causal=causal,
            window_left=window,
            kv_offsets=tokens_before if key.needs_variant else None,
        )
        self.current.plan(view, variant_args=None if key.has_alibi else self.arguments)
        return self.current

    def _attention_for(self, batch: Batch) -> Attention:
        batch_size = batch.qo_indptr.shape[0] - 1
        if batch.num_rows <= self.attention.max_rows and batch_size <= self.attention.max_batch:
            return self.attention
        large = self._large or self.attention
        if batch.num_rows > large.max_rows or batch_size > large.max_batch:
            large = large.with_room(max_rows=2 * batch.num_rows, max_batch=batch_size)
        self._large = large
        return large


def _arguments(key: PlanKey, batch: Batch) -> dict[str, Tensor | int] | None:
    """What the variant of a key is given in this step."""
    if key.has_tree and batch.tree is not None:
        return {"visible": batch.tree}
    if key.has_items and batch.items is not None:
        return batch.items._asdict()
    if key.has_spans and batch.spans is not None:
        return {
            "span_begin": batch.spans.begin,
            "span_end": batch.spans.end,
            "window": -1 if key.cuts_spans else key.window_left,
        }
    return None
