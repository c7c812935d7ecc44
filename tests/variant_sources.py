"""Variants written in C++, as an Attention takes them, and the same for the oracle."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oracle
import torch

_HEADER = Path(__file__).with_name("csrc") / "slanted_variant.h"


@dataclass(frozen=True, eq=False)
class SourceVariant:
    """A variant whose Params are floats."""

    name: str
    source: str
    params: tuple[str, ...] = ()
    uses_softmax: bool = True
    has_logits: bool = True
    has_mask: bool = False
    has_output: bool = False
    causal: bool = False
    window_left: int = -1

    @property
    def params_bytes(self) -> int:
        return 4 * len(self.params)

    def pack(self, args: Mapping[str, Any], device: torch.device) -> bytes:
        return struct.pack(f"{len(self.params)}f", *(args[name] for name in self.params))


def of_header(name: str, struct_name: str, **traits: Any) -> SourceVariant:
    """A struct of slanted_variant.h."""
    user = f"struct UserVariant : {struct_name} {{\n  using {struct_name}::{struct_name};\n}};"
    return SourceVariant(name, f"{_HEADER.read_text().replace('#pragma once', '')}\nnamespace attn {{\n{user}\n}}  // namespace attn\n", **traits)


SLANTED = of_header("slanted", "SlantedVariant", params=("slope",), has_mask=True, has_output=True)
SQUARED = of_header("squared", "SquaredVariant", uses_softmax=False)

ALIBI_SOURCE = """\
#include "attention/variants.h"

namespace attn {
struct UserVariant : VariantBase {
  struct Params {
    float slope;
  };
  float slope;

  ATTN_HD UserVariant(const Params& params, int32_t /*kv_head*/) : slope(params.slope) {}
  ATTN_HD float logits(float logit, const ScoreRow& row, int32_t kv_position) const {
    return logit + slope * static_cast<float>(kv_position - row.position);
  }
};
}  // namespace attn
"""
ALIBI = SourceVariant("alibi", ALIBI_SOURCE, params=("slope",))
MISSPELT_LINE = 12
MISSPELT = SourceVariant("misspelt", ALIBI_SOURCE.replace("return logit +", "return logti +"), params=("slope",))


def slanted_oracle(slope: float) -> oracle.Variant:
    return oracle.Variant(
        logits=lambda logits, at: logits + slope * (at.head + 1) * (at.token - at.position),
        mask=lambda at: (at.token + at.row + at.index + at.kv_len + 5 * at.request + at.kv_head) % 3 != 0,
        output=lambda o, at: o + at.request % 4 + torch.arange(o.shape[-1], device=o.device) % 3,
    )


SQUARED_ORACLE = oracle.Variant(logits=lambda logits, _at: logits * logits, uses_softmax=False)


def alibi_oracle(slope: float) -> oracle.Variant:
    return oracle.Variant(logits=lambda logits, at: logits + slope * (at.token - at.position))
