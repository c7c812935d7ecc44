"""How tensors and caches store numbers: one row of a table for each format, without torch. Other tables of
types follow from it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

FourBitDtype = Literal["int4", "nvfp4", "fp4_mx_block16"]  # torch has no such dtypes; bytes are uint8
PairDtype = Literal["int8_k_nvfp4_v"]  # of caches whose K and V have different formats
BLOCK_COLUMNS = 16  # of a scale of blocks
_BF16, _F16 = ("bf16", "Elements16Bits"), ("f16", "Elements16Bits")
_GIVEN, _TOKENS = ("float8", "GivenScales"), ("tokens", "ByteQuantizer")
_INT8_FP4 = ("int8_nvfp4", "QuantizerPair<ByteQuantizer, Fp4Quantizer>")
_INT4, _FP4 = ("int4", "Int4Quantizer"), ("fp4", "Fp4Quantizer")


class StoredFormat(NamedTuple):
    """An element, and its scales if it has less than 16 bits.

    Attributes:
        dtype: torch's name, or one of FourBitDtype or PairDtype.
        element: part of names of kernels.
        struct: in csrc/common/elements.cuh; in DataType (csrc/common/data_type.h) with a k before it.
        bits: of a number. 8 for a pair. 32 is for CPUs, and for states and logits.
        append: part of names of append kernels, and what converts numbers in them (csrc/cache/quantizers.h).
        head_columns: head_dim must be a multiple of it, if K or V has 4 bits. 0: a column fills a byte.
        scales: torch's name for the dtype of a scale for each token and head, or for each block of columns of
            these. None: scales are for all, for heads, for requests or parts of rows.
        has_factor: a number multiplies all scales of blocks.
        pair: the elements of K and of V. Their rows have the other fields.
    """

    dtype: str
    element: str
    struct: str
    bits: int
    append: tuple[str, str] = ("", "")
    head_columns: int = 0
    scales: str | None = None
    has_factor: bool = False
    pair: tuple[str, str] | None = None

    @property
    def has_scales(self) -> bool:
        return self.bits < 16

    @property
    def has_block_scales(self) -> bool:
        return self.scales not in (None, "float32")

    @property
    def has_token_scales(self) -> bool:
        """Whether each token and head has scales."""
        return self.scales is not None or self.pair is not None

    @property
    def has_given_scales(self) -> bool:
        """Whether scales are for all, for heads or for requests, or part of rows (latents)."""
        return self.has_scales and not self.has_token_scales

    @property
    def sides(self) -> tuple[StoredFormat, StoredFormat]:
        """The formats of K and of V."""
        k, v = self.pair or (self.element, self.element)
        return BY_ELEMENT[k], BY_ELEMENT[v]


FORMATS = (
    StoredFormat("bfloat16", "bf16", "BFloat16", 16, _BF16),
    StoredFormat("float16", "f16", "Float16", 16, _F16),
    StoredFormat("float32", "f32", "Float32", 32),
    StoredFormat("float8_e4m3fn", "e4m3", "Float8E4M3", 8, _GIVEN),
    StoredFormat("float8_e5m2", "e5m2", "Float8E5M2", 8, _GIVEN),
    StoredFormat("uint8", "latent", "ScaledLatent", 8, _GIVEN),
    StoredFormat("float8_e4m3fn", "e4m3_tokens", "Float8E4M3", 8, _TOKENS, scales="float32"),
    StoredFormat("int8", "int8_tokens", "Int8", 8, _TOKENS, scales="float32"),
    StoredFormat("int4", "int4_tokens", "Int4", 4, _INT4, 32, "float32"),
    StoredFormat("nvfp4", "nvfp4", "NvFp4", 4, _FP4, 64, "float8_e4m3fn", has_factor=True),
    StoredFormat("fp4_mx_block16", "mxfp4", "MxFp4", 4, _FP4, 64, "uint8"),
    StoredFormat(
        "int8_k_nvfp4_v", "int8_nvfp4", "Int8NvFp4", 8, _INT8_FP4, 64, pair=("int8_tokens", "nvfp4")
    ),
)
BY_ELEMENT = {stored.element: stored for stored in FORMATS}
# By dtype, and whether the cache has a scale for each token and head.
BY_DTYPE = {(stored.dtype, stored.has_token_scales): stored for stored in FORMATS}
