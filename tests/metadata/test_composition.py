"""BSR views and compositions: what they refuse."""

from __future__ import annotations

import pytest
import torch

from attn_backend import BSRView, Composition, PageTable

TABLE = PageTable.ragged(torch.tensor([0, 3, 5], dtype=torch.int32))
QO_INDPTR = torch.tensor([0, 1, 2], dtype=torch.int32)
VIEW = BSRView(QO_INDPTR, TABLE)


def test_defaults() -> None:
    assert VIEW.causal
    assert VIEW.window_left == -1
    assert VIEW.batch_size == 2
    assert VIEW.device == torch.device("cpu")


def test_padding_requests_are_legal() -> None:
    assert BSRView(torch.tensor([0, 1, 1, 1]), PageTable.ragged(torch.tensor([0, 3, 3, 3]))).batch_size == 3


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
        ("levels", lambda: Composition(())),
        ("levels", lambda: Composition([VIEW])),
        ("levels", lambda: Composition((VIEW, TABLE))),
        (r"levels\[1\]\.qo_indptr", lambda: Composition((VIEW, BSRView(QO_INDPTR.to("meta"), PageTable.ragged(QO_INDPTR.to("meta")))))),
    ],
)
def test_refuses(argument: str, make: object) -> None:
    with pytest.raises(ValueError, match=rf"^{argument} is .*, must be "):
        make()
