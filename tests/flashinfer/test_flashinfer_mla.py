"""BatchMLAPagedAttentionWrapper and append_paged_mla_kv_cache: caches in one tensor and in two, several query
tokens, lse, graph buffers.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from flashinfer_oracle import DEVICES, attention, check, workspace
from torch import Tensor

from attn_backend import flashinfer
from attn_backend.jit import compilers

LATENT, ROPE = 512, 64
SCALE = 192**-0.5


@dataclass
class Batch:
    """Requests over latents. With `spare`, the page table has one page more than each request needs."""

    q: Tensor  # [rows, heads, 576]
    rows: list[Tensor]  # for each request: [tokens, 576]
    cache: Tensor  # [pages, page_size, 576]
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_lens: Tensor

    def plan(
        self,
        wrapper: flashinfer.BatchMLAPagedAttentionWrapper,
        causal: bool,
        sm_scale: Tensor | float = SCALE,
    ) -> None:
        tables = self.qo_indptr, self.kv_indptr, self.kv_indices, self.kv_lens
        width = self.q.shape[-1] - LATENT
        wrapper.plan(
            *tables,
            self.q.shape[1],
            LATENT,
            width,
            self.cache.shape[1],
            causal,
            sm_scale,
            self.q.dtype,
            self.cache.dtype,
        )

    def expected(self, causal: bool) -> tuple[Tensor, Tensor]:
        parts = []
        for i, row in enumerate(self.rows):
            q = self.q[int(self.qo_indptr[i]) : int(self.qo_indptr[i + 1])]
            parts.append(attention(q, row[:, None], row[:, None, :LATENT], causal=causal, sm_scale=SCALE))
        o, lse = zip(*parts, strict=True)
        return torch.cat(o), torch.cat(lse)


def make_batch(
    q_lens: list[int],
    kv_lens: list[int],
    *,
    page_size: int = 4,
    heads: int = 16,
    width: int = 576,
    spare: int = 0,
    device: str = "cpu",
) -> Batch:
    generator = torch.Generator().manual_seed(len(q_lens))
    pages = [-(-length // page_size) + spare for length in kv_lens]
    cache = torch.full((sum(pages) + 2, page_size, width), torch.nan, dtype=torch.bfloat16)
    indices = torch.randperm(sum(pages) + 2, generator=generator)[: sum(pages)].int()
    begin = torch.tensor([0, *pages]).cumsum(0)
    rows = []
    for i, length in enumerate(kv_lens):
        row = torch.randn(length, width, generator=generator).bfloat16()
        for token in range(length):
            cache[indices[begin[i] + token // page_size], token % page_size] = row[token]
        rows.append(row)
    q = torch.randn(sum(q_lens), heads, width, generator=generator).bfloat16()
    tensors = (
        torch.tensor([0, *q_lens]).cumsum(0).int(),
        begin.int(),
        indices,
        torch.tensor(kv_lens, dtype=torch.int32),
    )
    return Batch(q.to(device), rows, cache.to(device), *(tensor.to(device) for tensor in tensors))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("spare", [0, 1])
def test_parts_of_one_tensor(device: str, causal: bool, page_size: int, spare: int) -> None:
    batch = make_batch([1, 3, 1, 2], [9, 70, 0, 4], page_size=page_size, spare=spare, device=device)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device))
    batch.plan(wrapper, causal)
    parts = *batch.q.split([LATENT, ROPE], -1), *batch.cache.split([LATENT, ROPE], -1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = wrapper.run(*parts, return_lse=True)
    check(found, batch.expected(causal), 2e-2)
    natural = wrapper.run(*parts, return_lse=True, return_lse_base_on_e=True)[1]
    torch.testing.assert_close(natural, found[1] * 0.6931471805599453)
    out, lse = torch.full_like(found[0], torch.nan), torch.full_like(found[1], torch.nan)
    assert wrapper.run(*parts, out=out, lse=lse) is out
    assert torch.equal(out, found[0])
    assert torch.equal(lse, found[1])


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_that_lie_apart(device: str) -> None:
    batch = make_batch([1, 2], [9, 33], device=device)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device))
    batch.plan(wrapper, True)
    apart = [part.clone() for tensor in (batch.q, batch.cache) for part in tensor.split([LATENT, ROPE], -1)]
    with pytest.warns(UserWarning, match="ckv_cache and kpe_cache lie apart"):
        check(wrapper.run(*apart, return_lse=True), batch.expected(True), 2e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        wrapper.run(*apart)


@pytest.mark.parametrize("device", DEVICES)
def test_without_a_rotated_part(device: str) -> None:
    batch = make_batch([1, 2], [9, 33], width=LATENT, device=device)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device))
    batch.plan(wrapper, True)
    check(
        wrapper.run(batch.q, batch.q[..., :0], batch.cache, batch.cache[..., :0], return_lse=True),
        batch.expected(True),
        2e-2,
    )


@pytest.mark.parametrize("width", [LATENT + ROPE, LATENT])
@pytest.mark.parametrize("page_size", [1, 4])
def test_scales_of_requests_without_a_compiler(
    width: int, page_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales in a tensor are a variant, which is interpreted if nothing compiles it."""
    monkeypatch.setenv("ATTN_BACKEND_CACHE", str(tmp_path))
    monkeypatch.setattr(compilers, "cpp_compiler", lambda: None)
    batch = make_batch([1, 3], [9, 70], page_size=page_size, width=width)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace("cpu"))
    batch.plan(wrapper, True, torch.full((2,), SCALE))
    parts = *batch.q.split([LATENT, width - LATENT], -1), *batch.cache.split([LATENT, width - LATENT], -1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(wrapper.run(*parts, return_lse=True), batch.expected(True), 2e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_buffers_of_graphs(device: str) -> None:
    """A captured run finds the second plan in the buffers; on a GPU a graph is captured."""
    first, second = make_batch([1, 1], [5, 30], device=device), make_batch([1, 1], [40, 3], device=device)
    second.cache = torch.cat([second.cache, second.cache.new_zeros(first.cache.shape[0], 4, 576)])
    buffers = [torch.zeros(length, dtype=torch.int32, device=device) for length in (3, 3, 100, 2)]
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device), True, *buffers)
    first.plan(wrapper, False)
    addresses = [buffer.data_ptr() for buffer in buffers]
    parts = *second.q.split([LATENT, ROPE], -1), *second.cache.split([LATENT, ROPE], -1)
    if device == "cpu":
        second.plan(wrapper, False)
        found = wrapper.run(*parts, return_lse=True)
    else:
        wrapper.run(*parts)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = wrapper.run(*parts, return_lse=True)
        second.plan(wrapper, False)
        graph.replay()
    check(found, second.expected(False), 2e-2)
    assert addresses == [buffer.data_ptr() for buffer in buffers]
    assert buffers[3].tolist() == [40, 3]
    with pytest.raises(ValueError, match="batch_size is 3, must be 2"):
        make_batch([1, 1, 1], [4, 4, 4], device=device).plan(wrapper, False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("in_one", [True, False])
def test_caches_of_8_bits(device: str, dtype: torch.dtype, in_one: bool) -> None:
    batch = make_batch([1, 3], [9, 70], device=device)
    batch.cache = batch.cache.to(dtype)
    batch.rows = [row.to(dtype).double() * 0.5 for row in batch.rows]
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device))
    tables = batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_lens
    wrapper.plan(*tables, 16, LATENT, ROPE, 4, True, SCALE, torch.bfloat16, dtype)
    caches = batch.cache.split([LATENT, ROPE], -1)
    caches = caches if in_one else tuple(part.clone() for part in caches)
    parts = *batch.q.split([LATENT, ROPE], -1), *caches
    with warnings.catch_warnings():
        warnings.simplefilter("error" if in_one else "ignore")
        check(wrapper.run(*parts, return_lse=True, ckv_scale=0.5, kpe_scale=0.5), batch.expected(True), 2e-2)
    batch.rows = [torch.cat((row[:, :LATENT], row[:, LATENT:] * 4), -1) for row in batch.rows]
    with warnings.catch_warnings():
        warnings.simplefilter("error" if in_one else "ignore")
        check(wrapper.run(*parts, return_lse=True, ckv_scale=0.5, kpe_scale=2.0), batch.expected(True), 2e-2)
    with pytest.raises(ValueError, match=r"^\(ckv_scale, kpe_scale\) is \(0\.5, -1\.0\), must be above 0"):
        wrapper.run(*parts, ckv_scale=0.5, kpe_scale=-1.0)
    scales = {"ckv_scale": 1.0, "kpe_scale": 1.0}
    names = ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
    for name, other in zip(
        names, (torch.float16, torch.float16, torch.bfloat16, torch.bfloat16), strict=True
    ):
        wrong = [
            part.to(other) if name == of_part else part for part, of_part in zip(parts, names, strict=True)
        ]
        with pytest.raises(
            ValueError,
            match=rf"^{name}\.dtype is {other}, must be "
            rf"{dtype if name.endswith('cache') else torch.bfloat16}, as planned",
        ):
            wrapper.run(*wrong, **scales)
    array = {"ckv_scale_arr": torch.ones(*caches[0].shape[:2], 4, device=device)}
    for given in ({}, {"kpe_scale": 1.0}, scales | array):
        with pytest.raises(ValueError, match=r"^Exactly one of ckv_scale or ckv_scale_arr must be given"):
            wrapper.run(*parts, **given)
    with pytest.raises(ValueError, match=r"^kpe_scale is None, must be a number"):
        wrapper.run(*parts, ckv_scale=1.0)
    with pytest.raises(NotImplementedError, match="the argument ckv_scale_arr"):
        wrapper.run(*parts, kpe_scale=1.0, **array)


def test_engines_that_fill_the_buffers_themselves() -> None:
    """SGLang plans its CUDA graphs through the wrapper's compiled module."""
    first, second = make_batch([1, 1], [5, 30], page_size=1), make_batch([1, 1], [40, 3], page_size=1)
    buffers = [torch.zeros(length, dtype=torch.int32) for length in (3, 3, 100, 2)]
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace("cpu"), True, *buffers)
    assert wrapper._cached_module is None
    first.plan(wrapper, False)
    for buffer, tensor in zip(
        buffers, (second.qo_indptr, second.kv_indptr, second.kv_indices, second.kv_lens), strict=True
    ):
        buffer[: len(tensor)].copy_(tensor)
    module = wrapper._cached_module
    assert module is not None
    workspaces = (
        wrapper._float_workspace_buffer,
        wrapper._int_workspace_buffer,
        wrapper._pin_memory_int_workspace_buffer,
    )
    module.plan(*workspaces, second.qo_indptr, second.kv_indptr, second.kv_lens, 16, LATENT, False)
    found = wrapper.run(
        *second.q.split([LATENT, ROPE], -1), *second.cache.split([LATENT, ROPE], -1), return_lse=True
    )
    check(found, second.expected(False), 2e-2)
    with pytest.raises(ValueError, match=r"\(num_heads, head_dim_ckv\) is \(8, 512\), must be \(16, 512\)"):
        module.plan(*workspaces, second.qo_indptr, second.kv_indptr, second.kv_lens, 8, LATENT, False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("in_one", [False, True])
def test_append(device: str, in_one: bool) -> None:
    batch = make_batch([1, 2], [9, 33], device=device)
    ckv, kpe = (part if in_one else part.clone() for part in batch.cache.split([LATENT, ROPE], -1))
    requests = torch.tensor([1, 0, -1, 1], dtype=torch.int32, device=device)
    positions = torch.tensor([32, 4, 7, 0], dtype=torch.int32, device=device)
    new = torch.randn(4, 576, device=device).bfloat16()
    before = ckv.clone(), kpe.clone()
    flashinfer.append_paged_mla_kv_cache(
        *new.split([LATENT, ROPE], -1),
        requests,
        positions,
        ckv,
        kpe,
        batch.kv_indices,
        batch.kv_indptr,
        batch.kv_lens,
    )
    for i in (0, 1, 3):
        page = int(batch.kv_indices[int(batch.kv_indptr[int(requests[i])]) + int(positions[i]) // 4])
        place = page, int(positions[i]) % 4
        assert torch.equal(torch.cat([ckv[place], kpe[place]]), new[i])
        before[0][place], before[1][place] = new[i, :LATENT], new[i, LATENT:]
    for found, wanted in zip((ckv, kpe), before, strict=True):
        assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7))


def test_refuses() -> None:
    batch = make_batch([1], [9])
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace("cpu"))
    parts = *batch.q.split([LATENT, ROPE], -1), *batch.cache.split([LATENT, ROPE], -1)
    with pytest.raises(ValueError, match="successful plan"):
        wrapper.run(*parts)
    with pytest.raises(NotImplementedError, match="backend = 'cutlass'"):
        flashinfer.BatchMLAPagedAttentionWrapper(workspace("cpu"), backend="cutlass")
    with pytest.raises(ValueError, match=r"len\(kv_len_arr\) is 3, must be 2"):
        flashinfer.BatchMLAPagedAttentionWrapper(
            workspace("cpu"), True, *(torch.zeros(n, dtype=torch.int32) for n in (3, 3, 9, 3))
        )
    tables = batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_lens
    with pytest.raises(NotImplementedError, match=r"kv_data_type = torch\.float32"):
        wrapper.plan(*tables, 16, LATENT, ROPE, 4, True, SCALE, torch.bfloat16, torch.float32)
    with pytest.raises(NotImplementedError, match="head_dim"):
        wrapper.plan(*tables, 16, 1024, ROPE, 4, True, SCALE, torch.bfloat16, torch.bfloat16)
    batch.plan(wrapper, True)
    for name, wrong in (
        ("q_nope.dtype", (parts[0].half(), *parts[1:])),
        ("kpe_cache", (*parts[:3], parts[2])),
        ("q_nope", (parts[0][:0], *parts[1:])),
    ):
        with pytest.raises(ValueError, match=rf"^{name}(\.shape\[0\])? is .*, must be "):
            wrapper.run(*wrong)
    for name, scale in (("ckv_scale", 1.0), ("kpe_scale", 1.0), ("ckv_scale_arr", torch.ones(1))):
        with pytest.raises(
            ValueError,
            match=r"^\(ckv_scale, ckv_scale_arr, kpe_scale\) is .*, must be None where kv_data_type is "
            r"torch\.bfloat16",
        ):
            wrapper.run(*parts, **{name: scale})
    for option in ({"o_scale": 1.0}, {"profiler_buffer": parts[0]}):
        with pytest.raises(NotImplementedError, match=f"the argument {next(iter(option))}"):
            wrapper.run(*parts, **option)
