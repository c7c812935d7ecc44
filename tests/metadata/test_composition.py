"""BSR views and compositions: their refusals, and the levels that the constructors make."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from attn_backend import BSRView, Composition, PageTable
from attn_backend.metadata.values import check_values
from attn_backend.metadata.views import MAX_LEVELS

TABLE = PageTable.ragged(torch.tensor([0, 3, 5], dtype=torch.int32))
QO_INDPTR = torch.tensor([0, 1, 2], dtype=torch.int32)
VIEW = BSRView(QO_INDPTR, TABLE)
ROWS = torch.tensor([1, 0], dtype=torch.int32)
PAGED = PageTable.csr(
    torch.tensor([0, 1, 2]), torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1, 1]), 16
)
ODD = PageTable.csr(
    torch.tensor([0, 1, 2]), torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1, 1]), 24
)
TREE_TABLE = PageTable.ragged(torch.arange(7, dtype=torch.int32))  # six nodes of one token


def test_page_sizes() -> None:
    assert Composition((VIEW, VIEW, BSRView(QO_INDPTR, PAGED))).page_size == 1
    parts = PAGED.in_pages_of(4)
    assert parts.indices is not None
    assert parts.indptr is not None
    assert parts.kv_lens is not None
    assert (parts.page_size, parts.indices.tolist(), parts.indptr.tolist(), parts.kv_lens.tolist()) == (
        4,
        [*range(8)],
        [0, 4, 8],
        [1, 1],
    )
    assert PAGED.in_pages_of(16) is PAGED
    with pytest.raises(ValueError, match=r"page_size is 5, must be a divisor of 16"):
        PAGED.in_pages_of(5)


def test_defaults() -> None:
    assert VIEW.causal is None
    assert VIEW.window_left == -1
    assert VIEW.rows is None
    assert VIEW.batch_size == 2
    assert VIEW.device == torch.device("cpu")


def test_padding_requests_are_legal() -> None:
    assert BSRView(torch.tensor([0, 1, 1, 1]), PageTable.ragged(torch.tensor([0, 3, 3, 3]))).batch_size == 3


def chain(nodes: int) -> Composition:
    """A path of `nodes` nodes; one row sees all of them."""
    return Composition.tree(range(-1, nodes - 1), PageTable.ragged(torch.arange(nodes + 1)), [nodes - 1])


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("qo_indptr", lambda: BSRView(QO_INDPTR.float(), TABLE)),
        ("qo_indptr", lambda: BSRView(QO_INDPTR[:2], TABLE)),
        ("qo_indptr", lambda: BSRView(QO_INDPTR[None], TABLE)),
        ("qo_indptr", lambda: BSRView(torch.tensor([0, 9, 1, 9, 2])[::2], TABLE)),
        ("qo_indptr", lambda: BSRView([0, 1, 2], TABLE)),
        ("qo_indptr", lambda: BSRView(QO_INDPTR.to("meta"), TABLE)),
        ("table", lambda: BSRView(QO_INDPTR, None)),
        ("causal", lambda: BSRView(QO_INDPTR, TABLE, causal=1)),
        ("window_left", lambda: BSRView(QO_INDPTR, TABLE, window_left=-2)),
        ("window_left", lambda: BSRView(QO_INDPTR, TABLE, window_left=None)),
        ("window_left", lambda: BSRView(QO_INDPTR, TABLE, window_left=3.0)),
        ("rows", lambda: BSRView(QO_INDPTR, TABLE, rows=ROWS.long())),
        ("rows", lambda: BSRView(QO_INDPTR, TABLE, rows=ROWS[None])),
        ("rows", lambda: BSRView(QO_INDPTR, TABLE, rows=torch.zeros(4, dtype=torch.int32)[::2])),
        ("rows", lambda: BSRView(QO_INDPTR, TABLE, rows=[1, 0])),
        ("rows", lambda: BSRView(QO_INDPTR, TABLE, rows=ROWS.to("meta"))),
        ("levels", lambda: Composition(())),
        ("levels", lambda: Composition(VIEW)),
        ("levels", lambda: Composition(view for view in [VIEW])),
        (r"levels\[1\]", lambda: Composition((VIEW, TABLE))),
        (
            r"levels\[1\]\.qo_indptr",
            lambda: Composition(
                (VIEW, BSRView(QO_INDPTR.to("meta"), PageTable.ragged(QO_INDPTR.to("meta"))))
            ),
        ),
        (r"len\(levels\)", lambda: Composition((VIEW,) * (MAX_LEVELS + 1))),
        (
            r"levels\[2\]\.table\.page_size",
            lambda: Composition(
                (BSRView(QO_INDPTR, PAGED), BSRView(QO_INDPTR, PAGED), BSRView(QO_INDPTR, ODD))
            ),
        ),
        ("qo_indptrs", lambda: Composition.cascade([], [])),
        ("qo_indptrs", lambda: Composition.cascade(QO_INDPTR, [TABLE])),
        ("tables", lambda: Composition.cascade([QO_INDPTR], TABLE)),
        (r"len\(tables\)", lambda: Composition.cascade([QO_INDPTR], [TABLE, TABLE])),
        (r"levels\[0\]: table", lambda: Composition.cascade([QO_INDPTR], [None])),
        (r"levels\[0\]: qo_indptr", lambda: Composition.cascade([QO_INDPTR[:2], QO_INDPTR], [TABLE, TABLE])),
        (r"levels\[1\]: qo_indptr", lambda: Composition.cascade([QO_INDPTR, QO_INDPTR[:2]], [TABLE, TABLE])),
        (
            r"levels\[1\]: causal",
            lambda: Composition.cascade([QO_INDPTR, QO_INDPTR], [TABLE, TABLE], causal="no"),
        ),
        ("window_left", lambda: Composition.cascade([QO_INDPTR, QO_INDPTR], [TABLE, TABLE], window_left=3)),
        (r"levels\[0\]: window_left", lambda: Composition.cascade([QO_INDPTR], [TABLE], window_left=-3)),
        (r"levels\[1\]\.table\.page_size", lambda: Composition.cascade([QO_INDPTR, QO_INDPTR], [PAGED, ODD])),
        (
            r"len\(levels\)",
            lambda: Composition.cascade([QO_INDPTR] * (MAX_LEVELS + 1), [TABLE] * (MAX_LEVELS + 1)),
        ),
        ("table", lambda: Composition.tree([-1, 0], None, [0])),
        (r"len\(parents\)", lambda: Composition.tree([-1], TABLE, [0])),
        ("parents", lambda: Composition.tree(None, TABLE, [0])),
        (r"parents\[1\]", lambda: Composition.tree([-1, 1], TABLE, [0])),
        (r"parents\[0\]", lambda: Composition.tree([1, -1], TABLE, [0])),
        (r"parents\[1\]", lambda: Composition.tree([-1, -2], TABLE, [0])),
        (r"parents\[1\]", lambda: Composition.tree([-1, 0.0], TABLE, [0])),
        (rf"parents\[{MAX_LEVELS}\]", lambda: chain(MAX_LEVELS + 1)),
        ("node_of_row", lambda: Composition.tree([-1, 0], TABLE, 0)),
        (r"node_of_row\[1\]", lambda: Composition.tree([-1, 0], TABLE, [0, 2])),
        (r"node_of_row\[0\]", lambda: Composition.tree([-1, 0], TABLE, [-2, 1])),
        (r"node_of_row\[0\]", lambda: Composition.tree([-1, 0], TABLE, ["0", 1])),
    ],
)
def test_refuses(argument: str, make: object) -> None:
    with pytest.raises(ValueError, match=rf"^{argument} is .*, must be "):
        make()


def test_row_list_may_be_longer() -> None:
    # entries that qo_indptr does not use are not read
    view = BSRView(QO_INDPTR, TABLE, rows=torch.tensor([5, 0, -9, 10**6], dtype=torch.int32))
    check_values(view, 6)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0, -1], r"rows\[1\] is -1, must be a row of Q, 0 .. max_rows - 1 = 5"),
        ([6, 0], r"rows\[0\] is 6, must be a row of Q, 0 .. max_rows - 1 = 5"),
        ([2**31 - 1, -(2**31)], r"rows\[0\] is 2147483647, must be a row of Q"),
        ([0], r"rows is .* of shape \[1\] .*, must be of at least 2 elements, the end of qo_indptr"),
    ],
)
def test_values_of_a_row_list(rows: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        check_values(BSRView(QO_INDPTR, TABLE, rows=torch.tensor(rows, dtype=torch.int32)), 6)


def test_most_levels() -> None:
    assert len(Composition((VIEW,) * MAX_LEVELS).levels) == MAX_LEVELS
    assert len(chain(MAX_LEVELS).levels) == MAX_LEVELS


def test_levels_may_be_any_sequence() -> None:
    assert Composition([VIEW, VIEW]).levels == Composition(deque((VIEW, VIEW))).levels == (VIEW, VIEW)
    levels = [VIEW]
    composition = Composition(levels)
    levels.clear()
    assert composition.levels == (VIEW,)


def test_cascade() -> None:
    shared, shared_table = torch.tensor([0, 2]), PageTable.ragged(torch.tensor([5, 9]))
    for causal in (True, False):
        first, last = Composition.cascade((shared, QO_INDPTR), (shared_table, TABLE), causal=causal).levels
        assert (first.qo_indptr, first.table, first.causal, first.window_left, first.rows) == (
            shared,
            shared_table,
            False,
            -1,
            None,
        )
        assert (last.qo_indptr, last.table, last.causal, last.window_left, last.rows) == (
            QO_INDPTR,
            TABLE,
            causal,
            -1,
            None,
        )


def test_cascade_of_one_level() -> None:
    (level,) = Composition.cascade([QO_INDPTR], [TABLE], window_left=7).levels
    assert (level.qo_indptr, level.table, level.causal, level.window_left, level.rows) == (
        QO_INDPTR,
        TABLE,
        None,
        7,
        None,
    )


def described(composition: Composition) -> list[tuple[list[int], list[int]]]:
    """qo_indptr and rows of each level of a tree."""
    for level in composition.levels:
        assert not level.causal
        assert level.window_left == -1
        assert level.table is composition.levels[0].table
        assert level.qo_indptr.dtype == torch.int32
        check_values(level, 100)
    return [(level.qo_indptr.tolist(), level.rows.tolist()) for level in composition.levels]


def test_tree() -> None:
    #   0        3
    #   ├─ 1     └─ 4
    #   │  └─ 5
    #   └─ 2
    parents = [-1, 0, 0, -1, 3, 1]
    assert described(Composition.tree(parents, TREE_TABLE, [5, 4, -1, 2, 0, 3, 5])) == [
        ([0, 4, 4, 4, 6, 6, 6], [0, 3, 4, 6, 1, 5]),
        ([0, 0, 2, 3, 3, 4, 4], [0, 6, 3, 1]),
        ([0, 0, 0, 0, 0, 0, 2], [0, 6]),
    ]
    # Levels that no row sees are omitted, except one.
    assert described(Composition.tree(parents, TREE_TABLE, [3])) == [([0, 0, 0, 0, 1, 1, 1], [0])]
    assert described(Composition.tree(parents, TREE_TABLE, [-1, -1])) == [([0] * 7, [])]
    assert described(Composition.tree(parents, TREE_TABLE, [])) == [([0] * 7, [])]
    assert described(Composition.tree([], PageTable.ragged(torch.tensor([0])), [-1])) == [([0], [])]


def test_tree_of_arrays() -> None:
    parents, nodes = torch.tensor([-1, 0, 0, -1, 3, 1]), torch.tensor([5, 4], dtype=torch.int32)
    expected = described(Composition.tree(parents.tolist(), TREE_TABLE, nodes.tolist()))
    assert described(Composition.tree(parents, TREE_TABLE, nodes)) == expected
    assert described(Composition.tree(parents.numpy(), TREE_TABLE, nodes.numpy())) == expected
