"""Decode and prefill of every head shape, of 512 over an 8-bit cache, too, and MLA: decode, over 8-bit latents, of selected tokens. Ours beside the peers that
import; one process, one GPU, cold L2, CUDA-graph replay, median.

python -m benchmarks.head_shapes [--case TEXT ...] [--peer NAME ...] [--q-parts] [--repeats N] [--json FILE] [--markdown FILE]

Kernels that are not in the package are compiled when their line begins.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from attn_backend import Attention, BSRView, KVCache, PageTable, append_mla_kv
from benchmarks.batches import LARGEST_ERROR
from benchmarks.lines import measure_lines
from benchmarks.peers import Run, time_of
from benchmarks.report import number, options, table
from benchmarks.timing import Machine, Timer

PEERS = ("FA3", "FlashMLA")
MLA = (576, 512)  # the latent and its rope part; values are the latent
KV_BYTES = {"bf16": 2, "e4m3": 1, "latent": 1}  # of an element; latent: rows with scales of their own
KV_DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "latent": torch.uint8}
CHECKED_ROWS = 16
KERNELS = ("hopper", "generic")


@dataclass(frozen=True)
class ShapeCase:
    """One line: bf16, causal, lengths in tokens.

    v_in_k: V is the first columns of K, in the same memory. kv: what the cache holds, of KV_BYTES. selects_from: each row attends to kv_len tokens of its own,
    anywhere among so many (sparse MLA); 0: to those of its request.
    """

    kind: str
    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    page_size: int = 16
    ragged: bool = False
    v_in_k: bool = False
    kv: str = "bf16"
    selects_from: int = 0

    @property
    def name(self) -> str:
        columns = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}/{self.head_dim_v}"
        form = "ragged" if self.ragged else f"p{self.page_size}"
        cache = "" if self.kv == "bf16" else f" {self.kv}"
        return f"{self.kind} bs{len(self.kv_lens)} {self.kv_lens[0]} {columns} h{self.num_qo_heads}/{self.num_kv_heads} {form}{cache}"

    @property
    def bytes(self) -> int:
        """K, V, Q and O once."""
        columns = self.head_dim + (0 if self.v_in_k else self.head_dim_v)
        row = 656 if self.kv == "latent" else columns * KV_BYTES[self.kv]
        tokens = min(sum(self.kv_lens), self.selects_from or sum(self.kv_lens))
        return tokens * self.num_kv_heads * row + 2 * sum(self.qo_lens) * self.num_qo_heads * (self.head_dim + self.head_dim_v)

    @property
    def flops(self) -> int:
        """Two products over the pairs that a causal mask leaves visible."""
        pairs = sum(q * kv - q * (q - 1) // 2 for q, kv in zip(self.qo_lens, self.kv_lens, strict=True))
        return 2 * pairs * self.num_qo_heads * (self.head_dim + self.head_dim_v)

    @property
    def sm_scale(self) -> float:
        """Of MLA: that of its heads before they are absorbed, 128 + 64 columns."""
        return 192**-0.5 if self.v_in_k else self.head_dim**-0.5


def decode(batch: int, tokens: int, qo: int, kv: int, head_dim: int, head_dim_v: int | None = None) -> ShapeCase:
    return ShapeCase("decode", (1,) * batch, (tokens,) * batch, qo, kv, head_dim, head_dim_v or head_dim)


def prefill(qo: int, kv: int, head_dim: int, head_dim_v: int | None = None, ragged: bool = False) -> ShapeCase:
    return ShapeCase("prefill", (4096,) * 4, (4096,) * 4, qo, kv, head_dim, head_dim_v or head_dim, ragged=ragged)


def all_cases() -> Iterator[ShapeCase]:
    for head_dim in (64, 80, 96, 112, 128, 192):
        yield decode(64, 4096, 32, 8, head_dim)
        yield prefill(32, 8, head_dim)
    yield decode(64, 4096, 16, 4, 256)
    yield prefill(16, 4, 256)
    yield decode(64, 4096, 16, 16, 192, 128)
    yield prefill(16, 16, 192, 128)
    yield prefill(16, 16, 192, 128, ragged=True)
    yield decode(64, 4096, 8, 2, 512)
    yield prefill(8, 2, 512)
    yield replace(decode(64, 4096, 8, 2, 512), kv="e4m3")
    yield replace(prefill(8, 2, 512), kv="e4m3")
    for heads in (16, 128):
        for batch, tokens in ((1, 4096), (16, 1024), (64, 4096), (128, 4096)):
            yield ShapeCase("MLA decode", (1,) * batch, (tokens,) * batch, heads, 1, *MLA, page_size=64, v_in_k=True)
        for kv in ("e4m3", "latent"):
            for batch, tokens in ((1, 4096), (64, 4096)):
                yield ShapeCase("MLA decode", (1,) * batch, (tokens,) * batch, heads, 1, *MLA, page_size=64, v_in_k=True, kv=kv)
    for kv in KV_BYTES:
        for rows in (64, 2048):
            yield ShapeCase("sparse MLA", (1,) * rows, (2048,) * rows, 128, 1, *MLA, page_size=1, v_in_k=True, kv=kv, selects_from=65536)


def stored(k: torch.Tensor, kv: str) -> torch.Tensor:
    """Of bf16 [pages, page_size, num_kv_heads, columns] what a cache holds."""
    if kv != "latent":
        return k.to(KV_DTYPES[kv])
    rows = torch.empty(*k.shape[:2], 656, dtype=torch.uint8, device=k.device)
    tokens = k.flatten(0, 2)
    append_mla_kv(tokens[:, : MLA[1]], tokens[:, MLA[1] :], KVCache.from_latent(rows), torch.arange(len(tokens), device=k.device))
    return rows.unsqueeze(2)


def numbers(rows: torch.Tensor, kv: str) -> torch.Tensor:
    """What rows [tokens, num_kv_heads, columns] of a cache stand for, in float64."""
    if kv != "latent":
        return rows.double()
    latent, scales, rope = (part.contiguous() for part in rows.split([512, 16, 128], -1))
    scaled = latent.view(torch.float8_e4m3fn).double() * scales.view(torch.float32).double().repeat_interleave(128, -1)
    return torch.cat([scaled, rope.view(torch.bfloat16).double()], -1)


@dataclass(frozen=True, eq=False)
class Tensors:
    """Random tensors of a case.

    q: bf16 [rows, num_qo_heads, head_dim]; k, v: [pages, page_size, num_kv_heads, columns], ragged [tokens, num_kv_heads, columns]; qo_indptr,
    kv_indptr: int32 [batch + 1]; kv_lens: int32 [batch]; block_table: int32 [batch, pages of a request], ragged [batch, 0]; selected tokens: their slots.
    """

    case: ShapeCase
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_lens: torch.Tensor
    block_table: torch.Tensor

    @classmethod
    def make(cls, case: ShapeCase, device: str = "cuda", seed: int = 0) -> Tensors:
        generator = torch.Generator(device).manual_seed(seed)

        def data(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)

        def indptr(lens: tuple[int, ...]) -> torch.Tensor:
            return torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32, device=device)

        batch = len(case.kv_lens)
        if case.ragged:
            shape, table = (sum(case.kv_lens),), torch.zeros(batch, 0, dtype=torch.int32, device=device)
        elif case.selects_from:
            shape = (case.selects_from, 1)  # type: ignore[assignment]
            table = torch.randint(case.selects_from, (batch, max(case.kv_lens)), device=device, generator=generator).int()
        else:
            pages = -(-max(case.kv_lens) // case.page_size)
            shape = (batch * pages, case.page_size)  # type: ignore[assignment]
            table = torch.randperm(batch * pages, device=device, generator=generator).int().view(batch, pages)
        k = stored(data(*shape, case.num_kv_heads, case.head_dim), case.kv)
        v = k[..., : case.head_dim_v] if case.v_in_k else stored(data(*shape, case.num_kv_heads, case.head_dim_v), case.kv)
        q = data(sum(case.qo_lens), case.num_qo_heads, case.head_dim)
        return cls(case, q, k, v, indptr(case.qo_lens), indptr(case.kv_lens), torch.tensor(case.kv_lens, dtype=torch.int32, device=device), table)

    @property
    def kv(self) -> KVCache:
        if self.case.v_in_k:
            return KVCache.from_latent(self.k.squeeze(2), self.case.head_dim_v)
        return KVCache.from_ragged(self.k, self.v) if self.case.ragged else KVCache.from_pair(self.k, self.v)

    @property
    def view(self) -> BSRView:
        if self.case.ragged:
            return BSRView(self.qo_indptr, PageTable.ragged(self.kv_indptr))
        if self.case.selects_from:
            return BSRView.selected(self.block_table)
        return BSRView(self.qo_indptr, PageTable.block_table(self.block_table, self.kv_lens, self.case.page_size))

    def tokens(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a request, as numbers: [kv_len, num_kv_heads, columns]."""
        if self.case.ragged:
            first, end = self.kv_indptr[request : request + 2].tolist()
            return self.k[first:end], self.v[first:end]
        pages = self.block_table[request].long()
        kv_len = self.case.kv_lens[request]
        k = numbers(self.k[pages].flatten(0, 1)[:kv_len], self.case.kv)
        return k, k[..., : self.case.head_dim_v] if self.case.v_in_k else numbers(self.v[pages].flatten(0, 1)[:kv_len], self.case.kv)

    def error(self, out: torch.Tensor) -> float:
        """‖o − ref‖ / ‖ref‖ of the last rows of the first and the last request, in float64."""
        case = self.case
        group = case.num_qo_heads // case.num_kv_heads
        difference = norm = 0.0
        for request in {0, len(case.kv_lens) - 1}:
            rows, end = min(case.qo_lens[request], CHECKED_ROWS), int(self.qo_indptr[request + 1])
            k, v = (tokens.double().repeat_interleave(group, 1) for tokens in self.tokens(request))
            logits = torch.einsum("rhd,thd->hrt", self.q[end - rows : end].double(), k) * case.sm_scale
            positions = torch.arange(len(k), device=k.device)
            logits = logits.masked_fill(positions[None, None] > positions[None, -rows:, None], float("-inf"))
            expected = torch.einsum("hrt,thd->rhd", logits.softmax(-1), v)
            difference += float((out[end - rows : end].double() - expected).square().sum())
            norm += float(expected.square().sum())
        return float((difference / norm) ** 0.5)


def parts_of_q(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As layers of MLA make them: the latent's columns out of a product of each head, the rotated ones behind those that it has taken."""
    latent = q[..., : MLA[1]].transpose(0, 1).contiguous().transpose(0, 1)
    projected = q.new_empty(*q.shape[:2], 192)
    projected[..., 128:] = q[..., MLA[1] :]
    return latent, projected[..., 128:]


def ours(tensors: Tensors, q_parts: bool = False, **changes: Any) -> tuple[Callable[[], None], Run]:
    """What plans, and what runs. q_parts: MLA's Q is two tensors. changes: to arguments of Attention."""
    case, view, kv = tensors.case, tensors.view, tensors.kv
    room: dict[str, Any] = {"max_rows": len(tensors.q), "max_batch": len(case.kv_lens), "device": tensors.q.device, "kv_dtype": KV_DTYPES[case.kv]}
    attention = Attention(case.num_qo_heads, case.num_kv_heads, case.head_dim, head_dim_v=case.head_dim_v, **(room | changes))
    out = tensors.q.new_empty(*tensors.q.shape[:2], case.head_dim_v)
    attention.plan(view)
    q, q_rope = parts_of_q(tensors.q) if q_parts and case.v_in_k else (tensors.q, None)
    return lambda: attention.plan(view), lambda: attention.run(q, kv, q_rope=q_rope, out=out, sm_scale=case.sm_scale)


def flash_attention_3(tensors: Tensors) -> Run:
    """FlashAttention-3 as vLLM builds it; over pages with scheduler metadata computed beforehand. MLA: the rope part is K, the latent V and q_v's keys."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

    case = tensors.case
    longest_q, longest_kv = max(case.qo_lens), max(case.kv_lens)
    arguments: dict[str, Any] = {"q": tensors.q, "k": tensors.k, "v": tensors.v}
    head_dim = case.head_dim
    if case.v_in_k:
        latent = case.head_dim_v
        head_dim -= latent
        arguments = {"q": tensors.q[..., latent:].contiguous(), "q_v": tensors.q[..., :latent].contiguous(), "k": tensors.k[..., latent:], "v": tensors.v}
    arguments |= {"cu_seqlens_q": tensors.qo_indptr, "max_seqlen_q": longest_q, "max_seqlen_k": longest_kv}
    arguments |= {"softmax_scale": case.sm_scale, "causal": True, "fa_version": 3}
    if case.ragged:
        arguments["cu_seqlens_k"] = tensors.kv_indptr
    else:
        arguments |= {"seqused_k": tensors.kv_lens, "block_table": tensors.block_table}
        arguments["scheduler_metadata"] = get_scheduler_metadata(
            batch_size=len(case.kv_lens),
            max_seqlen_q=longest_q,
            max_seqlen_k=longest_kv,
            num_heads_q=case.num_qo_heads,
            num_heads_kv=case.num_kv_heads,
            headdim=head_dim,
            headdim_v=case.head_dim_v,
            cache_seqlens=tensors.kv_lens,
            cu_seqlens_q=tensors.qo_indptr,
            page_size=case.page_size,
            causal=True,
        )
    return lambda: flash_attn_varlen_func(**arguments)


def flash_mla(tensors: Tensors) -> Run:
    """FlashMLA as vLLM builds it; its scheduler metadata are computed by the first call."""
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata

    case = tensors.case
    rows = tensors.q.view(len(case.kv_lens), -1, case.num_qo_heads, case.head_dim)
    metadata = get_mla_metadata(tensors.kv_lens, rows.shape[1] * case.num_qo_heads, 1)
    arguments = {"q": rows, "k_cache": tensors.k, "block_table": tensors.block_table, "cache_seqlens": tensors.kv_lens, "head_dim_v": case.head_dim_v}
    arguments |= {"tile_scheduler_metadata": metadata[0], "softmax_scale": case.sm_scale, "causal": True}
    if metadata[1] is not None:
        arguments["num_splits"] = metadata[1]
    return lambda: flash_mla_with_kvcache(**arguments)[0].flatten(0, 1)


def peers_of(tensors: Tensors) -> dict[str, Callable[[], Run]]:
    if tensors.case.kv != "bf16" or tensors.case.selects_from:
        return {}
    peers: dict[str, Callable[[], Run]] = {"FA3": partial(flash_attention_3, tensors)}
    return peers | ({"FlashMLA": partial(flash_mla, tensors)} if tensors.case.v_in_k else {})


def measure(case: ShapeCase, timer: Timer, machine: Machine, arguments: argparse.Namespace) -> dict[str, Any]:
    """One line of the table; times in µs."""
    begin = time.monotonic()
    tensors = Tensors.make(case)
    floors = {"bytes": case.bytes / machine.bandwidth * 1e6, "flops": case.flops / machine.rate * 1e6}
    line: dict[str, Any] = {"case": case.name, "floor": max(floors.values()), "bytes": case.bytes, "flops": case.flops} | dict.fromkeys(PEERS)
    plan, run = ours(tensors, arguments.q_parts, kernel=arguments.kernel)
    line |= {"ours": timer(run), "plan": timer(plan), "error": tensors.error(run())}
    if not line["error"] <= LARGEST_ERROR:
        print(f"{case.name}: ours: WRONG, relative error {line['error']:.1e}", flush=True)
    for peer, make in peers_of(tensors).items():
        if arguments.peer and peer not in arguments.peer:
            continue
        measured, out = time_of(peer, case.name, make, timer)
        if measured is None or out is None:
            continue
        error = tensors.error(out)
        if not error <= LARGEST_ERROR:
            print(f"{case.name}: {peer}: WRONG, relative error {error:.1e}", flush=True)
        else:
            line[peer] = measured
    line["seconds"] = time.monotonic() - begin
    return line


def markdown(lines: list[dict[str, Any]]) -> str:
    columns = ["case", "floor", "ours", *PEERS, "ours / best peer", "floor / ours", "GB/s", "TFLOP/s", "plan", "error"]
    rows = []
    for line in lines:
        peers = [line[peer] for peer in PEERS if line[peer] is not None]
        ratio = number(line["ours"] / min(peers) if peers else None, 2)
        rates = [number(line["floor"] / line["ours"], 2), number(line["bytes"] / line["ours"] / 1e3, 0), number(line["flops"] / line["ours"] / 1e6, 0)]
        times = [number(line[column]) for column in ("floor", "ours", *PEERS)]
        rows.append([line["case"], *times, ratio, *rates, number(line["plan"]), f"{line['error']:.1e}" + ("" if line["error"] <= LARGEST_ERROR else " WRONG")])
    return table(columns, rows)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--peer", action="append", choices=(*PEERS, "none"), default=[], help="only this peer, or none; repeatable")
    parser.add_argument("--kernel", choices=KERNELS, help="of ours; default: the GPU's")
    parser.add_argument("--q-parts", action="store_true", help="ours of MLA: Q is two tensors, as the engines' layers make it")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    timer = Timer(arguments.repeats)
    machine = Machine.measure(timer)
    header = f"{machine} Times in µs: bf16, causal, cold L2, CUDA-graph replay, median of {arguments.repeats}. Error: some rows against float64, relative."
    measure_lines(all_cases(), lambda case: measure(case, timer, machine, arguments), lambda lines: f"{header}\n\n{markdown(lines)}\n", header, arguments)


if __name__ == "__main__":
    main()
