"""Variants in C++, and the same variants for the oracle."""

from __future__ import annotations

import oracle
import torch

from attn_backend import Variant

SLANTED = Variant.from_source(
    """\
float logits(float logit, const ScoreRow& row, int32_t kv_position) const {
  return logit + slope * static_cast<float>((row.qo_head + 1) * (kv_position - row.position));
}
bool mask(const ScoreRow& row, int32_t kv_position) const {
  return (kv_position + row.row + row.index + row.kv_len + 5 * row.request + row.qo_head) % 3 != 0;
}
float output(float value, const ScoreRow& row, int32_t column) const {
  return value + static_cast<float>(row.request % 4 + column % 3);
}
""",
    {"slope": float},
    name="slanted",
)

SQUARED_CPP = """\
static constexpr bool kUsesSoftmax = false;
float logits(float logit, const ScoreRow&, int32_t) const { return logit * logit; }
"""
SQUARED = Variant.from_source(SQUARED_CPP, name="squared")

ALIBI_CPP = """\
float logits(float logit, const ScoreRow& row, int32_t kv_position) const {
  return logit + slope * static_cast<float>(kv_position - row.position);
}
"""


def alibi(cpp: str = ALIBI_CPP, name: str = "alibi") -> Variant:
    return Variant.from_source(cpp, {"slope": float}, name=name)


ALIBI = alibi()
MISSPELT = alibi(ALIBI_CPP.replace("return logit +", "return logti +"), "misspelt")
MISSPELT_LINE = 2


def slanted_oracle(slope: float) -> oracle.Variant:
    return oracle.Variant(
        logits=lambda logits, at: logits + slope * (at.head + 1) * (at.token - at.position),
        mask=lambda at: (at.token + at.row + at.index + at.kv_len + 5 * at.request + at.head) % 3 != 0,
        output=lambda o, at: o + at.request % 4 + torch.arange(o.shape[-1], device=o.device) % 3,
    )


SQUARED_ORACLE = oracle.Variant(logits=lambda logits, _at: logits * logits, uses_softmax=False)


def alibi_oracle(slope: float) -> oracle.Variant:
    return oracle.Variant(logits=lambda logits, at: logits + slope * (at.token - at.position))
