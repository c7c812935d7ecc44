"""Reports while an engine starts: which backend serves each layer, and GPUs without tests.

Some models choose their own kernels, whatever backend the user chose. A warning names their layers. If no
layer is ours, the engine does not start.

Kernels for other GPUs than Hopper exist but were never run on them, and a warning tells the user.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from itertools import groupby

import torch

from attn_backend.jit.progress import warn_once
from attn_backend.settings import Settings

SWITCH = "ATTN_BACKEND_REQUIRE_LAYERS"
WAY_OUT = f"Leave the choice of a backend to the engine, or pass {SWITCH}=0 to start anyway."


def is_ours(backend: type) -> bool:
    """Whether the class of a backend is of this package, or derived from such a class.

    vLLM derives classes for chunked local attention.
    """
    return any(base.__module__.startswith("attn_backend.") for base in backend.__mro__)


def report_layers(
    num_ours: int,
    others: Mapping[str, Iterable[str]],
    logger: logging.Logger,
    hint: str = "",
    is_draft: bool = False,
) -> None:
    """Called once the model is built, if the user chose this backend. Each process warns once.

    Args:
        num_ours: attention layers that this backend serves.
        others: names of the other attention layers, by the name of their backend.
        hint: how layers of a draft model get this backend, for the warning.
        is_draft: they are a draft model's, which never stops the start.

    Environment:
        ATTN_BACKEND_REQUIRE_LAYERS: `0` warns instead of refusing.

    Raises:
        RuntimeError: other backends serve all layers.
    """
    listed = {backend: sorted(names, key=_numbers_last) for backend, names in sorted(others.items())}
    num_others = sum(map(len, listed.values()))
    if not num_others:
        return
    which = "; ".join(f"{backend}: {shortened(names)}" for backend, names in listed.items())
    layers = "layers of the draft model" if is_draft else "layers"
    if num_ours or is_draft:
        message = (
            f"attn_backend serves {num_ours} of {num_ours + num_others} attention {layers}. Other backends "
            f"serve the rest: {which}."
        )
        warn_once(f"{message} {hint}".rstrip(), logger)
        return
    reason = (
        f"serves none of the {num_others} attention layers: the model or the engine chose other backends "
        f"({which})"
    )
    if Settings.read().require_layers:
        raise RuntimeError(f"attn_backend was chosen, but {reason}. {WAY_OUT}")
    warn_once(f"attn_backend was chosen, but {reason}. The engine starts because of {SWITCH}=0.", logger)


def shortened(names: Iterable[str]) -> str:
    """Names that differ only in their first number become one: `layers.{0-2,5}.attn`."""
    numbers: dict[tuple[str, str], list[int]] = {}
    short: list[str] = []
    for name in names:
        found = re.search(r"\d+", name)
        if found is None:
            short.append(name)
        else:
            numbers.setdefault((name[: found.start()], name[found.end() :]), []).append(int(found[0]))
    for (before, after), of_name in numbers.items():
        ranges = number_ranges(of_name)
        short.append(f"{before}{ranges if ranges.isdigit() else f'{{{ranges}}}'}{after}")
    return ", ".join(short)


def number_ranges(numbers: Iterable[int]) -> str:
    """`0-2,5` for 0, 1, 2 and 5."""
    runs = (
        [number for _, number in run]
        for _, run in groupby(enumerate(sorted(set(numbers))), lambda pair: pair[1] - pair[0])
    )
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _numbers_last(name: str) -> tuple[str, list[int]]:
    return re.sub(r"\d+", "", name), [int(number) for number in re.findall(r"\d+", name)]


def untried(capability: tuple[int, int]) -> str | None:
    """The warning for a GPU of this compute capability; None where these kernels have run."""
    if capability == (9, 0):
        return None
    build = "the sm_80 build" if capability[0] == 8 else "the PTX of the sm_80 build"
    return (
        f"attn_backend has never been run on a GPU of compute capability {capability[0]}.{capability[1]}. "
        f"It uses {build}; compare its outputs with the engine's own backend"
    )


def warn_if_untried(device: torch.device, logger: logging.Logger) -> None:
    """Called when an engine starts; each process warns once."""
    message = untried(torch.cuda.get_device_capability(device)) if device.type == "cuda" else None
    if message is not None:
        warn_once(message, logger)
