"""Selections of tokens with every kind of invalid entry, and their expected slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """Arguments of `selected_slots`; None means that the argument is omitted."""

    indices: Tensor
    block_table: Tensor | None
    requests: Tensor | None
    page_size: int
    page_stride: int
    kv_lens: Tensor | None

    def expected(self) -> list[list[int]]:
        """The slots of each row, without the -1 that follow them."""
        found = []
        for row, tokens in enumerate(self.indices.tolist()):
            seen = 2**31 if self.kv_lens is None else int(self.kv_lens[row])
            request = row if self.requests is None else int(self.requests[row])
            slots = []
            for token in tokens:
                if not 0 <= token < seen:
                    continue
                if self.block_table is None:
                    slots.append(token)
                    continue
                page, place = divmod(token, self.page_size)
                if (
                    0 <= request < self.block_table.shape[0]
                    and page < self.block_table.shape[1]
                    and self.block_table[request, page] >= 0
                ):
                    slots.append(
                        min(int(self.block_table[request, page]) * self.page_stride + place, 2**31 - 1)
                    )
            found.append(slots)
        return found

    def padded(self) -> Tensor:
        """As `selected_slots` returns it."""
        return torch.tensor(
            [row + [-1] * (self.indices.shape[1] - len(row)) for row in self.expected()], dtype=torch.int32
        ).view(self.indices.shape)


def random_case(seed: int, device: torch.device, most_topk: int = 3000) -> Case:
    """Empty entries in the middle, duplicates, empty rows, missing pages, nonexistent requests, and row
    strides larger than rows.
    """
    rng = numpy.random.default_rng([seed, 61])
    rows, batch, columns = (int(rng.integers(1, most)) for most in (9, 5, 30))
    topk = int(rng.choice([1, 7, 33, 512, 2047, 2048, 2049, most_topk]))
    page_size = int(rng.choice([1, 3, 16, 64]))
    has_table, own_rows = seed % 3 > 0, seed % 3 == 2
    tokens = rng.integers(0, columns * page_size + 3, [rows, topk])
    tokens[rng.random([rows, topk]) < rng.choice([0.0, 0.3, 1.0], [rows, 1])] = -1
    tokens[rng.random([rows, topk]) < 0.01] = -(2**31)
    wide = torch.full((rows, topk + int(rng.integers(0, 5))), 3, dtype=torch.int32)
    wide[:, :topk] = torch.from_numpy(tokens)
    table = rng.integers(0, 1000, [rows if own_rows else batch, columns + 2])
    table[rng.random(table.shape) < 0.1] = -1
    table[0, 0] = 2**31 - 1
    requests = (
        torch.from_numpy(rng.integers(-1, batch + 1, rows))
        .to([torch.int32, torch.int64][seed % 2])
        .to(device)
    )
    lens = (
        torch.from_numpy(rng.integers(-1, columns * page_size, rows))
        .to([torch.int64, torch.int32][seed % 2])
        .to(device)
    )
    return Case(
        wide.to(device)[:, :topk],
        torch.from_numpy(table).int().to(device)[:, :columns] if has_table else None,
        requests if has_table and not own_rows else None,
        page_size,
        page_size * int(rng.integers(1, 3)) + int(rng.integers(0, 2)),
        lens if rng.random() < 0.5 else None,
    )
