"""vLLM: `vllm serve`, `vllm bench serve`. Started as a module, so that it works without the `vllm` script."""

from __future__ import annotations

import json

from integration.device import uses_multicast
from integration.engines.base import (
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
from integration.workload import SharedPrefix, ShareGPT

CLI = "vllm.entrypoints.cli.main"
SERVED_NAME = "model"
CPU_BACKEND = "CPU_ATTN"


class VLLM:
    name = "vllm"

    def __init__(self, asks_for: str = SERVED_NAME) -> None:
        """asks_for: the model of the requests, or the name of one of the server's LoRA adapters."""
        self._asks_for = asks_for

    def stock_backend(self, device: str) -> str:
        return f"{CPU_BACKEND} (stock)" if device == "cpu" else "vLLM's choice (stock)"

    def server_command(self, launch: Launch) -> list[str]:
        """`{backend}` in `extra_arguments` is vLLM's name of the backend, which a draft model's configuration
        must contain.

        Raises ValueError for a backend that vLLM lacks on a CPU, and if `{backend}` has no name.
        """
        if launch.backend == STOCK and any("{backend}" in argument for argument in launch.extra_arguments):
            raise ValueError(
                f"backend: {STOCK!r}, must be a name of vLLM's where the server's arguments have {{backend}}"
            )
        backend = "CUSTOM" if is_ours(launch.backend) else engines_name(launch.backend)
        command = [
            launch.python,
            "-m",
            CLI,
            "serve",
            str(launch.model.folder),
            "--served-model-name",
            SERVED_NAME,
        ]
        command += ["--host", "127.0.0.1", "--port", str(launch.port), "--dtype", launch.dtype]
        command += ["--max-model-len", str(launch.max_model_len), "--max-num-seqs", str(launch.max_num_seqs)]
        if launch.model.random_weights:
            command += ["--load-format", "dummy"]
        if launch.device == "cpu":
            if launch.backend not in (STOCK, CPU_BACKEND) and not is_ours(launch.backend):
                raise ValueError(
                    f"backend: {launch.backend!r}, but on a CPU vLLM has {CPU_BACKEND} alone ({STOCK})"
                )
            # blocks of 128, the default, are never full in short prompts, so prefixes are never shared
            command += ["--enforce-eager", "--block-size", "32"]
        else:
            if launch.backend != STOCK:
                command += ["--attention-backend", backend]
            if not launch.cuda_graphs:
                command += ["--enforce-eager"]
        if not launch.prefix_caching:
            command += ["--no-enable-prefix-caching"]
        if launch.tensor_parallel_size > 1:
            command += ["--tensor-parallel-size", str(launch.tensor_parallel_size)]
            if not uses_multicast():
                command += ["--compilation-config", '{"pass_config": {"fuse_allreduce_rms": false}}']
        if launch.kv_cache_dtype:
            command += ["--kv-cache-dtype", launch.kv_cache_dtype]
        return command + [argument.replace("{backend}", backend) for argument in launch.extra_arguments]

    def server_environment(self, launch: Launch) -> dict[str, str]:
        environment = {
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
        } | our_environment(launch.backend)
        environment |= collective_environment(launch)
        if launch.tensor_parallel_size > 1 and not uses_multicast():
            environment |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
        if launch.batch_invariant:
            environment |= {"VLLM_BATCH_INVARIANT": "1"}
        if launch.cache:
            environment |= {"VLLM_CACHE_ROOT": str(launch.cache)}
        if launch.device == "cpu":
            environment |= {
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "ATTN_BACKEND_VLLM_CPU": "1" if is_ours(launch.backend) else "0",
            }
        return environment

    def client_command(self, client: Client) -> list[str]:
        command = bench_client(client, CLI)
        command += [
            "bench",
            "serve",
            "--backend",
            "vllm",
            "--host",
            "127.0.0.1",
            "--port",
            str(client.port),
            "--model",
            SERVED_NAME,
        ]
        command += [
            "--tokenizer",
            str(client.model.folder),
            "--num-prompts",
            str(client.workload.num_requests),
            "--seed",
            str(client.seed),
        ]
        command += [
            "--request-rate",
            str(client.requests_per_s),
            "--ignore-eos",
            *sampling_arguments(client),
        ]
        command += [
            "--percentile-metrics",
            "ttft,itl",
            "--metric-percentiles",
            "50,99",
            "--save-result",
            "--save-detailed",
        ]
        command += ["--result-dir", str(client.result.parent), "--result-filename", client.result.name]
        if client.max_concurrency:
            command += ["--max-concurrency", str(client.max_concurrency)]
        if client.n_best:  # bench_client.py relies on the request by which the client checks the server
            command += ["--ready-check-timeout-sec", "60"]
        return command + self._dataset_arguments(client) + client.extra_arguments

    def _dataset_arguments(self, client: Client) -> list[str]:
        workload = client.workload
        if isinstance(workload, ShareGPT):
            path = workload.write_sharegpt(client.result.with_suffix(".requests.json"), client.seed)
            arguments = ["--dataset-name", "sharegpt", "--dataset-path", str(path), "--disable-shuffle"]
            return arguments + (
                ["--sharegpt-output-len", str(workload.output_len)] if workload.output_len else []
            )
        # the client's own data set has no copies
        if isinstance(workload, SharedPrefix) and workload.samples == 1:
            prefix, total, output = (
                workload.shared_prefix_len,
                workload.prompt_lens[0],
                workload.output_lens[0],
            )
            lengths = {
                "prefix-len": prefix,
                "suffix-len": total - prefix,
                "num-prefixes": 1,
                "output-len": output,
            }
            return [
                "--dataset-name",
                "prefix_repetition",
                *(
                    part
                    for name, value in lengths.items()
                    for part in (f"--prefix-repetition-{name}", str(value))
                ),
            ]
        path = workload.write_vllm(client.result.with_suffix(".requests.jsonl"), client.seed)
        return [
            "--dataset-name",
            "custom",
            "--dataset-path",
            str(path),
            "--custom-output-len",
            "-1",
            "--skip-chat-template",
            "--disable-shuffle",
        ]

    def client_environment(self, device: str) -> dict[str, str]:
        return {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

    def read_result(self, client: Client) -> Metrics:
        result = json.loads(client.result.read_text())
        return Metrics(
            requests=result["completed"],
            failed=client.workload.num_requests - result["completed"],
            ttft_p50_ms=result["p50_ttft_ms"],
            ttft_p99_ms=result["p99_ttft_ms"],
            itl_p50_ms=result["p50_itl_ms"],
            itl_p99_ms=result["p99_itl_ms"],
            tokens_per_s=result["output_throughput"],
            duration_s=result["duration"],
            input_tokens=result["total_input_tokens"],
            output_tokens=result["total_output_tokens"],
            accept_length=result.get("spec_decode_acceptance_length") or 1.0,
        )

    def generate(
        self, base_url: str, prompt: list[int], max_tokens: int, alternatives: int, **more: object
    ) -> list[Token]:
        body = {
            "model": self._asks_for,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": alternatives,
            "return_tokens_as_token_ids": True,  # `token_id:17` instead of text, which is not unique
        }
        logprobs = post_json(f"{base_url}/v1/completions", body | more)["choices"][0]["logprobs"]
        tokens = []
        for token, logprob, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        ):
            tokens.append(
                Token(_token_id(token), logprob, {_token_id(name): value for name, value in top.items()})
            )
        return tokens

    def sample(
        self, base_url: str, prompt: list[int], max_tokens: int, sampling: Sampling, seed: int, logprobs: bool
    ) -> list[int]:
        body = {
            "model": self._asks_for,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        body |= sampling.parameters() | {"seed": seed} | ({"logprobs": 2} if logprobs else {})
        token_ids: list[int] = post_json(f"{base_url}/v1/completions", body)["choices"][0]["token_ids"]
        return token_ids

    def soak_settings(self, cache_tokens: int, device: str) -> tuple[list[str], dict[str, str]]:
        guided = json.dumps({"backend": "xgrammar", "disable_any_whitespace": True})
        arguments = [
            "--num-gpu-blocks-override",
            str(cache_tokens // (32 if device == "cpu" else 16)),
            "--structured-outputs-config",
            guided,
        ]
        return [*arguments, "--enable-prompt-tokens-details"], {}

    def preemptions(self, base_url: str) -> int:
        return counter(base_url, "vllm:num_preemptions_total")

    def prompt_logprobs(self, base_url: str, prompt: list[int]) -> list[float]:
        body = {
            "model": self._asks_for,
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
        }
        of_tokens = post_json(f"{base_url}/v1/completions", body)["choices"][0]["prompt_logprobs"]
        return [
            float(of_token[str(token_id)]["logprob"])
            for token_id, of_token in zip(prompt[1:], of_tokens[1:], strict=True)
        ]

    def drafts_settings(self) -> list[str]:
        return []

    def drafts(self, base_url: str) -> Drafts:
        # without those for which the n-grams found nothing
        passes = counter(base_url, "vllm:spec_decode_num_drafts_total")
        return Drafts(passes, passes + counter(base_url, "vllm:spec_decode_num_accepted_tokens_total"))

    def forgetting_environment(self) -> dict[str, str]:
        return {"VLLM_SERVER_DEV_MODE": "1"}

    def forget_prefixes(self, base_url: str) -> bool:
        # not all releases answer with a body
        answer = command(f"{base_url}/reset_prefix_cache")
        return answer is not None and '"success":false' not in answer.replace(" ", "")


def _token_id(text: str) -> int:
    return int(text.removeprefix("token_id:"))
