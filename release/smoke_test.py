"""Whether an installed wheel works: run by the interpreter that has it, from anywhere.

Needs torch, numpy and what the wheel depends on; a CPU is enough.
"""

from __future__ import annotations

import subprocess
import sys
import time

start = time.perf_counter()
import torch  # noqa: E402

torch_seconds = time.perf_counter() - start

start = time.perf_counter()
from attn_backend import Attention, BSRView, KVCache, PageTable, append_kv, sample  # noqa: E402
from attn_backend.kernels.native import library  # noqa: E402

import_seconds = time.perf_counter() - start


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * q.shape[2] ** -0.5
    hidden = torch.arange(k.shape[0])[None, :] > torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def attention(device: str, dtype: torch.dtype) -> float:
    """The largest error of a batch of a decode and a chunk, through append and plan."""
    kv_lens, q_lens, page_size = [40, 23], [1, 9], 16
    q, k, v = (
        torch.randn(sum(lens), heads, 64, dtype=dtype)
        for lens, heads in ((q_lens, 4), (kv_lens, 2), (kv_lens, 2))
    )
    cache = KVCache.from_tensor(torch.zeros(6, 2, page_size, 2, 64, dtype=dtype, device=device))
    pages = torch.tensor([[4, 0, 2], [1, 5, 0]], dtype=torch.int32)
    slots = torch.cat(
        [
            pages[i, torch.arange(n) // page_size] * page_size + torch.arange(n) % page_size
            for i, n in enumerate(kv_lens)
        ]
    )
    append_kv(k.to(device), v.to(device), cache, slots.to(device))
    attn = Attention(4, 2, 64, dtype=dtype, device=device, max_rows=16, max_batch=2)
    attn.plan(
        BSRView(
            torch.tensor([0, 1, 10], device=device),
            PageTable.block_table(pages.to(device), torch.tensor(kv_lens, device=device), page_size),
            causal=True,
        )
    )
    out = attn.run(q.to(device), cache).double().cpu()
    wanted = [
        dense(*(x[a : a + n] for x, a, n in ((q, qb, ql), (k, kb, kl), (v, kb, kl))))
        for qb, ql, kb, kl in ((0, 1, 0, 40), (1, 9, 40, 23))
    ]
    return float((out - torch.cat(wanted)).abs().max())


def expected_isa() -> str | None:
    """The instruction set that the operating system reports; None if it reports none."""
    try:
        with open("/proc/cpuinfo") as file:
            flags = set(next(line for line in file if line.startswith("flags")).split())
    except (OSError, StopIteration):
        return None
    if not {"avx2", "fma", "f16c"} <= flags:
        return "baseline"
    if not {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags:
        return "avx2"
    return "amx" if {"avx512_bf16", "amx_bf16", "amx_tile"} <= flags else "avx512"


def main() -> None:
    torch.manual_seed(0)
    cases = [("cpu", torch.float32, 1e-5), ("cpu", torch.bfloat16, 3e-2)]
    if torch.cuda.is_available():
        cases += [("cuda", torch.bfloat16, 3e-2), ("cuda", torch.float16, 4e-3)]
    for device, dtype, bound in cases:
        error = attention(device, dtype)
        assert error < bound, f"attention on {device} in {dtype}: error {error}"
    isa, expected = library().current_isa(), expected_isa()
    assert expected in (None, isa), f"uses {isa} of a CPU that has {expected}"
    logits = torch.full((2, 1000), -10.0)
    logits[0, 7] = logits[1, 999] = 10.0
    assert sample(logits, temperature=0.0).token_ids.tolist() == [7, 999]
    doctor = subprocess.run(
        [sys.executable, "-m", "attn_backend.cli.main", "doctor"], check=False, capture_output=True, text=True
    )
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    print(
        f"ok: torch {torch.__version__}, imported in {torch_seconds:.2f} s; attn_backend in "
        f"{import_seconds:.2f} s more"
    )


if __name__ == "__main__":
    main()
