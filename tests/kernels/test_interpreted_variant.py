"""Variants on a CPU without a C++ compiler: the same results, from their Python functions."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import case_tensors
import cases
import float8_cases
import numpy
import pytest
import torch
from float8_cases import Float8Case
from tiers import mostly_slow
from variant_fuzz.arguments import Sizes, ids
from variant_fuzz.catalogue import Entry, by_reference, entries
from variant_fuzz.runner import run_case, tasks

from attn_backend import Attention, BSRView, Composition, KVCache, PageTable, Variant
from attn_backend.jit import compilers, progress
from attn_backend.kernels.interpreter import can_be_interpreted
from attn_backend.variants import builtin

CPU = torch.device("cpu")
# levels, a forest, chunks; number 1 has too many rows and tokens: it takes twenty times as long as these
CASES = (0, 2, 5)
INTERPRETED = [entry for entry in entries() if can_be_interpreted(entry.variant)]


@pytest.fixture(autouse=True)
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_BACKEND_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compilers, "cpp_compiler", lambda: None)
    monkeypatch.setattr(progress, "warned", set())


def test_traced_functions_and_builtins_are_interpreted() -> None:
    assert len(INTERPRETED) >= 60
    assert {entry.name for entry in entries() if entry.is_builtin} <= {entry.name for entry in INTERPRETED}


@pytest.mark.parametrize("entry", mostly_slow(INTERPRETED, fast=6), ids=lambda entry: entry.name)
def test_random_batches(entry: Entry) -> None:
    (task,) = tasks(CPU, len(entries()), [entry.name])
    form = replace(task.form, dtype=torch.float32, sinks=entry.variant.uses_softmax)
    failures = [message for number in CASES if (message := run_case(number, entry, form)[1])]
    assert not failures, "\n".join(failures)


def attention(variant: Variant, **options: Any) -> Attention:
    return Attention(
        4, 2, 64, dtype=torch.float32, device="cpu", max_rows=8, max_batch=2, variant=variant, **options
    )


@pytest.mark.parametrize("q_form", [None, *float8_cases.Q_SCALES])
def test_caches_of_8_bits(q_form: str | None) -> None:
    """With scales in each form. Logits ignore them: a bias is not scaled.

    Rows of one request, also after a prefix that several share.
    """
    variant = builtin.document() & builtin.alibi() & builtin.soft_cap(3.0)
    for seed, k_form in enumerate(float8_cases.SCALES):
        spec = cases.Spec(
            (5, 1, 20), (40, 50, 20), group_size=2, dtype=torch.float32, sharing=0.8, num_ctas=3, seed=seed
        )
        problem = Float8Case(
            spec,
            CPU,
            float8_cases.DTYPES[seed % len(float8_cases.DTYPES)],
            k_form,
            float8_cases.SCALES[seed - 2],
            q_form,
        )
        case, rng = problem.case, numpy.random.default_rng(seed)
        args = ids("document_ids")(rng, Sizes(spec.qo_lens, spec.kv_lens, 4)) | {"slopes": torch.rand(4)}
        attention = case.attention(variant=variant, sinks=True, **problem.options)
        attention.plan(case.view, variant_args=args)
        sinks = torch.linspace(-2, 1, 4)
        case.run(attention, out=case.out, lse=case.lse, variant_args=args, sinks=sinks, **problem.run_options)
        case_tensors.check(
            case, case.out, case.lse, problem.expected(variant=by_reference(variant, args), sinks=sinks)
        )


@pytest.mark.parametrize("q_form", [None, "head"])
def test_transforms_of_caches_of_8_bits(q_form: str | None) -> None:
    """They see scaled values, each token with the scale of its request."""
    variant = builtin.rope(builtin.rope_frequencies(32))
    for seed, k_form in enumerate(float8_cases.SCALES):
        spec = cases.Spec(
            (5, 1, 20), (40, 50, 20), group_size=2, dtype=torch.float32, sharing=0.8, num_ctas=3, seed=seed
        )
        problem = Float8Case(
            spec,
            CPU,
            float8_cases.DTYPES[seed % len(float8_cases.DTYPES)],
            k_form,
            float8_cases.SCALES[seed - 2],
            q_form,
        )
        case = problem.case
        attention = case.attention(variant=variant, cascade=False, **problem.options)
        attention.plan(case.view)
        case.run(attention, out=case.out, lse=case.lse, **problem.run_options)
        case_tensors.check(case, case.out, case.lse, problem.expected(variant=by_reference(variant, {})))


def indptr(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_one_warning_names_the_variant_and_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        attention(builtin.alibi())
        attention(builtin.soft_cap(3.0))
    (message,) = [record.getMessage() for record in caplog.records]
    assert "variant alibi is interpreted, many times slower than compiled" in message
    assert "no C++ compiler was found: install g++, or set CXX to a C++ compiler" in message


def test_what_cannot_be_interpreted_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Variant.from_source(
        "float logits(float logit, const ScoreRow&, int32_t) const { return 2 * logit; }", name="doubled"
    )
    with pytest.raises(RuntimeError, match=r"variant doubled .* cannot be compiled: no C"):
        attention(own)
    monkeypatch.setenv("ATTN_BACKEND_JIT", "0")
    with pytest.raises(RuntimeError, match="ATTN_BACKEND_JIT=0"):
        attention(builtin.alibi())


def test_an_index_outside_of_a_tensor_is_moved_to_its_edge() -> None:
    def added(score, b, h, q_idx, kv_idx):
        return score + table[b, kv_idx - 5] + table[b + 1, kv_idx]

    functions = Variant.from_functions(score_mod=added, tensors={"table": (torch.float32, 2)}).reference()
    assert functions is not None
    requests, tokens = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 4, 9, 1, 9])
    zeros = torch.zeros(5, dtype=torch.int64)
    table = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    scores = functions.logits(torch.zeros(5), requests, zeros, zeros, tokens, {"table": table})
    assert scores.tolist() == [1 + 4, 3 + 6, 3 + 6, 4 + 5, 6 + 6]


def test_arguments_are_checked_as_ever() -> None:
    planned = attention(builtin.alibi())
    q, kv = torch.randn(3, 4, 64), KVCache.from_ragged(torch.randn(40, 2, 64), torch.randn(40, 2, 64))
    slopes = torch.rand(4)
    with pytest.raises(ValueError, match="before a successful plan"):
        planned.run(q, kv, variant_args={"slopes": slopes})
    planned.plan(BSRView(indptr(0, 3), PageTable.ragged(indptr(0, 40))))
    for wrong, match in (
        ({}, "slopes.* missing"),
        ({"slopes": slopes.double()}, "slopes"),
        ({"slope": slopes}, "'slope' is unknown"),
    ):
        with pytest.raises(ValueError, match=match):
            planned.run(q, kv, variant_args=wrong)
    with pytest.raises(ValueError, match="logits_soft_cap is 2, must be 0"):
        planned.run(q, kv, variant_args={"slopes": slopes}, logits_soft_cap=2.0)
    with pytest.raises(ValueError, match=r"q"):
        planned.run(q[..., :32], kv, variant_args={"slopes": slopes})
    sigmoid = attention(builtin.sigmoid())
    sigmoid.plan(BSRView(indptr(0, 3), PageTable.ragged(indptr(0, 40))))
    with pytest.raises(ValueError, match="lse is a tensor, must be None"):
        sigmoid.run(q, kv, lse=torch.empty(3, 4))


def test_page_ids_beyond_the_cache_are_refused() -> None:
    planned = attention(builtin.alibi())
    view = BSRView(
        indptr(0, 1), PageTable.block_table(torch.tensor([[0, 7]], dtype=torch.int32), indptr(20), 16)
    )
    planned.plan(view)
    kv = KVCache.from_pair(torch.randn(4, 16, 2, 64), torch.randn(4, 16, 2, 64))
    with pytest.raises(ValueError, match=r"block_table: page 1 of request 0 is 7"):
        planned.run(torch.randn(1, 4, 64), kv, variant_args={"slopes": torch.rand(4)})


def test_levels_say_where_rows_stand_if_the_variant_is_causal() -> None:
    tables = [
        PageTable.block_table(torch.tensor([[page]], dtype=torch.int32), indptr(20), 20) for page in (0, 1)
    ]
    whole = PageTable.block_table(torch.tensor([[0, 1]], dtype=torch.int32), indptr(40), 20)
    q, kv = torch.randn(3, 4, 64), KVCache.from_slots(torch.randn(40, 2, 64), torch.randn(40, 2, 64), 20)
    planned = attention(builtin.causal(), max_levels=2)
    planned.plan(Composition.cascade([indptr(0, 3), indptr(0, 3)], tables, causal=True))
    with pytest.raises(
        ValueError, match="positions is None, must be given in levels that are not causal: variant causal"
    ):
        planned.run(q, kv)
    shared = BSRView(indptr(0, 3), tables[0], causal=False, positions=indptr(37, 38, 39))
    planned.plan(Composition([shared, BSRView(indptr(0, 3), tables[1], causal=True, kv_offsets=indptr(20))]))
    out = planned.run(q, kv)
    planned.plan(BSRView(indptr(0, 3), whole))
    torch.testing.assert_close(out, planned.run(q, kv), rtol=1e-5, atol=1e-6)
