"""flashinfer.cascade: shared prefixes, and merging of attention states."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..kernels.states import merge_state as merge_two
from ..kernels.states import merge_states as merge_all
from ..metadata import BSRView, Composition, PageTable
from ..validation import refuse, require
from .arguments import (
    NO_POS_ENCODING,
    DType,
    PagedKV,
    Scale,
    check_fits,
    check_kv_layout,
    copy_if_other,
    from_zero,
    heads_of,
    on_device,
    paged_cache,
    pages_from_zero,
    pos_encoding,
)
from .decode import BatchDecodeWithPagedKVCacheWrapper
from .features import not_supported
from .prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache
from .wrapper import CompositeWrapper, Wrapper, plain_logits

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]


# arguments of a cascade's plan
_ARRAYS = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len")


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merges two states of each row: v [rows, heads, head_dim], s float32 [rows, heads], base 2.

    Raises:
        ValueError: an argument that is wrong in shape, dtype, device or stride.
    """
    return merge_two(v_a, s_a.float(), v_b, s_b.float(), log2=True)


def merge_state_in_place(
    v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None
) -> None:
    """merge_state into v and s; rows whose mask (bool [rows]) is False are left unchanged.

    Raises:
        ValueError: an argument that is wrong in shape, dtype, device or stride.
    """
    merge_two(v, s, v_other, s_other.float(), out=v, out_lse=s, mask=mask, log2=True)


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Merges all states of each row: v [rows, states, heads, head_dim], s float32 [rows, states, heads], base
    2.

    Raises:
        ValueError: an argument that is wrong in shape, dtype, device or stride.
    """
    return merge_all(v, s.float(), log2=True)


class MultiLevelCascadeAttentionWrapper(Wrapper):
    """Prefixes shared by runs of consecutive rows: one page table per level, the most shared level first.

    One launch for all levels.

    Call `plan` once a step, `run` once a layer. Prefixes that page tables share need no levels here: the
    other wrappers find them automatically.

    Args:
        num_levels: at most 8.
        float_workspace_buffer: any tensor on the device.
        kv_layout: "NHD" or "HND".
        use_cuda_graph: copies plans to the buffers, and keeps the workspace in place.
        qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr:
            one buffer per level.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: an argument is not supported; the message names it.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indices_buf_arr: list[Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[Tensor] | None = None,
    ) -> None:
        require(1 <= num_levels <= 8, "num_levels", num_levels, "1 .. 8")
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        self._num_levels = num_levels
        self._buffers: list[tuple[Tensor, ...]] = []
        if use_cuda_graph:
            arrays = {
                "qo_indptr_buf_arr": qo_indptr_buf_arr,
                "paged_kv_indptr_buf_arr": paged_kv_indptr_buf_arr,
                "paged_kv_indices_buf_arr": paged_kv_indices_buf_arr,
                "paged_kv_last_page_len_buf_arr": paged_kv_last_page_len_buf_arr,
            }
            for name, array in arrays.items():
                require(
                    array is not None and len(array) == num_levels,
                    name,
                    array,
                    f"a list of {num_levels} tensors if use_cuda_graph",
                )
            self._buffers = list(zip(*(array for array in arrays.values() if array is not None), strict=True))

    def plan(
        self,
        qo_indptr_arr: list[Tensor],
        paged_kv_indptr_arr: list[Tensor],
        paged_kv_indices_arr: list[Tensor],
        paged_kv_last_page_len: list[Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: Scale | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
    ) -> None:
        """Plans a batch.

        Args:
            qo_indptr_arr: for each level int32 [batch_size of the level + 1]: the rows that see each of its
                prefixes. All levels start and end at the same rows. paged_kv_indptr_arr,
                paged_kv_indices_arr, paged_kv_last_page_len: the page tables of each level.
            causal: for the last level, which holds each request's own tokens.
            sm_scale: a number, or a tensor with one element; with one level also one element per request.
            window_left: applied to each level separately, as in FlashInfer: tokens before a query's place
                among the level's tokens.

        Raises:
            ValueError: an argument is wrong.
            NotImplementedError: an argument is not supported; the message names it.
        """
        arrays = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        for name, array in zip(_ARRAYS, arrays, strict=True):
            if len(array) != self._num_levels:
                refuse(f"len({name})", len(array), f"num_levels = {self._num_levels}")
        pos = pos_encoding(pos_encoding_mode, rope_scale, rope_theta)
        if self._num_levels > 1 and pos != NO_POS_ENCODING:
            not_supported(f"pos_encoding_mode = {pos_encoding_mode!r} with several levels")
        if self._num_levels > 1 and isinstance(sm_scale, Tensor) and sm_scale.numel() != 1:
            way_out = (
                "BatchPrefillWithPagedKVCacheWrapper has one for each request, and its plan finds "
                "shared prefixes"
            )
            refuse(
                "sm_scale",
                sm_scale,
                f"a number or a tensor of one element with num_levels = {self._num_levels}: {way_out}",
            )
        self._heads = heads_of(
            self.device, num_qo_heads, num_kv_heads, head_dim, None, q_data_type, kv_data_type
        )
        self._sm_scale = sm_scale
        self._start_rows(qo_indptr_arr[-1])
        levels, window_left = [], max(window_left, -1)
        for level, parts in enumerate(
            [self._from_zero(level, parts) for level, parts in enumerate(zip(*arrays, strict=True))]
        ):
            qo_indptr, kv_indptr, kv_indices, last_page_len = self._on_device(level, parts)
            table = PageTable.csr(kv_indptr, kv_indices, last_page_len, page_size)
            levels.append(BSRView(qo_indptr, table, causal and level == self._num_levels - 1, window_left))
        self._plan_view(Composition(levels), plain_logits(logits_soft_cap, pos))

    begin_forward = plan

    def _from_zero(self, level: int, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """A level's tensors, with indptrs that start at 0. Refuses tensors that do not fit the last level or
        their buffers.
        """
        qo_indptr, kv_indptr, kv_indices, last_page_len = parts
        first_row, qo_indptr = from_zero(qo_indptr)
        if first_row != self._first_row:
            refuse(f"qo_indptr_arr[{level}][0]", first_row, f"{self._first_row}, where the last level starts")
        kv_indptr, kv_indices = pages_from_zero(kv_indptr, kv_indices)
        parts = qo_indptr, kv_indptr, kv_indices, last_page_len
        if self._use_cuda_graph:
            for name, buffer, part in zip(_ARRAYS, self._buffers[level], parts, strict=True):
                if part is kv_indices:
                    check_fits(f"{name}[{level}]", part, "its buffer", buffer)
                elif len(part) != len(buffer):
                    refuse(
                        f"len({name}[{level}])",
                        len(part),
                        f"{len(buffer)}, that of its buffer, with use_cuda_graph=True",
                    )
        return parts

    def _on_device(self, level: int, parts: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """The tensors of a level; with CUDA graphs its buffers, filled."""
        if not self._use_cuda_graph:
            return [on_device(part, self.device, True) for part in parts]
        for buffer, part in zip(self._buffers[level], parts, strict=True):
            copy_if_other(buffer[: len(part)], part, True)
        return self._buffers[level]

    def run(self, q: Tensor, paged_kv_cache: PagedKV) -> Tensor:
        """Runs the last plan: q [rows, num_qo_heads, head_dim].

        May be captured in a CUDA graph; never waits for the device.

        Raises:
            ValueError: an argument that is wrong, or no plan yet.
        """
        self._check_planned()
        kv = paged_cache(paged_kv_cache, self._kv_layout)
        return self._run_planned(q, kv.k, kv.v, self._scales())

    forward = run


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(CompositeWrapper):
    """Decode with one query per request and a shared prefix in separate tensors. For code that predates
    MultiLevelCascadeAttentionWrapper.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: an argument is not supported; the message names it.
    """

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        self._kv_layout = check_kv_layout(kv_layout)
        self._unique = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)

    def begin_forward(
        self,
        unique_kv_indptr: Tensor,
        unique_kv_indices: Tensor,
        unique_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: DType = "float16",
    ) -> None:
        """Plans each request's own tokens, like BatchDecodeWithPagedKVCacheWrapper.plan."""
        self._unique.plan(
            unique_kv_indptr,
            unique_kv_indices,
            unique_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            q_data_type=None,
            data_type=data_type,
        )

    def forward(self, q: Tensor, k_shared: Tensor, v_shared: Tensor, unique_kv_cache: PagedKV) -> Tensor:
        """Attention over the shared prefix and each request's own tokens. q [batch_size, num_qo_heads,
        head_dim], k_shared and v_shared [tokens, num_kv_heads, head_dim] in kv_layout. Returns q's shape.
        """
        return _merged(
            single_prefill_with_kv_cache(q, k_shared, v_shared, kv_layout=self._kv_layout, return_lse=True),
            self._unique.run_return_lse(q, unique_kv_cache),
        )


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(CompositeWrapper):
    """Prefill with a shared prefix in separate tensors. For code that predates
    MultiLevelCascadeAttentionWrapper.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: an argument is not supported; the message names it.
    """

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        self._kv_layout = check_kv_layout(kv_layout)
        self._unique = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)

    def begin_forward(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        q_data_type: DType = "float16",
    ) -> None:
        """Plans each request's own tokens, like BatchPrefillWithPagedKVCacheWrapper.plan. q_data_type:
        FlashInfer supports only float16.
        """
        self._unique.plan(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            q_data_type=q_data_type,
        )

    def forward(
        self,
        q: Tensor,
        k_shared: Tensor,
        v_shared: Tensor,
        unique_kv_cache: PagedKV,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor:
        """Attention over the shared prefix and each request's own tokens. q [rows, num_qo_heads, head_dim],
        k_shared and v_shared [tokens, num_kv_heads, head_dim] in kv_layout. Returns q's shape. causal: only
        for each request's own tokens. rope_scale, rope_theta: None or their defaults, as Q and K are not
        rotated.

        Raises:
            ValueError: an argument is wrong, or there is no plan yet.
            NotImplementedError: an argument is not supported; the message names it.
        """
        for name, value, default in (("rope_scale", rope_scale, 1.0), ("rope_theta", rope_theta, 1e4)):
            if value is not None and value != default:
                refuse(
                    name,
                    value,
                    f"None or {default:g}: Q and K are not rotated here; apply_rope rotates them before K is "
                    f"cached",
                )
        shared = single_prefill_with_kv_cache(
            q, k_shared, v_shared, kv_layout=self._kv_layout, sm_scale=sm_scale, return_lse=True
        )
        return _merged(
            shared, self._unique.forward_return_lse(q, unique_kv_cache, causal=causal, sm_scale=sm_scale)
        )


def _merged(shared: Tensor | tuple[Tensor, Tensor], unique: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    (out, lse), (other, other_lse) = shared, unique
    merge_state_in_place(out, lse, other, other_lse)
    return out
