"""What FlashInfer has and this package has not: refused by name, never computed wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def not_supported(feature: str) -> NoReturn:
    """Raises NotImplementedError that names the feature."""
    raise NotImplementedError(f"{feature} is not supported by attn_backend.flashinfer (docs/flashinfer.md lists what is)")


def refuse_given(**arguments: object) -> None:
    """Refuses the first argument that is given, that is, not None or False."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            not_supported(f"the argument {name}")


def missing(name: str) -> Callable[..., NoReturn]:
    """A function of FlashInfer's that refuses every call."""

    def refuse(*_arguments: Any, **_options: Any) -> NoReturn:
        not_supported(name)

    refuse.__name__ = refuse.__qualname__ = name.rsplit(".", 1)[-1]
    refuse.__doc__ = f"Raises NotImplementedError: {name} is not supported."
    return refuse
