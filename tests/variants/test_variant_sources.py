"""Variants in C++: a compiler's errors name the user's lines; combined variants compile."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from compiled_variants import COMPILER, CSRC

from attn_backend.variants import Variant, builtin

pytestmark = pytest.mark.skipif(not COMPILER, reason="needs g++")


def compiler_says(variant: Variant, folder: Path) -> str:
    path = folder / "variant.cpp"
    path.write_text(variant.source)
    done = subprocess.run(
        [COMPILER, "-std=c++17", "-Wall", "-Wextra", "-fsyntax-only", f"-I{CSRC}", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr


MINE = """
  // A bias in the middle of a page.
  ATTN_HD float bias(int32_t head) const { return slopes(head) * factor; }

  float logits(float logit, const ScoreRow& row, int32_t kv_position) const {
    return logit + bias(row.qo_head) * (kv_position % 16 == 8);
  }

  bool mask(ScoreRow const& row, int kv_position) const {
    return kv_position % 3 != 0 || row.index == 0;
  }

  float output(float value, const ScoreRow&, int32_t column) const { return column < 64 ? value : 0.0f; }
"""


def test_hooks_are_found(tmp_path: Path) -> None:
    variant = Variant.from_source(
        MINE, {"slopes": torch.float32, "factor": float}, name="My own!", causal=True, window_left=7
    )
    assert (variant.name, variant.has_logits, variant.has_mask, variant.has_output, variant.uses_softmax) == (
        "my_own",
        True,
        True,
        True,
        True,
    )
    assert (variant.causal, variant.window_left) == (True, 7)
    assert variant.user_sources == {"<variant my_own>": MINE}
    assert variant.reference() is None
    for combined in (
        variant,
        variant & builtin.alibi(torch.ones(4)),
        builtin.soft_cap(3.0) & variant & builtin.sigmoid(),
    ):
        assert not compiler_says(combined, tmp_path)
        assert combined.has_output


def test_errors_name_the_users_line(tmp_path: Path) -> None:
    wrong = MINE.replace("column < 64", "colum < 64")
    for variant in (Variant.from_source(wrong, {"slopes": torch.float32, "factor": float}, name="mine"),):
        for one in (variant, builtin.soft_cap(3.0) & variant):
            line = (
                wrong.splitlines().index(next(text for text in wrong.splitlines() if "colum <" in text)) + 1
            )
            assert f"<variant mine>:{line}:" in compiler_says(one, tmp_path)


def test_errors_after_the_users_lines_are_ours(tmp_path: Path) -> None:
    variant = Variant.from_source(
        "float logits(float logit, const ScoreRow&, int32_t) const { return logit; }", {}, name="mine"
    )
    assert "<generated for variant mine>" in variant.source
    assert not compiler_says(variant, tmp_path)


KEY = "Pair key(Pair x, int32_t, int32_t, const KvToken&) const { return x; }"


@pytest.mark.parametrize(
    ("cpp", "said"),
    [
        ("static constexpr bool kUsesSoftmax = 0;", "kUsesSoftmax must be the literal"),
        (f"#define HOOK key\n{KEY.replace('key', 'HOOK')}", "query(), key() and"),
        (f"#if 0\n{KEY}\n#endif", "query(), key() and"),
    ],
)
def test_what_python_misreads_does_not_compile(cpp: str, said: str, tmp_path: Path) -> None:
    """The host chooses the sizes of a launch by it."""
    logits = "float logits(float logit, const ScoreRow&, int32_t) const { return logit; }"
    variant = Variant.from_source(f"{cpp}\n{logits}", name="mine")
    assert said in compiler_says(variant, tmp_path)
