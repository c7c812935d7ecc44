"""The probe and the check that run before vLLM's samplers are replaced; V1's sampler with this package's
functions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm.v1", reason="needs vLLM")

import vllm.v1.sample.sampler as v1_module
import vllm.v1.worker.gpu_model_runner as v1_runner
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm_sampling import FILTERS, MIXED, ORIGINALS, VOCAB, distinct_logits, replaced, vllms_survivors

from attn_backend.adapters.vllm import sampler
from attn_backend.kernels.sampling import sample

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("vllm_as_it_was")


@pytest.fixture
def warnings() -> Iterator[list[logging.LogRecord]]:
    """The records of vLLM's logger. vLLM's configuration decides whether it propagates them."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.attn_backend")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(level)


# ---- Probe, check, switch


def test_installs_once_and_says_so(warnings: list[logging.LogRecord]) -> None:
    assert sampler.install(CPU)
    functions = [getattr(owner, name) for owner, names in ORIGINALS.items() for name in names]
    assert sampler.install(CPU)
    assert functions == [getattr(owner, name) for owner, names in ORIGINALS.items() for name in names]
    assert replaced() == {True}
    assert [record.levelname for record in warnings] == ["INFO"]


def test_the_switch_leaves_vllm_alone(
    monkeypatch: pytest.MonkeyPatch, warnings: list[logging.LogRecord]
) -> None:
    monkeypatch.setenv("ATTN_BACKEND_SAMPLER", "0")
    monkeypatch.setattr(sampler, "check_sampler", lambda device: pytest.fail("nothing to check"))
    assert not sampler.install(CPU)
    assert replaced() == {False}
    assert not warnings


def test_another_release_is_refused_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, warnings: list[logging.LogRecord]
) -> None:
    def sample_in_another_release(
        self: Any, logits: Tensor, sampling_metadata: Any, temperature_first: bool = True
    ) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(v1_module.Sampler, "sample", sample_in_another_release)
        assert not sampler.install(CPU)
        assert not sampler.install(CPU)
        assert v1_module.Sampler.sample is sample_in_another_release
    assert [record.levelname for record in warnings] == ["WARNING"]
    message = warnings[0].getMessage()
    assert "temperature_first" in message
    assert "logprobs_mode_override" in message
    assert "ATTN_BACKEND_SAMPLER=0" in message


def without_top_p(logits: Tensor, **parameters: Any) -> Any:
    return sample(logits, **{**parameters, "top_p": None})


def ignoring_min_p(logits: Tensor, **parameters: Any) -> Any:
    return sample(logits, **{**parameters, "min_p": None})


def never_greedy(logits: Tensor, **parameters: Any) -> Any:
    return sample(
        logits, **{**parameters, "temperature": torch.as_tensor(parameters["temperature"]).clamp(min=0.5)}
    )


def by_row(logits: Tensor, **parameters: Any) -> Any:
    return sample(logits, **{**parameters, "seed": torch.arange(logits.shape[0])})


def too_hot(logits: Tensor, **parameters: Any) -> Any:
    return sample(logits, **{**parameters, "temperature": 4.0 * parameters["temperature"]})


def missing(logits: Tensor, **parameters: Any) -> Any:
    raise RuntimeError("no kernel for this GPU")


@pytest.mark.parametrize("wrong", [without_top_p, ignoring_min_p, never_greedy, by_row, too_hot, missing])
def test_a_sampler_that_disagrees_is_refused_with_one_warning(
    wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, warnings: list[logging.LogRecord]
) -> None:
    monkeypatch.setattr(sampler, "sample", wrong)
    assert not sampler.install(CPU)
    assert not sampler.install(CPU)
    assert replaced() == {False}
    assert [record.levelname for record in warnings] == ["WARNING"]
    assert ("no kernel for this GPU" if wrong is missing else "SamplerDisagrees") in warnings[0].getMessage()


@pytest.mark.gpu
def test_the_check_passes_on_a_gpu() -> None:
    sampler.check_sampler(torch.device("cuda"))


def test_wrong_frequencies_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "sample", too_hot)
    with pytest.raises(sampler.SamplerDisagrees, match="frequencies"):
        sampler._check_frequencies(CPU)


# ---- V1


class V1Request:
    """The state that V1's runner keeps for a request."""

    def __init__(self, params: SamplingParams, length: int) -> None:
        self.params, self.length = params, length
        self.output_token_ids: list[int] = []
        self.generator = None if params.seed is None else torch.Generator().manual_seed(params.seed)


class V1Runner:
    """The parts of V1's GPUModelRunner that sampling touches, with vLLM's own `_sample`, sampler, metadata
    and min-p.
    """

    device = CPU
    use_async_scheduling = False
    max_model_len = 2**20
    routed_experts_initialized = False  # 0.26
    _to_list = staticmethod(Tensor.tolist)
    _get_prompt_logprobs_dict = staticmethod(lambda *arguments: {})

    def __init__(
        self, requests: dict[str, V1Request], logprobs_mode: Any = "raw_logprobs", logprobs: int | None = None
    ) -> None:
        self.requests = requests
        self.sampler = v1_module.Sampler(logprobs_mode)
        params = [request.params for request in requests.values()]
        self.seq_lens = torch.tensor(
            [request.length for request in requests.values()] + [0, 0], dtype=torch.int32
        )
        batch = len(params)
        generators = {
            i: request.generator for i, request in enumerate(requests.values()) if request.generator
        }
        config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=batch))
        min_p = MinPLogitsProcessor(config, CPU, False)
        added: Any = [(i, one, None, []) for i, one in enumerate(params)]
        min_p.update_state(SimpleNamespace(batch_size=batch, added=added, removed=[], moved=[]))  # type: ignore[arg-type]
        greedy = [one.temperature == 0 for one in params]
        top_k = torch.tensor(
            [one.top_k if 0 < one.top_k < VOCAB else VOCAB for one in params], dtype=torch.int32
        )
        top_p = torch.tensor([one.top_p for one in params])
        zeros = torch.zeros(batch)
        self.input_batch = SimpleNamespace(
            num_reqs=batch,
            req_ids=list(requests),
            req_id_to_index={name: i for i, name in enumerate(requests)},
            num_tokens_no_spec=np.zeros(batch, dtype=np.int64),
            token_ids_cpu=np.zeros((batch, 8), dtype=np.int64),
            is_token_ids=np.zeros((batch, 8), dtype=bool),
            generators=generators,
            update_async_output_token_ids=lambda: None,
            sampling_metadata=SamplingMetadata(
                temperature=None if all(greedy) else torch.tensor([one.temperature for one in params]),
                all_greedy=all(greedy),
                all_random=not any(greedy),
                top_p=top_p if (top_p < 1).any() else None,
                top_k=top_k if (top_k < VOCAB).any() else None,
                generators=generators,  # one dict for both, as in vLLM
                max_num_logprobs=logprobs,
                no_penalties=True,
                prompt_token_ids=None,
                frequency_penalties=zeros,
                presence_penalties=zeros,
                repetition_penalties=zeros + 1,
                output_token_ids=[],
                allowed_token_ids_mask=None,
                bad_words_token_ids={},
                logitsprocs=LogitsProcessors([min_p]),
            ),
        )

    def step(self, logits: Tensor) -> Any:
        """One token for each request; the lengths grow afterwards, as in the engine."""
        output = v1_runner.GPUModelRunner._sample(self, logits.clone(), None)  # type: ignore[arg-type]
        self.seq_lens[: len(self.requests)] += 1
        return output

    def book(self, output: Any, discarded: Any) -> None:
        """vLLM's bookkeeping of a step's tokens; the tokens of `discarded` do not count."""
        self.discard_request_mask = SimpleNamespace(np=discarded)
        v1_runner.GPUModelRunner._bookkeeping_sync(
            self, SimpleNamespace(num_scheduled_tokens={}), output, None, torch.empty(0), 0
        )  # type: ignore[arg-type]

    def tokens(self, logits: Tensor) -> list[int]:
        return self.step(logits).sampled_token_ids[:, 0].tolist()  # type: ignore[no-any-return]


def v1_requests(params: list[SamplingParams], first_length: int = 100) -> dict[str, V1Request]:
    return {f"request-{i}": V1Request(one, first_length + 7 * i) for i, one in enumerate(params)}


def test_v1_request_gets_the_same_tokens_in_every_batch(generator: torch.Generator) -> None:
    assert sampler.install(CPU)
    params = [SamplingParams(**one) for one in MIXED]  # type: ignore[arg-type]
    steps = [3 * torch.randn(len(MIXED), VOCAB, generator=generator) for _ in range(20)]
    batch = V1Runner(v1_requests(params))
    together = [batch.tokens(logits) for logits in steps]
    order = torch.randperm(len(MIXED), generator=generator).tolist()
    requests = v1_requests(params)
    shuffled = V1Runner({name: requests[name] for name in (f"request-{i}" for i in order)})
    for logits, expected in zip(steps, together, strict=True):
        assert shuffled.tokens(logits[order]) == [expected[i] for i in order]
    for i in range(len(MIXED)):
        alone = V1Runner({"alone": v1_requests(params)[f"request-{i}"]})
        assert [alone.tokens(logits[i : i + 1])[0] for logits in steps] == [
            expected[i] for expected in together
        ]


def test_v1_draws_are_among_the_tokens_that_vllm_leaves(generator: torch.Generator) -> None:
    assert sampler.install(CPU)
    logits = distinct_logits(len(FILTERS), generator)
    left = vllms_survivors(logits, FILTERS)
    runner = V1Runner(v1_requests(FILTERS))
    drawn = torch.tensor([runner.tokens(logits) for _ in range(40)]).T
    assert left.gather(1, drawn).all()
    wide = left.sum(1) > 20
    assert all(len(row.unique()) > 5 for row in drawn[wide])


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_v1_reporting_log_probabilities_changes_no_token(mode: str, generator: torch.Generator) -> None:
    assert sampler.install(CPU)
    params = [SamplingParams(temperature=0.7, top_k=5, seed=i) for i in range(4)]
    logits = distinct_logits(4, generator)
    plain = V1Runner(v1_requests(params), mode).tokens(logits)
    output = V1Runner(v1_requests(params), mode, logprobs=2).step(logits)
    assert output.sampled_token_ids[:, 0].tolist() == plain
    reported = (
        logits.clone()
        if mode == "raw_logprobs"
        else (logits / 0.7).masked_fill(~vllms_survivors(logits, params), float("-inf"))
    )
    expected = reported.log_softmax(-1).gather(1, torch.tensor(plain)[:, None])[:, 0]
    torch.testing.assert_close(output.logprobs_tensors.logprobs[:, 0], expected, atol=1e-4, rtol=1e-4)


def test_v1_processors_of_the_user_see_tempered_logits(generator: torch.Generator) -> None:
    class AllowLikely:
        """Argmax invariant: keeps logits within 1 of the largest tempered logit."""

        def apply(self, logits: Tensor) -> Tensor:
            return logits.masked_fill(logits < logits.amax(-1, keepdim=True) - 1, float("-inf"))

        def is_argmax_invariant(self) -> bool:
            return True

    assert sampler.install(CPU)
    params = [
        SamplingParams(temperature=temperature, seed=i) for i, temperature in enumerate((0.0, 0.5, 2.0))
    ]
    logits = distinct_logits(3, generator)
    runner = V1Runner(v1_requests(params))
    runner.input_batch.sampling_metadata.logitsprocs.argmax_invariant.append(AllowLikely())
    drawn = torch.tensor([runner.tokens(logits) for _ in range(200)]).T
    ranks = logits.argsort(-1, descending=True).argsort(-1).gather(1, drawn)
    # The logits are 1/32 apart: the tokens within 1 x temperature of the best are 0 ... 32 x temperature
    assert [int(row.max()) for row in ranks] == [0, 16, pytest.approx(64, abs=3)]


def test_v1_requests_without_a_seed_get_one_that_stays(generator: torch.Generator) -> None:
    assert sampler.install(
        CPU,
        SimpleNamespace(
            model_config=SimpleNamespace(seed=3), parallel_config=SimpleNamespace(data_parallel_rank=0)
        ),
    )
    requests = v1_requests(
        [SamplingParams(temperature=1.0)] * 3 + [SamplingParams(temperature=1.0, seed=2**63 + 5)]
    )
    logits = torch.zeros(4, VOCAB)
    first = V1Runner(requests)
    tokens = first.tokens(logits)
    seeds = first.input_batch.sampling_metadata._attn_backend_draws.seed.tolist()
    assert len(set(seeds)) == 4
    assert seeds[3] == -(2**63) + 5
    # preempted, and resumed in other rows
    assert V1Runner(dict(reversed(requests.items()))).tokens(logits) == tokens[::-1]


def test_v1_position_is_that_of_the_last_token(generator: torch.Generator) -> None:
    """As in V2, whose positions begin at 0."""
    assert sampler.install(CPU)
    requests = v1_requests([SamplingParams(temperature=1.0, seed=i) for i in range(40)], first_length=1)
    logits = torch.zeros(40, VOCAB)
    lengths = torch.tensor([request.length for request in requests.values()])
    runner = V1Runner(requests)
    for _ in range(3):
        expected = sample(logits, seed=torch.arange(40), position=lengths - 1).token_ids
        assert runner.tokens(logits) == expected.tolist()
        lengths += 1


class Generator:
    """A request's torch.Generator on a GPU; a draw advances it by four numbers."""

    def __init__(self, seed: int) -> None:
        self.seed, self.offset = seed, 0

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_v1_generators_are_left_to_verification(
    mode: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rejection sampler keeps vLLM's dict of generators. A step without drafts neither empties it nor
    rewinds generators that its draws have not advanced.
    """
    assert sampler.install(CPU)
    requests = v1_requests([SamplingParams(temperature=0.7, seed=i) for i in range(3)])
    for i, request in enumerate(requests.values()):
        request.generator = Generator(i)  # type: ignore[assignment]
    runner = V1Runner(requests, mode, logprobs=2)
    generators, batch = dict(runner.input_batch.generators), runner.input_batch
    assert len(generators) == 3
    discarded = np.array([True, False, True])  # chunks of prompts: their draws do not count
    output = runner.step(distinct_logits(3, generator))
    runner.book(output, discarded)
    assert batch.generators is batch.sampling_metadata.generators
    assert batch.generators == generators
    assert [one.offset for one in generators.values()] == [0, 0, 0]


def test_v1_generators_of_vllms_own_draws_are_wound_back() -> None:
    assert sampler.install(CPU)
    requests = v1_requests([SamplingParams(temperature=0.7, seed=i) for i in range(3)])
    runner = V1Runner(requests)
    runner.rejection_sampler = lambda *args, **others: None  # type: ignore[attr-defined]
    runner._draft_token_req_ids = runner._get_spec_decode_draft_probs = lambda *args: None  # type: ignore[attr-defined]
    for i in range(3):
        runner.input_batch.generators[i] = Generator(i)
    runner.step(torch.zeros(3, VOCAB))
    v1_runner.GPUModelRunner._sample(runner, torch.zeros(3, VOCAB), SimpleNamespace())  # type: ignore[arg-type]
    runner.book(
        SimpleNamespace(sampled_token_ids=torch.zeros(3, 1, dtype=torch.int32), logprobs_tensors=None),
        np.array([True, False, True]),
    )
    assert [one.offset for one in runner.input_batch.generators.values()] == [-4, 0, -4]


def test_v1_another_sampler_draws_for_itself(generator: torch.Generator) -> None:
    class OtherSampler(v1_module.Sampler):
        pass

    assert sampler.install(CPU)
    runner = V1Runner(v1_requests([SamplingParams(temperature=0.7, seed=i) for i in range(2)]))
    runner.sampler = OtherSampler("raw_logprobs")
    runner.tokens(distinct_logits(2, generator))
    assert not hasattr(runner.input_batch.sampling_metadata, "_attn_backend_draws")
    assert not runner._attn_backend_drew  # type: ignore[attr-defined]


def test_v1_greedy_batches_need_neither_seeds_nor_positions(generator: torch.Generator) -> None:
    assert sampler.install(CPU)
    requests = v1_requests([SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, seed=5)])
    runner = V1Runner(requests)
    logits = distinct_logits(2, generator)
    assert runner.tokens(logits) == logits.argmax(-1).tolist()
    assert runner.input_batch.sampling_metadata._attn_backend_draws == (0, 0)
    assert not any(hasattr(request, "_attn_backend_seed") for request in requests.values())


def test_v1_warm_up_and_speculative_decoding_stay_vllms() -> None:
    assert sampler.install(CPU)
    runner = V1Runner(v1_requests([SamplingParams(temperature=0.0)]))
    runner.rejection_sampler = lambda *args, **others: "rejection sampler"  # type: ignore[attr-defined]
    runner._draft_token_req_ids = None  # type: ignore[attr-defined]
    runner._get_spec_decode_draft_probs = lambda metadata: None  # type: ignore[attr-defined]
    speculative = v1_runner.GPUModelRunner._sample(runner, torch.zeros(1, VOCAB), SimpleNamespace())  # type: ignore[arg-type]
    assert speculative == "rejection sampler"
    assert not hasattr(runner.input_batch.sampling_metadata, "_attn_backend_draws")
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 5
    assert runner.sampler(logits, runner.input_batch.sampling_metadata).sampled_token_ids.tolist() == [[9]]
