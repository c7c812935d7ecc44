"""Eager calls and calls under torch.compile, argument by argument: the same results, the same tensors
written, the same refusals.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backend import (
    Attention,
    BSRView,
    KVCache,
    PageTable,
    Rotary,
    Samples,
    Variant,
    append_kv,
    append_mla_kv,
    append_qkv,
    sample,
    sampling_workspace,
)
from attn_backend.kernels.selection import SelectedTokens, selected_slots
from attn_backend.validation import describe

HEADS, KV_HEADS, DIM, PAGE, PAGES, ROWS, VOCAB = 4, 2, 64, 4, 6, 3, 40
E4M3 = torch.float8_e4m3fn
# Candidate values for a float parameter. Most parameters refuse some of them.
NUMBERS = (0.5, 2, True, 0.0, -1.0, math.nan, 10**400, "x", None)
INTS = (3, 0, -1, True, 2.0, 2**63, "x")
# Arguments that only compiled functions refuse, with the reason.
REFUSED_IN_GRAPHS = {
    "selected": "call selected_slots before",
    "seed": "a graph would repeat its draws",
    "generator": "a graph would repeat its draws",
}


SLOPED = Variant.from_source(
    """\
float logits(float logit, const ScoreRow& row, int32_t kv_position) const {
  return logit + slopes(row.qo_head) * factor * static_cast<float>(kv_position - row.position + shift);
}
""",
    {"slopes": torch.float32, "factor": float, "shift": int},
    name="sloped",
)


@dataclass
class Case:
    """A function, valid arguments, and more values of each argument."""

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    values: dict[str, list[Any]]


def randn(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(device)


_turns = itertools.count()


def bad_tensors(tensor: Tensor) -> list[Any]:
    """Values that differ from `tensor`: no tensor, another dtype, shape or stride, a gradient.

    (torch resolves pending signs before operators.) A compilation takes 0.2 s. So without a GPU each call
    returns two of the six, and each of the six meets a third of the arguments.
    """
    needs_gradient = (
        tensor.detach().clone().requires_grad_() if tensor.dtype.is_floating_point else tensor[:0]
    )
    strided = torch.stack((tensor, tensor), -1)[..., 0]
    other = torch.float64 if tensor.dtype != torch.float64 else torch.float32
    values = ["x", None, tensor.to(other), tensor[..., :-1], strided, needs_gradient]
    return values if torch.cuda.is_available() else values[next(_turns) % 3 :: 3]


def planned(device: torch.device, **options: Any) -> Attention:
    made = Attention(
        HEADS, KV_HEADS, options.pop("head_dim", DIM), device=device, max_rows=8, max_batch=2, **options
    )
    table = PageTable.block_table(
        torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=device),
        torch.tensor([3, 7], device=device),
        PAGE,
    )
    made.plan(BSRView(torch.tensor([0, 1, ROWS], dtype=torch.int32, device=device), table))
    return made


def cache_of(device: torch.device, dtype: torch.dtype = torch.bfloat16, **scales: Any) -> KVCache:
    return KVCache.unchecked(
        *(randn(PAGES, PAGE, KV_HEADS, DIM, dtype=dtype, device=device) for _ in range(2)), **scales
    )


def scaled(device: torch.device) -> list[KVCache]:
    of_heads = torch.tensor([0.5, 2.0], device=device)
    return [
        cache_of(device, E4M3, k_scale=k, v_scale=v)
        for k, v in ((None, None), (1.0, 1.0), (0.5, None), (None, 2), (of_heads, 0.25), (of_heads, of_heads))
    ]


def runs(device: torch.device) -> list[Case]:
    q, kv = randn(ROWS, HEADS, DIM, dtype=torch.bfloat16, device=device), cache_of(device)
    out, lse = torch.zeros_like(q), torch.zeros(ROWS, HEADS, device=device)
    plain = planned(device)
    padded = torch.cat((q, q))
    plain_run = Case(
        "run",
        plain.run,
        {"q": q, "kv": kv, "out": out},
        {
            "q": [*bad_tensors(q), padded, q[:2]],
            "kv": [
                kv.k,
                None,
                cache_of(device, torch.float16),
                KVCache.unchecked(kv.k[:, :2], kv.v[:, :2]),
                cache_of(device, k_scale=2.0),
                *scaled(device),
            ],
            "q_rope": [None, q[..., :8], "x", 3],
            "out": [None, out, padded, *bad_tensors(out)],
            "lse": [None, lse, *bad_tensors(lse)],
            "return_lse": [False, True, 1, 0],
            "sm_scale": [None, *NUMBERS],
            "logits_soft_cap": [*NUMBERS],
            "after_append": [False, True, 1, 0, 1.0, "x", None],
            "variant_args": [None, {}, {"slope": 1.0}, {"slope": q}, [1], "x"],
            "sinks": [None, lse[0], "x"],
            "q_scale": [None, 0.5, torch.tensor(0.5, device=device)],
            "out_scale": [None, 0.5, torch.tensor(0.5, device=device)],
            "selected": [None, SelectedTokens(torch.zeros(ROWS, 2, dtype=torch.int32, device=device)), 3],
        },
    )
    with_sinks = planned(device, sinks=True)
    sinks = randn(HEADS, device=device)
    sinks_run = Case(
        "run with sinks",
        with_sinks.run,
        {"q": q, "kv": kv, "out": out},
        {"sinks": [None, sinks, *bad_tensors(sinks)]},
    )
    of_8_bits = planned(device, kv_dtype=E4M3, q_dtype=E4M3, float8_out=True)
    q8, out8 = q.to(E4M3), torch.zeros(ROWS, HEADS, DIM, dtype=E4M3, device=device)
    scales = [torch.tensor(scale, device=device) for scale in (0.5, [0.5], [0.5, 2.0], [[0.5]], [0.5] * 3)]
    scales_run = Case(
        "run of 8 bits",
        of_8_bits.run,
        {"q": q8, "kv": scaled(device)[0], "out": None},
        {
            "q": [q8, q8[..., :8], q],
            "kv": [*scaled(device), kv],
            "out": [None, out8, out],
            "q_scale": [*NUMBERS, *scales, scales[0].double()],
            "out_scale": [*NUMBERS, *scales, scales[0].double()],
        },
    )
    slopes = randn(HEADS, device=device)
    given = {"slopes": slopes, "factor": 0.5, "shift": 3}
    of_variant = [
        given,
        dict(reversed(given.items())),
        None,
        {},
        {**given, "more": 1},
        {"slopes": slopes},
        [1],
        {**given, "a b": 1.0},
    ]
    of_variant += [{**given, "factor": factor} for factor in (*NUMBERS, slopes)] + [
        {**given, "shift": shift} for shift in (*INTS, slopes)
    ]
    of_variant += [{**given, "slopes": value} for value in (1.0, *bad_tensors(slopes))]
    variant_run = Case(
        "run of a variant",
        planned(device, variant=SLOPED).run,
        {"q": q, "kv": kv, "out": out, "variant_args": given},
        {"variant_args": of_variant},
    )
    latents = randn(PAGES, PAGE, 576, dtype=torch.bfloat16, device=device)
    of_latents = Attention(HEADS, 1, 576, head_dim_v=512, device=device, max_rows=8, max_batch=2)
    of_latents.plan(plain._levels[0])
    wide = randn(ROWS, HEADS, 576, dtype=torch.bfloat16, device=device)
    latents_run = Case(
        "run of latents",
        of_latents.run,
        {"q": wide[..., :512], "kv": KVCache.from_latent(latents), "q_rope": wide[..., 512:]},
        {
            "q": [wide[..., :512], wide],
            "q_rope": [wide[..., 512:], *bad_tensors(wide[..., 512:].contiguous())],
            "out": [None],
            "return_lse": [True],
        },
    )
    return [plain_run, sinks_run, scales_run, variant_run, latents_run]


def appends(device: torch.device) -> list[Case]:
    k, v = (randn(ROWS, KV_HEADS, DIM, dtype=torch.bfloat16, device=device) for _ in range(2))
    kv, slots = cache_of(device), torch.tensor([5, -1, 2], device=device)
    all_slots = [slots, slots.int(), slots[:2], torch.cat((slots, slots)), *bad_tensors(slots)]
    caches = [
        kv.k,
        None,
        3,
        cache_of(device, torch.float16),
        cache_of(device, torch.float32),
        cache_of(device, k_scale=2.0),
        *scaled(device),
    ]
    plain = Case(
        "append_kv",
        append_kv,
        {"k": k, "v": v, "kv": kv, "slots": slots},
        {
            "k": [k, *bad_tensors(k)],
            "v": bad_tensors(v),
            "kv": caches,
            "slots": all_slots,
            "rotation": [True, False, 1, None, "x"],
        },
    )
    latent, rope = (randn(ROWS, width, dtype=torch.bfloat16, device=device) for width in (512, 64))
    latents = [
        KVCache.from_latent(randn(PAGES, PAGE, 576, device=device).to(dtype))
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ]
    latents += [
        KVCache.from_latent(randn(PAGES, PAGE, 576, device=device).to(E4M3), scale=scale)
        for scale in (None, 1.0, 0.5, torch.tensor(0.5, device=device))
    ]
    bytes_of_rows = torch.zeros(PAGES, PAGE, 656, dtype=torch.uint8, device=device)
    apart = KVCache.unchecked(latents[0].k, latents[0].v.clone())
    mla = Case(
        "append_mla_kv",
        append_mla_kv,
        {"latent": latent, "rope": rope, "kv": latents[0], "slots": slots},
        {
            "latent": [latent, *bad_tensors(latent)],
            "rope": bad_tensors(rope),
            "kv": [*latents, KVCache.from_latent(bytes_of_rows), apart, kv, 3, None],
            "slots": all_slots,
        },
    )
    q, positions = (
        randn(ROWS, HEADS, DIM, dtype=torch.bfloat16, device=device),
        torch.tensor([3, 0, 9], device=device),
    )
    norm, frequencies = randn(DIM, dtype=torch.bfloat16, device=device), randn(DIM // 2, device=device).abs()
    rotary = Rotary(frequencies)
    qkv = Case(
        "append_qkv",
        append_qkv,
        {"q": q, "k": k, "v": v, "kv": kv, "slots": slots, "rotary": rotary, "positions": positions},
        {
            "q": [q, *bad_tensors(q)],
            "k": bad_tensors(k),
            "v": bad_tensors(v),
            "kv": caches,
            "slots": all_slots,
            "rotary": [
                None,
                rotary,
                Rotary(frequencies, True),
                Rotary(randn(8, DIM, device=device)),
                Rotary(frequencies.double()),
                frequencies,
                3,
            ],
            "positions": [positions, positions.int(), *bad_tensors(positions)],
            "q_norm": [norm, *bad_tensors(norm)],
            "k_norm": [norm, *bad_tensors(norm)],
            "norm_eps": [*NUMBERS],
            "norm_offset": [*NUMBERS],
            "out": [torch.zeros_like(q), *bad_tensors(q)],
            "rotation": [True, False, 1, None, "x"],
        },
    )
    without_rotary = Case(
        "append_qkv without rotary",
        append_qkv,
        {"q": q, "k": k, "v": v, "kv": kv, "slots": slots},
        {"positions": [None, positions], "q_norm": [norm]},
    )
    return [plain, mla, qkv, without_rotary]


def selections(device: torch.device) -> list[Case]:
    indices = torch.tensor([[0, 5, -1], [2, 1, 3], [7, 0, -1]], dtype=torch.int32, device=device)
    table, requests = (
        torch.tensor([[4, 1], [0, 3]], dtype=torch.int32, device=device),
        torch.tensor([0, 1, 1], device=device),
    )
    arguments = {"indices": indices, "block_table": table, "requests": requests, "page_size": PAGE}
    values = {
        "indices": [indices, *bad_tensors(indices)],
        "block_table": bad_tensors(table),
        "requests": [requests.int(), *bad_tensors(requests)],
        "page_size": [*INTS],
        "page_stride": [None, 5, *INTS],
        "kv_lens": [torch.tensor([3, 2, 9], device=device), *bad_tensors(requests)],
        "out": [torch.zeros_like(indices), *bad_tensors(indices)],
    }
    in_place = Case(
        "selected_slots in place", selected_slots, arguments | {"out": indices}, {"page_size": [PAGE]}
    )
    return [
        Case("selected_slots", selected_slots, arguments, values),
        Case("slots of slots", selected_slots, {"indices": indices}, {"page_size": [1]}),
        in_place,
    ]


def samplings(device: torch.device) -> list[Case]:
    logits = randn(ROWS, VOCAB, device=device)
    floats, ints = torch.tensor([0.5, 0.9, 0.0], device=device), torch.tensor([3, 0, 50], device=device)
    mask, out = (
        torch.tensor([[-5, 255]] * ROWS, dtype=torch.int32, device=device),
        torch.zeros(ROWS, dtype=torch.int32, device=device),
    )
    of_floats, of_ints = (
        [*NUMBERS, floats, *bad_tensors(floats)],
        [*INTS, None, ints, ints.int(), *bad_tensors(ints)],
    )
    values = {
        "logits": [logits, logits.bfloat16(), *bad_tensors(logits)],
        "temperature": of_floats,
        "top_k": of_ints,
        "top_p": of_floats,
        "min_p": of_floats,
        "seed": of_ints,
        "position": of_ints,
        "generator": [None, torch.Generator(device), 3],
        "token_mask": [mask, *bad_tensors(mask)],
        "filter_order": ["joint", "top_k_first", "x", 3, None],
        "return_logprobs": [False, True, 1, "x", None],
        "num_top_logprobs": [0, *INTS, None, 129],
        "logprobs_of": ["tempered", "logits", "x", 3, None],
        "out": [out, out.long(), *bad_tensors(out)],
        "workspace": [sampling_workspace(device), *bad_tensors(sampling_workspace(device))],
        "row_ctas": [*INTS, None],
    }
    without_seed = Case("sample without a seed", sample, {"logits": logits}, {"position": [3]})
    return [
        Case("sample", sample, {"logits": logits, "seed": 7, "return_logprobs": True}, values),
        without_seed,
    ]


CASES: dict[str, Callable[[torch.device], list[Case]]] = {
    "run": runs,
    "append": appends,
    "selected_slots": selections,
    "sample": samplings,
}


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.detach()]
    if isinstance(value, dict | tuple | list):
        return [
            tensor
            for part in (value.values() if isinstance(value, dict) else value)
            for tensor in tensors_in(part)
        ]
    return tensors_in(vars(value)) if isinstance(value, KVCache | Samples | Rotary) else []


def outcome(call: Callable[..., Any], arguments: dict[str, Any]) -> list[Any] | Exception:
    """The bytes that a call returns, and the bytes of its tensors afterwards, or its error."""
    own = copy.deepcopy(
        {name: value for name, value in arguments.items() if not isinstance(value, torch.Generator)}
    )
    given = {name: own.get(name, value) for name, value in arguments.items()}
    try:
        result = call(given)
    except Exception as error:
        return error
    return [
        (tensor.dtype, tensor.shape, tensor.resolve_neg().contiguous().flatten().view(torch.uint8).tolist())
        for tensor in tensors_in((result, given))
    ]


def difference(case: Case, name: str, value: Any) -> tuple[str, bool]:
    """How a compiled call differs from an eager one, or ""; and whether the eager call succeeds."""
    arguments = case.arguments | {name: value}
    torch._dynamo.reset()
    eager = outcome(lambda given: case.function(**given), arguments)
    compiled = outcome(
        torch.compile(lambda given: case.function(**given), fullgraph=True, backend="aot_eager"), arguments
    )
    if (
        isinstance(compiled, Exception)
        and f"{name} is " in str(compiled)
        and REFUSED_IN_GRAPHS.get(name, "\0") in str(compiled)
    ):
        return "", False
    if not isinstance(eager, Exception) or not isinstance(compiled, Exception):
        return (
            "" if eager == compiled else f"eager: {str(eager)[:300]}, compiled: {str(compiled)[:600]}",
            not isinstance(eager, Exception),
        )
    named = str(eager).split(", must ")[0].replace("\\'", "'")
    is_same = (type(eager), str(eager)) == (type(compiled), str(compiled)) or (
        isinstance(eager, ValueError) and named in str(compiled).replace("\\'", "'")
    )
    return "" if is_same else f"eager: {eager!r}, compiled: {str(compiled)[:600]}", False


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Disables torch.compile's logs, which pytest would capture, and its timing of guards, which flushes
    caches: they take longer than the test.
    """
    monkeypatch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *_: 0.0)
    # the values of a function do not depend on the tests before it
    monkeypatch.setitem(globals(), "_turns", itertools.count())
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("function", CASES)
def test_a_compiled_call_does_what_an_eager_one_does(function: str, device: torch.device) -> None:
    differences, covered, taken = [], {}, 0
    for case in CASES[function](device):
        covered.setdefault(
            inspect.unwrap(case.function).__qualname__, set(inspect.signature(case.function).parameters)
        ).difference_update(case.values)
        for name, values in case.values.items():
            for value in values:
                found, is_taken = difference(case, name, value)
                taken += is_taken
                differences += [f"{case.name}, {name} = {describe(value)}: {found}"] if found else []
    assert not any(covered.values()), f"arguments without values to compare: {covered}"
    assert taken > 10, "not everything is refused"
    assert not differences, f"{len(differences)} differ:\n" + "\n".join(differences)
