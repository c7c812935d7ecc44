"""Seeds and positions of draws that belong to no request: a generator gives new ones for each row and each
call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..metadata.structure import refuse

Draw = int | Tensor

_rows: dict[torch.device, Tensor] = {}


def row_numbers(batch: int, device: torch.device) -> Tensor:
    """int64 [batch]: 0, 1, 2, ... Kept, so that the calls of a step allocate nothing."""
    known = _rows.get(device)
    if known is None or known.shape[0] < batch:
        known = _rows[device] = torch.arange(max(batch, 1024), dtype=torch.int64, device=device)
    return known[:batch]


def draws(
    batch: int,
    device: torch.device,
    seed: Draw | None,
    position: Draw | None,
    generator: torch.Generator | None,
    *,
    of_row: int = 1,
) -> tuple[Draw, Draw]:
    """seed and position of each row: those given, or else those of a generator.

    Args:
        of_row: positions that a row's draws take, from its own on; 0: it draws nothing.

    Raises:
        ValueError: a generator beside a seed or a position; a position without a seed; neither a seed nor a
            way to get one while a CUDA graph is captured.
    """
    if seed is not None:
        if generator is not None:
            refuse("generator", generator, "None beside a seed")
        return seed, 0 if position is None else position
    if position is not None:
        refuse("seed", seed, "given beside a position")
    if of_row == 0:
        return 0, 0
    rows = row_numbers(batch, device)
    return seed_of(generator, device), rows if of_row == 1 else rows * of_row


def seed_of(generator: torch.Generator | None, device: torch.device) -> int:
    """A number from the generator, which moves on; nothing waits for the device.

    Args:
        generator: of `device`; None: torch's default generator there.

    Raises:
        ValueError: a generator of another device; a CUDA graph is being captured, whose replays would repeat
            the draws.
    """
    if generator is not None and generator.device.type != device.type:
        refuse("generator.device", generator.device, f"{device}, where the rows are")
    if device.type != "cuda":
        return int(
            torch.randint(-(2**63), 2**63 - 1, (), generator=generator, dtype=torch.int64, device="cpu")
        )
    if torch.cuda.is_current_stream_capturing():
        refuse(
            "seed",
            None,
            "given, a tensor, while a CUDA graph is captured: its replays would repeat the draws",
        )
    if generator is None:
        generator = torch.cuda.default_generators[
            device.index if device.index is not None else torch.cuda.current_device()
        ]
    state = generator.get_state()  # on the host: seed and offset of Philox, 8 bytes each
    seed, offset = (int(word) for word in state.view(torch.int64))
    state.view(torch.int64)[1] = offset + 4  # offsets are multiples of 4
    generator.set_state(state)
    return mixed(seed, offset)


def mixed(seed: int, offset: int) -> int:
    """Both numbers in one int64, such that offsets after one another are far apart: the finaliser of
    SplitMix64 (Steele et al. 2014).
    """
    mask = 2**64 - 1
    x = (seed ^ offset * 0x9E3779B97F4A7C15) & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    x ^= x >> 31
    return x - 2**64 if x >= 2**63 else x
