"""Some random batches under every variant (tests/variant_fuzz), and a captured run under a variant."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import case_tensors
import cases
import numpy
import oracle
import pytest
import torch
from variant_fuzz.arguments import Sizes, ids
from variant_fuzz.catalogue import by_reference, entries
from variant_fuzz.problems import Form, random_problem
from variant_fuzz.runner import run_case, tasks

from attn_backend.jit import compilers
from attn_backend.variants import builtin

ROOT = Path(__file__).resolve().parent.parent.parent
CPU = torch.device("cpu")
# The variants that differ most; for the rest: python -m tests.variant_fuzz.
ON_A_CPU = (
    "tree_mask_alibi",
    "slanted",
    "sigmoid_document",
    "gemma",
    "custom_mask_causal",
    "bidirectional_spans",
    "t5_buckets",
    "many_dtypes",
    "block_sparse",
)
ON_A_CPU += ("prefix_lm_scaled", "gated", "window_of_documents", "forgetting_gate", "pages")
ON_A_CPU += (
    "rope",
    "rope_interleaved",
    "rope_at",
    "rope_in_cache",
    "rope_tree_mask_alibi",
    "scaled",
    "by_request",
)

# in builtin.__all__: used to create variants
NO_VARIANTS = ("alibi_slopes", "rope_frequencies", "llama3_frequencies")

needs_cpp = pytest.mark.skipif(compilers.cpp_compiler() is None, reason="needs a C++ compiler")


def test_enough_of_them() -> None:
    known = entries()
    assert len({entry.name for entry in known}) == len(known)
    assert len({entry.variant.source for entry in known}) >= 60
    made = " ".join(entry.name for entry in known if entry.is_builtin)
    missing = [
        name
        for name in builtin.__all__
        if not re.search(rf"\b{name}(_|\b)", made) and name not in NO_VARIANTS
    ]
    assert not missing, "tests/variant_fuzz/catalogue.py"
    chosen = tasks(CPU, 1500)
    assert sum(len(range(task.first, task.last, task.stride)) for task in chosen) == 1500
    assert sum(task.form.sinks for task in chosen) >= 10


@needs_cpp
@pytest.mark.optimized
@pytest.mark.slow
@pytest.mark.parametrize("name", ON_A_CPU)
def test_random_batches(name: str) -> None:
    (task,) = tasks(CPU, 12, [name])
    form = replace(task.form, sinks=task.entry.variant.uses_softmax)
    failures = [message for number in range(12) if (message := run_case(number, task.entry, form)[1])]
    assert not failures, "\n".join(failures)


@needs_cpp
@pytest.mark.slow
def test_wrong_results_are_noticed() -> None:
    """In each kind of batch, a run with different arguments than the reference is detected."""
    entry = next(entry for entry in entries() if entry.name == "alibi")
    form = Form(torch.float32, 64, None, CPU, sinks=True)
    seen = set()
    for number in range(40):
        problem, args = random_problem(number, entry, form)
        problem.run(entry, form, {"slopes": args["slopes"] * 1.2})
        if max(problem.sizes.kv_lens, default=0) < 3:
            continue
        try:
            problem.check(entry, form, args)
        except AssertionError:
            seen.add(problem.kind)
    assert seen == {"case", "forest", "batch invariant", "rows", "levels"}


@pytest.mark.gpu
def test_every_variant_on_a_gpu() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    jobs = str(min(os.cpu_count() or 1, 14))
    command = [
        sys.executable,
        "-m",
        "tests.variant_fuzz",
        "--device",
        "cuda",
        "--cases",
        "300",
        "--jobs",
        jobs,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=880, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout
    assert ": 0 wrong" in done.stdout.splitlines()[-1]


@pytest.mark.gpu
def test_run_captured_once_serves_every_plan_and_all_that_tensors_hold(kernel: str) -> None:
    """Plans and arguments change between replays: documents, slopes, sinks."""
    variant = builtin.document() & builtin.alibi()
    spec = cases.Spec(
        (300, 1, 40, 1, 7),
        (700, 900, 40, 1500, 1000),
        group_size=4,
        num_kv_heads=2,
        page_size=16,
        table_form="block_table",
    )
    case = case_tensors.build(spec, "cuda")
    sizes = Sizes(spec.qo_lens, spec.kv_lens, 8)
    rng = numpy.random.default_rng(3)

    def arguments() -> dict[str, Any]:
        slopes = torch.from_numpy(rng.uniform(0, 0.5, 8)).float()
        return ids("document_ids")(rng, sizes) | {"slopes": slopes}

    args, sinks = {name: value.cuda() for name, value in arguments().items()}, torch.zeros(8, device="cuda")
    attention = case.attention(variant=variant, sinks=True)

    def plan(view: Any) -> None:
        attention.plan(view, variant_args=args)

    def run() -> None:
        attention.run(case.q, case.kv, out=case.out, lse=case.lse, variant_args=args, sinks=sinks)

    plan(case.view)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for step in range(8):
        changed = arguments()
        for name, value in changed.items():
            args[name].copy_(value)
        sinks.normal_(0, 2)
        # The same requests and tokens with other queries: the last ones are left out, or there is a window.
        qo_lens = [max(qo_len - step * (qo_len > 8), 1) for qo_len in spec.qo_lens]
        qo_indptr = torch.tensor([0, *numpy.cumsum(qo_lens).tolist()], dtype=torch.int32, device="cuda")
        window_left = [-1, 100][step % 2]
        plan(replace(case.view, qo_indptr=qo_indptr, causal=step % 3 != 0, window_left=window_left))
        case.out.fill_(torch.nan)
        case.lse.fill_(torch.nan)
        graph.replay()
        rows = sum(qo_lens)
        told = {
            "causal": step % 3 != 0,
            "window_left": window_left,
            "variant": by_reference(variant, changed),
            "sinks": sinks.cpu(),
        }
        o_ref, lse_ref = oracle.paged_attention(
            case.q[:rows].cpu(),
            case.k_slots.cpu(),
            case.v_slots.cpu(),
            qo_lens,
            [own.cpu() for own in case.slots],
            **told,
        )
        assert (case.out[:rows].cpu().double() - o_ref).norm() <= cases.TOLERANCE[spec.dtype] * o_ref.norm()
        torch.testing.assert_close(case.lse[:rows].cpu().double(), lse_ref, rtol=0, atol=2e-3)
        assert case.out[rows:].isnan().all()
