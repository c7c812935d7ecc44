"""Cases of attention: their definition (`Spec`), and random ones (`random_spec`). case_tensors.py makes their
tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy
import torch

TABLE_FORMS = ("csr", "block_table", "token_slots", "ragged")
CACHE_FORMS = ("tensor", "pair", "packed", "slots", "ragged")
LAYOUTS = ("NHD", "HND")

# Distance from the oracle: ||o - ref|| / ||ref|| over a case; ten times that for one (row, head); absolute
# for LSE.
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}
LSE_TOLERANCE = 1e-3


def lse_tolerance_of_transformed_q(dtype: torch.dtype, head_dim: int, sm_scale: float | None) -> float:
    """Tolerance of lse under a variant that transforms Q, since its rows are then rounded to dtype.

    A sine has limited precision (2^-20 on a GPU), so an element near the middle of two dtype values may round
    to the other one. For an element of 2 to 4 these are 2 eps apart, and the mean of K there, up to about 2,
    multiplies that. This happens to one element in many thousands.
    """
    return 4 * torch.finfo(dtype).eps * (head_dim**-0.5 if sm_scale is None else abs(sm_scale))


@dataclass(frozen=True)
class Spec:
    """A batch, its storage form, and the computation.

    Everything else (data, order of pages, strides) follows from `seed`.
    """

    qo_lens: tuple[int, ...] = (1,)
    kv_lens: tuple[int, ...] = (1,)
    num_kv_heads: int = 2
    group_size: int = 4
    head_dim: int = 64
    head_dim_v: int | None = None  # None: head_dim
    v_in_k: bool = False  # V is the first columns of K, in the same memory
    dtype: torch.dtype = torch.bfloat16
    page_size: int = 16
    table_form: str = "csr"
    cache_form: str = "tensor"
    layout: str = "NHD"
    causal: bool = True
    window_left: int = -1
    logits_soft_cap: float = 0.0
    sm_scale: float | None = None
    num_ctas: int | None = None
    sharing: float = 0.0  # probability that a request begins with the pages of an earlier one
    run_pages: int = 1  # length of runs of consecutive pages
    padding_rows: int = 0  # additional rows of q and out after the batch
    strided: bool = False  # q, out, K and V are slices of larger tensors, dimensions in any order
    aligned: bool = False  # their rows start at multiples of 16 bytes: always so on a GPU
    # qo_indptr, kv_indptr, kv_last_page_len, kv_lens, rows: int64 instead of int32
    int64: tuple[bool, ...] = (False,) * 5
    seed: int = 0

    @property
    def columns_of_v(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    def with_(self, **changes: object) -> Spec:
        return replace(self, **changes)


def random_spec(seed: int, device_type: str) -> Spec:
    """The case number `seed`.

    The same seed gives similar cases on both device types, without features that CUDA lacks.
    """
    rng = numpy.random.default_rng(seed)
    on_cpu = device_type == "cpu"
    head_dims = [64, 64, 64, 128, 128, 256] + ([8, 80, 96, 192, 40] if on_cpu else [])
    dtypes = [torch.bfloat16, torch.float16] + ([torch.float32] if on_cpu else [])
    head_dim = int(rng.choice(head_dims))
    group_size = int(rng.choice([1, 1, 2, 3, 4, 4, 5, 7, 8, 16]))
    num_kv_heads = int(rng.choice([1, 2, 3, 4] if group_size < 8 else [1, 2]))
    table_form = str(rng.choice(TABLE_FORMS, p=[0.3, 0.3, 0.3, 0.1]))
    if table_form == "ragged":
        page_size, cache_form = 1, str(rng.choice(["ragged", "slots"]))
    else:
        page_size = int(rng.choice([1, 1, 2, 3, 5, 8, 16, 16, 16, 24, 32, 48, 64, 100, 128, 256]))
        cache_form = str(rng.choice(CACHE_FORMS[:4]))
    qo_lens, kv_lens = _random_lengths(rng, num_kv_heads * group_size * head_dim, on_cpu)
    longest = max(kv_lens, default=0)
    return Spec(
        qo_lens=qo_lens,
        kv_lens=kv_lens,
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        head_dim=head_dim,
        dtype=dtypes[rng.integers(len(dtypes))],
        page_size=page_size,
        table_form=table_form,
        cache_form=cache_form,
        layout=str(rng.choice(LAYOUTS)),
        causal=bool(rng.random() < 0.7),
        window_left=int(rng.integers(0, longest + 2)) if rng.random() < 0.3 else -1,
        logits_soft_cap=float(rng.uniform(1, 50)) if rng.random() < 0.25 else 0.0,
        sm_scale=float(rng.uniform(0.02, 0.3)) if rng.random() < 0.3 else None,
        num_ctas=[None, 1, 2, 3, 5, 8, 16, 37, 132, 264][rng.integers(10)],
        sharing=0.0 if table_form == "ragged" else float(rng.choice([0.0, 0.3, 0.9])),
        padding_rows=int(rng.choice([0, 0, 1, 7, 40])),
        strided=bool(rng.random() < 0.4),
        int64=tuple(bool(flag) for flag in rng.random(5) < 0.4),
        run_pages=int(rng.choice([1, 1, 30, 70, 1000])),
        seed=seed,
    )


def _random_lengths(
    rng: numpy.random.Generator, row_cost: int, on_cpu: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Query and KV lengths of one batch, most of them short; `row_cost` is num_qo_heads * head_dim.

    The oracle's work is bounded.
    """
    batch = int(
        rng.choice(
            [0, 1, 1, 2, 3, 5, 7, 8, 13, 17, 33],
            p=[0.01, 0.15, 0.14, 0.15, 0.1, 0.1, 0.1, 0.1, 0.07, 0.05, 0.03],
        )
    )
    longest = int(rng.choice([40, 300, 1500, 8192], p=[0.2, 0.35, 0.25, 0.2]))
    style = str(
        rng.choice(
            ["decode", "prefill", "chunk", "verify", "mixed", "odd"], p=[0.3, 0.15, 0.2, 0.1, 0.15, 0.1]
        )
    )
    # multiplications of q . k; a GPU does more in the same time
    budget = (2e8 if longest < 8192 else 5e8) / (4 if on_cpu else 1)
    qo_lens, kv_lens = [], []
    for _ in range(batch):
        kv_len = _skewed(rng, longest)
        kind = str(rng.choice(["decode", "prefill", "chunk", "verify", "odd"])) if style == "mixed" else style
        if kind == "decode":
            qo_len = 1
        elif kind == "prefill":
            qo_len = kv_len = max(_skewed(rng, min(longest, 1200)), 1)
        elif kind == "chunk":
            qo_len = min(max(_skewed(rng, 600), 1), kv_len)
        elif kind == "verify":
            qo_len = int(rng.integers(2, 9))
        else:  # no query, no KV, or a query longer than its KV
            qo_len, kv_len = int(rng.choice([0, 1, 5, 70])), int(rng.choice([0, 1, 3, kv_len]))
        allowed = max(
            int(
                (budget - row_cost * sum(q * n for q, n in zip(qo_lens, kv_lens, strict=True)))
                / row_cost
                / max(qo_len, 1)
            ),
            8,
        )
        qo_lens.append(qo_len)
        kv_lens.append(min(kv_len, allowed))
    return tuple(qo_lens), tuple(kv_lens)


def _skewed(rng: numpy.random.Generator, longest: int) -> int:
    """0, or 1 .. longest with a uniform logarithm: 2 to 4 are as frequent as 2000 to 4000."""
    return 0 if rng.random() < 0.04 else int(math.exp(rng.uniform(0, math.log(longest + 0.999))))
