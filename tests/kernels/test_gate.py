"""Checks on every argument before it is used: tensors without plain memory, numbers beyond 32 bits, objects
that cannot be shared or copied.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy
import pytest
import torch
from attention_kernels import kernel_of
from gate_problem import HEAD_DIM, KV_HEADS, PAGE_SIZE, PAGES, QO_HEADS, ROWS, Problem
from tiers import mostly_slow
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_backend import (
    Attention,
    BSRView,
    Composition,
    KVCache,
    PageTable,
    append_kv,
    chain_speculative_sampling,
    sample,
    sample_from_probs,
    softmax,
    top_k_mask_logits,
    top_k_renorm_probs,
    top_p_renorm_probs,
)


class Wrapper(Tensor):
    """A subclass that holds no memory itself, like those for distributed or quantized tensors."""

    @staticmethod
    def __new__(cls, like: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(
        cls, func: object, types: object, args: object = (), kwargs: object = None
    ) -> object:
        return NotImplemented


def freed(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def freed_at_an_offset(tensor: Tensor) -> Tensor:
    both = torch.cat([tensor, tensor])
    view = both[len(tensor) :]
    both.untyped_storage().resize_(0)
    return view


def negated(tensor: Tensor) -> Tensor:
    return torch._neg_view(tensor)


SPOILT: dict[str, Callable[[Tensor], Tensor]] = {
    "fake": lambda tensor: FakeTensorMode().from_tensor(tensor),
    "wrapper": Wrapper,
    "freed": freed,
    "freed at an offset": freed_at_an_offset,
    "meta": lambda tensor: tensor.to("meta"),
    "negated": negated,
    "sparse": lambda tensor: tensor.to_sparse(),
    "gradient": lambda tensor: tensor.clone().requires_grad_(),
    "nested": lambda tensor: torch.nested.nested_tensor([tensor[0], tensor[1]]),
}


def calls(p: Problem, spoil: Callable[[Tensor], Tensor]) -> dict[str, Callable[[], object]]:
    """Calls with an invalid tensor, by the name of that tensor."""
    token, slots = p.q[:, :KV_HEADS], torch.arange(ROWS, device=p.q.device)
    pairs = {"k": p.kv.k, "v": p.kv.v}
    target = torch.stack([p.probs, p.probs], 1)
    draft, draft_ids = target[:, :1].contiguous(), torch.zeros(3, 1, dtype=torch.int32, device=p.q.device)

    def cache(name: str) -> KVCache:
        return KVCache.from_pair(**pairs | {name: spoil(pairs[name])})

    return {
        "q": lambda: p.attention.run(spoil(p.q), p.kv),
        "out": lambda: p.attention.run(p.q, p.kv, out=spoil(p.q)),
        "lse": lambda: p.attention.run(p.q, p.kv, lse=spoil(torch.zeros(ROWS, QO_HEADS, device=p.q.device))),
        "k (or kv.k)": lambda: p.attention.run(p.q, cache("k")),
        "v (or kv.v)": lambda: p.attention.run(p.q, cache("v")),
        "k": lambda: append_kv(spoil(token), token, p.kv, slots),
        "v": lambda: append_kv(token, spoil(token), p.kv, slots),
        "logits": lambda: sample(spoil(p.logits)),
        "logits (softmax)": lambda: softmax(spoil(p.logits)),
        "logits (mask)": lambda: top_k_mask_logits(spoil(p.logits), 3),
        "temperature": lambda: sample(p.logits, temperature=spoil(torch.ones(3, device=p.q.device))),
        "probs": lambda: sample_from_probs(spoil(p.probs)),
        "probs (top-k)": lambda: top_k_renorm_probs(spoil(p.probs), 3),
        "probs (top-p)": lambda: top_p_renorm_probs(spoil(p.probs), 0.5),
        "draft_probs": lambda: chain_speculative_sampling(spoil(draft), draft_ids, target),
        "target_probs": lambda: chain_speculative_sampling(draft, draft_ids, spoil(target)),
    }


def index_calls(p: Problem, spoil: Callable[[Tensor], Tensor]) -> dict[str, Callable[[], object]]:
    def plan(qo_indptr: Tensor, block_table: Tensor, kv_lens: Tensor) -> None:
        p.attention.plan(BSRView(qo_indptr, PageTable.block_table(block_table, kv_lens, PAGE_SIZE)))

    token = p.q[:, :KV_HEADS]
    return {
        "qo_indptr": lambda: plan(spoil(p.qo_indptr), p.block_table, p.kv_lens),
        "block_table": lambda: plan(p.qo_indptr, spoil(p.block_table), p.kv_lens),
        "kv_lens": lambda: plan(p.qo_indptr, p.block_table, spoil(p.kv_lens)),
        "slots": lambda: append_kv(token, token, p.kv, spoil(p.kv_lens)),
        "seed": lambda: sample(p.logits, seed=spoil(torch.arange(3, device=p.q.device))),
        "token_mask": lambda: sample(
            p.logits, token_mask=spoil(torch.full((3, 2), -1, dtype=torch.int32, device=p.q.device))
        ),
        "out": lambda: sample(p.logits, out=spoil(torch.zeros(3, dtype=torch.int32, device=p.q.device))),
    }


@pytest.mark.parametrize("kind", SPOILT)
def test_tensors_without_plain_memory_are_refused(device: torch.device, kind: str) -> None:
    problem = Problem(device)
    expected = problem.run()
    for name, call in calls(problem, SPOILT[kind]).items():
        with pytest.raises(ValueError, match=rf"^(kv\.)?{name.split()[0]}[ .]") as refused:
            call()
        assert "must be" in str(refused.value), name
    if kind not in ("gradient", "negated"):
        for name, call in index_calls(problem, SPOILT[kind]).items():
            # A view's tensors are on one device: if two differ, either may be the wrong one.
            with pytest.raises(ValueError, match=rf"^{name}[ .]" if kind != "meta" else "must be"):
                call()
        problem.attention.plan(problem.view)
    assert torch.equal(problem.attention.run(problem.q, problem.kv), expected)


def test_gradients_are_refused_only_where_they_are_recorded(device: torch.device) -> None:
    problem = Problem(device)
    expected = problem.run()
    q = problem.q.clone().requires_grad_()
    with torch.no_grad():
        assert torch.equal(problem.attention.run(q, problem.kv), expected)
    with torch.inference_mode():
        assert torch.equal(problem.attention.run(q, problem.kv), expected)


@pytest.mark.parametrize("rows_from", mostly_slow(["plain", "row list", "forest"], fast=2))
def test_a_q_without_rows(device: torch.device, rows_from: str) -> None:
    """Every row of the plan is beyond q."""
    problem = Problem(device, cascade="always")
    rows = torch.tensor([2, 0, 3, 1], dtype=torch.int32, device=device) if rows_from == "row list" else None
    block_table = (
        problem.block_table
        if rows_from != "forest"
        else torch.tensor([[5, i] for i in range(ROWS)], dtype=torch.int32, device=device)
    )
    kv_lens = problem.kv_lens if rows_from != "forest" else problem.kv_lens * 2
    view = BSRView(problem.qo_indptr, PageTable.block_table(block_table, kv_lens, PAGE_SIZE), rows=rows)
    problem.attention.plan(view)
    if rows_from == "forest":
        assert problem.attention.schedule().forest[0].group >= 0
    lse = torch.empty(0, QO_HEADS, device=device)
    assert problem.attention.run(problem.q[:0], problem.kv, lse=lse).shape == (0, QO_HEADS, HEAD_DIM)
    whole = problem.attention.run(problem.q, problem.kv)
    some = problem.attention.run(problem.q[:2], problem.kv)
    torch.testing.assert_close(some, whole[:2], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dim", [0, 1])
def test_an_output_that_overlaps_itself_is_refused(device: torch.device, dim: int) -> None:
    problem = Problem(device)
    problem.run()
    shape = [ROWS, QO_HEADS, HEAD_DIM]
    stored = shape.copy()
    stored[dim] = 1
    out = torch.zeros(stored, dtype=torch.bfloat16, device=device).expand(shape)
    with pytest.raises(
        ValueError,
        match=rf"^out\.stride\({dim}\) is 0, must be such that no two elements lie in the same place",
    ):
        problem.attention.run(problem.q, problem.kv, out=out)
    transposed = torch.zeros(QO_HEADS, ROWS, HEAD_DIM, dtype=torch.bfloat16, device=device).transpose(0, 1)
    assert torch.equal(
        problem.attention.run(problem.q, problem.kv, out=transposed),
        problem.attention.run(problem.q, problem.kv),
    )


def test_a_cache_that_overlaps_itself_is_not_appended_to(device: torch.device) -> None:
    problem = Problem(device)
    kv = KVCache(problem.kv.k[:1].expand(PAGES, -1, -1, -1), problem.kv.v)
    token = problem.q[:, :KV_HEADS]
    with pytest.raises(ValueError, match=r"^kv\.k\.stride\(0\) is 0, must be"):
        append_kv(token, token, kv, torch.arange(ROWS, device=device))


@pytest.mark.parametrize("value", [0, -1, 2**31, 2**32 + 4, 2**40, 2**63, 2**70, True, 1.0, "4", None])
@pytest.mark.parametrize(
    "name", ["num_qo_heads", "num_kv_heads", "head_dim", "max_rows", "max_batch", "max_levels", "num_ctas"]
)
def test_sizes_of_an_object(name: str, value: object) -> None:
    if name == "num_ctas" and value is None:
        return  # the default
    sizes = {
        "num_qo_heads": QO_HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_rows": 8,
        "max_batch": 4,
    } | {name: value}
    with pytest.raises(ValueError, match=rf"^{name} is .*, must be"):
        Attention(**sizes, device="cpu")  # type: ignore[arg-type]


def test_products_of_sizes() -> None:
    with pytest.raises(ValueError, match=r"^max_rows \* max_levels is 2147483648, must be below 2\^31"):
        Attention(1, 1, 64, device="cpu", max_rows=2**28, max_batch=4, max_levels=8)
    with pytest.raises(
        ValueError, match=r"^max_rows is 536870912, must be below 2\^31 when multiplied by the 4 query heads"
    ):
        Attention(4, 1, 64, device="cpu", max_rows=2**29, max_batch=4)


def test_numbers_of_other_packages_are_numbers() -> None:
    logits = Problem(torch.device("cpu")).logits
    expected = sample(logits, temperature=0.5, seed=3).token_ids
    assert torch.equal(sample(logits, temperature=numpy.float64(0.5), seed=3).token_ids, expected)


def test_pages_before_a_window_may_be_anything() -> None:
    """An engine frees such pages."""
    problem = Problem(torch.device("cpu"))
    table = torch.tensor([[-1, -1, 2, 3]], dtype=torch.int32)
    view = BSRView(
        torch.tensor([0, 1]), PageTable.block_table(table, torch.tensor([64]), PAGE_SIZE), window_left=31
    )
    problem.attention.plan(view)
    out = problem.attention.run(problem.q[:1], problem.kv)
    table[0, :2] = 5
    problem.attention.plan(view)
    assert torch.equal(problem.attention.run(problem.q[:1], problem.kv), out)
    with pytest.raises(ValueError, match=r"^block_table: page 0 of request 0 is -1, must be 0 or more"):
        problem.attention.plan(
            BSRView(
                view.qo_indptr,
                PageTable.block_table(table.masked_fill(table == 5, -1), torch.tensor([64]), PAGE_SIZE),
                window_left=32,
            )
        )


@pytest.mark.parametrize("cascade", [[1], {}, 2, None, "sometimes", numpy.ones(2)])
def test_cascade_modes(cascade: object) -> None:
    with pytest.raises(ValueError, match=r"^cascade is .*, must be True, False or 'always'"):
        Attention(1, 1, 64, device="cpu", max_rows=4, max_batch=4, cascade=cascade)  # type: ignore[arg-type]


@pytest.mark.parametrize("page_size", [0, -1, 2**31, 2**63, 2**70, True, 16.0, "16", None])
def test_page_sizes(page_size: object) -> None:
    lens = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^page_size is .*, must be an int in \[1, 2147483647\]"):
        PageTable.block_table(torch.zeros(1, 1, dtype=torch.int32), lens, page_size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^page_size is .*, must be an int in \[1, 2147483647\]"):
        KVCache.from_slots(torch.zeros(4, 1, 64), torch.zeros(4, 1, 64), page_size)  # type: ignore[arg-type]


@pytest.mark.parametrize("window_left", [-2, 2**31, 2**70, False, None, 1.5])
def test_windows(window_left: object) -> None:
    with pytest.raises(ValueError, match=r"^window_left is .*, must be an int in \[-1, 2147483647\]"):
        BSRView(
            torch.zeros(1, dtype=torch.int32),
            PageTable.ragged(torch.zeros(1, dtype=torch.int32)),
            window_left=window_left,
        )  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["sm_scale", "logits_soft_cap"])
@pytest.mark.parametrize("value", [10**400, float("nan"), float("inf"), 1e300, -1.0, "1", 1j])
def test_numbers_of_run(name: str, value: object) -> None:
    problem = Problem(torch.device("cpu"))
    problem.run()
    with pytest.raises(ValueError, match=rf"^{name} is .*, must be"):
        problem.attention.run(problem.q, problem.kv, **{name: value})  # type: ignore[arg-type]


def test_shapes_beyond_32_bits() -> None:
    """Expanded views of one element: they are refused before anything is read."""
    problem = Problem(torch.device("cpu"))
    problem.run()
    many = problem.q[:1].expand(2**31, -1, -1)
    with pytest.raises(ValueError, match=r"^q\.shape\[0\] \(rows\) is 2147483648, must be in"):
        problem.attention.run(many, problem.kv, out=many)
    one = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)
    token = torch.zeros(1, 1, 1, dtype=torch.bfloat16)
    slots = torch.zeros(1, dtype=torch.int64)
    for shape, name in (((2**32, 1, 1, 1), "pages"), ((1, 2**32 + 16, 1, 1), "page_size")):
        with pytest.raises(
            ValueError, match=rf"^kv\.k\.shape\[\d\] \({name}\) is \d+, must be in|^kv\.k\.stride"
        ):
            append_kv(token, token, KVCache(one.expand(shape), one.expand(shape)), slots)


def test_a_refused_plan_leaves_no_plan() -> None:
    problem = Problem(torch.device("cpu"), max_levels=2)
    wrong = BSRView(
        problem.qo_indptr, PageTable.block_table(problem.block_table, problem.kv_lens + 100, PAGE_SIZE)
    )
    too_many = BSRView(
        torch.arange(9, dtype=torch.int32), PageTable.ragged(torch.arange(9, dtype=torch.int32))
    )
    for composition in (
        wrong,
        Composition([wrong, problem.view]),
        Composition([problem.view, wrong]),
        too_many,
        "no view",
    ):
        problem.run()
        with pytest.raises(ValueError, match="must be"):
            problem.attention.plan(composition)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="before a successful plan"):
            problem.attention.run(problem.q, problem.kv)
    problem.run()


@pytest.mark.parametrize("copies", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_object_is_not_copied(copies: Callable[[object], object]) -> None:
    problem = Problem(torch.device("cpu"))
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copies(problem.attention)
    problem.run()


def test_lengths_far_beyond_ragged_k_and_v(device: torch.device) -> None:
    """Two billion tokens, but only sixteen exist: refused at once on a CPU, clamped on a GPU."""
    attention = Attention(
        QO_HEADS, KV_HEADS, HEAD_DIM, device=device, max_rows=256, max_batch=4, kernel=kernel_of(device)
    )
    qo_indptr, kv_indptr = (
        torch.tensor([0, 64, 65], device=device),
        torch.tensor([0, 2**31 - 1, 2**31 - 1], device=device),
    )
    attention.plan(BSRView(qo_indptr, PageTable.ragged(kv_indptr)))
    q = torch.ones(65, QO_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    k = torch.ones(16, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    if device.type == "cpu":
        with pytest.raises(
            ValueError, match=r"^kv_indptr\[2\] is 2147483647, must be at most 16, the rows of K and V"
        ):
            attention.run(q, KVCache.from_ragged(k, k))
    else:
        assert attention.run(q, KVCache.from_ragged(k, k)).isfinite().all()
        with pytest.raises(ValueError, match="page id"):
            attention.raise_for_errors()


def test_a_wrong_cache_does_not_spoil_the_next_run() -> None:
    problem = Problem(torch.device("cpu"))
    expected = problem.run()
    with pytest.raises(
        ValueError, match=r"^block_table: page 0 of request 2 is 2, must be in \[0, 2\), what the cache has"
    ):
        problem.attention.run(problem.q, KVCache(problem.kv.k[:2], problem.kv.v[:2]))
    assert torch.equal(problem.attention.run(problem.q, problem.kv), expected)
