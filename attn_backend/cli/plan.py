"""`attn-backend plan`: plans a batch on the host and shows the plan as text or as a picture."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from ..jit.manifest import DESIGNS
from .console import explained, print_table

EPILOG = """examples:
  attn-backend plan --decode 64xzipf:4096
  attn-backend plan --shared-prefix 128x8192+256 --svg plan.svg
  attn-backend plan --shared-prefix 16x8x4096+1024+256 --png plan.png
  attn-backend plan --mixed 1x2048@6144+63x4096 --num-ctas 132
  attn-backend plan batch.json
  attn-backend plan trace.jsonl --batch 32 --at 120

a batch (.json): one object, for instance
  {"qo_lens": [1, 1], "kv_lens": [64, 70], "block_table": [[0, 1, 2, 3], [0, 1, 2, 3, 4]]}
  qo_lens       rows of Q of each request
  kv_lens       tokens of KV of each request, including its own rows
  block_table   page ids of each request, at least as many as its tokens need; equal ids are the same page
                (without it no page is shared)
  page_size     tokens (16)
  heads         "QO/KV", query and KV heads ("32/8")
  head_dim      (128)
  head_dim_v    columns of a head of V (head_dim)
  num_ctas      (132; with the costs of a "cpu" 32: tasks that its threads share, the same number on every
                CPU)
  costs         tiles and costs to use: GPU kernel "hopper" or "generic", or "cpu" ("hopper")
  causal        true: a row sees the tokens up to its position; false: all (true)
  window_left   how many tokens before its position a row sees; -1: no limit (-1)
  cascade       true: read shared prefixes once if it pays; "always": if they fit; false: never (true)
  batch_invariant  true: a request's parts depend only on the request (false)
  Options override the file's page_size, heads, head_dim, num_ctas and costs.
  ATTN_BACKEND_DUMP writes such files, with wrong values as they were. The command refuses them by name.

a trace (.jsonl), in Mooncake's format: one object per line, in order of arrival
  timestamp       ms
  input_length    tokens of the prompt
  output_length   generated tokens; the plan is for a request that has half of them
  hash_ids        one id per 512 tokens of the prompt, rounded up; equal ids: equal tokens after equal
                  prefixes; [first, count] is a run of ids

limits: 8192 requests; 2^24 pages; 2^27 rows of Q times query heads; 256 heads

output: the batch, its row groups and row tiles, and the KV tokens read per KV head. Each row group reads its
  tokens once. Then the total cost and the cost of the busiest CTA, in the planner's units, not in time. Last
  the forest of shared prefixes: savings, costs and the decision for each node. Nodes are listed below their
  parents.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("file", nargs="?", type=Path, help="a batch (.json) or a trace (.jsonl)")
    source.add_argument(
        "--decode",
        metavar="NxDIST:TOKENS",
        help="N decodes; KV lengths: const: TOKENS; uniform: TOKENS/2 to TOKENS; zipf: mean TOKENS",
    )
    source.add_argument(
        "--prefill",
        metavar="NxDIST:TOKENS",
        help="N prefills of whole prompts, with lengths as for --decode",
    )
    source.add_argument(
        "--shared-prefix",
        metavar="NxPREFIX+OWN",
        help="N decodes that share a prefix; AxBxP+Q+OWN: all A*B share P tokens, each group of B shares Q",
    )
    source.add_argument(
        "--mixed",
        metavar="Nx[ROWS@]TOKENS+...",
        help="N requests with ROWS rows of Q (1) and TOKENS tokens of KV, and so on",
    )
    parser.add_argument("--batch", type=int, help="number of requests from a trace (32)")
    parser.add_argument("--at", type=float, metavar="SECONDS", help="start time in the trace (0)")
    parser.add_argument("--seed", type=int, default=0, help="seed of uniform and zipf (%(default)s)")
    parser.add_argument("--heads", metavar="QO/KV", help="query and KV heads (32/8)")
    parser.add_argument("--head-dim", type=int, help="head dimension (128)")
    parser.add_argument("--page-size", type=int, help="tokens per page (16)")
    parser.add_argument(
        "--num-ctas",
        type=int,
        help="number of CTAs (132: one per SM of an H100; with --costs cpu 32 tasks, on every CPU)",
    )
    parser.add_argument(
        "--costs",
        choices=(*DESIGNS, "cpu"),
        help="tiles and costs of this GPU kernel, or of a CPU (hopper)",
    )
    parser.add_argument("--no-cascade", action="store_true", help="do not look for shared prefixes")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the plan (needs matplotlib)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the plan (needs matplotlib)")


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan, and draws it if requested. Returns the exit status: 2 for an error in the arguments or
    files.
    """
    try:
        # Imported here, so that `attn-backend doctor` runs without torch.
        from .batches import read_batch
        from .planned import FOREST_COLUMNS, Planned, read_options

        _check_outputs(arguments)
        batch = read_batch(arguments)
        planned = Planned.make(batch, read_options(arguments, batch))
        print_table(planned.summary())
        if batch.fault:
            print(f"\nwritten because it was {batch.fault}")
        if planned.schedule.forest:
            print()
            print_table(planned.forest_rows(), FOREST_COLUMNS, right=(1, 2, 3, 4))
            if rest := planned.forest_rest():
                print(rest)
        if arguments.svg or arguments.png:
            from .picture import draw_plan, write

            figure = draw_plan(planned)
            for form in ("svg", "png"):
                if path := getattr(arguments, form):
                    write(figure, path, form)
                    print(f"\nwrote {path}")
    except (ValueError, OSError, ImportError) as error:
        return _refused(explained(error))
    except RecursionError:
        return _refused(f"{arguments.file} is nested too deeply")
    except (MemoryError, RuntimeError) as error:
        # torch and C++ raise it when memory is short
        if isinstance(error, RuntimeError) and "alloc" not in str(error):
            raise
        return _refused("there is not enough memory for this batch")
    return 0


def _refused(text: str) -> int:
    print(f"attn-backend plan: {text}", file=sys.stderr)
    return 2


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Refuses pictures that cannot be written, before planning."""
    from ..validation import require

    for option, path in (("--svg", arguments.svg), ("--png", arguments.png)):
        if path:
            require(
                not path.is_dir() and path.parent.is_dir(),
                option,
                str(path),
                "a file in a folder that exists",
            )
            check_matplotlib(option)


def check_matplotlib(option: str) -> None:
    """Refuses a drawing option if matplotlib is missing."""
    try:
        import_module("matplotlib.backends.backend_agg")
    except ImportError as error:
        raise ValueError(f"{option}: {error}; pip install 'attn-backend[plot]'") from error
