"""The interface of an engine as the benchmark sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from integration.model import Model
from integration.workload import Workload

OURS = "attn_backend"
OURS_NO_CASCADE = "attn_backend-no-cascade"  # the same package, told not to look for shared prefixes
STOCK = "stock"


@dataclass(frozen=True)
class Launch:
    """One server to start. `backend` is `attn_backend`, `attn_backend-no-cascade`, `stock` (the engine picks) or a name that the engine knows."""

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


@dataclass(frozen=True)
class Client:
    """One run of the engine's own benchmark client against a server that is up.

    `request_rate` counts prompts per second: the client sends `workload.samples` times as many requests.
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


def is_ours(backend: str) -> bool:
    return backend in (OURS, OURS_NO_CASCADE)


def cascade_environment(backend: str) -> dict[str, str]:
    """The environment of a server with our backend. It says "on" as well, so that a variable of the user's cannot make a report's label wrong."""
    return {"ATTN_BACKEND_CASCADE": "1" if backend == OURS else "0"} if is_ours(backend) else {}


@dataclass(frozen=True)
class Metrics:
    """What a client measured. Times are in ms; ITL is the time between two tokens of one answer; `tokens_per_s` counts generated tokens.

    Every answer is a request of its own, also where a prompt gets several.
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


@dataclass(frozen=True)
class Token:
    """One generated token, its natural-log probability, and the most probable alternatives at its position (itself included)."""

    token_id: int
    logprob: float
    alternatives: dict[int, float]


class Engine(Protocol):
    name: str

    def stock_backend(self, device: str) -> str:
        """What people call the backend that the engine picks by itself, for the table."""

    def server_command(self, launch: Launch) -> list[str]: ...

    def server_environment(self, launch: Launch) -> dict[str, str]: ...

    def client_command(self, client: Client) -> list[str]: ...

    def client_environment(self, device: str) -> dict[str, str]: ...

    def read_result(self, client: Client) -> Metrics:
        """Read the file that the client wrote. Raises ValueError when it holds no result."""

    def generate(self, base_url: str, prompt: list[int], max_tokens: int, alternatives: int) -> list[Token]:
        """Greedy tokens for a prompt of token ids, the end-of-text token ignored."""
