"""Random problems of sampling: rows of every shape, settings of every kind."""

from __future__ import annotations

import random
from typing import Any

import torch
from sampling_oracle import bits


def random_settings(choose: random.Random, batch: int, vocab: int, device: torch.device) -> dict[str, Any]:
    """A value for each row of every parameter, including edge values."""

    def each(*values: float) -> torch.Tensor:
        return torch.tensor([choose.choice(values) for _ in range(batch)], device=device)

    return {
        "temperature": each(0.0, 0.01, 0.6, 1.0, 1.0, 2.0, 1e30, 1e-30).float(),
        "top_k": each(-1, 0, 0, 1, 2, 50, 513, vocab // 2, vocab - 1, vocab, vocab + 7).int(),
        "top_p": each(-1.0, 0.0, 1e-7, 0.5, 0.9, 0.9999, 1.0, 1.0, 2.0).float(),
        "min_p": each(-1.0, 0.0, 0.0, 1e-4, 0.1, 1.0, 2.0).float(),
        "filter_order": choose.choice(["top_k_first", "joint"]),
    }


def random_logits(choose: random.Random, batch: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """Rows of every shape: flat, peaked, all equal, few values, ascending, mostly -inf, bad."""
    normal = torch.randn(batch, vocab, generator=generator)
    kind = choose.randrange(8)
    if kind == 4:
        return torch.linspace(-10, 10, vocab).repeat(batch, 1)
    if kind == 5:
        return normal.masked_fill(torch.rand(batch, vocab, generator=generator) < 0.9, -torch.inf)
    if kind == 6:
        bad = normal * 3
        bad[::2, choose.randrange(vocab)] = choose.choice([torch.nan, torch.inf])
        return bad
    return [
        normal * 2,
        normal * 6,
        normal * 0.01,
        torch.full_like(normal, 1.5),
        normal,
        normal,
        normal,
        (normal * 2).round(),
    ][kind]


def row_about_its_threshold(kind: str, batch: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """Rows for which a survey of some segments gives good, no, or misleading information about top-p's
    threshold.
    """
    logits = torch.randn(batch, vocab, generator=generator)
    places = torch.randint(0, vocab, (batch, 1), generator=generator)
    return {
        "flat": logits,
        "less flat": logits * 2,
        "peaked": logits * 5,
        "equal": torch.full((batch, vocab), -50.0),
        "few values": (logits * 2).round(),
        "ascending": torch.linspace(-5, 5, vocab).repeat(batch, 1),
        "descending": torch.linspace(5, -5, vocab).repeat(batch, 1),
        "mostly excluded": logits.masked_fill(
            torch.rand(batch, vocab, generator=generator) < 0.95, -float("inf")
        ),
        "one far above": logits.scatter(1, places, 40.0),
        "one beyond float32's powers": logits.scatter(1, places, 1000.0),
        "one not a number": logits.scatter(1, places, float("nan")),
    }[kind]


TOP_P_KINDS = [
    "flat",
    "less flat",
    "peaked",
    "equal",
    "few values",
    "ascending",
    "descending",
    "mostly excluded",
    "one far above",
    "one beyond float32's powers",
]
TOP_P_KINDS += ["one not a number"]


def rows_of(kind: str, batch: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """Rows whose largest values are in all places, in few, or nowhere."""
    logits = torch.randn(batch, vocab, generator=generator)
    hot = torch.zeros(vocab)
    hot[: min(vocab, 700)] = 6.0
    ascending = torch.linspace(-8, 8, vocab).repeat(batch, 1)
    return {
        "flat": logits,
        "peaked": logits * 4,
        "largest at low ids": logits + hot,
        "largest at one end": ascending,
        "equal": torch.full((batch, vocab), 2.5),
        "few values": (logits * 2).round(),
        "mostly excluded": logits.masked_fill(
            torch.rand(batch, vocab, generator=generator) < 0.995, -torch.inf
        ),
        "far below zero": logits - 100,
        "about zero": logits * 1e-30,
        "next to zero": logits * 1e-38,
        "far apart": logits * 1e38,
        "bad": torch.where(torch.rand(batch, vocab, generator=generator) < 0.5 / vocab, torch.nan, logits),
        "nothing allowed": torch.full((batch, vocab), -torch.inf),
    }[kind]


ROW_KINDS = [
    "flat",
    "peaked",
    "largest at low ids",
    "largest at one end",
    "equal",
    "few values",
    "mostly excluded",
    "far below zero",
    "about zero",
]
ROW_KINDS += ["next to zero", "far apart", "bad", "nothing allowed"]


def draw_settings(
    choose: random.Random, batch: int, vocab: int, generator: torch.Generator
) -> dict[str, Any]:
    settings = {
        "temperature": torch.tensor(
            [choose.choice([0.0, 0.6, 1.0, 1.0, 5.0, 1e-7, 1e30, -1.0, float("nan")]) for _ in range(batch)]
        ),
        "seed": torch.randint(0, 2**62, (batch,), generator=generator),
        "position": torch.randint(0, 2**31, (batch,), generator=generator),
    }
    if choose.random() < 0.3:
        settings["token_mask"] = bits(
            torch.rand(batch, vocab, generator=generator) < choose.choice([0.5, 2 / vocab])
        )
    return settings


def moved(values: dict[str, Any]) -> dict[str, Any]:
    """The same on a GPU."""
    return {
        name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in values.items()
    }
