"""The lines of the attention benchmark: lengths and head counts, and the minimum bytes and operations of
each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attn_backend.cli import batches

DISTRIBUTIONS = ("const", "uniform", "zipf")


@dataclass(frozen=True)
class Case:
    """One line: bf16, lengths in tokens.

    Attributes:
        ragged: K and V of all requests are contiguous, without pages.
        in_order: a request's pages are consecutive, as an engine gives them to a prompt; otherwise they are
            shuffled.
        causal: a row sees the tokens up to its position; otherwise all tokens of its request.
    """

    name: str
    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int = 128
    page_size: int = 16
    ragged: bool = False
    in_order: bool = False
    causal: bool = True

    @property
    def shape(self) -> str:
        """The name without its last word, the storage of K and V."""
        return self.name.rpartition(" ")[0]

    @property
    def bytes(self) -> int:
        """K, V, Q and O once."""
        kv = sum(self.kv_lens) * self.num_kv_heads * self.head_dim * 2
        qo = sum(self.qo_lens) * self.num_qo_heads * self.head_dim * 2
        return 2 * (kv + qo)

    @property
    def flops(self) -> int:
        """Two products over the visible pairs."""
        lens = zip(self.qo_lens, self.kv_lens, strict=True)
        pairs = sum(q * kv - (q * (q - 1) // 2 if self.causal else 0) for q, kv in lens)
        return 4 * pairs * self.num_qo_heads * self.head_dim


@dataclass(frozen=True)
class SharedCase:
    """One line of decode (one query token a request), bf16, whose requests share prefixes.

    levels: (nodes, tokens of each), the most shared level first, the requests' own tokens last. The nodes of
    a level are spread evenly over the nodes of the level before. Shared tokens fill whole pages.
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
    def pages(self) -> int:
        """Of all nodes."""
        return sum(nodes * -(-tokens // self.page_size) for nodes, tokens in self.levels)

    @property
    def case(self) -> Case:
        """The same lengths without sharing."""
        tokens = sum(tokens for _, tokens in self.levels)
        return Case(
            self.name,
            (1,) * self.batch,
            (tokens,) * self.batch,
            self.num_qo_heads,
            self.num_kv_heads,
            self.head_dim,
            self.page_size,
        )

    @property
    def bytes(self) -> int:
        """Every node's K and V once, Q and O once."""
        kv = sum(nodes * tokens for nodes, tokens in self.levels) * self.num_kv_heads * self.head_dim * 2
        qo = self.batch * self.num_qo_heads * self.head_dim * 2
        return 2 * (kv + qo)


def lengths(distribution: str, batch: int, mean: int, seed: int = 0) -> tuple[int, ...]:
    """The lengths that `attn-backend plan` draws."""
    return tuple(batches.lengths(distribution, batch, mean, seed))


RAGGED = 0  # instead of a page size


def _name(kind: str, lens: str, case: Case) -> str:
    form = "ragged" if case.ragged else f"p{case.page_size}"
    heads = f"h{case.num_qo_heads}/{case.num_kv_heads} d{case.head_dim}{'' if case.causal else ' full'}"
    return f"{kind} bs{len(case.kv_lens)} {lens} {heads} {form}"


def _decode(
    batch: int, distribution: str, mean: int, qo: int, kv: int, page_size: int = 16, head_dim: int = 128
) -> Case:
    case = Case("", (1,) * batch, lengths(distribution, batch, mean), qo, kv, head_dim, page_size)
    return replace(case, name=_name("decode", f"{distribution}{mean}", case))


def _prefill(
    batch: int,
    distribution: str,
    mean: int,
    qo: int,
    kv: int,
    page_size: int = 16,
    head_dim: int = 128,
    causal: bool = True,
) -> Case:
    lens = lengths(distribution, batch, mean)
    case = Case("", lens, lens, qo, kv, head_dim, page_size or 1, page_size == RAGGED, causal=causal)
    return replace(case, name=_name("prefill", f"{distribution}{mean}", case))


def _in_order(case: Case) -> Case:
    return replace(case, name=f"{case.name}-in-order", in_order=True)


def decode_cases() -> list[Case]:
    cases = [
        _decode(16, distribution, 1024, qo, kv)
        for qo, kv in ((32, 32), (32, 8), (64, 8))
        for distribution in DISTRIBUTIONS
    ]
    cases += [
        _decode(1, "const", 8192, 32, 8),
        _decode(1, "const", 131072, 32, 8),
        _decode(8, "const", 32768, 32, 8),
    ]
    cases += [_decode(64, "const", 4096, 32, 8, page_size) for page_size in (16, 64, 1)]
    cases += [
        _in_order(_decode(64, "const", 4096, 32, 8, 1)),
        *(_decode(8, "const", 1200, 32, 8, page_size) for page_size in (16, 1)),
    ]
    cases += [
        _decode(128, "const", 2048, 32, 8),
        _decode(256, "const", 1024, 32, 8, 1),
        _decode(64, "zipf", 4096, 32, 8),
    ]
    return [
        *cases,
        _decode(64, "const", 4096, 32, 8, head_dim=64),
        _decode(64, "const", 4096, 16, 4, head_dim=256),
    ]


def prefill_cases() -> list[Case]:
    """Each shape ragged first, then with pages."""
    cases = []
    for qo, kv in ((32, 8), (32, 32)):
        cases += [_prefill(32, distribution, 512, qo, kv, RAGGED) for distribution in DISTRIBUTIONS]
        cases.append(_prefill(32, "const", 512, qo, kv))
        cases += [
            _prefill(16, "const", 1024, qo, kv, page_size)
            for page_size in ((RAGGED, 16, 64) if kv == 8 else (RAGGED, 16))
        ]
        cases += [
            _prefill(16, distribution, 1024, qo, kv, page_size)
            for distribution in DISTRIBUTIONS[1:]
            for page_size in (RAGGED, 16)
        ]
    cases += [_prefill(8, "const", 2048, 32, 8, page_size) for page_size in (RAGGED, 16)]
    cases += [_prefill(4, "const", 4096, 32, 8, page_size) for page_size in (RAGGED, 16, 64, 1)]
    cases += [
        _in_order(cases[-1]),
        *(
            _prefill(1, "const", tokens, 32, 8, page_size)
            for tokens in (220, 700, 2048)
            for page_size in (RAGGED, 16)
        ),
    ]
    cases += [
        _prefill(batch, "const", mean, 32, 8, page_size)
        for batch, mean in ((2, 8192), (1, 16384), (1, 32768))
        for page_size in (RAGGED, 16)
    ]
    cases += [
        _prefill(1, "const", tokens, qo, kv, page_size, head_dim)
        for tokens, qo, kv, head_dim in ((16384, 32, 8, 64), (16384, 16, 4, 256), (32768, 16, 4, 256))
        for page_size in (RAGGED, 16)
    ]
    cases += [
        _prefill(4, "const", 4096, qo, kv, page_size, head_dim, causal=False)
        for qo, kv, head_dim in ((32, 8, 128), (64, 8, 64))
        for page_size in (RAGGED, 16)
    ]
    return [
        *cases,
        _prefill(4, "const", 4096, 32, 8, head_dim=64),
        _prefill(4, "const", 4096, 16, 4, head_dim=256),
    ]


def all_cases() -> list[Case | SharedCase]:
    """Every line, in the order of the table."""
    append = Case("append bs16 q128 kv4096 h32/8 d128 p16", (128,) * 16, (4096,) * 16, 32, 8)
    mixed = Case(
        "mixed 1x2048@6144 + 63 decode@4096 h32/8 d128 p16",
        (2048,) + (1,) * 63,
        (6144,) + (4096,) * 63,
        32,
        8,
    )
    shared = [replace(case, name=f"shared prefix {case.name} h32/8 d128 p16") for case in shared_cases()]
    return [*decode_cases(), *prefill_cases(), append, mixed, *shared]


def shared_cases() -> list[SharedCase]:
    """The lines with shared prefixes."""
    cases = [
        SharedCase(f"{batch} x ({prefix} + {suffix})", ((1, prefix), (batch, suffix)))
        for batch, prefix, suffix in (
            (16, 8192, 128),
            (64, 2048, 256),
            (128, 8192, 256),
            (256, 2048, 128),
            (16, 1024, 128),
        )
    ]
    return [*cases, SharedCase("8 x 16 x (1024 + 4096 + 256)", ((1, 1024), (8, 4096), (128, 256)))]


def unshared_cases() -> list[Case]:
    """Lines on which looking for shared prefixes finds none."""
    return [
        _decode(16, "const", 1024, 32, 8),
        _decode(64, "const", 4096, 32, 8),
        _decode(256, "const", 1024, 32, 8),
        _decode(1, "const", 8192, 32, 8),
    ]
