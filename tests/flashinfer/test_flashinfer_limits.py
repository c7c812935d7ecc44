"""attn_backend.flashinfer: indptrs that do not start at 0, scales and buffers of other lengths, and options
that would be ignored.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flashinfer_oracle import Batch, attention, check, make_batch, workspace
from torch import Tensor

from attn_backend import flashinfer
from attn_backend.flashinfer import arguments as scales_module
from attn_backend.flashinfer import wrapper as wrapper_module

KV_LENS = [7, 1, 33, 20]
SCALES = [0.05, 0.2, 0.5, 0.1]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def from_entry_two(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """The page tables, after two ids that belong to no request."""
    return batch.page_indptr + 2, torch.cat((int32(0, 0), batch.page_indices)), batch.last_page_len


def with_scales(batch: Batch, scales: list[float]) -> tuple[Tensor, Tensor]:
    of_each = [batch.expected(causal=True, sm_scale=scale) for scale in scales]
    rows = [
        slice(int(begin), int(end))
        for begin, end in zip(batch.qo_indptr[:-1], batch.qo_indptr[1:], strict=True)
    ]
    o, lse = (torch.cat([x[i][rows[r]] for r, x in enumerate(of_each)]) for i in range(2))
    return o, lse


class Levels:
    """Two levels: a prefix that all rows see, and each request's own tokens."""

    def __init__(self, q_lens: list[int], kv_lens: list[int]) -> None:
        self.own, self.shared = make_batch(q_lens, kv_lens), make_batch([sum(q_lens)], [11], seed=1)
        self.cache = torch.cat((self.own.cache, self.shared.cache))
        indices = [self.shared.page_indices + len(self.own.cache), self.own.page_indices]
        self.qo_indptrs = [self.shared.qo_indptr, self.own.qo_indptr]
        self.tables = [
            [self.shared.page_indptr, self.own.page_indptr],
            indices,
            [self.shared.last_page_len, self.own.last_page_len],
        ]

    def buffers(self) -> list[list[Tensor]]:
        return [
            [torch.zeros_like(tensor) for tensor in tensors] for tensors in (self.qo_indptrs, *self.tables)
        ]

    def expected(self) -> Tensor:
        parts = []
        for i in range(len(self.own.last_page_len)):
            rows, tokens = (slice(int(x[i]), int(x[i + 1])) for x in (self.own.qo_indptr, self.own.kv_indptr))
            parts.append(
                attention(
                    self.own.q[rows],
                    *(
                        torch.cat((a, b[tokens]))
                        for a, b in ((self.shared.k, self.own.k), (self.shared.v, self.own.v))
                    ),
                )[0]
            )
        return torch.cat(parts)


def test_scales_of_requests_in_a_cascade() -> None:
    levels = Levels([1] * 4, KV_LENS)
    cascade = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace("cpu"))
    with pytest.raises(
        ValueError,
        match=r"sm_scale is .*, must be a number or a tensor of one element with num_levels = 2: "
        r"BatchPrefillWithPagedKV",
    ):
        cascade.plan(levels.qo_indptrs, *levels.tables, *levels.own.shape, 5, sm_scale=torch.tensor(SCALES))
    cascade.plan(levels.qo_indptrs, *levels.tables, *levels.own.shape, 5, sm_scale=torch.tensor([64**-0.5]))
    check(cascade.run(levels.own.q, levels.cache), (levels.expected(), torch.empty(0)))
    one = flashinfer.MultiLevelCascadeAttentionWrapper(1, workspace("cpu"))
    own = levels.own
    one.plan(
        [own.qo_indptr],
        *([x] for x in own.tables()),
        *own.shape,
        5,
        causal=True,
        sm_scale=torch.tensor(SCALES),
    )
    check(one.run(own.q, own.cache), with_scales(own, SCALES))


@pytest.mark.parametrize("what", ["decode", "paged", "ragged", "mixed", "cascade"])
def test_scales_of_requests(what: str) -> None:
    batch = make_batch([1] * 4, KV_LENS)
    kv: tuple[Any, ...] = (batch.cache,)
    wrapper: Any
    if what == "decode":
        wrapper, tables, options = (
            flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu")),
            (*batch.tables(), *batch.shape, 5),
            {},
        )
    elif what == "ragged":
        wrapper, kv = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu")), (batch.k, batch.v)
        tables, options = (batch.qo_indptr, batch.kv_indptr, *batch.shape), {"causal": True}
    elif what == "mixed":
        wrapper, dtypes = (
            flashinfer.BatchAttention("NHD", "cpu"),
            {"q_data_type": torch.float16, "kv_data_type": torch.float16},
        )
        tables, options = (
            (batch.qo_indptr, *batch.tables()[:2], int32(*KV_LENS), 4, 2, 64, 64, 5),
            {"causal": True, **dtypes},
        )
    elif what == "paged":
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"))
        tables, options = (batch.qo_indptr, *batch.tables(), *batch.shape, 5), {"causal": True}
    else:
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(1, workspace("cpu"))
        tables, options = (
            ([batch.qo_indptr], *([x] for x in batch.tables()), *batch.shape, 5),
            {"causal": True},
        )
    wrapper.plan(*tables, sm_scale=torch.tensor(SCALES), **options)
    check(wrapper.run(batch.q, *kv), with_scales(batch, SCALES))
    for count in (0, 2, 3, 5):
        with pytest.raises(
            ValueError,
            match=r"sm_scale is .*, must be a number, or a tensor of one element, or of one for each "
            r"request: 4",
        ):
            wrapper.plan(*tables, sm_scale=torch.full((count,), 0.1), **options)


@pytest.mark.parametrize("read_by_kernels", [False, True])
@pytest.mark.parametrize("k_scale", [None, 0.5, torch.tensor([0.5])])
@pytest.mark.parametrize("q_scale", [None, 2.0, torch.tensor([3.0])])
@pytest.mark.parametrize("sm_scale", [0.1, torch.tensor([0.1]), torch.tensor(SCALES)])
def test_scales_multiply(
    sm_scale: float | Tensor,
    q_scale: float | Tensor | None,
    k_scale: float | Tensor | None,
    read_by_kernels: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Numbers and tensors in any combination: none overrides another. read_by_kernels: like tensors on a GPU,
    which the host does not read.
    """
    if read_by_kernels:
        for module in (scales_module, wrapper_module):
            monkeypatch.setattr(module, "is_number", lambda scale: not isinstance(scale, Tensor))
    batch = make_batch([1] * 4, KV_LENS)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    wrapper.plan(*batch.tables(), *batch.shape, 5, sm_scale=sm_scale)
    others = (1.0 if q_scale is None else float(q_scale)) * (1.0 if k_scale is None else float(k_scale))
    scales = torch.as_tensor(sm_scale).expand(4) * others
    check(
        wrapper.run(batch.q, batch.cache, q_scale=q_scale, k_scale=k_scale),
        with_scales(batch, scales.tolist()),
    )


def test_scales_that_forward_and_single_calls_are_given() -> None:
    batch = make_batch([1] * 4, KV_LENS)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    decode.plan(*batch.tables(), *batch.shape, 5)
    check(decode.forward(batch.q, batch.cache, sm_scale=torch.tensor(SCALES)), with_scales(batch, SCALES))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"sm_scale is .*, or of one for each request: 4"):
        decode.forward(batch.q, batch.cache, sm_scale=torch.tensor(SCALES[:3]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"sm_scale is .*, or of one for each request: 1"):
        flashinfer.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, sm_scale=torch.tensor(SCALES))


def test_mla_indptrs_from_elsewhere() -> None:
    torch.manual_seed(0)
    cache, q = torch.randn(8, 4, 576).bfloat16(), torch.randn(5, 16, 576).bfloat16()
    requests = ((slice(2, 3), [3], 3), (slice(3, 5), [1, 2], 7))
    tables = int32(2, 3, 5), int32(1, 2, 4), int32(7, 3, 1, 2), int32(3, 7)
    options = 16, 512, 64, 4, False, 192**-0.5, torch.bfloat16, torch.bfloat16
    parts = *q.split([512, 64], -1), *cache.split([512, 64], -1)
    buffers = (
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(6, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
    )
    for graph in ((), (True, *buffers)):
        wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace("cpu"), *graph)
        wrapper.plan(*tables, *options)
        found, lse = wrapper.run(*parts, return_lse=True)
        for rows, pages, length in requests:
            row = cache[pages].reshape(-1, 576)[:length]
            check(
                (found[rows], lse[rows]),
                attention(q[rows], row[:, None], row[:, None, :512], sm_scale=192**-0.5),
                2e-2,
            )
        assert not found[:2].any()
        with pytest.raises(
            ValueError, match=r"q_nope\.shape\[0\] is 4, must be qo_indptr\[-1\] = 5, as planned"
        ):
            wrapper.run(*(part[:4] for part in parts[:2]), *parts[2:])
    with pytest.raises(
        ValueError, match=r"qo_indptr\[0\] is 0, must be 2, as in the first plan, with use_cuda_graph=True"
    ):
        wrapper.plan(int32(0, 1, 3), *tables[1:], *options)


@pytest.mark.parametrize("use_cuda_graph", [False, True])
def test_cascade_indptrs_from_elsewhere(use_cuda_graph: bool) -> None:
    levels = Levels([3, 1, 2, 2], KV_LENS)
    expected = levels.expected()
    q = torch.cat((torch.zeros_like(levels.own.q[:2]), levels.own.q))
    buffers = levels.buffers() if use_cuda_graph else []
    cascade = flashinfer.MultiLevelCascadeAttentionWrapper(
        2, workspace("cpu"), "NHD", use_cuda_graph, *buffers
    )
    indptrs, indices, lengths = levels.tables
    tables = [indptrs[0], indptrs[1] + 2], [indices[0], torch.cat((int32(0, 0), indices[1]))], lengths
    cascade.plan([indptr + 2 for indptr in levels.qo_indptrs], *tables, *levels.own.shape, 5)
    out = cascade.run(q, levels.cache)
    check(out[2:], (expected, torch.empty(0)))
    assert not out[:2].any()
    with pytest.raises(
        ValueError, match=r"qo_indptr_arr\[0\]\[0\] is 0, must be 2, where the last level starts"
    ):
        cascade.plan([levels.qo_indptrs[0], levels.qo_indptrs[1] + 2], *tables, *levels.own.shape, 5)


@pytest.mark.parametrize("has_mask", [False, True])
def test_block_indptrs_from_elsewhere(has_mask: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, heads, 64).half() for n, heads in ((6, 4), (16, 2), (16, 2)))
    blocks = torch.rand(3, 3, 4) < 0.7
    blocks[:, :, 0] = True
    plans = (
        (int32(0, 2, 3), int32(0, 2, 3), blocks),
        (int32(1, 3, 4), int32(3, 0, 2, 3), torch.cat((blocks[:1], blocks))),
    )
    outs = []
    for indptr, indices, mask in plans:
        wrapper = flashinfer.BlockSparseAttentionWrapper(workspace("cpu"))
        wrapper.plan(indptr, indices, 6, 16, 3, 4, 4, 2, 64, mask=mask if has_mask else None)
        outs.append(wrapper.run(q, k, v))
    assert torch.equal(*outs)
    if not has_mask:
        check(outs[0][:3], attention(q[:3], *(torch.cat((x[:4], x[8:12])) for x in (k, v))))
        check(outs[0][3:], attention(q[3:], k[12:], v[12:]))


def test_page_tables_from_elsewhere_with_buffers() -> None:
    """Same results as without: entries before the first one belong to no request."""
    batch = make_batch([1] * 4, KV_LENS)
    tables = [torch.zeros_like(x) for x in batch.tables()]
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), "NHD", True, False, *tables)
    decode.plan(*from_entry_two(batch), *batch.shape, 5)
    check(decode.run(batch.q, batch.cache), batch.expected(causal=True))
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace("cpu"), "NHD", True, torch.zeros_like(batch.qo_indptr), *tables
    )
    prefill.plan(batch.qo_indptr, *from_entry_two(batch), *batch.shape, 5, causal=True)
    check(prefill.run(batch.q, batch.cache), batch.expected(causal=True))
    with pytest.raises(
        ValueError, match=r"qo_indptr\[0\] is 1, must be 0, as in the first plan, with use_cuda_graph=True"
    ):
        prefill.plan(batch.qo_indptr + 1, *batch.tables(), *batch.shape, 5)


def test_cascade_plans_of_other_lengths_than_the_buffers() -> None:
    """A shorter plan would leave the tail of the previous plan."""
    levels = Levels([1] * 4, KV_LENS)
    buffers = levels.buffers()
    cascade = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace("cpu"), "NHD", True, *buffers)
    cascade.plan(levels.qo_indptrs, *levels.tables, *levels.own.shape, 5)
    fewer = Levels([1] * 3, KV_LENS[:3])
    for i, name in ((0, "qo_indptr_arr"), (1, "paged_kv_indptr_arr"), (3, "paged_kv_last_page_len")):
        arrays = [levels.qo_indptrs, *levels.tables]
        arrays[i] = [arrays[i][0], arrays[i][1][:-1]]
        with pytest.raises(
            ValueError,
            match=rf"len\({name}\[1\]\) is {len(arrays[i][1])}, must be {len(arrays[i][1]) + 1}, that of its "
            rf"buffer, with use_cuda",
        ):
            cascade.plan(*arrays, *levels.own.shape, 5)
    with pytest.raises(ValueError, match=r"len\(qo_indptr_arr\[1\]\) is 4, must be 5"):
        cascade.plan(fewer.qo_indptrs, *fewer.tables, *fewer.own.shape, 5)
    assert torch.equal(buffers[0][0], levels.qo_indptrs[0])  # nothing was copied
    more = [levels.tables[1][0], torch.cat((levels.tables[1][1], int32(0)))]
    with pytest.raises(
        ValueError, match=r"len\(paged_kv_indices_arr\[1\]\) is 15, must be at most 14, that of its buffer"
    ):
        cascade.plan(levels.qo_indptrs, levels.tables[0], more, levels.tables[2], *levels.own.shape, 5)
    shorter = Levels([1] * 4, [7, 1, 33, 4])  # fewer pages
    cascade.plan(shorter.qo_indptrs, *shorter.tables, *shorter.own.shape, 5)
    check(cascade.run(shorter.own.q, shorter.cache), (shorter.expected(), torch.empty(0)))


def test_options_that_would_be_dropped() -> None:
    batch = make_batch([6], [6])
    items = {
        "token_pos_in_items_ptr": torch.tensor([0, 1, 2, 0, 1, 0], dtype=torch.uint16),
        "token_pos_in_items_len": 6,
    }
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"))
    with pytest.raises(
        ValueError, match=r"token_pos_in_items_ptr is .*, must be None without prefix_len_ptr"
    ):
        ragged.plan(batch.qo_indptr, batch.kv_indptr, *batch.shape, causal=True, **items)
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"))
    with pytest.raises(
        ValueError, match=r"token_pos_in_items_ptr is .*, must be None without prefix_len_ptr"
    ):
        paged.plan(batch.qo_indptr, *batch.tables(), *batch.shape, 5, causal=True, **items)
    prefix = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace("cpu"))
    prefix.begin_forward(batch.qo_indptr, *batch.tables(), *batch.shape, 5)
    plain = prefix.forward(batch.q, batch.k, batch.v, batch.cache)
    assert torch.equal(
        prefix.forward(batch.q, batch.k, batch.v, batch.cache, rope_scale=1.0, rope_theta=1e4), plain
    )
    with pytest.raises(
        ValueError, match=r"rope_scale is 4\.0, must be None or 1: Q and K are not rotated here"
    ):
        prefix.forward(batch.q, batch.k, batch.v, batch.cache, rope_scale=4.0)
    with pytest.raises(ValueError, match=r"rope_theta is 500000\.0, must be None or 10000"):
        prefix.forward(batch.q, batch.k, batch.v, batch.cache, rope_theta=5e5)


def test_refused_arguments() -> None:
    batch, given = make_batch([1] * 4, KV_LENS), torch.zeros(5, dtype=torch.int32)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"))
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"))
    mixed = flashinfer.BatchAttention("NHD", "cpu")
    sparse = flashinfer.BlockSparseAttentionWrapper(workspace("cpu"))
    of_mixed = batch.qo_indptr, *batch.tables()[:2], int32(*KV_LENS), 4, 2, 64, 64, 5
    calls = (
        (decode.plan, (*batch.tables(), *batch.shape, 5), {"window_right": 1}),
        (
            ragged.plan,
            (batch.qo_indptr, batch.kv_indptr, *batch.shape),
            {"v_indptr": given, "o_indptr": given},
        ),
        (sparse.plan, (int32(0, 1), int32(0), 4, 5, 4, 5, 4, 2, 64), {"block_mask": given}),
        (mixed.plan, of_mixed, {"use_profiler": True}),
        (mixed.run, (batch.q, batch.cache), {"profiler_buffer": given, "kv_cache_sf": given}),
        (
            paged.run,
            (batch.q, batch.cache),
            {"kv_cache_sf": given, "skip_softmax_threshold_scale_factor": 1.0, "uses_spcompress": True},
        ),
        (
            decode.run,
            (batch.q, batch.cache),
            {"kv_cache_sf": given, "skip_softmax_threshold_scale_factor": 1.0},
        ),
        (ragged.run, (batch.q, batch.k, batch.v), {"kv_cache_sf": given}),
    )
    for call, arguments, options in calls:
        for name, value in options.items():
            with pytest.raises(NotImplementedError, match=name):
                call(*arguments, **{name: value})  # type: ignore[operator]


def test_arguments_that_are_accepted_and_not_used() -> None:
    batch, given = make_batch([1] * 4, KV_LENS), int32(*KV_LENS)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    decode.plan(
        *batch.tables(),
        *batch.shape,
        5,
        block_tables=given[:, None],
        seq_lens=given + 3,
        rope_scale=3.0,
        rope_theta=7.0,
    )
    check(decode.run(batch.q, batch.cache), batch.expected(causal=True))
    ignored: dict[str, Any] = {
        "seq_lens": given,
        "seq_lens_q": given,
        "max_token_per_sequence": 1,
        "max_sequence_kv": 1,
        "max_item_len_ptr": given,
    }
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace("cpu"), jit_kwargs={"pos_encoding_mode": 2}
    )
    paged.plan(batch.qo_indptr, *batch.tables(), *batch.shape, 5, block_tables=given[:, None], **ignored)
    check(paged.run(batch.q, batch.cache, use_fp16_softmax=True), batch.expected())
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        workspace("cpu"), jit_kwargs={"pos_encoding_mode": 2}
    )
    ragged.plan(batch.qo_indptr, batch.kv_indptr, *batch.shape, **ignored)
    check(ragged.run(batch.q, batch.k, batch.v), batch.expected())
    pod = flashinfer.PODWithPagedKVCacheWrapper(workspace("cpu"))
    pod.plan(*batch.tables(), *batch.shape, 5)
    of_d: dict[str, Any] = {
        "causal_d": True,
        "kv_layout_d": "HND",
        "pos_encoding_mode_d": "ALIBI",
        "sm_scale_d": 9.0,
        "window_left_d": 0,
    }
    out_p, out_d = pod.run(
        batch.q,
        batch.k,
        batch.v,
        batch.q,
        batch.cache,
        **of_d,
        rope_scale_d=2.0,
        rope_theta_d=2.0,
        return_lse_p=True,
        return_lse_d=True,
    )
    check(out_p, attention(batch.q, batch.k, batch.v))
    check(out_d, batch.expected(causal=True))
