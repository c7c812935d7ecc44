"""The SGLang sampler with SGLang's own classes around it: batches, filters, log-probabilities, sampling
masks.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang.srt", reason="SGLang is not installed")

from sglang.srt.layers import sampler as engine_sampler
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.sampling import sampling_batch_info
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from torch import Tensor

from attn_backend.adapters import sglang as adapter
from attn_backend.adapters.sglang import compat
from attn_backend.adapters.sglang import sampler as our_sampler
from attn_backend.adapters.sglang.sampler import AttnSampler, RequestSeeds
from attn_backend.kernels.sampling import SeedSource

VOCAB = 300


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The state of a running server: its options, a process group, and a selected sampler.

    Restores SGLang afterwards.
    """
    deterministic = SimpleNamespace(rl_on_policy_target=None, enable_deterministic_inference=False)
    features = SimpleNamespace(
        sampling_mask_max_tokens=VOCAB, enable_custom_logit_processor=True, enable_watermark=False
    )
    options = SimpleNamespace(
        deterministic=deterministic, kernel=SimpleNamespace(sampling_backend=compat.NAME), features=features
    )
    group = SimpleNamespace(device_group=None)
    for module in (engine_sampler, sampling_batch_info):
        monkeypatch.setattr(module, "get_exec", lambda: options)
        monkeypatch.setattr(module, "get_server_args", lambda: options, raising=False)
    monkeypatch.setattr(
        engine_sampler, "get_parallel", lambda: SimpleNamespace(tp_group=group, attn_tp_group=group)
    )
    monkeypatch.setattr(engine_sampler, "get_tp_group", lambda: group, raising=False)
    monkeypatch.setattr(engine_sampler, "is_dp_attention_enabled", lambda: False)
    monkeypatch.setattr(
        SamplingBatchInfo, "adjusted_from_schedule_batch", SamplingBatchInfo.adjusted_from_schedule_batch
    )
    return options


def params(**values: Any) -> SamplingParams:
    made = SamplingParams(**values)
    made.normalize(None)
    return made


def request(number: int, mask: bool = False, processor: str | None = None, **values: Any) -> SimpleNamespace:
    """The fields of SGLang's Req from which a batch's sampling parameters are made."""
    return SimpleNamespace(
        sampling_params=params(**values),
        origin_input_ids=[number, 1, 2],
        output_ids=[],
        custom_logit_processor=processor,
        return_sampling_mask=mask,
        sampling_logprobs_mode="full",
    )


@dataclass(eq=False)
class Batch:
    """The fields of SGLang's ScheduleBatch that matter here.

    SGLang keeps weak references to it, which a SimpleNamespace cannot have.
    """

    reqs: list[SimpleNamespace]
    device: str = "cpu"


def make_info(requests: list[SimpleNamespace], device: str = "cpu") -> SamplingBatchInfo:
    batch = Batch(list(requests), device)
    info = SamplingBatchInfo.from_schedule_batch(batch, VOCAB)
    info.batch_of_the_test = batch
    return info


def run(
    sampler: AttnSampler, logits: Tensor, info: SamplingBatchInfo, positions: Tensor, logprobs: bool = False
) -> tuple[Tensor, LogitsProcessorOutput]:
    output = LogitsProcessorOutput(next_token_logits=logits.clone())
    rows = logits.shape[0]
    return sampler(output, info, logprobs, [2] * rows, [None] * rows, positions), output


MIXED = [
    {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "sampling_seed": 11},
    {"temperature": 0.0},
    {"temperature": 1.3, "min_p": 0.1, "sampling_seed": 12},
    {"temperature": 0.5, "top_k": 3, "sampling_seed": -5},
    {"temperature": 1.0, "top_p": 0.3, "sampling_seed": 2**63 - 1},
    {"temperature": 1.0},
]


def mixed_batch(generator: torch.Generator) -> tuple[Tensor, list[SimpleNamespace], Tensor]:
    requests = [request(number, **values) for number, values in enumerate(MIXED)]
    return (
        3 * torch.randn(len(MIXED), VOCAB, generator=generator),
        requests,
        torch.randint(0, 5000, (len(MIXED),), generator=generator),
    )


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_a_request_gets_the_same_token_in_every_batch(generator: torch.Generator) -> None:
    sampler = AttnSampler()
    for _ in range(20):
        logits, requests, positions = mixed_batch(generator)
        together, _ = run(sampler, logits, make_info(requests), positions)
        order = torch.randperm(len(requests), generator=generator)
        shuffled, _ = run(sampler, logits[order], make_info([requests[i] for i in order]), positions[order])
        assert torch.equal(shuffled, together[order])
        for i, one in enumerate(requests):
            alone, _ = run(sampler, logits[i : i + 1], make_info([one]), positions[i : i + 1])
            assert alone.item() == together[i]


@pytest.mark.gpu
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_gpu_draws_the_same_tokens_as_a_cpu(logprobs: bool, generator: torch.Generator) -> None:
    on_cpu, on_gpu = AttnSampler(), AttnSampler()
    for _ in range(20):
        logits, requests, positions = mixed_batch(generator)
        expected, _ = run(on_cpu, logits, make_info(requests), positions)
        tokens, _ = run(on_gpu, logits.cuda(), make_info(requests, "cuda"), positions.cuda(), logprobs)
        assert tokens.is_cuda
        assert tokens.tolist() == expected.tolist()


def test_seeds_and_positions_matter_and_nothing_else_does(generator: torch.Generator) -> None:
    sampler = AttnSampler()
    logits = torch.zeros(200, VOCAB)
    same = [request(0, temperature=1.0, sampling_seed=7) for _ in range(200)]
    positions = torch.arange(200)
    tokens, _ = run(sampler, logits, make_info(same), positions)
    assert len(tokens.unique()) > 100
    assert torch.equal(run(sampler, logits, make_info(same), positions)[0], tokens)
    assert len(run(sampler, logits, make_info(same), torch.full((200,), 3))[0].unique()) == 1
    others, _ = run(
        sampler,
        logits,
        make_info([request(0, temperature=1.0, sampling_seed=i) for i in range(200)]),
        torch.full((200,), 3),
    )
    assert len(others.unique()) > 100


def sglangs_survivors(logits: Tensor, info: SamplingBatchInfo, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """bool [batch, vocab]: the tokens that SGLang's own torch sampler draws from.

    It sorts, filters, and hands the rest to torch.multinomial.
    """
    seen: list[Tensor] = []

    def multinomial(weights: Tensor, num_samples: int) -> Tensor:
        seen.append(weights.clone())
        return torch.zeros(weights.shape[0], num_samples, dtype=torch.int64)

    probs = (logits / info.temperatures).softmax(-1)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "multinomial", multinomial)
        engine_sampler.top_k_top_p_min_p_sampling_from_probs_torch(
            probs.clone(), info.top_ks, info.top_ps, info.min_ps, info.need_min_p_sampling, None, None
        )
    order = logits.argsort(-1, descending=True)
    return torch.zeros(logits.shape).scatter(1, order, seen[0]) > 0


@pytest.mark.parametrize("top_k", [-1, 1, 40])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.2])
@pytest.mark.parametrize("min_p", [0.0, 0.2])
def test_draws_are_among_the_tokens_that_sglang_leaves(
    top_k: int, top_p: float, min_p: float, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, draws = 8, 40
    # no two equal
    values = torch.stack([torch.randperm(VOCAB, generator=generator) for _ in range(rows)]) / 32
    requests = [
        request(i, temperature=0.3 + 0.2 * i, top_k=top_k, top_p=top_p, min_p=min_p, sampling_seed=i)
        for i in range(rows)
    ]
    info = make_info(requests)
    left = sglangs_survivors(values, info, monkeypatch)
    sampler = AttnSampler()
    drawn = torch.stack(
        [run(sampler, values, info, torch.full((rows,), position))[0] for position in range(draws)], dim=1
    )
    assert left.gather(1, drawn.long()).all()
    if top_k != 1:
        assert any(len(row.unique()) > 1 for row in drawn)


def test_greedy_requests_get_the_first_of_equal_logits() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, [17, 200, 250]] = 4.0
    sampler = AttnSampler()
    greedy, seeded = request(0, temperature=0.0), request(1, temperature=1.0, sampling_seed=3)
    for position in range(20):
        assert run(sampler, logits, make_info([greedy, seeded]), torch.full((2,), position))[0][0] == 17
        assert run(sampler, logits, make_info([greedy, greedy]), torch.full((2,), position))[0].tolist() == [
            17,
            17,
        ]


@pytest.mark.parametrize("greedy_only", [False, True])
def test_reporting_log_probabilities_changes_no_token(greedy_only: bool, generator: torch.Generator) -> None:
    sampler = AttnSampler()
    logits, requests, positions = mixed_batch(generator)
    if greedy_only:
        requests = [request(i, temperature=0.0) for i in range(len(requests))]
    plain, _ = run(sampler, logits, make_info(requests), positions)
    tokens, output = run(sampler, logits, make_info(requests), positions, logprobs=True)
    assert torch.equal(tokens.long(), plain.long())
    expected = (
        (logits / make_info(requests).temperatures).log_softmax(-1).gather(1, tokens.long()[:, None])[:, 0]
    )
    torch.testing.assert_close(torch.as_tensor(output.next_token_logprobs), expected, atol=1e-4, rtol=1e-4)
    # the run that reports leaves no state behind
    again, _ = run(sampler, logits, make_info(requests), positions)
    assert torch.equal(again, plain)


def test_sampling_masks_hold_the_chosen_tokens(generator: torch.Generator) -> None:
    sampler = AttnSampler()
    values = {"temperature": 0.8, "top_p": 0.9, "top_k": 30}
    requests = [request(i, mask=i != 1, **values, sampling_seed=i) for i in range(4)]
    logits = torch.stack([torch.randperm(VOCAB, generator=generator) for _ in range(4)]) / 32
    positions = torch.arange(4)
    without, _ = run(
        sampler, logits, make_info([request(i, **values, sampling_seed=i) for i in range(4)]), positions
    )
    tokens, output = run(sampler, logits, make_info(requests), positions)
    assert torch.equal(tokens, without)
    chosen = [tokens[i].item() for i in range(4) if i != 1]
    if our_sampler._Capture is None:
        masks = [mask for mask in output.next_token_sampling_mask_idx if mask is not None]
    else:
        made = output.sampling_mask_output
        assert (made.statuses == engine_sampler.SamplingMaskStatus.OK).all()
        masks = [ids[:length].tolist() for ids, length in zip(made.token_ids, made.lengths, strict=True)]
    assert len(masks) == 3
    for token, mask in zip(chosen, masks, strict=True):
        assert token in mask
        assert 1 < len(mask) <= 30


@pytest.mark.parametrize("logprobs", [False, True])
def test_custom_logit_processors_are_applied_once(logprobs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def add_to_token_5(logits: Tensor, info: SamplingBatchInfo) -> None:
        logits[:, 5] += 10.0

    monkeypatch.setattr(engine_sampler, "apply_custom_logit_processor", add_to_token_5)
    sampler = AttnSampler()
    info = make_info(
        [request(0, temperature=0.5, sampling_seed=1), request(1, temperature=0.5, sampling_seed=2)]
    )
    info.has_custom_logit_processor = True
    logits = torch.zeros(2, VOCAB)
    logits[:, 9] = 15.0  # more than once would let 5 win
    for position in range(10):
        assert run(sampler, logits, info, torch.full((2,), position), logprobs)[0].tolist() == [9, 9]


def test_each_stream_has_its_own_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Concurrent kernels must not exchange messages in the same memory."""
    streams = iter((7, 9, 7))
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=next(streams))
    )
    monkeypatch.setattr(our_sampler, "sampling_workspace", lambda device: torch.zeros(4))
    workspaces: dict[int, Tensor] = {}
    first, second, third = (our_sampler.stream_workspace(workspaces, torch.device("cuda")) for _ in range(3))
    assert first is third
    assert first is not second
    assert sorted(workspaces) == [7, 9]


def test_empty_batches_and_batches_without_seeds(generator: torch.Generator) -> None:
    sampler = AttnSampler()
    info = make_info([request(0, temperature=1.0)] * 64)
    assert run(sampler, torch.empty(0, VOCAB), info, torch.empty(0, dtype=torch.int64))[0].shape == (0,)
    info.sampling_seed = None
    drawn = run(sampler, torch.zeros(64, VOCAB), info, torch.zeros(100, dtype=torch.int64))[0]
    assert drawn.shape == (64,)
    assert len(drawn.unique()) > 20


def test_every_request_has_a_seed_through_filtering_merging_and_retraction() -> None:
    AttnSampler()
    replaced = SamplingBatchInfo.adjusted_from_schedule_batch
    AttnSampler()  # a second model runner in the process
    assert SamplingBatchInfo.adjusted_from_schedule_batch is replaced
    seeded, first, second = request(0, sampling_seed=5), request(1), request(2)
    info = make_info([seeded, first])
    drawn = info.sampling_seed.tolist()
    assert drawn[0] == 5
    other = make_info([second])
    info.merge_batch(other)
    assert info.sampling_seed.tolist() == [*drawn, other.sampling_seed.item()]
    assert len(set(info.sampling_seed.tolist())) == 3
    info.filter_batch([2, 1], torch.tensor([2, 1]))
    assert info.sampling_seed.tolist() == [other.sampling_seed.item(), drawn[1]]
    assert make_info([first, second]).sampling_seed.tolist() == [drawn[1], other.sampling_seed.item()]


def test_seeds_are_the_engines_own_under_deterministic_inference(engine: SimpleNamespace) -> None:
    AttnSampler()
    engine.deterministic.enable_deterministic_inference = True
    assert make_info([request(0), request(1, sampling_seed=5)]).sampling_seed.tolist() == [42, 5]


def test_speculative_decoding_is_given_no_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        compat, "setting", lambda path, default: "EAGLE" if path == "spec.speculative_algorithm" else default
    )
    AttnSampler()
    assert make_info([request(0, sampling_seed=5)]).sampling_seed is None


def test_drawn_seeds_depend_on_the_engines_seed_alone() -> None:
    def draw(*origin: object) -> list[int]:
        seeds = RequestSeeds(SeedSource(*origin))
        return [seeds(request(i)) for i in range(100)]

    assert draw(1, 0) == draw(1, 0)
    assert len({*draw(1, 0), *draw(2, 0), *draw(1, 1)}) == 300
    assert all(-(2**63) <= seed < 2**63 for seed in draw(1, 0))


def test_the_answers_to_one_seeded_request_differ() -> None:
    seeds = RequestSeeds(SeedSource(0))
    cache_filler = request(0, n=3, sampling_seed=10, max_new_tokens=0)
    assert seeds(cache_filler) == 10
    for _ in range(2):  # asked twice, answered alike
        answers = [request(0, n=3, sampling_seed=10) for _ in range(3)]
        assert [seeds(answer) for answer in answers] == [10, 11, 12]
        assert [seeds(answer) for answer in answers] == [10, 11, 12]
    assert seeds(request(1, n=1, sampling_seed=2**63 - 1)) == 2**63 - 1
    largest = [request(2, n=2, sampling_seed=2**63 - 1) for _ in range(2)]
    assert [seeds(answer) for answer in largest] == [2**63 - 1, -(2**63)]


@pytest.mark.parametrize(
    ("switch", "names"), [(None, {compat.NAME}), ("0", set()), ("1", {compat.NAME, "pytorch"})]
)
def test_registration(switch: str | None, names: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.server_args import SAMPLING_BACKEND_CHOICES

    factories: dict[str, Any] = {}
    monkeypatch.setattr(engine_sampler, "_CUSTOM_SAMPLER_FACTORIES", factories)
    monkeypatch.delenv("ATTN_BACKEND_SAMPLER", raising=False)
    if switch is not None:
        monkeypatch.setenv("ATTN_BACKEND_SAMPLER", switch)
    adapter.register()
    adapter.register()
    assert set(factories) == names
    for name in names:
        assert name in SAMPLING_BACKEND_CHOICES
        assert isinstance(engine_sampler.create_sampler(name), AttnSampler)
    if "pytorch" not in names:
        assert type(engine_sampler.create_sampler("pytorch")) is engine_sampler.Sampler


@pytest.mark.parametrize(
    "name", ["forward", "_preprocess_logits", "_sample_from_probs", "_sample_from_logprobs"]
)
def test_the_functions_that_are_overridden_are_sglangs(name: str) -> None:
    """A release that renames a function would silently call its own version. So would a release that passes
    other arguments, except those that `**others` accepts.
    """
    assert name in vars(engine_sampler.Sampler)
    assert name in vars(AttnSampler)
    theirs = list(inspect.signature(getattr(engine_sampler.Sampler, name)).parameters)
    ours = inspect.signature(getattr(AttnSampler, name)).parameters
    named = [parameter.name for parameter in ours.values() if parameter.kind is not parameter.VAR_KEYWORD]
    assert theirs[: len(named)] == named
    assert len(theirs) == len(named) or len(ours) > len(named)
