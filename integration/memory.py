"""The memory of a server while it works, sampled every few seconds, and whether it grows."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import psutil

from integration.processes import group_members

MIB = 2**20


def memory_of(group: int, device: str) -> float:
    """MiB: on a GPU what is taken of its memory, by whomever; on a CPU what the processes of a group hold."""
    if device == "cuda":
        listed = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True)
        return float(sum(int(line) for line in listed.stdout.split()))
    held = 0
    for process in group_members(group):
        with contextlib.suppress(psutil.Error):
            held += process.memory_info().rss
    return held / MIB


@contextlib.contextmanager
def sampled(measure: Callable[[], float], every_s: float) -> Iterator[list[tuple[float, float]]]:
    """A context in which a list fills with (seconds since its beginning, what `measure` returned)."""
    samples: list[tuple[float, float]] = []
    begin, done = time.monotonic(), threading.Event()

    def sample() -> None:
        while not done.wait(every_s):
            samples.append((time.monotonic() - begin, measure()))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def growth(samples: list[tuple[float, float]], warm_up_s: float) -> float:
    """How much the largest sample of the last quarter is above that of the first one, the warm-up left out.

    Raises:
        ValueError: there are fewer than 4 samples behind it.
    """
    kept = [value for at, value in samples if at >= warm_up_s]
    quarter = len(kept) // 4
    if quarter == 0:
        raise ValueError(f"minutes: {len(kept)} samples of the memory after {warm_up_s:.0f} s, must be 4 or more")
    return max(kept[-quarter:]) - max(kept[:quarter])
