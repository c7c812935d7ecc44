"""The lines of the head shapes' benchmark: the minimum bytes and operations of each, its random tensors, and
a float64 reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from attn_backend import BSRView, KVCache, PageTable, append_mla_kv

MLA = (576, 512)  # the latent and its RoPE part; values are the latent
KV_BYTES = {"bf16": 2, "e4m3": 1, "latent": 1}  # bytes of an element; latent: rows with separate scales
KV_DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "latent": torch.uint8}
CHECKED_ROWS = 16


@dataclass(frozen=True)
class ShapeCase:
    """One line: bf16, causal, lengths in tokens.

    Attributes:
        v_in_k: V is the first columns of K, in the same memory.
        kv: the cache format, a key of KV_BYTES.
        shared: leading tokens that all requests share, in whole pages.
        selects_from: each row selects kv_len tokens from this many (sparse MLA). 0: each row attends to the
            tokens of its request.
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
    shared: int = 0
    selects_from: int = 0

    @property
    def name(self) -> str:
        columns = (
            f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}/{self.head_dim_v}"
        )
        form = "ragged" if self.ragged else f"p{self.page_size}"
        cache = "" if self.kv == "bf16" else f" {self.kv}"
        return (
            f"{self.kind} bs{len(self.kv_lens)} {self.kv_lens[0]} {columns} "
            f"h{self.num_qo_heads}/{self.num_kv_heads} {form}{cache}"
        )

    @property
    def bytes(self) -> int:
        """K, V, Q and O once."""
        columns = self.head_dim + (0 if self.v_in_k else self.head_dim_v)
        row = 656 if self.kv == "latent" else columns * KV_BYTES[self.kv]
        tokens = sum(self.kv_lens) - self.shared * (len(self.kv_lens) - 1)
        tokens = min(tokens, self.selects_from or tokens)
        return tokens * self.num_kv_heads * row + 2 * sum(self.qo_lens) * self.num_qo_heads * (
            self.head_dim + self.head_dim_v
        )

    @property
    def flops(self) -> int:
        """Two products over the pairs that a causal mask leaves visible."""
        pairs = sum(q * kv - q * (q - 1) // 2 for q, kv in zip(self.qo_lens, self.kv_lens, strict=True))
        return 2 * pairs * self.num_qo_heads * (self.head_dim + self.head_dim_v)

    @property
    def sm_scale(self) -> float:
        """The softmax scale. For MLA, the scale of its heads before absorption, with 128 + 64 columns."""
        return 192**-0.5 if self.v_in_k else self.head_dim**-0.5


def decode(
    batch: int, tokens: int, qo: int, kv: int, head_dim: int, head_dim_v: int | None = None
) -> ShapeCase:
    return ShapeCase("decode", (1,) * batch, (tokens,) * batch, qo, kv, head_dim, head_dim_v or head_dim)


def prefill(
    qo: int, kv: int, head_dim: int, head_dim_v: int | None = None, ragged: bool = False
) -> ShapeCase:
    return ShapeCase(
        "prefill", (4096,) * 4, (4096,) * 4, qo, kv, head_dim, head_dim_v or head_dim, ragged=ragged
    )


def mla(batch: int, tokens: int, heads: int) -> ShapeCase:
    return ShapeCase("MLA decode", (1,) * batch, (tokens,) * batch, heads, 1, *MLA, page_size=64, v_in_k=True)


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
        for batch, tokens in (
            (1, 4096),
            (16, 1024),
            (64, 4096),
            (128, 4096),
            (128, 8192) if heads == 16 else (16, 8192),
        ):
            yield mla(batch, tokens, heads)
        yield replace(mla(64, 4096, heads), kind="MLA, 2 query tokens", qo_lens=(2,) * 64)
        yield replace(mla(64, 8192 + 256, heads), kind="MLA, 8192 tokens shared,", shared=8192)
        for kv in ("e4m3", "latent"):
            for batch, tokens in ((1, 4096), (64, 4096)):
                yield replace(mla(batch, tokens, heads), kv=kv)
    for kv in KV_BYTES:
        for rows in (64, 2048):
            yield ShapeCase(
                "sparse MLA",
                (1,) * rows,
                (2048,) * rows,
                128,
                1,
                *MLA,
                page_size=1,
                v_in_k=True,
                kv=kv,
                selects_from=65536,
            )


def stored(k: torch.Tensor, kv: str) -> torch.Tensor:
    """bf16 [pages, page_size, num_kv_heads, columns] as a cache stores it."""
    if kv != "latent":
        return k.to(KV_DTYPES[kv])
    rows = torch.empty(*k.shape[:2], 656, dtype=torch.uint8, device=k.device)
    tokens = k.flatten(0, 2)
    append_mla_kv(
        tokens[:, : MLA[1]],
        tokens[:, MLA[1] :],
        KVCache.from_latent(rows),
        torch.arange(len(tokens), device=k.device),
    )
    return rows.unsqueeze(2)


def numbers(rows: torch.Tensor, kv: str) -> torch.Tensor:
    """The values of a cache's rows [tokens, num_kv_heads, columns], in float64."""
    if kv != "latent":
        return rows.double()
    latent, scales, rope = (part.contiguous() for part in rows.split([512, 16, 128], -1))
    scaled = latent.view(torch.float8_e4m3fn).double() * scales.view(
        torch.float32
    ).double().repeat_interleave(128, -1)
    return torch.cat([scaled, rope.view(torch.bfloat16).double()], -1)


@dataclass(frozen=True, eq=False)
class Tensors:
    """Random tensors of a case.

    q: bf16 [rows, num_qo_heads, head_dim]; k, v: [pages, page_size, num_kv_heads, columns], ragged [tokens,
    num_kv_heads, columns]; qo_indptr, kv_indptr: int32 [batch + 1]. kv_lens: int32 [batch]. block_table:
    int32 [batch, pages of a request], ragged [batch, 0]; selected tokens: their slots.
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
            table = torch.randint(
                case.selects_from, (batch, max(case.kv_lens)), device=device, generator=generator
            ).int()
        else:
            pages = -(-max(case.kv_lens) // case.page_size)
            shape = (batch * pages, case.page_size)  # type: ignore[assignment]
            table = torch.randperm(batch * pages, device=device, generator=generator).int().view(batch, pages)
            table[:, : case.shared // case.page_size] = table[0, : case.shared // case.page_size].clone()
        k = stored(data(*shape, case.num_kv_heads, case.head_dim), case.kv)
        v = (
            k[..., : case.head_dim_v]
            if case.v_in_k
            else stored(data(*shape, case.num_kv_heads, case.head_dim_v), case.kv)
        )
        q = data(sum(case.qo_lens), case.num_qo_heads, case.head_dim)
        return cls(
            case,
            q,
            k,
            v,
            indptr(case.qo_lens),
            indptr(case.kv_lens),
            torch.tensor(case.kv_lens, dtype=torch.int32, device=device),
            table,
        )

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
        return BSRView(
            self.qo_indptr, PageTable.block_table(self.block_table, self.kv_lens, self.case.page_size)
        )

    def tokens(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a request, as numbers: [kv_len, num_kv_heads, columns]."""
        if self.case.ragged:
            first, end = self.kv_indptr[request : request + 2].tolist()
            return self.k[first:end], self.v[first:end]
        pages = self.block_table[request].long()
        kv_len = self.case.kv_lens[request]
        k = numbers(self.k[pages].flatten(0, 1)[:kv_len], self.case.kv)
        return k, k[..., : self.case.head_dim_v] if self.case.v_in_k else numbers(
            self.v[pages].flatten(0, 1)[:kv_len], self.case.kv
        )

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
