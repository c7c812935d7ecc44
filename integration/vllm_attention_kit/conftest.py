"""vLLM's own attention tests, unmodified, with attn_backend instead of FLASH_ATTN.

Other backends of the same tests are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    ours = AttentionBackendEnum.FLASH_ATTN
    register_backend(
        ours,
        "attn_backend.adapters.vllm.backend.CpuAttnBackend"
        if current_platform.is_cpu()
        else "attn_backend.adapters.vllm.backend.AttnBackend",
    )
    for module in {item.module for item in session.items if isinstance(item, pytest.Function)}:
        original = module._test_backend_correctness

        @functools.wraps(original)
        def only_ours(
            batch_spec: Any,
            model: str,
            backends: list[Any],
            *args: Any,
            original: Any = original,
            **kwargs: Any,
        ) -> None:
            if ours in backends:
                original(batch_spec, model, [ours], *args, **kwargs)

        module._test_backend_correctness = only_ours


@pytest.fixture
def default_vllm_config() -> Iterator[Any]:
    """As in vLLM's tests/conftest.py, which needs all of vLLM's test dependencies."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config
