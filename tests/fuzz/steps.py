"""Steps of an engine as single calls: page table, cache, view, plan and run, with every argument of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cases
import compositions
import numpy
import torch
from float8_outputs import check_rounded
from torch import Tensor

from attn_backend import Attention, BlockScales, BSRView, Composition, KVCache, PageTable

from .call import (
    Argument,
    Call,
    ChoiceArgument,
    FloatArgument,
    IntArgument,
    ScaleArgument,
    StalePlanError,
    TensorArgument,
)
from .values import wrong_values

INT32 = (torch.int32,)
INDEX = (torch.int32, torch.int64)
MAX_INT32 = 2**31 - 1
UNCHECKED = ("another dtype", "another size", "gaps", "another device")  # what run and append check

Arguments = dict[str, Any]
Kinds = dict[str, Argument]


@dataclass(frozen=True)
class Step:
    """The input of one step: made from a case, or from a prefix forest.

    q, out, lse: with rows of padding; out and lse are NaN. expected: float64 o and lse of the view's rows, in
    order. shape: has dtype, sm_scale and logits_soft_cap. q_scale: for 8-bit q. out_scale: for 8-bit out.
    tolerances: of the output and of lse; None: the dtype's.
    """

    q: Tensor
    kv: KVCache
    view: BSRView
    out: Tensor
    lse: Tensor
    shape: cases.Spec | compositions.Shape
    expected: Callable[[], tuple[Tensor, Tensor]]
    q_scale: float | None = None
    out_scale: Tensor | float | None = None
    tolerances: tuple[float, float] | None = None


def table_arguments(table: PageTable) -> tuple[Callable[..., PageTable], Arguments, Kinds]:
    """The constructor that makes this table, its arguments, and their properties."""
    surface = f"PageTable.{table.form}"
    indptr = TensorArgument(
        surface, ("kv_indptr",), ("kv_indices", "kv_last_page_len", "qo_indptr"), dtypes=INDEX, exact=(0,)
    )
    page_size = IntArgument(surface, others=("kv.k",), low=1, high=MAX_INT32)
    lens = TensorArgument(surface, others=("qo_indptr", "block_table", "rows"), dtypes=INDEX, exact=(0,))
    if table.form == "ragged":
        return PageTable.ragged, {"kv_indptr": table.indptr}, {"kv_indptr": indptr}
    if table.form == "csr":
        arguments: Arguments = {
            "kv_indptr": table.indptr,
            "kv_indices": table.indices,
            "kv_last_page_len": table.last_page_len,
        }
        kinds: Kinds = {
            "kv_indptr": indptr,
            "kv_indices": TensorArgument(surface, dtypes=INT32),
            "kv_last_page_len": TensorArgument(
                surface, others=("kv_indptr", "qo_indptr"), dtypes=INDEX, exact=(0,)
            ),
        }
        return PageTable.csr, arguments | {"page_size": table.page_size}, kinds | {"page_size": page_size}
    if table.form == "block_table":
        arguments = {"block_table": table.indices, "kv_lens": table.kv_lens}
        kinds = {
            "block_table": TensorArgument(surface, others=("kv_lens",), dtypes=INT32, exact=(0,)),
            "kv_lens": lens,
        }
        return (
            PageTable.block_table,
            arguments | {"page_size": table.page_size},
            kinds | {"page_size": page_size},
        )
    arguments = {"req_to_token": table.indices, "rows": table.rows, "kv_lens": table.kv_lens}
    kinds = {
        "req_to_token": TensorArgument(surface, others=("kv_lens", "rows"), dtypes=INT32),
        "rows": TensorArgument(surface, others=("kv_lens", "qo_indptr"), dtypes=INDEX, exact=(0,)),
        "kv_lens": lens,
    }
    return PageTable.token_slots, arguments | {"page_size": table.page_size}, kinds | {"page_size": page_size}


def cache_arguments(
    rng: numpy.random.Generator, kv: KVCache, may_be_unchecked: bool = True
) -> tuple[Callable[..., KVCache], Arguments, Kinds]:
    """A constructor of caches, and the arguments that make a cache with the same content. may_be_unchecked:
    KVCache.unchecked is one, since append or run check the cache.

    `cache_page_size` is its page_size; the table uses the same name.
    """
    make, arguments, kinds = _tensors_of_cache(rng, kv, may_be_unchecked and kv.has_token_scales)
    if kv.dtype.itemsize == 1:
        for name, kind in kinds.items():
            if isinstance(kind, TensorArgument):  # with another dtype it has no scales
                scales = ("k_scale", "v_scale", "kv.k_scale", "kv.v_scale", "head_dim")
                kinds[name] = replace(kind, others=(*kind.others, *scales))
        for name, scale in (("k_scale", kv.k_scale), ("v_scale", kv.v_scale)):
            if kv.has_token_scales:
                arguments[name], kinds[name] = scale, _scale_kind(make, name, scale)
                continue
            one = torch.ones(1, device=kv.device)
            wrong = (
                0.0,
                -0.5,
                math.nan,
                math.inf,
                1e300,
                one.double(),
                one.int(),
                one[:0],
                one.expand(1, 1, 1),
            )
            arguments[name] = scale
            kinds[name] = ChoiceArgument(
                make.__qualname__,
                (name, f"kv.{name}"),
                wrong=wrong,
                types=("x", [1.0], object(), {}),
                optional=True,
            )
    return make, arguments, kinds


def _scale_kind(
    make: Callable[..., KVCache], name: str, scale: Tensor | BlockScales | float | None
) -> ScaleArgument:
    """The properties of scales of each token and head. K's and V's must have the same form."""
    other = "v_scale" if name == "k_scale" else "k_scale"
    tensor = scale.blocks if isinstance(scale, BlockScales) else scale
    assert isinstance(tensor, Tensor)
    plain, one = torch.ones(tensor.shape[:3], device=tensor.device), torch.ones(1, device=tensor.device)
    wrong: list[object] = [
        None,
        0.5,
        0.0,
        math.nan,
        one,
        one[:0],
        "x",
        [1.0],
        {},
        plain.double(),
        plain[..., None],
    ]
    if isinstance(scale, BlockScales):
        wrong += [plain, tensor, (tensor, 1.0), scale._replace(blocks=plain), scale._replace(blocks=None)]
        wrong += [scale._replace(factor=one), scale._replace(factor=None)]
        wrong += [scale._replace(factor=2.0)] if tensor.dtype == torch.uint8 else []
    else:
        blocks = torch.ones(*plain.shape, 4, device=plain.device)
        wrong += [BlockScales(blocks.to(dtype)) for dtype in (torch.float8_e4m3fn, torch.uint8)]
    ways: tuple[str, ...] = ()
    if make == KVCache.unchecked:
        ways = (*UNCHECKED, "other dimensions")
        wrong = [None, 0.5, one, plain if isinstance(scale, BlockScales) else wrong[-1]]
    return ScaleArgument(
        make.__qualname__,
        (name, f"kv.{name}"),
        (other, f"kv.{other}", "k", "kv.k", "v", "kv.v", "kv", "head_dim"),
        dtypes=(tensor.dtype,),
        exact=tuple(range(tensor.ndim)),
        wrong=tuple(wrong),
        ways=ways,
    )


def _tensors_of_cache(
    rng: numpy.random.Generator, kv: KVCache, may_be_unchecked: bool
) -> tuple[Callable[..., KVCache], Arguments, Kinds]:
    layout = "NHD" if rng.random() < 0.5 else "HND"
    k, v = (t if layout == "NHD" else t.transpose(1, 2) for t in (kv.k, kv.v))
    dtypes, dtypes_v = (kv.dtype,), (kv.v.dtype,)
    forms = ["pair", "slots", *(["ragged"] if kv.page_size == 1 else [])]
    if dtypes == dtypes_v:
        forms += ["tensor", "packed"]
    if may_be_unchecked:
        forms.append("unchecked")
    form = str(rng.choice(forms))
    surface = "KVCache.unchecked" if form == "unchecked" else f"KVCache.from_{form}"
    of_kv, of_k, of_v = ("kv", "k", "v"), ("k", "kv.k"), ("v", "kv.v")
    with_layout: Kinds = {"layout": ChoiceArgument(surface, wrong=("nhd", "NDH", ""))}
    if form == "tensor":
        kind = TensorArgument(surface, of_kv, dtypes=dtypes, exact=(1, 2, 3, 4))
        return (
            KVCache.from_tensor,
            {"kv": torch.stack([k, v], 1), "layout": layout},
            {"kv": kind, **with_layout},
        )
    if form == "packed":
        kind = TensorArgument(surface, of_kv, dtypes=dtypes, exact=(1, 2, 3))
        return (
            KVCache.from_packed,
            {"kv": torch.cat([k, v], -1), "layout": layout},
            {"kv": kind, **with_layout},
        )
    if form == "unchecked":  # append and run check it
        kinds: Kinds = {
            "k": TensorArgument(surface, of_k, of_v, dtypes=dtypes, exact=(0, 1, 2, 3), ways=UNCHECKED),
            "v": TensorArgument(surface, of_v, of_k, dtypes=dtypes_v, exact=(0, 1, 2, 3), ways=UNCHECKED),
        }
        return KVCache.unchecked, {"k": kv.k, "v": kv.v}, kinds
    if form == "pair":
        kinds = {
            "k": TensorArgument(surface, of_k, of_v, dtypes=dtypes, exact=(0, 1, 2, 3)),
            "v": TensorArgument(surface, of_v, of_k, dtypes=dtypes_v, exact=(0, 1, 2, 3)),
        }
        return KVCache.from_pair, {"k": k, "v": v, "layout": layout}, kinds | with_layout
    kinds = {
        "k": TensorArgument(surface, of_k, of_v, dtypes=dtypes, exact=(1, 2)),
        "v": TensorArgument(surface, of_v, of_k, dtypes=dtypes_v, exact=(1, 2)),
    }
    arguments = {"k": kv.k.flatten(0, 1), "v": kv.v.flatten(0, 1)}
    if form == "ragged":
        return KVCache.from_ragged, arguments, kinds
    # More tokens than slots: a cache without pages, which run() refuses.
    page_size = IntArgument(surface, ("page_size",), ("kv.k", "k"), low=1, high=MAX_INT32)
    return (
        KVCache.from_slots,
        arguments | {"cache_page_size": kv.page_size},
        kinds | {"cache_page_size": page_size},
    )


def without_prefix(given: Arguments, names: Arguments) -> Arguments:
    return {name.removeprefix("cache_"): given[name] for name in names}


def plan_or_none(attention: Attention, composition: Composition | BSRView, q: Tensor, kv: KVCache) -> None:
    """attention.plan; after a refusal there must be no plan, not even the previous one."""
    try:
        attention.plan(composition)
    except ValueError:
        try:
            attention.run(q, kv)
        except ValueError:
            pass
        else:
            raise StalePlanError("run() served a plan although the last one was refused") from None
        raise


def step_call(rng: numpy.random.Generator, attention: Attention, step: Step) -> Call:
    """plan and run of a step.

    Some rows are listed, some q are shorter than the plan, and run allocates some results.
    """
    view, shape, device = step.view, step.shape, step.q.device
    total = int(view.qo_indptr[-1])
    q, out, lse, places = step.q, step.out, step.lse, None
    # torch cannot write to some rows of a float8 tensor
    bits = torch.uint8 if q.element_size() == 1 else q.dtype
    if rng.random() < 0.2:
        places = torch.from_numpy(
            rng.permutation(min(len(q), attention.max_rows))[:total].astype(numpy.int32)
        ).to(device)
        q = torch.full_like(step.q, torch.nan)
        q.view(bits)[places.long()] = step.q.view(bits)[:total]
    if rng.random() < 0.15:  # rows of the plan beyond q are not computed
        rows = 0 if rng.random() < 0.4 else int(rng.integers(len(q) + 1))
        q, out, lse = q[:rows], out[:rows], lse[:rows]
    make_table, of_table, table_kinds = table_arguments(view.table)
    make_cache, of_cache, cache_kinds = cache_arguments(rng, step.kv)
    as_composition = rng.random() < 0.4

    def function(**given: Any) -> Tensor:
        table = make_table(**{name: given[name] for name in of_table})
        kv = make_cache(**without_prefix(given, of_cache))
        made = BSRView(
            given["qo_indptr"],
            table,
            causal=given["causal"],
            window_left=given["window_left"],
            rows=given["row_list"],
        )
        plan_or_none(attention, Composition((made,)) if as_composition else made, step.q, step.kv)
        options = (
            "q_rope",
            "out",
            "lse",
            "sm_scale",
            "logits_soft_cap",
            "after_append",
            "q_scale",
            "out_scale",
        )
        return attention.run(given["q"], kv, **{name: given[name] for name in options})

    def check(given: Arguments, result: Tensor) -> None:
        place = torch.arange(total, device=device) if places is None else places.long()
        computed = place < len(given["q"])
        o_ref, lse_ref = (t[computed] for t in step.expected())
        rows = place[computed]
        check_result(shape, given, result, rows, o_ref, lse_ref, step.tolerances)

    def prepare() -> None:
        out.fill_(torch.nan)
        lse.fill_(torch.nan)

    arguments: Arguments = {
        **of_table,
        **of_cache,
        "qo_indptr": view.qo_indptr,
        "causal": view.causal,
        "window_left": view.window_left,
        "row_list": places,
        "q": q,
        "q_rope": None,
        "out": out if rng.random() < 0.8 else None,
        "lse": lse if rng.random() < 0.7 else None,
        "sm_scale": shape.sm_scale,
        "logits_soft_cap": shape.logits_soft_cap,
        "after_append": bool(rng.random() < 0.2),
        "q_scale": step.q_scale,
        "out_scale": step.out_scale,
    }
    one = torch.ones(1, device=device)
    no_scales = (0.0, -0.1, math.nan, math.inf, 1e300, 1e-60, one.double(), one.int(), one[:0], one.expand(2))
    kinds: Kinds = {
        **table_kinds,
        **cache_kinds,
        "q_rope": ChoiceArgument(
            "Attention.run", wrong=(q, q[..., :8], q[:0]), types=("x", [1.0], object(), {}), optional=True
        ),
        "q_scale": FloatArgument(
            "Attention.run", optional=True, wrong=(0.0, -0.1, torch.inf, -torch.inf, 1e300)
        ),
        "qo_indptr": TensorArgument("BSRView", dtypes=INDEX, exact=(0,)),
        "causal": ChoiceArgument("BSRView", wrong=(1, 0), optional=True),
        "window_left": IntArgument("BSRView", low=-1, high=MAX_INT32),
        "row_list": TensorArgument("BSRView", ("rows",), ("qo_indptr",), dtypes=INT32, optional=True),
        "out_scale": ChoiceArgument(
            "Attention.run", wrong=no_scales, types=("x", [1.0], object(), {}), optional=True
        ),
        **run_kinds(attention, q, out.dtype),
    }

    def values(rng: numpy.random.Generator) -> list[Any]:
        return wrong_values(rng, arguments, view.table, attention.max_rows, step.kv.num_pages)

    return Call(
        "plan and run",
        function,
        arguments,
        kinds,
        check,
        prepare=prepare,
        values=values,
        reported=attention.raise_for_errors,
    )


def run_kinds(attention: Attention, q: Tensor, out_dtype: torch.dtype | None = None) -> Kinds:
    """The properties of the arguments of run(). out_dtype: None: the object's."""
    run = "Attention.run"
    return {
        "q": TensorArgument(run, others=("out", "lse"), dtypes=(attention.q_dtype,), exact=(1, 2)),
        "out": TensorArgument(
            run, dtypes=(out_dtype or attention.dtype,), exact=(0, 1, 2), optional=True, written=True
        ),
        "lse": TensorArgument(run, dtypes=(torch.float32,), exact=(0, 1), optional=True, written=True),
        "sm_scale": FloatArgument(run, optional=True, wrong=(0.0, -0.1, torch.inf, -torch.inf, 1e300)),
        "logits_soft_cap": FloatArgument(run, wrong=(-1.0, torch.inf, -torch.inf, 1e300)),
        "after_append": ChoiceArgument(run, wrong=("yes",)),
    }


def check_result(
    shape: Any,
    given: Arguments,
    result: Tensor,
    rows: Tensor,
    o_ref: Tensor,
    lse_ref: Tensor,
    tolerances: tuple[float, float] | None = None,
) -> None:
    """Compares with float64. tolerances: as in Step.

    Nothing else may have been written: no other rows, and nothing around `out`.
    """
    out, lse, out_scale = given["out"], given["lse"], given.get("out_scale")
    assert out is None or result is out, "run() did not return out"
    assert result.shape == given["q"].shape
    if out is not None:
        room = result.new_empty(0).set_(result.untyped_storage())
        assert int((~room.float().isnan()).sum()) == int((~result.float().isnan()).sum()), (
            "run() wrote around out"
        )
    wide = result.float()
    if out_scale is not None:
        check_rounded(result.detach()[rows], o_ref, out_scale, cases.TOLERANCE[shape.dtype])
        wide = wide.double()
        wide[rows] = o_ref
    if out is None:  # allocated by run: unused rows hold anything
        kept = torch.full_like(wide, torch.nan)
        kept[rows] = wide[rows]
        wide = kept
    if lse is None:
        lse = torch.full(result.shape[:2], torch.nan, dtype=torch.float64, device=result.device)
        lse[rows] = lse_ref
    compositions.check_states(shape, rows.tolist(), wide.detach(), lse.detach(), o_ref, lse_ref, tolerances)
