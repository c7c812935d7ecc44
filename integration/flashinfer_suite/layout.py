"""A copy of FlashInfer's tests whose imports lead to attn_backend.flashinfer."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE = "attn_backend.flashinfer"
# The tests to run; all others in tests/ are about kernels that this package does not have (docs/flashinfer.md).
FILES = tuple(
    f"tests/attention/test_{name}.py"
    for name in (
        "alibi",
        "attention_sink",
        "batch_attention",
        "batch_decode_kernels",
        "batch_invariant_fa2",
        "batch_prefill",
        "batch_prefill_kernels",
        "block_sparse",
        "decode_fp8_calibration_scale",
        "decode_prefill_lse",
        "deepseek_mla",
        "fp8_prefill",
        "hopper",
        "hopper_fp8_attention",
        "hopper_fp8_sliding_window",
        "logits_cap",
        "non_contiguous_decode",
        "non_contiguous_prefill",
        "page",
        "rope",
        "shared_prefix_kernels",
        "single_prefill",
        "sliding_window",
        "tensor_cores_decode",
        "workspace_size",
    )
) + tuple(f"tests/utils/test_{name}.py" for name in ("jit_example", "logits_processor", "pod_kernels", "quantization", "sampling", "triton_cascade"))
# Beside the tests. jit_utils.py is written anew: it lists kernels that are to be compiled ahead.
HELPERS = ("alibi_reference", "rope_reference", "sink_attention_reference", "test_helpers", "utils_fp4")
# Text that tests hand to jit_args.
_DECLARATIONS = "flashinfer/jit/attention/variants.py"

_IMPORT = re.compile(r"^(\s*)import flashinfer(\.[\w.]+)?( as \w+)?\s*$", re.MULTILINE)
_FROM = re.compile(r"^(\s*)from flashinfer\b", re.MULTILINE)
_DEVICES = (
    (re.compile(r"""(["'])cuda(?::\d)?\1(?!, "cutile")"""), '"cpu"'),  # not the backend of that name
    (re.compile(r'f"cuda:\{\w+\}"'), '"cpu"'),
    (re.compile(r"torch\.cuda\.current_device\(\)"), "0"),
    (re.compile(r"\.cuda\(\)"), ""),
    (re.compile(r"\.to\(0\)"), '.to("cpu")'),
    (re.compile(r"\bdevice=0\b"), 'device="cpu"'),
)


def redirected(source: str, device: str) -> str:
    """The source of a test with `flashinfer` replaced, and for a CPU the device."""
    source = _FROM.sub(rf"\1from {PACKAGE}", source)
    source = _IMPORT.sub(_import, source)
    if device == "cpu":
        for pattern, replacement in _DEVICES:
            source = pattern.sub(replacement, source)
    return source


def _import(match: re.Match[str]) -> str:
    indent, module, alias = match.group(1), match.group(2) or "", match.group(3)
    if alias:
        return f"{indent}import {PACKAGE}{module}{alias}"
    return f"{indent}import {PACKAGE}{module}; flashinfer = {PACKAGE}" if not module else f"{indent}import {PACKAGE}{module}; import {PACKAGE} as flashinfer"


def missing_files(checkout: Path) -> list[str]:
    """What a checkout should have and lacks."""
    wanted = [*FILES, *(f"tests/test_helpers/{name}.py" for name in HELPERS), _DECLARATIONS]
    return [name for name in wanted if not (checkout / name).is_file()]


def lay_out(checkout: Path, folder: Path, device: str) -> None:
    """Writes the copy into an empty folder."""
    for package in ("tests", "tests/attention", "tests/utils", "tests/test_helpers"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").touch()
    for name in (*FILES, *(f"tests/test_helpers/{helper}.py" for helper in HELPERS)):
        text = redirected((checkout / name).read_text(), device)
        (folder / name).write_text(text)
    shutil.copy(HERE / "jit_utils.py", folder / "tests" / "test_helpers" / "jit_utils.py")
    shutil.copy(HERE / "plugin.py", folder / "conftest.py")
    shutil.copy(checkout / _DECLARATIONS, folder / "flashinfer_declarations.py")
    (folder / "pytest.ini").write_text("[pytest]\nnorecursedirs = test_helpers\n")
