"""MLA on random batches compared with float64: heads, query tokens, pages, latent formats, found or given
shared prefixes, trees, parts of Q.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import attention_kernels
import latent_cases
import pytest
import torch
from latent_cases import PLAIN, Batch
from tiers import mostly_slow

from attn_backend import Attention, BSRView, Composition, PageTable
from attn_backend.variants import builtin

pytestmark = pytest.mark.usefixtures("kernel")

CPU_CASES, CASES = 48, 480
FORMS = (PLAIN, "e4m3", "scaled")
HEADS = (16, 32, 64, 128)
# "found": by plan, in the page tables; "levels": given, as a composition of two.
KINDS = ("own tokens", "found", "levels", "tree")
MAX_QO_LEN, MAX_PAGE_SIZE = 64, 128
PREFIX_LENS = 64, 200  # a plan looks for prefixes of at least 64 tokens


@dataclass
class Case:
    """Consecutive seeds cycle through all combinations of form, number of heads and kind; the rest is
    random.
    """

    seed: int
    max_kv_len: int
    form: str = field(init=False)
    heads: int = field(init=False)
    kind: str = field(init=False)
    page_size: int = field(init=False)
    prefix_pages: int = field(init=False)
    qo_lens: list[int] = field(init=False)
    kv_lens: list[int] = field(init=False)
    form_of_q: str | None = field(init=False)
    options: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.form = FORMS[self.seed % 3]
        self.heads = HEADS[self.seed // 3 % 4]
        self.kind = KINDS[self.seed // 12 % 4]
        if self.kind == "tree" and self.form == "scaled":
            self.kind = "found"  # rows with separate scales have no variants
        self.page_size = draw.choice([1, 16, 64, MAX_PAGE_SIZE, _skewed(draw, MAX_PAGE_SIZE)])
        # speculation, or decodes and chunks of prompts together
        of_all = draw.choice([None, 1, _skewed(draw, MAX_QO_LEN)])
        is_shared = self.kind in ("found", "levels")
        self.qo_lens = [
            of_all or draw.choice([1, _skewed(draw, MAX_QO_LEN), draw.randint(1, MAX_QO_LEN), MAX_QO_LEN])
            for _ in range(draw.randint(2 if is_shared else 1, 4))
        ]
        self.prefix_pages = -(-draw.randint(*PREFIX_LENS) // self.page_size) if is_shared else 0
        least = [self.prefix_pages * self.page_size + qo_len for qo_len in self.qo_lens]
        if self.kind == "own tokens" and draw.random() < 0.3:
            least[0] = 0  # more query tokens than tokens, or none
        self.kv_lens = [begin + _skewed(draw, self.max_kv_len) - 1 for begin in least]
        self.form_of_q = draw.choice([None, *latent_cases.FORMS_OF_Q])
        self.options = draw.choice(
            [{}, {"num_ctas": 3}, {"num_ctas": 17}, {} if is_shared else {"batch_invariant": True}]
        )
        if self.kind == "found":
            self.options["cascade"] = "always"

    def batch(self, device: torch.device) -> Batch:
        draw = random.Random(~self.seed)
        scale = draw.choice([None, 0.5, torch.tensor([0.7])]) if self.form == "e4m3" else None
        dtype = (
            torch.float16
            if self.form != "scaled" and self.kind != "tree" and draw.random() < 0.3
            else torch.bfloat16
        )
        make = latent_cases.make_tree_batch if self.kind == "tree" else latent_cases.make_batch
        row_bytes = draw.choice([0, 1280])
        made = make(
            self.form,
            self.qo_lens,
            self.kv_lens,
            heads=self.heads,
            page_size=self.page_size,
            scale=scale,
            dtype=dtype,
            device=device,
            seed=self.seed,
            row_bytes=row_bytes,
        )
        if self.prefix_pages:
            made.share(self.prefix_pages)
        return made

    def composition(self, view: BSRView) -> BSRView | Composition:
        """The planned metadata: levels give the pages that all requests share."""
        if self.kind != "levels":
            return view
        table, device = view.table, view.qo_indptr.device
        assert table.indices is not None
        tokens = self.prefix_pages * self.page_size
        prefix = PageTable.block_table(
            table.indices[:1, : self.prefix_pages],
            torch.tensor([tokens], dtype=torch.int32, device=device),
            self.page_size,
        )
        own = PageTable.block_table(
            table.indices[:, self.prefix_pages :], table.kv_lens - tokens, self.page_size
        )
        return Composition.cascade([view.qo_indptr[[0, -1]], view.qo_indptr], [prefix, own], causal=True)


def _skewed(draw: random.Random, largest: int) -> int:
    """1 to largest, small ones more often."""
    return min(int((largest + 1) ** draw.random()), largest)


@pytest.mark.parametrize("seed", mostly_slow(range(CASES), fast=12, without_gpu=CPU_CASES))
def test_random_case(device: torch.device, seed: int) -> None:
    case = Case(seed, max_kv_len=300 if device.type == "cpu" else 3000)
    batch = case.batch(device)
    q, parts = batch.q, {}
    if case.form_of_q is not None:
        q, q_rope = latent_cases.parts_of_q(batch.q, case.form_of_q)
        batch.q, parts = torch.cat((q, q_rope), -1), {"q_rope": q_rope}
    planned: dict[str, Any] = {"variant_args": batch.tree_arguments()} if case.kind == "tree" else {}
    rows, kernel = len(q), attention_kernels.kernel_of(device)
    attention = Attention(
        case.heads,
        1,
        576,
        head_dim_v=512,
        dtype=batch.q.dtype,
        kv_dtype=batch.kv.k.dtype,
        device=device,
        max_rows=rows,
        max_batch=rows,
        max_levels=2 if case.kind == "levels" else 1,
        variant=builtin.tree_mask() if case.kind == "tree" else None,
        kernel=kernel,
        **case.options,
    )  # type: ignore[arg-type]
    attention.plan(case.composition(batch.view), **planned)
    batch.check(
        *attention.run(q, batch.kv, sm_scale=latent_cases.SM_SCALE, return_lse=True, **parts, **planned)
    )
    schedule = attention.schedule()
    assert schedule.errors == 0
    assert bool(schedule.forest) == (case.kind == "found")


def test_cases_are_of_every_sort() -> None:
    """The combinations that run without a GPU."""
    cases = [Case(seed, max_kv_len=300) for seed in range(CPU_CASES)]
    assert {(case.form, case.heads) for case in cases} == {(form, heads) for form in FORMS for heads in HEADS}
    assert {(case.form, case.kind) for case in cases} == {
        (form, kind) for form in FORMS for kind in KINDS
    } - {("scaled", "tree")}
    for kind in KINDS:
        qo_lens = [qo_len for case in cases if case.kind == kind for qo_len in case.qo_lens]
        assert (min(qo_lens), max(qo_lens) > MAX_QO_LEN / 2) == (1, True), kind
    assert MAX_QO_LEN in {qo_len for case in cases for qo_len in case.qo_lens}
    assert {1, MAX_PAGE_SIZE} < {case.page_size for case in cases}
    assert {case.form_of_q for case in cases} == {None, *latent_cases.FORMS_OF_Q}
    assert any(
        qo_len > kv_len for case in cases for qo_len, kv_len in zip(case.qo_lens, case.kv_lens, strict=True)
    )
