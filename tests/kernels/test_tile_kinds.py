"""Forces every kind of row tile of every kernel, compared with the float64 oracle: all row tiles of a
schedule have one kind, for any number of rows.
"""

from __future__ import annotations

import ctypes

import case_tensors
import cases
import host_planner
import pytest
import torch
from tiers import mostly_slow

from attn_backend.kernels.schedule import TILE_ROWS

pytestmark = [
    pytest.mark.usefixtures("kernel"),
    pytest.mark.skipif(host_planner.COMPILER is None, reason="needs g++"),
]

KINDS = range(len(TILE_ROWS))
BLOCKS, CASES = 20, 6  # for each kernel and kind
MOST_TILES = 4096


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return host_planner.build(tmp_path_factory.mktemp("one_kind"), one_kind=True)


def tiles_of(spec: cases.Spec, kind: int) -> int:
    return sum(-(-qo_len * spec.group_size // TILE_ROWS[kind]) for qo_len in spec.qo_lens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", mostly_slow(range(BLOCKS), fast=4, without_gpu=10))
def test_random_cases(device: torch.device, library: ctypes.CDLL, kind: int, block: int) -> None:
    specs = (
        cases.random_spec(seed, device.type) for seed in range(100_000 + 1000 * block, 101_000 + 1000 * block)
    )
    fitting = (spec for spec in specs if sum(spec.qo_lens) and tiles_of(spec, kind) <= MOST_TILES)
    ran = False
    for _, spec in zip(range(CASES), fitting, strict=False):
        case = case_tensors.build(spec, device)
        # every row group may have a row tile
        attention = case.attention(cascade=False, max_batch=len(spec.qo_lens) + tiles_of(spec, kind))
        attention.plan(case.view)
        if kind > attention.schedule().max_kind:
            # only heads of 64 on Hopper have the last kind; the generic kernel lacks registers for others
            assert kind == KINDS[-1] or (device.type, spec.head_dim) == ("cuda", 256)
            continue
        host_planner.plan_with_kind(library, attention, case.view, kind)
        assert set(attention.schedule().of_tiles("kind").tolist()) == {kind}
        case.run(attention, out=case.out, lse=case.lse)
        case_tensors.check(case, case.out, case.lse)
        case_tensors.check_padding(case)
        ran = True
    if not ran:
        pytest.skip("this kernel has no row tiles of this kind for the drawn heads")
