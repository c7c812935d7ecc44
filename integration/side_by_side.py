"""A benchmark with all servers running at once on one device: each load goes to one server after another
before the next load starts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product

from integration.benchmark import CLIENT_TIMEOUT_S, Benchmark, Settings
from integration.client import ClientError, RunningClient
from integration.compare_sampling import check_seeds
from integration.results import Row
from integration.server import Server, ServerError, print_tail
from integration.warm_up import wait_for_turn, warm_up

# clients started before their turn: their preparation takes longer than many a load
CLIENTS_AHEAD = 8


def benchmark_side_by_side(settings: Settings) -> list[Row]:
    """Like `integration.benchmark.benchmark`, with all servers at once.

    A backend that fails is left out from then on.
    """
    run = Benchmark.make(settings)
    with ExitStack() as stack:
        group = SideBySide(run, stack)
        group.get_ready()
        wait_for_turn(settings.turn)
        group.measure_all()
        group.check_seeds()
    if not run.measured:
        raise ServerError("no backend was measured (see above)")
    rows = run.finish()
    if group.failed:
        raise ServerError(f"not measured, or not to the end: {', '.join(sorted(group.failed))}")
    return rows


class SideBySide:
    """The servers, and the clients that were started for their turns.

    Args:
        run: the benchmark to measure.
        stack: stops servers and clients at its end.
    """

    def __init__(self, run: Benchmark, stack: ExitStack) -> None:
        self.run, self.settings, self.begin = run, run.settings, time.monotonic()
        self.failed: set[str] = set()  # backends that are left out from now on
        self.servers: dict[str, Server] = {}
        for backend in self.settings.backends:
            launch = run.launch(backend, self.settings.results / f"cache-{backend}")
            self.servers[backend] = server = Server(run.engine, launch, run.log(f"server-{backend}"))
            stack.callback(server.stop)
        stack.callback(ask_all_to_stop, self.servers.values())
        self.turns = side_by_side_turns(self.settings)
        self._without_client = iter(self.turns)
        self._waiting: deque[RunningClient] = deque()
        stack.callback(stop_all, self._waiting)
        for _ in range(CLIENTS_AHEAD):
            self._start_client()
        self._prompts = run.warm_up_prompts

    def get_ready(self) -> None:
        """Waits until the servers answer, and sends them requests that are not measured."""
        for backend, server in self.servers.items():
            try:
                server.wait_until_ready(self.settings.start_timeout_s)
            except ServerError as error:
                self._leave_out(backend, error)
        # all of them share the device: this is not measured
        with ThreadPoolExecutor(len(self.servers)) as pool:
            ready = {
                backend: server.url for backend, server in self.servers.items() if backend not in self.failed
            }
            warmed = {
                backend: pool.submit(warm_up, self.run.engine, url, self._prompts, self.settings.sampling)
                for backend, url in ready.items()
            }
        for backend, outcome in warmed.items():
            if reason := outcome.exception():
                self._leave_out(backend, reason)
        print(
            f"{self.run.engine.name}: all have been warmed up {self._seconds():.0f} s after the start",
            flush=True,
        )

    def measure_all(self) -> None:
        """Measures every load of every backend that has not failed, until the time is up."""
        limit = self.settings.time_limit_s
        for number, (index, backend, repeat) in enumerate(self.turns):
            if limit is not None and self._seconds() > limit:
                for missed, of_backend, _ in self.turns[number:]:
                    print(f"not measured: {of_backend}, {self.run.load_name(missed)}", flush=True)
                return
            client = self._waiting.popleft()
            if backend in self.failed:
                client.stop()
                self._start_client()
                print(f"not measured: {backend}, {self.run.load_name(index)}", flush=True)
            else:
                self._measure(client, index, backend, repeat)

    def check_seeds(self) -> None:
        """On request: sends the first prompts once more, sampled, like `integration.compare_sampling`."""
        if not (self.settings.check_seeds and self.settings.sampling):
            return
        prompts = [tokens for tokens, _ in self._prompts[0]]
        for backend, server in self.servers.items():
            if backend not in self.failed:
                check_seeds(
                    self.run.engine,
                    backend,
                    server.url,
                    prompts,
                    self.settings.sampling,
                    self.settings.results,
                )

    def _measure(self, client: RunningClient, index: int, backend: str, repeat: int) -> None:
        self.run.announce(backend, index, repeat)
        client.release()
        self._start_client()
        try:
            self.run.add(backend, index, client.finish(CLIENT_TIMEOUT_S))
            self.servers[backend].raise_if_dead()
        except (ClientError, ServerError) as error:
            self._leave_out(backend, error)
        print(
            f"{self.run.engine.name} with {backend}: done {self._seconds():.0f} s after the start", flush=True
        )

    def _start_client(self) -> None:
        """Starts the next turn's client that is not running yet; it prepares its requests and waits."""
        turn = next(self._without_client, None)
        if turn is None:
            return
        index, backend, repeat = turn
        client = self.run.client(self.servers[backend].launch, index, repeat, waits=True)
        self._waiting.append(
            RunningClient(
                self.run.engine,
                client,
                self.settings.device,
                self.run.log(f"client-{backend}-{index}-{repeat}"),
            )
        )

    def _leave_out(self, backend: str, error: BaseException) -> None:
        print_tail(self.servers[backend].log)
        self.failed.add(backend)
        print(f"left out: {error}", flush=True)

    def _seconds(self) -> float:
        return time.monotonic() - self.begin


def side_by_side_turns(settings: Settings) -> list[tuple[int, str, int]]:
    """(index of a load, backend, repeat) in the order of measurement."""
    turns = []
    for number, (index, repeat) in enumerate(product(range(len(settings.loads)), range(settings.repeats))):
        first = number % len(settings.backends)
        backends = settings.backends[first:] + settings.backends[:first]
        turns += [
            (index, backend, repeat) for backend in backends if (backend, index) not in settings.left_out
        ]
    return turns


def ask_all_to_stop(servers: Iterable[Server]) -> None:
    for server in servers:
        server.ask_to_stop()


def stop_all(clients: Iterable[RunningClient]) -> None:
    for client in clients:
        client.stop()
