"""Functions that cannot be variants: each refusal names the obstacle, with the user's line."""

from __future__ import annotations

import copy
import pickle
import re
import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from attn_backend import Attention
from attn_backend.validation import describe
from attn_backend.variants import Param, TracingError, Variant, builtin
from attn_backend.variants.cpp import HOOKS
from attn_backend.variants.tracing import MAX_OPERATIONS

# ruff: noqa: F821
TABLE = torch.zeros(4, 5)
DOUBLES = torch.zeros(4, dtype=torch.float64)


def score_branch(score, b, h, q_idx, kv_idx):
    if q_idx > 3:
        return score
    return score * 2


def score_and(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx > 3 and kv_idx > 3, score, 0.0)


def score_python_max(score, b, h, q_idx, kv_idx):
    return score + max(q_idx, kv_idx)


def score_add_(score, b, h, q_idx, kv_idx):
    return score.add_(1)


def score_augmented(score, b, h, q_idx, kv_idx):
    score += 1
    return score


def score_write(score, b, h, q_idx, kv_idx):
    slopes[h] = 0
    return score


def score_write_captured(score, b, h, q_idx, kv_idx):
    TABLE[0, 0] = 1
    return score


def score_erf(score, b, h, q_idx, kv_idx):
    return torch.erf(score)


def score_method(score, b, h, q_idx, kv_idx):
    return score.lgamma()


def score_item(score, b, h, q_idx, kv_idx):
    return score * h.item()


def score_float(score, b, h, q_idx, kv_idx):
    return score * float(h)


def score_numpy(score, b, h, q_idx, kv_idx):
    return score + numpy.arange(4)[h]


def score_range(score, b, h, q_idx, kv_idx):
    for i in range(h):
        score = score + i
    return score


def score_whole_table(score, b, h, q_idx, kv_idx):
    return score * slopes


def score_whole_captured(score, b, h, q_idx, kv_idx):
    return score * TABLE


def score_part_of_captured(score, b, h, q_idx, kv_idx):
    return score * TABLE[h]


def score_too_many_indices(score, b, h, q_idx, kv_idx):
    return score * slopes[h, b]


def score_float_index(score, b, h, q_idx, kv_idx):
    return score * slopes[h / 2]


def score_slice(score, b, h, q_idx, kv_idx):
    return score * slopes[1:][h]


def score_double(score, b, h, q_idx, kv_idx):
    return score.to(torch.float64)


def score_captured_double(score, b, h, q_idx, kv_idx):
    return score + DOUBLES[h]


def score_undeclared(score, b, h, q_idx, kv_idx):
    return score + nowhere[h]


def score_random(score, b, h, q_idx, kv_idx):
    return score + torch.rand(())


def score_power(score, b, h, q_idx, kv_idx):
    return score**h


def score_large(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx < 2**40, score, 0.0)


def score_zero(score, b, h, q_idx, kv_idx):
    return score + q_idx // 0


def score_raises(score, b, h, q_idx, kv_idx):
    raise RuntimeError("as it likes")


def score_minus_boolean(score, b, h, q_idx, kv_idx):
    return score * (-(h > 1))


def score_helper(score, b, h, q_idx, kv_idx):
    return inner(score, h)


def inner(score, h):
    return score if h else -score


@pytest.mark.parametrize(
    ("function", "message", "line"),
    [
        (score_branch, "a branch depends on values that only the kernel knows", "if q_idx > 3:"),
        (
            score_and,
            "a branch depends on values that only the kernel knows",
            "return torch.where(q_idx > 3 and kv_idx > 3, score, 0.0)",
        ),
        (
            score_python_max,
            "a branch depends on values that only the kernel knows",
            "return score + max(q_idx, kv_idx)",
        ),
        (score_add_, "an in-place write (add_)", "return score.add_(1)"),
        (score_augmented, "an in-place write (__iadd__)", "score += 1"),
        (score_write, "an in-place write ([...] =)", "slopes[h] = 0"),
        (score_write_captured, "an in-place write (__setitem__)", "TABLE[0, 0] = 1"),
        (score_erf, "erf() is unknown here; known are arithmetic", "return torch.erf(score)"),
        (score_method, ".lgamma is unknown here", "return score.lgamma()"),
        (
            score_item,
            "a value that only the kernel knows is made a Python number (item)",
            "return score * h.item()",
        ),
        (score_float, "made a Python number (float())", "return score * float(h)"),
        (score_numpy, "made a Python number (array())", "return score + numpy.arange(4)[h]"),
        (score_range, "made a Python number (index())", "for i in range(h):"),
        (score_whole_table, "slopes has 1 dimension(s) without an index", "return score * slopes"),
        (
            score_whole_captured,
            "a captured tensor of shape [4, 5] is used whole; must be indexed",
            "return score * TABLE",
        ),
        (score_part_of_captured, "TABLE has 1 dimension(s) without an index", "return score * TABLE[h]"),
        (score_too_many_indices, "slopes has 2 indices for 1 dimension(s)", "return score * slopes[h, b]"),
        (
            score_float_index,
            "slopes is indexed with a float; must be an integer",
            "return score * slopes[h / 2]",
        ),
        (
            score_slice,
            "slopes is indexed with slice(1, None, None); must be an integer for each dimension, or :",
            "return score * slopes[1:][h]",
        ),
        (score_double, "a cast to torch.float64; must be to torch.float32", "return score.to(torch.float64)"),
        (
            score_captured_double,
            "dtype of 'DOUBLES' is torch.float64, must be float or int for a number, or one of float32,",
            "return score + DOUBLES[h]",
        ),
        (
            score_undeclared,
            "name 'nowhere' is not defined; a tensor that is given at run time is declared: "
            "tensors={'nowhere'",
            "return score + nowhere[h]",
        ),
        (score_random, "rand() would be drawn once", "return score + torch.rand(())"),
        (score_power, "** that is neither", "return score**h"),
        (
            score_large,
            "the integer 1099511627776 does not fit into an int32",
            "return torch.where(q_idx < 2**40, score, 0.0)",
        ),
        (score_zero, "an integer division by 0", "return score + q_idx // 0"),
        (score_raises, "RuntimeError: as it likes", 'raise RuntimeError("as it likes")'),
        (score_minus_boolean, "- of a boolean, which torch does not have", "return score * (-(h > 1))"),
        (
            score_helper,
            "a branch depends on values that only the kernel knows",
            "return score if h else -score",
        ),
    ],
)
def test_cannot_be_traced(function: Callable[..., Any], message: str, line: str) -> None:
    tensors = {"slopes": torch.float32} if "slopes" in function.__code__.co_names else {}
    with pytest.raises(TracingError) as refused:
        Variant.from_functions(function, tensors=tensors)
    text = str(refused.value)
    assert text.startswith("score_mod cannot be traced: ")
    assert message in text
    assert re.search(rf"\n  .*test_variant_refusals\.py:\d+: {re.escape(line)}$", text), text


def sum_of_terms(terms):
    def score_mod(score, b, h, q_idx, kv_idx):
        for i in range(terms):
            score = (score + kv_idx) / (i + 3.0)
        return score

    return score_mod


def union_of_terms(terms):
    def mask_mod(b, h, q_idx, kv_idx):
        seen = kv_idx <= q_idx
        for i in range(terms):
            seen = seen | (kv_idx == i)
        return seen

    return mask_mod


def intersection_of_terms(terms):
    def mask_mod(b, h, q_idx, kv_idx):
        seen = kv_idx <= q_idx
        for i in range(terms):
            seen = ~(~seen | (kv_idx == i))
        return seen

    return mask_mod


def nested_terms(terms):
    def mask_mod(b, h, q_idx, kv_idx):
        seen = kv_idx <= q_idx
        for i in range(terms):
            seen = torch.where(h == i, q_idx - kv_idx <= i, seen)
        return seen

    return mask_mod


@pytest.mark.parametrize(
    ("function", "operations"),
    [(sum_of_terms, 2), (union_of_terms, 2), (intersection_of_terms, 4), (nested_terms, 4)],
)
def test_long_functions_are_traced_and_endless_ones_refused(
    function: Callable[..., Any], operations: int
) -> None:
    """They may be as long as the limit allows."""
    what = "score_mod" if function is sum_of_terms else "mask_mod"
    terms = MAX_OPERATIONS // operations - 1
    assert len(Variant.from_functions(**{what: function(terms)}).source) > 20 * terms
    with pytest.raises(
        TracingError,
        match=f"^{what} cannot be traced: it does more than {MAX_OPERATIONS} operations; must do fewer: .*\n "
        f" .*py:[0-9]+: ",
    ):
        Variant.from_functions(**{what: function(20000)})


def test_time_to_trace_grows_with_the_length() -> None:
    def seconds(terms: int) -> float:
        begin = time.process_time()
        Variant.from_functions(sum_of_terms(terms))
        return time.process_time() - begin

    seconds(100)
    # 5 times as long; 25 times as many pairs of terms
    assert min(seconds(1000) for _ in range(3)) < 12 * min(seconds(200) for _ in range(3))


@pytest.mark.parametrize(
    ("score_mod", "mask_mod", "message"),
    [
        (
            lambda score, b, h, q_idx: score,
            None,
            "score_mod must be a function of (score, b, h, q_idx, kv_idx), takes (score, b, h, q_idx)",
        ),
        (
            None,
            lambda score, b, h, q_idx, kv_idx: score,
            "mask_mod must be a function of (b, h, q_idx, kv_idx), takes (score, b, h, q_idx, kv_idx)",
        ),
        (3, None, "score_mod must be a function of (score, b, h, q_idx, kv_idx), is a int"),
        (
            lambda score, b, h, q_idx, kv_idx: q_idx,
            None,
            "score_mod returns an integer, must return a float32: the score",
        ),
        (
            lambda score, b, h, q_idx, kv_idx: q_idx > 3,
            None,
            "score_mod returns a boolean, must return a float32: the score",
        ),
        (
            lambda score, b, h, q_idx, kv_idx: None,
            None,
            "score_mod returns None, must return a float32: the score",
        ),
        (
            lambda score, b, h, q_idx, kv_idx: (score, score),
            None,
            "score_mod returns a tuple, must return a float32: the score",
        ),
        (
            None,
            lambda b, h, q_idx, kv_idx: q_idx,
            "mask_mod returns an integer, must return a boolean: the mask",
        ),
        (
            None,
            lambda b, h, q_idx, kv_idx: q_idx * 0.5,
            "mask_mod returns a float, must return a boolean: the mask",
        ),
        (None, None, "score_mod and mask_mod are None, must be a function, one of them at least"),
    ],
)
def test_wrong_functions(score_mod: Any, mask_mod: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Variant.from_functions(score_mod, mask_mod)


def use_slopes(score, b, h, q_idx, kv_idx):
    return score * slopes[h]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"slopes": torch.float32, "other": torch.float32},
            "tensors['other'] is not a free variable of the functions, must be one",
        ),
        (
            {"slopes": torch.float64},
            "tensors['slopes']: dtype of 'slopes' is torch.float64, must be float or int for a number, or "
            "one of float32, ",
        ),
        ({"slopes": (torch.float32, 9)}, "tensors['slopes']: ndim is 9, must be less than or equal to 8"),
        ({"slopes": (float, 1)}, "ndim of 'slopes' is 1, must be None for a number"),
        ({"not a name": torch.float32}, "tensors['not a name']: name is 'not a name', "),
        (
            [Param("slopes", torch.float32), Param("slopes", torch.float32)],
            "tensors has 'slopes' 2 times, must have it once",
        ),
        (
            {"slopes": (torch.float32, ("heads",))},
            "tensors['slopes']: shape of 'slopes' is ('heads',), must be a tuple of None and 'num_qo_heads', "
            "'num_kv_heads', 'batch', 'rows'",
        ),
        (
            {"slopes": (float, ("batch",))},
            "tensors['slopes']: shape of 'slopes' is ('batch',), must be None for a number",
        ),
        (["slopes"], "tensors[0] is 'slopes', must be a Param"),
    ],
)
def test_wrong_tensors(tensors: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Variant.from_functions(use_slopes, tensors=tensors)


def test_combinations_that_mean_nothing() -> None:
    with pytest.raises(ValueError, match="variants that are combined both have a parameter 'slopes'"):
        builtin.alibi() & builtin.alibi()
    with pytest.raises(
        ValueError, match="variant sigmoid makes weights without softmax, must come after alibi"
    ):
        builtin.sigmoid() & builtin.alibi()
    with pytest.raises(ValueError, match=r"variants\[1\] is 3, must be a Variant"):
        Variant.combine(builtin.causal(), 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        builtin.causal() & 3
    with pytest.raises(ValueError, match="take 288 bytes, must be at most 256"):
        Variant.from_source(HOOK, [Param(f"p{i}", torch.float32, 8) for i in range(4)], name="large")


HOOK = "float logits(float logit, const ScoreRow& row, int32_t kv_position) const { return logit; }"


@pytest.mark.parametrize(
    ("cpp", "params", "message"),
    [
        ("int x;", {}, "cpp has no hook, must have any of"),
        (3, {}, "cpp is a int, must be a string of C++"),
        (
            "\n\n  float query(float q) const { return q; }",
            {},
            "query() must be `Pair query(Pair x, int32_t first, int32_t second, const ScoreRow& row) "
            "const`\n  <variant mine>:3: float query",
        ),
        (
            "Pair key(Pair x, int32_t first, int32_t second, const ScoreRow& row) const { return x; }",
            {},
            "key() must be `Pair key(Pair x, int32_t first, int32_t second, const KvToken& token) const`\n  "
            "<variant mine>:1",
        ),
        (HOOK, {"Pair": float}, "params: 'Pair' means something else in C++"),
        (
            "float logits(float logit) const { return logit; }",
            {},
            "logits() must be `float logits(float logit, const ScoreRow& row, int32_t kv_position) const`",
        ),
        (HOOK.replace(") const", ")"), {}, "logits() must be `float logits("),
        (
            "float bias_slope(const ScoreRow&) const { return 1.0f; }",
            {},
            "cpp has bias_slope() without logits(), must have both",
        ),
        (
            HOOK + "\nfloat bias_slope(int32_t head) const { return 1.0f; }",
            {},
            "bias_slope() must be `float bias_slope(const ScoreRow& row) const`",
        ),
        (HOOK + "\n" + HOOK, {}, "logits() is defined twice, must be once\n  <variant mine>:2"),
        (HOOK + "}", {}, "cpp has a brace without its partner\n  <variant mine>:1"),
        (HOOK + "\n{", {}, "cpp has a brace without its partner\n  <variant mine>:2"),
        (
            HOOK,
            {"row": torch.float32},
            "params: 'row' means something else in C++ or in a variant, must be another name",
        ),
        (HOOK, {"double": float}, "params: 'double' means something else in C++"),
    ],
)
def test_wrong_sources(cpp: Any, params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Variant.from_source(cpp, params, name="mine")


@pytest.mark.parametrize(
    "directive",
    [
        '#include "/etc/passwd"',
        "#include <cmath>",
        "  #\tinclude SOME_MACRO",
        "%: include_next <x>",
        "#import <x>",
        "# embed <x>",
        '#inc\\\nlude "x"',
        '#\\ \n include "x"',
        '# /* a\ncomment */ /**/ include "x"',
        '/* */ # include "x"',
        '#define F(x)\nF(\n#include "x"\n)',
    ],
)
def test_a_source_that_reads_a_file_is_refused(directive: str) -> None:
    """A compiler's errors would quote that file."""
    for cpp in (
        f"{directive}\n{HOOK}",
        f"{HOOK}\n{directive}",
        HOOK.replace("return", f"\n{directive}\nreturn"),
    ):
        with pytest.raises(
            ValueError,
            match=r"(?s)cpp of <variant mine> has `.*`, must include no file: put its text into cpp",
        ):
            Variant.from_source(cpp, name="mine")


def test_other_directives_are_taken() -> None:
    hook = HOOK.replace("logit; }", "logit * HALF; }")
    cpp = f"#define HALF 0.5f\n#if 1\n{hook}\n#endif\n#undef HALF  // included\n#pragma once_embedded"
    assert "#define HALF" in Variant.from_source(cpp, name="mine").source


TRANSFORM = "Pair value(Pair x, int32_t first, int32_t second, const KvToken& token) const { return x; }"


@pytest.mark.parametrize(
    ("cpp", "pairs", "message"),
    [
        (TRANSFORM, {"pair_distance": 0}, "pair_distance is 0, must be an int in"),
        (TRANSFORM, {"pair_distance": 4}, "pair_distance is 4, must be 1 or a multiple of 8, or None"),
        (TRANSFORM, {"pair_columns": 64}, "pair_columns is 64, must be None where pair_distance is None"),
        (
            TRANSFORM,
            {"pair_distance": 16, "pair_columns": 48},
            "pair_columns is 48, must be a multiple of 2 * pair_distance = 32",
        ),
        (
            HOOK,
            {"pair_distance": 1},
            "pair_distance is 1 and pair_columns None, must be None: cpp has none of query, key, value",
        ),
    ],
)
def test_wrong_pairs(cpp: str, pairs: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Variant.from_source(cpp, name="mine", **pairs)


def test_transforms_that_do_not_fit() -> None:
    halves, rope = Variant.from_source(TRANSFORM, name="halves"), builtin.rope(builtin.rope_frequencies(96))
    neighbours, apart = (
        Variant.from_source(TRANSFORM, name="apart", pair_distance=distance) for distance in (1, 48)
    )
    for variant, head_dim, message in (
        (
            halves,
            24,
            "head_dim is 24, must be a multiple of 16: value() of variant halves takes columns i and i + "
            "head_dim / 2 together",
        ),
        (halves, 33, "head_dim is 33, must be a multiple of 16"),
        (rope, 64, "head_dim is 64, must be at least 96, the columns that query() of variant rope takes"),
        (
            apart,
            128,
            "head_dim is 128, must be a multiple of 96: value() of variant apart takes columns i and i + 48 "
            "together",
        ),
        (neighbours, 33, "head_dim is 33, must be a multiple of 2: value()"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            variant.check_head_dim(head_dim)
    for variant, head_dim in ((halves, 64), (rope, 96), (rope, 128), (apart, 192), (neighbours, 40)):
        variant.check_head_dim(head_dim)
    with pytest.raises(ValueError, match="head_dim is 64, must be at least 96"):
        Attention(4, 2, 64, dtype=torch.float32, device="cpu", max_rows=3, max_batch=1, variant=rope)
    with pytest.raises(
        ValueError,
        match=r"variants halves and apart both have value\(\), for pair_distance=None, pair_columns=None and "
        r"for pair_distance=1, .*, must be for the same",
    ):
        halves & neighbours


def test_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="a Variant cannot be changed"):
        builtin.causal().name = "other"


def relative_bias(score, b, h, q_idx, kv_idx):
    return score + (q_idx - kv_idx)


@pytest.mark.parametrize(
    "variant",
    [
        builtin.alibi(torch.ones(4)),
        builtin.causal() & builtin.soft_cap(3.0),
        Variant.from_functions(relative_bias),
    ],
)
def test_a_copy_is_the_variant_itself(variant: Variant) -> None:
    module = torch.nn.Linear(2, 2)
    module.variant = variant  # type: ignore[assignment]
    for copied in (
        copy.copy(variant),
        copy.deepcopy(variant),
        copy.deepcopy([variant])[0],
        copy.deepcopy(module).variant,
    ):
        assert copied is variant
    with pytest.raises(
        TypeError,
        match=f"variant {variant.name} cannot be pickled: .*; make it again in the process that needs it",
    ):
        pickle.dumps(variant)


@pytest.mark.parametrize(
    ("dtype", "value", "must"),
    [
        (int, 2.5, "an int that an int32 holds"),
        (int, True, "an int that an int32 holds"),
        (int, 2**31, "an int that an int32 holds"),
        (int, "3", "an int that an int32 holds"),
        (int, torch.zeros(1), "an int that an int32 holds"),
        (float, "a", "a number that a float32 holds"),
        (float, 1e39, "a number that a float32 holds"),
        (torch.float32, 2.5, "a float32 tensor of 1 dimension"),
        (torch.float32, torch.zeros(3, dtype=torch.float64), "a float32 tensor of 1 dimension"),
        (torch.float32, torch.zeros(3, 3), "a float32 tensor of 1 dimension"),
    ],
)
def test_values_are_refused_where_they_are_given(dtype: Any, value: Any, must: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"value of 'x' is {describe(value)}, must be {must}")):
        Param("x", dtype, value=value)


@pytest.mark.parametrize("name", ["a b", "", "1st", "a-b", "größe", "x\n", 3, None])
def test_names_that_are_no_identifiers(name: Any) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"name is {describe(name)}, must be an identifier of C++ and Python")
    ):
        Param(name, float)


def test_builtins_check_their_arguments() -> None:
    for make, message in (
        (lambda: builtin.sliding_window(-1), "left is -1, must be an int in"),
        (lambda: builtin.streaming_llm(0), "window is 0, must be an int in"),
        (lambda: builtin.soft_cap(-2.0), "cap is -2.0, must be a number above 0, or None"),
        (lambda: builtin.chunked_local(0), "chunk is 0, must be an int in"),
        (lambda: builtin.rope_frequencies(7), "rotary_dim is 7, must be even"),
        (lambda: builtin.rope_frequencies(8, -1.0), "theta is -1.0, must be a number above 0"),
        (
            lambda: builtin.llama3_frequencies(8, high_freq_factor=1.0),
            "high_freq_factor is 1.0, must be above low_freq_factor = 1.0",
        ),
        (
            lambda: builtin.rope(torch.ones(12)),
            r"len\(frequencies\) is 12, must be a multiple of 8 where pairs are not interleaved",
        ),
        (lambda: builtin.rope(torch.ones(8) * 2), r"largest of frequencies is 2.0, must be at most 1.5"),
        (
            lambda: builtin.rope(torch.ones(8).int()),
            "frequencies is an int32 tensor .*, must be a float tensor of 1 dimension",
        ),
        (lambda: builtin.rope_in_cache(torch.ones(8), 0), "window is 0, must be an int in"),
        (
            lambda: builtin.alibi(torch.zeros(2, 2)),
            r"value of 'slopes' is a float32 tensor of shape \[2, 2\] .*, must be a float32 tensor of 1 "
            r"dimension",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.parametrize("name", [*HOOKS, "row", "kv_position", "class"])
def test_a_parameter_may_be_named_like_what_means_something_in_cpp(name: str) -> None:
    assert Param(name, torch.float32).cpp_name == f"{name}_"


def test_a_shape_without_dimensions_is_a_shape() -> None:
    assert Param("x", torch.float32, shape=()).ndim == 0
