"""The benchmark's view of an engine."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Protocol

from integration.arrivals import mean_rate
from integration.device import uses_multicast
from integration.environment import REPOSITORY
from integration.model import Model
from integration.workload import Workload

OURS = "attn_backend"
OURS_NO_CASCADE = "attn_backend-no-cascade"  # the same package without the search for shared prefixes
OURS_STOCK_SAMPLER = "attn_backend-stock-sampler"  # the same package, with sampling left to the engine
STOCK = "stock"
# suffix of an engine's backend name: flashinfer_alias/ replaces FlashInfer
ON_OURS = "-on-attn_backend"

BENCH_CLIENT = Path(__file__).resolve().parent.parent / "bench_client.py"


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, named as in both engines' APIs. top_k 0 and min_p 0 are off."""

    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int = 40
    min_p: float = 0.0

    @staticmethod
    def parse(text: str) -> Sampling:
        """Parses "temperature=0.8,top_p=0.95,top_k=40"; omitted parameters are off. Raises ValueError."""
        values: dict[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            if name not in values:
                raise ValueError(f"sampling: {name!r} is none of {', '.join(values)}")
            try:
                values[name] = int(value) if name == "top_k" else float(value)
            except ValueError:
                raise ValueError(f"sampling: {name} is {value!r}, must be a number") from None
        return Sampling(**values)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return ", ".join(
            f"{field.name} {getattr(self, field.name):g}"
            for field in fields(self)
            if getattr(self, field.name)
        )

    def parameters(self) -> dict[str, float]:
        """The parameters as a server takes them: both engines want -1 for a disabled top_k."""
        return asdict(self) | {"top_k": self.top_k or -1}


@dataclass(frozen=True)
class Launch:
    """One server to start.

    `backend` is `attn_backend`, `attn_backend-no-cascade`, `attn_backend-stock-sampler`, `stock` (the engine
    picks) or a name from the engine. The suffix `-on-attn_backend` may follow.
    """

    python: str
    model: Model
    backend: str
    device: str
    port: int
    dtype: str = "auto"
    cuda_graphs: bool = True
    max_model_len: int = 2048
    max_num_seqs: int = 8
    extra_arguments: list[str] = field(default_factory=list)
    prefix_caching: bool = True
    batch_invariant: bool = False
    tensor_parallel_size: int = 1  # GPUs
    kv_cache_dtype: str | None = None  # the engine's name for it; None: the model's declaration
    environment: dict[str, str] = field(default_factory=dict)  # besides the engine's own
    # a folder for files that the engine compiles; None: the engine's own, which servers that start at the
    # same time should not share
    cache: Path | None = None

    @property
    def name(self) -> str:
        """The name on the command line and in file names."""
        return f"{self.backend}@{self.kv_cache_dtype}" if self.kv_cache_dtype else self.backend


@dataclass(frozen=True)
class Client:
    """One run of the engine's own benchmark client against a running server.

    `request_rate` counts prompts per second: the client sends `workload.samples` times as many requests.
    `arrivals` replaces it: the seconds after the first request, one for each request. `n_best`: the
    neighboring copies of a prompt become one request with `n`.
    """

    python: str
    model: Model
    port: int
    workload: Workload
    request_rate: float
    max_concurrency: int | None
    seed: int
    result: Path
    extra_arguments: list[str] = field(default_factory=list)
    sampling: Sampling | None = None  # None: greedy
    wait_for: Path | None = None  # the client sends its first request when this file exists; None: at once
    arrivals: list[float] | None = None
    n_best: bool = False

    @property
    def requests_per_s(self) -> float:
        return mean_rate(self.arrivals) if self.arrivals else self.request_rate * self.workload.samples


def is_ours(backend: str) -> bool:
    return backend in (OURS, OURS_NO_CASCADE, OURS_STOCK_SAMPLER)


def engines_name(backend: str) -> str:
    """The engine's name for a backend that is not ours."""
    return backend.removesuffix(ON_OURS)


def our_environment(backend: str) -> dict[str, str]:
    """The environment of a server with our backend.

    It also sets "on", so that a user's variable cannot make a report's label wrong.
    """
    if backend.endswith(ON_OURS):
        return {"PYTHONPATH": str(REPOSITORY / "flashinfer_alias")}
    if not is_ours(backend):
        return {}
    switches = {
        "ATTN_BACKEND_CASCADE": backend != OURS_NO_CASCADE,
        "ATTN_BACKEND_SAMPLER": backend != OURS_STOCK_SAMPLER,
    }
    return {name: "1" if is_on else "0" for name, is_on in switches.items()}


def collective_environment(launch: Launch) -> dict[str, str]:
    """For several GPUs: turns NCCL's NVLink multicast off if a machine lacks it or the rights to it, since
    NCCL does not find out in time.
    """
    return {} if launch.tensor_parallel_size == 1 or uses_multicast() else {"NCCL_NVLS_ENABLE": "0"}


def bench_client(
    client: Client, module: str, keep_order: bool = False, no_option: Collection[str] = ()
) -> list[str]:
    """The beginning of the command line of an engine's client `module`: bench_client.py adds features for
    which the client has no option.

    `no_option`: the sampling parameters among these features. They always include a seed for each request.
    """
    added = (client.sampling, client.wait_for, client.arrivals)
    if not keep_order and not client.n_best and all(feature is None for feature in added):
        return [client.python, "-m", module]
    parameters = (
        None
        if client.sampling is None
        else {name: value for name, value in client.sampling.parameters().items() if name in no_option}
    )
    wait_for = None if client.wait_for is None else str(client.wait_for)
    options = {
        "keep_order": keep_order,
        "sampling": parameters,
        "seed": 1_000_000 * client.seed,
        "wait_for": wait_for,
    }
    if client.arrivals is not None and client.requests_per_s != float("inf"):
        path = client.result.with_suffix(".arrivals.json")
        path.write_text(json.dumps(client.arrivals), encoding="utf-8")
        options["arrivals"] = str(path)
    if client.n_best:
        options["answers"] = client.workload.samples
    return [client.python, str(BENCH_CLIENT), module, json.dumps(options)]


def sampling_arguments(client: Client, no_option: Collection[str] = ()) -> list[str]:
    """The client's own options for the sampling parameters; both engines' clients call them as the servers
    do.
    """
    parameters = client.sampling.parameters() if client.sampling else {"temperature": 0}
    return [
        f"--{name.replace('_', '-')}={value}" for name, value in parameters.items() if name not in no_option
    ]


@dataclass(frozen=True)
class Metrics:
    """A client's measurement.

    Times are in ms; ITL is the time between two tokens of one answer; `tokens_per_s` counts generated tokens.

    Every answer is a separate request, even if a prompt gets several. `accept_length`: tokens that an answer
    gains in each model pass, on average; 1 without speculative decoding.
    """

    requests: int
    failed: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    tokens_per_s: float
    duration_s: float
    input_tokens: int
    output_tokens: int
    accept_length: float = 1.0


@dataclass(frozen=True)
class Token:
    """One generated token, its natural-log probability, and the most probable alternatives at its position
    (itself included).
    """

    token_id: int
    logprob: float
    alternatives: dict[int, float]


@dataclass(frozen=True)
class Drafts:
    """The outcome of drafts: model `passes` that verified some, each for one request, and the tokens that
    requests `gained` in these passes.
    """

    passes: int
    gained: int

    def __sub__(self, before: Drafts) -> Drafts:
        return Drafts(self.passes - before.passes, self.gained - before.gained)

    @property
    def accept_length(self) -> float:
        """Tokens for each pass; 1 if every draft was wrong, or if there was none."""
        return self.gained / self.passes if self.passes else 1.0


class Engine(Protocol):
    name: str

    def stock_backend(self, device: str) -> str:
        """The usual name of the engine's default backend, for the table."""

    def server_command(self, launch: Launch) -> list[str]: ...

    def server_environment(self, launch: Launch) -> dict[str, str]: ...

    def client_command(self, client: Client) -> list[str]: ...

    def client_environment(self, device: str) -> dict[str, str]: ...

    def read_result(self, client: Client) -> Metrics:
        """Read the file that the client wrote. Raises ValueError if it contains no result."""

    def generate(
        self, base_url: str, prompt: list[int], max_tokens: int, alternatives: int, **more: object
    ) -> list[Token]:
        """Greedy tokens for a prompt of token ids, ignoring the end-of-text token. more: fields for the
        request's body.
        """

    def sample(
        self, base_url: str, prompt: list[int], max_tokens: int, sampling: Sampling, seed: int, logprobs: bool
    ) -> list[int]:
        """Sampled tokens for a prompt of token ids, ignoring the end-of-text token.

        `logprobs`: also request log-probabilities.
        """

    def soak_settings(self, cache_tokens: int, device: str) -> tuple[list[str], dict[str, str]]:
        """Arguments and environment of a server with a KV cache of this many tokens. It fills the cache until
        requests lose their tokens. JSON has no blanks, and an answer reports the number of cached prompt
        tokens.
        """

    def preemptions(self, base_url: str) -> int:
        """How often a server has removed the tokens of a running request.

        It counts one before it sends the request's last token.
        """

    def prompt_logprobs(self, base_url: str, prompt: list[int]) -> list[float]:
        """The natural-log probability of every prompt token except the first."""

    def drafts_settings(self) -> list[str]:
        """Arguments of a server for which drafts() is called."""

    def drafts(self, base_url: str) -> Drafts:
        """The drafts of all requests since the server started. Exact when no request is in flight."""

    def forgetting_environment(self) -> dict[str, str]:
        """The environment of a server for which forget_prefixes() is called."""

    def forget_prefixes(self, base_url: str) -> bool:
        """Empties the prefix cache. Returns whether it did: a server does not while it has requests."""
