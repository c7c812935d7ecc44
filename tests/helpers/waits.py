"""What makes the host wait for the device: found in CUDA's own trace on a GPU, and on a CPU in the calls of
torch that would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

WAITS = ("synchronize", "streamwait", "eventquery")
HOST_COPIES = ("dtoh", "htod")
READS = {
    "item",
    "tolist",
    "numpy",
    "cpu",
    "__array__",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__contains__",
    "nonzero",
    "masked_select",
    "unique",
}


class NoHostReads(TorchFunctionMode):
    """In this context an AssertionError is raised where a tensor's values are read on the host, or decide a
    shape. On a GPU each of these calls would wait.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        assert name not in READS, f"{name}() reads a tensor on the host"
        if name in ("__getitem__", "__setitem__"):
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(
                isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts
            ), f"{name}() counts what a mask selects"
        if name == "repeat_interleave" and any(isinstance(part, torch.Tensor) for part in args[1:]):
            assert "output_size" in (kwargs or {}), "repeat_interleave() counts what it repeats"
        return function(*args, **(kwargs or {}))


def traced(step: Callable[[], object], steps: int) -> tuple[list[str], list[str]]:
    """Runs `step` so often on a GPU.

    The names of all events of the trace; and of those that wait for the device, or copy between it and the
    host.
    """
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        # What the profiler itself does when it stops comes after this marker.
        with torch.profiler.record_function("steps end"):
            pass
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    end = next(event.time_range.start for event in events if event.name == "steps end")
    waits = [
        event.name
        for event in events
        if event.time_range.start < end and any(word in event.name.lower() for word in WAITS)
    ]
    return [event.name for event in events], waits + [
        event.name for event in events if any(word in event.name.lower() for word in HOST_COPIES)
    ]
