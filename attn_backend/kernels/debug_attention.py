"""The Attention of ATTN_BACKEND_DEBUG=1, which checks what the device finds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from torch.compiler import is_compiling

from ..metadata import BSRView, Composition
from .attention import Attention
from .attention_variant import VariantArgs
from .errors import InUseError


class DebugAttention(Attention):
    """Each plan and each run waits for the device and raises what it found wrong.

    Until then other threads are refused.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._in_use_until_done = Lock()
        super().__init__(*arguments, **options)

    def plan(self, composition: Composition | BSRView, *, variant_args: VariantArgs | None = None) -> None:
        with self._until_done():
            super().plan(composition, variant_args=variant_args)

    def run(self, *arguments: Any, **options: Any) -> Any:
        if is_compiling():
            return super().run(*arguments, **options)
        with self._until_done():
            return super().run(*arguments, **options)

    @contextmanager
    def _until_done(self) -> Iterator[None]:
        if not self._in_use_until_done.acquire(blocking=False):
            raise InUseError(
                "this Attention is in use by another thread, whose plan() or run() has not ended on the "
                "device"
            )
        try:
            yield
            self.raise_for_errors()
        finally:
            self._in_use_until_done.release()
