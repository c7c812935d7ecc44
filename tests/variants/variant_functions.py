"""Functions in flex_attention's signatures, and their inputs: the cases of the tests.

Many follow well-known examples of flex_attention.
"""
# ruff: noqa: F821

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.attention.flex_attention import and_masks, or_masks

from attn_backend.variants import Variant

# Requests, heads, tokens: coordinates stay below these. SIZES: set by code that loads this file again for
# larger batches (variant_fuzz/catalogue.py).
B, H, LENGTH = globals().get("SIZES", (3, 4, 96))
WIDTH = 12  # width of an image, row by row
torch.manual_seed(0)


@dataclass(frozen=True)
class Case:
    name: str
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    tensors: dict[str, Any] = field(default_factory=dict)  # declared
    args: dict[str, Any] = field(default_factory=dict)

    def variant(self) -> Variant:
        return Variant.from_functions(self.score_mod, self.mask_mod, tensors=self.tensors, name=self.name)


CASES: list[Case] = []


def case(
    args: dict[str, Any] | None = None, **tensors: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds a function by the number of its arguments. tensors: default to those declared by the dtypes of
    args.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        declared = {
            name: (value.dtype, value.ndim) if isinstance(value, torch.Tensor) else type(value)
            for name, value in (args or {}).items()
        } | tensors
        is_score = function.__code__.co_argcount == 5
        CASES.append(
            Case(
                function.__name__,
                function if is_score else None,
                None if is_score else function,
                declared,
                args or {},
            )
        )
        return function

    return add


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def ints(high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(0, high, shape).to(dtype)


# ---- Scores ----


@case()
def unchanged(score, b, h, q_idx, kv_idx):
    return score


@case()
def relative_position(score, b, h, q_idx, kv_idx):
    return score + (q_idx - kv_idx)


@case()
def relative_position_of_even_heads(score, b, h, q_idx, kv_idx):
    return torch.where(h % 2 == 0, score + 0.25 * (q_idx - kv_idx), score)


@case({"slopes": floats(H)})
def alibi_declared(score, b, h, q_idx, kv_idx):
    return score + slopes[h] * (kv_idx - q_idx)


@case()
def alibi_computed(score, b, h, q_idx, kv_idx):
    return score + torch.exp2(-((h + 1) * 8.0 / H)) * (kv_idx - q_idx)


@case()
def alibi_of_a_number(score, b, h, q_idx, kv_idx):
    return (kv_idx.to(score.dtype) - q_idx.to(score.dtype)) * 0.125 + score


@case({"slopes": floats(H)})
def alibi_from_behind(score, b, h, q_idx, kv_idx):
    return score - slopes[h] * (q_idx - kv_idx)


@case()
def soft_cap_by_hand(score, b, h, q_idx, kv_idx):
    return 20.0 * torch.tanh(score / 20.0)


@case({"cap": 5.5})
def soft_cap_of_a_number(score, b, h, q_idx, kv_idx):
    return torch.tanh(score / cap) * cap


@case({"cap": floats()[None].abs()[0] + 1})
def soft_cap_of_a_tensor_without_dimensions(score, b, h, q_idx, kv_idx):
    return torch.tanh(score / cap) * cap


@case({"bias": floats(2 * LENGTH)})
def bias_by_distance(score, b, h, q_idx, kv_idx):
    return score + bias[q_idx - kv_idx + LENGTH]


@case({"bias": floats(LENGTH)})
def bias_from_the_end(score, b, h, q_idx, kv_idx):
    return score + bias[q_idx - kv_idx] + bias[-1]


@case({"bias": floats(H, 2 * LENGTH, dtype=torch.bfloat16)})
def bias_by_head_and_distance(score, b, h, q_idx, kv_idx):
    return score + bias[h, q_idx - kv_idx + LENGTH].to(torch.float32)


@case({"bias": floats(B, H, LENGTH).transpose(1, 2)})
def bias_with_strides(score, b, h, q_idx, kv_idx):
    return score + bias[b][kv_idx][h]


@case({"bias": floats(B, H, LENGTH, dtype=torch.float16)})
def bias_of_keys(score, b, h, q_idx, kv_idx):
    return score + bias[b, :, kv_idx][h].float()


@case({"table": floats(H, 32)})
def t5_buckets(score, b, h, q_idx, kv_idx):
    distance = torch.clamp(q_idx - kv_idx, min=0)
    far = 16 + (torch.log(torch.clamp(distance, min=1).float() / 16) / math.log(128 / 16) * 16).to(
        torch.int32
    )
    return score + table[h, torch.where(distance < 16, distance, torch.minimum(far, torch.tensor(31)))]


@case()
def kerple_log(score, b, h, q_idx, kv_idx):
    return score - 0.7 * torch.log(1 + 0.3 * torch.abs(q_idx - kv_idx))


@case()
def gaussian_of_the_distance(score, b, h, q_idx, kv_idx):
    return score - ((q_idx - kv_idx) / 8.0) ** 2 / 2


@case()
def score_masked_by_where(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx >= kv_idx, score, -float("inf"))


@case({"gate": floats(B, LENGTH)})
def forgetting_gate(score, b, h, q_idx, kv_idx):
    return score + gate[b, q_idx] - gate[b, kv_idx]


@case()
def log_length_temperature(score, b, h, q_idx, kv_idx):
    return score * torch.log2((q_idx + 2).float()) * 0.3


@case()
def squared_relu(score, b, h, q_idx, kv_idx):
    return torch.relu(score).square() + score**3 * 0.01


@case()
def gelu_by_sigmoid(score, b, h, q_idx, kv_idx):
    return score * torch.sigmoid(1.702 * score) / (1 + torch.exp(-score.abs()))


@case()
def roots_and_powers(score, b, h, q_idx, kv_idx):
    return (
        score * (1 + kv_idx) ** -0.5
        + torch.sqrt(score * score + 1)
        - (score * score + 1).rsqrt()
        + 2.0 ** (score / 4)
        - 1 / (kv_idx + 1)
    )


@case()
def rounding(score, b, h, q_idx, kv_idx):
    return (
        torch.floor(score * 4) / 4 + torch.ceil(score) + score % 0.75 + score // 0.75 + (q_idx - kv_idx) / 7
    )


@case()
def casts(score, b, h, q_idx, kv_idx):
    return (
        score.to(torch.int32).float()
        + (kv_idx % 3).bool().float()
        + torch.where(score > 0, kv_idx, q_idx)
        + (h > 1).to(score.dtype)
        + (h > 1) * score
    )


@case({"scale": floats(H), "shift": floats(H)})
def affine_of_each_head(score, b, h, q_idx, kv_idx):
    return torch.add(torch.mul(score, scale[h]), shift[h], alpha=2)


@case(
    {
        "count": ints(9, B, dtype=torch.int64),
        "step": 3,
        "flags": ints(2, H).bool(),
        "bytes_": ints(200, LENGTH, dtype=torch.uint8),
    }
)
def many_dtypes(score, b, h, q_idx, kv_idx):
    return torch.where(flags[h] & (kv_idx % step == 1), score * count[b], score - bytes_[kv_idx] * 0.01)


CAPTURED = floats(H, 8)


def bias_in_module(h, distance):
    return CAPTURED[h, distance & 7]


@case()
def captured_global_by_helper(score, b, h, q_idx, kv_idx):
    return score + bias_in_module(h, q_idx - kv_idx) * CAPTURED[0, 0]


@case({"slopes": floats(H)})
def declared_name_in_helper(score, b, h, q_idx, kv_idx):
    return score + slope_of(h) * (q_idx - kv_idx)


def slope_of(h):
    return slopes[h].abs()


def learned_bias(table: torch.Tensor) -> Callable[..., Any]:
    def learned(score, b, h, q_idx, kv_idx):
        return score + table[b, h] + table.sum()

    return learned


CASES.append(
    Case("captured_in_closure", learned_bias(floats(B, H)), lambda b, h, q_idx, kv_idx: q_idx * 2 >= kv_idx)
)


class Bias:
    def __init__(self) -> None:
        self.table = floats(LENGTH)

    def method(self, score, b, h, q_idx, kv_idx):
        return score + self.table[kv_idx]

    def __call__(self, score, b, h, q_idx, kv_idx):
        return score - self.table[kv_idx]


CASES.append(Case("bound_method", Bias().method))
CASES.append(Case("callable_object", Bias()))
CASES.append(
    Case("partial_function", partial(lambda factor, score, b, h, q_idx, kv_idx: score * factor, 3.0))
)
CASES.append(
    Case(
        "shared_by_both",
        lambda s, b, h, q, k: s + CAPTURED[h, k % 8],
        lambda b, h, q, k: CAPTURED[h, k % 8] > 0,
    )
)


@case()
def divisions_of_all_signs(score, b, h, q_idx, kv_idx):
    distance = q_idx - kv_idx
    by_number = distance // -3 + distance % -3 + (-kv_idx) // 3 + (-kv_idx) % 8 + (-q_idx) // -5
    return score + by_number + distance // (-h - 2) + distance % (-h - 2) - (kv_idx % -4) // 3


@case()
def quotients_of_whole_numbers(score, b, h, q_idx, kv_idx):
    return (
        score
        + torch.floor(kv_idx / 41.0)
        + (kv_idx / 47).to(torch.int32)
        + torch.ceil(q_idx / 61.0)
        + torch.floor((q_idx + 0.0) / 83.0)
    )


@case()
def bounds_that_cross(score, b, h, q_idx, kv_idx):
    return torch.clamp(score, 2, 1) + torch.clamp(q_idx, kv_idx, h) + torch.clamp(kv_idx - q_idx, 5, -5)


@case()
def conditions_as_numbers(score, b, h, q_idx, kv_idx):
    near = (q_idx - kv_idx < 8) & (kv_idx <= q_idx)
    return (
        score * near
        + torch.where(near | (h == 1), (h == 0) | (kv_idx < 9), 0.25 * kv_idx)
        + torch.where(h < 2, near & (b == 0), kv_idx % 5)
    )


# ---- Masks ----


@case()
def causal_mask(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


@case()
def strictly_causal(b, h, q_idx, kv_idx):
    return kv_idx < q_idx


@case()
def causal_window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= 17)


@case()
def window_on_both_sides(b, h, q_idx, kv_idx):
    return torch.abs(q_idx - kv_idx) < 9


@case()
def causal_window_by_abs(b, h, q_idx, kv_idx):
    return (kv_idx - q_idx <= 0) & ((kv_idx - q_idx).abs() <= 5)


@case({"prefix": ints(40, B)})
def prefix_lm_mask(b, h, q_idx, kv_idx):
    return (kv_idx <= q_idx) | (kv_idx < prefix[b])


@case({"documents": ints(5, LENGTH).sort()[0].to(torch.int32)})
def causal_documents(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (documents[q_idx] == documents[kv_idx])


@case({"documents": ints(5, B, LENGTH, dtype=torch.int64)})
def documents_of_requests(b, h, q_idx, kv_idx):
    return documents[b, q_idx] == documents[b][kv_idx]


@case({"lengths": (LENGTH - 30 * torch.arange(B, dtype=torch.int32)).clamp(min=1)})
def padding(b, h, q_idx, kv_idx):
    return torch.logical_and(q_idx < lengths[b], kv_idx < lengths[b])


@case()
def dilated_window(b, h, q_idx, kv_idx):
    return (abs(q_idx - kv_idx) <= 20) & ((q_idx - kv_idx) % 4 == 0)


@case()
def neighbourhood_2d(b, h, q_idx, kv_idx):
    q_x, q_y, kv_x, kv_y = q_idx // WIDTH, q_idx % WIDTH, kv_idx // WIDTH, kv_idx % WIDTH
    return ((q_x - kv_x).abs() <= 2) & ((q_y - kv_y).abs() <= 2)


@case()
def neighbourhood_clamped_at_the_border(b, h, q_idx, kv_idx):
    centre_x = torch.clamp(q_idx // WIDTH, 2, LENGTH // WIDTH - 3)
    centre_y = torch.clamp(q_idx % WIDTH, 2, WIDTH - 3)
    return (torch.abs(centre_x - kv_idx // WIDTH) <= 2) & (torch.abs(centre_y - kv_idx % WIDTH) <= 2)


@case()
def tiled_2d(b, h, q_idx, kv_idx):
    q_x, q_y, kv_x, kv_y = q_idx // WIDTH, q_idx % WIDTH, kv_idx // WIDTH, kv_idx % WIDTH
    return (q_x // 4 == kv_x // 4) & (q_y // 4 == kv_y // 4)


@case()
def checkerboard(b, h, q_idx, kv_idx):
    return (q_idx + kv_idx) % 2 == 0


@case()
def global_tokens(b, h, q_idx, kv_idx):
    return (q_idx < 4) | (kv_idx < 4) | ((q_idx >= kv_idx) & (q_idx - kv_idx < 16))


@case()
def windows_by_head(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= torch.where(h < 2, 8, 64))


@case({"is_local": ints(2, H).bool()})
def local_heads(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (~is_local[h] | (q_idx - kv_idx < 10))


@case()
def chunks(b, h, q_idx, kv_idx):
    return (q_idx // 16 == kv_idx // 16) & (q_idx >= kv_idx)


@case()
def blocks_of_any_size(b, h, q_idx, kv_idx):
    return (q_idx - 3) // 7 == (kv_idx - 3) // 7


@case()
def block_causal(b, h, q_idx, kv_idx):
    return q_idx // 8 >= kv_idx // 8


@case()
def logical_functions(b, h, q_idx, kv_idx):
    return torch.logical_or(
        torch.logical_not(torch.eq(h, 1)), torch.logical_xor(torch.gt(q_idx, 5), kv_idx.le(40))
    ) ^ (b == 2)


@case()
def bits(b, h, q_idx, kv_idx):
    return ((q_idx ^ kv_idx) & 6 | h) << 1 >> 2 != ~b + 3


@case()
def everything(b, h, q_idx, kv_idx):
    return b.new_ones((), dtype=torch.bool)


@case()
def conditions_in_branches(b, h, q_idx, kv_idx):
    return torch.where(h == 0, (kv_idx <= q_idx) | (kv_idx < 4), q_idx - kv_idx <= 8)


@case({"is_local": ints(2, H).bool()})
def nested_conditions(b, h, q_idx, kv_idx):
    near = torch.where(is_local[h], (q_idx - kv_idx < 8) & (kv_idx <= q_idx), ~((kv_idx > q_idx) ^ (b == 1)))
    return torch.where(
        ~near | (h == 2),
        torch.where(near, h != b, (kv_idx % 3 == 0) & (q_idx > 5)),
        (kv_idx < 40) == (q_idx < 40),
    )


@case({"spans": ints(6, B, LENGTH)})
def spans_see_each_other(b, h, q_idx, kv_idx):
    span = spans[b, q_idx]
    return (q_idx >= kv_idx) | ((span > 2) & (span == spans[b, kv_idx]))


@case({"keep": ints(2, H, LENGTH // 8, LENGTH // 8).bool()})
def block_sparse(b, h, q_idx, kv_idx):
    return keep[h, q_idx // 8, kv_idx // 8] & (kv_idx <= q_idx)


@case()
def not_of_or(b, h, q_idx, kv_idx):
    return ~((kv_idx > q_idx) | (kv_idx < q_idx - 12))


@case()
def scaled_comparison(b, h, q_idx, kv_idx):
    return (2 * q_idx - 2 * kv_idx >= -1) & (3 * (q_idx - kv_idx) <= 31)


CASES.append(Case("and_masks", None, and_masks(causal_mask, checkerboard)))
CASES.append(
    Case(
        "or_masks_with_declared",
        None,
        or_masks(causal_window, prefix_lm_mask),
        {"prefix": torch.int32},
        {"prefix": ints(40, B)},
    )
)
CASES.append(
    Case(
        "score_and_mask",
        alibi_declared,
        causal_documents,
        {"slopes": torch.float32, "documents": torch.int32},
        {"slopes": floats(H), "documents": ints(5, LENGTH)},
    )
)
