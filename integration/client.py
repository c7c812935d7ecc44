"""Runs an engine's own benchmark client and reads its results."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

from integration.engines import Client, Engine, Metrics
from integration.processes import start
from integration.progress import wait_for
from integration.server import print_tail


class ClientError(RuntimeError):
    """The client failed; the end of its log has been printed."""


class ClientTimeout(ClientError):
    """The client was not done in time, and has been ended."""


class RunningClient:
    """A started client that writes its output to `log`."""

    def __init__(self, engine: Engine, client: Client, device: str, log: Path) -> None:
        self.engine, self.client, self.log = engine, client, log
        client.result.parent.mkdir(parents=True, exist_ok=True)
        client.result.unlink(missing_ok=True)
        if client.wait_for:
            client.wait_for.unlink(missing_ok=True)
        self.process = start(engine.client_command(client), log, engine.client_environment(device))

    def release(self) -> None:
        """Let a client that waits (`Client.wait_for`) send its requests."""
        if self.client.wait_for:
            self.client.wait_for.touch()

    def finish(self, timeout_s: float) -> Metrics:
        """Wait for its end, and show the number of answered requests. Raises ClientError."""
        # both engines' clients have a bar of tqdm: `50%|#####     | 16/32 [01:10<...]`
        counted = rf"\b(\d+)/({self.client.workload.num_requests}) \["
        try:
            status = wait_for(
                self.process, self.log, self.engine.name, counted, "requests", "the client starts", timeout_s
            )
        except TimeoutError:
            raise ClientTimeout(self._failed(f"was not done after {timeout_s:.0f} s")) from None
        finally:
            self.stop()
        if status != 0 or not self.client.result.is_file():
            raise ClientError(self._failed(f"failed with exit status {status}"))
        metrics = self.engine.read_result(self.client)
        if metrics.requests == 0:
            raise ClientError(
                self._failed(f"got no answer to any of {self.client.workload.num_requests} requests")
            )
        return metrics

    def stop(self) -> None:
        """End it, unless it has ended by itself."""
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            self.process.kill()
        self.process.wait()

    def _failed(self, what: str) -> str:
        """The error's message. Prints the end of the log."""
        print_tail(self.log)
        return f"{self.engine.name}: the benchmark client {what}, log {self.log}"


def run_client(engine: Engine, client: Client, device: str, log: Path, timeout_s: float) -> Metrics:
    """Run the client to its end, its output going to `log`. Raises ClientError."""
    return RunningClient(engine, client, device, log).finish(timeout_s)
