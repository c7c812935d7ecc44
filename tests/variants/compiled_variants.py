"""Variants' C++, compiled with g++ in one call, and evaluated for arrays of coordinates."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_backend.variants import Variant

CSRC = Path(__file__).resolve().parents[2] / "csrc"
COMPILER = shutil.which("g++") or ""

_CALLS = """
struct Coordinates {
  const int32_t *b, *h, *q_idx, *kv_idx, *index, *kv_len;
};

template <class Variant>
void evaluate(const unsigned char* bytes, const Coordinates& at, int n, const float* scores,
              float* logits, bool* mask, float* slopes) {
  attn::VariantParams params;
  __builtin_memcpy(params.bytes, bytes, sizeof(typename Variant::Params));
  for (int i = 0; i < n; ++i) {
    const Variant variant(params.as<typename Variant::Params>(), 0);
    const attn::ScoreRow row{0, at.b[i], at.h[i], at.q_idx[i], at.index[i], at.kv_len[i]};
    logits[i] = scores[i];
    mask[i] = true;
    slopes[i] = 0;
    using Hooks = attn::VariantHooks<Variant>;
    if constexpr (Hooks::kLogits) logits[i] = variant.logits(scores[i], row, at.kv_idx[i]);
    if constexpr (Hooks::kBiasSlope) slopes[i] = variant.bias_slope(row);
    if constexpr (Hooks::kMask) mask[i] = variant.mask(row, at.kv_idx[i]);
  }
}

template <class Variant>
int hooks() {
  using Hooks = attn::VariantHooks<Variant>;
  return Hooks::kLogits + 2 * Hooks::kMask + 4 * Hooks::kOutput + 8 * Variant::kUsesSoftmax +
         16 * Hooks::kBiasSlope;
}
"""


@dataclass(frozen=True)
class Coordinates:
    """int32 [n] each."""

    b: Tensor
    h: Tensor
    q_idx: Tensor
    kv_idx: Tensor
    index: Tensor
    kv_len: Tensor


class CompiledVariants:
    def __init__(self, variants: Sequence[Variant], folder: Path, flags: Sequence[str] = ()) -> None:
        source = [
            '#include "attention/variant/variant_math.h"\n#include "attention/variant/variants.h"\n',
            _CALLS,
        ]
        for i, variant in enumerate(variants):
            source.append(variant.source.replace("UserVariant", f"UserVariant{i}"))
            source.append(
                f'extern "C" void evaluate_{i}(const unsigned char* params, const Coordinates& at, int n, '
                f"const float* scores, float* logits, bool* mask, "
                f"float* slopes) {{\n  evaluate<attn::UserVariant{i}>(params, at, n, scores, logits, mask, "
                f"slopes);\n}}\n"
                f'extern "C" int hooks_{i}() {{ return hooks<attn::UserVariant{i}>(); }}\n'
            )
        path = folder / "variants.cpp"
        path.write_text("\n".join(source))
        library = folder / "variants.so"
        command = [
            COMPILER,
            "-std=c++17",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fPIC",
            "-shared",
            f"-I{CSRC}",
            *flags,
            str(path),
            "-o",
            str(library),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:5000]
        self._library = ctypes.CDLL(str(library))

    def hooks(self, i: int) -> int:
        return int(getattr(self._library, f"hooks_{i}")())

    def evaluate(
        self, i: int, variant: Variant, at: Coordinates, scores: Tensor, args: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(logits, mask, slopes of a bias) of the hooks; the interval is ignored."""
        tensors = [
            t.to(torch.int32).contiguous() for t in (at.b, at.h, at.q_idx, at.kv_idx, at.index, at.kv_len)
        ]
        addresses = (ctypes.c_void_p * 6)(*(t.data_ptr() for t in tensors))
        logits, slopes, mask = (
            torch.empty_like(scores),
            torch.empty_like(scores),
            torch.empty(scores.shape, dtype=torch.bool),
        )
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (scores, logits, mask, slopes)]
        getattr(self._library, f"evaluate_{i}")(
            variant.pack(args, torch.device("cpu")), addresses, scores.shape[0], *pointers
        )
        return logits, mask, slopes


def interval(variant: Variant, at: Coordinates) -> Tensor:
    """The pairs that variant.causal and variant.window_left allow."""
    seen = torch.ones(at.q_idx.shape, dtype=torch.bool)
    if variant.causal:
        seen &= at.kv_idx <= at.q_idx
    if variant.window_left >= 0:
        seen &= at.q_idx - at.kv_idx <= variant.window_left
    return seen
