"""The range of tokens that a variant's mask lets each row see. It is found before a plan, narrows row tiles,
and changes no result.
"""

from __future__ import annotations

from typing import Any

import case_tensors
import cases
import forests
import numpy
import oracle
import pytest
import torch
from cases import Spec
from tiers import mostly_slow
from torch import Tensor

from attn_backend import Variant
from attn_backend.jit import compilers
from attn_backend.variants import builtin

pytestmark = [
    pytest.mark.usefixtures("kernel"),
    pytest.mark.skipif(compilers.cpp_compiler() is None, reason="needs a C++ compiler"),
]

DOCUMENTS = builtin.document()
# Holes inside; a different interval for each head.
HEADS = Variant.from_source(
    "bool mask(const ScoreRow& row, int32_t kv_position) const { return kv_position / width % (2 + "
    "row.qo_head) != 0; }",
    {"width": int},
    name="heads",
)


def documents(rng: numpy.random.Generator, batch: int, longest: int, device: torch.device) -> Tensor:
    """int32 [batch, longest]: documents of skewed lengths."""
    ids = torch.zeros(max(batch, 1), max(longest, 1), dtype=torch.int32)
    for row in ids:
        begin = 0
        while begin < len(row):
            begin += int(rng.choice([1, 7, 60, 300]))
            row[begin:] += 1
    return ids.to(device)


def document_oracle(ids: Tensor) -> oracle.Variant:
    return oracle.Variant(mask=lambda at: ids[at.request][at.position.clamp(0)] == ids[at.request][at.token])


def heads_oracle(width: int) -> oracle.Variant:
    return oracle.Variant(
        mask=lambda at: torch.div(at.token, width, rounding_mode="floor") % (2 + at.head) != 0
    )


def random_arguments(seed: int, case: case_tensors.Case) -> tuple[Variant, dict[str, Any], oracle.Variant]:
    if seed % 2:
        return HEADS, {"width": 1 + seed % 90}, heads_oracle(1 + seed % 90)
    ids = documents(
        numpy.random.default_rng(seed), len(case.spec.qo_lens), max(case.spec.kv_lens, default=1), case.device
    )
    return DOCUMENTS, {"document_ids": ids}, document_oracle(ids)


@pytest.mark.parametrize("seed", mostly_slow(range(60), fast=6, without_gpu=30))
def test_random_cases(device: torch.device, seed: int) -> None:
    spec = cases.random_spec(5 * 10**6 + seed, device.type).with_(
        logits_soft_cap=0.0, dtype=torch.bfloat16, head_dim=64
    )
    case = case_tensors.build(spec, device)
    variant, arguments, reference = random_arguments(seed, case)
    attention = case.attention(
        variant=variant, batch_invariant=seed % 5 == 0, cascade=["always", False][seed % 3 == 0]
    )
    for to_plan in (arguments, None):
        attention.plan(case.view, variant_args=to_plan)
        case.run(attention, out=case.out, lse=case.lse, variant_args=arguments)
        case_tensors.check(case, case.out, case.lse, case.expected(variant=reference))
    case_tensors.check_padding(case)


@pytest.mark.parametrize("seed", mostly_slow(range(16), fast=2))
def test_with_shared_prefixes(device: torch.device, seed: int) -> None:
    rng = numpy.random.default_rng([seed, 61])
    problem = forests.random_problem(rng, device)
    problem.shape = forests.replace(problem.shape, logits_soft_cap=0.0)
    if problem.shape.dtype != torch.bfloat16 or problem.shape.head_dim != 64:
        shape = forests.replace(problem.shape, dtype=torch.bfloat16, head_dim=64)
        problem = forests.make_problem(rng, shape, problem.batch, device)
    ids = documents(rng, len(problem.batch.kv_lens), max(problem.batch.kv_lens, default=1), device)
    attention = problem.attention(variant=DOCUMENTS, cascade="always")
    attention.plan(problem.batch.view(rng, device), variant_args={"document_ids": ids})
    options = {"sm_scale": problem.shape.sm_scale, "variant_args": {"document_ids": ids}}
    attention.run(problem.q, problem.memory.kv, out=problem.out, lse=problem.lse, **options)  # type: ignore[arg-type]
    problem.check(problem.expected(variant=document_oracle(ids)))


def test_row_tiles_end_where_their_documents_do(device: torch.device) -> None:
    """With a causal mask too, KV tiles of earlier documents and of later tokens are not visited."""
    tokens, length = 4096, 512
    case = case_tensors.build(
        Spec((tokens,), (tokens,), head_dim=128, dtype=torch.bfloat16, num_kv_heads=1, group_size=4), device
    )
    ids = (torch.arange(tokens, device=device, dtype=torch.int32) // length)[None]
    attention = case.attention(variant=DOCUMENTS & builtin.causal())
    attention.plan(case.view, variant_args={"document_ids": ids})
    schedule = attention.schedule()
    rows = 128 // 4
    for _, _, packed_begin, kv_begin, kv_end, num_kv_tiles in schedule.tiles.tolist():
        first = packed_begin // 4
        document = first // length * length
        assert kv_end == first + rows
        assert kv_begin == document // schedule.kv_tile * schedule.kv_tile
        assert num_kv_tiles == -(-(kv_end - kv_begin) // schedule.kv_tile)


@pytest.mark.parametrize("seed", mostly_slow(range(12), fast=2))
def test_masks_with_holes(device: torch.device, seed: int) -> None:
    """Full at the beginning, at the end, in the middle."""
    bounds = sorted(numpy.random.default_rng(seed).integers(0, 700, 4).tolist())
    holes = dict(zip(("a", "b", "c", "d"), bounds, strict=True))
    variant = Variant.from_source(
        "bool mask(const ScoreRow&, int32_t k) const { return !((a <= k && k < b) || (c <= k && k < d)); }",
        dict.fromkeys(holes, int),
        name="holes",
    )
    reference = oracle.Variant(
        mask=lambda at: (
            ~(
                ((at.token >= bounds[0]) & (at.token < bounds[1]))
                | ((at.token >= bounds[2]) & (at.token < bounds[3]))
            )
        )
    )
    case = case_tensors.build(
        Spec((1, 90, 200), (900, 600, 300), head_dim=64, dtype=torch.bfloat16, seed=seed), device
    )
    attention = case.attention(variant=variant)
    attention.plan(case.view, variant_args=holes)
    case.run(attention, out=case.out, lse=case.lse, variant_args=holes)
    case_tensors.check(case, case.out, case.lse, case.expected(variant=reference))


def test_a_row_that_sees_nothing(device: torch.device) -> None:
    nothing = Variant.from_source(
        "bool mask(const ScoreRow& row, int32_t) const { return row.index % 2 == 1; }",
        name="every_second_row",
    )
    case = case_tensors.build(Spec((5, 200), (90, 300), head_dim=64, dtype=torch.bfloat16), device)
    attention = case.attention(variant=nothing)
    attention.plan(case.view)  # a mask without parameters needs no arguments
    case.run(attention, out=case.out, lse=case.lse)
    case_tensors.check(
        case, case.out, case.lse, case.expected(variant=oracle.Variant(mask=lambda at: at.index % 2 == 1))
    )
    assert (case.out[0] == 0).all()
    assert (case.lse[0] == -torch.inf).all()


def test_a_batch_of_no_requests(device: torch.device) -> None:
    case = case_tensors.build(Spec((), (), head_dim=64, dtype=torch.bfloat16), device)
    attention = case.attention(variant=DOCUMENTS)
    arguments = {"document_ids": torch.zeros(1, 1, dtype=torch.int32, device=device)}
    attention.plan(case.view, variant_args=arguments)
    assert len(attention.schedule().tiles) == 0


@pytest.mark.gpu
def test_in_a_cuda_graph(device: torch.device) -> None:
    """Captured once: each replay finds changed documents again."""
    if device.type != "cuda":
        pytest.skip("graphs are CUDA's")
    case = case_tensors.build(Spec((300, 1, 40), (700, 900, 40), head_dim=64, dtype=torch.bfloat16), device)
    ids = documents(numpy.random.default_rng(1), 3, 900, device)
    attention = case.attention(variant=DOCUMENTS)
    graph = case_tensors.captured(case, attention, {"document_ids": ids})
    for seed in range(4):
        ids.copy_(documents(numpy.random.default_rng(seed), 3, 900, device))
        graph.replay()
        case_tensors.check(case, case.out, case.lse, case.expected(variant=document_oracle(ids)))
