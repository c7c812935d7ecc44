"""Replaces SGLang's compiled kernels on a machine without a GPU: SGLang imports them everywhere, and calls
only those for speculative decoding (speculative.py) and for layers with states (mamba.py) there.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

__version__ = "99.0"  # SGLang requires a minimum


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)
    if name.endswith("_cpu"):
        found: Callable[..., Any] | None = getattr(import_module("sgl_kernel.speculative"), name, None)
        if found is not None:
            return found

    def kernel(*args: object, **kwargs: object) -> Any:
        raise NotImplementedError(
            f"sgl_kernel.{name} needs the compiled package; this is the stand-in for machines without a GPU"
        )

    return kernel
