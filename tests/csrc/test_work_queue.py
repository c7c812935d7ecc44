"""The order in which the work queue hands out pairs: sections of KV heads whose K and V fit in a part of
L2."""

from __future__ import annotations

import ctypes
from itertools import groupby

import batches
import host_planner
import pytest
import torch
from workspace import config_of

from attn_backend import Attention, BSRView, PageTable

pytestmark = pytest.mark.skipif(host_planner.COMPILER is None, reason="needs g++")

SECTION_BYTES = 16 << 20  # kCosts in csrc/attention/sm90/design.h


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return host_planner.build(tmp_path_factory.mktemp("work_queue"))


def make_attention(num_kv_heads: int, group_size: int, head_dim: int, max_rows: int = 70_000) -> Attention:
    return Attention(
        num_kv_heads * group_size,
        num_kv_heads,
        head_dim,
        device="cpu",
        num_ctas=132,
        max_rows=max_rows,
        max_batch=batches.MAX_BATCH,
        kernel="hopper",
    )


def ragged_view(lengths: list[int], window_left: int = -1) -> BSRView:
    indptr = torch.tensor([0, *lengths]).cumsum(0).int()
    return BSRView(indptr, PageTable.ragged(indptr), window_left=window_left)


def check_order(library: ctypes.CDLL, attention: Attention, view: BSRView) -> list[int]:
    """Checks that sections follow the definition; returns the heads of each section of the whole queue."""
    schedule, pairs, of_pair = host_planner.queue(library, attention, view)
    order = [tuple(pair) for pair in pairs.tolist()]
    num_heads = attention.num_kv_heads
    assert sorted(order) == [(tile, head) for tile in range(len(schedule.tiles)) for head in range(num_heads)]
    groups, kv_lens = schedule.of_tiles("group").tolist(), schedule.of_groups("kv_len").tolist()
    sizes = []
    for group, of_group in groupby(
        zip(order, of_pair.tolist(), strict=True), lambda pair: groups[pair[0][0]]
    ):
        members = list(of_group)
        heads = members[0][1]
        sections = [
            [pair for pair, _ in section]
            for _, section in groupby(members, lambda pair, heads=heads: pair[0][1] // heads)
        ]
        # K and V of a section fit, unless the section is one head.
        room = int(config_of(attention)["section_tokens"])
        assert heads == 1 or heads * kv_lens[group] <= room
        assert len(sections) == -(-num_heads // heads)
        for section in sections:
            width = len({head for _, head in section})
            tiles = [tile for tile, _ in section]
            # The row tile that sees the most tokens comes first, each with all heads of the section.
            assert tiles == sorted(tiles, reverse=True)
            assert all(len(set(section[i : i + width])) == width for i in range(0, len(section), width))
            sizes.append(width)
    # All pairs of a row group are consecutive.
    assert [key for key, _ in groupby(groups[tile] for tile, _ in order)] == sorted(set(groups))
    return sizes


@pytest.mark.parametrize(
    ("num_kv_heads", "group_size", "head_dim", "tokens", "sections"),
    [
        (8, 4, 128, 1024, [8]),  # all fit
        (8, 4, 128, 4096, [8]),
        (8, 4, 128, 4097, [4, 4]),
        (8, 4, 128, 16384, [2] * 4),
        (8, 4, 128, 32768, [1] * 8),
        (4, 4, 256, 16384, [1] * 4),
        (4, 4, 256, 65536, [1] * 4),  # one head does not fit
        (7, 4, 128, 10000, [3, 3, 1]),  # heads do not divide
        (10, 1, 64, 16384, [4, 4, 2]),
    ],
)
def test_sections_of_a_prompt(
    library: ctypes.CDLL, num_kv_heads: int, group_size: int, head_dim: int, tokens: int, sections: list[int]
) -> None:
    attention = make_attention(num_kv_heads, group_size, head_dim)
    for window_left in (-1, 500):
        view = ragged_view([tokens], window_left)
        assert check_order(library, attention, view) == sections


def test_a_section_has_as_many_tokens_as_fit() -> None:
    for head_dim, head_dim_v, dtype in ((128, 128, torch.bfloat16), (192, 128, torch.float16)):
        attention = Attention(
            8,
            8,
            head_dim,
            head_dim_v=head_dim_v,
            dtype=dtype,
            device="cpu",
            max_rows=64,
            max_batch=2,
            kernel="hopper",
        )
        tokens = SECTION_BYTES // ((head_dim + head_dim_v) * 2)
        assert int(config_of(attention)["section_tokens"]) == tokens


def test_requests_follow_one_another(library: ctypes.CDLL) -> None:
    attention = make_attention(8, 4, 128)
    assert check_order(library, attention, ragged_view([9000, 20, 1, 16384, 300])) == [
        3,
        3,
        2,
        8,
        8,
        2,
        2,
        2,
        2,
        8,
    ]


@pytest.mark.parametrize("shape", [(8, 4, 128), (3, 3, 64), (1, 5, 256), (5, 2, 128)])
def test_random_batches(library: ctypes.CDLL, shape: tuple[int, int, int]) -> None:
    attention = make_attention(*shape, max_rows=batches.MAX_ROWS)
    for seed in range(40):
        check_order(library, attention, batches.random_view(seed, "cpu"))
