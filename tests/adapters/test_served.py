"""Reports while an engine starts."""

from __future__ import annotations

import logging

import pytest
import torch

from attn_backend.adapters.served import shortened, untried, warn_if_untried
from attn_backend.jit import progress


@pytest.mark.parametrize(
    ("names", "short"),
    [
        ([], ""),
        (["layers.7.attn"], "layers.7.attn"),
        (["layers.10.attn", "layers.2.attn", "layers.3.attn", "layers.4.attn"], "layers.{2-4,10}.attn"),
        (["a.0.b", "c.0.d", "a.1.b", "lone"], "lone, a.{0-1}.b, c.0.d"),
        (["layers.0.mtp.1", "layers.1.mtp.1"], "layers.{0-1}.mtp.1"),
    ],
)
def test_names_are_shortened(names: list[str], short: str) -> None:
    assert shortened(names) == short


LOGGER = logging.getLogger("test_served")


@pytest.mark.parametrize(
    ("compute_capability", "build"),
    [
        ((8, 0), "It uses the sm_80 build;"),
        ((8, 9), "It uses the sm_80 build;"),
        ((10, 0), "It uses the PTX of the sm_80 build;"),
        ((12, 1), "It uses the PTX of the sm_80 build;"),
    ],
    ids=str,
)
def test_what_an_untried_gpu_is_served_with(compute_capability: tuple[int, int], build: str) -> None:
    message = untried(compute_capability)
    assert message is not None
    assert build in message
    assert "never been run on a GPU of compute capability {}.{}".format(*compute_capability) in message


def test_hopper_is_tried() -> None:
    assert untried((9, 0)) is None


def test_one_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(progress, "warned", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    warn_if_untried(torch.device("cpu"), LOGGER)
    assert not caplog.records
    for index in (0, 0, 1):  # every group of layers calls this
        warn_if_untried(torch.device("cuda", index), LOGGER)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
