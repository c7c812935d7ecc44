"""The head shapes' benchmark: its lines, and small ones of their kinds on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import head_shapes
from benchmarks.head_shapes import ShapeCase, Tensors


def test_lines_have_names_of_their_own() -> None:
    cases = list(head_shapes.all_cases())
    assert len({case.name for case in cases}) == len(cases)


def test_floors() -> None:
    mla = ShapeCase("MLA decode", (1,), (1000,), 16, 1, 576, 512, page_size=64, v_in_k=True)
    assert mla.bytes == 2 * (1000 * 576 + 16 * (576 + 512)), "the latent once"
    assert mla.flops == 2 * 16 * 1000 * (576 + 512)
    latents = ShapeCase("MLA decode", (1,), (1000,), 16, 1, 576, 512, page_size=64, v_in_k=True, kv="latent")
    assert latents.bytes == 1000 * 656 + 2 * 16 * (576 + 512)
    sparse = ShapeCase("sparse MLA", (1,) * 8, (1000,) * 8, 16, 1, 576, 512, page_size=1, v_in_k=True, kv="e4m3", selects_from=5000)
    assert sparse.bytes == 5000 * 576 + 2 * 8 * 16 * (576 + 512), "no token more than once"
    causal = ShapeCase("prefill", (3,), (5,), 2, 1, 64, 32)
    assert causal.bytes == 2 * (5 * 96 + 3 * 2 * 96)
    assert causal.flops == 2 * 2 * (3 + 4 + 5) * 96


@pytest.mark.parametrize("index", range(len(list(head_shapes.all_cases()))))
def test_a_small_line_of_each_kind_is_right(index: int) -> None:
    case = list(head_shapes.all_cases())[index]
    small = replace(case, qo_lens=tuple(min(n, 20) for n in case.qo_lens[:3]), kv_lens=tuple(min(n, 70) for n in case.kv_lens[:3]))
    tensors = Tensors.make(small, "cpu")
    plan, run = head_shapes.ours(tensors)
    plan()
    out = run()
    assert tensors.error(out) < head_shapes.LARGEST_ERROR
    out[-1] += 0.1
    assert tensors.error(out) > head_shapes.LARGEST_ERROR, "the check can fail"
    if case.v_in_k:
        plan, run = head_shapes.ours(tensors, q_parts=True)
        plan()
        assert tensors.error(run()) < head_shapes.LARGEST_ERROR
