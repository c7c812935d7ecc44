"""selected_slots: which tokens, their order, and refusals."""

from __future__ import annotations

import pytest
import selections
import torch
from selections import random_case

from attn_backend import selected_slots


def int32(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def pack(case: selections.Case, **options: torch.Tensor) -> torch.Tensor:
    return selected_slots(
        case.indices,
        case.block_table,
        case.requests,
        case.page_size,
        page_stride=case.page_stride,
        kv_lens=case.kv_lens,
        **options,
    )


def test_what_is_there_comes_first_in_its_order(device: torch.device) -> None:
    indices = int32([5, -1, 9, 5], [-1, -1, -1, -1], [3, 1, 2, 0], [-7, -1, -1, 8]).to(device)
    wanted = int32([5, 9, 5, -1], [-1, -1, -1, -1], [3, 1, 2, 0], [8, -1, -1, -1])
    assert selected_slots(indices).cpu().equal(wanted), "duplicates stay"
    assert selected_slots(indices, out=indices) is indices
    assert indices.cpu().equal(wanted)
    assert selected_slots(indices[:, :0]).shape == (4, 0)
    assert selected_slots(indices[:0]).shape == (0, 4)


def test_through_a_block_table(device: torch.device) -> None:
    block_table = int32([7, 2, -1], [4, 0, 9]).to(device)
    indices = int32([0, 5, -1, 3], [9, 100, 2, 8], [4, 8, -1, 1]).to(device)
    requests = torch.tensor([0, 1, 0], dtype=torch.int32, device=device)
    found = selected_slots(indices, block_table, requests, page_size=4)
    # 100 is beyond the table; 8 of request 0 is on a page that the request lacks.
    assert found.tolist() == [[28, 9, 31, -1], [37, 18, 36, -1], [8, 29, -1, -1]]
    assert selected_slots(indices[:2], block_table, page_size=4).equal(found[:2]), (
        "a row of the table for each row of Q"
    )
    between = selected_slots(indices, block_table, requests, page_size=4, page_stride=10)
    assert between.tolist() == [[70, 21, 73, -1], [91, 42, 90, -1], [20, 71, -1, -1]], (
        "slots of others lie between the pages"
    )
    seen = selected_slots(
        indices, block_table, requests, page_size=4, kv_lens=torch.tensor([4, 9, 0], device=device)
    )
    assert seen.tolist() == [[28, 31, -1, -1], [18, 36, -1, -1], [-1, -1, -1, -1]], (
        "a row does not see what comes after it"
    )
    assert selected_slots(indices, block_table[:, :0], requests).eq(-1).all()
    assert selected_slots(indices, block_table, requests + 2).eq(-1)[1].all(), (
        "of a request that does not exist"
    )


@pytest.mark.parametrize("seed", range(24))
def test_random_selections(device: torch.device, seed: int) -> None:
    case = random_case(seed, device)
    before = case.indices.clone()
    assert pack(case).cpu().equal(case.padded())
    assert case.indices.equal(before)
    room = torch.full((case.indices.shape[0], case.indices.shape[1] + 3), 7, dtype=torch.int32, device=device)
    assert pack(case, out=room[:, :-3]).cpu().equal(case.padded())
    assert room[:, -3:].eq(7).all()
    wanted = case.padded()
    assert pack(case, out=case.indices).cpu().equal(wanted), "in place"


def test_refuses(device: torch.device) -> None:
    indices, table = int32([0, 1], [2, 3]).to(device), int32([0], [1], [2]).to(device)
    requests, wide = (
        torch.zeros(2, dtype=torch.int32, device=device),
        int32([0, 1, 2, 3], [4, 5, 6, 7]).to(device),
    )
    for argument, call in [
        ("indices", lambda: selected_slots(indices.long())),
        ("indices", lambda: selected_slots(indices[0])),
        ("indices", lambda: selected_slots(indices.t())),
        ("indices", lambda: selected_slots(torch._neg_view(indices))),
        ("indices", lambda: selected_slots([[1]])),  # type: ignore[arg-type]
        ("requests", lambda: selected_slots(indices, table)),
        ("requests", lambda: selected_slots(indices, table, requests[:1])),
        ("block_table", lambda: selected_slots(indices, None, requests)),
        ("requests", lambda: selected_slots(indices, table, requests.float())),
        ("block_table", lambda: selected_slots(indices, table.float(), requests)),
        ("block_table", lambda: selected_slots(indices, table[0], requests)),
        ("kv_lens", lambda: selected_slots(indices, kv_lens=requests[:1])),
        ("page_size", lambda: selected_slots(indices, table, requests, 0)),
        ("page_size", lambda: selected_slots(indices, table, requests, 2**40)),
        ("page_size", lambda: selected_slots(indices, table, requests, 1.5)),  # type: ignore[arg-type]
        ("page_size", lambda: selected_slots(indices, table, requests, True)),
        ("page_stride", lambda: selected_slots(indices, table, requests, 4, page_stride=3)),
        ("page_stride", lambda: selected_slots(indices, table, requests, 4, page_stride=2**40)),
        ("out", lambda: selected_slots(indices, out=indices[:1])),
        ("out", lambda: selected_slots(indices, out=indices.new_empty(1, 2).expand(2, 2))),
        ("out", lambda: selected_slots(indices, out=3)),  # type: ignore[arg-type]
        ("indices", lambda: selected_slots(indices[:1], out=indices.view(1, 4)[:, 1:3])),
        # same address, but different row stride
        ("indices", lambda: selected_slots(wide[:, :2], out=wide.view(-1)[:4].view(2, 2))),
        ("indices", lambda: selected_slots(wide.view(-1)[:4].view(2, 2), out=wide[:, :2])),
    ]:
        with pytest.raises(ValueError, match=rf"^{argument}\S* is .*must be "):
            call()


def test_one_row_in_place_may_have_any_stride(device: torch.device) -> None:
    memory = int32([-1, 5, 9, 7], [8, 8, 8, 8]).to(device)
    row = memory[:1, :3]
    selected_slots(row, out=row.as_strided((1, 3), (2, 1)))
    assert memory.tolist() == [[5, 9, -1, 7], [8] * 4]


def test_under_torch_compile(device: torch.device) -> None:
    case = random_case(4, device, most_topk=40)
    compiled = torch.compile(
        lambda indices: selected_slots(indices, case.block_table, case.requests, case.page_size) + 1,
        backend="eager",
        fullgraph=True,
    )
    wanted = selected_slots(case.indices, case.block_table, case.requests, case.page_size) + 1
    assert compiled(case.indices).equal(wanted)
