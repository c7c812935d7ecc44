"""Runs SGLang's own attention tests (sglang/test/kits/attention_unittest, in its wheel) with this backend:
`python -m integration.sglang_attention_kit`.

Its cases have their own reference. The report counts passed, skipped and failed cases, with the reason of
each that did not pass. A skip also fails the run, since the kit skips a backend that it could not construct.
The run omits the kit's other kinds of layers (MLA, linear attention) and its draft models, which this backend
refuses to serve. One case checks that it refuses drafts that are trees. Without a GPU: `--device cpu`, with
integration/sglang_cpu on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import sys
import traceback
import unittest
from collections.abc import Callable
from functools import partial, wraps
from unittest import mock

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.kits.attention_unittest.attention_methods import dense_attention as dense

from attn_backend.adapters.sglang import register
from attn_backend.adapters.sglang.compat import NAME

HEAD_DIMS = (64, 128, 256)
LAYOUTS = ("contiguous", "shuffled_pages", "interleaved_pages", "non_monotonic_extend")
Case = tuple[str, Callable[[unittest.TestCase], None]]


def dense_cases() -> tuple[dense.DenseAttentionCase, ...]:
    return dense.make_dense_cases(NAME)


def window_cases() -> tuple[dense.DenseAttentionCase, ...]:
    """The kit's extends with a window, and decode steps whose requests are shorter than the window, equal to
    it, and longer.
    """
    decode = [
        dense.DenseAttentionCase(
            f"swa_decode_page_{page_size}",
            NAME,
            ForwardMode.DECODE,
            4,
            2,
            page_size,
            (2, 3, 4, 5, 20),
            sliding_window_size=4,
        )
        for page_size in (1, 16)
    ]
    return (
        *dense.make_swa_no_prefix_input_config_cases(NAME),
        *dense.make_swa_prefix_input_config_cases(NAME),
        *decode,
    )


def verify_cases() -> list[dense.DenseAttentionCase]:
    mode, prefix_lens, draft_lens = ForwardMode.TARGET_VERIFY, (14, 15, 3), (3, 3, 3)
    return [
        dense.DenseAttentionCase(
            f"verify_page_{page_size}_heads_{num_kv_heads}",
            NAME,
            mode,
            4,
            num_kv_heads,
            page_size,
            prefix_lens,
            draft_lens,
        )
        for page_size in (1, 16)
        for num_kv_heads in (4, 2, 1)
    ]


def eager_cases(options: dict[str, object]) -> list[Case]:
    cases: list[Case] = []
    for case in (*dense_cases(), *window_cases()):
        for layout in LAYOUTS:
            if layout == "non_monotonic_extend" and case.page_size > 1:
                # tokens of a page in any order: no paged backend can read that, and no allocator produces it
                continue
            for head_dim in HEAD_DIMS:
                run = partial(
                    dense.run_dense_attention_case, case=case, head_dim=head_dim, loc_layout=layout, **options
                )
                cases.append((f"eager {case.name} {layout} head_dim {head_dim}", run))
    return cases


def graph_cases(options: dict[str, object]) -> list[Case]:
    """The metadata protocol of captured decode steps, including padded requests (the kit runs the kernels
    without capturing them).
    """
    from sglang.test.kits.attention_unittest.runner_modes.cuda_graph_decode_runner import (
        run_dense_cuda_graph_decode_case as run,
    )

    decode = [case for case in (*dense_cases(), *window_cases()) if case.forward_mode.is_decode()]
    return [
        (
            f"graph {case.name}",
            partial(run, case=case, head_dim=64, cuda_graph_capture_batch_size=6, **options),
        )
        for case in decode
    ]


def prefill_graph_cases(options: dict[str, object]) -> list[Case]:
    """Prefills whose attention runs between captured pieces, including padded rows."""
    from sglang.test.kits.attention_unittest.runner_modes.split_op_runner import (
        run_dense_split_op_extend_case as run,
    )

    extends = [case for case in (*dense_cases(), *window_cases()) if case.forward_mode.is_extend()]
    cases: list[Case] = []
    for case in extends:
        for kind in ("breakable", "piecewise"):
            shape = {
                "breakable": kind == "breakable",
                "head_dim": 64,
                "static_num_tokens": case.num_input_tokens + 5,
            }
            cases.append((f"{kind} prefill {case.name}", partial(run, case=case, **shape, **options)))
    return cases


def speculative_cases(options: dict[str, object]) -> list[Case]:
    from sglang.test.kits.attention_unittest.runner_modes import speculative_target_verify_runner as runner

    cases: list[Case] = []
    for case in verify_cases():
        for run in (
            runner.run_dense_spec_verify_case,
            with_contiguous_slots(runner.run_dense_spec_verify_cuda_graph_case),
        ):
            cases.append(
                (f"chain {run.__name__} {case.name}", partial(run, case=case, topk=1, head_dim=64, **options))
            )
            cases.append(
                (
                    f"tree is refused, {run.__name__} {case.name}",
                    partial(expect_refusal, partial(run, case=case, topk=2, head_dim=64, **options)),
                )
            )
    return cases


def with_contiguous_slots(run: Callable[..., None]) -> Callable[..., None]:
    """The kit's captured verify case shuffles its tables' slots, but writes the prefixes to unshuffled slots,
    so only unshuffled tables can pass.
    """
    shuffled = dense.make_loc_fn

    @wraps(run)
    def run_with_contiguous_slots(*args: object, **options: object) -> None:
        with mock.patch.object(dense, "make_loc_fn", lambda layout, **batch: shuffled("contiguous", **batch)):
            run(*args, **options)

    return run_with_contiguous_slots


def expect_refusal(run: Callable[[unittest.TestCase], None], testcase: unittest.TestCase) -> None:
    try:
        run(testcase)
    except ValueError as error:
        if "topk = 2" not in str(error):
            raise
    else:
        testcase.fail("served instead of refused")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtypes", nargs="+", default=["float16", "bfloat16"])
    parser.add_argument("--filter", default="", help="only cases whose name contains this")
    args = parser.parse_args()

    register()
    # a window of w: the query and w tokens before it
    dense._SWA_DECODE_EXTEND_WINDOW = dense._SWA_DECODE_EXTEND_WINDOW | {NAME}
    outcomes: dict[str, list[str]] = {"passed": [], "skipped": [], "failed": []}
    for dtype in args.dtypes:
        options: dict[str, object] = {"device": args.device, "dtype": getattr(torch, dtype)}
        for group in (eager_cases, graph_cases, prefill_graph_cases, speculative_cases):
            try:
                cases = group(options)
            # Without a GPU, the kit's linear attention prevents the import of some of its modules.
            except (ImportError, AttributeError) as error:
                outcomes["skipped"].append(f"{dtype} all of {group.__name__}: {error}")
                continue
            for name, run in cases:
                if args.filter in name:
                    outcome, reason = attempt(run)
                    outcomes[outcome].append(f"{dtype} {name}{': ' if reason else ''}{reason}")
    for outcome in ("skipped", "failed"):
        for line in outcomes[outcome]:
            print(f"{outcome}: {line}")
    print(", ".join(f"{len(lines)} {outcome}" for outcome, lines in outcomes.items()))
    return 1 if outcomes["failed"] or outcomes["skipped"] or not outcomes["passed"] else 0


def attempt(run: Callable[[unittest.TestCase], None]) -> tuple[str, str]:
    testcase = unittest.TestCase()
    try:
        with torch.no_grad():
            run(testcase)
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return (
            "failed",
            f"{type(error).__name__} at {where.filename}:{where.lineno}: "
            f"{' '.join(str(error).split())[:300]}",
        )
    return "passed", ""


if __name__ == "__main__":
    sys.exit(main())
