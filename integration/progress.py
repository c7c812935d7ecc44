"""How far a process is, by what it writes to its log. Needs the standard library alone, as `integration.environment` does."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

from attn_backend.kernels.progress import status

POLL_S = 0.1
TAIL_BYTES = 4096


def wait_for(process: subprocess.Popen[bytes], log: Path, who: str, counted: str, things: str, at_first: str, timeout_s: float = float("inf")) -> int:
    """Waits for the end of a process, and shows how many `things` are done meanwhile. Returns its exit status.

    Args:
        who: stands before that on each line.
        counted: regular expression of how it writes to its log that n of m are done, with a group for each number.
        at_first: what is shown until it does so.

    Raises:
        TimeoutError: it has not ended in time, and goes on.
    """
    end = time.monotonic() + timeout_s
    with status(who, at_first) as tell:
        while (code := process.poll()) is None:
            if time.monotonic() > end:
                raise TimeoutError
            if done := last_count(log, counted):
                tell(f"{things} {done[0]} of {done[1]}")
            time.sleep(POLL_S)
    return code


def last_count(log: Path, counted: str) -> tuple[int, int] | None:
    """The numbers of the last match near the log's end."""
    with log.open("rb") as file:
        file.seek(max(file.seek(0, 2) - TAIL_BYTES, 0))
        found = re.findall(counted, file.read().decode(errors="replace"))
    return (int(found[-1][0]), int(found[-1][1])) if found else None
