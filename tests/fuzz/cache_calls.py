"""Scenarios of the cache: append_kv into every storage form, append_kv and append_qkv into every format, and
separate calls of the constructors of caches, tables and workspaces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import case_tensors
import numpy
import torch
from append_problems import Problem, random_problem
from token_scaled_caches import (
    ALL_LAYOUTS,
    cache_for,
    check_token_scaled,
    fits,
    has_same_bits,
    tensors_of,
    token_scaled_cache,
)
from torch import Tensor

from attn_backend import (
    BlockScales,
    BSRView,
    KVCache,
    PageTable,
    Rotary,
    append_kv,
    append_qkv,
    sampling_workspace,
)

from .attention_calls import OWN_SCALES, heads_of, seed_of, small_spec
from .call import Call, ChoiceArgument, FloatArgument, IntArgument, TensorArgument
from .mutations import NOT_NUMBERS, around
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


def projections(rng: numpy.random.Generator, device: torch.device) -> Iterator[Call]:
    """append_qkv, and append_kv of rows that are rounded or rotated."""
    dtypes = (torch.bfloat16, torch.float16, *([torch.float32] if device.type == "cpu" else []))
    while True:
        problem = random_problem(seed_of(rng), dtypes[rng.integers(len(dtypes))], device)
        formats = [dtype for dtype in OWN_SCALES if fits(problem.kv.head_dim, dtype)]
        kv = problem.kv
        if rng.random() < 0.8:
            dtype, layout = formats[rng.integers(len(formats))], ALL_LAYOUTS[rng.integers(len(ALL_LAYOUTS))]
            kv = cache_for(problem, dtype, layout)
        if rng.random() < 0.6:
            yield from around(rng, qkv_call(rng, problem, kv))
        else:
            plain = replace(problem, rotary=None, q_norm=None, k_norm=None, out=None)
            yield from around(rng, rounded_call(rng, plain, kv))


def qkv_call(rng: numpy.random.Generator, problem: Problem, kv: KVCache) -> Call:
    arguments: Arguments = {"q": problem.q, "k": problem.k, "v": problem.v, "slots": problem.slots}
    arguments |= {**problem.options, "out": problem.out, "rotation": bool(rng.random() < 0.3)}
    dtype, head_dim = problem.q.dtype, problem.q.shape[2]
    floats, is_rotated = (dtype,), problem.rotary is not None
    frequencies = torch.ones(head_dim // 2 + 4, device=problem.q.device)
    rotaries = [Rotary(frequencies), Rotary(frequencies[:5]), Rotary(frequencies[:4].double())]
    rotaries += [
        Rotary(torch.ones(3, head_dim + 8)),
        Rotary(torch.ones(3, 8).int()),
        Rotary(torch.ones(0, 8)),
    ]
    both = ("rotary", "positions")
    norm = TensorArgument(dtypes=floats, exact=(0,), optional=True)
    kinds: Kinds = {
        "q": TensorArgument(
            named=("q", "q_out"),
            others=("k", "v", "out"),
            dtypes=floats,
            exact=(2,),
            written=problem.out is None,
        ),
        "k": TensorArgument(others=("kv.k", "q", "v"), dtypes=floats, exact=(1, 2)),
        "v": TensorArgument(others=("kv.v", "k"), dtypes=floats, exact=(1, 2)),
        "slots": TensorArgument(dtypes=INDEX),
        "rotary": ChoiceArgument(
            named=(*both, "rotary.table", "rotary_dim"),
            wrong=tuple(rotaries),
            optional=not is_rotated,
        ),
        "positions": TensorArgument(dtypes=INDEX, optional=not is_rotated),
        "q_norm": norm,
        "k_norm": norm,
        "norm_eps": FloatArgument(wrong=(-1.0, -torch.inf)),
        "norm_offset": ChoiceArgument(wrong=(10**400,), types=NOT_NUMBERS),
        "out": TensorArgument(
            named=("out", "q_out"), others=("q",), dtypes=floats, exact=(1, 2), written=True, optional=True
        ),
        "rotation": ChoiceArgument(wrong=(1, 0, "yes")),
    }
    return into_cache(rng, "append_qkv", append_qkv, problem, kv, arguments, kinds)


def rounded_call(rng: numpy.random.Generator, problem: Problem, kv: KVCache) -> Call:
    arguments: Arguments = {"k": problem.k, "v": problem.v, "slots": problem.slots}
    arguments["rotation"] = bool(rng.random() < 0.3)
    floats = (problem.k.dtype,)
    kinds: Kinds = {
        "k": TensorArgument(others=("kv.k", "v"), dtypes=floats, exact=(1, 2)),
        "v": TensorArgument(others=("kv.v", "k"), dtypes=floats, exact=(1, 2)),
        "slots": TensorArgument(dtypes=INDEX),
        "rotation": ChoiceArgument(wrong=(1, 0, "yes")),
    }
    return into_cache(rng, "append_kv", append_kv, problem, kv, arguments, kinds)


def into_cache(
    rng: numpy.random.Generator,
    surface: str,
    append: Any,
    problem: Problem,
    kv: KVCache,
    arguments: Arguments,
    kinds: Kinds,
) -> Call:
    """A call of `append` into a new cache object with the same content as `kv`. It returns the cache."""
    fused, rotation = append is append_qkv, arguments["rotation"]
    make, of_cache, cache_kinds = cache_arguments(rng, kv)
    if not kv.has_token_scales:  # problem.check() reads this one
        make, of_cache, cache_kinds = (lambda kv: kv), {"kv": kv}, {}
    else:  # the new rows are k and v, too
        cache_kinds = {
            _prefixed(name): replace(kind, named=kind.named or (name,)) for name, kind in cache_kinds.items()
        }
    of_cache = {_prefixed(name): value for name, value in of_cache.items()}
    storages = [
        _bytes_of(tensor.blocks if isinstance(tensor, BlockScales) else tensor)
        for tensor in of_cache.values()
        if isinstance(tensor, Tensor | BlockScales)
    ]
    before: dict[int, Tensor] = {}  # copies of the storages, by address

    def function(**given: Any) -> KVCache:
        made = make(**without_prefix(given, of_cache))
        result = append(kv=made, **{name: given[name] for name in arguments})
        assert result is ((given["q"] if given["out"] is None else given["out"]) if fused else None)
        return made

    def prepare() -> None:
        problem.qkv.copy_(problem.before)
        problem.storage.fill_(torch.nan)
        before.update({storage.data_ptr(): storage.clone() for storage in storages})
        if problem.out is not None:
            problem.out.fill_(torch.nan)

    def check(given: Arguments, made: KVCache) -> None:
        if not kv.has_token_scales:
            problem.check(rotation)
            return
        check_token_scaled(problem, made, fused, rotation)
        slots = problem.slots.long()
        slots = slots[(slots >= 0) & (slots < made.num_pages * made.page_size)]
        for tensor in tensors_of(made).values():
            of_before = before[tensor.untyped_storage().data_ptr()].view(tensor.dtype)
            of_before = of_before.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            at = slots // made.page_size, slots % made.page_size
            bits = torch.uint8 if tensor.element_size() == 1 else tensor.dtype
            tensor.detach().view(bits)[at] = of_before.view(bits)[at]
        for storage in storages:
            assert torch.equal(storage, before[storage.data_ptr()]), "other rows or other memory were written"

    return Call(surface, function, of_cache | arguments, cache_kinds | kinds, check, prepare=prepare)


def _prefixed(name: str) -> str:
    return f"cache_{name.removeprefix('cache_')}"


def _bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def structures(rng: numpy.random.Generator, device: torch.device) -> Iterator[Call]:
    """Creates metadata objects and checks their reported properties."""
    while True:
        case = case_tensors.build(small_spec(rng, device, **heads_of(rng, device)), device)
        kv = case.kv
        if rng.random() < 0.5:
            dtype, layout = (
                OWN_SCALES[rng.integers(len(OWN_SCALES))],
                ALL_LAYOUTS[rng.integers(len(ALL_LAYOUTS))],
            )
            sizes = kv.num_pages, kv.page_size, int(rng.choice([64, 128]))
            kv = token_scaled_cache(dtype, *sizes, layout, device, kv.num_kv_heads)
        yield from around(rng, cache_call(rng, kv))
        yield from around(rng, table_call(case))
        yield from around(rng, view_call(rng, case))
        if rng.random() < 0.2:
            yield from around(rng, workspace_call(device))


def cache_call(rng: numpy.random.Generator, right: KVCache) -> Call:
    make, arguments, kinds = cache_arguments(rng, right, may_be_unchecked=False)

    def check(given: Arguments, kv: KVCache) -> None:
        assert (kv.num_pages, kv.page_size, kv.num_kv_heads) == tuple(right.k.shape[:3])
        assert (kv.head_dim, kv.head_dim_v) == (right.head_dim, right.head_dim_v)
        assert (kv.dtype, kv.stored_dtype, kv.device) == (right.dtype, right.stored_dtype, right.device)
        assert kv.has_token_scales == right.has_token_scales
        storages = {
            tensor.untyped_storage().data_ptr()
            for value in given.values()
            if isinstance(tensor := value.blocks if isinstance(value, BlockScales) else value, Tensor)
        }
        expected = tensors_of(right)
        for name, made in tensors_of(kv).items():
            assert has_same_bits(made, expected[name]), "the cache holds something else"
            assert made.untyped_storage().data_ptr() in storages, "a copy"

    own = dict(kinds)
    if right.has_token_scales:  # other heads do not fit the scales, but wider ones and other bytes may
        of_bytes = (torch.float8_e4m3fn, torch.int8, torch.uint8)
        if "kv" in own and not isinstance(right.k_scale, BlockScales):
            own["kv"] = replace(own["kv"], dtypes=of_bytes)
        for name in ("k", "v", "kv"):
            if name in own and right.dtype != torch.uint8:
                exact = own[name].exact
                own[name] = replace(
                    own[name], exact=tuple(dim for dim in exact if dim < arguments[name].ndim - 1)
                )
    else:
        # Other heads make another cache. So do another dtype and device, if there is only one tensor.
        own |= {name: replace(kinds[name], exact=()) for name in ("k", "v", "kv") if name in kinds}
        if "kv" in own:
            floats = (torch.float32, torch.float16, torch.bfloat16)
            own["kv"] = replace(own["kv"], dtypes=floats, leads=True)
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
        "prompts": torch.ones(view.batch_size, dtype=torch.int32, device=case.device),
    }
    kinds: Kinds = {
        "qo_indptr": TensorArgument(dtypes=INDEX, exact=(0,)),
        "table": ChoiceArgument(wrong=(view.qo_indptr, view)),
        "causal": ChoiceArgument(wrong=(1, 0), optional=True),
        "window_left": IntArgument(low=-1, high=ANY),
        "rows": TensorArgument(dtypes=(torch.int32,), optional=True),
        "prompts": TensorArgument(others=("qo_indptr",), dtypes=(torch.int32,), exact=(0,), optional=True),
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
