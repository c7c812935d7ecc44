"""CTAs that start after their receiver has stopped waiting (csrc/common/launch_number.cuh): the launch
reports a failure, and the next one accepts none of their messages. Every sender is delayed: beyond the limit
of the wait in the chosen launches, by 1 ms in all others.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import schedule_model
import torch
from served_requests import Served

from attn_backend import BSRView, PageTable, sample, sampling_workspace
from attn_backend.jit import cubins, manifest
from attn_backend.kernels import attention, sampling

pytestmark = pytest.mark.gpu

LATE_VOCAB = 50_001
LATE_REQUESTS = 37
SEARCH_FAILED = 1 << 7  # ScheduleError

_DELAY = """
#include "common/ptx/warp.cuh"
__device__ void delay(bool is_late) {
  const unsigned long long begin = attn::ptx::global_timer();
  while (attn::ptx::global_timer() - begin < (is_late ? attn::ptx::kMaxWait + 1000000000 : 1000000)) {}
}
"""

_PLAN = f"""
#define plan_forest_kernel prompt_plan_forest_kernel
#include "planner/device/plan.cu"
#undef plan_forest_kernel
{_DELAY}
extern "C" __global__ void __launch_bounds__(attn::kPlanThreads, 1)
    plan_forest_kernel(const __grid_constant__ attn::PlanParams params) {{
  extern __shared__ __align__(16) char memory[];
  if (blockIdx.x > 0) delay(params.levels[0].num_groups == {LATE_REQUESTS});
  attn::plan<true>(params, memory);
}}
"""


def compiled(folder: Path, name: str, source: str) -> str:
    compiler = cubins.nvcc()
    if compiler is None:
        pytest.skip("needs nvcc")
    arch = cubins.arch_of(torch.cuda.get_device_capability())
    cubin, _ = cubins.compile_source(name, source, cubins.arch_flags(arch), compiler, name)
    file = folder / f"{name}.cubin"
    file.write_bytes(cubin)
    return str(file)


def test_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = cubins.kernel_sources(cubins.arch_of(torch.cuda.get_device_capability()))[
        manifest.sampling_name("f32")
    ]
    entry = "sampling/device/logits.cu"  # the kernel's source includes it; it has the calls
    source = source.replace(f'#include "{entry}"', (cubins.source_root() / entry).read_text())
    call = "  attn::sample_unfiltered<"
    assert source.count(call) == 2
    delayed = source.replace(
        call, f"  if (blockIdx.x + 1 < gridDim.x) delay(params.vocab == {LATE_VOCAB});\n{call}"
    )
    file = compiled(tmp_path, "late_sampling", _DELAY + delayed)
    workspace, seed = sampling_workspace("cuda"), torch.arange(8, device="cuda")
    logits = torch.randn(4, 8, LATE_VOCAB, device="cuda")
    expected = [sample(values[:, 1:], seed=seed).token_ids for values in logits]
    monkeypatch.setattr(sampling, "_kernel", lambda name, device: (file, 16))
    for is_late, values, tokens in zip((False, True, False, False), logits, expected, strict=True):
        samples = sample(values if is_late else values[:, 1:], seed=seed, workspace=workspace)
        assert samples.valid.any() == (not is_late)
        if not is_late:
            assert samples.valid.all()
            assert torch.equal(samples.token_ids, tokens)


def test_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served("always")

    def view(requests: int, order: torch.Tensor) -> BSRView:
        return BSRView(
            served.qo_indptr[: requests + 1],
            PageTable.block_table(served.table[order[:requests]], served.kv_lens[order[:requests]], 16),
        )

    steps = [(64, False), (LATE_REQUESTS, True), (64, False), (LATE_REQUESTS + 1, False)]
    views = [view(requests, torch.randperm(64, device="cuda")) for requests, _ in steps]
    expected = []
    for each in views:
        served.attention.plan(each)
        expected.append(served.attention.schedule())
    file, kernel_file = compiled(tmp_path, "late_plan", _PLAN), attention.kernel_file
    monkeypatch.setattr(
        attention,
        "kernel_file",
        lambda name, device: file if name == "plan" else kernel_file(name, device),
    )
    delayed = Served("always").attention
    for (_, is_late), each, planned in zip(steps, views, expected, strict=True):
        delayed.plan(each)
        schedule = delayed.schedule()
        assert schedule.errors == (SEARCH_FAILED if is_late else 0)
        assert schedule.forest == () if is_late else schedule_model.same(schedule, planned)
