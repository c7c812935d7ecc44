"""Scenarios of sampling: every function, with parameters of all kinds, including rows that cannot be
sampled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import attention_kernels
import numpy
import torch
from sampling_oracle import keeps, probabilities, race_values
from torch import Tensor

import attn_backend
from attn_backend import Samples, SpeculativeSamples

from .attention_calls import seed_of
from .call import Call, ChoiceArgument, FloatArgument, IntArgument, TensorArgument, Wrong
from .mutations import around
from .steps import INDEX, Arguments, Kinds

INF = math.inf
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# the precision of token weights: a threshold may fall on either side of a closer token
RELATIVE = 2e-6


def sampling(rng: numpy.random.Generator, device: torch.device) -> Iterator[Call]:
    makers = (sample_call, sample_call, sample_call, probs_call, rows_call, rows_call, speculative_call)
    while True:
        yield from around(rng, makers[rng.integers(len(makers))](rng, device))


def random_logits(rng: numpy.random.Generator, batch: int, vocab: int) -> Tensor:
    logits = torch.from_numpy(rng.standard_normal((batch, vocab)) * rng.choice([0.1, 2.0, 6.0])).float()
    if rng.random() < 0.3:  # ties
        logits = logits.round()
    if rng.random() < 0.3:
        logits = logits.masked_fill(torch.from_numpy(rng.random((batch, vocab)) < 0.2), -INF)
    if batch and rng.random() < 0.15:  # perhaps a row that cannot be sampled
        logits[rng.integers(batch), rng.integers(vocab)] = float(rng.choice([math.nan, INF, -INF]))
    return logits


def with_row_stride(rng: numpy.random.Generator, values: Tensor, device: torch.device) -> Tensor:
    """On the device, perhaps as a slice of wider rows."""
    if rng.random() < 0.7:
        return values.to(device)
    room = torch.full(
        (values.shape[0], values.shape[1] + int(rng.integers(1, 9))),
        math.nan,
        dtype=values.dtype,
        device=device,
    )
    room[:, : values.shape[1]] = values.to(device)
    return room[:, : values.shape[1]]


def shape_of(rng: numpy.random.Generator) -> tuple[int, int]:
    """batch, vocab"""
    batch = int(rng.choice([0, 1, 2, 3, 5], p=[0.03, 0.27, 0.3, 0.3, 0.1]))
    return batch, int(
        rng.choice(
            [1, 2, 31, 33, 60, 64, 513, 1003, 9000], p=[0.05, 0.05, 0.2, 0.2, 0.2, 0.1, 0.09, 0.08, 0.03]
        )
    )


def random_row_ctas(rng: numpy.random.Generator, device: torch.device) -> int:
    has_clusters = device.type == "cpu" or attention_kernels.has_clusters()
    return int(rng.choice([0, 0, 1, 2, 4, 8, 16])) if has_clusters else int(rng.integers(2))


class Parameters:
    """Parameters of a batch: some are one number, some a tensor. `of(row)`: their values for one row."""

    def __init__(self, rng: numpy.random.Generator, batch: int, device: torch.device) -> None:
        self.rng, self.batch, self.device = rng, batch, device
        self.arguments: Arguments = {}
        self.kinds: Kinds = {}
        self.values: dict[str, list[Any]] = {}

    def add_float(self, name: str, choices: list[float | None], wrong: tuple[float, ...] = ()) -> None:
        """Values are float32, as kernels read them."""
        rounded = [None if value is None else float(numpy.float32(value)) for value in choices]
        self._add(
            name,
            rounded,
            torch.float32,
            (torch.float32,),
            FloatArgument(optional=None in choices, wrong=wrong),
        )

    def add_int(self, name: str, choices: list[int | None]) -> None:
        small = all(value is None or -(2**31) <= value < 2**31 for value in choices)
        dtype = torch.int32 if small and self.rng.random() < 0.5 else torch.int64
        self._add(name, choices, dtype, INDEX, IntArgument(optional=None in choices))

    def _add(
        self,
        name: str,
        choices: list[Any],
        dtype: torch.dtype,
        dtypes: tuple[torch.dtype, ...],
        kind: FloatArgument | IntArgument,
    ) -> None:
        numbers = [value for value in choices if value is not None]
        if self.rng.random() < 0.5:
            value = choices[self.rng.integers(len(choices))]
            self.arguments[name], self.kinds[name], self.values[name] = value, kind, [value] * self.batch
            return
        values = [numbers[self.rng.integers(len(numbers))] for _ in range(self.batch)]
        self.arguments[name] = torch.tensor(values, dtype=dtype, device=self.device)
        self.kinds[name] = TensorArgument(dtypes=dtypes, exact=(0,), number=True, optional=kind.optional)
        self.values[name] = values

    def add_seeds(self) -> None:
        self.add_int("seed", [seed_of(self.rng), 0, -1, -(2**63), 2**63 - 1, 2**32 + 5])
        self.add_int(
            "position", [None, 0, 1, 77, 2**31 - 1] if self.rng.random() < 0.5 else [None, 2**40, 2**62, 5]
        )
        self.values["position"] = [value or 0 for value in self.values["position"]]
        # without a position too, draws come from torch's generator
        self.kinds["seed"] = replace(self.kinds["seed"], optional=True)

    def add_filters(self, vocab: int) -> None:
        self.add_int("top_k", [None, -1, 0, 1, 2, 7, 50, vocab // 2, vocab - 1, vocab, vocab + 7])
        self.add_float("top_p", [None, -1.0, 0.0, 1e-7, 0.5, 0.9, 0.9999, 1.0, 2.0])
        self.add_float("min_p", [None, -1.0, 0.0, 1e-4, 0.1, 1.0, 2.0])

    def of(self, row: int, *names: str) -> dict[str, Any]:
        return {name: self.values[name][row] for name in names}


def shift(settings: dict[str, Any], factor: float) -> dict[str, Any]:
    """Settings that keep slightly more (factor above 0), or slightly less."""
    shifted = dict(settings)
    if shifted.get("top_p") is not None:
        shifted["top_p"] *= 1 + factor
    if shifted.get("min_p") is not None:
        shifted["min_p"] *= 1 - factor
    return shifted


def check_token(logits: Tensor, token: int, settings: dict[str, Any], seed: int, position: int) -> None:
    """One row [vocab], float64, that can be sampled: the token survives and wins the race among the
    survivors.
    """
    temperature = settings.get("temperature", 1.0)
    if temperature == 0:
        assert token == int((logits == logits.max()).nonzero()[0]), (
            f"token {token} is not the first of the most likely ones"
        )
        return
    more, less = keeps(logits, **shift(settings, RELATIVE)), keeps(logits, **shift(settings, -RELATIVE))
    # at a high temperature all tokens are about as likely as the most likely one
    if (settings.get("min_p") or 0.0) * (1 + RELATIVE) >= 1:
        less &= logits == logits.max()
    assert bool(more[token]), f"token {token} does not survive"
    if len(logits) > 64:
        return
    values = race_values(logits, seed, position, temperature)
    best = float(values.masked_fill(~less, -INF).max())
    assert float(values[token]) >= best - 1e-5 * max(1.0, abs(best)), f"token {token} does not win the race"


def mask_words(
    rng: numpy.random.Generator, batch: int, vocab: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """bool [batch, vocab], and int32 words, perhaps too many, with bits beyond the vocabulary."""
    words = (vocab + 31) // 32 + int(rng.integers(2))
    bits = torch.from_numpy(rng.random((batch, words * 32)) < rng.choice([0.1, 0.7, 1.0]))
    packed = (bits.view(batch, words, 32).long() << torch.arange(32)).sum(-1)
    return bits[:, :vocab], torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int().to(device)


def sample_call(rng: numpy.random.Generator, device: torch.device) -> Call:
    batch, vocab = shape_of(rng)
    logits = random_logits(rng, batch, vocab).to(FLOATS[rng.integers(3)])
    parameters = Parameters(rng, batch, device)
    parameters.add_float("temperature", [0.0, 0.01, 0.6, 1.0, 1.0, 2.0, 1e30, 1e-30], wrong=(-1.0, -INF))
    parameters.add_filters(vocab)
    parameters.add_seeds()
    mask, words = (
        mask_words(rng, batch, vocab, device)
        if rng.random() < 0.4
        else (torch.ones(batch, vocab, dtype=torch.bool), None)
    )
    out = (
        torch.full((batch,), -7, dtype=INDEX[rng.integers(2)], device=device) if rng.random() < 0.4 else None
    )
    joint, tempered = rng.random() < 0.4, rng.random() < 0.4
    count = int(rng.choice([0, 0, 1, 5, 20]))
    arguments: Arguments = {
        "logits": with_row_stride(rng, logits, device),
        **parameters.arguments,
        "token_mask": words,
        "filter_order": "joint" if joint else "top_k_first",
        "return_logprobs": bool(rng.random() < 0.4),
        "num_top_logprobs": count,
        "logprobs_of": "tempered" if tempered else "logits",
        "out": out,
        # its content does not matter
        "workspace": attn_backend.sampling_workspace(device).random_() if rng.random() < 0.3 else None,
        "row_ctas": random_row_ctas(rng, device),
    }
    needed = (vocab + 31) // 32
    narrow = None if words is None or needed < 2 else words[:, : needed - 1].contiguous()
    kinds: Kinds = {
        "logits": TensorArgument(dtypes=FLOATS, leads=True),
        **parameters.kinds,
        "token_mask": TensorArgument(dtypes=(torch.int32,), exact=(0,), optional=True),
        "filter_order": ChoiceArgument(wrong=("top_p_first", "", None)),
        "num_top_logprobs": IntArgument(low=0, high=128),
        "logprobs_of": ChoiceArgument(wrong=("probs", "", None)),
        "out": TensorArgument(dtypes=INDEX, exact=(0,), optional=True, written=True),
        "workspace": TensorArgument(dtypes=(torch.int64,), optional=True, written=True),
        "row_ctas": IntArgument(low=-(2**63) if device.type == "cpu" else 0),
    }
    settings = ("temperature", "top_k", "top_p", "min_p")

    def values(rng: numpy.random.Generator) -> list[Any]:
        short = torch.zeros(4095, dtype=torch.int64, device=device)
        odd = torch.zeros(4097, dtype=torch.int64, device=device)[1:]
        wrong = [
            Wrong("workspace", "too short", short, ("workspace",)),
            Wrong("workspace", "not aligned", odd, ("workspace",)),
        ]
        return wrong + (
            [Wrong("token_mask", "too narrow", narrow, ("token_mask",))] if narrow is not None else []
        )

    def check(given: Arguments, samples: Samples) -> None:
        assert given["out"] is None or samples.token_ids is given["out"]
        tokens, valid = samples.token_ids.tolist(), samples.valid.tolist()
        logprobs, top, top_ids = (
            None if t is None else t.detach().cpu()
            for t in (samples.logprobs, samples.top_logprobs, samples.top_token_ids)
        )
        for i in range(batch):
            allowed = mask[i]
            row = logits[i].double().masked_fill(~allowed, -INF)
            largest = float(row.max())
            assert valid[i] == (not math.isnan(largest) and -INF < largest < INF), f"valid[{i}] is {valid[i]}"
            if not valid[i]:
                first = int(allowed.nonzero()[0]) if allowed.any() else 0
                assert tokens[i] == first, f"token {tokens[i]} of a row that cannot be sampled, not {first}"
                assert logprobs is None or bool(logprobs[i].isnan())
                assert top is None or bool(top[i].isnan().all())
                continue
            of_row = parameters.of(i, *settings)
            order = {"filter_order": "joint"} if joint else {}
            check_token(row, tokens[i], of_row | order, *parameters.of(i, "seed", "position").values())
            divisor = of_row["temperature"] if tempered and of_row["temperature"] else 1.0
            expected = torch.log_softmax((row - largest) / divisor, -1)
            if logprobs is not None:
                close(logprobs[i], expected[tokens[i]], "logprobs")
            if top is not None and top_ids is not None:
                check_top(row, expected, top[i], top_ids[i])

    def prepare() -> None:
        if out is not None:
            out.fill_(-7)

    return Call(
        "sample", attn_backend.sample, arguments, kinds, check, prepare=prepare, public=True, values=values
    )


def check_top(row: Tensor, expected: Tensor, top: Tensor, ids: Tensor) -> None:
    """The most likely tokens; among equals, the lower id first. Token 0 with -inf replaces tokens that cannot
    be drawn."""
    order = row.sort(descending=True, stable=True).indices
    order = order[row[order] > -INF][: len(top)]
    assert ids.tolist() == [*order.tolist(), *[0] * (len(top) - len(order))], f"top_token_ids {ids.tolist()}"
    close(top[: len(order)], expected[order], "top_logprobs")
    assert bool((top[len(order) :] == -INF).all())


def close(value: Tensor, expected: Tensor, name: str, rtol: float = 1e-5, atol: float = 5e-6) -> None:
    value = value.double().cpu()
    same = torch.isclose(value, expected, rtol=rtol, atol=atol) | (value == expected)
    # float32 ends there
    beyond = (expected.abs() > 3.3e38) & (value.abs() > 3.3e38) & (value.sign() == expected.sign())
    assert bool((same | beyond).all()), f"{name} is off by {float((value - expected).abs().max()):.2e}"


def random_probs(rng: numpy.random.Generator, *shape: int) -> Tensor:
    probs = torch.softmax(torch.from_numpy(rng.standard_normal(shape) * 2), -1)
    probs = probs.masked_fill(torch.from_numpy(rng.random(shape) < 0.1), 0.0) * float(
        rng.choice([1.0, 1.0, 3.0])
    )
    return probs.float()


def probs_call(rng: numpy.random.Generator, device: torch.device) -> Call:
    batch, vocab = shape_of(rng)
    probs = random_probs(rng, batch, vocab)
    if batch and rng.random() < 0.2:
        probs[rng.integers(batch), rng.integers(vocab)] = float(rng.choice([math.nan, INF, -0.1, 1e-40]))
    parameters = Parameters(rng, batch, device)
    parameters.add_filters(vocab)
    parameters.add_seeds()
    joint = rng.random() < 0.4
    out = (
        torch.full((batch,), -7, dtype=INDEX[rng.integers(2)], device=device) if rng.random() < 0.4 else None
    )
    filter_order = "joint" if joint else "top_k_first"
    arguments: Arguments = {
        "probs": with_row_stride(rng, probs, device),
        **parameters.arguments,
        "filter_order": filter_order,
        "out": out,
    }
    kinds: Kinds = {
        "probs": TensorArgument(dtypes=(torch.float32,), leads=True),
        **parameters.kinds,
        "filter_order": ChoiceArgument(wrong=("top_p_first", None)),
        "out": TensorArgument(dtypes=INDEX, exact=(0,), optional=True, written=True),
    }

    def check(given: Arguments, samples: Samples) -> None:
        assert given["out"] is None or samples.token_ids is given["out"]
        for i, (token, valid) in enumerate(
            zip(samples.token_ids.tolist(), samples.valid.tolist(), strict=True)
        ):
            right = _is_distribution(probs[i])
            assert valid == right, f"valid[{i}] is {valid}"
            if not valid:
                assert token == 0, f"token {token} of a row that cannot be sampled"
                continue
            order = {"filter_order": "joint"} if joint else {}
            check_token(
                log_of(probs[i]),
                token,
                parameters.of(i, "top_k", "top_p", "min_p") | order,
                *parameters.of(i, "seed", "position").values(),
            )

    return Call("sample_from_probs", attn_backend.sample_from_probs, arguments, kinds, check, public=True)


def _is_distribution(probs: Tensor) -> bool:
    return bool(((probs >= 0) & (probs < INF)).all() and (probs >= 2.0**-126).any())


def log_of(probs: Tensor) -> Tensor:
    """Logits of probabilities; values below float32's normal range count as 0."""
    return torch.where(probs >= 2.0**-126, probs.double(), 0.0).log()


def rows_call(rng: numpy.random.Generator, device: torch.device) -> Call:
    """The functions that write one output row for each row."""
    name = str(rng.choice(["softmax", "top_k_mask_logits", "top_k_renorm_probs", "top_p_renorm_probs"]))
    batch, vocab = shape_of(rng)
    of_probs = name.endswith("probs")
    rows = (
        random_probs(rng, batch, vocab)
        if of_probs
        else random_logits(rng, batch, vocab).to(FLOATS[rng.integers(3)])
    )
    parameters = Parameters(rng, batch, device)
    if name == "softmax":
        parameters.add_float("temperature", [0.0, 0.3, 1.0, 4.0], wrong=(-1.0, -INF))
    elif "top_k" in name:
        parameters.add_int("top_k", [-1, 0, 1, 7, vocab // 2, vocab, vocab + 3])
    else:
        parameters.add_float("top_p", [-1.0, 0.0, 0.5, 0.95, 1.0, 2.0])
    (parameter,) = parameters.arguments
    first = "probs" if of_probs else "logits"

    def check(given: Arguments, result: Tensor) -> None:
        assert result.dtype == torch.float32
        assert result.shape == rows.shape
        for i, row in enumerate(result.detach().cpu().double()):
            value = parameters.values[parameter][i]
            _check_row(name, rows[i], row, value)

    kinds: Kinds = {first: TensorArgument(dtypes=FLOATS, leads=True), **parameters.kinds}
    return Call(
        name,
        getattr(attn_backend, name),
        {first: with_row_stride(rng, rows, device), **parameters.arguments},
        kinds,
        check,
        public=True,
    )


def _check_row(name: str, given: Tensor, row: Tensor, value: Any) -> None:
    x = log_of(given) if name.endswith("probs") else given.double()
    largest = float(x.max())
    if not -INF < largest < INF:  # cannot be sampled
        assert torch.equal(
            row.nan_to_num(nan=7e7),
            given.double().nan_to_num(nan=7e7) if name == "top_k_mask_logits" else torch.zeros_like(row),
        ), "a bad row"
        return
    if name == "softmax":
        best = (x == largest).double()
        close(
            row,
            best / best.sum() if value == 0 else torch.softmax((x - largest) / value, -1),
            name,
            rtol=2e-5,
            atol=1e-11,
        )
        return
    filters = {"top_p" if "top_p" in name else "top_k": value}
    kept, less = keeps(x, **shift(filters, RELATIVE)), keeps(x, **shift(filters, -RELATIVE))
    if not torch.equal(kept, less):
        return
    if name == "top_k_mask_logits":
        assert torch.equal(row, x.masked_fill(~kept, -INF)), "other logits are left"
    else:
        close(row, probabilities(x, kept), name, rtol=2e-5, atol=1e-37)


def speculative_call(rng: numpy.random.Generator, device: torch.device) -> Call:
    batch, vocab, drafts = int(rng.integers(0, 4)), int(rng.choice([2, 20, 40])), int(rng.integers(0, 4))
    draft, target = random_probs(rng, batch, drafts, vocab), random_probs(rng, batch, drafts + 1, vocab)
    if rng.random() < 0.4:  # all tokens that the draft can propose are accepted
        target[:, :drafts] = draft
    ids = torch.from_numpy(rng.integers(0, vocab, (batch, drafts)))
    if ids.numel() and rng.random() < 0.3:
        ids[rng.integers(batch), rng.integers(drafts)] = int(rng.choice([-1, vocab, 2**31 - 1]))
    parameters = Parameters(rng, batch, device)
    parameters.add_seeds()
    tensors = {
        "draft_probs": draft.to(device),
        "draft_token_ids": ids.to(device, INDEX[rng.integers(2)]),
        "target_probs": target.to(device),
    }
    arguments: Arguments = tensors | parameters.arguments
    probs = ("draft_probs", "target_probs", "draft_token_ids")
    kinds: Kinds = {
        "draft_probs": TensorArgument(others=probs, dtypes=(torch.float32,), exact=(0, 1, 2)),
        "draft_token_ids": TensorArgument(others=probs, dtypes=INDEX, exact=(0, 1)),
        "target_probs": TensorArgument(others=probs, dtypes=(torch.float32,), exact=(0, 1, 2)),
        **parameters.kinds,
    }

    def check(given: Arguments, samples: SpeculativeSamples) -> None:
        accepted, tokens, valid = (
            samples.num_accepted.tolist(),
            samples.token_ids.tolist(),
            samples.valid.tolist(),
        )
        for i in range(batch):
            n, own = accepted[i], ids[i].tolist()
            assert 0 <= n <= int(samples.num_passed[i]) <= drafts
            assert tokens[i][:n] == own[:n], "accepted tokens are not the draft's"
            assert tokens[i][n + 1 :] == [-1] * (drafts - n), "tokens after the last are not -1"
            for j, token in enumerate(own[: n + 1]):
                _check_acceptance(
                    float(draft[i, j, token]), float(target[i, j, token]), j < n
                ) if 0 <= token < vocab else _check_acceptance(1.0, 0.0, j < n)
            rest = target[i, n].double()
            if n < drafts:
                rest = (target[i, n] - draft[i, n]).clamp_min(0).double()
                rest = target[i, n].double() if not bool((rest >= 2.0**-126).any()) else rest
            can = bool((rest >= 2.0**-126).any())
            assert valid[i] == can, f"valid[{i}] is {valid[i]}"
            if can:
                seed, position = parameters.of(i, "seed", "position").values()
                check_token(
                    log_of(rest.float()), tokens[i][n], {}, seed, (position + n + 2**63) % 2**64 - 2**63
                )
            else:
                assert tokens[i][n] == 0

    return Call(
        "chain_speculative_sampling",
        attn_backend.chain_speculative_sampling,
        arguments,
        kinds,
        check,
        public=True,
    )


def _check_acceptance(draft: float, target: float, accepted: bool) -> None:
    """u * draft < target with u in [0, 1): checks the certain cases."""
    assert not accepted or target > 0, "a token that the target does not give was accepted"
    assert accepted or not (target >= draft and target > 0), (
        "a token that the target gives more often than the draft was refused"
    )
