"""How this adapter refuses what it cannot serve: while the engine starts, by the name of the option or the
model's feature.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

OTHER_BACKEND = "choose another --attention-backend"
OTHER_CACHE = "pass --kv-cache-dtype fp8_e4m3 or auto"
_WAYS_OUT = {  # of vLLM's own reasons; of all others, another backend
    "dtype not supported": "pass --dtype bfloat16",
    "kv_cache_dtype not supported": OTHER_CACHE,
    "block_size not supported": "pass --block-size 16",
    "DCP not supported": "pass --decode-context-parallel-size 1",
}


def refuse(what: str, way_out: str = OTHER_BACKEND) -> NoReturn:
    raise NotImplementedError(f"attn_backend does not support {what}: {way_out}")


def with_ways_out(reasons: Iterable[str]) -> list[str]:
    """What vLLM shows when it refuses a backend, each reason with its way out.

    Those that name an option already have one.
    """
    return [
        reason if "--" in reason else f"{reason}: {_WAYS_OUT.get(reason, OTHER_BACKEND)}"
        for reason in reasons
    ]
