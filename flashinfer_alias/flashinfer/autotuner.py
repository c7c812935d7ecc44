"""The autotuner, which engines call before serving.

It does nothing here: kernels are precompiled, and plans are made on the device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any


def autotune(*_arguments: Any, **_options: Any) -> AbstractContextManager[None]:
    """A context manager that does nothing; accepts all of FlashInfer's arguments."""
    return nullcontext()


class AutoTuner:
    """Stores nothing."""

    _dirty = False  # read by vLLM

    @classmethod
    def get(cls) -> AutoTuner:
        return cls()

    def load_configs(self, _path: str) -> bool:
        """Whether the file fits: always true."""
        return True

    def save_configs(self, path: str) -> None:
        """Writes a file, because vLLM reads it and sends it to other ranks."""
        Path(path).write_text("{}")

    def clear_cache(self) -> None: ...


def set_autotune_process_group(_group: Any) -> None:
    """Does nothing."""


def get_autotune_process_group() -> None:
    """Returns None: there is no group."""
