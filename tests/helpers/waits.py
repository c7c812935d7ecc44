"""Operations that make the host wait for the device: found in CUDA's own trace on a GPU, and on a CPU in the
torch calls that would wait.
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
    """In this context, reading a tensor's values on the host, or deriving a shape from them, raises
    AssertionError. On a GPU each of these calls would wait.
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
    """Runs `step` this often on a GPU.

    The names of all events in the trace, and of the events that wait for the device or copy between device
    and host.
    """
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        # The profiler's own work when it stops comes after this marker.
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
