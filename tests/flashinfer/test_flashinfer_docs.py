"""The example of docs/flashinfer.md runs unchanged; errors name missing features."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_backend import flashinfer
from attn_backend.flashinfer.features import MISSING

PAGE = Path(__file__).resolve().parents[2] / "docs" / "flashinfer.md"


def test_the_example(device: torch.device) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(example.replace('"cpu"', f'"{device.type}"'), names)
    assert names["out"].shape == (3, 8, 64)
    assert not names["out"].isnan().any()
    assert names["tokens"].shape == (3,)


def test_public_names_are_there() -> None:
    for name in flashinfer.__all__:
        assert hasattr(flashinfer, name)


@pytest.mark.parametrize("name", sorted(MISSING))
def test_missing_names_are_found_and_refuse(name: str) -> None:
    assert hasattr(flashinfer, name)
    with pytest.raises(NotImplementedError, match=rf"^{name} is not supported by attn_backend\.flashinfer"):
        getattr(flashinfer, name)(1, option=2)


def test_missing_classes_are_classes() -> None:
    """Code uses them in isinstance and as base classes, and looks up enumeration members."""
    from attn_backend.flashinfer import SegmentGEMMWrapper, SfLayout

    assert not isinstance(1, SegmentGEMMWrapper)
    with pytest.raises(
        NotImplementedError, match=r"^SegmentGEMMWrapper is not supported by attn_backend\.flashinfer"
    ):
        type("Own", (SegmentGEMMWrapper,), {})()
    assert not hasattr(SfLayout, "layout_linear")
    with pytest.raises(
        AttributeError, match=r"^SfLayout\.layout_linear is not supported by attn_backend\.flashinfer"
    ):
        SfLayout.layout_linear  # noqa: B018


@pytest.mark.parametrize(
    "name", ["CuteDslMoEWrapper", "add_rmsnorm_fp4quant", "gdn_fused_decode_step", "norm", "activation"]
)
def test_optional_names_do_not_exist(name: str) -> None:
    """Code that checks whether FlashInfer has them works without."""
    assert not hasattr(flashinfer, name)
    with pytest.raises(ImportError, match=name):
        exec(f"from attn_backend.flashinfer import {name}")


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        flashinfer.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    "name",
    [
        "mm_fp8",
        "nvfp4_quantize_append_paged_kv_cache",
        "cudnn_batch_decode_with_kv_cache",
        "BatchDecodeMlaWithPagedKVCacheWrapper",
    ],
)
def test_functions_that_are_missing_refuse(name: str) -> None:
    with pytest.raises(NotImplementedError, match=name):
        getattr(flashinfer, name)()
