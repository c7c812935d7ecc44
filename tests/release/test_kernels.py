"""The kernels that CI compiles."""

from __future__ import annotations

import re

from attn_backend.jit import manifest
from attn_backend.jit.manifest import ARCHS
from release import kernels


def test_kernels_that_ci_leaves_out_are_like_others() -> None:
    """CI compiles the same kernels for bfloat16, Ampere or narrower heads, or another sampling kernel."""
    distinct = {arch: set(kernels.distinct_kernels(arch)) for arch in ARCHS}
    left_out = {arch: manifest.kernels(arch).keys() - names for arch, names in distinct.items()}
    for arch, names in left_out.items():
        for name in names:
            like = name.replace("_f16_", "_bf16_")
            if name.endswith(("_sinks", "_alibi")):
                like = re.sub(r"_d\d+_", "_d64_", like)
            if name.startswith("sampling"):
                like = {"sm_90a": "sampling_bf16", "sm_80": "sampling_f32"}[arch]
            assert like in distinct["sm_80" if "_sm80_" in name else arch], name
    assert {arch: len(names) for arch, names in left_out.items()} == {"sm_90a": 67, "sm_80": 18}
    for name in ("attention_sm80_bf16_d128_standard", "attention_sm90_f16_d128_standard"):
        assert name in distinct["sm_90a"]
