"""`attn-backend plan`: plans a batch on the host and shows the plan: as text, as SVG, as PNG."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

_EXAMPLES = """examples:
  attn-backend plan --decode 64xzipf:4096
  attn-backend plan --shared-prefix 128x8192+256 --svg plan.svg
  attn-backend plan --shared-prefix 16x8x4096+1024+256 --png plan.png
  attn-backend plan --mixed 1x2048@6144+63x4096 --num-ctas 132
  attn-backend plan batch.json                        {"qo_lens": [1, 1], "kv_lens": [64, 70], "block_table": [[0, 1, 2, 3], [0, 1, 2, 3, 4]]}
  attn-backend plan trace.jsonl --batch 32 --at 120   lines of timestamp (ms), input_length, output_length, hash_ids (one for 512 tokens)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLES
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("file", nargs="?", type=Path, help="a batch (.json) or a trace (.jsonl)")
    source.add_argument("--decode", metavar="NxDIST:TOKENS", help="N requests decode; tokens of KV: const, uniform or zipf, with that mean")
    source.add_argument("--prefill", metavar="NxDIST:TOKENS", help="N requests prefill their whole prompts")
    source.add_argument("--shared-prefix", metavar="NxPREFIX+OWN", help="N decodes behind one prefix; AxBxP+Q+OWN: P tokens shared by all A*B, Q by every B")
    source.add_argument("--mixed", metavar="Nx[ROWS@]TOKENS+...", help="N requests of ROWS rows of Q (1) at TOKENS tokens of KV, and so on")
    parser.add_argument("--batch", type=int, default=32, help="requests taken from a trace (%(default)s)")
    parser.add_argument("--at", type=float, default=0.0, metavar="SECONDS", help="time of the trace from which they are taken (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of uniform and zipf")
    parser.add_argument("--heads", metavar="QO/KV", help="query and KV heads (32/8)")
    parser.add_argument("--head-dim", type=int, help="(128)")
    parser.add_argument("--page-size", type=int, help="tokens (16)")
    parser.add_argument("--num-ctas", type=int, help="(132: one for each SM of an H100; with --costs cpu, what a CPU has)")
    parser.add_argument("--costs", choices=("cuda", "cpu"), help="whose tiles and costs (cuda)")
    parser.add_argument("--no-cascade", action="store_true", help="leave shared prefixes alone")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw it")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw it (needs matplotlib)")


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan and draws it where that is asked for; returns the exit status: 2 for what is wrong in the arguments or the files."""
    # Here, so that `attn-backend doctor` can run where torch is missing.
    from .batches import read_batch
    from .plan_picture import draw
    from .planned import Planned, Settings

    try:
        batch = read_batch(arguments)
        planned = Planned.make(batch, Settings.read(arguments, batch))
        print("\n".join(planned.summary()))
        if planned.schedule.forest:
            print("\n" + "\n".join(planned.forest_lines()))
        if arguments.svg or arguments.png:
            picture = draw(planned)
            if arguments.svg:
                arguments.svg.write_text(picture.svg())
                print(f"\nwrote {arguments.svg}")
            if arguments.png:
                try:
                    picture.write_png(arguments.png)
                except ImportError as error:
                    raise ValueError(f"--png: {error}; pip install 'attn-backend[plot]'") from error
                print(f"\nwrote {arguments.png}")
    except (ValueError, OSError) as error:
        print(f"attn-backend plan: {error}", file=sys.stderr)
    except ImportError as error:
        print(f"attn-backend plan: {error}", file=sys.stderr)
    else:
        return 0
    return 2
