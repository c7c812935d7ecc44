"""Runs vLLM's own attention tests, unmodified, with this backend instead of FLASH_ATTN: `python -m
integration.vllm_attention_kit TESTS`.

TESTS is the folder tests/v1/attention of vLLM's source distribution, from the installed release. On a CPU set
ATTN_BACKEND_VLLM_CPU=1. The tests name models on a hub; only the shapes matter, and these are written here.
Encoder cases are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FILES = ("test_attention_backends.py", "utils.py")
COMMON = {
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "head_dim": 128,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "meta-llama/Meta-Llama-3-8B": COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    | {
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "microsoft/Phi-tiny-MoE-instruct": COMMON
    | {
        "architectures": ["PhiMoEForCausalLM"],
        "model_type": "phimoe",
        "intermediate_size": 448,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    }
    | {
        "vocab_size": 32064,
        "max_position_embeddings": 4096,
        "sliding_window": 2047,
        "rope_theta": 10000.0,
        "bos_token_id": 1,
        "eos_token_id": 32000,
    }
    | {"num_local_experts": 16, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True},
}


def lay_out(folder: Path, tests: Path) -> None:
    """Puts the tests under the names by which they import each other, together with the models that they
    name."""
    package = folder / "tests" / "v1" / "attention"
    package.mkdir(parents=True)
    for level in (folder / "tests", folder / "tests" / "v1", package):
        (level / "__init__.py").touch()
    for name in FILES:
        shutil.copy(tests / name, package / name)
    shutil.copy(HERE / "conftest.py", folder / "conftest.py")
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, config in CONFIGS.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", type=Path, help="vLLM's tests/v1/attention")
    parser.add_argument("pytest", nargs="*", help="more arguments for pytest, after --")
    given = parser.parse_args()
    missing = [name for name in FILES if not (given.tests / name).is_file()]
    if missing:
        parser.error(f"tests: {given.tests} holds no {missing[0]}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lay_out(folder, given.tests)
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [name, os.environ.get("PYTHONPATH")]))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-c",
            "pytest.ini",
            "--import-mode=importlib",
            "-p",
            "no:cacheprovider",
            "--show-capture=no",
            "-rfEs",
        ]
        command += [
            "tests/v1/attention/test_attention_backends.py",
            "-k",
            "backend_correctness and not encoder",
            *given.pytest,
        ]
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
