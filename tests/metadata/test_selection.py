"""BSRView.selected and KVCache.by_slot: which tokens, and refusals."""

from __future__ import annotations

import pytest
import torch

from attn_backend import BSRView, KVCache


def int32(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_a_view_of_slots(device: torch.device) -> None:
    slots = int32([5, 9, 5, -1], [-1, -1, -1, -1], [3, 1, 2, 0], [-1, 8, -1, -1]).to(device)
    view = BSRView.selected(slots)
    assert view.table.kv_lens.tolist() == [3, 0, 4, 1]  # type: ignore[union-attr]
    assert (view.qo_indptr.tolist(), view.causal, view.pages_change) == ([0, 1, 2, 3, 4], False, True)
    assert view.has_slots
    planned = BSRView.selected(slots, torch.full((4,), 4, dtype=torch.int32, device=device))
    assert planned.with_slots_counted().table.kv_lens.tolist() == [3, 0, 4, 1]  # type: ignore[union-attr]
    for other in (
        BSRView(view.qo_indptr, view.table, causal=False),
        BSRView(view.qo_indptr, view.table, pages_change=True),
    ):
        assert not other.has_slots
        assert other.with_slots_counted() is other


def test_refuses() -> None:
    indices = int32([0, 1], [2, 3])
    for argument, call in [
        ("slots", lambda: BSRView.selected(indices.long())),
        (
            "pages_change",
            lambda: BSRView(
                torch.zeros(3, dtype=torch.int32), BSRView.selected(indices).table, pages_change=1
            ),
        ),  # type: ignore[arg-type]
    ]:
        with pytest.raises(ValueError, match=rf"^{argument} is .*, must be "):
            call()


def test_a_cache_by_slots() -> None:
    latents = torch.randn(6, 4, 576).bfloat16()
    kv = KVCache.from_latent(latents)
    by_slot = kv.by_slot()
    assert (by_slot.page_size, by_slot.num_pages, by_slot.k.data_ptr()) == (1, 24, latents.data_ptr())
    assert by_slot.k[13, 0, 0].equal(latents[3, 1])
    assert by_slot.v[13, 0, 0].equal(latents[3, 1, :512])
    wide = torch.randn(24, 640).bfloat16()[:, :576].unflatten(0, (6, 4))
    assert KVCache.from_latent(wide).by_slot().k[9, 0, 0].equal(wide[2, 1])
    layers = torch.randn(6, 2, 4, 576).bfloat16()  # pages of other layers between this layer's pages
    of_one = KVCache.from_latent(layers[:, 1])
    assert (kv.page_stride, of_one.page_stride, of_one.by_slot().num_pages) == (4, 8, 44)
    assert of_one.by_slot().k[3 * 8 + 2, 0, 0].equal(layers[3, 1, 2])
    assert KVCache.from_latent(layers[:, 1, :1]).by_slot().k[3, 0, 0].equal(layers[3, 1, 0])
    padded = torch.randn(6, 4 * 576 + 8).bfloat16()[:, : 4 * 576].unflatten(1, (4, 576))
    with pytest.raises(
        ValueError, match=r"^kv\.k is .*, must be a cache whose pages are a whole number of tokens apart"
    ):
        KVCache.from_latent(padded).by_slot()
