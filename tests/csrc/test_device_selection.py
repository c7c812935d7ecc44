"""The kernel that packs selected tokens, without a GPU: the slots that it writes, and the counts that it
gives a plan.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from pathlib import Path

import emulation
import host_planner
import pytest
import torch
from selections import Case, random_case
from torch import Tensor
from workspace import config_of, layout_of, workspace_of

from attn_backend import Attention, BSRView, KVCache, SelectedTokens
from attn_backend.kernels.native import dtype_of
from attn_backend.kernels.schedule import GROUP_COLUMNS

pytestmark = pytest.mark.skipif(host_planner.COMPILER is None, reason="needs g++")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def library(emulated: Path) -> ctypes.CDLL:
    library = emulation.build(
        emulated, "device_selection", emulation.TESTS / "device_selection.cpp", options=["-O1"]
    )
    library.device_selection.restype = ctypes.c_char_p
    return library


def pack(library: ctypes.CDLL, case: Case, slots: Tensor, plan: list[int] | None, seed: int) -> None:
    tensors = case.indices, slots, case.block_table, case.requests, case.kv_lens
    pointers = (ctypes.c_void_p * 5)(*(None if t is None else t.data_ptr() for t in tensors))
    table = (0, 0, 0) if case.block_table is None else (case.block_table.stride(0), *case.block_table.shape)
    wide = (t is not None and t.dtype == torch.int64 for t in (case.requests, case.kv_lens))
    of_rows = (*case.indices.shape, slots.shape[1], case.indices.stride(0), slots.stride(0))
    sizes = (ctypes.c_int64 * 12)(*of_rows, *table, case.page_size, case.page_stride, *wide)
    emulation.check(
        library.device_selection(pointers, sizes, None if plan is None else (ctypes.c_int64 * 8)(*plan), seed)
    )


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 24))]
)
def test_slots(library: ctypes.CDLL, seed: int) -> None:
    case = random_case(seed, CPU, most_topk=5000)
    rows, topk = case.indices.shape
    room = torch.full((rows, topk + 5), 7, dtype=torch.int32)
    pack(library, case, room[:, :-3], None, seed)
    assert room[:, :topk].equal(case.padded())
    assert room[:, topk:-3].eq(-1).all()
    assert room[:, -3:].eq(7).all()
    wanted = case.padded()
    pack(library, case, case.indices, None, seed)
    assert case.indices.equal(wanted), "in place"


def error_word(attention: Attention) -> Tensor:
    """The error word of an Attention's schedule."""
    offset = int(dtype_of("ScheduleHeader").fields["errors"][1])  # type: ignore[index]
    return workspace_of(attention).schedule[offset : offset + 4]


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("heads", [16, 128])
def test_what_the_plan_is_told(library: ctypes.CDLL, heads: int, batch_invariant: bool) -> None:
    """The same schedule as on a CPU, byte for byte: fewer tokens than planned, none, as many, more; and rows
    that are left out.
    """
    planned, topk = [3000, 2500, 64, 1, 0, 130], 3000
    options = {
        "max_rows": 8,
        "max_batch": 8,
        "kernel": "hopper",
        "num_ctas": 9,
        "batch_invariant": batch_invariant,
        "cascade": False,
    }
    plans = [Attention(heads, 1, 576, head_dim_v=512, device="cpu", **options) for _ in range(2)]  # type: ignore[arg-type]
    slots = [torch.zeros(len(planned), topk, dtype=torch.int32) for _ in range(2)]
    for attention, own in zip(plans, slots, strict=True):
        attention.plan(BSRView.selected(own, torch.tensor(planned)))
    q, kv = torch.zeros(6, heads, 576).bfloat16(), KVCache.from_latent(torch.zeros(4000, 1, 576).bfloat16())
    generator = torch.Generator().manual_seed(heads)
    schedules = set()
    for number, counts in enumerate(
        (
            [3000, 2500, 64, 1, 0, 130],
            [1, 2499, 0, 1, 0, 129],
            [0] * 6,
            [1025, 1024, 65, 0, 3, 500],
            [2999, 768, 10],
        )
    ):
        indices = torch.full((len(counts), topk), -1, dtype=torch.int32)
        for row, count in enumerate(counts):
            indices[row, torch.randperm(topk, generator=generator)[:count]] = torch.randint(
                4000, (count,), generator=generator
            ).int()
        is_too_long = any(count > most for count, most in zip(counts, planned, strict=False))
        with (
            pytest.raises(ValueError, match="more tokens than were planned") if is_too_long else nullcontext()
        ):
            plans[0].run(q[: len(counts)], kv, selected=SelectedTokens(indices))
        config = config_of(plans[1])
        layout = layout_of(plans[1])
        made, expected = workspace_of(plans[1]).schedule, workspace_of(plans[0]).schedule
        base = made.data_ptr()
        places = [base, base + int(layout["groups"]), base + int(layout["tiles"])]
        case = Case(indices, None, None, 1, 1, None)
        pack(
            library,
            case,
            slots[1],
            [*places, len(planned), heads, int(config["kv_tile"]), topk, batch_invariant],
            number,
        )
        assert (plans[1].schedule().errors != 0) == is_too_long
        if is_too_long:  # a GPU keeps it until the next plan
            error_word(plans[1])[:] = 0
        told = slice(int(layout["groups"]), int(layout["positions"]))
        assert made[told].equal(expected[told])
        assert slots[1].equal(slots[0])
        schedules.add(bytes(expected[told].numpy()))
        lens: dict[int, int] = dict.fromkeys(range(6), 0)
        groups = plans[0].schedule().groups[:, [GROUP_COLUMNS.index(name) for name in ("request", "kv_len")]]
        for request, kv_len in groups.tolist():
            lens[request] += kv_len
        assert [lens[row] for row in range(6)] == [
            min(count, most) for count, most in zip([*counts, 0, 0, 0], planned, strict=False)
        ]
    assert len(schedules) == 5
