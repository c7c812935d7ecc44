"""Attention variants, from Python functions, from C++, or built in, and their parameters."""

from . import builtin
from .masks import packbits, segment_packbits
from .params import Param
from .reference import Reference, ReferenceFunctions
from .tracing import TracingError
from .variant import Variant

__all__ = [
    "Param",
    "Reference",
    "ReferenceFunctions",
    "TracingError",
    "Variant",
    "builtin",
    "packbits",
    "segment_packbits",
]
