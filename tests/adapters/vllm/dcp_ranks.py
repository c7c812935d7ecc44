"""A group of ranks for decode context parallelism; the ranks are threads of this process.

Code around the collectives is vLLM's own: the layouts of DeviceCommunicatorBase, and the merge of states. The
collectives exchange tensors within this process. Without a GPU, float64 twins replace the Triton kernels of
the merge.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm_layer import NUM_PAGES, PAGE

from attn_backend.adapters.vllm import support

T = TypeVar("T")


class Ranks:
    """Replaces vLLM's GroupCoordinator. Each thread sees itself as one rank."""

    def __init__(self, size: int) -> None:
        self.world_size = size
        self.num_exchanges = 0  # exchanges in which all ranks took part
        self.device_group = self
        self._of_thread = threading.local()
        self._barrier = threading.Barrier(size)
        self._given: list[Any] = [None] * size
        communicator: Any = DeviceCommunicatorBase.__new__(DeviceCommunicatorBase)
        communicator.world_size, communicator.device_group = size, self
        self.all_gather, self.reduce_scatter = communicator.all_gather, communicator.reduce_scatter

    @property
    def rank_in_group(self) -> int:
        rank: int = self._of_thread.rank
        return rank

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Runs `work(rank)` for all ranks at the same time."""

        def run_as(rank: int) -> T:
            self._of_thread.rank = rank
            try:
                return work(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.world_size) as pool:
            futures = [pool.submit(run_as, rank) for rank in range(self.world_size)]
        errors = [future.exception() for future in futures]
        for error in sorted(
            (e for e in errors if e is not None), key=lambda e: isinstance(e, threading.BrokenBarrierError)
        ):
            raise error
        return [future.result() for future in futures]

    def exchange(self, mine: Tensor) -> list[Tensor]:
        """The values of all ranks, in order."""
        self._given[self.rank_in_group] = mine
        self._barrier.wait(60)
        given = [tensor.clone() for tensor in self._given]
        if self._barrier.wait(60) == 0:
            self.num_exchanges += 1
        return given


def _all_gather_into_tensor(out: Tensor, mine: Tensor, group: Ranks) -> None:
    assert mine.is_contiguous()
    out.copy_(torch.cat(group.exchange(mine)))


def _reduce_scatter_tensor(out: Tensor, mine: Tensor, group: Ranks) -> None:
    assert mine.is_contiguous()
    out.copy_(
        sum(part.chunk(group.world_size)[group.rank_in_group].double() for part in group.exchange(mine))
    )  # type: ignore[arg-type]


def _all_to_all_single(out: Tensor, mine: Tensor, group: Ranks, async_op: bool) -> Any:
    out.copy_(torch.cat([part.chunk(group.world_size)[group.rank_in_group] for part in group.exchange(mine)]))
    return SimpleNamespace(wait=lambda: None)


def _scale_by_share(
    outputs: Tensor,
    new_output: Tensor,
    lses: Tensor,
    vlse: Tensor,
    lse_idx: int,
    ctx: Any,
    *,
    is_base_e: bool,
) -> None:
    """The twin of CorrectAttnCPOutKernel: the weight of this rank's output, and the LSE over all ranks."""
    assert is_base_e
    total = lses.double().logsumexp(0)
    vlse.copy_(total)
    share = (lses[lse_idx].double() - total).exp().nan_to_num(0.0)
    new_output.copy_(torch.where(share[..., None] == 0, 0.0, outputs.double() * share[..., None]))


def _pack(
    out: Tensor, lse: Tensor, send: Tensor, size: int, heads: int, width: int, lse_width: int, **lens: Any
) -> None:
    assert lse_width == 1, "float32 outputs"
    send[..., :width] = out.unflatten(1, (size, heads)).transpose(0, 1)
    send[..., width] = lse.unflatten(1, (size, heads)).transpose(0, 1)


def _unpack(received: Tensor, width: int, lse_width: int, return_lse: bool, is_base_e: bool) -> Any:
    assert is_base_e
    lses = received[..., width].double()
    share = (lses - lses.logsumexp(0)).exp().nan_to_num(0.0)
    merged = torch.where(share[..., None] == 0, 0.0, received[..., :width].double() * share[..., None]).sum(0)
    return (merged.to(received.dtype), lses.logsumexp(0).float()) if return_lse else merged.to(received.dtype)


def make_ranks(monkeypatch: pytest.MonkeyPatch, size: int, device: str = "cpu") -> Ranks:
    """Installs a group in vLLM."""
    ranks = Ranks(size)
    monkeypatch.setattr(parallel_state, "_DCP", ranks)
    for name, twin in (
        ("all_gather_into_tensor", _all_gather_into_tensor),
        ("reduce_scatter_tensor", _reduce_scatter_tensor),
        ("all_to_all_single", _all_to_all_single),
    ):
        monkeypatch.setattr(torch.distributed, name, twin)
    if device == "cpu":
        dcp = pytest.importorskip("vllm.v1.attention.ops.dcp", reason="needs vLLM 0.29 or later")
        monkeypatch.setattr(dcp, "_CORRECT_ATTN_CP_OUT_KERNEL", _scale_by_share)
        monkeypatch.setattr(dcp, "_dcp_a2a_pack_send", _pack)
        monkeypatch.setattr(dcp, "_dcp_a2a_unpack_combine", _unpack)
        monkeypatch.setattr(support, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    return ranks


@dataclass
class Layout:
    """The rank and place of each token of a batch.

    Attributes:
        table: int32 [requests and padding, 16], the same on all ranks; entries beyond a request's pages point
            outside the cache.
        owners: int64 [tokens], the rank that holds a token, and slots: its slot there.
        of_request: tokens of each request; the step's tokens come last.
        new: tokens of the step, in the order of queries.
        lens: query lengths, KV lengths.
        padding: number of requests and rows, as in a full CUDA graph.
    """

    table: Tensor
    owners: Tensor
    slots: Tensor
    of_request: list[Tensor]
    new: Tensor
    lens: tuple[list[int], list[int]]
    padding: int

    @property
    def old(self) -> Tensor:
        """bool [tokens]"""
        return torch.ones_like(self.slots, dtype=torch.bool).index_fill_(0, self.new, False)

    def metadata(
        self,
        rank: int,
        size: int,
        interleave: int,
        device: str,
        *,
        causal: bool = True,
        upper_bounds: bool = True,
    ) -> CommonAttentionMetadata:
        query_lens, kv_lens = self.lens
        starts = torch.tensor([0, *query_lens, *[0] * self.padding]).cumsum(0).int()
        seq_lens = torch.tensor([*kv_lens, *[0] * self.padding], dtype=torch.int32)
        mapping = torch.where(self.owners[self.new] == rank, self.slots[self.new], -1)
        local = torch.tensor(
            [int((place(torch.arange(int(n)), size, interleave)[0] == rank).sum()) for n in seq_lens],
            dtype=torch.int32,
        )
        return CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=seq_lens.to(device),
            num_reqs=len(seq_lens),
            num_actual_tokens=len(self.new) + self.padding,
            max_query_len=max(query_lens),
            max_seq_len=max(kv_lens),
            block_table_tensor=self.table.to(device),
            slot_mapping=torch.cat([mapping, torch.full((self.padding,), -1)]).to(device),
            causal=causal,
            seq_lens_cpu_upper_bound=seq_lens if upper_bounds else None,
            dcp_local_seq_lens=local.to(device),
        )


def lay_out(
    lens: tuple[list[int], list[int]],
    size: int,
    interleave: int,
    generator: torch.Generator,
    shared_pages: int = 0,
    padding: int = 0,
) -> Layout:
    """A batch on random pages, never page 0.

    Args:
        shared_pages: leading pages that are the same for all requests.
    """
    query_lens, kv_lens = lens
    pages = torch.randperm(NUM_PAGES - 1, generator=generator).int() + 1
    table = torch.full((len(kv_lens) + padding, 16), 1 << 20, dtype=torch.int32)
    table[len(kv_lens) :] = 0
    owners, slots, of_request, first, used = [], [], [], 0, shared_pages
    for row, kv_len in zip(table, kv_lens, strict=False):
        owner, local = place(torch.arange(kv_len), size, interleave)
        count = max(int(local.max()) // PAGE + 1, shared_pages)
        row[:count] = torch.cat([pages[:shared_pages], pages[used : used + count - shared_pages]])
        used += count - shared_pages
        owners.append(owner)
        slots.append(row[local // PAGE].long() * PAGE + local % PAGE)
        of_request.append(torch.arange(first, first + kv_len))
        first += kv_len
    new = torch.cat(
        [tokens[len(tokens) - query_len :] for tokens, query_len in zip(of_request, query_lens, strict=True)]
    )
    return Layout(table, torch.cat(owners), torch.cat(slots), of_request, new, lens, padding)


def place(positions: Tensor, size: int, interleave: int) -> tuple[Tensor, Tensor]:
    """The rank of each token of a request, and its place among the tokens of that rank."""
    return positions // interleave % size, positions // (
        interleave * size
    ) * interleave + positions % interleave
