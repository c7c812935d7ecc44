"""Scenarios of attention: batches of all forms on one object, prefix forests, trees, cascades, and the
constructor.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import attention_kernels
import case_tensors
import cases
import compositions
import forests
import numpy
import torch
from float8_cases import DTYPES, FP4_DTYPES, PAIR, SCALES, TOKEN_DTYPES, Float8Case
from float8_outputs import out_of_8_bits, scale_for
from token_scaled_caches import fits

from attn_backend import Attention, BSRView, Composition, KVCache, PageTable
from attn_backend.variants import builtin

from .call import Call, ChoiceArgument, IntArgument, TensorArgument, Wrong
from .mutations import around
from .steps import INDEX, Arguments, Kinds, Step, check_result, plan_or_none, run_kinds, step_call

MAX_ROWS, MAX_BATCH = 80, 9  # more than small_spec() makes
NO_SEQUENCE = (3.5, "x", object())
OWN_SCALES = (*TOKEN_DTYPES, *FP4_DTYPES, PAIR)  # of caches whose tokens and heads have their own scales


def seed_of(rng: numpy.random.Generator) -> int:
    return int(rng.integers(2**31))


def small_spec(rng: numpy.random.Generator, device: torch.device, **changes: object) -> cases.Spec:
    """A random case whose oracle takes a millisecond."""
    spec = cases.random_spec(seed_of(rng), device.type).with_(**changes)
    batch = int(rng.choice([0, 1, 2, 3, 5, 8], p=[0.02, 0.28, 0.25, 0.25, 0.15, 0.05]))
    longest = int(rng.choice([5, 40, 150], p=[0.3, 0.6, 0.1]))
    kv_lens = rng.integers(0, longest + 1, batch).tolist()
    style = rng.random()
    qo_lens = [1 if style < 0.4 else int(rng.integers(0, 7)) for _ in range(batch)]
    if batch and style > 0.8:
        qo_lens[int(rng.integers(batch))] = int(rng.integers(1, 30))
    page_size = spec.page_size if rng.random() < 0.03 else min(spec.page_size, 32)
    window_left = spec.window_left % (longest + 2) if spec.window_left >= 0 else -1
    return spec.with_(
        qo_lens=tuple(qo_lens),
        kv_lens=tuple(kv_lens),
        page_size=page_size,
        window_left=window_left,
        padding_rows=int(rng.choice([0, 0, 1, 5])),
    )


def heads_of(rng: numpy.random.Generator, device: torch.device) -> dict[str, Any]:
    """The head configuration of an object, as fields of a case."""
    spec = cases.random_spec(seed_of(rng), device.type)
    kv_heads = min(spec.num_kv_heads, 2)
    head_dim = spec.head_dim if kv_heads * spec.group_size * spec.head_dim <= 1024 else 64
    return {
        "num_kv_heads": kv_heads,
        "group_size": spec.group_size,
        "head_dim": head_dim,
        "dtype": spec.dtype,
        "num_ctas": spec.num_ctas,
    }


def heads_of_cache(
    rng: numpy.random.Generator, device: torch.device, dtype: torch.dtype | str | None
) -> dict[str, Any]:
    """As heads_of(), for a cache of this dtype."""
    heads = heads_of(rng, device) | {"strided": False}
    if device.type == "cuda":  # most of these kernels are in the package
        heads |= {"head_dim": 128, "dtype": torch.bfloat16}
    if dtype is not None and not fits(heads["head_dim"], dtype):
        heads["head_dim"] = 64
    return heads


def object_options(rng: numpy.random.Generator, device: torch.device) -> dict[str, Any]:
    """Arguments of Attention that do not change results."""
    on_cuda = device.type == "cuda"
    kernel = (
        attention_kernels.kernel_of(device, seed_of(rng))
        if on_cuda
        else [None, None, None, "hopper", "generic"][rng.integers(5)]
    )
    batch_invariant = bool(rng.random() < 0.15)
    return {
        "kernel": kernel,
        "cascade": [True, True, False, "always"][rng.integers(4)],
        "batch_invariant": batch_invariant,
        "max_levels": 1 if batch_invariant else int(rng.choice([1, 1, 2, 8])),
        "max_rows": MAX_ROWS + int(rng.integers(3)),
        "max_batch": MAX_BATCH + int(rng.integers(3)),
    }


def step_of_case(case: case_tensors.Case) -> Step:
    return Step(case.q, case.kv, case.view, case.out, case.lse, case.spec, once(case.expected))


def once(function: Callable[[], Any]) -> Callable[[], Any]:
    """The function, evaluated at its first call."""
    known: list[Any] = []

    def value() -> Any:
        if not known:
            known.append(function())
        return known[0]

    return value


def batches(rng: numpy.random.Generator, device: torch.device) -> Iterator[Call]:
    """One object, batches of any form."""
    heads = heads_of(rng, device)
    attention = None
    while True:
        case = case_tensors.build(small_spec(rng, device, **heads), device)
        attention = case.attention(**object_options(rng, device)) if attention is None else attention
        yield from around(rng, step_call(rng, attention, step_of_case(case)))
        if rng.random() < 0.05:
            yield copied(rng, attention)


def float8_batches(rng: numpy.random.Generator, device: torch.device) -> Iterator[Call]:
    """The same over 8-bit caches with scales."""
    heads = heads_of(rng, device) | {"strided": False}
    if heads["dtype"] == torch.float32 and device.type == "cuda":
        heads["dtype"] = torch.bfloat16
    dtype = DTYPES[rng.integers(2)]
    # On a GPU only where kernels dequantize: results are less precise if they multiply 8-bit values.
    has_float8_q = bool(rng.random() < 0.3) and (device.type == "cpu" or dtype == torch.float8_e5m2)
    attention = None
    while True:
        k_form, v_form = (str(form) for form in rng.choice(SCALES, size=2))
        problem = Float8Case(
            small_spec(rng, device, **heads),
            device,
            dtype,
            k_form,
            v_form,
            "number" if has_float8_q else None,
        )
        case = problem.case
        attention = (
            case.attention(**problem.options, **object_options(rng, device))
            if attention is None
            else attention
        )
        step = Step(
            case.q,
            case.kv,
            case.view,
            case.out,
            case.lse,
            case.spec,
            once(problem.expected),
            problem.run_options.get("q_scale"),
        )
        yield from around(rng, step_call(rng, attention, step))


def float8_outputs(rng: numpy.random.Generator, device: torch.device) -> Iterator[Call]:
    """One object whose runs have 8-bit outputs, some of them saturated, and 16-bit outputs."""
    heads = heads_of(rng, device) | {"strided": False}
    if device.type == "cuda":  # kernels in the package
        heads |= {"head_dim": 128, "dtype": torch.bfloat16}
    attention = None
    while True:
        case = case_tensors.build(small_spec(rng, device, **heads), device)
        attention = (
            case.attention(float8_out=True, **object_options(rng, device)) if attention is None else attention
        )
        step = step_of_case(case)
        if rng.random() < 0.8:
            scale = scale_for(step.expected()[0], 0.2 * (rng.random() < 0.5))
            step = replace(
                step,
                out=out_of_8_bits(case),
                out_scale=scale if rng.random() < 0.5 else torch.tensor([scale], device=device),
            )
        yield from around(rng, step_call(rng, attention, step))


def copied(rng: numpy.random.Generator, attention: Attention) -> Call:
    """An object with a workspace has no copies."""
    functions = (copy.copy, copy.deepcopy, pickle.dumps)
    function = functions[rng.integers(3)]
    wrong = Wrong("Attention", "unknown", attention, ("Attention",))  # a TypeError is also correct
    return Call(
        function.__name__,
        lambda **given: function(given["Attention"]),
        {"Attention": attention},
        {},
        lambda *_: None,
        wrong=wrong,
    )


def prefix_forests(rng: numpy.random.Generator, device: torch.device) -> Iterator[Call]:
    """One object that looks for shared prefixes, over batches that have some."""
    shape = small_shape(rng, device)
    attention = None
    while True:
        batch = forests.random_batch(
            rng,
            shape.page_size,
            pair_cost=0.1,
            budget=2500,
            max_requests=int(rng.choice([2, 4, 8])),
            max_rows=40,
        )
        problem = forests.make_problem(rng, shape, batch, device)
        room = {"max_rows": 1000, "max_batch": 200, "cascade": True if rng.random() < 0.3 else "always"}
        attention = problem.attention(**room) if attention is None else attention
        view = batch.view(rng, device)
        step = Step(
            problem.q, problem.memory.kv, view, problem.out, problem.lse, shape, once(problem.expected)
        )
        yield from around(rng, step_call(rng, attention, step))


def small_shape(rng: numpy.random.Generator, device: torch.device) -> compositions.Shape:
    shape = compositions.random_shape(rng, device)
    return replace(
        shape,
        num_kv_heads=min(shape.num_kv_heads, 2),
        group_size=min(shape.group_size, 4),
        page_size=min(shape.page_size, 16),
    )


# ---- Several levels ----


def level_call(
    rng: numpy.random.Generator,
    problem: compositions.Problem,
    name: str,
    make: Callable[..., Composition],
    arguments: Arguments,
    kinds: Kinds,
) -> Call:
    """A composition, plan and run, from the parts of the composition."""
    attention = problem.attention(max_rows=len(problem.q) + 1 + int(rng.integers(3)))
    shape, kv = problem.shape, problem.memory.kv
    rows = torch.tensor(
        sorted({row for seen in problem.seen for row in seen.rows}),
        dtype=torch.int64,
        device=problem.q.device,
    )
    expected = once(problem.expected)
    of_run = {
        "q": problem.q,
        "kv": kv,
        "out": problem.out,
        "lse": problem.lse,
        "sm_scale": shape.sm_scale,
        "logits_soft_cap": shape.logits_soft_cap,
    }
    of_run["after_append"] = False

    def function(**given: Any) -> torch.Tensor:
        plan_or_none(attention, make(**{name: given[name] for name in arguments}), problem.q, kv)
        return attention.run(**{name: given[name] for name in of_run})

    def check(given: Arguments, result: torch.Tensor) -> None:
        o_ref, lse_ref = expected()
        check_result(shape, given, result, rows, o_ref[rows], lse_ref[rows])

    def prepare() -> None:
        problem.out.fill_(torch.nan)
        problem.lse.fill_(torch.nan)

    of_kinds = (
        kinds
        | run_kinds(attention, problem.q)
        | {"kv": ChoiceArgument("Attention.run", wrong=((kv.k, kv.v),))}
    )
    return Call(
        name,
        function,
        arguments | of_run,
        of_kinds,
        check,
        prepare=prepare,
        reported=attention.raise_for_errors,
    )


def trees(rng: numpy.random.Generator, device: torch.device) -> Iterator[Call]:
    while True:
        shape = small_shape(rng, device)
        parents = compositions.random_forest(rng, int(rng.integers(0, 4)))[:8]
        memory = compositions.make_memory(
            rng, shape, device, [compositions.skewed(rng, 40, zero=0.06) for _ in parents]
        )
        node_of_row = compositions.random_nodes(rng, parents)[: int(rng.integers(1, 30))]
        table = memory.table(rng, list(range(len(parents))))
        composition = Composition.tree(parents, table, node_of_row)
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        seen = []
        for node in sorted(set(node_of_row) - {-1}):
            rows = [row for row, own in enumerate(node_of_row) if own == node]
            seen.append(
                compositions.Seen(
                    rows, torch.cat([memory.slots[n] for n in compositions.path_to(parents, node)]), nothing
                )
            )
        problem = compositions.make_problem(rng, shape, memory, composition, seen, len(node_of_row))
        at, row = int(rng.integers(len(parents))), int(rng.integers(len(node_of_row)))
        wrong_parents = (*(_at(parents, at, value) for value in (at, -2, 2**63, 0.5)), parents[:-1])
        wrong_nodes = tuple(_at(node_of_row, row, value) for value in (len(parents), -2, None))
        kinds: Kinds = {
            "parents": ChoiceArgument("Composition.tree", wrong=wrong_parents, types=NO_SEQUENCE),
            "table": ChoiceArgument("Composition.tree"),
            "node_of_row": ChoiceArgument("Composition.tree", wrong=wrong_nodes, types=NO_SEQUENCE),
        }
        arguments = {"parents": parents, "table": table, "node_of_row": node_of_row}
        call = level_call(rng, problem, "Composition.tree", Composition.tree, arguments, kinds)
        yield from around(rng, call)


def _at(values: list[int], at: int, value: object) -> list[object]:
    return [*values[:at], value, *values[at + 1 :]]


def cascades(rng: numpy.random.Generator, device: torch.device) -> Iterator[Call]:
    """cascade, from its qo_indptrs and tables, and from separate levels."""
    while True:
        shape = small_shape(rng, device)
        num_levels = int(rng.choice([1, 2, 2, 3]))
        problem = compositions.cascade_problem(rng, shape, device, num_levels)
        levels = problem.composition.levels
        if rng.random() < 0.5:
            yield from around(rng, cascade_call(rng, problem, levels))
        else:
            wrong = (
                (),
                [],
                None,
                7,
                "levels",
                [None],
                _at(list(levels), 0, levels[0].table),
                list(levels) * 9,
            )
            kinds: Kinds = {"levels": ChoiceArgument("Composition", wrong=wrong)}
            yield from around(
                rng, level_call(rng, problem, "Composition", Composition, {"levels": levels}, kinds)
            )


def cascade_call(rng: numpy.random.Generator, problem: compositions.Problem, levels: Any) -> Call:
    count = len(levels)
    arguments: Arguments = {f"qo_indptr_{i}": level.qo_indptr for i, level in enumerate(levels)}
    kinds: Kinds = {
        name: TensorArgument("Composition.cascade", ("qo_indptr",), dtypes=INDEX, exact=(0,))
        for name in arguments
    }
    qo_indptrs, tables = list(arguments.values()), [level.table for level in levels]
    arguments |= {"tables": tables, "causal": levels[-1].causal, "window_left": -1}
    wrong_tables = (
        tables[:-1],
        [*tables, tables[0]],
        _at(tables, 0, None),
        _at(tables, 0, qo_indptrs[0]),
        "tables",
        [],
    )
    kinds |= {
        "tables": ChoiceArgument("Composition.cascade", ("tables", "table", "levels"), wrong=wrong_tables),
        "causal": ChoiceArgument("Composition.cascade", wrong=(1, 0), optional=True),
        "window_left": IntArgument("Composition.cascade", low=-1, high=-1 if count > 1 else 2**31 - 1),
    }

    def make(**given: Any) -> Composition:
        indptrs = [given[f"qo_indptr_{i}"] for i in range(count)]
        return Composition.cascade(
            indptrs, given["tables"], causal=given["causal"], window_left=given["window_left"]
        )

    return level_call(rng, problem, "Composition.cascade", make, arguments, kinds)


# ---- The constructor, and objects that plan and run refuse as a whole ----


def constructors(rng: numpy.random.Generator, device: torch.device) -> Iterator[Call]:
    while True:
        cache = {} if device.type == "cuda" else cache_options(rng)
        heads = heads_of_cache(rng, device, cache["kv_dtype"]) if cache else heads_of(rng, device)
        kv_heads, options = heads["num_kv_heads"], object_options(rng, device)
        arguments: Arguments = {
            "num_qo_heads": kv_heads * heads["group_size"],
            "num_kv_heads": kv_heads,
            "head_dim": heads["head_dim"],
            "head_dim_v": width_of_v(rng, device, heads["head_dim"], cache),
            "dtype": heads["dtype"],
            "device": device,
            "num_ctas": heads["num_ctas"],
            "float8_out": device.type == "cpu" and bool(rng.random() < 0.3),
            **cache,
            **options,
        }
        yield from around(rng, constructor_call(arguments, device))
        case = case_tensors.build(small_spec(rng, device, **heads_of(rng, device)), device)
        k, v = case.kv.k, case.kv.v
        others = [KVCache(k[..., :-1], v[..., :-1]), KVCache(torch.cat([k, k], 1), torch.cat([v, v], 1))]
        if k.dtype != torch.float32:
            others.append(KVCache(k.float(), v.float()))
        yield from around(rng, plan_call(rng, case.attention(), step_of_case(case), others))


def cache_options(rng: numpy.random.Generator) -> dict[str, Any]:
    """Arguments of Attention about the cache."""
    kv_dtypes = (None, *DTYPES, *OWN_SCALES)
    kv_dtype = kv_dtypes[rng.integers(len(kv_dtypes))]
    token_scales: bool | None = [None, False][rng.integers(2)]
    if kv_dtype in OWN_SCALES and (kv_dtype not in DTYPES or rng.random() < 0.5):
        token_scales = [None, True][rng.integers(2)] if isinstance(kv_dtype, str) else True
    return {"kv_dtype": kv_dtype, "token_scales": token_scales, "rotation": bool(rng.random() < 0.3)}


def width_of_v(
    rng: numpy.random.Generator, device: torch.device, head_dim: int, cache: dict[str, Any]
) -> int | None:
    """A valid head_dim_v. cache: cache_options()."""
    widths = [None, head_dim]
    if device.type == "cpu" and not cache["rotation"]:
        widths.append(64 if isinstance(cache["kv_dtype"], str) else 72)
    return None if device.type == "cuda" else widths[rng.integers(len(widths))]


def constructor_call(arguments: Arguments, device: torch.device) -> Call:
    def values(_: numpy.random.Generator) -> list[Wrong]:
        """Arguments that are wrong only together with the others."""
        rotation, of_tokens = arguments.get("rotation", False), has_token_scales(arguments)
        found = []
        if rotation:
            rope = builtin.rope(builtin.rope_frequencies(16))
            found.append(Wrong("variant", "transforms rows", rope, ("variant",)))
        if rotation or of_tokens or arguments.get("kv_dtype") != torch.float8_e4m3fn:
            found.append(Wrong("q_dtype", "of 8 bits", torch.float8_e4m3fn, ("q_dtype",)))
        if arguments["head_dim_v"] not in (None, arguments["head_dim"]):
            found.append(Wrong("rotation", "heads of two widths", True, ("head_dim_v",)))
        return found

    return Call(
        "Attention",
        Attention,
        arguments,
        constructor_kinds(arguments, device),
        check_constructed,
        public=True,
        values=values,
    )


def has_token_scales(arguments: Arguments) -> bool:
    given = arguments.get("token_scales")
    return isinstance(arguments.get("kv_dtype"), str) if given is None else given


def cache_kinds(arguments: Arguments) -> Kinds:
    """The properties of cache_options()."""
    if "kv_dtype" not in arguments:
        return {}
    kv_dtype, given = arguments["kv_dtype"], arguments["token_scales"]
    needs_them, may_have_them = kv_dtype not in (None, *DTYPES), kv_dtype in OWN_SCALES
    # int8 and no token_scales, or token_scales and e5m2: each may be blamed
    wrong_dtypes = ("int3", "int8", torch.int32, torch.float64, torch.bool, torch.uint8)
    wrong_dtypes += (torch.float8_e5m2, torch.bfloat16) if given else (torch.int8,)
    wrong_dtypes += ("int4", "nvfp4") if given is False else ()
    wrong_scales: tuple[object, ...] = (1, 0, "yes")
    wrong_scales += (False,) if needs_them else ()
    wrong_scales += () if may_have_them else (True,)
    both = ("kv_dtype", "token_scales")
    return {
        "kv_dtype": ChoiceArgument(
            "Attention", both, wrong=wrong_dtypes, types=(3.5, "x", [1], object(), {}), optional=not given
        ),
        "token_scales": ChoiceArgument(
            "Attention", both, wrong=wrong_scales, optional=kv_dtype != torch.int8
        ),
        "rotation": ChoiceArgument("Attention", wrong=(1, 0, "yes")),
    }


def constructor_kinds(arguments: Arguments, device: torch.device) -> Kinds:
    on_cuda = device.type == "cuda"
    kv_heads = arguments["num_kv_heads"]
    not_a_multiple = (arguments["num_qo_heads"] + 1,) if kv_heads > 1 else ()
    # rows of all levels do not fit an int32
    too_many_rows = ((2**31 - 1) // arguments["max_levels"] + 1,) if arguments["max_levels"] > 1 else ()
    wrong_dims = (9, 65, 255, *((264, 576) if on_cuda else ()))
    wrong_dims += (40, 72) if isinstance(arguments.get("kv_dtype"), str) else ()
    of_v: tuple[int, ...] = ()
    if arguments.get("rotation"):
        wrong_dims += (264, 320)
        of_v = (arguments["head_dim"] + 64,)
    return {
        "num_qo_heads": IntArgument(others=("max_rows",), low=1, high=2**31 - 1, wrong=not_a_multiple),
        "num_kv_heads": IntArgument(
            others=("num_qo_heads",), low=1, high=2**31 - 1, wrong=(arguments["num_qo_heads"] + 1,)
        ),
        "head_dim": IntArgument(others=("head_dim_v",), low=8, high=576, wrong=wrong_dims),
        "head_dim_v": IntArgument(low=8, high=576, wrong=wrong_dims + of_v, optional=True),
        "dtype": ChoiceArgument(
            wrong=(torch.float64, torch.int32, torch.bool, "float16", *((torch.float32,) if on_cuda else ()))
        ),
        "device": ChoiceArgument(wrong=("meta", "gpu", "cpu:x", "cuda:63", "mps")),
        "max_rows": IntArgument(
            others=("max_levels", "max_rows * max_levels"), low=1, high=2**31 - 1, wrong=too_many_rows
        ),
        "max_batch": IntArgument(low=1, high=8192 if on_cuda else 2**20),
        "max_levels": IntArgument(low=1, high=8),
        "num_ctas": IntArgument(low=1, high=4096, optional=True),
        "cascade": ChoiceArgument(wrong=(2, -1, "auto", "Always")),
        "batch_invariant": ChoiceArgument(wrong=(2, "yes")),
        "float8_out": ChoiceArgument(wrong=(2, "yes")),
        "kernel": ChoiceArgument(wrong=("gpu", "", "Hopper", 1), optional=True),
        **cache_kinds(arguments),
    }


def check_constructed(given: Arguments, attention: Attention) -> None:
    assert attention.workspace_bytes > 0
    assert attention.head_dim_v == (given["head_dim"] if given["head_dim_v"] is None else given["head_dim_v"])
    for name in (
        "num_qo_heads",
        "num_kv_heads",
        "head_dim",
        "dtype",
        "max_rows",
        "max_batch",
        "max_levels",
        "batch_invariant",
    ):
        assert getattr(attention, name) == given[name], name
    assert attention.kv_dtype == (given.get("kv_dtype") or given["dtype"])


def plan_call(rng: numpy.random.Generator, attention: Attention, step: Step, others: list[KVCache]) -> Call:
    """plan and run with whole objects: a composition, a cache. others: caches to refuse."""
    q, kv, view, shape = step.q, step.kv, step.view, step.shape
    crowd, deep = (
        empty_requests(attention.max_batch + 1, q.device),
        Composition((view,) * (attention.max_levels + 1)) if attention.max_levels < 8 else None,
    )

    def function(composition: Any, kv: Any) -> torch.Tensor:
        plan_or_none(attention, composition, q, step.kv)
        options = {"sm_scale": shape.sm_scale, "logits_soft_cap": shape.logits_soft_cap}
        return attention.run(q, kv, out=step.out, lse=step.lse, **options)

    def check(given: Arguments, result: torch.Tensor) -> None:
        filled = {"q": q, "out": step.out, "lse": step.lse}
        rows = torch.arange(int(view.qo_indptr[-1]), device=q.device)
        check_result(shape, filled, result, rows, *step.expected(), step.tolerances)

    def prepare() -> None:
        step.out.fill_(torch.nan)
        step.lse.fill_(torch.nan)

    kinds: Kinds = {
        "composition": ChoiceArgument(
            "Attention.plan",
            ("composition", "levels", "batch"),
            wrong=(view.table, [view], (view,), deep, crowd),
        ),
        "kv": ChoiceArgument(
            "Attention.run",
            ("kv", "kv.k", "kv.k_scale", "kv.v_scale"),
            wrong=((kv.k, kv.v), kv.k, *others),
        ),
    }
    as_levels = view.batch_size > 0 and rng.random() < 0.5
    arguments: Arguments = {"composition": Composition((view,)) if as_levels else view, "kv": kv}
    return Call("Attention.plan", function, arguments, kinds, check, prepare=prepare)


def empty_requests(batch: int, device: torch.device) -> BSRView:
    indptr = torch.zeros(batch + 1, dtype=torch.int32, device=device)
    return BSRView(indptr, PageTable.ragged(indptr))
