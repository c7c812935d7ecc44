"""Times on one GPU: launches replayed from CUDA graphs with a cold L2, and the rates behind the floors."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Launch = Callable[[], object]

FLUSH_BYTES = 256 << 20  # several times the largest L2
WARM_UPS = 3  # replays that do not count


def capture(launch: Launch) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one call. It runs once before, so permanent effects (compiling, loading, allocating)
    happen outside the capture.
    """
    launch()
    torch.cuda.synchronize()
    stream = torch.cuda.current_stream()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            launch()
    finally:
        torch.cuda.set_stream(stream)  # a capture that fails would leave its own stream the current one
    return graph


def device_time(launch: Launch) -> float:
    """µs of one call on the device; waits for it."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    launch()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


class Timer:
    """Median time of captured launches with a cold L2."""

    def __init__(self, repeats: int, flush: torch.Tensor | None = None) -> None:
        """flush: another timer's buffer for clearing the L2 cache."""
        if not torch.cuda.is_available():
            sys.exit("error: this benchmark times a CUDA GPU, and torch sees none")
        self.repeats = repeats
        self.flush = (
            torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda").random_(0, 255)
            if flush is None
            else flush
        )

    def __call__(self, launch: Launch) -> float:
        """µs of one call."""
        return self.together([launch])[0]

    def together(self, launches: Sequence[Launch]) -> list[float]:
        """µs of one call of each: medians of `times`."""
        return [statistics.median(times) for times in self.times(launches)]

    def times(self, launches: Sequence[Launch]) -> list[list[float]]:
        """µs of every counted call of each.

        They take turns, so that drifting clocks affect all of them equally; every second round is in reverse
        order.
        """
        graphs = [capture(launch) for launch in launches]
        times: list[list[float]] = [[] for _ in graphs]
        for i in range(WARM_UPS + self.repeats):
            for n in range(len(graphs)) if i % 2 == 0 else reversed(range(len(graphs))):
                # still runs while the host queues the replay, so no launch is late
                self.flush.bitwise_not_()
                times[n].append(device_time(graphs[n].replay))
        return [of_one[WARM_UPS:] for of_one in times]


def ceilings() -> tuple[float, float]:
    """(bytes/s of a device copy counting read and written, FLOP/s of an 8192³ bf16 product)."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))

    def rate(work: float, launch: Launch) -> float:
        times = [device_time(launch) for _ in range(12)]
        return work / statistics.median(times[2:]) * 1e6

    return rate(2 * source.numel(), lambda: target.copy_(source)), rate(2 * 8192**3, lambda: a @ b)


@dataclass(frozen=True)
class Machine:
    """The GPU's rates in this process. bandwidth: bytes/s of a copy; rate: FLOP/s of a bf16 product; launch:
    µs of a one-element kernel, timed alike.
    """

    bandwidth: float
    rate: float
    launch: float

    @classmethod
    def measure(cls, timer: Timer) -> Machine:
        bandwidth, rate = ceilings()
        empty = torch.zeros(1, device="cuda")
        return cls(bandwidth, rate, timer(lambda: empty.add_(1)))

    def __str__(self) -> str:
        return (
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}: device copy "
            f"{self.bandwidth / 1e9:.0f} GB/s, "
            f"bf16 8192³ product {self.rate / 1e12:.0f} TFLOP/s, a one-element kernel in the same harness "
            f"{self.launch:.1f} µs."
        )


def start(repeats: int) -> tuple[Timer, Machine]:
    """The start of a benchmark: the same random numbers each time, the timer, and the GPU's rates."""
    torch.manual_seed(0)
    timer = Timer(repeats)
    return timer, Machine.measure(timer)
