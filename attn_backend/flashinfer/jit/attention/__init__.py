"""flashinfer.jit.attention: variants for single_decode_with_kv_cache_with_jit_module and
single_prefill_with_kv_cache_with_jit_module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...jit_variants import JitVariant, variant_of

__all__ = ["JitModule", "gen_customize_single_decode_module", "gen_customize_single_prefill_module"]


class JitModule:
    """A variant as FlashInfer's functions hand it on."""

    def __init__(self, variant: JitVariant) -> None:
        self.variant = variant

    def build_and_load(self, *_arguments: Any, **_options: Any) -> JitModule:
        """Itself: its kernels are compiled by the first call that needs them."""
        return self


def gen_customize_single_decode_module(
    uri: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    additional_tensor_names: Sequence[str],
    additional_tensor_dtypes: Sequence[str],
    additional_scalar_names: Sequence[str],
    additional_scalar_dtypes: Sequence[str],
    variant_name: str,
    variant_decl: str,
    **_options: Any,
) -> JitModule:
    """A variant that is the struct variant_name in variant_decl, FlashInfer's C++.

    The dtypes and head sizes of the call count.

    Raises:
        NotImplementedError: a struct, or types, that have no counterpart.
    """
    tensors, scalars = (
        (additional_tensor_names, additional_tensor_dtypes),
        (additional_scalar_names, additional_scalar_dtypes),
    )
    return JitModule(variant_of(*tensors, *scalars, variant_name, variant_decl))


def gen_customize_single_prefill_module(backend: str, *arguments: Any, **options: Any) -> JitModule:
    """The same; backend: "fa2" or "fa3", whose structs differ.

    Raises:
        NotImplementedError: a struct, or types, that have no counterpart.
    """
    return gen_customize_single_decode_module(*arguments, **options)
