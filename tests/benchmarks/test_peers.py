"""Which peers take part, and which kernel counts for a peer: its fastest correct one."""

from __future__ import annotations

import math
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from stand_ins import install_peers

from benchmarks.batches import LARGEST_ERROR, Batch, ours, reference, relative_error
from benchmarks.cases import Case
from benchmarks.peers import cudnn, fastest, flash_attention_4, flashinfer_pod, peers_of
from benchmarks.report import asked_peers, options

BOARDS = (
    "append",
    "attention",
    "fp8",
    "head_shapes",
    "host",
    "layer",
    "sampling",
    "shared_prefix",
    "variants",
)


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ([], ("A", "B c")),
        (["--peer", "B c"], ("B c",)),
        (["--peer", "B c", "--peer", "A"], ("A", "B c")),
        (["--peer", "none"], ()),
    ],
)
def test_peers_that_are_asked_for(given: list[str], asked: tuple[str, ...]) -> None:
    peers = ("A", "B c")
    assert asked_peers(peers, options("", peers=peers).parse_args(given)) == asked


@pytest.mark.parametrize("board", BOARDS)
def test_every_board_with_peers_has_the_option(
    board: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = import_module(f"benchmarks.{board}")
    monkeypatch.setattr(sys, "argv", [board, "--peer", "nobody"])
    with pytest.raises(SystemExit):
        module.main()
    said = capsys.readouterr().err
    assert "argument --peer: invalid choice: 'nobody'" in said
    assert all(name in said for name in (*module.PEERS, "none"))


def test_the_fastest_right_kernel_counts(capsys: pytest.CaptureFixture[str]) -> None:
    times = {1.0: 9.0, 2.0: 7.0, 3.0: 1.0, 4.0: 0.5}  # by what is computed

    def timer(run) -> float:
        return times[float(run()[0])]

    def failing():
        raise RuntimeError("no such kernel")

    computed = {"slow": 1.0, "fast": 2.0, "wrong": 3.0, "not a number": 4.0}
    kernels = {"missing": failing} | {
        name: lambda value=value: lambda: torch.tensor([value]) for name, value in computed.items()
    }

    def error(out: torch.Tensor) -> float:
        return {1.0: 1e-3, 2.0: 2e-3, 3.0: 0.5, 4.0: math.nan}[float(out[0])]

    assert fastest("P", "line", kernels, timer, error, 1e-2) == {
        "P": 7.0,
        "P backend": "fast",
        "P error": 2e-3,
    }
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "line: P, wrong: WRONG, relative error 5.0e-01",
        "line: P, not a number: WRONG, relative error nan",
    ]
    assert printed.err == "line: P, missing: RuntimeError: no such kernel\n"
    assert fastest("P", "line", kernels, timer, lambda out: None, 1e-2)["P"] == 0.5, "nothing to compare with"
    assert fastest("P", "line", {"missing": failing}, timer, error, 1e-2) == {"P": None}
    assert fastest("P", "line", {"P": failing}, timer, error, 1e-2) == {"P": None}
    assert capsys.readouterr().err.splitlines()[-1] == "line: P: RuntimeError: no such kernel"


def expected(batch: Batch) -> torch.Tensor:
    return torch.cat([reference(batch, request) for request in range(len(batch.case.kv_lens))])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ragged", [True, False])
def test_ours_and_dense_peers_compute_the_same(causal: bool, ragged: bool) -> None:
    case = Case("", (37,) * 3, (37,) * 3, 4, 2, 64, 1 if ragged else 16, ragged, causal=causal)
    batch = Batch.make(case, device="cpu")
    assert relative_error(ours(batch).run(), expected(batch)) < LARGEST_ERROR
    if ragged:
        assert relative_error(cudnn(batch)(), expected(batch)) < LARGEST_ERROR


def attend_varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal):
    """FlashAttention-4's function, in torch."""
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert max_seqlen_k == int(cu_seqlens_k.diff().max())
    outs = []
    for i in range(len(cu_seqlens_q) - 1):
        of_q, of_k = (slice(indptr[i], indptr[i + 1]) for indptr in (cu_seqlens_q, cu_seqlens_k))
        heads = (tensor.transpose(0, 1)[None] for tensor in (q[of_q], k[of_k], v[of_k]))
        out = torch.nn.functional.scaled_dot_product_attention(
            *heads, scale=softmax_scale, is_causal=causal, enable_gqa=True
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs), None


@pytest.mark.parametrize("package", ["flash_attn.cute", "vllm.vllm_flash_attn.cute"])
def test_flash_attention_4_of_either_package(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn.cute.interface", "vllm.vllm_flash_attn.cute.interface"):
        found = SimpleNamespace(flash_attn_varlen_func=attend_varlen) if name.startswith(package) else None
        monkeypatch.setitem(sys.modules, name, found)
    batch = Batch.make(Case("", (5, 33), (5, 33), 4, 2, 64, 1, ragged=True), device="cpu")
    assert relative_error(flash_attention_4(batch)(), expected(batch)) < LARGEST_ERROR


def test_pod_of_a_mixed_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    install_peers(monkeypatch)
    batch = Batch.make(Case("", (20, 1, 1), (50, 33, 7), 4, 2, 64), device="cpu")
    assert relative_error(torch.cat(flashinfer_pod(batch)()), expected(batch)) < LARGEST_ERROR
    assert "POD" in peers_of(batch)["FlashInfer"]
    for others in ((1, 1, 1), (20, 2, 1), (20,)):
        lens = tuple(max(50, length) for length in others)
        assert "POD" not in peers_of(Batch.make(Case("", others, lens, 4, 2, 64), device="cpu"))["FlashInfer"]
