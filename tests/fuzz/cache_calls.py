"""Scenarios of the cache: append_kv into every storage form, and separate calls of the constructors of
caches, tables and workspaces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import case_tensors
import numpy
import torch

from attn_backend import BSRView, KVCache, PageTable, append_kv, sampling_workspace

from .attention_calls import heads_of, seed_of, small_spec
from .call import Call, ChoiceArgument, IntArgument, TensorArgument
from .mutations import around
from .steps import INDEX, Arguments, Kinds, cache_arguments, table_arguments, without_prefix

ANY = 2**100  # plan may refuse a number that is too large, since it knows its limits
WITHOUT_MEMORY = frozenset({"fake", "wrapper", "freed"})  # the code that reads it may refuse it


def appends(rng: numpy.random.Generator, device: torch.device) -> Iterator[Call]:
    while True:
        case = case_tensors.build(small_spec(rng, device, **heads_of(rng, device)), device)
        yield from around(rng, append_call(rng, case))


def append_call(rng: numpy.random.Generator, case: case_tensors.Case) -> Call:
    kv, device, spec = case.kv, case.device, case.spec
    num_slots = kv.num_pages * kv.page_size
    count = int(rng.integers(0, min(num_slots, 12) + 1))
    slots = rng.permutation(num_slots)[:count]
    is_int64 = rng.random() < 0.5
    skipped = [-1, -(2**31), num_slots, 2**31 - 1] + ([2**32, 2**40 + 1, -(2**63)] if is_int64 else [])
    slots = numpy.where(
        rng.random(count) < 0.2, rng.choice(numpy.array(skipped, dtype=numpy.int64), count), slots
    )
    generator = torch.Generator(device).manual_seed(seed_of(rng))
    shape = (count + int(rng.integers(3)), 2 * kv.num_kv_heads, kv.head_dim)
    # K and V are slices of one tensor, as a projection returns them
    fused = torch.randn(shape, device=device, generator=generator).to(spec.dtype)
    k, v = fused[:, : kv.num_kv_heads], fused[:, kv.num_kv_heads :]
    if rng.random() < 0.3:  # with different strides
        v = v.contiguous()
    arguments: Arguments = {
        "k": k,
        "v": v,
        "kv": kv,
        "slots": torch.from_numpy(slots).to(device, torch.int64 if is_int64 else torch.int32),
    }
    kinds: Kinds = {
        "k": TensorArgument(others=("kv.k", "v"), dtypes=(spec.dtype,), exact=(1, 2)),
        "v": TensorArgument(others=("kv.v",), dtypes=(spec.dtype,), exact=(1, 2)),
        "kv": ChoiceArgument(wrong=(k, (kv.k, kv.v))),
        "slots": TensorArgument(dtypes=INDEX),
    }
    before: list[torch.Tensor] = []

    def storage(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_empty(0).set_(tensor.untyped_storage())

    def prepare() -> None:
        before[:] = [storage(kv.k).clone(), storage(kv.v).clone()]

    def check(given: Arguments, result: Any) -> None:
        assert result is None
        same = kv.k.untyped_storage().data_ptr() == kv.v.untyped_storage().data_ptr()
        expected = [before[0], before[0] if same else before[1]]
        kept = torch.from_numpy((slots >= 0) & (slots < num_slots)).to(device)
        at = torch.from_numpy(slots).to(device)[kept]
        for room, cache, new in zip(expected, (kv.k, kv.v), (k, v), strict=True):
            place = room.as_strided(cache.shape, cache.stride(), cache.storage_offset())
            place[at // kv.page_size, at % kv.page_size] = new[:count][kept]
        for name, room, cache in zip("kv", expected, (kv.k, kv.v), strict=True):
            assert torch.equal(storage(cache).view(torch.uint8), room.view(torch.uint8)), (
                f"kv.{name} or what lies around it is not what it should be"
            )

    return Call("append_kv", append_kv, arguments, kinds, check, prepare=prepare, public=True)


def structures(rng: numpy.random.Generator, device: torch.device) -> Iterator[Call]:
    """Creates metadata objects and checks their reported properties."""
    while True:
        case = case_tensors.build(small_spec(rng, device, **heads_of(rng, device)), device)
        yield from around(rng, cache_call(rng, case))
        yield from around(rng, table_call(case))
        yield from around(rng, view_call(rng, case))
        if rng.random() < 0.2:
            yield from around(rng, workspace_call(device))


def cache_call(rng: numpy.random.Generator, case: case_tensors.Case) -> Call:
    make, arguments, kinds = cache_arguments(rng, case.kv)

    def check(given: Arguments, kv: KVCache) -> None:
        assert (kv.num_pages, kv.page_size, kv.num_kv_heads, kv.head_dim) == tuple(case.kv.k.shape)
        assert (kv.dtype, kv.device) == (case.kv.dtype, case.kv.device)
        for made, right in ((kv.k, case.kv.k), (kv.v, case.kv.v)):
            assert torch.equal(made.nan_to_num(), right.nan_to_num()), "the cache holds something else"
            assert made.untyped_storage().data_ptr() in {
                t.untyped_storage().data_ptr() for t in given.values() if isinstance(t, torch.Tensor)
            }, "a copy"

    # Other heads make another cache. So do another dtype and device, if there is only one tensor.
    own = {
        name: replace(kind, exact=()) if name in ("k", "v", "kv") else kind for name, kind in kinds.items()
    }
    if "kv" in own:
        own["kv"] = replace(own["kv"], dtypes=(torch.float32, torch.float16, torch.bfloat16), leads=True)
    return Call(
        make.__qualname__,
        lambda **given: make(**without_prefix(given, arguments)),
        arguments,
        own,
        check,
        without=WITHOUT_MEMORY,
    )


def table_call(case: case_tensors.Case) -> Call:
    table = case.view.table
    make, arguments, kinds = table_arguments(table)
    # By themselves, these may have any size.
    free = {"ragged": ("kv_indptr",), "token_slots": ("req_to_token",), "csr": ("kv_indices",)}.get(
        table.form, ()
    )
    own = {
        name: replace(kind, exact=(), leads=table.form == "ragged") if name in free else kind
        for name, kind in kinds.items()
    }

    def check(given: Arguments, made: PageTable) -> None:
        assert (made.form, made.batch_size, made.device, made.page_size) == (
            table.form,
            table.batch_size,
            table.device,
            table.page_size,
        )
        assert all(
            any(value is held for held in vars(made).values())
            for value in given.values()
            if isinstance(value, torch.Tensor)
        ), "a copy"

    if "page_size" in own:
        own["page_size"] = IntArgument(low=1, high=ANY)
    # A single tensor cannot disagree with others about the device.
    without = WITHOUT_MEMORY | {"another device"} if table.form == "ragged" else WITHOUT_MEMORY
    return Call(f"PageTable.{table.form}", make, arguments, own, check, public=True, without=without)


def view_call(rng: numpy.random.Generator, case: case_tensors.Case) -> Call:
    view = case.view
    arguments: Arguments = {
        "qo_indptr": view.qo_indptr,
        "table": view.table,
        "causal": view.causal,
        "window_left": view.window_left,
        "rows": torch.zeros(5, dtype=torch.int32, device=case.device) if rng.random() < 0.5 else None,
    }
    kinds: Kinds = {
        "qo_indptr": TensorArgument(dtypes=INDEX, exact=(0,)),
        "table": ChoiceArgument(wrong=(view.qo_indptr, view)),
        "causal": ChoiceArgument(wrong=(1, 0), optional=True),
        "window_left": IntArgument(low=-1, high=ANY),
        "rows": TensorArgument(dtypes=(torch.int32,), optional=True),
    }

    def check(given: Arguments, made: BSRView) -> None:
        assert (made.batch_size, made.device, made.causal, made.window_left) == (
            view.batch_size,
            view.device,
            view.causal,
            view.window_left,
        )
        assert made.table is view.table

    return Call("BSRView", BSRView, arguments, kinds, check, public=True, without=WITHOUT_MEMORY)


def workspace_call(device: torch.device) -> Call:
    def check(given: Arguments, workspace: torch.Tensor) -> None:
        assert (workspace.dtype, workspace.shape, workspace.device.type) == (
            torch.int64,
            (4096,),
            device.type,
        )
        assert not workspace.any()

    kinds: Kinds = {"device": ChoiceArgument(wrong=("gpu", "cpu:x", "cuda:63"), optional=True)}
    return Call("sampling_workspace", sampling_workspace, {"device": device}, kinds, check, public=True)
