"""Scales of Q, K and logits, which FlashInfer takes as numbers or tensors.

Each goes into sm_scale, to the kernels, or to a variant.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..metadata.structure import refuse
from ..variants import Variant, builtin
from .arguments import Scale, is_number
from .features import not_supported

if TYPE_CHECKING:
    from .heads import Heads


class Scales(NamedTuple):
    """What logits are multiplied by."""

    number: float
    of_requests: Tensor | None = None  # float32 [batch] or [1]
    of_query_heads: Tensor | None = None  # float32 [num_qo_heads]
    # Of 8-bit queries and keys, read by the kernel: float32 [1] or [num_kv_heads].
    q: Tensor | None = None
    k: Tensor | None = None

    @property
    def params(self) -> dict[str, Tensor]:
        """The arguments of scale_variants()."""
        if self.of_query_heads is not None:
            heads = {"q_scales": self.of_query_heads}
            return heads if self.of_requests is None else {"sm_scales": self.of_requests, **heads}
        return _NO_PARAMS if self.of_requests is None else {"sm_scales": self.of_requests}


_NO_PARAMS: dict[str, Tensor] = {}


def check_scale_of_requests(sm_scale: Tensor, batch_size: int) -> None:
    """Refuses a tensor that has neither one element nor one for each request: kernels would read past its
    end, or take elements that are of nothing.
    """
    if sm_scale.numel() not in (1, batch_size):
        refuse(
            "sm_scale",
            sm_scale,
            f"a number, or a tensor of one element, or of one for each request: {batch_size}",
        )


def scaled(
    heads: Heads,
    batch_size: int,
    sm_scale: Scale | None,
    q_scale: Scale | None = None,
    k_scale: Scale | None = None,
) -> Scales:
    """sm_scale, which may be a tensor of one element for each request (None: the default), times q_scale and
    k_scale. Tensors on a device are read when a kernel runs; of 8-bit Q they may have an element for each
    query head or KV head, of 8-bit K for each KV head.

    Raises:
        ValueError: sm_scale of another number of elements. NotImplementedError: a tensor of other elements.
    """
    number, of_requests, of_query_heads, q, k = 1.0, None, None, None, None
    for name, scale in (
        ("sm_scale", heads.default_scale if sm_scale is None else sm_scale),
        ("q_scale", q_scale),
        ("k_scale", k_scale),
    ):
        if scale is None:
            continue
        if is_number(scale):
            number *= float(scale)
            continue
        assert isinstance(scale, Tensor)
        if name == "sm_scale":
            check_scale_of_requests(scale, batch_size)
        factor, count = flat(scale), scale.numel()
        if name == "q_scale" and heads.float8_q and count in (1, heads.num_kv_heads):
            q = factor
        elif name == "q_scale" and heads.float8_q and count == heads.num_qo_heads:
            of_query_heads = factor
        elif name == "k_scale" and heads.is_over_float8 and count in (1, heads.num_kv_heads):
            k = factor
        elif count == 1 or (name == "sm_scale" and scale.ndim == 1):
            of_requests = factor if of_requests is None else of_requests * factor
        else:
            not_supported(f"{name} as a tensor of shape {list(scale.shape)}")
    return Scales(number, of_requests, of_query_heads, q, k)


def scale_of_v(v_scale: Scale, is_float8: bool, num_kv_heads: int) -> tuple[Scale | None, Scale | None]:
    """V's scale as kernels take it, of a float8 cache; and what is left for the output to be multiplied by.

    None for 1.

    Raises:
        NotImplementedError: a tensor of other elements.
    """
    if is_number(v_scale):
        v_scale = float(v_scale)
        if v_scale == 1.0:
            return None, None
        return (v_scale, None) if is_float8 and v_scale > 0 else (None, v_scale)
    assert isinstance(v_scale, Tensor)
    if v_scale.numel() not in ((1, num_kv_heads) if is_float8 else (1,)):
        not_supported(f"v_scale as a tensor of shape {list(v_scale.shape)}")
    return (flat(v_scale), None) if is_float8 else (None, v_scale)


def flat(scale: Tensor) -> Tensor:
    """float32 [elements]; the tensor itself if it is that, as kernels know again which tensors they were
    given.
    """
    return scale if scale.ndim == 1 and scale.dtype == torch.float32 else scale.reshape(-1).to(torch.float32)


def one_of(**scales: Scale | None) -> Scale | None:
    """The one that is given, of two names for the same scale.

    Raises:
        ValueError: both are.
    """
    given = [(name, scale) for name, scale in scales.items() if scale is not None]
    if len(given) > 1:
        refuse(given[0][0], given[0][1], f"None with {given[1][0]}")
    return given[0][1] if given else None


@lru_cache(maxsize=1)
def _query_head_scale() -> Variant:
    def query_head_scale(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * q_scales[h]  # type: ignore[name-defined]  # noqa: F821

    return Variant.from_functions(query_head_scale, tensors={"q_scales": torch.float32})


def scale_variants(params: frozenset[str]) -> list[Variant]:
    """The variants that multiply scores by what runs are given under these names."""
    of_requests = [builtin.request_scale()] if "sm_scales" in params else []
    return of_requests + ([_query_head_scale()] if "q_scales" in params else [])
