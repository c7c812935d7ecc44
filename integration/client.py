"""Runs an engine's own benchmark client and reads what it measured."""

from __future__ import annotations

import subprocess
from pathlib import Path

from integration.engines import Client, Engine, Metrics
from integration.server import print_tail, process_environment


class ClientError(RuntimeError):
    """The client failed; the end of its log has been printed."""


def run_client(engine: Engine, client: Client, device: str, log: Path, timeout_s: float) -> Metrics:
    """Run the client to its end, its output going to `log`. Raises ClientError."""
    client.result.parent.mkdir(parents=True, exist_ok=True)
    client.result.unlink(missing_ok=True)
    command = engine.client_command(client)
    with log.open("w") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        try:
            done = subprocess.run(
                command,
                check=False,
                cwd=log.parent,
                env=process_environment(engine.client_environment(device)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            print_tail(log)
            raise ClientError(f"{engine.name}: the benchmark client was not done after {timeout_s:.0f} s, log {log}") from None
    if done.returncode != 0 or not client.result.is_file():
        print_tail(log)
        raise ClientError(f"{engine.name}: the benchmark client failed with exit status {done.returncode}, log {log}")
    metrics = engine.read_result(client)
    if metrics.requests == 0:
        print_tail(log)
        raise ClientError(f"{engine.name}: none of {client.workload.num_requests} requests was answered, log {log}")
    return metrics
