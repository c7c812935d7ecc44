"""The kernel before the planner, without a GPU (device_row_ranges.cpp): it gives the same bits as the host
for row ranges and lists of KV tiles.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import batches
import case_tensors
import cases
import emulation
import host_planner
import numpy
import pytest
import schedule_model
import torch
from workspace import config_bytes, workspace_of

from attn_backend import Attention, Variant
from attn_backend.jit import compilers, manifest
from attn_backend.jit.manifest import HeadDims
from attn_backend.variants import builtin

pytestmark = [
    pytest.mark.skipif(host_planner.COMPILER is None, reason="needs g++"),
    pytest.mark.skipif(compilers.cpp_compiler() is None, reason="needs a C++ compiler"),
]

LIST_BYTES = 4096  # sizeof(KvTileList)
EACH_HEAD = Variant.from_source(
    "bool mask(const ScoreRow& row, int32_t k) const { return k / 50 % (3 + row.qo_head) == 1; }",
    name="each_head",
    skips_kv_tiles=True,
)


@pytest.mark.parametrize("name", ["document", "streaming_llm", "each_head"])
def test_random_batches(tmp_path: Path, name: str) -> None:
    variant = {
        "document": builtin.document(),
        "streaming_llm": builtin.streaming_llm(70, 4),
        "each_head": EACH_HEAD,
    }[name]
    kernel = manifest.variant_kernels(
        "sm_80", manifest.DESIGNS["generic"], manifest.KernelShape("bf16", HeadDims.of(64)), variant
    )["row_ranges"]
    library = emulation.build(
        tmp_path,
        "row_ranges",
        emulation.TESTS / "device_row_ranges.cpp",
        header=kernel.source,
        options=["-O1"],
    )
    library.device_row_ranges.restype = ctypes.c_char_p
    for seed in range(6):
        spec = cases.Spec(
            (1, 100, 7, 0),
            (900, 333, 400, 50),
            group_size=1 + seed,
            page_size=16,
            causal=seed % 2 == 0,
            seed=seed,
            dtype=torch.bfloat16,
        )
        case = case_tensors.build(spec, "cpu")
        ids = torch.randint(
            3, (4, 30), generator=torch.Generator().manual_seed(seed), dtype=torch.int32
        ).repeat_interleave(40, dim=1)
        arguments = {"document_ids": ids} if name == "document" else {}
        attention = case.attention(kernel="hopper", variant=variant, cascade=False)
        attention.plan(case.view, variant_args=arguments)
        workspace = workspace_of(attention)
        expected = workspace.row_ranges
        causal, _ = attention._attention_variant.visibility(case.view, 1)
        levels = host_planner.Levels((case.view,), attention.max_rows, causal=causal)
        config = config_bytes(attention)
        memory = torch.zeros_like(expected)
        num_lists = (len(memory) - attention.max_rows * 16) // LIST_BYTES
        packed = variant.pack(arguments, torch.device("cpu"))
        emulation.check(
            library.device_row_ranges(
                config,
                ctypes.c_void_p(workspace.schedule.data_ptr()),
                levels.data,
                1,
                0,
                packed,
                ctypes.c_size_t(len(packed)),
                ctypes.c_void_p(memory.data_ptr()),
                ctypes.c_void_p(memory[attention.max_rows * 16 :].data_ptr()),
                num_lists,
                1 + seed,
                ctypes.c_uint32(seed),
            )
        )
        assert torch.equal(memory, expected), seed
        counts = memory[attention.max_rows * 16 :].view(torch.int32).view(num_lists, -1)[:, 0]
        assert int((counts > 0).sum()) >= 3


def test_random_lists_of_the_device_planner(tmp_path: Path) -> None:
    """For any content, the device planner gives the same bits as the host planner."""
    library = host_planner.build(tmp_path, device=True)
    for seed in range(24):
        rng = numpy.random.default_rng(seed)
        num_kv_heads, group_size, num_ctas = [(8, 4, 264), (3, 3, 132), (1, 1, 1), (2, 16, 700)][seed % 4]
        options: dict[str, Any] = [{"cascade": "always"}, {"cascade": False}, {"batch_invariant": True}][
            seed % 3
        ]
        room = {"max_rows": batches.MAX_ROWS, "max_batch": batches.MAX_BATCH}
        attention = Attention(
            num_kv_heads * group_size,
            num_kv_heads,
            64,
            device="cpu",
            num_ctas=num_ctas,
            kernel="hopper",
            **room,
            **options,
        )
        view = batches.random_view(3000 + seed, "cpu", valid=seed % 2 == 0)
        mask = host_planner.random_mask(rng, attention)
        planned = host_planner.plan(library, attention, view, mask=mask)
        assert schedule_model.same(host_planner.plan(library, attention, view, seed, mask=mask), planned), (
            seed
        )
