"""Device memory that outlives a step is allocated outside the memory pools of vLLM's sleep mode."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm.v1", reason="needs vLLM")

from vllm_layer import make_builder, make_impl, make_spec

from attn_backend.adapters import layers
from attn_backend.adapters.vllm import metadata as vllm_metadata
from attn_backend.adapters.vllm import sampler
from attn_backend.adapters.vllm.compat import outside_memory_pools
from attn_backend.kernels.sampling import sampling_workspace

GPU = torch.device("cuda", 0)


class FakeGpu(threading.local):
    """The per-thread state of torch.cuda: a stream, and the pools that it allocates from."""

    stream = "default"
    pools = 0

    @contextmanager
    def use_stream(self, stream: str) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    @contextmanager
    def use_pool(self) -> Iterator[None]:
        self.pools += 1
        yield
        self.pools -= 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake.stream)
    monkeypatch.setattr(torch.cuda, "stream", fake.use_stream)
    return fake


def test_memory_comes_from_no_pool_and_is_used_on_the_callers_stream(gpu: FakeGpu) -> None:
    with gpu.use_stream("the worker's"), gpu.use_pool(), gpu.use_pool():
        assert outside_memory_pools(lambda: (gpu.pools, gpu.stream), GPU) == (0, "the worker's")
        assert (gpu.pools, gpu.stream) == (2, "the worker's")


def test_a_cpu_needs_no_other_thread() -> None:
    assert outside_memory_pools(threading.get_ident, torch.device("cpu")) == threading.get_ident()


def test_errors_reach_the_caller(gpu: FakeGpu) -> None:
    def refuse() -> None:
        raise NotImplementedError("no kernel")

    with pytest.raises(NotImplementedError, match="no kernel"):
        outside_memory_pools(refuse, GPU)


def test_workspaces_of_plans(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes builders inside the pool of the KV cache."""
    asked: list[torch.device] = []
    monkeypatch.setattr(vllm_metadata, "warn_if_untried", lambda device, logger: asked.append(device))
    monkeypatch.setattr(sampler, "install", lambda device, config: False)
    monkeypatch.setattr(layers, "record_attention", lambda *_: None)
    monkeypatch.setattr(layers, "Attention", lambda *heads, **options: gpu.pools)
    with gpu.use_pool():
        builder = make_builder([make_impl(), make_impl(sliding_window=8)], device="cuda:0")
    assert [plan.attention for plan in builder.planned.values()] == [0, 0]
    assert asked == [GPU]


def test_workspace_of_the_sampler(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "sampling_workspace", lambda device: torch.tensor(gpu.pools))
    owner = SimpleNamespace()
    with gpu.use_pool():
        workspace = sampler.workspace_of(owner, GPU)
    assert workspace.item() == 0
    assert sampler.workspace_of(owner, GPU) is workspace


@pytest.mark.gpu
@pytest.mark.usefixtures("vllm_as_it_was")
def test_workspaces_are_outside_torchs_pools() -> None:
    def in_a_pool(tensor: Tensor) -> bool:
        segments = [*pool.snapshot(), *inner.snapshot()]
        return any(
            segment["address"] <= tensor.data_ptr() < segment["address"] + segment["total_size"]
            for segment in segments
        )

    impl = make_impl()  # a builder reads only heads and head size from it
    pool, inner = torch.cuda.MemPool(), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        direct = sampling_workspace(GPU)
        builder = make_builder([impl], make_spec(dtype=torch.float16), device="cuda:0")
        workspace = sampler.workspace_of(SimpleNamespace(), GPU)
        with torch.cuda.use_mem_pool(inner):
            nested = sampler.workspace_of(SimpleNamespace(), GPU)
    assert in_a_pool(direct)
    attention = builder.planned[impl.spec].attention
    held: list[Any] = [
        value for value in vars(attention).values() if isinstance(value, Tensor) and value.numel()
    ]
    assert held
    assert not any(map(in_a_pool, [*held, workspace, nested]))


@pytest.mark.gpu
def test_the_callers_stream_on_a_gpu() -> None:
    stream = torch.cuda.Stream(GPU)
    with torch.cuda.stream(stream):
        assert outside_memory_pools(lambda: torch.cuda.current_stream(GPU), GPU) == stream
