"""Attention with a variant: its results, its refusals, and when its arguments are read.

On a CPU with each instruction set of the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import case_tensors
import cases
import cpu_isa
import forked_python
import oracle
import pytest
import torch
import variant_sources
from tiers import HAS_GPU, mostly_slow
from variant_sources import ALIBI, ALIBI_CPP, SLANTED, SQUARED

from attn_backend import Attention, BSRView, Composition, KVCache, PageTable, Variant
from attn_backend.jit import compilers, cubins
from attn_backend.kernels.variant import AttentionVariant
from attn_backend.variants import builtin

SLOPE = 0.02
ORACLES = {
    "slanted": variant_sources.slanted_oracle(SLOPE),
    "alibi": variant_sources.alibi_oracle(SLOPE),
    "squared": variant_sources.SQUARED_ORACLE,
}
VARIANTS = {variant.name: variant for variant in (SLANTED, ALIBI, SQUARED)}

needs_cpp = pytest.mark.skipif(compilers.cpp_compiler() is None, reason="needs a C++ compiler")


def arguments_of(variant: Variant) -> dict[str, float]:
    return dict.fromkeys((param.name for param in variant.params), SLOPE)


def check_case(spec: cases.Spec, variant: Variant, device: torch.device | str = "cpu") -> None:
    spec = spec.with_(logits_soft_cap=0.0)
    case = case_tensors.build(spec, device)
    attention = case.attention(variant=variant)
    attention.plan(case.view)
    lse = case.lse if variant.uses_softmax else None
    attention.run(
        case.q, case.kv, out=case.out, lse=lse, sm_scale=spec.sm_scale, variant_args=arguments_of(variant)
    )
    expected = oracle.paged_attention(
        case.q,
        case.k_slots,
        case.v_slots,
        list(spec.qo_lens),
        case.slots,
        sm_scale=spec.sm_scale,
        causal=spec.causal,
        window_left=spec.window_left,
        variant=ORACLES[variant.name],
    )
    case_tensors.check(case, case.out, lse, expected)
    case_tensors.check_padding(case)


RUN = """
import sys
import cases, test_attention_variant, torch

torch.set_num_threads(1)
first, count, turn = map(int, sys.argv[1:4])
dtypes = [getattr(torch, name) for name in sys.argv[4:]]
names = list(test_attention_variant.VARIANTS)
for seed in range(first, first + count):
    dtype = dtypes[(seed if turn < 0 else seed // 3 + turn) % len(dtypes)]
    spec = cases.random_spec(seed, "cpu").with_(dtype=dtype)
    test_attention_variant.check_case(spec, test_attention_variant.VARIANTS[names[seed // 3 % len(names)]])
"""


@needs_cpp
@pytest.mark.parametrize("first", mostly_slow([0, 18], fast=1, without_gpu=1))
@pytest.mark.parametrize("isa", cpu_isa.ISAS)
def test_random_cases(isa: str, first: int) -> None:
    """Each variant in each dtype.

    A library takes more than a second to compile. So without a GPU each variant has one dtype for an
    instruction set, and another one for the next. AMX multiplies only bfloat16.
    """
    turn = -1 if HAS_GPU else cpu_isa.ISAS.index(isa)
    dtypes = ["bfloat16", *([] if isa == "amx" and not HAS_GPU else ["float16", "float32"])]
    forked_python.run(RUN, [str(first), "18", str(turn), *dtypes], cpu_isa.environment(isa))


@pytest.mark.gpu
@pytest.mark.parametrize("name", VARIANTS)
def test_random_cases_on_a_gpu(name: str, kernel: str) -> None:
    for seed in range(12):
        check_case(cases.random_spec(seed, "cuda"), VARIANTS[name], "cuda")


@needs_cpp
@pytest.mark.parametrize("options", [{"cascade": "always"}, {"batch_invariant": True}], ids=str)
def test_with_shared_prefixes_and_in_chunks(options: dict[str, object]) -> None:
    for seed, variant in enumerate((SLANTED, SQUARED, SLANTED)):
        spec = cases.Spec(
            (1, 3, 1, 9), (700, 820, 64, 700), dtype=torch.float32, sharing=0.9, page_size=16, seed=seed
        )
        case = case_tensors.build(spec, "cpu")
        attention = case.attention(variant=variant, **options)
        attention.plan(case.view)
        out = attention.run(case.q, case.kv, variant_args=arguments_of(variant))
        expected = oracle.paged_attention(
            case.q, case.k_slots, case.v_slots, list(spec.qo_lens), case.slots, variant=ORACLES[variant.name]
        )
        case_tensors.check(case, out, None, expected)


class Problem:
    """Three rows over 40 tokens, on a CPU."""

    def __init__(self, variant: Variant | None, **options: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        self.q = torch.randn(3, 4, 64, generator=generator)
        self.kv = KVCache.from_ragged(*(torch.randn(40, 2, 64, generator=generator) for _ in range(2)))
        self.attention = Attention(
            4, 2, 64, dtype=torch.float32, device="cpu", max_rows=3, max_batch=1, variant=variant, **options
        )
        self.indptr, self.table = (
            torch.tensor([0, 3], dtype=torch.int32),
            PageTable.ragged(torch.tensor([0, 40], dtype=torch.int32)),
        )
        self.attention.plan(BSRView(self.indptr, self.table))

    def run(self, **arguments: Any) -> torch.Tensor:
        return self.attention.run(self.q, self.kv, **arguments)


@needs_cpp
def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match="logits_soft_cap is 2, must be 0 with a variant: combine the variant with soft_cap instead",
    ):
        Problem(ALIBI).run(logits_soft_cap=2.0, variant_args={"slope": 1.0})
    with pytest.raises(ValueError, match="lse is a tensor, must be None: the variant does not use softmax"):
        Problem(SQUARED).run(lse=torch.empty(3, 4))
    with pytest.raises(ValueError, match=r"variant_args is .*, must be None: this Attention has no variant"):
        Problem(None).run(variant_args={"slope": 1.0})
    with pytest.raises(ValueError, match="variant is 'alibi', must be a Variant or None"):
        Attention(4, 2, 64, dtype=torch.float32, device="cpu", max_rows=3, max_batch=1, variant="alibi")  # type: ignore[arg-type]


def test_without_jit_the_exact_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_BACKEND_JIT", "0")
    monkeypatch.setenv("ATTN_BACKEND_CPU_ISA", "baseline")
    command = "attn-backend compile --variant [a-z_]+:[A-Z]+ --dtype float32 --head-dim 64 --arch cpu"
    unknown = variant_sources.alibi(ALIBI_CPP.replace("logit +", "logit *"), "unknown")
    with pytest.raises(
        RuntimeError,
        match=f"variant unknown .* is not compiled, and "
        f"ATTN_BACKEND_JIT=0.*`{command.replace('[a-z_]+:[A-Z]+', 'MODULE:OBJECT')}`",
    ):
        Problem(unknown)
    monkeypatch.setattr(variant_sources, "UNKNOWN", unknown, raising=False)
    with pytest.raises(RuntimeError, match=f"`{command}` compiles it ahead"):
        Problem(unknown)


@needs_cpp
def test_arguments_are_read_again_only_if_they_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[Mapping[str, Any]] = []
    pack = Variant.pack

    def counting(self: Variant, args: Mapping[str, Any], device: torch.device) -> bytes:
        packed.append(dict(args))
        return pack(self, args, device)

    monkeypatch.setattr(Variant, "pack", counting)
    variant = Variant.from_functions(
        score_mod=lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx),
        tensors={"slopes": torch.float32},
    )  # type: ignore[name-defined]
    problem = Problem(variant)
    slopes = torch.full((4,), 0.5)
    first = problem.run(variant_args={"slopes": slopes})
    assert torch.equal(problem.run(variant_args={"slopes": slopes}), first)
    assert len(packed) == 1
    problem.run(variant_args={"slopes": slopes.clone()})
    assert len(packed) == 2, "another tensor"
    problem.run(variant_args={"slopes": slopes})
    slopes.fill_(0.25)
    other = problem.run(variant_args={"slopes": slopes})
    assert len(packed) == 3
    assert not torch.equal(other, first), "what tensors hold is read by each run"
    with pytest.raises(ValueError, match="variant_args"):
        problem.run(variant_args={"slopes": slopes.double()})
    assert torch.equal(problem.run(variant_args={"slopes": slopes}), other)
    assert len(packed) == 5, "what failed is not remembered"


def test_numbers_are_read_again_if_they_changed() -> None:
    problem = Problem(ALIBI)
    first = problem.run(variant_args={"slope": 0.5})
    assert not torch.equal(problem.run(variant_args={"slope": 0.25}), first)
    assert torch.equal(problem.run(variant_args={"slope": 0.5}), first)


def biased(shape: tuple[str | None, ...]) -> Variant:
    """Its only tensor has this shape."""
    indices = {
        "num_qo_heads": "row.qo_head",
        "num_kv_heads": "row.qo_head / 2",
        "batch": "row.request",
        None: "kv_position",
    }
    element = f"table({', '.join(indices[size] for size in shape)})"
    cpp = (
        f"float logits(float logit, const ScoreRow& row, int32_t kv_position) const {{ return logit + "
        f"{element}; }}"
    )
    return Variant.from_source(cpp, {"table": (torch.float32, shape)}, name="biased")


@needs_cpp
@pytest.mark.parametrize(
    ("shape", "least"),
    [
        (("num_qo_heads",), [4]),
        (("num_kv_heads",), [2]),
        (("batch",), [2]),
        (("batch", None), [2, 1]),
        (("num_qo_heads", "batch"), [4, 2]),
    ],
    ids=str,
)
def test_tensors_that_are_shorter_than_declared_are_refused(
    shape: tuple[str | None, ...], least: list[int]
) -> None:
    attention = Attention(
        4, 2, 64, dtype=torch.float32, device="cpu", max_rows=2, max_batch=2, variant=biased(shape)
    )
    view = BSRView(
        torch.tensor([0, 1, 2], dtype=torch.int32),
        PageTable.ragged(torch.tensor([0, 20, 40], dtype=torch.int32)),
    )
    attention.plan(view)
    q, kv = torch.randn(2, 4, 64), KVCache.from_ragged(*torch.randn(2, 40, 2, 64))
    for sizes in (least, [size + 3 for size in least]):
        attention.run(q, kv, variant_args={"table": torch.zeros(sizes)})
    for i, size in enumerate(shape):
        if size is not None:
            short = torch.zeros([each - (i == dim) for dim, each in enumerate(least)])
            with pytest.raises(
                ValueError,
                match=rf"variant_args\['table'\] is .*, must be at least of shape \[.*{size} = {least[i]}",
            ):
                attention.run(q, kv, variant_args={"table": short})


@needs_cpp
def test_shapes_are_those_of_the_plan_and_of_q() -> None:
    """Also if the arguments stay the same and the batch grows."""
    cpp = (
        "float logits(float logit, const ScoreRow& row, int32_t) const { return logit * of_row(row.row) + "
        "of_request(row.request); }"
    )
    variant = Variant.from_source(
        cpp, {"of_row": (torch.float32, ("rows",)), "of_request": (torch.float32, ("batch",))}, name="lengths"
    )
    attention = Attention(
        4, 2, 64, dtype=torch.float32, device="cpu", max_rows=4, max_batch=4, variant=variant
    )
    q, kv = torch.randn(4, 4, 64), KVCache.from_ragged(*torch.randn(2, 40, 2, 64))
    args = {"of_row": torch.ones(3), "of_request": torch.zeros(2)}

    def step(batch: int, rows: int) -> torch.Tensor:
        attention.plan(
            BSRView(
                torch.arange(batch + 1, dtype=torch.int32),
                PageTable.ragged(torch.arange(batch + 1, dtype=torch.int32) * 10),
            )
        )
        return attention.run(q[:rows], kv, variant_args=args)

    expected = step(2, 2)
    with pytest.raises(
        ValueError,
        match=r"variant_args\['of_row'\] is .* of shape \[3\] .*, must be at least of shape \[rows = 4\]",
    ):
        step(2, 4)
    with pytest.raises(
        ValueError,
        match=r"variant_args\['of_request'\] is .* of shape \[2\] .*, must be at least of shape \[batch = "
        r"3\]",
    ):
        step(3, 3)
    assert torch.equal(step(2, 2), expected)


def test_tensors_that_are_bound_fit_the_heads_and_the_batch() -> None:
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "max_rows": 2, "max_batch": 2}
    with pytest.raises(
        ValueError, match=r"value of 'slopes' is .*, must be at least of shape \[num_qo_heads = 4\]"
    ):
        Attention(4, 2, 64, variant=builtin.alibi(torch.ones(3)), **options)
    attention = Attention(
        4, 2, 64, variant=builtin.document(torch.zeros(1, 20, dtype=torch.int32)), **options
    )
    with pytest.raises(
        ValueError, match=r"value of 'document_ids' is .*, must be at least of shape \[batch = 2, any\]"
    ):
        attention.plan(
            BSRView(
                torch.tensor([0, 1, 2], dtype=torch.int32),
                PageTable.ragged(torch.tensor([0, 20, 40], dtype=torch.int32)),
            )
        )


def test_plain_and_under_a_mask_a_view_that_does_not_say_is_causal_or_not() -> None:
    indptr, table = (
        torch.tensor([0, 3], dtype=torch.int32),
        PageTable.ragged(torch.tensor([0, 40], dtype=torch.int32)),
    )
    plain, masked = ALIBI, SLANTED
    causal, window = (
        Variant.from_source(ALIBI_CPP, {"slope": float}, name="interval", **interval)
        for interval in ({"causal": True}, {"window_left": 7})
    )
    for variant, view, expected in [
        (plain, {}, (True, -1)),
        (masked, {}, (False, -1)),
        (masked, {"causal": True}, (True, -1)),
        (causal, {}, (True, -1)),
        (causal, {"causal": False}, (True, -1)),
        (window, {}, (False, 7)),
        (window, {"window_left": 3}, (False, 3)),
        (window, {"window_left": 30, "causal": True}, (True, 7)),
        (plain, {"causal": False, "window_left": 5}, (False, 5)),
    ]:
        made = AttentionVariant(variant, None, torch.float32, 64, torch.device("cpu"))
        assert made.visibility(BSRView(indptr, table, **view), 1) == expected
    with pytest.raises(
        ValueError,
        match="kv_offsets is None, must be given: variant interval has a window, which counts positions over "
        "all levels",
    ):
        AttentionVariant(window, None, torch.float32, 64, torch.device("cpu"), max_levels=2).visibility(
            BSRView(indptr, table), 2
        )


def test_each_of_several_levels_says_where_it_stands_if_the_variant_reads_it() -> None:
    indptr, table = (
        torch.tensor([0, 3], dtype=torch.int32),
        PageTable.ragged(torch.tensor([0, 40], dtype=torch.int32)),
    )
    positions, offsets = torch.arange(3, dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    made = {
        variant.name: AttentionVariant(variant, None, torch.float32, 64, torch.device("cpu"))
        for variant in (ALIBI, SQUARED)
    }
    with pytest.raises(
        ValueError,
        match="kv_offsets and positions are None, must be given, one of them at least: variant alibi reads "
        "positions",
    ):
        made["alibi"].visibility(BSRView(indptr, table), 2)
    for told in ({"positions": positions}, {"kv_offsets": offsets}):
        assert made["alibi"].visibility(BSRView(indptr, table, **told), 2) == (True, -1)  # type: ignore[arg-type]
    assert made["squared"].visibility(BSRView(indptr, table), 2) == (True, -1)
    cascade = Composition.cascade(
        [indptr, indptr], [table, table], kv_offsets=[None, offsets], positions=positions, requests=positions
    )
    tree = Composition.tree(
        [-1], table, [0, 0, 0], kv_offsets=offsets, positions=positions, requests=positions
    )
    for level, expected in zip((*cascade.levels, *tree.levels), (None, offsets, offsets), strict=True):
        assert level.positions is level.requests is positions
        assert level.kv_offsets is expected


@needs_cpp
def test_a_run_under_another_mask_than_the_plans_is_refused() -> None:
    """KV tiles that the plan's mask hides are not visited. Other parameters may change."""
    ids, others = torch.zeros(1, 40, dtype=torch.int32), torch.ones(1, 40, dtype=torch.int32)
    problem = Problem(builtin.document() & builtin.alibi())
    args = {"document_ids": ids, "slopes": torch.rand(4)}
    problem.attention.plan(BSRView(problem.indptr, problem.table), variant_args=args)
    problem.run(variant_args=args)
    problem.run(variant_args=args | {"slopes": torch.rand(4)})
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"variant_args\['document_ids'\] is not what plan\(\) was given"
        ):
            problem.run(variant_args=args | {"document_ids": others})
    problem.attention.plan(BSRView(problem.indptr, problem.table))
    problem.run(variant_args=args | {"document_ids": others})


@needs_cpp
def test_rotating_the_cache_within_or_beforehand_is_the_same() -> None:
    """Compared with plain attention over queries and keys that were rotated in advance, and rounded once as
    in kernels."""
    frequencies = builtin.llama3_frequencies(48)
    reference = builtin.rope(frequencies).reference()
    assert reference is not None
    zero = torch.tensor(0)
    for dtype in (torch.float32, torch.bfloat16):
        spec = cases.Spec((1, 3, 40), (700, 20, 45), dtype=dtype, head_dim=64, page_size=16)
        case = case_tensors.build(spec, "cpu")
        attention = case.attention(variant=builtin.rope(frequencies))
        attention.plan(case.view)
        out = attention.run(case.q, case.kv)
        row = 0
        for qo_len, kv_len, slots in zip(spec.qo_lens, spec.kv_lens, case.slots, strict=True):
            q, k, v = case.q[row : row + qo_len], case.k_slots[slots], case.v_slots[slots]
            q_idx, kv_idx = torch.arange(kv_len - qo_len, kv_len)[:, None], torch.arange(kv_len)[:, None]
            before, _ = oracle.attention(
                reference.query(q.double(), zero, zero, q_idx).to(dtype),
                reference.key(k.double(), zero, zero, kv_idx).to(dtype),
                v,
            )
            error = out[row : row + qo_len].double() - before
            assert error.norm() <= cases.TOLERANCE[dtype] * before.norm()
            row += qo_len


@needs_cpp
def test_what_tells_requests_apart_is_not_shared() -> None:
    spec = cases.Spec((1,) * 6, (700,) * 6, dtype=torch.float32, head_dim=64, sharing=1.0, page_size=16)
    case = case_tensors.build(spec, "cpu")
    frequencies = builtin.rope_frequencies(64)
    positions = {
        "q_positions": torch.arange(20).int(),
        "kv_positions": torch.arange(700).expand(6, 700).int(),
    }
    for variant, args, is_shared in (
        (builtin.rope(frequencies), {}, True),
        (builtin.rope_at(frequencies), positions, False),
    ):
        attention = case.attention(variant=variant, cascade="always")
        attention.plan(case.view, variant_args=args)
        assert (attention.schedule().links.shape[1] > 0) == is_shared
    levels = case.attention(variant=builtin.rope_at(frequencies), max_levels=2)
    with pytest.raises(
        ValueError,
        match=r"len\(composition.levels\) is 2, must be 1 under variant rope_at, whose transforms of K and V "
        r"depend on the request",
    ):
        levels.plan(Composition([case.view, case.view]))


@needs_cpp
def test_a_library_of_other_headers_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_BACKEND_CACHE", str(tmp_path))
    monkeypatch.setattr(cubins, "headers_digest", lambda _: "another")
    other = variant_sources.alibi(ALIBI_CPP + "// compiled for this test\n", "other")
    with pytest.raises(
        RuntimeError, match=r"compiled from other headers than libattn_backend\.so; reinstall"
    ):
        Problem(other)
