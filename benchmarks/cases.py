"""The lines of the attention benchmark: lengths and head counts, and what each must at least move and compute."""

from __future__ import annotations

from dataclasses import dataclass

from attn_backend.cli import batches


@dataclass(frozen=True)
class Case:
    """One line: bf16, causal, lengths in tokens."""

    name: str
    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int = 128
    page_size: int = 16

    @property
    def bytes(self) -> int:
        """K, V, Q and O once."""
        kv = sum(self.kv_lens) * self.num_kv_heads * self.head_dim * 2
        qo = sum(self.qo_lens) * self.num_qo_heads * self.head_dim * 2
        return 2 * (kv + qo)

    @property
    def flops(self) -> int:
        """Two products over the pairs that a causal mask leaves visible."""
        pairs = sum(q * kv - q * (q - 1) // 2 for q, kv in zip(self.qo_lens, self.kv_lens, strict=True))
        return 4 * pairs * self.num_qo_heads * self.head_dim


@dataclass(frozen=True)
class SharedCase:
    """One line of decode (one query token a request), bf16, whose requests share prefixes.

    levels: (nodes, tokens of each), the most shared level first, the requests' own tokens last. The nodes of a level lie in equal numbers under those of the
    level before; what is shared fills whole pages.
    """

    name: str
    levels: tuple[tuple[int, int], ...]
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16

    @property
    def batch(self) -> int:
        """Requests."""
        return self.levels[-1][0]

    @property
    def case(self) -> Case:
        """The same lengths, nothing shared."""
        tokens = sum(tokens for _, tokens in self.levels)
        return Case(self.name, (1,) * self.batch, (tokens,) * self.batch, self.num_qo_heads, self.num_kv_heads, self.head_dim, self.page_size)

    @property
    def bytes(self) -> int:
        """Every node's K and V once, Q and O once."""
        kv = sum(nodes * tokens for nodes, tokens in self.levels) * self.num_kv_heads * self.head_dim * 2
        qo = self.batch * self.num_qo_heads * self.head_dim * 2
        return 2 * (kv + qo)


def lengths(distribution: str, batch: int, mean: int, seed: int = 0) -> tuple[int, ...]:
    """Those that `attn-backend plan` draws."""
    return tuple(batches.lengths(distribution, batch, mean, seed))


def _decode(batch: int, distribution: str, mean: int, qo: int, kv: int, page_size: int = 16, head_dim: int = 128) -> Case:
    kv_lens = lengths(distribution, batch, mean)
    return Case(f"decode bs{batch} {distribution}{mean} h{qo}/{kv} d{head_dim} p{page_size}", (1,) * batch, kv_lens, qo, kv, head_dim, page_size)


def _prefill(batch: int, distribution: str, mean: int, qo: int, kv: int, page_size: int = 16, head_dim: int = 128) -> Case:
    qo_lens = lengths(distribution, batch, mean)
    return Case(f"prefill bs{batch} {distribution}{mean} h{qo}/{kv} d{head_dim} p{page_size}", qo_lens, qo_lens, qo, kv, head_dim, page_size)


def all_cases() -> list[Case]:
    """Every line, in the order of the table."""
    cases = [_decode(16, distribution, 1024, qo, kv) for qo, kv in ((32, 32), (32, 8), (64, 8)) for distribution in ("const", "uniform", "zipf")]
    cases += [_decode(1, "const", 8192, 32, 8), _decode(1, "const", 131072, 32, 8), _decode(8, "const", 32768, 32, 8), _decode(64, "const", 4096, 32, 8)]
    cases += [
        _decode(64, "const", 4096, 32, 8, page_size=1),
        _decode(128, "const", 2048, 32, 8),
        _decode(256, "const", 1024, 32, 8, page_size=1),
        _decode(64, "zipf", 4096, 32, 8),
    ]
    cases += [_decode(64, "const", 4096, 32, 8, head_dim=64), _decode(64, "const", 4096, 16, 4, head_dim=256)]
    cases += [_prefill(16, distribution, 1024, 32, 8) for distribution in ("const", "uniform", "zipf")]
    cases += [
        _prefill(32, "const", 512, 32, 8),
        _prefill(8, "const", 2048, 32, 8),
        _prefill(4, "const", 4096, 32, 8),
        _prefill(4, "const", 4096, 32, 8, page_size=1),
        _prefill(1, "const", 16384, 32, 8),
    ]
    cases += [_prefill(4, "const", 4096, 32, 8, head_dim=64), _prefill(4, "const", 4096, 16, 4, head_dim=256)]
    cases.append(Case("mixed 1x2048@6144 + 63 decode@4096 h32/8 d128 p16", (2048,) + (1,) * 63, (6144,) + (4096,) * 63, 32, 8))
    cases.append(Case("append bs16 q128 kv4096 h32/8 d128 p16", (128,) * 16, (4096,) * 16, 32, 8))
    return cases


def shared_cases() -> list[SharedCase]:
    """The lines with shared prefixes."""
    cases = [
        SharedCase(f"{batch} x ({prefix} + {suffix})", ((1, prefix), (batch, suffix)))
        for batch, prefix, suffix in ((16, 8192, 128), (64, 2048, 256), (128, 8192, 256), (256, 2048, 128), (16, 1024, 128))
    ]
    return [*cases, SharedCase("8 x 16 x (1024 + 4096 + 256)", ((1, 1024), (8, 4096), (128, 256)))]


def unshared_cases() -> list[Case]:
    """Lines on which looking for shared prefixes finds none."""
    return [_decode(16, "const", 1024, 32, 8), _decode(64, "const", 4096, 32, 8), _decode(256, "const", 1024, 32, 8), _decode(1, "const", 8192, 32, 8)]
