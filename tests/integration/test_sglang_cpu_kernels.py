"""The stand-ins for SGLang's compiled kernels for speculative decoding on a CPU, compared with the definition
of a tree.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

NODES = 6


@pytest.fixture(scope="module")
def kernels():
    """The stand-in, even if another sgl_kernel is installed."""
    import importlib.util

    path = Path(__file__).parents[2] / "integration" / "sglang_cpu" / "sgl_kernel" / "speculative.py"
    spec = importlib.util.spec_from_file_location("stand_in_for_sgl_kernel", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def random_parents(generator):
    return [-1] + [int(torch.randint(node, (), generator=generator)) for node in range(1, NODES)]


def mask_of(parents):
    mask = torch.eye(NODES, dtype=torch.bool)
    for node in range(1, NODES):
        mask[node] |= mask[parents[node]]
    return mask


def links(batch):
    return [torch.full((batch, NODES), -1) for _ in range(3)]


def parents_from(next_token, next_sibling):
    """Back from first children and next siblings."""
    parents = [-1] * NODES
    for node in range(NODES):
        child = int(next_token[node])
        while child >= 0:
            parents[child] = node
            child = int(next_sibling[child])
    return parents


def test_links_and_positions_of_masks(kernels):
    generator = torch.Generator().manual_seed(1)
    parents = [random_parents(generator) for _ in range(8)]
    masks, lens = torch.stack([mask_of(p) for p in parents]), torch.arange(8) + 3
    positions, (index, next_token, next_sibling) = torch.empty(8 * NODES, dtype=torch.int64), links(8)
    kernels.reconstruct_indices_from_tree_mask(
        masks.flatten(), lens, positions, index, next_token, next_sibling, 8, NODES
    )
    assert [parents_from(a, b) for a, b in zip(next_token, next_sibling, strict=True)] == parents
    assert torch.equal(index.flatten(), torch.arange(8 * NODES))
    assert torch.equal(positions.view(8, NODES), lens[:, None] + masks.sum(-1) - 1)


def test_a_tree_of_selected_tokens(kernels):
    # 2 branches and 3 steps: tokens 0, 1 below the root; 2, 3 below token 0, 4, 5 below token 1; then 6, 7
    # below token 3 and 8, 9 below token 4.
    parent_list = torch.tensor([[-1, 0, 1, 3, 4]])
    selected = torch.tensor([[0, 1, 3, 4, 7]])
    mask, positions, (index, next_token, next_sibling) = (
        torch.ones(2 * NODES * NODES, dtype=torch.bool),
        torch.empty(NODES, dtype=torch.int64),
        links(1),
    )
    kernels.build_tree_kernel_efficient_cpu(
        parent_list,
        selected,
        torch.tensor([11]),
        mask,
        positions,
        index,
        next_token,
        next_sibling,
        2,
        3,
        NODES,
        1,
    )
    parents = [-1, 0, 0, 1, 2, 3]
    assert torch.equal(mask[: NODES * NODES].view(NODES, NODES), mask_of(parents))
    assert mask[NODES * NODES :].all()  # the buffer's rest
    assert parents_from(next_token[0], next_sibling[0]) == parents
    assert positions.tolist() == [11, 12, 12, 13, 13, 14]
    selected = torch.tensor([[0, 1, 2, 4, 7]])  # 7 without its parent, 3
    kernels.build_tree_kernel_efficient_cpu(
        parent_list,
        selected,
        torch.tensor([11]),
        mask,
        positions,
        index,
        next_token,
        next_sibling,
        2,
        3,
        NODES,
        1,
    )
    assert parents_from(next_token[0], next_sibling[0]) == [-1, 0, 0, 1, 2, -1]
    assert mask[5 * NODES : 6 * NODES].tolist() == [False] * 5 + [True]


def test_the_accepted_path(kernels):
    parents = [-1, 0, 0, 1, 2, 4]
    _, next_token, next_sibling = index, *_ = links(1)
    kernels._link(parents, 0, index, next_token, next_sibling)
    candidates, target = torch.tensor([[9, 1, 2, 3, 4, 5]]), torch.tensor([[2, 0, 4, 0, 5, 7]])
    predicts, accepted, count = (
        torch.zeros(NODES, dtype=torch.int32),
        torch.full((1, 4), -1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
    )
    kernels.verify_tree_greedy_cpu(
        predicts, accepted, count, candidates, index, next_token, next_sibling, target
    )
    assert accepted.tolist() == [[0, 2, 4, 5]]
    assert count.tolist() == [3]
    assert predicts[[0, 2, 4, 5]].tolist() == [2, 4, 5, 7]


def test_slots(kernels):
    table, rows, start = (
        torch.arange(60, dtype=torch.int32).view(3, 20),
        torch.tensor([2, 0]),
        torch.tensor([3, 5]),
    )
    out = torch.zeros(12, dtype=torch.int64)
    kernels.assign_draft_cache_locs_contiguous_cpu(rows, table, start, out, 20, 2, 3)
    assert out.tolist() == [43, 44, 45, 46, 47, 48, 5, 6, 7, 8, 9, 10]
    kernels.assign_extend_cache_locs_cpu(rows, table, start, start + torch.tensor([1, 2]), out, 20)
    assert out[:3].tolist() == [43, 5, 6]
    kernels.assign_req_to_token_pool_cpu(
        rows, table, start, start + 2, torch.tensor([100, 101, 102, 103]), 20
    )
    assert table[2, 3:5].tolist() == [100, 101]
    assert table[0, 5:7].tolist() == [102, 103]
    packed = torch.zeros(4, dtype=torch.int64)
    kernels.fill_accept_out_cache_loc_cpu(
        torch.tensor([[0, 2, -1], [3, -1, -1]]), torch.tensor([10, 11, 12, 13]), packed
    )
    assert packed.tolist() == [10, 12, 13, 0]
    last = torch.zeros(2, dtype=torch.int32)
    kernels.fill_bonus_tokens_cpu(torch.arange(6), torch.tensor([2, 1]), last, 3)
    assert last.tolist() == [1, 3]


def test_slots_are_read_before_any_is_written(kernels):
    buffers = [
        torch.arange(24, dtype=torch.float32).view(6, 4),
        torch.arange(12, dtype=torch.int16).view(6, 2),
    ]
    expected = [buffer.clone() for buffer in buffers]
    target, source = torch.tensor([1, 2]), torch.tensor([2, 1])
    for buffer in expected:
        buffer[target] = buffer[source]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)
    kernels.copy_all_layer_kv_cache_cpu(addresses, torch.tensor([16, 4]), target, source)
    assert all(torch.equal(buffer, other) for buffer, other in zip(buffers, expected, strict=True))


@pytest.mark.skipif(torch.version.cuda is not None, reason="a torch that pins memory")
def test_memory_for_lora_is_left_unpinned(monkeypatch):
    """From the moment when SGLang imports its torch code for LoRA."""
    monkeypatch.setattr(sys, "meta_path", [])
    for name in ("tensor", "arange", "empty", "zeros"):
        monkeypatch.setattr(torch, name, getattr(torch, name))  # put back in the end
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.pin_memory)
    runpy.run_path(str(Path(__file__).parents[2] / "integration" / "sglang_cpu" / "sitecustomize.py"))
    finders = list(sys.meta_path)
    for finder in finders:
        finder.find_spec("sglang.srt.lora", None)
    with pytest.raises(RuntimeError):
        torch.tensor([1, 2], pin_memory=True)
    for finder in finders:
        finder.find_spec("sglang.srt.lora.backend.torch_backend", None)
    assert len(sys.meta_path) == len(finders) - 1
    assert torch.tensor([1, 2], dtype=torch.int32, pin_memory=True).tolist() == [1, 2]
    assert torch.arange(1, 3, pin_memory=True).tolist() == [1, 2]
    assert torch.zeros(2, pin_memory=True).pin_memory().tolist() == [0, 0]
    assert torch.empty((3, 2), pin_memory=True, device="cpu").shape == (3, 2)
