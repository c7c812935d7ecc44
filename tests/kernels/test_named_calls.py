"""The library's functions, whose arguments are passed by name."""

from __future__ import annotations

import inspect

import pytest
import torch

from attn_backend.kernels.native import by_name, names_of

FUNCTIONS = (
    "plan_level",
    "run",
    "append_qkv",
    "append_kv_rounded",
    "selected_slots",
    "merge_states",
    "sample",
    "write_rows",
    "speculate",
)
INDICES, OUT = torch.tensor([[3, 1, -1]], dtype=torch.int32), torch.empty(1, 3, dtype=torch.int32)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_arguments_are_named_once_and_taken_by_keyword(function: str) -> None:
    parameters = inspect.signature(by_name(function)).parameters
    assert tuple(parameters) == names_of(function)
    assert len(set(parameters)) == len(parameters)
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters.values())


def test_order_does_not_matter() -> None:
    by_name("selected_slots")(page_stride=1, out=OUT, page_size=1, indices=INDICES)
    assert OUT.tolist() == [[3, 1, -1]]


def test_a_name_that_there_is_not_is_refused() -> None:
    with pytest.raises(TypeError, match="indexes"):
        by_name("selected_slots")(indexes=INDICES, out=OUT, page_size=1, page_stride=1)


def test_calls_may_end_early() -> None:
    names = names_of("run")
    assert (
        tuple(inspect.signature(by_name("run", last="after_append")).parameters)
        == names[: names.index("after_append") + 1]
    )
    with pytest.raises(TypeError, match="page_size is of type None, must be an int that an int64 holds"):
        by_name("selected_slots", last="kv_lens")(indices=INDICES, out=OUT)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"indices": None}, "indices is of type None, must be a tensor"),
        ({"out": 3}, "out is of type int, must be a tensor"),
        ({"block_table": 1.5}, "block_table is of type float, must be a tensor or None"),
        ({"page_size": 1.5}, "page_size is of type float, must be an int that an int64 holds"),
        ({"indices": INDICES.long()}, "indices.dtype is int64, must be int32"),
    ],
)
def test_errors_name_the_argument(wrong: dict[str, object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{message}$"):
        by_name("selected_slots")(
            **({"indices": INDICES, "out": OUT, "page_size": 1, "page_stride": 1} | wrong)
        )


def test_too_many_arguments_are_refused() -> None:
    from attn_backend.kernels.native import library

    with pytest.raises(TypeError, match="8 arguments for 7"):
        library().selected_slots(*range(8))
