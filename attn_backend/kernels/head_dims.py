"""Widths of heads: those that there are kernels for, and what messages say of them."""

from __future__ import annotations

import re
from typing import NamedTuple


class HeadDims(NamedTuple):
    """Columns of a head of Q and K, and of one of V and O."""

    qk: int
    v: int

    @classmethod
    def of(cls, dims: int | HeadDims) -> HeadDims:
        """An int: both."""
        return cls(dims, dims) if isinstance(dims, int) else dims

    @classmethod
    def parse(cls, text: str) -> HeadDims:
        """Of text in the form of __str__.

        Raises:
            ValueError: another form.
        """
        match = re.fullmatch(r"(\d+)(?:_(\d+))?", text)
        if match is None:
            raise ValueError(
                f"head_dim is {text!r}, must be a number, or two such as 192_128: columns of Q and K, and of "
                f"V"
            )
        return cls(int(match[1]), int(match[2] or match[1]))

    @property
    def runs_on_cuda(self) -> bool:
        """Whether there are kernels for it."""
        return all(dim % 8 == 0 and 8 <= dim <= _MAX_CUDA_HEAD_DIM for dim in self) or self.is_wide

    @property
    def runs_on_cpu(self) -> bool:
        return all(dim % 8 == 0 and 8 <= dim <= _MAX_CPU_HEAD_DIM for dim in self)

    def runs_over(self, kv_element: str | None, float8_q: bool = False) -> bool:
        """Whether there are CUDA kernels for it over caches of these elements, of kv_element_of(). float8_q:
        Q has the cache's.
        """
        if float8_q and (kv_element == "latent" or self.is_wide):
            return False
        if kv_element == "latent":
            return self == MLA_HEAD_DIMS
        return self.runs_on_cuda

    @property
    def is_wide(self) -> bool:
        """Whether several warps share the columns of the output (csrc/attention/head_shape.h)."""
        return self in WIDE_HEAD_DIMS

    def __str__(self) -> str:
        return f"{self.qk}" if self.qk == self.v else f"{self.qk}_{self.v}"


_MAX_CUDA_HEAD_DIM, _MAX_CPU_HEAD_DIM = 256, 576
MLA_HEAD_DIMS = HeadDims(576, 512)  # absorbed
WIDE_HEAD_DIMS = (HeadDims(512, 512), MLA_HEAD_DIMS)
CPU_HEAD_DIMS_TEXT = f"a multiple of 8 up to {_MAX_CPU_HEAD_DIM}"
CUDA_HEAD_DIMS_TEXT = (
    f"a multiple of 8 up to {_MAX_CUDA_HEAD_DIM}, 512, or (head_dim, head_dim_v) = (576, 512)"
)
FLOAT8_Q_TEXT = f"None, or dtype, with heads of more than {_MAX_CUDA_HEAD_DIM} columns on CUDA"
LATENT_HEAD_DIMS_TEXT = (
    "another one: rows of DeepSeek V3.2's latents are for head_dim = 576, head_dim_v = 512"
)
