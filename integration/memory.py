"""The memory of a working server, sampled every few seconds, and whether it grows."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import psutil

from integration.processes import group_members

MIB = 2**20


def memory_of(group: int, device: str) -> float:
    """MiB that the processes of a group hold; on a GPU, of its memory.

    If the driver uses other process ids, as in a container: all memory in use on the GPUs of
    CUDA_VISIBLE_DEVICES.
    """
    if device == "cuda":
        pids = {process.pid for process in group_members(group)}
        return of_processes(_query("compute-apps=pid,used_memory"), pids) or sum(
            float(line) for line in _query("gpu=memory.used").split()
        )
    held = 0
    for process in group_members(group):
        with contextlib.suppress(psutil.Error):
            held += process.memory_info().rss
    return held / MIB


def _query(what: str) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = [
        "nvidia-smi",
        f"--query-{what}",
        "--format=csv,noheader,nounits",
        *(["--id=" + visible] if visible else []),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def of_processes(listed: str, pids: set[int]) -> float:
    """MiB of these processes, from nvidia-smi's lines of "pid, MiB"."""
    lines = [line.split(", ") for line in listed.splitlines()]
    return sum(float(held) for pid, held in lines if int(pid) in pids and held.isdigit())


@contextlib.contextmanager
def sampled(measure: Callable[[], float], every_s: float) -> Iterator[list[tuple[float, float]]]:
    """A context that fills a list with (seconds since its beginning, result of `measure`)."""
    samples: list[tuple[float, float]] = []
    begin, done = time.monotonic(), threading.Event()

    def sample() -> None:
        samples.append((0.0, measure()))
        while not done.wait(every_s):
            samples.append((time.monotonic() - begin, measure()))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def growth(samples: list[tuple[float, float]], warm_up_s: float) -> float | None:
    """By how much the largest sample of the last quarter exceeds the largest of the first quarter, without
    the warm-up. None if fewer than 4 samples follow it.
    """
    kept = [value for at, value in samples if at >= warm_up_s]
    quarter = len(kept) // 4
    if quarter == 0:
        return None
    return max(kept[-quarter:]) - max(kept[:quarter])
