"""For the operator of an engine: a line when it starts, and counters.

With ATTN_BACKEND_METRICS=1 each worker writes its counters to a file in the format of prometheus_client's
multiprocess mode. The engine's server reads the files of a folder:
- SGLang (--enable-metrics) and vLLM with several API servers have such a folder, PROMETHEUS_MULTIPROC_DIR.
- Otherwise vLLM has none. Its first process makes a folder of ours, and a collector of the default registry,
  which /metrics shows, reads it. vLLM's own metrics stay as they are.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from collections import Counter
from functools import cache
from importlib import import_module

import torch

from attn_backend.jit import cubins
from attn_backend.jit.progress import LOGGER, warned
from attn_backend.kernels.attention import Attention
from attn_backend.kernels.native import is_captured
from attn_backend.kernels.schedule import COUNTS, TILE_ROWS, counted
from attn_backend.releases import own_release
from attn_backend.settings import Settings

_made: dict[str, set[str]] = {}  # properties of this process's Attentions
_seconds_to_make: list[float] = []


def record_attention(attention: Attention, has_cascade: bool, seconds: float) -> None:
    """Records an Attention of some layers for log_start(). seconds: that its constructor took."""
    _seconds_to_make.append(seconds)
    for what, value in (
        ("design", attention.design),
        ("cascade", _on_or_off(has_cascade)),
        ("invariance", _on_or_off(attention.batch_invariant)),
        ("kv_dtype", str(attention.kv_dtype).removeprefix("torch.")),
    ):
        _made.setdefault(what, set()).add(value)


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _on_or_off(value: bool) -> str:
    return "on" if value else "off"


def log_start(logger: logging.Logger) -> None:
    """Called when the Attentions are made. The first rank logs one line for each process: of the Attentions
    that exist by then.
    """
    if not _made or _rank() != 0 or log_start.__name__ in warned:
        return
    warned.add(log_start.__name__)  # once in each process
    made = {what: ", ".join(sorted(values)) for what, values in _made.items()}
    origins = Counter(cubins.origins.values())
    logger.info(
        "attn_backend %s: %s kernels (%s), cascade %s, batch invariance %s, KV %s, ready in %.2f s.",
        own_release(),
        made["design"],
        ", ".join(f"{count} {origin}" for origin, count in sorted(origins.items())) or "in the library",
        made["cascade"],
        made["invariance"],
        made["kv_dtype"],
        sum(_seconds_to_make),
    )


# Environment variables that name the folder.
ENGINE_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
OWN_FOLDER = "_ATTN_METRICS_FOLDER"  # processes inherit it
_HELP = {
    "plans": "Batches that attn_backend planned, once for each group of layers.",
    "clamped_plans": "Plans whose metadata was clamped.",
    "refusals": "Plans that raised an error, and runs on a CPU that found wrong page ids.",
    "kv_tokens": "KV tokens that the requests of the plans attend to, for each KV head.",
    "kv_tokens_read": "KV tokens that the plans read. The cascade saves the difference to kv_tokens.",
    "rows": "Rows of queries, by the rows of their row tiles.",
}


class CountsFile:
    """The counters of this process, in a file that prometheus_client's MultiProcessCollector reads.

    Nothing waits for the device: each update writes the previous reading, if it has arrived, and starts the
    next one.
    """

    def __init__(self, folder: str) -> None:
        """May raise anything: the file cannot be written, or prometheus_client has another format."""
        self.folder, self.is_usable = folder, True
        files = import_module("prometheus_client.mmap_dict")
        self._file = files.MmapedDict(os.path.join(folder, f"counter_{os.getpid()}-attn-backend.db"))

        def key(name: str, **labels: str) -> str:
            labels = {"rank": str(_rank())} | labels
            metric = f"attn_backend:{name}"
            return files.mmap_key(metric, f"{metric}_total", [*labels], [*labels.values()], _HELP[name])

        self._keys = [key(name) for name in COUNTS[: -len(TILE_ROWS)]]
        self._keys += [key("rows", tile_rows=str(tile_rows)) for tile_rows in TILE_ROWS]
        self._refusals = key("refusals")
        self._device = counted[0].sums.device
        on_cuda = self._device.type == "cuda"
        with torch.inference_mode(False):  # steps may run in this mode or not
            self._reading = torch.zeros(len(COUNTS), dtype=torch.int64, pin_memory=on_cuda)
        self._arrived = torch.cuda.Event() if on_cuda else None
        self._write()

    def update(self) -> None:
        if self._arrived is not None:
            if not self._arrived.query():
                return
            self._write()
        sums = torch.stack([counts.sums for counts in counted if counts.sums.device == self._device]).sum(0)
        self._reading.copy_(sums, non_blocking=True)
        if self._arrived is None:
            self._write()
        else:
            self._arrived.record()

    def _write(self) -> None:
        for key, value in zip(self._keys, self._reading.tolist(), strict=True):
            self._file.write_value(key, float(value), 0.0)
        self._file.write_value(self._refusals, float(sum(counts.refusals for counts in counted)), 0.0)


def export_counts(logger: logging.Logger) -> None:
    """Called at each step. Does nothing unless ATTN_BACKEND_METRICS=1."""
    if not counted or is_captured(counted[0].sums.device):
        return
    file = _counts_file(logger)
    if file is None or not file.is_usable:
        return
    try:
        file.update()
    except Exception as error:  # a counter must not end a step
        file.is_usable = False
        _tell_of_failure(logger, file.folder, error)


def _tell_of_failure(logger: logging.Logger, folder: str, error: Exception) -> None:
    logger.warning("attn_backend's counters cannot be written to %s: %s", folder, error)


@cache
def _counts_file(logger: logging.Logger) -> CountsFile | None:
    folder = os.environ.get(ENGINE_FOLDER) or os.environ.get(OWN_FOLDER)
    if folder is None:
        logger.warning("ATTN_BACKEND_METRICS=1 exports nothing: start SGLang with --enable-metrics.")
        return None
    try:
        return CountsFile(folder)
    except Exception as error:
        _tell_of_failure(logger, folder, error)
        return None


def serve_counts() -> None:
    """Called when vLLM loads the plugin. Its first process serves /metrics, or starts the servers.

    The folder belongs to the first process, which removes it.
    """
    if not Settings.read().metrics or os.environ.get(ENGINE_FOLDER):
        return
    folder = os.environ.get(OWN_FOLDER, "")
    try:
        if not os.path.isdir(folder):  # none, or of a process that has ended
            folder = os.environ[OWN_FOLDER] = tempfile.mkdtemp(prefix="attn_backend-metrics-")
            atexit.register(_remove, folder, os.getpid())
        _register(folder)
    except Exception as error:  # a counter must not keep an engine from starting
        _tell_of_failure(LOGGER, folder, error)


@cache
def _register(folder: str) -> None:
    client = import_module("prometheus_client")
    client.REGISTRY.register(
        import_module("prometheus_client.multiprocess").MultiProcessCollector(None, folder)
    )


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child inherits this call
        shutil.rmtree(folder, ignore_errors=True)
