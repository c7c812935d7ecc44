"""The attention kernels and merge without a GPU (tests/csrc/device_attention.cpp): the kernels' real code on
fibers.

The emulation executes CUDA instruction by instruction, so tests detect a wrong layout, a missing wait or a
wrong count.
"""

from __future__ import annotations

from pathlib import Path

import case_tensors
import cases
import device_attention
import forests
import host_planner
import numpy
import oracle
import pytest
import torch
from compositions import Shape, cascade_problem
from device_attention import CACHES, DeviceAttention
from device_forests import FORMS
from tiers import distinct, in_turn

from attn_backend import Attention, BSRView, KVCache, PageTable, SelectedTokens

pytestmark = [pytest.mark.slow, pytest.mark.skipif(host_planner.COMPILER is None, reason="needs g++")]

CPU = torch.device("cpu")
KERNELS = device_attention.KERNELS
PAGE_INDEX_INVALID = 1 << 5  # kPageIndexInvalid in csrc/planner/schedule.h


def run_and_check(case: case_tensors.Case, attention: DeviceAttention, wants_lse: bool = True) -> None:
    """Without lse, the Hopper kernel stores rows by TMA where possible."""
    attention.plan(case.view)
    case.run(attention, out=case.out, lse=case.lse if wants_lse else None)  # type: ignore[arg-type]
    lse = case.lse.clone()
    if not wants_lse:
        lse[: case.rows] = case.expected()[1]
    case_tensors.check(case, case.out, lse)
    case_tensors.check_padding(case)
    assert attention.schedule().errors == 0


def small_specs(first: int, count: int) -> list[cases.Spec]:
    """Random cases, limited to work that the emulation can do in time."""
    specs: list[cases.Spec] = []
    for seed in range(first, first + 10**4):
        dtype, head_dim = FORMS[len(specs) % 3]
        spec = cases.random_spec(seed, "cuda").with_(dtype=dtype, head_dim=head_dim, aligned=True)
        spec = spec.with_(num_ctas=spec.num_ctas if spec.num_ctas and spec.num_ctas < 40 else 11)
        pairs = (
            sum(q * max(n, 1) for q, n in zip(spec.qo_lens, spec.kv_lens, strict=True))
            * spec.num_kv_heads
            * spec.group_size
            * head_dim
        )
        # a row tile has at least 16 rows
        work = pairs + sum(spec.kv_lens) * spec.num_kv_heads * head_dim * 16
        if work < 2e7:
            specs.append(spec)
        if len(specs) == count:
            break
    return specs


@pytest.mark.parametrize("block", range(2))
@pytest.mark.parametrize("kernel", KERNELS)
def test_random_cases(emulated: Path, kernel: str, block: int) -> None:
    for number, spec in enumerate(small_specs(10**6 * (block + 1), 10)):
        case = case_tensors.build(spec, CPU)
        attention = DeviceAttention(emulated, case.attention(kernel=kernel, cascade=False), kernel, number)
        run_and_check(case, attention, wants_lse=number % 2 == 0)


@pytest.mark.parametrize("cache", CACHES)
def test_caches_that_tma_loads_and_those_that_are_gathered(emulated: Path, cache: str) -> None:
    for number, (dtype, head_dim) in enumerate(FORMS):
        spec = cases.Spec(
            (1, 70, 3, 20),
            (200, 70, 300, 150),
            num_kv_heads=2,
            group_size=2,
            head_dim=head_dim,
            dtype=dtype,
            num_ctas=3,
            aligned=True,
        )
        case = case_tensors.build(spec.with_(**CACHES[cache], seed=number), CPU)
        attention = DeviceAttention(
            emulated, case.attention(kernel="hopper", cascade=False), "hopper", number
        )
        run_and_check(case, attention, wants_lse=False)
        assert attention.launched == (
            "attention" if cache in ("pages", "large pages", "ragged") else "attention_rows"
        )


# The first two have one dtype: without a GPU they run all caches between them.
PARTIAL_ROWS = ((torch.bfloat16, 40), (torch.bfloat16, 72), (torch.float16, 96))


@pytest.mark.parametrize("form", PARTIAL_ROWS, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_heads_that_do_not_fill_a_row_of_a_tile(
    emulated: Path, kernel: str, form: tuple[torch.dtype, int]
) -> None:
    """K and V arrive by TMA or are gathered; whole rows, rows that several warps share, parts of split tiles,
    states. The next head, or NaN, follows a head's columns.
    """
    caches = [CACHES[name] for name in ("pages", "small pages", "tokens in runs", "ragged")]
    dtype, head_dim = form
    turn = PARTIAL_ROWS.index(form) + KERNELS.index(kernel)
    for number, cache in in_turn(caches, turn, without_gpu=2):
        spec = cases.Spec(
            (1, 70, 3, 20),
            (200, 70, 300, 150),
            num_kv_heads=2,
            group_size=1 + 2 * (number % 2),
            head_dim=head_dim,
            dtype=dtype,
            num_ctas=5,
        )
        case = case_tensors.build(spec.with_(**cache, aligned=True, seed=number), CPU)
        attention = DeviceAttention(emulated, case.attention(kernel=kernel, cascade=False), kernel, number)
        run_and_check(case, attention, wants_lse=number % 2 == 0)
    rng = numpy.random.default_rng([head_dim, 40])
    shape = Shape(
        num_kv_heads=1,
        group_size=2,
        page_size=16,
        head_dim=head_dim,
        dtype=dtype,
        num_ctas=7,
        logits_soft_cap=0.0,
    )
    problem = cascade_problem(rng, shape, CPU, 2)
    problem.run(DeviceAttention(emulated, problem.attention(kernel=kernel), kernel, head_dim))  # type: ignore[arg-type]
    problem.check()


WIDTHS = [(192, 128), (56, 32), (72, 200), (72, 96)]


@pytest.mark.parametrize(("head_dim", "head_dim_v"), distinct(WIDTHS, repeated={3}))
@pytest.mark.parametrize("kernel", KERNELS)
def test_keys_and_values_of_different_widths(
    emulated: Path, kernel: str, head_dim: int, head_dim_v: int
) -> None:
    """As above. V has separate memory, or lies in K's memory if V is narrower."""
    caches = [CACHES[name] for name in ("pages", "small pages", "tokens in runs", "ragged", "large pages")]
    dtype = (torch.bfloat16, torch.float16)[head_dim_v // 8 % 2]
    # in each kernel one of these has V in K's memory (number 4)
    turn = WIDTHS.index((head_dim, head_dim_v)) + 3 * KERNELS.index(kernel)
    for number, cache in in_turn(caches, turn, without_gpu=3):
        group_size = 1 + 2 * (number % 2)
        spec = cases.Spec(
            (1, 70, 3, 20),
            (200, 70, 300, 150),
            num_kv_heads=2,
            group_size=group_size,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=dtype,
        )
        spec = spec.with_(**{"cache_form": "pair", **cache}, num_ctas=5, aligned=True, seed=number)
        case = case_tensors.build(spec.with_(v_in_k=number == 4 and head_dim_v < head_dim), CPU)
        attention = DeviceAttention(emulated, case.attention(kernel=kernel, cascade=False), kernel, number)
        run_and_check(case, attention, wants_lse=number % 2 == 0)
    rng = numpy.random.default_rng([head_dim, 48])
    shape = Shape(
        num_kv_heads=1,
        group_size=2,
        page_size=16,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        num_ctas=7,
    )
    problem = cascade_problem(rng, shape, CPU, 2)
    problem.run(DeviceAttention(emulated, problem.attention(kernel=kernel), kernel, head_dim))  # type: ignore[arg-type]
    problem.check()


# head_dim, head_dim_v, whether V lies in K's bytes
WIDE = [(512, 512, False), (576, 512, True), (576, 512, False)]
WIDE_DTYPES = {512: torch.float16, 576: torch.bfloat16}


@pytest.mark.parametrize(("head_dim", "head_dim_v", "v_in_k"), WIDE)
@pytest.mark.parametrize("kernel", KERNELS)
def test_wide_heads(emulated: Path, kernel: str, head_dim: int, head_dim_v: int, v_in_k: bool) -> None:
    """K and V arrive by TMA or are gathered; full and partial row tiles; parts of split tiles; V in separate
    memory or in K's memory.
    """
    names = ("pages", "small pages", "tokens in runs", "ragged", "large pages")
    # Hopper's kernel gathers each of these heads (numbers 1 and 2)
    turn = WIDE.index((head_dim, head_dim_v, v_in_k)) + 3 * KERNELS.index(kernel)
    for number, group_size in in_turn((16, 3, 1, 4, 128), turn, without_gpu=3):
        qo_lens, kv_lens = (
            ((1, 5, 1, 2), (200, 5, 300, 150)) if group_size > 4 else ((1, 40, 3), (130, 40, 210))
        )
        spec = cases.Spec(
            qo_lens,
            kv_lens,
            num_kv_heads=1 + number % 2,
            group_size=group_size,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            v_in_k=v_in_k,
        )
        spec = spec.with_(
            **{"cache_form": "pair", **CACHES[names[number]]},
            dtype=WIDE_DTYPES[head_dim],
            num_ctas=3,
            aligned=True,
        )
        if v_in_k:
            spec = spec.with_(cache_form="pair")
        case = case_tensors.build(spec.with_(seed=number, window_left=100 if number == 3 else -1), CPU)
        attention = DeviceAttention(
            emulated,
            case.attention(kernel=kernel, cascade=False),
            kernel,
            number,
            "sinks" if number == 1 else "standard",
        )
        run_and_check(case, attention, wants_lse=number % 2 == 0)
        if kernel == "hopper":
            assert attention.launched == ("attention_rows" if number in (1, 2) else "attention")


@pytest.mark.parametrize(("head_dim", "head_dim_v", "v_in_k"), WIDE)
@pytest.mark.parametrize("kernel", KERNELS)
def test_wide_heads_in_several_row_groups(
    emulated: Path, kernel: str, head_dim: int, head_dim_v: int, v_in_k: bool
) -> None:
    for seed, options in enumerate([{"cascade": "always"}, {"batch_invariant": True}]):
        rng = numpy.random.default_rng([seed, head_dim, 49])
        shape = Shape(
            1,
            [4, 16][seed],
            head_dim,
            WIDE_DTYPES[head_dim],
            16,
            num_ctas=5,
            head_dim_v=head_dim_v,
            v_in_k=v_in_k,
        )
        batch = forests.random_batch(
            rng, shape.page_size, kv_cost=head_dim * 64, budget=2e7, max_requests=8, max_rows=20
        )
        problem = forests.make_problem(rng, shape, batch, CPU)
        problem.run(
            DeviceAttention(emulated, problem.attention(kernel=kernel, **options), kernel, seed),
            batch.view(rng, CPU),
        )  # type: ignore[arg-type]
        problem.check()


@pytest.mark.parametrize("variant", ["standard", "sinks"])
def test_halves_of_row_tiles(emulated: Path, variant: str) -> None:
    """With 128 or more heads, two CTAs share an interval. Its row tiles are split, complete, or taken from
    the work queue, which each half walks.
    """
    batches = (((1, 1), (500, 700), 5), ((1, 0, 2), (70, 0, 150), 2), ((6, 4), (70, 64), 3))
    for number, (qo_lens, kv_lens, num_ctas) in enumerate(batches):
        spec = cases.Spec(
            qo_lens,
            kv_lens,
            num_kv_heads=1 + number // 2,
            group_size=(128, 256, 128)[number],
            head_dim=576,
            head_dim_v=512,
            v_in_k=True,
        )
        spec = spec.with_(
            **CACHES[("pages", "tokens", "large pages")[number]],
            num_ctas=num_ctas,
            aligned=True,
            seed=number,
            padding_rows=number,
        )
        case = case_tensors.build(spec.with_(cache_form="pair", window_left=50 if number == 1 else -1), CPU)
        attention = DeviceAttention(
            emulated, case.attention(kernel="hopper", cascade=False), "hopper", number, variant
        )
        run_and_check(case, attention, wants_lse=number % 2 == 0)
        schedule = attention.schedule()
        assert (schedule.of_tiles("kind") == 3).all()
        assert schedule.uses_queue == (number > 0)
        assert (schedule.positions[:, 2] > 0).any() == (number == 0)
    for seed, options in enumerate([{"cascade": "always"}, {"batch_invariant": True}]):
        rng = numpy.random.default_rng([seed, 128])
        shape = Shape(1, 128, 576, torch.bfloat16, 16, num_ctas=5, head_dim_v=512, v_in_k=True)
        batch = forests.random_batch(
            rng, shape.page_size, kv_cost=576 * 128, budget=2e7, max_requests=8, max_rows=4
        )
        problem = forests.make_problem(rng, shape, batch, CPU)
        problem.run(
            DeviceAttention(emulated, problem.attention(kernel="hopper", **options), "hopper", seed, variant),
            batch.view(rng, CPU),
        )  # type: ignore[arg-type]
        problem.check()


@pytest.mark.parametrize("kernel", KERNELS)
def test_sparse_mla(emulated: Path, kernel: str) -> None:
    """Tokens anywhere, in any order, twice; rows with few tokens or none; layers with fewer tokens than
    planned, and KV tiles without any.
    """
    layers = [
        ((130, 64, 0, 65, 1), (3, 0, 0, 64, 1), (129, 1, 0, 0, 0)),
        ((40, 0, 33), (1, 0, 0), (32, 0, 33)),
    ]
    for number, (heads, topk) in enumerate(((16, 130), (128, 40))):
        planned = layers[number][0]
        generator = torch.Generator().manual_seed(number)
        cache = torch.randn(20, 16, 576, generator=generator).bfloat16()
        q = torch.randn(len(planned), heads, 576, generator=generator).bfloat16()
        kv = KVCache.from_latent(cache).by_slot()
        slots = torch.full((len(planned), topk), -1, dtype=torch.int32)
        made = Attention(
            heads,
            1,
            576,
            head_dim_v=512,
            device="cpu",
            max_rows=len(planned),
            max_batch=len(planned),
            kernel=kernel,
            num_ctas=3,
        )
        attention = DeviceAttention(emulated, made, kernel, number, "standard")
        attention.plan(BSRView.selected(slots, torch.tensor(planned)))
        for counts in layers[number]:
            indices = torch.full((len(counts), topk), -1, dtype=torch.int32)
            for row, count in enumerate(counts):
                indices[row, torch.randperm(topk, generator=generator)[:count]] = torch.randint(
                    320, (count,), generator=generator
                ).int()
            made.run(q, kv, selected=SelectedTokens(indices))  # tells the plan
            lse = torch.full((len(counts), heads), torch.nan)
            out = attention.run(q, kv, lse=lse)
            for row, chosen in enumerate(indices):
                keys = cache.flatten(0, 1)[chosen[chosen >= 0].long()][:, None]
                o, expected_lse = oracle.attention(q[row : row + 1], keys, keys[..., :512], causal=False)
                assert (out[row].double() - o[0]).norm() <= 5e-3 * o.norm()
                torch.testing.assert_close(lse[row].double(), expected_lse[0], rtol=2e-3, atol=2e-3)
            assert attention.schedule().errors == 0


@pytest.mark.parametrize(
    ("qo_lens", "kv_lens"),
    [((300,), (300,)), ((90, 5, 130, 40), (90, 700, 200, 45)), ((1,) * 40, (70, 300) * 20)],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kind_of_row_tile(
    emulated: Path, kernel: str, qo_lens: tuple[int, ...], kv_lens: tuple[int, ...]
) -> None:
    for number, group_size in enumerate((1, 3, 4, 16)):
        dtype, head_dim = FORMS[number % 3]
        spec = cases.Spec(
            qo_lens,
            kv_lens,
            num_kv_heads=1,
            group_size=group_size,
            head_dim=head_dim,
            dtype=dtype,
            num_ctas=5,
            padding_rows=2,
            page_size=5,
        )
        case = case_tensors.build(spec.with_(window_left=60 if number == 1 else -1), CPU)
        variant = "standard" if head_dim == 128 else "sinks"
        attention = DeviceAttention(emulated, case.attention(kernel=kernel), kernel, number, variant)
        run_and_check(case, attention, wants_lse=number % 2 == 0)


@pytest.mark.parametrize("group_size", [48, 64, 112, 129])
def test_many_heads_share_a_kv_head(emulated: Path, group_size: int) -> None:
    """Rows with all their heads fill 128 or 192 rows of Q. What lies after them must not be overwritten."""
    spec = cases.Spec(
        (1, 1, 1, 3, 1),
        (300, 90, 129, 70, 400),
        num_kv_heads=2,
        group_size=group_size,
        head_dim=64,
        num_ctas=2,
        page_size=16,
    )
    case = case_tensors.build(spec, CPU)
    attention = DeviceAttention(emulated, case.attention(kernel="hopper"), "hopper", group_size, "sinks")
    run_and_check(case, attention, wants_lse=True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_scores_that_outgrow_the_first_maxima(emulated: Path, kernel: str) -> None:
    """Logits around tens: logits of later KV tiles exceed the first tile's by far."""
    for number, (dtype, head_dim) in enumerate(FORMS):
        spec = cases.Spec(
            (70, 2),
            (700, 600),
            num_kv_heads=1,
            head_dim=head_dim,
            dtype=dtype,
            sm_scale=10 / head_dim**0.5,
            num_ctas=2,
            seed=number,
        )
        case = case_tensors.build(spec, CPU)
        run_and_check(case, DeviceAttention(emulated, case.attention(kernel=kernel), kernel, number))


def test_pairs_from_the_work_queue(emulated: Path) -> None:
    """Each pair is computed once, by any CTA."""
    for number, (qo_lens, kv_lens) in enumerate(
        (((130,) * 6, (130,) * 6), ((200, 20, 1, 100, 300) * 2, (200, 20, 90, 100, 350) * 2))
    ):
        spec = cases.Spec(qo_lens, kv_lens, num_kv_heads=2, group_size=4, num_ctas=8)
        case = case_tensors.build(spec, CPU)
        attention = DeviceAttention(emulated, case.attention(kernel="hopper"), "hopper", number)
        run_and_check(case, attention, wants_lse=number == 0)
        assert attention.schedule().uses_queue


@pytest.mark.parametrize("kernel", KERNELS)
def test_wrong_pages_are_clamped_and_reported(emulated: Path, kernel: str) -> None:
    """The cache ends where its tensors end: reading a page beyond it would change the output."""
    dtype, head_dim = FORMS[0]
    case = case_tensors.build(
        cases.Spec((1, 3), (40, 25), dtype=dtype, head_dim=head_dim, num_kv_heads=1), CPU
    )
    num_pages = case.kv.num_pages
    for wrong, right in ((-1, 0), (-(2**31), 0), (num_pages, num_pages - 1), (2**31 - 1, num_pages - 1)):
        results = []
        for page in (wrong, right):
            pages = torch.tensor([[2, 0, 0], [1, 1, 0]], dtype=torch.int32)
            view = BSRView(
                case.view.qo_indptr,
                PageTable.block_table(pages, torch.tensor([40, 35], dtype=torch.int32), 16),
            )
            cache = KVCache(*(t.nan_to_num(0.5) for t in (case.kv.k, case.kv.v)))
            attention = DeviceAttention(emulated, case.attention(kernel=kernel, cascade=False), kernel)
            attention.plan(view)
            pages[0, 1] = pages[1, 2] = page  # a CPU's plan would refuse these
            results.append(attention.run(case.q[:4], cache))
            assert attention.schedule().errors == (0 if page == right else PAGE_INDEX_INVALID)
        assert torch.equal(*results)


@pytest.mark.parametrize("kernel", KERNELS)
def test_ragged_lengths_beyond_the_tensor(emulated: Path, kernel: str) -> None:
    """Nothing beyond K's last row is read (it holds NaN), and the kernel reports the error."""
    for number, rows in enumerate((0, 1, 64, 129, 300, 500)):
        dtype, head_dim = FORMS[number % 3]
        spec = cases.Spec(
            (1, 3),
            (200, 400),
            dtype=dtype,
            head_dim=head_dim,
            num_kv_heads=1,
            table_form="ragged",
            cache_form="ragged",
            page_size=1,
            num_ctas=5,
        )
        case = case_tensors.build(spec.with_(causal=False), CPU)
        attention = DeviceAttention(emulated, case.attention(kernel=kernel, cascade=False), kernel, number)
        attention.plan(case.view)
        k, v = case.kv.k, case.kv.v
        k[rows:], v[rows:] = torch.nan, torch.nan
        out = attention.run(case.q, KVCache(k[:rows], v[:rows]), lse=case.lse)
        assert attention.schedule().errors == PAGE_INDEX_INVALID
        assert not out.isnan().any()
        assert not case.lse.isnan().any()


PROMPTS = [(4, 64, 64, -1), (4, 64, 64, 40), (2, 128, 128, -1), (3, 256, 256, 40), (8, 576, 512, -1)]


@pytest.mark.parametrize("form", PROMPTS, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_cached_prefixes_do_not_change_a_prompt(
    emulated: Path, kernel: str, form: tuple[int, int, int, int]
) -> None:
    """Batch-invariant plans give a row the same bits, however many rows precede it in the step."""
    group_size, head_dim, head_dim_v, window_left = form
    tokens = 200 if head_dim <= 128 else 90
    generator = torch.Generator().manual_seed(head_dim + window_left)
    make = lambda *shape: torch.randn(*shape, generator=generator).bfloat16()  # noqa: E731
    pages = -(-tokens // 16)
    k = make(pages, 16, 1, head_dim)
    kv = KVCache.from_pair(k, k[..., :head_dim_v] if head_dim_v < head_dim else make(*k.shape))
    q = 2 * make(tokens, group_size, head_dim)
    attention = DeviceAttention(
        emulated,
        Attention(
            group_size,
            1,
            head_dim,
            head_dim_v=head_dim_v,
            device="cpu",
            kernel=kernel,
            num_ctas=3,
            max_rows=tokens,
            max_batch=1,
            batch_invariant=True,
        ),
        kernel,
        variant="standard",
    )
    table = PageTable.block_table(
        torch.arange(pages, dtype=torch.int32)[None], torch.tensor([tokens], dtype=torch.int32), 16
    )

    def run_last(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        indptr = torch.tensor([0, rows], dtype=torch.int32)
        attention.plan(
            BSRView(indptr, table, window_left=window_left, prompts=torch.ones(1, dtype=torch.int32))
        )
        out, lse = make(rows, group_size, head_dim_v), torch.zeros(rows, group_size)
        attention.run(q[tokens - rows :], kv, out=out, lse=lse)
        return out, lse

    whole, whole_lse = run_last(tokens)
    for rows in (1, 2, 15, 16, 17, 33, 64, 65):
        out, lse = run_last(rows)
        assert torch.equal(out, whole[-rows:]), rows
        assert torch.equal(lse, whole_lse[-rows:]), rows


@pytest.mark.parametrize("cache", ["ragged", "paged"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_tokens_before_the_window_are_not_read(emulated: Path, kernel: str, cache: str) -> None:
    """A row tile's first KV tile begins before the window of its first row. The cache may hold NaN before the
    window."""
    forms = (
        {"table_form": "ragged", "cache_form": "ragged", "page_size": 1}
        if cache == "ragged"
        else {"page_size": 16}
    )
    for number, window_left in enumerate((0, 20, 50, 100)):
        dtype, head_dim = FORMS[number % 3]
        spec = cases.Spec(
            (1, 3, 5, 20),
            (200, 400, 90, 333),
            dtype=dtype,
            head_dim=head_dim,
            num_kv_heads=1,
            window_left=window_left,
            num_ctas=5,
            **forms,
        )
        case = case_tensors.build(spec.with_(causal=True), CPU)
        expected = case.expected()
        for qo_len, kv_len, slots in zip(spec.qo_lens, spec.kv_lens, case.slots, strict=True):
            hidden = slots[: max(kv_len - qo_len - window_left, 0)]
            for part in (case.kv.k, case.kv.v):
                part[hidden // spec.page_size, hidden % spec.page_size] = torch.nan
        attention = DeviceAttention(emulated, case.attention(kernel=kernel, cascade=False), kernel, number)
        attention.plan(case.view)
        case.run(attention, out=case.out, lse=case.lse)  # type: ignore[arg-type]
        case_tensors.check(case, case.out, case.lse, expected=expected)
        assert attention.schedule().errors == 0


@pytest.mark.parametrize("cache", ["ragged", "paged"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_cache_without_tokens(emulated: Path, kernel: str, cache: str) -> None:
    forms = (
        {"table_form": "ragged", "cache_form": "ragged", "page_size": 1}
        if cache == "ragged"
        else {"page_size": 16}
    )
    for number, (dtype, head_dim) in enumerate(FORMS):
        spec = cases.Spec(
            (1, 40), (0, 0), dtype=dtype, head_dim=head_dim, num_kv_heads=1, num_ctas=3, **forms
        )
        case = case_tensors.build(spec, CPU)
        attention = DeviceAttention(emulated, case.attention(kernel=kernel, cascade=False), kernel, number)
        attention.plan(case.view)
        attention.run(case.q, KVCache(case.kv.k[:0], case.kv.v[:0]), out=case.out, lse=case.lse)
        assert (case.out[: case.rows] == 0).all()
        assert (case.lse[: case.rows] == -torch.inf).all()
        assert attention.schedule().errors == 0
