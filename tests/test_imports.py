"""The cost of loading the plugin in an engine: nothing heavy is imported, and the library of kernels only
when needed.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import pytest

import attn_backend

HEAVY = {
    "elftools",
    "httpx",
    "matplotlib",
    "numpy.testing",
    "psutil",
    "rich",
    "scipy",
    "sglang",
    "tabulate",
    "transformers",
    "triton",
    "tvm_ffi",
    "vllm",
}
IMPORTED = (
    "import json, sys, torch; before = set(sys.modules); import {module}; "
    "print(json.dumps(sorted(set(sys.modules) - before)))"
)


@pytest.mark.parametrize(
    "module", ["attn_backend", "attn_backend.adapters.vllm", "attn_backend.adapters.sglang"]
)
def test_an_engine_that_loads_the_plugin_imports_nothing_heavy(module):
    process = subprocess.run(
        [sys.executable, "-c", IMPORTED.format(module=module)], capture_output=True, text=True, check=True
    )
    imported = set(json.loads(process.stdout))
    assert module in imported
    assert not imported & HEAVY
    assert not {
        name
        for name in imported
        if name.startswith(("attn_backend.cli", "attn_backend.flashinfer", "attn_backend.kernels"))
    }


def test_the_package_tells_its_version_and_what_attention_is_made_of() -> None:
    assert attn_backend.__version__[0].isdigit()
    assert not hasattr(attn_backend, "no_such_name")
    parameters = list(inspect.signature(attn_backend.Attention).parameters)
    assert parameters[:4] == ["num_qo_heads", "num_kv_heads", "head_dim", "dtype"]
    assert "variant" in parameters
