"""What attention means: variants from Python functions, from C++, or built in, and their parameters."""

from . import builtin
from .functions import TracingError
from .packed_masks import packbits, segment_packbits
from .params import Param
from .reference import Reference, ReferenceFunctions
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
