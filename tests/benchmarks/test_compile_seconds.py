"""The processes that the benchmark of compilations starts."""

from __future__ import annotations

from benchmarks.compile import empty_cache, no_compiler


def test_a_process_says_what_it_found() -> None:
    with empty_cache() as folder:
        seconds, what = no_compiler(folder, None)
        assert not list((folder / "cache").rglob("*.cubin"))
    assert 0 < seconds < 60
    assert what.startswith(
        "RuntimeError: variant soft_cap (attention_sm90_bf16_d128 for sm_90a) cannot be compiled: no nvcc "
        "was found: "
    )
