"""Wrong arguments are refused before anything runs, with a message that names the argument."""

from __future__ import annotations

import re
from collections.abc import Callable

import attention_kernels
import pytest
import torch

from attn_backend import Attention, BSRView, Composition, KVCache, PageTable

QO_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, PAGES = 4, 2, 64, 4, 10


def make_attention(device: torch.device, **changes: object) -> Attention:
    room = {"device": device, "max_rows": 8, "max_batch": 3, "kernel": attention_kernels.kernel_of(device)}
    return Attention(
        **({"num_qo_heads": QO_HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM} | room | changes)
    )


def index(device: torch.device, *values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def make_view(
    device: torch.device,
    qo: tuple[int, ...] = (0, 1, 3),
    kv: tuple[int, ...] = (0, 2, 3),
    last: tuple[int, ...] = (4, 1),
) -> BSRView:
    indices = torch.arange(3, dtype=torch.int32, device=device)
    return BSRView(
        index(device, *qo), PageTable.csr(index(device, *kv), indices, index(device, *last), PAGE_SIZE)
    )


def make_cache(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> KVCache:
    return KVCache.from_pair(
        *torch.zeros(2, *(shape or (PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM)), dtype=dtype, device=device)
    )


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("num_qo_heads", {"num_qo_heads": 5}),
        ("num_qo_heads", {"num_qo_heads": 0}),
        ("num_kv_heads", {"num_kv_heads": 0}),
        ("num_kv_heads", {"num_kv_heads": -2}),
        ("num_kv_heads", {"num_kv_heads": "2"}),
        ("num_qo_heads", {"num_qo_heads": None}),
        ("head_dim", {"head_dim": 64.0}),
        ("head_dim", {"head_dim": 0}),
        ("head_dim", {"head_dim": 65}),
        ("head_dim", {"head_dim": 1024}),
        ("dtype", {"dtype": torch.float64}),
        ("dtype", {"dtype": torch.int8}),
        ("dtype", {"dtype": [1]}),
        ("max_rows", {"max_rows": 0}),
        ("max_rows", {"max_rows": 2**31}),
        ("max_rows", {"max_rows": True}),
        ("max_batch", {"max_batch": 0}),
        ("max_batch", {"max_batch": 2.5}),
        ("max_batch", {"max_batch": 10**12}),
        ("max_levels", {"max_levels": "2"}),
        ("batch_invariant", {"batch_invariant": "yes"}),
        ("num_ctas", {"num_ctas": -1}),
        ("num_ctas", {"num_ctas": 10**6}),
        ("num_ctas", {"num_ctas": "all"}),
        ("cascade", {"cascade": None}),
        ("cascade", {"cascade": 2}),
        ("cascade", {"cascade": "auto"}),
        ("kernel", {"kernel": "gpu"}),
        ("kernel", {"kernel": ""}),
    ],
)
def test_attention_refuses(device: torch.device, argument: str, changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"^{argument} is .*, must be "):
        make_attention(device, **changes)


def test_attention_refuses_other_devices() -> None:
    for device in ("meta", "gpu", 3.5):
        with pytest.raises(ValueError, match=rf"^device is '?{device}'?, must be "):
            Attention(QO_HEADS, KV_HEADS, HEAD_DIM, device=device, max_rows=8, max_batch=3)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("head_dim", {"head_dim": 264}),
        ("dtype", {"dtype": torch.float32}),
        ("max_batch", {"max_batch": 10**6}),
        ("max_batch", {"max_batch": 1025, "batch_invariant": True}),
    ],
)
def test_what_only_a_cpu_has(argument: str, changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"^{argument} is .*, must be "):
        make_attention(torch.device("cuda"), **changes)


def test_plan_refuses_structure(device: torch.device) -> None:
    attention = make_attention(device)
    view = make_view(device)
    with pytest.raises(ValueError, match=r"batch.* is 4, must be at most max_batch = 3"):
        attention.plan(BSRView(index(device, *range(5)), PageTable.ragged(index(device, *range(5)))))
    with pytest.raises(ValueError, match=r"^composition is "):
        attention.plan(view.table)
    with pytest.raises(ValueError, match=r"^len\(composition\.levels\) is 2, must be at most max_levels = 1"):
        attention.plan(Composition((view, view)))


def test_plan_says_which_level_is_wrong(device: torch.device) -> None:
    attention = make_attention(device, max_levels=3)
    view = make_view(device)
    wide = BSRView(
        index(device, *range(5)),
        PageTable.csr(
            index(device, *range(5)), index(device, *range(4)), index(device, 1, 1, 1, 1), PAGE_SIZE
        ),
    )
    with pytest.raises(ValueError, match=r"^levels\[2\]: batch.* is 4, must be at most max_batch = 3"):
        attention.plan(Composition([view, view, wide]))
    attention.plan(Composition([view, view]))  # still usable


@pytest.mark.parametrize("level", range(3))
def test_plan_says_which_level_has_wrong_values(level: int) -> None:
    device = torch.device("cpu")
    views = [make_view(device)] * 3
    views[level] = make_view(device, kv=(0, 1, 4))
    with pytest.raises(ValueError, match=rf"^levels\[{level}\]: kv_indptr\[2\] is 4, must be at most 3, "):
        make_attention(device, max_levels=3).plan(Composition(views))


@pytest.mark.gpu
def test_plan_refuses_other_devices() -> None:
    with pytest.raises(ValueError, match=r"^qo_indptr.*device is cpu, must be cuda"):
        make_attention(torch.device("cuda")).plan(make_view(torch.device("cpu")))
    with pytest.raises(ValueError, match=r"^qo_indptr.*device is cuda.*, must be cpu"):
        make_attention(torch.device("cpu")).plan(make_view(torch.device("cuda")))


WRONG_VALUES = [
    ("qo_indptr", {"qo": (1, 2, 3)}),
    ("qo_indptr", {"qo": (0, 3, 1)}),
    ("qo_indptr", {"qo": (0, 1, 9)}),
    ("qo_indptr", {"qo": (0, -1, 3)}),
    ("kv_indptr", {"kv": (1, 2, 3)}),
    ("kv_indptr", {"kv": (0, 3, 1)}),
    ("kv_indptr", {"kv": (0, 1, 4)}),
    ("kv_last_page_len", {"last": (0, 1)}),
    ("kv_last_page_len", {"last": (4, 5)}),
]


@pytest.mark.parametrize(("argument", "changes"), WRONG_VALUES)
def test_plan_refuses_values_on_a_cpu(argument: str, changes: dict[str, tuple[int, ...]]) -> None:
    device = torch.device("cpu")
    attention = make_attention(device)
    with pytest.raises(ValueError, match=rf"^{argument}\[\d\] is -?\d+, must be "):
        attention.plan(make_view(device, **changes))
    attention.plan(make_view(device))  # still usable


def test_plan_refuses_lengths_on_a_cpu() -> None:
    device = torch.device("cpu")
    attention = make_attention(device)
    table = torch.zeros(2, 3, dtype=torch.int32)
    qo_indptr = index(device, 0, 1, 2)
    for lens in [(13, 1), (1, -1)]:
        with pytest.raises(ValueError, match=r"^kv_lens\[\d\] is -?\d+, must be "):
            attention.plan(BSRView(qo_indptr, PageTable.block_table(table, index(device, *lens), PAGE_SIZE)))
        with pytest.raises(ValueError, match=r"^kv_lens\[\d\] is -?\d+, must be "):
            attention.plan(
                BSRView(qo_indptr, PageTable.token_slots(table, index(device, 0, 1), index(device, *lens)))
            )
    for rows in [(0, 2), (-1, 0)]:
        with pytest.raises(ValueError, match=r"^rows\[\d\] is -?\d+, must be "):
            attention.plan(
                BSRView(qo_indptr, PageTable.token_slots(table, index(device, *rows), index(device, 1, 1)))
            )


@pytest.mark.gpu
@pytest.mark.parametrize(("argument", "changes"), WRONG_VALUES)
def test_wrong_values_are_reported_from_a_gpu(
    argument: str, changes: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda")
    attention = make_attention(device)
    attention.plan(make_view(device, **changes))  # clamped
    attention.run(torch.zeros(3, QO_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device), make_cache(device))
    with pytest.raises(ValueError, match=argument):
        attention.raise_for_errors()
    monkeypatch.setenv("ATTN_BACKEND_DEBUG", "1")
    with pytest.raises(ValueError, match=argument):
        make_attention(device).plan(make_view(device, **changes))


def test_run_refuses(device: torch.device) -> None:
    attention = make_attention(device)
    attention.plan(make_view(device))
    q = torch.zeros(3, QO_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    kv = make_cache(device)
    lse = torch.zeros(3, QO_HEADS, device=device)
    transposed = torch.zeros(3, HEAD_DIM, QO_HEADS, dtype=torch.bfloat16, device=device).transpose(1, 2)
    wrong: list[tuple[str, Callable[[], object]]] = [
        ("q", lambda: attention.run(q.half(), kv)),
        ("q", lambda: attention.run(q[..., :32], kv)),
        ("q", lambda: attention.run(q[:, :2], kv)),
        ("q", lambda: attention.run(q[0], kv)),
        ("q", lambda: attention.run(transposed, kv, out=q)),
        ("out", lambda: attention.run(q, kv, out=q[:2])),
        ("out", lambda: attention.run(q, kv, out=q.half())),
        ("out", lambda: attention.run(q, kv, out=q[:, :2])),
        ("out", lambda: attention.run(q, kv, out=transposed)),
        ("lse", lambda: attention.run(q, kv, lse=lse.half())),
        ("lse", lambda: attention.run(q, kv, lse=lse[:2])),
        ("lse", lambda: attention.run(q, kv, lse=lse[:, :2])),
        ("lse", lambda: attention.run(q, kv, lse=lse.t().contiguous().t())),
        ("sm_scale", lambda: attention.run(q, kv, sm_scale=0.0)),
        ("sm_scale", lambda: attention.run(q, kv, sm_scale=-0.2)),
        ("sm_scale", lambda: attention.run(q, kv, sm_scale=float("nan"))),
        ("logits_soft_cap", lambda: attention.run(q, kv, logits_soft_cap=-1.0)),
        ("logits_soft_cap", lambda: attention.run(q, kv, logits_soft_cap=float("inf"))),
        (
            "kv.k",
            lambda: attention.run(
                q, make_cache(device, PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype=torch.float16)
            ),
        ),
        ("kv.k", lambda: attention.run(q, make_cache(device, PAGES, PAGE_SIZE + 1, KV_HEADS, HEAD_DIM))),
        ("kv.k", lambda: attention.run(q, make_cache(device, PAGES, PAGE_SIZE, KV_HEADS + 1, HEAD_DIM))),
        ("kv.k", lambda: attention.run(q, make_cache(device, PAGES, PAGE_SIZE, KV_HEADS, 32))),
        ("q", lambda: attention.run(None, kv)),
        ("q", lambda: attention.run(q.tolist(), kv, out=q)),
        ("kv", lambda: attention.run(q, None)),
        ("kv", lambda: attention.run(q, (kv.k, kv.v))),
        ("out", lambda: attention.run(q, kv, out=3)),
        ("lse", lambda: attention.run(q, kv, lse=True)),
        ("sm_scale", lambda: attention.run(q, kv, sm_scale="0.1")),
        ("logits_soft_cap", lambda: attention.run(q, kv, logits_soft_cap=None)),
    ]
    for argument, call in wrong:
        with pytest.raises(ValueError, match=rf"^{argument}\b.* is .*, must be "):
            call()
    attention.run(q, kv, lse=lse)


def test_run_says_which_shape_is_wrong_and_what_it_must_be(device: torch.device) -> None:
    attention = make_attention(device)
    attention.plan(make_view(device))
    q = torch.zeros(3, QO_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    kv = make_cache(device)
    for call, message in [
        (
            lambda: attention.run(q[0], kv),
            "q.shape is [4, 64], must be [rows, num_qo_heads = 4, head_dim = 64]",
        ),
        (
            lambda: attention.run(q, kv, out=q[:2]),
            "out.shape is [2, 4, 64], must be [rows = 3, num_qo_heads = 4, head_dim = 64]",
        ),
        (
            lambda: attention.run(q, kv, lse=torch.zeros(4, 3, device=device)),
            "lse.shape is [4, 3], must be [rows = 3, num_qo_heads = 4]",
        ),
        (
            lambda: attention.run(q, make_cache(device, PAGES, 1, KV_HEADS, HEAD_DIM)),
            "kv.k.shape is [10, 1, 2, 64], must be [pages, page_size = 4, num_kv_heads = 2, head_dim = 64]",
        ),
    ]:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            call()


def test_run_needs_a_plan(device: torch.device) -> None:
    with pytest.raises(ValueError, match="plan"):
        make_attention(device).run(
            torch.zeros(3, QO_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device), make_cache(device)
        )


def test_run_after_a_refused_plan() -> None:
    device = torch.device("cpu")
    attention = make_attention(device)
    attention.plan(make_view(device))
    with pytest.raises(ValueError, match="qo_indptr"):
        attention.plan(make_view(device, qo=(0, 3, 1)))
    with pytest.raises(ValueError, match="plan"):
        attention.run(torch.zeros(3, QO_HEADS, HEAD_DIM, dtype=torch.bfloat16), make_cache(device))


@pytest.mark.gpu
def test_run_refuses_other_devices() -> None:
    device = torch.device("cuda")
    attention = make_attention(device)
    attention.plan(make_view(device))
    q = torch.zeros(3, QO_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    for argument, call in [
        ("q", lambda: attention.run(q.cpu(), make_cache(device), out=q)),
        ("kv.k", lambda: attention.run(q, make_cache(torch.device("cpu")))),
        ("out", lambda: attention.run(q, make_cache(device), out=q.cpu())),
        ("lse", lambda: attention.run(q, make_cache(device), lse=torch.zeros(3, QO_HEADS))),
    ]:
        with pytest.raises(ValueError, match=rf"^{argument}\b.*device is cpu, must be cuda"):
            call()


@pytest.mark.gpu
def test_run_refuses_what_is_not_aligned_on_a_gpu() -> None:
    device = torch.device("cuda")
    attention = make_attention(device)
    attention.plan(make_view(device))
    wide = torch.zeros(3, QO_HEADS, HEAD_DIM + 4, dtype=torch.bfloat16, device=device)
    for q in (wide[..., :HEAD_DIM], wide[..., 4:]):
        with pytest.raises(ValueError, match=r"^q\b.* is .*, must be "):
            attention.run(q, make_cache(device))


# Page ids: nothing outside the cache is read, and the caller gets an error.


def wrong_pages(device: torch.device) -> list[BSRView]:
    qo_indptr, lens = index(device, 0, 1, 3), index(device, 8, 5)
    views = []
    for wrong in (-1, -(2**31), PAGES, 2**31 - 1):
        pages = [1, wrong, 2, 3]
        views.append(
            BSRView(
                qo_indptr,
                PageTable.csr(index(device, 0, 2, 4), index(device, *pages), index(device, 4, 1), PAGE_SIZE),
            )
        )
        views.append(
            BSRView(qo_indptr, PageTable.block_table(index(device, *pages).view(2, 2), lens, PAGE_SIZE))
        )
        slots = max(min(wrong * PAGE_SIZE, 2**31 - 1), -(2**31))
        table = torch.full((2, 8), slots, dtype=torch.int32, device=device)
        views.append(BSRView(qo_indptr, PageTable.token_slots(table, index(device, 1, 0), lens, PAGE_SIZE)))
    return views


def plan_and_run(
    attention: Attention, view: BSRView, q: torch.Tensor, kv: KVCache, out: torch.Tensor
) -> None:
    attention.plan(view)
    attention.run(q, kv, out=out)


@pytest.mark.usefixtures("kernel")
def test_page_ids_outside_the_cache_are_reported(device: torch.device) -> None:
    """The cache lies between two walls of NaN, so reading outside it would be visible."""
    room = torch.full(
        (2, PAGES + 8, PAGE_SIZE, KV_HEADS, HEAD_DIM), torch.nan, dtype=torch.bfloat16, device=device
    )
    room[:, 4:-4] = 1.0
    kv = KVCache.from_pair(room[0, 4:-4], room[1, 4:-4])
    q = torch.ones(3, QO_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    for view in wrong_pages(device):
        attention = make_attention(device)
        out = torch.zeros_like(q)
        if device.type == "cpu":
            with pytest.raises(
                ValueError,
                match=r"^(kv_indices\[\d\]|(block_table|req_to_token): page \d of request \d) is -?\d+, must "
                r"be .*0",
            ):
                plan_and_run(attention, view, q, kv, out)  # plan refuses ids that no cache has
        else:
            attention.plan(view)
            attention.run(q, kv, out=out)
            with pytest.raises(ValueError, match="page id"):
                attention.raise_for_errors()
            assert (out == 1).all()
        assert not out.isnan().any()


@pytest.mark.usefixtures("kernel")
def test_ragged_rows_outside_the_tensor_are_reported(device: torch.device) -> None:
    indptr = index(device, 0, 3, 20)
    attention = make_attention(device)
    attention.plan(BSRView(index(device, 0, 1, 2), PageTable.ragged(indptr)))
    q = torch.ones(2, QO_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    k = torch.ones(12, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    if device.type == "cpu":
        with pytest.raises(
            ValueError, match=r"^kv_indptr\[2\] is 20, must be at most 12, the rows of K and V"
        ):
            attention.run(q, KVCache.from_ragged(k, k))
    else:
        assert (attention.run(q, KVCache.from_ragged(k, k)) == 1).all()
        with pytest.raises(ValueError, match="page id"):
            attention.raise_for_errors()


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("window_left", [-1, 16])
@pytest.mark.parametrize("begin", [0, 3])
def test_the_last_rows_that_an_int32_counts_are_reported(begin: int, window_left: int) -> None:
    """Element indices of the KV tile's rows exceed 2^31."""
    device = torch.device("cuda")
    attention = make_attention(device)
    # without a window all tokens are read, which takes minutes
    last = 2**31 - 1 if window_left >= 0 else begin + 64
    attention.plan(
        BSRView(
            index(device, 0, 1, 2), PageTable.ragged(index(device, 0, begin, last)), window_left=window_left
        )
    )
    q = torch.ones(2, QO_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    k = torch.ones(12, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    assert not attention.run(q, KVCache.from_ragged(k, k)).isnan().any()
    with pytest.raises(ValueError, match="page id"):
        attention.raise_for_errors()


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel")
def test_debug_reports_page_ids_from_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_BACKEND_DEBUG", "1")
    device = torch.device("cuda")
    q = torch.ones(3, QO_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    for view in wrong_pages(device):
        attention = make_attention(device)
        attention.plan(view)
        with pytest.raises(ValueError, match="page id"):
            attention.run(q, make_cache(device))
    attention.plan(make_view(device))  # the error word is the last plan's
    attention.run(q, make_cache(device))
