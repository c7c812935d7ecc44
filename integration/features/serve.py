"""Serves a small model with this backend and an engine feature, and compares its tokens with transformers'
float32.

    # --list names the runs; default: all that can run here
    python -m integration.features.serve [--record] [RUN ...]
    python -m integration.features.serve --device cuda --jobs 4 [--record] [RUN ...]

On a CPU the engine computes in float32, and answers must be equal. On a GPU, and with 8-bit numbers, it
computes in bfloat16. Answers may then differ at a near tie of the two most probable tokens
(integration/features/devices.py). Four servers at a time use 16 cores. Runs are skipped if GPUs or a package
are missing, or if the engine lacks the feature on this device or in this release. NIXL's transfers need the
package nixl, whose UCX also moves host memory.

Exit status: 1 if an answer differs, a server does not start, a named run is skipped, or all are; otherwise 0.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import re
import shlex
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import torch
from packaging.version import Version

from integration.command_line import one_of, results_folder
from integration.compare_tokens import ALTERNATIVES, Outcome, compare
from integration.device import device_name
from integration.engines import ENGINES, Engine, Launch, Token
from integration.engines.base import OURS
from integration.engines.sglang import SGLang
from integration.engines.vllm import VLLM
from integration.features.devices import CPU, DEVICES, Device
from integration.features.model import base_of, make_models, make_prompts, reference
from integration.features.outcomes import record
from integration.features.runs import RUNS, Run
from integration.http import counter, post_json
from integration.model import Model
from integration.server import Server, ServerError, free_port, stop_on_signals

NUM_TOKENS = 24
CONCURRENCY = 4
TIMEOUT_S = 600


class Served:
    """The models in `folder`, and their answers on a device. num_tokens: of an answer."""

    def __init__(self, folder: Path, device: Device, num_tokens: int = NUM_TOKENS) -> None:
        self.folder, self.device, self._num_tokens = folder, device, num_tokens
        make_models(folder)
        self.prompts = make_prompts()
        self._references: dict[str, list[list[Token]]] = {}
        self._servers: list[Server] = []

    def reference(self, asked: str) -> list[list[Token]]:
        if asked not in self._references:
            self._references[asked] = reference(self.folder, asked, self.prompts, self._num_tokens)
        return self._references[asked]

    def outcome(self, run: Run, scratch: Path) -> Outcome:
        """
        Args:
            scratch: an empty folder, for logs and for files that a run stores.

        Raises:
            ServerError: a server did not start.
            RuntimeError: it refused a request, or the feature was not in use.
        """
        with ExitStack() as stack:
            port = str(free_port())
            arguments = [run.arguments] if run.prefill is None else [run.prefill, run.arguments]
            servers = [
                self._start(run, of_server, port, scratch / f"server-{number}", stack)
                for number, of_server in enumerate(arguments)
            ]
            for server in servers:
                server.wait_until_ready(TIMEOUT_S)
            expected, actual = [], []
            for name in run.asks:
                expected += self.reference(name)
                actual += self._ask(_engine(run.engine, name), [server.url for server in servers], port)
            if run.counts is not None and counter(servers[-1].url, *run.counts) == 0:
                raise RuntimeError(f"{' '.join(run.counts)} is 0 in the end: the feature was not in use")
            if run.logs is not None and not re.search(run.logs, servers[-1].log.read_text(errors="replace")):
                raise RuntimeError(f"the log has no {run.logs!r}: the feature was not in use")
        return compare(expected, actual)

    def stop(self) -> None:
        """Ends the processes that outcome() waits for."""
        for server in self._servers:
            server.ask_to_stop()

    def _start(self, run: Run, arguments: tuple[str, ...], port: str, name: Path, stack: ExitStack) -> Server:
        known = {"{folder}": str(self.folder), "{scratch}": str(name.parent), "{port}": port}
        of_ranks = self.device.arguments_of_ranks if run.ranks > 1 else ()
        given = [*self.device.arguments[run.engine], *of_ranks, *arguments, *run.on.get(self.device.name, ())]
        for placeholder, value in known.items():
            given = [argument.replace(placeholder, value) for argument in given]
        environment = (
            self.device.environment
            | run.environment
            | (self.device.environment_of_ranks if run.ranks > 1 else {})
        )
        environment |= {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())} if run.prefill is not None else {}
        model = Model(base_of(run.asks[0]), self.folder / base_of(run.asks[0]), random_weights=False)
        launch = Launch(
            sys.executable,
            model,
            OURS,
            self.device.name,
            free_port(),
            self.device.of(run.asks).dtype,
            max_model_len=384,
            max_num_seqs=CONCURRENCY,
            extra_arguments=given,
            environment=environment,
            cache=name.with_suffix(".cache"),
        )
        server = Server(ENGINES[run.engine], launch, name.with_suffix(".log"))
        self._servers.append(server)
        stack.callback(server.stop)
        return server

    def _ask(self, engine: Engine, urls: list[str], port: str) -> list[list[Token]]:
        rooms = itertools.count(1)

        def answer(prompt: list[int]) -> list[Token]:
            if len(urls) == 1:
                return engine.generate(urls[0], prompt, self._num_tokens, ALTERNATIVES)
            if engine.name == "vllm":
                return engine.generate(
                    urls[1],
                    prompt,
                    self._num_tokens,
                    ALTERNATIVES,
                    kv_transfer_params=_computed_by(urls[0], prompt),
                )
            room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": int(port), "bootstrap_room": next(rooms)}
            with ThreadPoolExecutor(1) as other:  # both servers get requests, and communicate in this room
                computed = other.submit(
                    engine.generate, urls[0], prompt, self._num_tokens, ALTERNATIVES, **room
                )
                answered = engine.generate(urls[1], prompt, self._num_tokens, ALTERNATIVES, **room)
                computed.result()
            return answered

        with ThreadPoolExecutor(CONCURRENCY) as pool:
            return list(pool.map(answer, self.prompts))


def _engine(name: str, asked: str) -> Engine:
    """An engine whose requests use a server's adapter, or its model."""
    if asked != "adapter":
        return ENGINES[name]
    return VLLM(asked) if name == "vllm" else SGLang(asked)


def _computed_by(url: str, prompt: list[int]) -> object:
    """Makes a vLLM server compute a prompt; returns the data that another server needs to fetch its KV."""
    body = {"model": "model", "prompt": prompt, "temperature": 0, "max_tokens": 1, "ignore_eos": True}
    return post_json(
        f"{url}/v1/completions",
        body | {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}},
    )["kv_transfer_params"]


def listed(name: str, run: Run, device: str) -> str:
    """A line about a run: its server's additional arguments on a device, and its requirements."""
    variables = [f"{variable}={value}" for variable, value in run.environment.items()]
    options = " ".join([*variables, shlex.join((*run.arguments, *run.on.get(device, ())))]) or "no option"
    if run.prefill is not None:
        options += f"; the server of prefills: {shlex.join((*run.prefill, *run.on.get(device, ())))}"
    needs = [f"model {model}" for model in dict.fromkeys(run.asks) if model not in ("model", "adapter")]
    needs += ["GPUs alone"] * (run.devices == ("cuda",)) + [f"{run.ranks} ranks"] * (run.ranks > 1)
    needs += [f"package {run.package}"] * (run.package is not None) + [f"since {run.engine} {run.since}"] * (
        run.since is not None
    )
    return f"{name}: {options}" + (f"    [{', '.join(needs)}]" if needs else "")


def cannot(run: Run, device: str) -> str | None:
    """Why a run cannot take place here."""
    if device not in run.devices:
        return f"{run.engine} cannot on this device (docs/reports/features.md says why)"
    if importlib.util.find_spec(run.engine) is None:
        return f"{run.engine} is not installed"
    if run.since is not None and Version(version(run.engine)) < Version(run.since):
        return f"{run.engine} has it since {run.since}"
    if run.package is not None and importlib.util.find_spec(run.package) is None:
        return f"the package {run.package} is not installed"
    if device == "cuda" and torch.cuda.device_count() < run.ranks:
        return f"it needs {run.ranks} GPUs"
    return None


def _ended(served: Served, run: Run, scratch: Path) -> tuple[bool, str]:
    """Whether a run succeeded, and a description."""
    scratch.mkdir(parents=True)
    try:
        outcome = served.outcome(run, scratch)
    except (ServerError, RuntimeError) as error:
        return False, str(error).partition("\n")[0]
    device = served.device.of(run.asks)
    return device.holds(outcome), device.says(outcome)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", type=one_of(RUNS), help=", ".join(RUNS))
    parser.add_argument("--device", choices=list(DEVICES), default=CPU.name, help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; default: %(default)s")
    parser.add_argument("--record", action="store_true", help="note how each run ended in docs/features.json")
    parser.add_argument("--results", type=Path, help="folder for logs; default: results/features-TIME")
    listing = (
        "name the runs, with what each adds to a server on --device, and needs; {folder}: the models, "
        "{scratch}: an empty folder, {port}: a free one"
    )
    parser.add_argument("--list", action="store_true", help=listing)
    given = parser.parse_args()
    if given.list:
        print("\n".join(listed(name, run, given.device) for name, run in RUNS.items()))
        return
    # A process that a shell starts in the background ignores INT, and so would its servers, which INT should
    # stop. The threads that start them cannot change that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stop_on_signals()
    missing = {
        name: why for name in given.runs or RUNS if (why := cannot(RUNS[name], given.device)) is not None
    }
    for name, why in missing.items():
        print(f"{name}: not run, {why}")
    if missing.keys() == set(given.runs or RUNS):
        sys.exit(1)
    all_hold = not (missing and given.runs)
    results, where = results_folder(given, "features"), device_name("cuda") if given.device == "cuda" else ""
    with tempfile.TemporaryDirectory() as folder:
        served = Served(Path(folder), DEVICES[given.device])
        runs = {name: RUNS[name] for name in given.runs or RUNS if name not in missing}
        for asked in dict.fromkeys(asked for run in runs.values() for asked in run.asks):
            served.reference(asked)
        with ThreadPoolExecutor(given.jobs) as pool:
            ending = {pool.submit(_ended, served, run, results / name): name for name, run in runs.items()}
            try:
                for one in as_completed(ending):
                    name, (holds, says) = ending[one], one.result()
                    all_hold &= holds
                    print(f"{name}: {'' if holds else 'WRONG, '}{says}", flush=True)
                    if given.record:
                        record(
                            name,
                            RUNS[name].engine,
                            holds,
                            "" if holds else says.replace(str(results), "FOLDER"),
                            device=given.device,
                            gpu=where,
                        )
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                served.stop()
                raise
    sys.exit(int(not all_hold))


if __name__ == "__main__":
    main()
