"""Serves a small model with this backend and a feature of the engine, on a CPU in float32, and compares its tokens with transformers'.

    python -m integration.features.serve [--record] [RUN ...]       # --list names them; default: all whose packages are here

Exit status: 1 if an answer differs or a server does not start, else 0. NIXL's transfers need the package nixl (its UCX moves memory of the host, too).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from integration.compare_tokens import ALTERNATIVES
from integration.engines import ENGINES, Engine, Launch, Token
from integration.engines.base import OURS
from integration.engines.sglang import SGLang
from integration.engines.vllm import VLLM
from integration.features.model import Answer, base_of, make_models, make_prompts, reference
from integration.features.outcomes import record
from integration.http import counter, post_json
from integration.model import Model
from integration.server import Server, ServerError, free_port, stop_on_signals

NUM_TOKENS = 24
LARGEST_LOGPROB_DIFFERENCE = 1e-3  # with the adapter, transformers' own float32 is up to 5e-4 away from its float64; without it 5e-6
CONCURRENCY = 4
TIMEOUT_S = 600
# Engines of one thread, which other processes may share the cores with, and which compile nothing.
SMALL = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}


@dataclass(frozen=True)
class Run:
    """
    Attributes:
        arguments: of the server. {folder} is that of the models, {scratch} an empty one.
        environment: of the server.
        asks: what is asked one after the other: models of integration/features/model.py, all of one server; "adapter" is "model" with LoRA.
        counts: a counter of the server's, which must not be 0 in the end: what shows that the feature was in use.
        package: that the engine needs for it.
        through: another server of the same kind computes the prompts, and this one gets their KV from it.
    """

    engine: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    asks: tuple[str, ...] = ("model",)
    counts: str | None = None
    package: str | None = None
    through: bool = False


def _connector(name: str, **more: object) -> tuple[str, str]:
    return "--kv-transfer-config", json.dumps({"kv_connector": name, "kv_role": "kv_both", **more})


def _drafts(**config: object) -> tuple[str, str]:
    return "--speculative-config", json.dumps(config)


def _drafts_in_sglang(algorithm: str, draft: str) -> tuple[str, ...]:
    """Chains of three tokens. SGLang counts what it verifies where it is asked for metrics."""
    chain = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
    return ("--speculative-algorithm", algorithm, "--speculative-draft-model-path", draft, *chain, "--enable-metrics")


LORA = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", "adapter={folder}/adapter")
LORA_IN_SGLANG = ("--enable-lora", "--lora-paths", "adapter={folder}/adapter", "--lora-backend", "torch_native")
# vLLM makes the buffers between the stages of a pipeline while it warms up, which it leaves out under --enforce-eager on a CPU. Mode 1 is torch.compile alone.
PIPELINE = ("--pipeline-parallel-size", "2", "--no-enforce-eager", "--compilation-config", '{"mode": 1}')
FOLDER_STORE = _connector("ExampleConnector", kv_connector_extra_config={"shared_storage_path": "{scratch}"})
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
VERIFIED = "sglang:spec_verify_calls_total"
FROM_ELSEWHERE = "vllm:external_prefix_cache_hits_total"


def _a_core_for_each_rank() -> dict[str, str]:
    """SGLang wants a NUMA node for each rank, or to be told which cores."""
    cores = sorted(os.sched_getaffinity(0))
    return {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}


NGRAM = _drafts(method="ngram", num_speculative_tokens=4, prompt_lookup_max=4, prompt_lookup_min=1)

RUNS: dict[str, Run] = {
    "vllm-tensor-parallel": Run("vllm", ("--tensor-parallel-size", "2", *LORA, *NGRAM), asks=("model", "adapter"), counts=ACCEPTED),
    "vllm-tensor-parallel-mla": Run("vllm", ("--tensor-parallel-size", "2"), asks=("deepseek",)),
    # What the connector wrote when the prompts came first is read when they come again.
    "vllm-pipeline": Run("vllm", (*PIPELINE, "--no-enable-prefix-caching", *FOLDER_STORE), asks=("model", "model"), counts=FROM_ELSEWHERE),
    "vllm-data-parallel": Run("vllm", ("--data-parallel-size", "2")),
    "vllm-nixl": Run("vllm", _connector("NixlConnector", kv_buffer_device="cpu"), counts=FROM_ELSEWHERE, package="nixl", through=True),
    "vllm-draft-model": Run("vllm", _drafts(method="draft_model", model="{folder}/model", num_speculative_tokens=3), counts=ACCEPTED),
    "vllm-eagle": Run("vllm", _drafts(method="eagle", model="{folder}/eagle", num_speculative_tokens=3), counts=DRAFTED),
    "vllm-mtp": Run("vllm", _drafts(method="mtp", num_speculative_tokens=2), asks=("mimo",), counts=DRAFTED),
    "sglang-tensor-parallel": Run("sglang", ("--tp-size", "2"), _a_core_for_each_rank()),
    # Prompts are decompressed when they come first; when they come again, from the cache, they stay in their latents. On a CPU vLLM caches no latents.
    "sglang-tensor-parallel-mla": Run("sglang", ("--tp-size", "2"), _a_core_for_each_rank(), asks=("deepseek", "deepseek")),
    "sglang-pipeline": Run("sglang", ("--pp-size", "2"), _a_core_for_each_rank()),
    "sglang-data-parallel": Run("sglang", ("--dp-size", "2"), _a_core_for_each_rank()),
    "sglang-eagle": Run("sglang", _drafts_in_sglang("EAGLE", "{folder}/eagle-sglang"), counts=VERIFIED),
    "sglang-standalone": Run("sglang", _drafts_in_sglang("STANDALONE", "{folder}/model"), counts=VERIFIED),
    "sglang-lora": Run("sglang", LORA_IN_SGLANG, asks=("model", "adapter")),
}


@dataclass(frozen=True)
class Outcome:
    """Answers that are transformers', of how many, and the largest difference of a token's log probability."""

    equal: int
    answers: int
    largest_difference: float

    def __str__(self) -> str:
        return f"{self.equal} of {self.answers} answers are equal, log probabilities within {self.largest_difference:.1e}"

    @property
    def holds(self) -> bool:
        return self.equal == self.answers > 0 and self.largest_difference < LARGEST_LOGPROB_DIFFERENCE


def compare(expected: list[Answer], actual: list[Answer]) -> Outcome:
    pairs = list(zip(expected, actual, strict=True))
    equal = [(one, other) for one, other in pairs if [token for token, _ in one] == [token for token, _ in other]]
    differences = [abs(one[1] - other[1]) for pair in equal for one, other in zip(*pair, strict=True)]
    return Outcome(len(equal), len(pairs), max(differences, default=0.0))


class Served:
    """The models in `folder`, and what they answer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_models(folder)
        self.prompts = make_prompts()
        self._references: dict[str, list[Answer]] = {}

    def reference(self, asked: str) -> list[Answer]:
        if asked not in self._references:
            self._references[asked] = reference(self.folder, asked, self.prompts, NUM_TOKENS)
        return self._references[asked]

    def outcome(self, run: Run, scratch: Path) -> Outcome:
        """
        Args:
            scratch: an empty folder, for logs and for what a run stores.

        Raises:
            ServerError: a server did not start.
            RuntimeError: it refused a request, or the feature was not in use.
        """
        with ExitStack() as stack:
            servers = [self._start(run, scratch, number, stack) for number in range(2 if run.through else 1)]
            for server in servers:
                server.wait_until_ready(TIMEOUT_S)
            expected, actual = [], []
            for name in run.asks:
                expected += self.reference(name)
                actual += self._ask(_engine(run.engine, name), [server.url for server in servers])
            if run.counts is not None and counter(servers[-1].url, run.counts) == 0:
                raise RuntimeError(f"{run.counts} is 0 in the end: the feature was not in use")
        return compare(expected, [[(token.token_id, token.logprob) for token in answer] for answer in actual])

    def _start(self, run: Run, scratch: Path, number: int, stack: ExitStack) -> Server:
        arguments = [argument.replace("{folder}", str(self.folder)).replace("{scratch}", str(scratch)) for argument in run.arguments]
        environment = SMALL | run.environment | ({"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())} if run.through else {})
        name = base_of(run.asks[0])
        model = Model(name, self.folder / name, random_weights=False)
        launch = Launch(sys.executable, model, OURS, "cpu", free_port(), "float32", max_model_len=384, max_num_seqs=CONCURRENCY)
        launch = replace(launch, extra_arguments=arguments, environment=environment)
        server = Server(ENGINES[run.engine], launch, scratch / f"server-{number}.log")
        stack.callback(server.stop)
        return server

    def _ask(self, engine: Engine, urls: list[str]) -> list[list[Token]]:
        def answer(prompt: list[int]) -> list[Token]:
            if len(urls) == 1:
                return engine.generate(urls[0], prompt, NUM_TOKENS, ALTERNATIVES)
            assert isinstance(engine, VLLM)
            return engine.generate(urls[1], prompt, NUM_TOKENS, ALTERNATIVES, kv_transfer_params=_computed_by(urls[0], prompt))

        with ThreadPoolExecutor(CONCURRENCY) as pool:
            return list(pool.map(answer, self.prompts))


def _engine(name: str, asked: str) -> Engine:
    """An engine that asks for a server's adapter, or for its model."""
    if asked != "adapter":
        return ENGINES[name]
    return VLLM(asked) if name == "vllm" else SGLang(asked)


def _computed_by(url: str, prompt: list[int]) -> object:
    """Has a server compute a prompt; what another one needs to know to get its KV."""
    body = {"model": "model", "prompt": prompt, "temperature": 0, "max_tokens": 1, "ignore_eos": True}
    return post_json(f"{url}/v1/completions", body | {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}})["kv_transfer_params"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=", ".join(RUNS))
    parser.add_argument("--record", action="store_true", help="note how each run ended in docs/features.json")
    parser.add_argument("--list", action="store_true", help="name the runs, with what each adds to a server")
    given = parser.parse_args()
    if given.list:
        print("\n".join(f"{name}: {' '.join(run.arguments)}" for name, run in RUNS.items()))
        return
    if unknown := [name for name in given.runs if name not in RUNS]:
        parser.error(f"RUN: {', '.join(unknown)}; must be of {', '.join(RUNS)}")
    stop_on_signals()
    all_hold = True
    with tempfile.TemporaryDirectory() as folder:
        served = Served(Path(folder, "models"))
        for name in given.runs or RUNS:
            run, scratch = RUNS[name], Path(folder, name)
            if run.package and importlib.util.find_spec(run.package) is None:
                print(f"{name}: not run, the package {run.package} is not installed")
                all_hold &= name not in given.runs
                continue
            scratch.mkdir()
            try:
                outcome = served.outcome(run, scratch)
                holds, says = outcome.holds, str(outcome)
            except (ServerError, RuntimeError) as error:
                holds, says = False, str(error).partition("\n")[0]
            all_hold &= holds
            print(f"{name}: {says}", flush=True)
            if given.record:
                record(name, run.engine, holds, "" if holds else says.replace(folder, "FOLDER"))
    sys.exit(int(not all_hold))


if __name__ == "__main__":
    main()
