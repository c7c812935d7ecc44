"""Keys and values of different sizes: the names that models look up in vLLM's registry, and layers compared
with float64 attention.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import oracle
import pytest
import torch

pytest.importorskip("vllm.v1", reason="needs vLLM")

from vllm_layer import NUM_PAGES, PAGE, make_batch, make_builder, make_spec

from attn_backend.adapters.vllm import compat
from attn_backend.adapters.vllm.backend import CpuDiffKvBackend, DiffKvBackend
from attn_backend.adapters.vllm.plugin import DIFF_KV_NAMES, register
from attn_backend.adapters.vllm.support import CPU_SWITCH

MIXED = ([1, 7, 40], [33, 23, 40])


@pytest.fixture(autouse=True)
def width_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiffKvBackend, "head_size_v", DiffKvBackend.head_size_v)


def make_layer(head_size: int, head_size_v: int, **arguments: Any) -> Any:
    """Like a model in vLLM: configures the class, then makes the layer."""
    CpuDiffKvBackend.set_head_size_v(head_size_v)
    return CpuDiffKvBackend.get_impl_cls()(6, head_size, head_size**-0.5, 2, **arguments)


@pytest.mark.parametrize(("head_size", "head_size_v"), [(192, 128), (64, 96), (32, 16)])
@pytest.mark.parametrize("window", [None, 8])
def test_a_layer(head_size: int, head_size_v: int, window: int | None) -> None:
    torch.manual_seed(0)
    sinks = None if window is None else torch.randn(6)
    impl = make_layer(head_size, head_size_v, sliding_window=window, sinks=sinks)
    builder, batch = (
        make_builder([impl], make_spec(head_size=head_size, head_size_v=head_size_v)),
        make_batch(*MIXED),
    )
    shape = CpuDiffKvBackend.get_kv_cache_shape(NUM_PAGES, PAGE, 2, head_size)
    assert shape == (NUM_PAGES, 2, PAGE, head_size + head_size_v)
    cache = torch.full(shape, torch.nan)
    k, v = (torch.full((NUM_PAGES * PAGE, 2, width), torch.nan) for width in (head_size, head_size_v))
    for query_len, slots in zip(batch.query_lens, batch.slots, strict=True):
        k[slots], v[slots] = torch.randn(len(slots), 2, head_size), torch.randn(len(slots), 2, head_size_v)
        old = slots[: len(slots) - query_len]
        cache[old // PAGE, :, old % PAGE] = torch.cat([k[old], v[old]], dim=-1)
    metadata = builder.build(0, batch.metadata)
    query, output = torch.randn(48, 6, head_size), torch.full((48, 6, head_size_v), torch.nan)
    impl.do_kv_cache_update(None, k[batch.new_slots], v[batch.new_slots], cache, metadata.slot_mapping)
    impl.forward(None, query, None, None, cache, metadata, output)
    options: dict[str, Any] = {} if window is None else {"window_left": window - 1, "sinks": sinks}
    expected, _ = oracle.paged_attention(query, k, v, batch.query_lens, batch.slots, **options)
    assert (output.double() - expected).norm() / expected.norm() <= 1e-5


def test_layers_keep_the_width_that_they_were_made_with() -> None:
    wide, narrow = make_layer(64, 96), make_layer(64, 32)
    assert [impl.spec.head_dim_v for impl in (wide, narrow, make_layer(64, 64))] == [96, 32, None]


def test_refuses() -> None:
    for arguments, reason in [
        ({"head_size": 64, "head_size_v": 264}, "heads of 64/264 columns"),
        (
            {"head_size": 64, "head_size_v": 32, "attn_type": "encoder_only"},
            "heads of 64/32 columns in attention of type",
        ),
    ]:
        with pytest.raises(NotImplementedError, match=reason):
            make_layer(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", DIFF_KV_NAMES)
def test_the_names_are_ours_where_the_user_has_chosen_us(
    name: str, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CPU_SWITCH, raising=False)
    module, _, class_name = registry[name].value.rpartition(".")
    own = type(class_name, (), {})
    stand_in = ModuleType(module)
    monkeypatch.setattr(stand_in, class_name, own, raising=False)
    monkeypatch.setitem(sys.modules, module, stand_in)  # vLLM's own, which may need a GPU's packages
    register()
    for chosen, wanted in ((registry.CUSTOM, DiffKvBackend), (None, own), (registry[name], own)):
        config = SimpleNamespace(attention_config=SimpleNamespace(backend=chosen))
        monkeypatch.setattr(compat, "get_current_vllm_config_or_none", lambda config=config: config)
        assert registry[name].get_class() is wanted
    monkeypatch.setenv(CPU_SWITCH, "1")
    assert registry[name].get_class() is CpuDiffKvBackend
    assert DiffKvBackend.is_supported_on_current_device(head_size=192, head_size_v=128, has_sinks=True)


def test_specs_that_do_not_say_the_width_of_v() -> None:
    """In 0.26: the specs of cross attention and of chunked local attention."""
    assert compat.head_size_v(SimpleNamespace(head_size=64)) == 64
    assert compat.head_size_v(SimpleNamespace(head_size=192, head_size_v=128)) == 128
