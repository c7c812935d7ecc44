"""flashinfer.autotuner, which engines enter before they serve: there is nothing to tune, kernels are shipped
and plans are made on the device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any


def autotune(*_arguments: Any, **_options: Any) -> AbstractContextManager[None]:
    """A context in which nothing happens; every argument of FlashInfer's is taken."""
    return nullcontext()


class AutoTuner:
    """Has nothing to remember."""

    _dirty = False  # read by vLLM

    @classmethod
    def get(cls) -> AutoTuner:
        return cls()

    def load_configs(self, _path: str) -> bool:
        """Whether the file fits: every one does."""
        return True

    def save_configs(self, path: str) -> None:
        """Writes a file, because vLLM reads it and sends it to other ranks."""
        Path(path).write_text("{}")

    def clear_cache(self) -> None: ...


def set_autotune_process_group(_group: Any) -> None:
    """Of ranks that would choose together."""


def get_autotune_process_group() -> None:
    """None: nothing is chosen."""
