"""flashinfer.triton.cascade."""

from __future__ import annotations

from torch import Tensor

from ...kernels.states import merge_states as merge_all
from ..cascade import merge_state, merge_state_in_place, merge_states

__all__ = ["merge_state", "merge_state_in_place", "merge_states", "variable_length_merge_states"]


def variable_length_merge_states(v: Tensor, s: Tensor, indptr: Tensor) -> tuple[Tensor, Tensor]:
    """Merges the states of each row: row i has the states indptr[i]:indptr[i + 1] of v [states, heads,
    head_dim] and s float32 [states, heads], base 2.

    Raises:
        ValueError: an argument that is wrong in shape, dtype, device or stride.
    """
    return merge_all(v, s.float(), indptr, log2=True)
