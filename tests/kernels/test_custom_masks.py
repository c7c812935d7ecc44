"""Tensor masks, as bits and as booleans: 2-D ragged, over a batch whose requests have different masks."""

from __future__ import annotations

from typing import Any

import case_tensors
import cases
import oracle
import pytest
import torch
from torch import Tensor

from attn_backend.jit import compilers
from attn_backend.variants import Variant, builtin, segment_packbits

pytestmark = [
    pytest.mark.usefixtures("kernel"),
    pytest.mark.skipif(compilers.cpp_compiler() is None, reason="needs a C++ compiler"),
]

SPEC = cases.Spec((7, 64, 1, 30), (300, 64, 700, 410), group_size=2, sharing=0.8, num_ctas=5)
TREE = {"custom_mask": False, "tree_mask": True}


def random_masks(name: str, seed: int) -> list[Tensor]:
    """A mask of q_len x kv_len for each request, or of q_len x q_len; a query of a tree sees itself."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i, (qo_len, kv_len) in enumerate(zip(SPEC.qo_lens, SPEC.kv_lens, strict=True)):
        mask = (
            torch.rand(qo_len, qo_len if TREE[name] else kv_len, generator=generator)
            < (0.1, 0.5, 0.9)[(seed + i) % 3]
        )
        mask[:, mask.shape[1] // 3 : mask.shape[1] // 2] = False  # KV tiles that no query sees
        made.append(mask | torch.eye(qo_len, dtype=torch.bool) if TREE[name] else mask)
    return made


def arguments(masks: list[Tensor], packed: bool, device: torch.device) -> dict[str, Tensor]:
    flat = torch.cat([mask.flatten() for mask in masks]).to(device)
    indptr = torch.tensor([0, *(mask.numel() for mask in masks)], dtype=torch.int32, device=device).cumsum(
        0, dtype=torch.int32
    )
    if not packed:
        return {"mask": flat, "mask_indptr": indptr}
    packed_mask, byte_indptr = segment_packbits(flat, indptr, "little")
    return {"packed_mask": packed_mask, "mask_indptr": byte_indptr}


def expected(case: case_tensors.Case, name: str, masks: list[Tensor], **more: Any) -> tuple[Tensor, Tensor]:
    def seen(at: oracle.Pairs) -> Tensor:
        mask, first = masks[at.request], at.kv_len - len(masks[at.request])
        whole = torch.cat([torch.ones(len(mask), first, dtype=torch.bool), mask], 1) if TREE[name] else mask
        return whole[None].to(at.token.device)

    return case.expected(variant=oracle.Variant(mask=seen), **more)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", TREE)
def test_masks_of_any_kind(device: torch.device, name: str, packed: bool) -> None:
    """With and without the mask in plan, by itself and intersected with a causal view, passed to the variant
    or to runs.
    """
    for seed in range(3):
        case, masks = (
            case_tensors.build(SPEC.with_(seed=seed, causal=seed == 1), device),
            random_masks(name, seed),
        )
        args = arguments(masks, packed, device)
        bound: Variant = getattr(builtin, name)(**args)
        given: Variant = getattr(builtin, name)(packed=packed)
        for variant, to_run, to_plan in ((given, args, args), (given, args, None), (bound, {}, {})):
            attention = case.attention(variant=variant, cascade="always")
            attention.plan(case.view, variant_args=to_plan)
            case.out.fill_(torch.nan)
            case.run(attention, out=case.out, lse=case.lse, variant_args=to_run)
            case_tensors.check(case, case.out, case.lse, expected(case, name, masks))


@pytest.mark.gpu
def test_a_captured_plan_reads_what_booleans_hold() -> None:
    """Nothing is packed on the host: plan and run are captured once, and masks change between replays."""
    device = torch.device("cuda")
    case, masks = case_tensors.build(SPEC.with_(causal=False), device), random_masks("custom_mask", 0)
    args = arguments(masks, False, device)
    attention = case.attention(variant=builtin.custom_mask(packed=False))

    def step() -> None:
        attention.plan(case.view, variant_args=args)
        case.run(attention, out=case.out, lse=case.lse, variant_args=args)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(1, 5):
        masks = random_masks("custom_mask", seed)
        args["mask"].copy_(torch.cat([mask.flatten() for mask in masks]))
        case.out.fill_(torch.nan)
        graph.replay()
        case_tensors.check(case, case.out, case.lse, expected(case, "custom_mask", masks))


@pytest.mark.parametrize("name", TREE)
def test_what_is_refused(name: str) -> None:
    make = getattr(builtin, name)
    booleans, bits, indptr = (
        torch.ones(4, dtype=torch.bool),
        torch.ones(1, dtype=torch.uint8),
        torch.tensor([0, 4], dtype=torch.int32),
    )
    for wrong in ({"mask": booleans}, {"packed": False}):
        with pytest.raises(
            ValueError, match=r"packed_mask is a uint8 tensor.*, must be None with mask, or with packed=False"
        ):
            make(bits, indptr, **wrong)
    with pytest.raises(
        ValueError, match=r"value of 'mask' is a uint8 tensor.*, must be a bool tensor of 1 dimension"
    ):
        make(mask=bits, mask_indptr=indptr)
    with pytest.raises(
        ValueError, match=r"value of 'packed_mask' is a bool tensor.*, must be a uint8 tensor of 1 dimension"
    ):
        make(booleans, indptr)
    with pytest.raises(ValueError, match="packed is 1, must be True or False"):
        make(packed=1)
    with pytest.raises(ValueError, match=r"variant_args\['mask'\].* must be a bool tensor of 1 dimension"):
        make(packed=False).pack({"mask": bits, "mask_indptr": indptr}, torch.device("cpu"))
