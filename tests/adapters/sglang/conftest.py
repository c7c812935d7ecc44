"""Without a GPU, SGLang needs the two shims of integration/sglang_cpu before it is imported."""

import importlib.util
import os
import sys
from pathlib import Path

import torch

SHIMS = Path(__file__).parents[3] / "integration" / "sglang_cpu"

if importlib.util.find_spec("sglang") is not None and "sglang" not in sys.modules and not torch.cuda.is_available():
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    sys.path.append(str(SHIMS))  # sgl_kernel, unless a real one is installed
    spec = importlib.util.spec_from_file_location("sglang_cpu_shims", SHIMS / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
