"""Cascades whose levels give the positions of their rows and tokens, and float64 attention over the tokens
that each row sees.
"""

from __future__ import annotations

from typing import Any

import numpy
import oracle
import torch
from compositions import Shape, check_states, make_attention, make_memory, noise, prefix_sum, skewed
from torch import Tensor

from attn_backend import Attention, Variant


class Cascade:
    """Requests with shared prefixes.

    `lens`: the tokens of the groups of each level. `parents`: for each level except the first, the parent of
    each group. `qo_lens`: rows of the groups of the last level, which have at least this number of tokens.
    """

    def __init__(
        self,
        rng: numpy.random.Generator,
        shape: Shape,
        device: torch.device,
        lens: list[list[int]],
        parents: list[list[int]],
        qo_lens: list[int],
    ) -> None:
        self.shape, self.memory = (
            shape,
            make_memory(rng, shape, device, [n for of_level in lens for n in of_level]),
        )
        first = prefix_sum([len(of_level) for of_level in lens])
        paths = [[group] for group in range(len(lens[0]))]
        offsets = [[0] * len(lens[0])]
        for level, of_level in enumerate(parents):
            paths = [[*paths[parent], group] for group, parent in enumerate(of_level)]
            offsets.append([offsets[level][parent] + lens[level][parent] for parent in of_level])
        index = lambda values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
        rows = [[0] * len(of_level) for of_level in lens]
        positions, requests = [], []
        self.slots: list[Tensor] = []  # slots of the tokens of each row's request
        for request, (path, qo_len) in enumerate(zip(paths, qo_lens, strict=True)):
            for level, group in enumerate(path):
                rows[level][group] += qo_len
            end = offsets[-1][request] + lens[-1][request]
            positions += range(end - qo_len, end)
            requests += [request] * qo_len
            self.slots += [
                torch.cat([self.memory.slots[first[level] + group] for level, group in enumerate(path)])
            ] * qo_len
        self.positions, self.requests = positions, requests
        self.levels: dict[str, Any] = {
            "qo_indptrs": [index(prefix_sum(of_level)) for of_level in rows],
            "tables": [
                self.memory.table(rng, list(range(begin, begin + len(of_level))))
                for begin, of_level in zip(first, lens, strict=False)
            ],
            "kv_offsets": [index(of_level) for of_level in offsets],
            "positions": index(positions),
            "requests": index(requests),
        }
        self.q = noise(rng, device, len(positions), shape.num_kv_heads * shape.group_size, shape.head_dim).to(
            shape.dtype
        )

    @classmethod
    def random(
        cls,
        rng: numpy.random.Generator,
        device: torch.device,
        num_levels: int,
        longest: int = 500,
        max_rows: int = 29,
    ) -> Cascade:
        """longest: bound for shared levels; max_rows: per request."""
        lens, parents = [[skewed(rng, longest, zero=0.1) for _ in range(int(rng.integers(1, 3)))]], []
        for _ in range(num_levels - 1):
            parents.append(
                [parent for parent in range(len(lens[-1])) for _ in range(int(rng.integers(1, 4)))]
            )
            lens.append([skewed(rng, longest // 2, zero=0.1) for _ in parents[-1]])
        qo_lens = [
            min(int(rng.integers(1, 30) if rng.random() < 0.3 else rng.integers(0, 4)), max_rows)
            for _ in lens[-1]
        ]
        lens[-1] = [max(n, qo_len) for n, qo_len in zip(lens[-1], qo_lens, strict=True)]
        return cls(
            rng,
            Shape(2, 4, 64, torch.bfloat16, int(rng.choice([1, 5, 16, 64])), [None, 3][rng.integers(2)]),
            device,
            lens,
            parents,
            qo_lens,
        )

    def attention(self, variant: Variant, **options: Any) -> Attention:
        levels = self.levels["tables"]
        room = {
            "max_rows": len(self.q) + 1,
            "max_batch": max(table.batch_size for table in levels),
            "max_levels": len(levels),
        }
        return make_attention(self.shape, self.q.device, variant=variant, **(room | options))

    def check(self, attention: Attention, seen: Any, variant_args: Any = None) -> None:
        """seen(request, position of the row, positions of its request's tokens) -> which of the tokens up to
        its own it sees.
        """
        out = torch.full_like(self.q, torch.nan)
        lse = torch.full(self.q.shape[:2], torch.nan, device=self.q.device)
        attention.run(self.q, self.memory.kv, out=out, lse=lse, variant_args=variant_args)
        o_ref, lse_ref = [], []
        for row, (request, position, slots) in enumerate(
            zip(self.requests, self.positions, self.slots, strict=True)
        ):
            at = torch.arange(len(slots), device=slots.device)
            visible = slots[seen(request, position, at) & (at <= position)]
            o, state = oracle.attention(
                self.q[row : row + 1],
                self.memory.k_slots[visible],
                self.memory.v_slots[visible],
                causal=False,
            )
            o_ref.append(o)
            lse_ref.append(state)
        rows = list(range(len(self.q)))
        check_states(
            self.shape,
            rows,
            out,
            lse,
            torch.cat(o_ref) if rows else out.double(),
            torch.cat(lse_ref) if rows else lse.double(),
        )
