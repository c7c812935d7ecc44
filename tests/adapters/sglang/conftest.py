"""Without a GPU, SGLang needs the two shims of integration/sglang_cpu before it is imported."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

SHIMS = Path(__file__).parents[3] / "integration" / "sglang_cpu"

if (
    importlib.util.find_spec("sglang") is not None
    and "sglang" not in sys.modules
    and not torch.cuda.is_available()
):
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    sys.path.append(str(SHIMS))  # sgl_kernel, unless a real one is installed
    spec = importlib.util.spec_from_file_location("sglang_cpu_shims", SHIMS / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.fixture
def needs_a_release_that_serves_on_cpus(request: pytest.FixtureRequest) -> None:
    from attn_backend.adapters.sglang import compat

    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if params.get("device", "cpu") == "cpu" and compat.starts_triton_on_cpu(compat.NAME):
        pytest.skip(f"SGLang {compat.release()} starts Triton on a CPU for every backend but its own")
