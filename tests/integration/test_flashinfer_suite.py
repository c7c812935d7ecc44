"""FlashInfer's tests, copied: the changes to them, and the counts."""

from __future__ import annotations

from pathlib import Path

from integration.flashinfer_suite.__main__ import COLUMNS, markdown, run_line, table
from integration.flashinfer_suite.layout import (
    FILES,
    HELPERS,
    LINES,
    TRACE_MODULES,
    lay_out,
    missing_files,
    redirected,
)

TEST = """
import pytest
import torch
import flashinfer
import flashinfer.triton
from flashinfer.utils import get_compute_capability
from tests.test_helpers.jit_utils import gen_decode_attention_modules


@pytest.mark.parametrize("kv_len", [1, 5, 5000])
def test_decode(kv_len):
    assert gen_decode_attention_modules(1) == []
    assert get_compute_capability(torch.device("cuda:0"))[0] >= 8
    q, k = torch.randn(2, 64, device="cuda:0"), torch.randn(kv_len, 2, 64).cuda().to(0)
    o = flashinfer.single_decode_with_kv_cache(q.half(), k.half(), k.half())
    torch.cuda.synchronize()
    assert o.shape == q.shape


def test_missing():
    flashinfer.mm_fp8(1)


def test_wrong():
    assert flashinfer.triton is None


def test_graph():
    torch.cuda.CUDAGraph()


def test_memory():
    torch.empty(2**40, device="cuda")


@pytest.mark.parametrize("error", [None, TypeError])
def test_fp8_kv_plan_rejects_fp16_q(error):
    with pytest.raises(ValueError):
        if error is not None:
            raise error
"""
ALL_LARGE = """
import os
import pytest


@pytest.mark.parametrize("kv_len", [5000, 300, 400])
def test_large(kv_len):
    assert kv_len == 300


@pytest.mark.parametrize("kv_len", [300])
def test_end(kv_len):
    os._exit(3)
"""
LARGE_ON_A_GPU = """
import torch

before = []


def test_needs_more_than_its_share():
    before.append(torch.rand(4))
    if len(before) == 1:
        raise torch.OutOfMemoryError("of its share")
    assert torch.equal(*before)


def test_needs_more_in_a_comparison():
    before.append(torch.rand(4))
    if len(before) == 3:
        try:
            raise torch.OutOfMemoryError("of its share")
        except RuntimeError as error:
            raise RuntimeError("Comparing") from error  # as torch.testing.assert_close does
    assert torch.equal(*before[2:])


def test_needs_more_than_there_is():
    raise torch.OutOfMemoryError("of the GPU")
"""
TRACE = """
import pytest
import torch
import flashinfer
from flashinfer.trace.templates.cascade import init


@pytest.mark.parametrize("dtype", [torch.float16, torch.bool, "nvfp4"])
def test_merge_state(dtype):
    v, s = init()
    try:
        if dtype == "nvfp4":
            flashinfer.mm_fp8(v)
        out, _ = flashinfer.merge_state(v.to(dtype), s, v.to(dtype), s)
    except Exception as exc:
        pytest.skip(f"merge_state unavailable: {exc}")
    assert out.device.type == "cpu"


def test_skips():
    pytest.skip("by a condition")
"""
TRACE_INPUTS = """
import torch
from ..template import NAME


def init(device: str = "cuda"):
    return torch.ones(3, 2, 64, device=device), torch.zeros(3, 2, device=device)
"""
TRACE_LINE = "tests/trace/test_*_reference_correctness.py"


def checkout_with(folder: Path) -> Path:
    """The files of a checkout, all empty except one."""
    for name in (
        *FILES,
        *HELPERS,
        *(f"flashinfer/{module}.py" for module in TRACE_MODULES),
        "flashinfer/jit/attention/variants.py",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / FILES[0]).write_text(TEST)
    (folder / FILES[1]).write_text(ALL_LARGE)
    return folder


def test_imports_and_devices_are_replaced() -> None:
    text = redirected(
        'import flashinfer\nfrom flashinfer.x import y\nx = torch.empty(1, device="cuda:0").to(0)\n', "cpu"
    )
    assert text == (
        "import attn_backend.flashinfer; flashinfer = attn_backend.flashinfer\nfrom "
        "attn_backend.flashinfer.x import y\n"
        'x = torch.empty(1, device="cpu").to("cpu")\n'
    )
    assert '"cuda:0"' in redirected('device="cuda:0"', "cuda")
    assert redirected('["cuda", "cutile"], "cuda"', "cpu") == '["cuda", "cutile"], "cpu"'


def test_outcomes_are_counted(tmp_path: Path) -> None:
    checkout, folder = checkout_with(tmp_path / "checkout"), tmp_path / "copy"
    assert missing_files(checkout) == []
    lay_out(checkout, folder, "cpu")
    options: dict[str, object] = {"device": "cpu", "sample": 0, "seed": 0, "max_tokens": 100, "gpu_memory": 0}
    result = run_line(folder, FILES[0], options, 300, [])
    assert {key: result[key] for key in (*COLUMNS[1:], "ended")} == {
        "cases": 9,
        "taken": 8,
        "passed": 2,
        "failed": 2,  # a limit that is also refused in another way
        "not supported": 1,
        "no such limit": 1,
        "skipped": 2,
        "not run": 0,
        "ended": "in time",
    }, result["output"]
    assert table([result]).splitlines()[-1].split() == ["all", "9", "8", "2", "2", "1", "1", "2", "0"]
    assert markdown([result]).splitlines()[1:] == [
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        f"| `{FILES[0]}` | 9 | 8 | 2 | 2 | 1 | 1 | 2 | 0 |",
        "| all | 9 | 8 | 2 | 2 | 1 | 1 | 2 | 0 |",
    ]


def test_takes_the_smallest_where_all_are_too_large(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    lay_out(checkout_with(tmp_path / "checkout"), folder, "cpu")
    result = run_line(
        folder,
        FILES[1],
        {"device": "cpu", "sample": 0, "seed": 0, "max_tokens": 100, "gpu_memory": 0},
        300,
        [],
    )
    assert (result["cases"], result["taken"], result["passed"], result["not run"]) == (4, 2, 1, 1), result[
        "output"
    ]
    assert result["ended"] == "with exit status 3"


def test_cases_that_are_large_for_a_gpu_run_once_more(tmp_path: Path) -> None:
    checkout, folder = checkout_with(tmp_path / "checkout"), tmp_path / "copy"
    (checkout / FILES[0]).write_text(LARGE_ON_A_GPU)
    lay_out(checkout, folder, "cpu")
    result = run_line(
        folder, FILES[0], {"device": "cpu", "sample": 0, "seed": 0, "max_tokens": 0, "gpu_memory": 3}, 300, []
    )
    assert (result["taken"], result["passed"], result["failed"], result["not run"]) == (3, 2, 0, 1), result[
        "output"
    ]
    lines = result["lines"]
    assert isinstance(lines, list)
    assert [line["why"] for line in lines if line.get("outcome") == "too large"] == ["of the GPU"]


def test_errors_that_a_test_makes_skips_of_are_counted(tmp_path: Path) -> None:
    checkout, folder = checkout_with(tmp_path / "checkout"), tmp_path / "copy"
    (checkout / "flashinfer/trace/template.py").write_text('NAME = "trace"')
    (checkout / "flashinfer/trace/templates/cascade.py").write_text(TRACE_INPUTS)
    first, second = LINES[TRACE_LINE][:2]
    (checkout / first).write_text(TRACE)
    (checkout / second).write_text(TRACE + "\n\ndef test_another(): ...\n")
    lay_out(checkout, folder, "cpu")
    result = run_line(
        folder,
        TRACE_LINE,
        {"device": "cpu", "sample": 4, "seed": 0, "max_tokens": 100, "gpu_memory": 0},
        300,
        [],
    )
    assert (result["cases"], result["taken"]) == (9, 8), result["output"]  # four of each file
    counts = {name: result[name] for name in ("passed", "failed", "not supported", "skipped")}
    assert counts == {"passed": 3, "failed": 2, "not supported": 1, "skipped": 2}, result["output"]


def test_a_folder_without_tests_is_refused(tmp_path: Path) -> None:
    assert missing_files(tmp_path)[0] == FILES[0]
