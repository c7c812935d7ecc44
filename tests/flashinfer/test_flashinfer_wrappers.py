"""attn_backend.flashinfer: cascades, merging, page tables, BatchAttention, POD and block-sparse wrappers."""

from __future__ import annotations

import pytest
import torch
from flashinfer_oracle import DEVICES, attention, check, make_batch, workspace

from attn_backend import flashinfer
from attn_backend.flashinfer.triton.cascade import variable_length_merge_states

Q_LENS, KV_LENS = [3, 1, 17, 2], [7, 1, 33, 20]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("use_cuda_graph", [False, True])
def test_cascade_of_two_levels(device: str, use_cuda_graph: bool) -> None:
    own, shared = (
        make_batch(Q_LENS, KV_LENS, device=device),
        make_batch([sum(Q_LENS)], [11], device=device, seed=1),
    )
    cache = torch.cat((own.cache, shared.cache))
    qo_indptrs = [shared.qo_indptr, own.qo_indptr]
    tables = [
        [shared.page_indptr, own.page_indptr],
        [shared.page_indices + len(own.cache), own.page_indices],
        [shared.last_page_len, own.last_page_len],
    ]
    buffers = (
        [[torch.zeros_like(tensor) for tensor in tensors] for tensors in (qo_indptrs, *tables)]
        if use_cuda_graph
        else []
    )
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(
        2, workspace(device), "NHD", use_cuda_graph, *buffers
    )
    wrapper.plan(qo_indptrs, *tables, *own.shape, 5, causal=True)
    parts = []
    for i in range(len(Q_LENS)):
        rows, tokens = (slice(int(x[i]), int(x[i + 1])) for x in (own.qo_indptr, own.kv_indptr))
        k, v = torch.cat((shared.k, own.k[tokens])), torch.cat((shared.v, own.v[tokens]))
        parts.append(attention(own.q[rows], k, v, causal=True)[0])
    check(wrapper.run(own.q, cache), (torch.cat(parts), torch.empty(0)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sm_scale", [None, 0.3])
def test_prefix_in_tensors_of_its_own(sm_scale: float | None, device: str) -> None:
    for q_lens, causal in (([1] * 4, True), (Q_LENS, True), (Q_LENS, False)):
        own, shared = make_batch(q_lens, KV_LENS, device=device), make_batch([1], [11], device=device, seed=1)
        parts = []
        for i in range(len(q_lens)):
            rows, tokens = (slice(int(x[i]), int(x[i + 1])) for x in (own.qo_indptr, own.kv_indptr))
            mask = torch.ones(q_lens[i], 11 + KV_LENS[i], dtype=torch.bool)
            if causal:
                mask[:, 11:] = torch.tril(mask[:, 11:], diagonal=KV_LENS[i] - q_lens[i])
            kv = torch.cat((shared.k, own.k[tokens])), torch.cat((shared.v, own.v[tokens]))
            parts.append(attention(own.q[rows], *kv, mask=mask, sm_scale=sm_scale)[0])
        if q_lens == [1] * 4 and sm_scale is None:
            decode = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(device))
            decode.begin_forward(*own.tables(), *own.shape, 5)
            check(decode.forward(own.q, shared.k, shared.v, own.cache), (torch.cat(parts), torch.empty(0)))
        prefill = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace(device))
        prefill.begin_forward(own.qo_indptr, *own.tables(), *own.shape, 5)
        check(
            prefill.forward(own.q, shared.k, shared.v, own.cache, causal=causal, sm_scale=sm_scale),
            (torch.cat(parts), torch.empty(0)),
        )


@pytest.mark.parametrize("device", DEVICES)
def test_merging_halves_is_attention_to_all(device: str) -> None:
    batch = make_batch([5], [40], device=device)
    halves = [
        flashinfer.single_prefill_with_kv_cache_return_lse(batch.q, batch.k[part], batch.v[part])
        for part in (slice(0, 13), slice(13, 40))
    ]
    (v_a, s_a), (v_b, s_b) = halves
    expected = batch.expected()
    check(flashinfer.merge_state(v_a, s_a, v_b, s_b), expected)
    stacked = torch.stack((v_a, v_b), 1), torch.stack((s_a, s_b), 1)
    check(flashinfer.merge_states(*stacked), expected)
    indptr = torch.arange(0, 12, 2, dtype=torch.int32, device=device)
    check(variable_length_merge_states(stacked[0].flatten(0, 1), stacked[1].flatten(0, 1), indptr), expected)
    mask = torch.tensor([1, 0, 1, 1, 0], dtype=torch.bool, device=device)
    v, s = v_a.clone(), s_a.clone()
    flashinfer.merge_state_in_place(v, s, v_b, s_b, mask)
    check((v[mask], s[mask]), (expected[0][mask.cpu()], expected[1][mask.cpu()]))
    assert torch.equal(v[~mask], v_a[~mask])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_new_tokens_of_a_page_table(device: str, kv_layout: str) -> None:
    batch = make_batch([1] * 4, KV_LENS, device=device)
    seq_lens = flashinfer.get_seq_lens(batch.page_indptr, batch.last_page_len, 5)
    assert seq_lens.tolist() == KV_LENS
    new = [2, 0, 7, 1]
    indptr = torch.tensor([0, 2, 2, 9, 10], dtype=torch.int32, device=device)
    requests, positions = flashinfer.get_batch_indices_positions(indptr, seq_lens, 12)
    assert requests.tolist() == [0, 0, *[2] * 7, 3, -1, -1]
    assert positions.tolist() == [5, 6, *range(26, 33), 19, 0, 0]
    outs = (
        torch.empty(12, dtype=torch.int32, device=device),
        torch.empty(12, dtype=torch.int32, device=device),
    )
    assert flashinfer.get_batch_indices_positions(indptr, seq_lens, 12, *outs)[0] is outs[0]
    assert torch.equal(outs[1], positions)
    last = torch.cat(
        [
            torch.arange(int(end) - count, int(end))
            for end, count in zip(batch.kv_indptr[1:].tolist(), new, strict=True)
        ]
    ).to(device)
    padded = torch.cat((last, last[:2]))  # the last two belong to no request
    wanted = batch.paged(kv_layout)
    cache = batch.cache.clone()
    for token, request, position in zip(range(10), requests.tolist(), positions.tolist(), strict=False):
        page = int(batch.page_indices[int(batch.page_indptr[request]) + position // 5])
        cache[page, :, position % 5] = token  # to be overwritten
    cache = cache if kv_layout == "NHD" else cache.transpose(2, 3).contiguous()
    flashinfer.append_paged_kv_cache(
        batch.k[padded],
        batch.v[padded],
        requests,
        positions,
        cache,
        batch.page_indices,
        batch.page_indptr,
        batch.last_page_len,
        kv_layout,
    )
    assert torch.equal(cache, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_batch_attention(device: str) -> None:
    batch = make_batch(Q_LENS, KV_LENS, device=device, dtype=torch.bfloat16)
    wrapper = flashinfer.BatchAttention("NHD", device)
    kv_lens = torch.tensor(KV_LENS, dtype=torch.int32, device=device)
    wrapper.plan(
        batch.qo_indptr,
        batch.page_indptr,
        batch.page_indices,
        kv_lens,
        4,
        2,
        64,
        64,
        5,
        causal=True,
        logits_soft_cap=6.0,
    )
    check(
        wrapper.run(batch.q, batch.cache, logits_soft_cap=6.0),
        batch.expected(causal=True, soft_cap=6.0),
        2e-2,
    )
    with pytest.raises(ValueError, match=r"logits_soft_cap is 5\.0, must be 0, or that of the plan: 6\.0"):
        wrapper.run(batch.q, batch.cache, logits_soft_cap=5.0)


@pytest.mark.parametrize("device", DEVICES)
def test_prefill_and_decodes(device: str) -> None:
    prompt, decodes = (
        make_batch([9], [30], device=device),
        make_batch([1] * 4, KV_LENS, device=device, seed=1),
    )
    pod = flashinfer.PODWithPagedKVCacheWrapper(workspace(device))
    pod.plan(*decodes.tables(), *decodes.shape, 5)
    out_p, out_d = pod.run(prompt.q, prompt.k, prompt.v, decodes.q, decodes.cache, causal_p=True)
    check(out_p, prompt.expected(causal=True))
    check(out_d, decodes.expected(causal=True))
    both = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace(device))
    both.plan(prompt.qo_indptr, *prompt.tables(), decodes.qo_indptr, *decodes.tables(), *decodes.shape, 5)
    (out_p, out_d), (lse_p, lse_d) = both.run(
        prompt.q, prompt.cache, decodes.q, decodes.cache, causal_p=True, return_lse=True
    )
    check((out_p, lse_p), prompt.expected(causal=True))
    check((out_d, lse_d), decodes.expected(causal=True))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    "options", [{"window_left": 4}, {"sm_scale": 0.3}, {"causal": True, "window_left": 4, "sm_scale": 0.3}]
)
def test_options_of_a_prefill_next_to_decodes(options: dict[str, float], kv_layout: str) -> None:
    """Each option of the prefill takes effect and does not change the decodes."""
    prompt, decodes = make_batch([9], [30]), make_batch([1] * 4, KV_LENS, seed=1)
    pod = flashinfer.PODWithPagedKVCacheWrapper(workspace("cpu"))
    pod.plan(*decodes.tables(), *decodes.shape, 5)
    k, v = (x if kv_layout == "NHD" else x.transpose(0, 1).contiguous() for x in (prompt.k, prompt.v))
    of_prefill = {f"{name}_p": value for name, value in (options | {"kv_layout": kv_layout}).items()}
    out_p, out_d = pod.run(prompt.q, k, v, decodes.q, decodes.cache, **of_prefill)
    check(out_p, prompt.expected(**options))
    check(out_d, decodes.expected(causal=True))


def test_rope_and_masks_of_prefills_and_decodes() -> None:
    prompt, decodes = make_batch([9], [30]), make_batch([1] * 4, KV_LENS, seed=1)
    pod = flashinfer.PODWithPagedKVCacheWrapper(workspace("cpu"))
    pod.plan(
        *decodes.tables(), *decodes.shape, 5, pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0, rope_theta=5e3
    )
    rope_p = {"pos_encoding_mode_p": "ROPE_LLAMA", "rope_scale_p": 4.0, "rope_theta_p": 3e3}
    out_p, out_d = pod.run(prompt.q, prompt.k, prompt.v, decodes.q, decodes.cache, causal_p=True, **rope_p)
    check(out_p, prompt.expected(causal=True, rope=(4.0, 3e3)))
    check(out_d, decodes.expected(causal=True, rope=(2.0, 5e3)))
    both = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace("cpu"))
    tables = prompt.qo_indptr, *prompt.tables(), decodes.qo_indptr, *decodes.tables()
    both.plan(*tables, *decodes.shape, 5, pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0, rope_theta=5e3)
    mask = torch.rand(9, 30) < 0.6
    mask[:, 0] = True
    for custom_mask in (None, mask, None):
        out_p, out_d = both.run(
            prompt.q,
            prompt.cache,
            decodes.q,
            decodes.cache,
            None if custom_mask is None else custom_mask.flatten(),
            causal_p=True,
        )
        check(out_p, prompt.expected(causal=True, masks=[custom_mask], rope=(2.0, 5e3)))
        check(out_d, decodes.expected(causal=True, rope=(2.0, 5e3)))


@pytest.mark.parametrize("device", DEVICES)
def test_windows_of_a_cascade(device: str) -> None:
    """Each level has a separate window, as in FlashInfer: two wrappers with this window, whose states are
    merged."""
    shared, unique = make_batch([6], [40], device=device), make_batch([2, 4], [9, 30], device=device)
    cache = torch.cat((shared.cache, unique.cache))
    indices = unique.page_indices + len(shared.cache)
    cascade = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device))
    lengths = [shared.last_page_len, unique.last_page_len]
    arrays = (
        [shared.qo_indptr, unique.qo_indptr],
        [shared.page_indptr, unique.page_indptr],
        [shared.page_indices, indices],
        lengths,
    )
    cascade.plan(*arrays, *unique.shape, 5, causal=True, window_left=12)
    states = []
    for qo_indptr, indptr, own, last, causal in zip(*arrays, (False, True), strict=True):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
        wrapper.plan(qo_indptr, indptr, own, last, *unique.shape, 5, causal=causal, window_left=12)
        states += wrapper.run(unique.q, cache, return_lse=True)
    expected, _ = flashinfer.merge_state(*states)
    torch.testing.assert_close(cascade.run(unique.q, cache), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["plain", "mask", "causal"])
@pytest.mark.parametrize("M", [24, 23, 21])
def test_block_sparse(M: int, kind: str, device: str) -> None:
    """Also if M is not a multiple of R: the last row of blocks then has fewer rows. causal: among the tokens
    of the row's blocks.
    """
    torch.manual_seed(0)
    N, R, C, block_rows = 40, 4, 5, 6
    q, k, v = (torch.randn(n, heads, 64).half() for n, heads in ((M, 4), (N, 2), (N, 2)))
    seen = torch.rand(block_rows, N // C) < 0.4
    seen[2] = False
    seen[-1, 1] = True
    indptr = torch.cat((torch.zeros(1, dtype=torch.int64), seen.sum(1).cumsum(0))).to(torch.int32)
    indices = seen.nonzero()[:, 1].to(torch.int32)
    blocks = (
        torch.rand(len(indices), R, C) < 0.7
        if kind == "mask"
        else torch.ones(len(indices), R, C, dtype=torch.bool)
    )
    mask = torch.zeros(block_rows, N // C, R, C, dtype=torch.bool)
    mask[seen] = blocks
    mask = mask.transpose(1, 2).reshape(-1, N)[:M]
    if kind == "causal":  # the last len(rows) tokens of a row of blocks are at its rows
        for rows in mask.split(R):
            rows.logical_and_(
                rows.cumsum(1) <= rows.sum(1, keepdim=True) - len(rows) + 1 + torch.arange(len(rows))[:, None]
            )
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    options = {"mask": blocks.to(device)} if kind == "mask" else {"causal": kind == "causal"}
    wrapper.plan(indptr.to(device), indices.to(device), M, N, R, C, 4, 2, 64, **options)  # type: ignore[arg-type]
    check(
        wrapper.run(q.to(device), k.to(device), v.to(device), return_lse=True), attention(q, k, v, mask=mask)
    )


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("difference", [-1, 1, 5])
def test_blocks_of_other_lengths_than_planned(difference: int, name: str) -> None:
    """More rows would keep uninitialized output; other tokens would lie elsewhere in a cache of all heads."""
    lengths = {"q": 7, "k": 10, "v": 10}
    blocks = flashinfer.BlockSparseAttentionWrapper(workspace("cpu"))
    blocks.plan(
        torch.tensor([0, 2, 3], dtype=torch.int32),
        torch.tensor([0, 1, 1], dtype=torch.int32),
        7,
        10,
        4,
        5,
        4,
        2,
        64,
    )
    sizes = (
        torch.tensor([[3, 4], [6, 1]], dtype=torch.int32),
        torch.tensor([[5, 5], [9, 1]], dtype=torch.int32),
    )
    variable = flashinfer.VariableBlockSparseAttentionWrapper(workspace("cpu"))
    variable.plan(torch.ones(2, 2, 2, dtype=torch.bool), *sizes, 4, 2, 64)
    other = lengths | {name: lengths[name] + difference}
    for wrapper, dim in ((blocks, 0), (variable, 1)):
        for of_call in (lengths, other):
            q, k, v = (
                torch.randn(length, heads, 64).half().movedim(0, dim)
                for length, heads in zip(of_call.values(), (4, 2, 2), strict=True)
            )
            if of_call is lengths:
                wrapper.run(q, k, v)
                continue
            with pytest.raises(
                ValueError,
                match=rf"{name}\.shape\[{dim}\] is {other[name]}, must be {lengths[name]}, as planned",
            ):
                wrapper.run(q, k, v)


def test_blocks_whose_heads_have_other_lengths() -> None:
    rows, columns = (
        torch.tensor([[3, 4], [6, 1]], dtype=torch.int32),
        torch.tensor([[5, 5], [9, 1]], dtype=torch.int32),
    )
    wrapper, seen = (
        flashinfer.VariableBlockSparseAttentionWrapper(workspace("cpu")),
        torch.ones(2, 2, 2, dtype=torch.bool),
    )
    for name, sizes in (("block_row_sz", (rows.tril(), columns)), ("block_col_sz", (rows, columns.tril()))):
        with pytest.raises(
            ValueError, match=rf"{name}\.sum\(-1\) is \[\d+, \d+\], must be the same for each KV head"
        ):
            wrapper.plan(seen, *sizes, 4, 2, 64)


def test_what_forward_of_blocks_would_ignore_is_refused() -> None:
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace("cpu"))
    wrapper.plan(
        torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0], dtype=torch.int32), 4, 5, 4, 5, 4, 2, 64
    )
    q, k, v = (torch.randn(n, heads, 64).half() for n, heads in ((4, 4), (5, 2), (5, 2)))
    assert torch.equal(wrapper.forward(q, k, v, logits_soft_cap=None), wrapper.run(q, k, v))
    with pytest.raises(NotImplementedError, match="the argument logits_soft_cap is not supported"):
        wrapper.forward(q, k, v, logits_soft_cap=1.0)
    with pytest.raises(NotImplementedError, match="pos_encoding_mode = 'ROPE_LLAMA'"):
        wrapper.forward(q, k, v, pos_encoding_mode="ROPE_LLAMA")
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        wrapper.forward(q, k, v, nonsense=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_of_any_size(device: str) -> None:
    torch.manual_seed(0)
    rows, columns = (
        torch.tensor([[3, 5, 2], [4, 1, 5]], dtype=torch.int32),
        torch.tensor([[7, 2, 6, 1], [1, 9, 3, 3]], dtype=torch.int32),
    )
    seen = torch.rand(2, 3, 4) < 0.6
    q, k, v = torch.randn(4, 10, 64).half(), torch.randn(2, 16, 64).half(), torch.randn(2, 16, 64).half()
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace(device))
    wrapper.plan(seen.to(device), rows.to(device), columns.to(device), 4, 2, 64)
    out, lse = wrapper.run(q.to(device), k.to(device), v.to(device), return_lse=True)
    for head in range(2):
        mask = seen[head].repeat_interleave(rows[head].long(), 0).repeat_interleave(columns[head].long(), 1)
        of_head = slice(2 * head, 2 * head + 2)
        expected = attention(
            q[of_head].transpose(0, 1), k[head].unsqueeze(1), v[head].unsqueeze(1), mask=mask
        )
        check((out[of_head].transpose(0, 1), lse[of_head].T), expected)
    given = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
    assert wrapper.run(q.to(device), k.to(device), v.to(device), *given) is given[0]
    assert torch.equal(given[0], out)
    assert torch.equal(given[1], lse)
