"""Arguments of variants for batches of any size, made on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from attn_backend.variants import builtin, segment_packbits

Args = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a batch."""

    qo_lens: Sequence[int]
    kv_lens: Sequence[int]
    heads: int

    @property
    def batch(self) -> int:
        return max(len(self.kv_lens), 1)

    @property
    def longest(self) -> int:
        return max(self.kv_lens, default=0) + 1


def slopes(rng: numpy.random.Generator, sizes: Sizes) -> Args:
    return {"slopes": builtin.alibi_slopes(sizes.heads) * float(rng.uniform(0.2, 1))}


def cap(rng: numpy.random.Generator, _sizes: Sizes) -> Args:
    return {"cap": float(rng.uniform(1, 20))}


def bias(rng: numpy.random.Generator, _sizes: Sizes) -> Args:
    return {"bias": float(rng.uniform(-3, 1))}


def prefix_lens(rng: numpy.random.Generator, sizes: Sizes) -> Args:
    return {"prefix_lens": torch.from_numpy(rng.integers(0, sizes.longest + 1, sizes.batch)).int()}


def ids(name: str) -> Callable[[numpy.random.Generator, Sizes], Args]:
    """Runs of tokens, from a few to many in each request; -1 for some."""

    def make(rng: numpy.random.Generator, sizes: Sizes) -> Args:
        starts = rng.random((sizes.batch, sizes.longest)) < rng.choice([0.003, 0.02, 0.2], (sizes.batch, 1))
        runs = starts.cumsum(1)
        runs[(runs % 3 == 1) & (rng.random((sizes.batch, 1)) < 0.5)] = -1
        return {name: torch.from_numpy(runs).int()}

    return make


def items(rng: numpy.random.Generator, sizes: Sizes) -> Args:
    """Items of 1 .. 60 tokens after a prompt, with a delimiter before each and after the last."""
    positions = numpy.zeros((sizes.batch, sizes.longest), dtype=numpy.int64)
    for of_request in positions:
        place = 0
        while place < len(of_request):
            tokens = int(rng.integers(1, 61))
            of_request[place : place + tokens + 1] = numpy.arange(len(of_request[place : place + tokens + 1]))
            place += tokens + 1
    prompts = [int(rng.integers(0, kv_len + 1)) for kv_len in sizes.kv_lens] or [0]
    return {
        "prefix_len": torch.tensor(prompts, dtype=torch.int32),
        "token_pos_in_items": torch.from_numpy(positions).to(torch.uint16),
    }


def scales(rng: numpy.random.Generator, sizes: Sizes) -> Args:
    return {"scales": torch.from_numpy(rng.uniform(0.2, 1.5, sizes.longest)).float()}


def sm_scales(rng: numpy.random.Generator, sizes: Sizes) -> Args:
    """One for each request, or one for all."""
    count = sizes.batch if rng.random() < 0.8 else 0
    return {"sm_scales": torch.from_numpy(rng.uniform(0.2, 1.5, max(count, 1))).float()}


def bits(square: bool, packed: bool = True) -> Callable[[numpy.random.Generator, Sizes], Args]:
    """A bit, or a boolean, for each pair of a query and a token, or of two queries; a query sees itself."""

    def make(rng: numpy.random.Generator, sizes: Sizes) -> Args:
        masks = []
        for qo_len, kv_len in zip(sizes.qo_lens, sizes.kv_lens, strict=True):
            mask = rng.random((qo_len, qo_len if square else kv_len)) < rng.choice([0.1, 0.5, 0.95])
            if square:
                mask |= numpy.eye(qo_len, dtype=bool)
            masks.append(torch.from_numpy(mask.flatten()))
        lengths = [0, *(len(mask) for mask in masks)] if masks else [0, 0]
        indptr = torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        flat = torch.cat([torch.zeros(0, dtype=torch.bool), *masks])
        if not packed:
            return {"mask": flat if len(flat) else flat.new_zeros(1), "mask_indptr": indptr}
        packed_mask, byte_indptr = segment_packbits(flat, indptr, "little")
        return {
            "packed_mask": packed_mask if len(packed_mask) else packed_mask.new_zeros(1),
            "mask_indptr": byte_indptr,
        }

    return make


def positions(rng: numpy.random.Generator, sizes: Sizes) -> Args:
    """Positions of the rows of Q (some belong to no request), and of the tokens of each request: far from
    their indices.
    """
    first = rng.integers(0, 100_000, (sizes.batch, 1))
    return {
        "q_positions": torch.from_numpy(rng.integers(0, 100_000, sum(sizes.qo_lens) + 40)).int(),
        "kv_positions": torch.from_numpy(
            first + rng.integers(0, 3, (sizes.batch, sizes.longest)).cumsum(1)
        ).int(),
    }
