"""repr() of metadata: short, and made without reading tensor contents."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attn_backend import BSRView, Composition, KVCache, PageTable, Rotary
from attn_backend.kernels.selection import SelectedTokens
from attn_backend.validation import describe, refuse


class NothingIsRead(TorchDispatchMode):
    """Every operator is an error, including copies, element reads, and operations that would make a GPU
    wait."""

    def __torch_dispatch__(
        self, func: object, types: object, args: object = (), kwargs: object = None
    ) -> None:
        raise AssertionError(f"{func} was called")


def int32(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)


def table() -> PageTable:
    return PageTable.block_table(int32(64, 100), int32(64), 16)


def view() -> BSRView:
    return BSRView(int32(65), table(), rows=int32(64), window_left=7)


K = torch.zeros(1000, 16, 8, 128, dtype=torch.bfloat16)
SHOWN: dict[str, tuple[Callable[[], object], str]] = {
    "cache": (
        lambda: KVCache(K, K[..., :64]),
        "KVCache(k=bfloat16[1000, 16, 8, 128], v=bfloat16[1000, 16, 8, 64], device=cpu, page_size=16)",
    ),
    "scaled cache": (
        lambda: KVCache(K.to(torch.float8_e4m3fn), K.to(torch.float8_e4m3fn), 0.5, torch.ones(8)),
        "KVCache(k=float8_e4m3fn[1000, 16, 8, 128], v=float8_e4m3fn[1000, 16, 8, 128], k_scale=0.5, "
        "v_scale=float32[8], device=cpu, page_size=16)",
    ),
    "unchecked cache": (
        lambda: KVCache.unchecked(K, K),
        "KVCache(k=bfloat16[1000, 16, 8, 128], v=bfloat16[1000, 16, 8, 128], device=cpu, page_size=16)",
    ),
    "table": (table, "PageTable(page_size=16, indices=int32[64, 100], kv_lens=int32[64], device=cpu)"),
    "view": (
        view,
        f"BSRView(qo_indptr=int32[65], table={table()!r}, window_left=7, rows=int32[64], device=cpu)",
    ),
    "composition": (
        lambda: Composition([view(), view()]),
        f"Composition(levels=({view()!r}, {view()!r}), page_size=16)",
    ),
    "selected tokens": (
        lambda: SelectedTokens(int32(64, 2048), page_size=16),
        "SelectedTokens(indices=int32[64, 2048], page_size=16, device=cpu)",
    ),
    "rotary": (lambda: Rotary(torch.zeros(4096, 128)), "Rotary(table=float32[4096, 128], device=cpu)"),
}


@pytest.mark.parametrize("what", SHOWN)
def test_tensors_are_shown_by_their_handles(what: str) -> None:
    make, text = SHOWN[what]
    made = make()
    with NothingIsRead():
        assert repr(made) == text
        assert describe(made)


def test_a_cache_in_the_place_of_a_tensor_is_named_without_a_look_at_it() -> None:
    cache = KVCache(K, K)
    with NothingIsRead(), pytest.raises(ValueError, match=r"^q is a KVCache, must be a tensor$"):
        refuse("q", cache, "a tensor")


def test_what_is_no_tensor_is_shown_as_it_is() -> None:
    assert repr(KVCache.as_given("k", [1])).startswith("KVCache(k='k', v=[1]"), (
        "a cache that was not checked may hold anything"
    )
