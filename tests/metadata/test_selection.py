"""selected_slots, BSRView.selected and KVCache.by_slot: which tokens, in which order, and what is refused."""

from __future__ import annotations

import pytest
import torch

from attn_backend import BSRView, KVCache, selected_slots


def int32(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_what_is_there_comes_first_in_its_order(device: torch.device) -> None:
    indices = int32([5, -1, 9, 5], [-1, -1, -1, -1], [3, 1, 2, 0], [-7, -1, -1, 8]).to(device)
    wanted = int32([5, 9, 5, -1], [-1, -1, -1, -1], [3, 1, 2, 0], [8, -1, -1, -1])
    assert selected_slots(indices).cpu().equal(wanted), "duplicates stay"
    view = BSRView.selected(selected_slots(indices))
    assert view.table.kv_lens.tolist() == [3, 0, 4, 1]  # type: ignore[union-attr]
    assert (view.qo_indptr.tolist(), view.causal, view.pages_change) == ([0, 1, 2, 3, 4], False, True)
    assert selected_slots(indices, out=indices) is indices
    assert indices.cpu().equal(wanted)
    assert selected_slots(indices[:, :0]).shape == (4, 0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_through_a_block_table(device: torch.device, dtype: torch.dtype) -> None:
    block_table = int32([7, 2, -1], [4, 0, 9]).to(device)
    indices = int32([0, 5, -1, 3], [9, 100, 2, 8], [4, 8, -1, 1]).to(device)
    requests = torch.tensor([0, 1, 0], dtype=dtype, device=device)
    found = selected_slots(indices, block_table, requests, page_size=4)
    # 100 lies behind the table, 8 of request 0 on a page that it does not have.
    assert found.tolist() == [[28, 9, 31, -1], [37, 18, 36, -1], [8, 29, -1, -1]]
    own = selected_slots(indices[:2], block_table, page_size=4)
    assert own.equal(found[:2]), "a row of the table for each row of Q"
    between = selected_slots(indices, block_table, requests, page_size=4, page_stride=10)
    assert between.tolist() == [[70, 21, 73, -1], [91, 42, 90, -1], [20, 71, -1, -1]], "slots of others lie between the pages"


def test_refuses() -> None:
    indices, table = int32([0, 1], [2, 3]), int32([0], [1], [2])
    for argument, call in [
        ("indices", lambda: selected_slots(indices.long())),
        ("indices", lambda: selected_slots(indices[0])),
        ("requests", lambda: selected_slots(indices, table)),
        ("requests", lambda: selected_slots(indices, table, torch.zeros(3, dtype=torch.int32))),
        ("requests", lambda: selected_slots(indices, None, torch.zeros(2, dtype=torch.int32))),
        ("block_table", lambda: selected_slots(indices, table.float())),
        ("page_size", lambda: selected_slots(indices, table, torch.zeros(2, dtype=torch.int32), 0)),
        ("page_stride", lambda: selected_slots(indices, table, torch.zeros(2, dtype=torch.int32), 4, page_stride=3)),
        ("out", lambda: selected_slots(indices, out=indices[:1])),
        ("slots", lambda: BSRView.selected(indices.long())),
        ("pages_change", lambda: BSRView(torch.zeros(3, dtype=torch.int32), BSRView.selected(indices).table, pages_change=1)),  # type: ignore[arg-type]
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
    layers = torch.randn(6, 2, 4, 576).bfloat16()  # pages of another layer between those of this one
    of_one = KVCache.from_latent(layers[:, 1])
    assert (kv.page_stride, of_one.page_stride, of_one.by_slot().num_pages) == (4, 8, 44)
    assert of_one.by_slot().k[3 * 8 + 2, 0, 0].equal(layers[3, 1, 2])
    assert KVCache.from_latent(layers[:, 1, :1]).by_slot().k[3, 0, 0].equal(layers[3, 1, 0])
    padded = torch.randn(6, 4 * 576 + 8).bfloat16()[:, : 4 * 576].unflatten(1, (4, 576))
    with pytest.raises(ValueError, match=r"^kv\.k is .*, must be a cache whose pages are a whole number of tokens apart"):
        KVCache.from_latent(padded).by_slot()
