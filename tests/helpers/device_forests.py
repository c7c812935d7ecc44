"""Random batches with rows in several row groups, for attention kernels on a CPU (device_attention.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import forests
import numpy
import torch
from compositions import Shape
from device_attention import DeviceAttention

from attn_backend import Variant

CPU = torch.device("cpu")
# dtype and head_dim of the cases of a test, in turn.
FORMS = ((torch.bfloat16, 64), (torch.float16, 128), (torch.bfloat16, 256))


def random_shape(rng: numpy.random.Generator, number: int) -> Shape:
    dtype, head_dim = FORMS[number % 3]
    sizes = {
        "num_kv_heads": int(rng.integers(1, 3)),
        "group_size": int(rng.choice([1, 2, 3, 4])),
        "page_size": int(rng.choice([1, 3, 16, 64])),
    }
    return Shape(
        **sizes,
        head_dim=head_dim,
        dtype=dtype,
        num_ctas=int(rng.choice([2, 7, 19])),
        logits_soft_cap=float(rng.choice([0, 20])),
    )


def batch_for(
    rng: numpy.random.Generator, shape: Shape, seed: int, options: dict[str, object]
) -> forests.Batch:
    """A random batch; the first of a batch invariant plan has requests that are split into chunks."""
    if seed > 0 or options != {"batch_invariant": True}:
        cost = shape.num_kv_heads * shape.head_dim * 16
        return forests.random_batch(
            rng, shape.page_size, kv_cost=cost, budget=1e7, max_requests=24, max_rows=80
        )
    kv_lens = [1700, 40, 2900]
    counts = [-(-length // shape.page_size) for length in kv_lens]
    free = iter(rng.permutation(sum(counts)).tolist())
    return forests.Batch(
        shape.page_size,
        [1, 2, 1],
        kv_lens,
        [[next(free) for _ in range(count)] for count in counts],
        sum(counts),
    )


def run_forest(
    folder: Path,
    kernel: str,
    rng: numpy.random.Generator,
    shape: Shape,
    seed: int,
    options: dict[str, object],
    variant: str | Variant = "sinks",
    **arguments: Any,
) -> tuple[forests.Problem, int]:
    """Rows that `plan` itself puts into several row groups: shared prefixes, and the chunks of a batch
    invariant plan.

    Args:
        folder, kernel, seed, variant: as of DeviceAttention.
        options: of Attention.
        arguments: of its run.

    Returns:
        The problem with its results, and the number of rows that are in several row groups.
    """
    batch = batch_for(rng, shape, seed, options)
    problem = forests.make_problem(rng, shape, batch, CPU)
    of_variant = {"variant": variant} if isinstance(variant, Variant) else {}
    attention = DeviceAttention(
        folder, problem.attention(kernel=kernel, **options, **of_variant), kernel, seed, variant
    )
    problem.run(attention, batch.view(rng, CPU), **arguments)  # type: ignore[arg-type]
    return problem, attention.schedule().links.shape[1]
