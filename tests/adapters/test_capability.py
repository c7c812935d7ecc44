"""On GPUs that the kernels have never run on, users get one warning."""

from __future__ import annotations

import logging

import pytest
import torch

from attn_backend.adapters import capability

LOGGER = logging.getLogger("test_capability")


@pytest.mark.parametrize(
    ("compute_capability", "build"),
    [
        ((8, 0), ": the sm_80 build"),
        ((8, 9), ": the sm_80 build"),
        ((10, 0), ": the PTX of the sm_80 build"),
        ((12, 1), ": the PTX of the sm_80 build"),
    ],
    ids=str,
)
def test_what_an_untried_gpu_is_served_with(compute_capability: tuple[int, int], build: str) -> None:
    message = capability.untried(compute_capability)
    assert message is not None
    assert build in message
    assert "never been run on a GPU of compute capability {}.{}".format(*compute_capability) in message


def test_hopper_is_tried() -> None:
    assert capability.untried((9, 0)) is None


def test_one_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    capability.warn_once.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    capability.warn_if_untried(torch.device("cpu"), LOGGER)
    assert not caplog.records
    for index in (0, 0, 1):  # every group of layers calls this
        capability.warn_if_untried(torch.device("cuda", index), LOGGER)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    capability.warn_once.cache_clear()
