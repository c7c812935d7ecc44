"""Scenarios of sparse attention: selected_slots, with and without block tables, into separate tensors and in
place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import selections
import torch

from attn_backend import selected_slots

from .call import Call, IntArgument, TensorArgument
from .mutations import around
from .steps import INDEX, Arguments, Kinds

INT32 = (torch.int32,)


def packings(rng: numpy.random.Generator, device: torch.device) -> Iterator[Call]:
    while True:
        yield from around(
            rng, selection_call(rng, selections.random_case(int(rng.integers(2**31)), device, most_topk=100))
        )


def selection_call(rng: numpy.random.Generator, case: selections.Case) -> Call:
    indices = case.indices.clone()
    out = [None, torch.empty(indices.shape, dtype=torch.int32, device=indices.device), indices][
        rng.integers(3)
    ]
    arguments: Arguments = {
        "indices": indices,
        "block_table": case.block_table,
        "requests": case.requests,
        "page_size": case.page_size,
        "page_stride": case.page_stride,
        "kv_lens": case.kv_lens,
        "out": out,
    }
    given = {name: value is not None for name, value in arguments.items()}
    needs_requests = (
        case.block_table is not None and given["requests"] and len(case.block_table) != len(indices)
    )
    kinds: Kinds = {
        "indices": TensorArgument(others=("out",), dtypes=INT32, leads=True),
        # Without requests it must have the same number of rows as indices.
        "block_table": TensorArgument(dtypes=INT32, others=("requests",), optional=not given["requests"]),
        "requests": TensorArgument(dtypes=INDEX, optional=not needs_requests),
        "page_size": IntArgument(low=1, high=case.page_stride, named=("page_size", "page_stride")),
        "page_stride": IntArgument(low=case.page_size, high=2**31 - 1, optional=True),
        "kv_lens": TensorArgument(dtypes=INDEX, optional=True),
        "out": TensorArgument(dtypes=INT32, exact=(0, 1), written=True, optional=True, others=("indices",)),
    }

    def prepare() -> None:
        indices.copy_(case.indices)

    def check(given: Arguments, result: Any) -> None:
        assert given["out"] is None or result is given["out"]
        assert result.cpu().equal(case.padded())

    return Call("selected_slots", selected_slots, arguments, kinds, check, prepare=prepare, public=True)
