"""Stands in for SGLang's compiled kernels on a machine without a GPU: SGLang imports them everywhere and calls none of them there."""

from collections.abc import Callable
from typing import NoReturn

__version__ = "99.0"  # SGLang asks for a minimum


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs the compiled package; this is the stand-in for machines without a GPU")

    return kernel
