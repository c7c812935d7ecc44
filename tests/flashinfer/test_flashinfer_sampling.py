"""attn_backend.flashinfer.sampling and LogitsPipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flashinfer_oracle import DEVICES
from torch import Tensor

from attn_backend import flashinfer, sample, sample_from_probs
from attn_backend.flashinfer import sampling
from attn_backend.flashinfer.logits_processor import (
    LogitsPipe,
    MinP,
    Sample,
    Softmax,
    TaggedTensor,
    Temperature,
    TensorType,
    TopK,
    TopP,
)
from attn_backend.kernels.sampling import mixed

VOCAB = 50
DRAWS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "plain": (sampling.sampling_from_probs, {}),
    "top_p": (sampling.top_p_sampling_from_probs, {"top_p": 0.6}),
    "top_k": (sampling.top_k_sampling_from_probs, {"top_k": 7}),
    "min_p": (sampling.min_p_sampling_from_probs, {"min_p": 0.3}),
    "both": (sampling.top_k_top_p_sampling_from_probs, {"top_k": 9, "top_p": 0.6}),
    "joint": (
        sampling.top_k_top_p_sampling_from_probs,
        {"top_k": 9, "top_p": 0.6, "filter_apply_order": "joint"},
    ),
}


def logits_of(batch: int, device: str = "cpu", seed: int = 0) -> Tensor:
    return (torch.randn(batch, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2).to(device)


def kept(
    probs: Tensor,
    top_k: int = VOCAB,
    top_p: float = 1.0,
    min_p: float = 0.0,
    filter_apply_order: str = "top_k_first",
) -> Tensor:
    """The survivors of the filters, normalized, in float64."""
    probs = probs.cpu().double()
    ordered = probs.sort(descending=True).values
    mass = ordered.cumsum(-1) / (
        1.0 if filter_apply_order == "joint" else ordered[:, :top_k].sum(-1, keepdim=True)
    )
    least = ordered.gather(1, (mass < top_p).sum(-1, keepdim=True).clamp(max=VOCAB - 1))
    is_kept = (probs >= ordered[:, top_k - 1 : top_k]) & (probs >= least) & (probs >= min_p * ordered[:, :1])
    left = probs * is_kept
    return left / left.sum(-1, keepdim=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", DRAWS)
def test_draws_have_the_distribution(device: str, name: str) -> None:
    """20,000 draws from each of three rows: no token that the filters remove, and frequencies within five
    standard deviations.
    """
    draw, options = DRAWS[name]
    probs = torch.softmax(logits_of(3, device), -1)
    indices = torch.arange(60000, device=device) % 3
    tokens = draw(probs, **options, indices=indices, seed=1, offset=2)
    assert tokens.dtype == torch.int64
    expected = kept(probs, **options)
    for row in range(3):
        found = torch.bincount(tokens[indices == row].cpu(), minlength=VOCAB) / 20000
        assert not found[expected[row] == 0].any()
        assert (
            (found - expected[row]).abs() <= 5 * (expected[row] * (1 - expected[row]) / 20000).sqrt() + 1e-9
        ).all()


@pytest.mark.parametrize("device", DEVICES)
def test_draws_from_logits(device: str) -> None:
    logits = logits_of(1, device).expand(4000, VOCAB)
    for options, expected in (({}, {}), ({"top_k": 9, "top_p": 0.6}, {"top_k": 9, "top_p": 0.6})):
        draw = sampling.top_k_top_p_sampling_from_logits if options else sampling.sampling_from_logits
        found = torch.bincount(draw(logits, **options, seed=3, offset=0).cpu().long(), minlength=VOCAB) / 4000  # type: ignore[operator]
        wanted = kept(torch.softmax(logits[:1], -1), **expected)[0]  # type: ignore[arg-type]
        assert ((found - wanted).abs() <= 5 * (wanted * (1 - wanted) / 4000).sqrt() + 1e-9).all()


@pytest.mark.parametrize("device", DEVICES)
def test_seeds_offsets_and_generators(device: str) -> None:
    probs = torch.full((64, VOCAB), 1 / VOCAB, device=device)

    def draw(**options: Any) -> list[int]:
        tokens = sampling.sampling_from_probs(probs, **options)
        assert isinstance(tokens, Tensor)
        return tokens.tolist()

    assert len(set(draw(seed=1, offset=0))) > 20  # the rows are equal, their draws are not
    assert draw(seed=1, offset=0) == draw(seed=1, offset=0)
    assert draw(seed=1, offset=0) != draw(seed=1, offset=4)
    assert draw(seed=1, offset=0) != draw(seed=2, offset=0)
    one, two = (torch.tensor([value], device=device) for value in (1, 2))
    assert draw(seed=one, offset=two) == draw(seed=one.expand(64).contiguous(), offset=two)
    assert draw(seed=one, offset=two) != draw(seed=one, offset=one)
    generators = [torch.Generator(device).manual_seed(5) for _ in range(2)]
    first, second = draw(generator=generators[0]), draw(generator=generators[0])
    assert first != second
    assert [draw(generator=generators[1]), draw(generator=generators[1])] == [first, second]
    torch.manual_seed(7)
    of_default = draw()
    assert of_default != draw()
    torch.manual_seed(7)
    assert of_default == draw()


@pytest.mark.parametrize("device", DEVICES)
def test_a_generator_in_the_public_functions(device: str) -> None:
    logits = torch.zeros(64, VOCAB, device=device)
    for function, rows in ((sample, logits), (sample_from_probs, logits + 1)):
        tokens = function(rows, generator=torch.Generator(device).manual_seed(5)).token_ids  # type: ignore[operator]
        assert len(set(tokens.tolist())) > 20
        assert torch.equal(tokens, function(rows, generator=torch.Generator(device).manual_seed(5)).token_ids)  # type: ignore[operator]


def test_seeds_are_spread() -> None:
    assert len({mixed(seed, offset) for seed in range(100) for offset in range(0, 400, 4)}) == 10000
    assert all(-(2**63) <= mixed(seed, 2**62) < 2**63 for seed in (-(2**63), -1, 0, 2**63 - 1))


@pytest.mark.parametrize("device", DEVICES)
def test_parameters_of_rows(device: str) -> None:
    probs = torch.softmax(logits_of(3, device), -1)
    top_k = torch.tensor([1, 2, 50], device=device)
    tokens = sampling.top_k_sampling_from_probs(probs, top_k, seed=0, offset=0)
    assert tokens[0] == probs[0].argmax()
    indices = torch.tensor([0, 0, 1, 0], device=device, dtype=torch.int32)
    picked = sampling.top_k_sampling_from_probs(probs, top_k, indices, seed=0, offset=0)
    assert (picked[indices == 0] == probs[0].argmax()).all()  # parameters belong to rows of probs
    assert picked.dtype == torch.int32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_renormalisation_and_masks(device: str, dtype: torch.dtype) -> None:
    logits = logits_of(4, device).to(dtype)
    probs = torch.softmax(logits.float(), -1).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for found, expected in (
        (sampling.top_k_renorm_probs(probs, 5), kept(probs, top_k=5)),
        (sampling.top_p_renorm_probs(probs, 0.5), kept(probs, top_p=0.5)),
    ):
        assert found.dtype == dtype
        torch.testing.assert_close(found.cpu().double(), expected, rtol=tolerance, atol=tolerance)
    masked = sampling.top_k_mask_logits(logits, torch.tensor([5, 1, 50, 5], device=device))
    assert masked.dtype == dtype
    assert (~masked.isneginf()).sum(-1).tolist()[1] == 1
    torch.testing.assert_close(
        sampling.softmax(logits, 0.5).cpu().double(),
        torch.softmax(logits.cpu().double() * 2, -1),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("device", DEVICES)
def test_speculation(device: str) -> None:
    target = torch.softmax(logits_of(8, device), -1).view(2, 4, VOCAB)
    drafts = target[:, :3].argmax(-1)
    counts = (
        torch.ones(2, dtype=torch.int32, device=device),
        torch.full((2,), 5, dtype=torch.int32, device=device),
    )
    tokens, accepted, emitted = flashinfer.chain_speculative_sampling(
        target[:, :3].contiguous(), drafts, target, *counts, seed=1, offset=1
    )
    assert torch.equal(tokens[:, :3], drafts.to(torch.int32))  # a draft that is the target is always accepted
    assert accepted is counts[0]
    assert (accepted.tolist(), emitted.tolist()) == ([4, 4], [8, 8])
    refusing = target.clone()
    refusing[0, 1, drafts[0, 1]] = 0.0
    _, accepted, emitted = flashinfer.chain_speculative_sampling(
        target[:, :3].contiguous(), drafts, refusing, seed=1, offset=1
    )
    # the first count continues after a rejected draft
    assert (accepted.tolist(), emitted.tolist()) == ([2, 3], [1, 3])


def test_rows_that_cannot_be_sampled() -> None:
    probs = torch.full((3, VOCAB), 1 / VOCAB)
    probs[1] = float("nan")
    tokens, valid = sampling.top_p_sampling_from_probs(probs, 0.9, return_valid=True)
    assert valid.tolist() == [True, False, True]
    assert tokens[1] == 0


@pytest.mark.parametrize("name", [*DRAWS, "logits", "logits, both"])
def test_a_nan_is_refused_on_request(name: str) -> None:
    """Every function that draws checks for NaN, but only if check_nan is set."""
    of_logits = {
        "logits": (sampling.sampling_from_logits, {}),
        "logits, both": (sampling.top_k_top_p_sampling_from_logits, {"top_k": 9, "top_p": 0.6}),
    }
    draw, options = (DRAWS | of_logits)[name]
    rows = torch.full((3, VOCAB), 1 / VOCAB)
    draw(rows, **options, check_nan=True)
    rows[1, 7] = torch.nan
    draw(rows, **options)
    for more in ({}, {"indices": torch.tensor([0, 1, 1, 2])}):
        with pytest.raises(ValueError, match="has a NaN, must have none with check_nan=True"):
            draw(rows, **options, check_nan=True, **more)


@pytest.mark.parametrize("compiled", [False, True])
def test_pipes_do_what_their_steps_do(compiled: bool) -> None:
    logits = logits_of(400)
    probs = torch.softmax(logits, -1)
    options: dict[str, Any] = {
        "temperature": 0.7,
        "top_k": 9,
        "top_p": 0.6,
        "min_p": 0.2,
        "seed": 4,
        "offset": 8,
    }
    cold = torch.softmax(logits / 0.7, -1)
    cases: list[tuple[list[Any], TensorType, Tensor]] = [
        ([Temperature(), Softmax()], TensorType.LOGITS, cold.double()),
        ([TopK(), TopP()], TensorType.PROBS, kept(probs, 9, 0.6)),
        ([Temperature(), Softmax(), MinP()], TensorType.LOGITS, kept(cold, min_p=0.2)),
    ]
    for steps, given, expected in cases:
        values = LogitsPipe(steps, compiled, given)(
            logits if given is TensorType.LOGITS else probs, **options
        )
        torch.testing.assert_close(values.double(), expected, rtol=1e-4, atol=1e-6)
        tokens = LogitsPipe([*steps, Sample()], compiled, given)(
            logits if given is TensorType.LOGITS else probs, **options
        )
        assert tokens.dtype == torch.int32
        assert (expected.gather(1, tokens.long().unsqueeze(1)) > 0).all()


def test_steps_together_draw_as_the_functions_do() -> None:
    logits = logits_of(200)
    probs = torch.softmax(logits, -1)
    draw = {"seed": 4, "offset": 8}
    cases: list[tuple[LogitsPipe, Tensor, dict[str, Any], Any]] = [
        (
            LogitsPipe([Sample()], input_type=TensorType.LOGITS),
            logits,
            {},
            sampling.sampling_from_logits(logits, **draw),
        ),
        (
            LogitsPipe([TopP(), Sample()]),
            probs,
            {"top_p": 0.5},
            sampling.top_p_sampling_from_probs(probs, 0.5, **draw),
        ),
        (
            LogitsPipe([MinP(), Sample()]),
            probs,
            {"min_p": 0.1},
            sampling.min_p_sampling_from_probs(probs, 0.1, **draw),
        ),
        (
            LogitsPipe([Softmax(), TopK(joint_topk_topp=True), TopP(), Sample()]),
            logits,
            {"top_k": 9, "top_p": 0.5},
            sampling.top_k_top_p_sampling_from_logits(logits, 9, 0.5, filter_apply_order="joint", **draw),
        ),
    ]
    for pipe, x, options, expected in cases:
        assert torch.equal(pipe(x, **options, **draw), expected), pipe
    assert LogitsPipe([Softmax()])(TaggedTensor.logits(logits)).shape == logits.shape


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (
            ValueError,
            lambda: sampling.top_p_sampling_from_probs(torch.ones(2, 3), torch.ones(3)),
            "batch size mismatch: top_p has 3 elements, must have 2",
        ),
        (
            ValueError,
            lambda: sampling.top_k_renorm_probs(torch.ones(2, 3), torch.ones(2, 1)),
            "top_k: Expected a 1D tensor or scalar, got a 2D tensor",
        ),
        (
            ValueError,
            lambda: sampling.min_p_sampling_from_probs(torch.ones(2, 3), torch.tensor(0.5)),
            "got a 0-dimensional tensor",
        ),
        (
            ValueError,
            lambda: sampling.sampling_from_probs(torch.ones(2, 3), seed=torch.ones(1), offset=1),
            "offset is 1, must be a tensor",
        ),
        (
            ValueError,
            lambda: sampling.sampling_from_probs(torch.ones(2, 3), seed=torch.ones(1), offset=torch.ones(1)),
            "seed is a float32 tensor",
        ),
        (
            ValueError,
            lambda: sampling.top_k_top_p_sampling_from_probs(
                torch.ones(2, 3), 1, 1.0, filter_apply_order="p"
            ),
            "filter_apply_order is 'p'",
        ),
        # as before FlashInfer drew its own random numbers
        (
            ValueError,
            lambda: sampling.top_k_top_p_sampling_from_probs(torch.ones(2, 3), torch.rand(32, 2), 5, 0.9),
            "indices is 0.9, must be a tensor",
        ),
        (ValueError, lambda: LogitsPipe([]), "processors is"),
        (ValueError, lambda: LogitsPipe([TopK()]), "input_type is None, must be given"),
        (
            ValueError,
            lambda: LogitsPipe([Softmax(), Softmax()]),
            r"processors\[1\] is Softmax.* must be a step that takes PROBS",
        ),
        (
            ValueError,
            lambda: LogitsPipe([TopP()])(torch.ones(2, 3)),
            "top_p is None, must be a number above 0",
        ),
        (
            NotImplementedError,
            lambda: LogitsPipe([TopP()], custom_fusion_rules=[1]),
            "the argument custom_fusion_rules",
        ),
    ],
)
def test_refusals(error: type[Exception], call: Callable[[], Any], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_probabilities_of_16_bits(dtype: torch.dtype) -> None:
    """Same draws as from the same values in float32."""
    probs = torch.softmax(torch.randn(12, 700, generator=torch.Generator().manual_seed(11)), -1).to(dtype)
    given = {"seed": 3, "offset": 5}
    assert torch.equal(
        sampling.top_p_sampling_from_probs(probs, 0.9, **given),
        sampling.top_p_sampling_from_probs(probs.float(), 0.9, **given),
    )
    draft, target, tokens = (
        probs[:4].view(2, 2, 700),
        probs[4:10].view(2, 3, 700),
        torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
    )
    for found, exact in zip(
        sampling.chain_speculative_sampling(draft, tokens, target, **given),
        sampling.chain_speculative_sampling(draft.float(), tokens, target.float(), **given),
        strict=True,
    ):
        assert torch.equal(found, exact)
