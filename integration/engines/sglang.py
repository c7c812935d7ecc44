"""SGLang: `sglang.launch_server`, `sglang.bench_serving`."""

from __future__ import annotations

import json
from pathlib import Path

from integration.engines.base import (
    OURS,
    OURS_STOCK_SAMPLER,
    STOCK,
    Client,
    Drafts,
    Launch,
    Metrics,
    Sampling,
    Token,
    bench_client,
    collective_environment,
    engines_name,
    is_ours,
    our_environment,
    sampling_arguments,
)
from integration.http import command, counter, post_json
from integration.workload import ShareGPT

CPU_SHIMS = Path(__file__).resolve().parent.parent / "sglang_cpu"
CPU_KV_TOKENS = 16384
# client options; its --extra-request-body would replace all sampling parameters, including the number of
# tokens
NO_OPTION = ("top_k", "min_p")


class SGLang:
    name = "sglang"

    def __init__(self, adapter: str | None = None) -> None:
        """adapter: the server's LoRA adapter that requests use; None: the model itself."""
        self._asks_for = {} if adapter is None else {"lora_path": adapter}

    def stock_backend(self, device: str) -> str:
        return "torch_native (stock)" if device == "cpu" else "SGLang's choice (stock)"

    def server_command(self, launch: Launch) -> list[str]:
        command = [
            launch.python,
            "-m",
            "sglang.launch_server",
            "--model-path",
            str(launch.model.folder),
            "--host",
            "127.0.0.1",
            "--port",
            str(launch.port),
        ]
        command += [
            "--dtype",
            launch.dtype,
            "--context-length",
            str(launch.max_model_len),
            "--max-running-requests",
            str(launch.max_num_seqs),
        ]
        if launch.model.random_weights:
            command += ["--load-format", "dummy"]
        backend = OURS if is_ours(launch.backend) else engines_name(launch.backend)
        if launch.device == "cpu":
            backend = "torch_native" if backend == STOCK else backend
            command += [
                "--device",
                "cpu",
                "--attention-backend",
                backend,
                "--max-total-tokens",
                str(CPU_KV_TOKENS),
            ]
            command += ["--sleep-on-idle"]  # or its scheduler keeps a core busy while there are no requests
        else:
            if backend != STOCK:
                command += ["--attention-backend", backend]
            if is_ours(launch.backend) and launch.backend != OURS_STOCK_SAMPLER:
                command += ["--sampling-backend", OURS]
            if not launch.cuda_graphs:
                command += ["--disable-cuda-graph"]
        if not launch.prefix_caching:
            command += ["--disable-radix-cache"]
        if launch.batch_invariant:
            command += ["--enable-deterministic-inference"]
        if launch.tensor_parallel_size > 1:
            command += ["--tensor-parallel-size", str(launch.tensor_parallel_size)]
        if launch.kv_cache_dtype:
            command += ["--kv-cache-dtype", launch.kv_cache_dtype]
        return command + launch.extra_arguments

    def server_environment(self, launch: Launch) -> dict[str, str]:
        return (
            self.client_environment(launch.device)
            | our_environment(launch.backend)
            | collective_environment(launch)
        )

    def client_command(self, client: Client) -> list[str]:
        # The client cannot disable shuffling of a file's requests, but the copies of a prompt must stay
        # neighbors.
        command = bench_client(client, "sglang.bench_serving", keep_order=True, no_option=NO_OPTION)
        command += ["--backend", "sglang", "--host", "127.0.0.1", "--port", str(client.port)]
        # --model is the local path: with another name the client asks a hub for it
        command += [
            "--model",
            str(client.model.folder),
            "--tokenizer",
            str(client.model.folder),
            "--num-prompts",
            str(client.workload.num_requests),
        ]
        command += [
            "--seed",
            str(client.seed),
            "--request-rate",
            str(client.requests_per_s),
            *sampling_arguments(client, NO_OPTION),
        ]
        # The server is running. With its own check the client would connect before it loads its tokenizer and
        # the requests, and a prepared client would wait there
        command += ["--output-file", str(client.result), "--output-details", "--ready-check-timeout-sec", "0"]
        if client.max_concurrency:
            command += ["--max-concurrency", str(client.max_concurrency)]
        if client.n_best:  # bench_client.py relies on it
            command += ["--warmup-requests", "1"]
        return command + self._dataset_arguments(client) + client.extra_arguments

    def _dataset_arguments(self, client: Client) -> list[str]:
        workload = client.workload
        path = workload.write_sharegpt(client.result.with_suffix(".requests.json"), client.seed)
        arguments = ["--dataset-name", "sharegpt", "--dataset-path", str(path)]
        if isinstance(workload, ShareGPT) and workload.output_len:
            arguments += ["--sharegpt-output-len", str(workload.output_len)]
        return arguments

    def client_environment(self, device: str) -> dict[str, str]:
        environment = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if device == "cpu":
            # passive: threads that spin while they wait make two busy processes on two cores tens of times
            # slower
            environment |= {
                "SGLANG_USE_CPU_ENGINE": "1",
                "OMP_WAIT_POLICY": "passive",
                "PYTHONPATH": str(CPU_SHIMS),
            }
        return environment

    def read_result(self, client: Client) -> Metrics:
        lines = client.result.read_text().splitlines()
        if not lines:
            raise ValueError(f"{client.result}: the client wrote no result")
        result = json.loads(lines[-1])
        return Metrics(
            requests=result["completed"],
            failed=client.workload.num_requests - result["completed"],
            ttft_p50_ms=result["median_ttft_ms"],
            ttft_p99_ms=result["p99_ttft_ms"],
            itl_p50_ms=result["median_itl_ms"],
            itl_p99_ms=result["p99_itl_ms"],
            tokens_per_s=result["output_throughput"],
            duration_s=result["duration"],
            input_tokens=result["total_input_tokens"],
            output_tokens=result["total_output_tokens"],
            accept_length=result.get("accept_length") or 1.0,  # since the server started
        )

    def generate(
        self, base_url: str, prompt: list[int], max_tokens: int, alternatives: int, **more: object
    ) -> list[Token]:
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        body = {
            "input_ids": prompt,
            "sampling_params": sampling,
            "return_logprob": True,
            "top_logprobs_num": alternatives,
        }
        answer = post_json(f"{base_url}/generate", body | self._asks_for | more)["meta_info"]
        tokens = []
        for (logprob, token_id, _), top in zip(
            answer["output_token_logprobs"], answer["output_top_logprobs"], strict=True
        ):
            tokens.append(Token(token_id, logprob, {other_id: other for other, other_id, _ in top}))
        return tokens

    def sample(
        self, base_url: str, prompt: list[int], max_tokens: int, sampling: Sampling, seed: int, logprobs: bool
    ) -> list[int]:
        parameters = sampling.parameters() | {
            "sampling_seed": seed,
            "max_new_tokens": max_tokens,
            "ignore_eos": True,
        }
        body = {"input_ids": prompt, "sampling_params": parameters, "return_logprob": logprobs}
        output_ids: list[int] = post_json(f"{base_url}/generate", body | self._asks_for)["output_ids"]
        return output_ids

    def soak_settings(self, cache_tokens: int, device: str) -> tuple[list[str], dict[str, str]]:
        # With batch invariance it keeps no prefixes. It admits requests as if answers were short, and quickly
        # forgets that they were not. llguidance, since xgrammar 0.2.1, which 0.5.17 pins, accepts 123 when
        # the maximum is 120.
        arguments = ["--max-total-tokens", str(cache_tokens), "--schedule-conservativeness", "0.1"]
        arguments += [
            "--grammar-backend",
            "llguidance",
            "--constrained-json-disable-any-whitespace",
            "--enable-cache-report",
            "--enable-metrics",
        ]
        return arguments, {"SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS": "1"}

    def preemptions(self, base_url: str) -> int:
        return counter(base_url, "sglang:num_retracted_requests_total")

    def prompt_logprobs(self, base_url: str, prompt: list[int]) -> list[float]:
        sampling = {"temperature": 0, "max_new_tokens": 1}
        body = {
            "input_ids": prompt,
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        of_tokens = post_json(f"{base_url}/generate", body)["meta_info"]["input_token_logprobs"]
        return [float(logprob) for logprob, _, _ in of_tokens[1:]]

    def drafts_settings(self) -> list[str]:
        return ["--enable-metrics"]

    def drafts(self, base_url: str) -> Drafts:
        tokens, requests = (
            counter(base_url, "sglang:generation_tokens_total"),
            counter(base_url, "sglang:num_requests_total"),
        )
        # the pass over the prompt gives each its first token
        return Drafts(counter(base_url, "sglang:spec_verify_calls_total"), tokens - requests)

    def forgetting_environment(self) -> dict[str, str]:
        return {}

    def forget_prefixes(self, base_url: str) -> bool:
        return command(f"{base_url}/flush_cache") is not None
