"""What a plan costs: µs on the host (the call) and on the device (a captured plan replayed), for decode batches of growing size.

    python -m benchmarks.plan
"""

from __future__ import annotations

import statistics
import time

import torch

from attn_backend import Attention, BSRView, PageTable

BATCHES = (1, 16, 64, 256, 512)
KV_LEN = 4096
PAGE_SIZE = 16
REPEATS = 200


def device_time(attention: Attention, view: BSRView) -> float:
    """Median µs of a replayed plan."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.plan(view)
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def host_time(attention: Attention, view: BSRView) -> float:
    """Median µs until plan() returns; the device keeps up."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        attention.plan(view)
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"Decode at {KV_LEN} tokens, 32/8 heads, head_dim 128, page {PAGE_SIZE}; median of {REPEATS}\n")
    print("| batch | host µs | device µs |\n|---:|---:|---:|")
    for batch in BATCHES:
        attention = Attention(32, 8, 128, max_rows=8192, max_batch=512)
        table = torch.arange(batch * KV_LEN // PAGE_SIZE, dtype=torch.int32, device="cuda").view(batch, -1)
        kv_lens = torch.randint(1, KV_LEN + 1, (batch,), dtype=torch.int32, device="cuda")
        view = BSRView(torch.arange(batch + 1, dtype=torch.int32, device="cuda"), PageTable.block_table(table, kv_lens, PAGE_SIZE))
        attention.plan(view)
        print(f"| {batch} | {host_time(attention, view):.1f} | {device_time(attention, view):.1f} |", flush=True)


if __name__ == "__main__":
    main()
