"""The benchmark of a layer: a small one on a CPU, with and without the rotary embedding."""

from __future__ import annotations

import pytest
import torch
from stand_ins import MACHINE, OneMoreEach, install_peers

from benchmarks import layer
from benchmarks.batches import Batch
from benchmarks.cases import Case

SMALL = {
    "decode": Case("decode", (1,) * 3, (100, 64, 77), 8, 2),
    "prompt": Case("prompt", (40,), (100,), 8, 2),
}


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batch, "make", lambda case, make=Batch.make: make(case, device="cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(layer, "PRODUCT", (8, 16))
    install_peers(monkeypatch)
    torch.manual_seed(0)


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_a_small_line_is_right(name: str, rope: bool, capsys: pytest.CaptureFixture[str]) -> None:
    line = layer.measure(SMALL[name], OneMoreEach(), MACHINE, rope)  # type: ignore[arg-type]
    assert line["error"] < 1e-2
    assert line["8-bit cache"] * layer.LAYERS == 1, "less the product's time"
    assert line["ours"] * layer.LAYERS == 2
    assert any(peer.startswith("FlashInfer, ") for peer in line)
    assert "FA3" not in line
    assert "FA3: ModuleNotFoundError" in capsys.readouterr().out
    assert layer.markdown([line], rope).startswith("| rope" if rope else "| append")


@pytest.mark.parametrize("peers", [(), ("FA3",), ("FlashInfer",)])
def test_only_peers_that_are_asked_for_have_a_turn(
    peers: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    line = layer.measure(SMALL["decode"], OneMoreEach(), MACHINE, peers=peers)  # type: ignore[arg-type]
    assert any(name.startswith("FlashInfer, ") for name in line) == ("FlashInfer" in peers)
    assert ("FA3: ModuleNotFoundError" in capsys.readouterr().out) == ("FA3" in peers)
    assert "decode" in layer.markdown([line])


@pytest.mark.parametrize("rope", [False, True])
def test_peers_do_the_same_work(rope: bool) -> None:
    batch = Batch.make(SMALL["decode"])
    new = layer.NewTokens.make(batch, rope)
    q, k = batch.q.clone(), new.k.clone()
    new.append(batch.q, batch.kv)()
    rotated, appended = batch.q.clone(), batch.cache.clone()
    assert torch.equal(rotated, q) != rope
    batch.q.copy_(q)
    batch.cache.zero_()
    for launch in new.append_by_vllm(batch.q, batch.cache):
        launch()
    written = batch.cache != 0
    assert int(written.any(-1).any(-1).sum()) == 2 * len(q), "K and V of every row"
    torch.testing.assert_close(batch.cache[written], appended[written], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(batch.q, rotated, rtol=2e-2, atol=2e-2)
    assert torch.equal(new.k, k) != rope
