"""flashinfer.jit: custom variants. Their kernels are compiled when an Attention is made with them."""

from . import attention
from .attention import gen_customize_single_decode_module, gen_customize_single_prefill_module

__all__ = ["attention", "gen_customize_single_decode_module", "gen_customize_single_prefill_module"]
