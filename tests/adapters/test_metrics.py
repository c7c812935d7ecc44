"""The line at the start, and counters in the files of prometheus_client."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from attn_backend import BSRView, PageTable
from attn_backend.adapters import metrics
from attn_backend.adapters.layers import LayerSpec, attention_of
from attn_backend.jit import cubins, progress
from attn_backend.kernels import schedule
from attn_backend.kernels.attention import Attention

CPU = torch.device("cpu")
LOGGER = logging.getLogger("test_metrics")


def make(head_dim: int = 64, **options: bool) -> Attention:
    spec = LayerSpec(4, 2, head_dim)
    return attention_of(spec, dtype=torch.float32, device=CPU, max_rows=8, max_batch=4, **options)


def plan(attention: Attention, *kv_lens: int) -> None:
    pages = torch.arange(len(kv_lens) * 4, dtype=torch.int32).view(-1, 4)
    table = PageTable.block_table(pages, torch.tensor(kv_lens), 16)
    attention.plan(BSRView(torch.arange(len(kv_lens) + 1), table))


@pytest.fixture
def nothing_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_made", {})
    monkeypatch.setattr(metrics, "_seconds_to_make", [])
    monkeypatch.setattr(progress, "warned", set())
    monkeypatch.setattr(metrics, "warned", progress.warned)
    monkeypatch.setattr(cubins, "origins", {})


@pytest.mark.usefixtures("nothing_made")
def test_one_line_tells_of_the_start(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "own_release", lambda: "1.2.3")
    with caplog.at_level(logging.INFO):
        metrics.log_start(LOGGER)
        assert not caplog.records  # nothing is made yet
        make()
        make(128, batch_invariant=True)
        cubins.origins.update({Path("a"): "shipped", Path("b"): "compiled", Path("c"): "shipped"})
        for _ in range(2):
            metrics.log_start(LOGGER)
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert re.fullmatch(
        r"attn_backend 1\.2\.3: cpu kernels \(1 compiled, 2 shipped\), cascade off, on, batch invariance "
        r"off, on, KV float32, ready in \d+\.\d\d s\.",
        record.getMessage(),
    )


@pytest.mark.usefixtures("nothing_made")
def test_the_first_rank_tells_of_the_start(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    make()
    with caplog.at_level(logging.INFO):
        metrics.log_start(LOGGER)
        assert not caplog.records
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
        metrics.log_start(LOGGER)
    assert "cpu kernels (in the library)" in caplog.text


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("prometheus_client")
    monkeypatch.setenv("ATTN_BACKEND_METRICS", "1")
    for variable in (metrics.ENGINE_FOLDER, metrics.OWN_FOLDER):
        monkeypatch.delenv(variable, raising=False)
    counted: list[schedule.Counted] = []
    monkeypatch.setattr(schedule, "counted", counted)
    monkeypatch.setattr(metrics, "counted", counted)
    metrics._counts_file.cache_clear()
    metrics._register.cache_clear()
    yield
    metrics._counts_file.cache_clear()
    metrics._register.cache_clear()


def shown(folder: Path | str) -> str:
    """The /metrics of a server that reads this folder."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))
    return generate_latest(registry).decode()


@pytest.mark.usefixtures("counting")
def test_counters_of_all_attentions_in_the_engine_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(metrics.ENGINE_FOLDER, str(tmp_path))
    metrics.export_counts(LOGGER)
    assert not any(tmp_path.iterdir())  # there is nothing to count yet
    attention = make()
    plan(attention, 30, 20)
    plan(make(128), 7)
    with pytest.raises(ValueError, match="kv_lens"):
        plan(attention, 65)
    metrics.export_counts(LOGGER)
    text = shown(tmp_path)
    assert "# TYPE attn_backend:plans_total counter" in text
    for line in (
        'attn_backend:plans_total{rank="0"} 2.0',
        'attn_backend:kv_tokens_total{rank="0"} 57.0',
        'attn_backend:kv_tokens_read_total{rank="0"} 57.0',
        'attn_backend:rows_total{rank="0",tile_rows="16"} 3.0',
        'attn_backend:rows_total{rank="0",tile_rows="192"} 0.0',
        'attn_backend:clamped_plans_total{rank="0"} 0.0',
        'attn_backend:refusals_total{rank="0"} 1.0',
    ):
        assert f"\n{line}\n" in text
    plan(attention, 10)
    metrics.export_counts(LOGGER)
    assert '\nattn_backend:plans_total{rank="0"} 3.0\n' in shown(tmp_path)


@pytest.mark.usefixtures("counting")
def test_each_rank_has_its_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan(make(), 30)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    metrics.CountsFile(str(tmp_path)).update()
    assert '\nattn_backend:plans_total{rank="3"} 1.0\n' in shown(tmp_path)


class Arrival:
    """An event of a copy to the host."""

    has_come = False

    def query(self) -> bool:
        return self.has_come

    def record(self) -> None:
        self.has_come = False


@pytest.mark.usefixtures("counting")
def test_a_reading_is_exported_when_it_has_arrived(tmp_path: Path) -> None:
    """As on a GPU: without a wait, so one reading late."""
    attention = make()
    file = metrics.CountsFile(str(tmp_path))
    arrival = Arrival()
    file._arrived = arrival  # type: ignore[assignment]
    plan(attention, 30)
    arrival.has_come = True
    file.update()  # starts the first reading
    assert 'attn_backend:plans_total{rank="0"} 0.0' in shown(tmp_path)
    plan(attention, 30)
    file.update()  # it is under way
    assert 'attn_backend:plans_total{rank="0"} 0.0' in shown(tmp_path)
    arrival.has_come = True
    file.update()  # exports it, and starts the second one
    assert 'attn_backend:plans_total{rank="0"} 1.0' in shown(tmp_path)


@pytest.mark.usefixtures("counting")
def test_vllm_s_registry_shows_our_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    from prometheus_client import generate_latest
    from prometheus_client.registry import CollectorRegistry

    registry = CollectorRegistry(auto_describe=True)
    monkeypatch.setattr("prometheus_client.REGISTRY", registry)
    monkeypatch.setenv(metrics.OWN_FOLDER, "")
    monkeypatch.delenv(metrics.OWN_FOLDER)
    for _ in range(2):  # plugins are loaded more than once
        metrics.serve_counts()
    folder = os.environ[metrics.OWN_FOLDER]
    plan(make(), 30)
    metrics.export_counts(LOGGER)
    assert 'attn_backend:plans_total{rank="0"} 1.0' in generate_latest(registry).decode()
    metrics._remove(folder, os.getpid() + 1)  # a forked child
    assert Path(folder).is_dir()
    metrics._remove(folder, os.getpid())
    assert not Path(folder).exists()


@pytest.mark.usefixtures("counting")
def test_no_folder_of_ours_where_the_engine_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(metrics.ENGINE_FOLDER, str(tmp_path))
    metrics.serve_counts()
    assert metrics.OWN_FOLDER not in os.environ


@pytest.mark.usefixtures("counting")
def test_nothing_is_made_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTN_BACKEND_METRICS")
    metrics.serve_counts()
    plan(make(), 30)
    metrics.export_counts(LOGGER)
    assert metrics.OWN_FOLDER not in os.environ
    assert metrics._counts_file.cache_info().currsize == 0


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize(
    ("folder", "message"),
    [(None, "exports nothing: start SGLang with --enable-metrics"), ("missing", "cannot be written to")],
)
def test_one_warning_where_nothing_can_be_exported(
    folder: str | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if folder is not None:
        monkeypatch.setenv(metrics.ENGINE_FOLDER, str(tmp_path / folder))
    attention = make()
    for _ in range(2):
        plan(attention, 30)
        metrics.export_counts(LOGGER)
    (record,) = caplog.records
    assert message in record.getMessage()
