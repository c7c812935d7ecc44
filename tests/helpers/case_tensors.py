"""Tensors of a case.

Unused slots of the cache, padding rows of q and memory around every tensor are NaN; unused entries of page
tables are not valid pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import attention_kernels
import cases
import numpy
import oracle
import torch
from torch import Tensor

from attn_backend import Attention, BSRView, KVCache, PageTable

GARBAGE = (-1, -(2**31), 2**31 - 1, 10**6)


@dataclass
class Case:
    spec: cases.Spec
    device: torch.device
    q: Tensor  # [rows + padding rows, num_qo_heads, head_dim]
    k_slots: Tensor  # [slots, num_kv_heads, head_dim]: the content of the cache, slot by slot
    v_slots: Tensor  # [slots, num_kv_heads, head_dim_v]
    slots: list[Tensor]  # int64 [kv_len] for each request: the slots of its tokens
    kv: KVCache
    view: BSRView
    out: Tensor  # [rows + padding rows, num_qo_heads, head_dim_v], NaN
    lse: Tensor  # float32 [rows + padding rows, num_qo_heads], NaN

    @property
    def rows(self) -> int:
        return sum(self.spec.qo_lens)

    def attention(self, num_ctas: int | None = None, **changes: object) -> Attention:
        """An Attention object with some spare room. `changes`: other arguments of Attention."""
        spec = self.spec
        arguments: dict[str, object] = {
            "max_rows": self.rows + 1 + spec.seed % 5,
            "max_batch": len(spec.qo_lens) + 1 + spec.seed % 3,
            "kernel": attention_kernels.kernel_of(self.device, spec.seed // 2),
        }
        return Attention(
            spec.num_kv_heads * spec.group_size,
            spec.num_kv_heads,
            spec.head_dim,
            dtype=spec.dtype,
            device=self.device,
            num_ctas=spec.num_ctas if num_ctas is None else num_ctas,
            head_dim_v=spec.head_dim_v,
            **(arguments | changes),
        )

    def run(
        self, attention: Attention, out: Tensor | None = None, lse: Tensor | None = None, **options: Any
    ) -> Tensor:
        """options: of Attention.run."""
        given = {"sm_scale": self.spec.sm_scale, "logits_soft_cap": self.spec.logits_soft_cap, **options}
        return attention.run(self.q, self.kv, out=out, lse=lse, **given)

    def on_cpu(self) -> Case:
        """The fields that the oracle reads, on the CPU: for variants with CPU tensors.

        Results are the device's, unchanged.
        """
        return replace(
            self,
            q=self.q.cpu(),
            k_slots=self.k_slots.cpu(),
            v_slots=self.v_slots.cpu(),
            slots=[own.cpu() for own in self.slots],
        )

    def expected(self, **changes: Any) -> tuple[Tensor, Tensor]:
        """float64 o and lse of the batch's rows. changes: to the oracle's arguments."""
        spec = self.spec
        return oracle.paged_attention(
            self.q,
            self.k_slots,
            self.v_slots,
            list(spec.qo_lens),
            self.slots,
            sm_scale=spec.sm_scale,
            causal=spec.causal,
            window_left=spec.window_left,
            **{"logits_soft_cap": spec.logits_soft_cap, **changes},
        )


def build(spec: cases.Spec, device: torch.device | str) -> Case:
    device = torch.device(device)
    rng = numpy.random.default_rng(spec.seed + 10**6)
    generator = torch.Generator(device).manual_seed(spec.seed)
    pages = _allocate(spec, rng)
    slots = _slots(spec, pages)
    num_pages = _num_pages(spec, rng, pages)
    # The end of a ragged tensor, and slots that do not fill a page.
    num_slots = num_pages * spec.page_size
    used = torch.zeros(num_slots, dtype=torch.bool)
    for own in slots:
        used[own] = True
    used = used.to(device)

    def data(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float32, device=device, generator=generator).to(spec.dtype)

    k_slots = data(num_slots, spec.num_kv_heads, spec.head_dim).masked_fill_(~used[:, None, None], torch.nan)
    v_slots = data(num_slots, spec.num_kv_heads, spec.columns_of_v).masked_fill_(
        ~used[:, None, None], torch.nan
    )
    if spec.v_in_k:
        v_slots = k_slots[..., : spec.columns_of_v]
    rows = sum(spec.qo_lens)
    shape = (rows + spec.padding_rows, spec.num_kv_heads * spec.group_size, spec.head_dim)
    q = _placed(data(*shape), spec, rng)
    q[rows:] = torch.nan
    return Case(
        spec=spec,
        device=device,
        q=q,
        k_slots=k_slots,
        v_slots=v_slots,
        slots=[own.to(device) for own in slots],
        kv=_make_cache(spec, rng, k_slots, v_slots),
        view=_make_view(spec, rng, pages, device),
        out=_placed(
            torch.full((*shape[:2], spec.columns_of_v), torch.nan, dtype=spec.dtype, device=device), spec, rng
        ),
        lse=torch.full(shape[:2], torch.nan, dtype=torch.float32, device=device),
    )


def _allocate(spec: cases.Spec, rng: numpy.random.Generator) -> list[list[int]]:
    """The pages of each request: in shuffled runs, some shared; for a ragged tensor in order."""
    counts = [-(-kv_len // spec.page_size) for kv_len in spec.kv_lens]
    if spec.table_form == "ragged":
        starts = numpy.cumsum([0, *counts])
        return [list(range(start, start + count)) for start, count in zip(starts, counts, strict=False)]
    runs = numpy.split(numpy.arange(sum(counts) + 3), range(spec.run_pages, sum(counts) + 3, spec.run_pages))
    free = list(numpy.concatenate([runs[i] for i in rng.permutation(len(runs))])[::-1])
    pages: list[list[int]] = []
    for i, (count, kv_len) in enumerate(zip(counts, spec.kv_lens, strict=True)):
        own: list[int] = []
        if i > 0 and rng.random() < spec.sharing:
            other = int(rng.integers(i))
            full = min(kv_len, spec.kv_lens[other]) // spec.page_size  # whole pages that both requests fill
            own = pages[other][: int(rng.integers(full + 1))]
        pages.append(own + [int(free.pop()) for _ in range(count - len(own))])
    return pages


def _slots(spec: cases.Spec, pages: list[list[int]]) -> list[Tensor]:
    """The slot of every token of each request."""
    place = torch.arange(spec.page_size)
    return [
        (torch.tensor(own, dtype=torch.int64)[:, None] * spec.page_size + place).flatten()[:kv_len]
        for own, kv_len in zip(pages, spec.kv_lens, strict=True)
    ]


def _num_pages(spec: cases.Spec, rng: numpy.random.Generator, pages: list[list[int]]) -> int:
    """Pages of the cache: all that are used, and a few more."""
    return max((max(own) for own in pages if own), default=0) + 1 + int(rng.integers(3))


def _make_view(
    spec: cases.Spec, rng: numpy.random.Generator, pages: list[list[int]], device: torch.device
) -> BSRView:
    qo64, indptr64, last64, lens64, rows64 = spec.int64

    def index(values: list[int], is_int64: bool = False) -> Tensor:
        return torch.tensor(values, dtype=torch.int64 if is_int64 else torch.int32, device=device)

    def garbage(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32).copy_(torch.from_numpy(rng.choice(GARBAGE, size=shape)))

    def prefix_sum(lengths: list[int]) -> list[int]:
        return [0, *numpy.cumsum(lengths, dtype=int).tolist()]

    size, lens = spec.page_size, list(spec.kv_lens)
    if spec.table_form == "ragged":
        table = PageTable.ragged(index(prefix_sum(lens), indptr64))
    elif spec.table_form == "csr":
        indices = torch.cat(
            [torch.tensor([page for own in pages for page in own], dtype=torch.int32), garbage(3)]
        )
        # not read for a request without pages
        last = [(kv_len - 1) % size + 1 if kv_len else int(rng.choice([0, -7, 10**6])) for kv_len in lens]
        table = PageTable.csr(
            index(prefix_sum([len(own) for own in pages]), indptr64),
            indices.to(device),
            index(last, last64),
            size,
        )
    elif spec.table_form == "block_table":
        width = max((len(own) for own in pages), default=0) + int(rng.integers(3))
        block_table = garbage(len(pages), width + int(rng.integers(3)))
        for i, own in enumerate(pages):
            block_table[i, : len(own)] = torch.tensor(own, dtype=torch.int32)
        table = PageTable.block_table(block_table.to(device)[:, :width], index(lens, lens64), size)
    else:
        width = max(lens, default=0) + int(rng.integers(3))
        rows = rng.permutation(len(pages) + 3)[: len(pages)].tolist()
        req_to_token = garbage(len(pages) + 3, width + int(rng.integers(3)))
        for row, own, kv_len in zip(rows, _slots(spec, pages), lens, strict=True):
            req_to_token[row, :kv_len] = own.to(torch.int32)
        table = PageTable.token_slots(
            req_to_token.to(device)[:, :width], index(rows, rows64), index(lens, lens64), size
        )
    return BSRView(
        index(prefix_sum(list(spec.qo_lens)), qo64), table, causal=spec.causal, window_left=spec.window_left
    )


def _make_cache(spec: cases.Spec, rng: numpy.random.Generator, k_slots: Tensor, v_slots: Tensor) -> KVCache:
    """Stores K and V, given slot by slot, in the form that `spec` requests."""
    k = k_slots.unflatten(0, (-1, spec.page_size))  # [pages, page_size, heads, head_dim]
    v = v_slots.unflatten(0, (-1, spec.page_size))
    if spec.layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    if spec.v_in_k:
        placed = _placed(k, spec, rng)
        return KVCache.from_pair(placed, placed[..., : spec.columns_of_v], spec.layout)
    if spec.cache_form == "tensor":
        return KVCache.from_tensor(_placed(torch.stack([k, v], dim=1), spec, rng), spec.layout)
    if spec.cache_form == "pair":
        return KVCache.from_pair(_placed(k, spec, rng), _placed(v, spec, rng), spec.layout)
    if spec.cache_form == "packed":
        return KVCache.from_packed(_placed(torch.cat([k, v], dim=-1), spec, rng), spec.layout)
    if spec.cache_form == "ragged":
        return KVCache.from_ragged(_placed(k_slots, spec, rng), _placed(v_slots, spec, rng))
    num_incomplete = int(rng.integers(spec.page_size))  # slots at the end that do not form a page

    def placed(slots: Tensor) -> Tensor:
        return _placed(
            torch.cat([slots, slots.new_full((num_incomplete, *slots.shape[1:]), torch.nan)]), spec, rng
        )

    return KVCache.from_slots(placed(k_slots), placed(v_slots), spec.page_size)


def _placed(tensor: Tensor, spec: cases.Spec, rng: numpy.random.Generator) -> Tensor:
    """A copy of `tensor`. If the case is strided, it lies inside a larger tensor of NaN, with its dimensions
    except the last in any order.
    """
    if not spec.strided:
        return tensor.contiguous()
    aligned = tensor.is_cuda or spec.aligned
    before = [
        *rng.integers(0, 2, tensor.ndim - 1).tolist(),
        int(rng.choice([0, 8] if aligned else [0, 8, 3])),
    ]
    after = [*rng.integers(0, 2, tensor.ndim - 1).tolist(), int(rng.choice([0, 8] if aligned else [0, 8, 5]))]
    order = [*rng.permutation(tensor.ndim - 1).tolist(), tensor.ndim - 1]
    sizes = [b + size + a for b, size, a in zip(before, tensor.shape, after, strict=True)]
    room = torch.full([sizes[dim] for dim in order], torch.nan, dtype=tensor.dtype, device=tensor.device)
    place = room.permute([order.index(dim) for dim in range(tensor.ndim)])[
        tuple(slice(b, b + size) for b, size in zip(before, tensor.shape, strict=True))
    ]
    place.copy_(tensor)
    return place


def captured(case: Case, attention: Attention, variant_args: dict[str, Any]) -> torch.cuda.CUDAGraph:
    """A plan and a run of it into the case's output: done once, then captured."""

    def step() -> None:
        attention.plan(case.view, variant_args=variant_args)
        case.run(attention, out=case.out, lse=case.lse, variant_args=variant_args)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def check(
    case: Case,
    out: Tensor,
    lse: Tensor | None,
    expected: tuple[Tensor, Tensor] | None = None,
    tolerance: float | None = None,
    lse_tolerance: float = 0.0,
) -> None:
    """Compares with the oracle; rows of padding must still be NaN. expected: on any device. tolerance: for
    the output; None: its dtype's. lse_tolerance: if larger than the default.
    """
    tolerance = cases.TOLERANCE[case.spec.dtype] if tolerance is None else tolerance
    # prompts on Hopper: tanh.approx.f32 (tests/kernels/test_soft_cap.py)
    is_capped = case.spec.logits_soft_cap > 0 and out.is_cuda
    tolerance += 5e-3 * is_capped
    o_ref, lse_ref = (of.to(out.device) for of in (case.expected() if expected is None else expected))
    rows = case.rows
    error = out[:rows].double() - o_ref
    assert not error.isnan().any(), (
        f"{int(error.isnan().any(-1).sum())} rows of {error.shape[:2].numel()} hold NaN\n{case.spec}"
    )
    assert error.norm() <= tolerance * o_ref.norm(), (
        f"||o - ref|| / ||ref|| = {float(error.norm() / o_ref.norm()):.2e} > {tolerance}\n{case.spec}"
    )
    relative = error.norm(dim=-1) / o_ref.norm(dim=-1).clamp_min(1e-30)
    assert (relative <= 10 * tolerance).all(), (
        f"||o - ref|| / ||ref|| = {float(relative.max()):.2e} in one row > {10 * tolerance}\n{case.spec}"
    )
    if lse is None:
        return
    infinite = lse_ref == -torch.inf
    assert torch.equal(lse[:rows] == -torch.inf, infinite), (
        f"lse is -inf in other rows than it should be\n{case.spec}"
    )
    lse_error = (lse[:rows].double() - lse_ref).masked_fill(infinite, 0).abs()
    of_tanh = (lse_ref.masked_fill(infinite, 0).abs() + 10) * (2.0**-11 * is_capped)
    assert (lse_error <= of_tanh.clamp_min(max(cases.LSE_TOLERANCE, lse_tolerance))).all(), (
        f"lse is {float(lse_error.nan_to_num(torch.inf).max()):.2e} off\n{case.spec}"
    )


def check_padding(case: Case) -> None:
    """Rows of `case.out` and `case.lse` beyond the batch are still NaN."""
    assert case.out[case.rows :].isnan().all(), f"padding rows of out were written\n{case.spec}"
    assert case.lse[case.rows :].isnan().all(), f"padding rows of lse were written\n{case.spec}"
