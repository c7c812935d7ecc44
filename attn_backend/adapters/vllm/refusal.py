"""How this adapter refuses what it cannot serve: while the engine starts, by the name of the option or the model's feature."""

from __future__ import annotations

from typing import NoReturn

OTHER_BACKEND = "choose another --attention-backend"


def refuse(what: str, way_out: str = OTHER_BACKEND) -> NoReturn:
    raise NotImplementedError(f"attn_backend does not support {what}: {way_out}")
