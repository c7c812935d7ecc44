"""The set-up of servers of `integration.features` on a CPU and on GPUs, apart from a run's own feature, and
the required accuracy of answers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from integration.compare_tokens import Outcome
from integration.features.model import ROUNDED, TOKEN_SCALED

# A last bit can change how a number is rounded to 8 bits. With bfloat16 in the other layers, transformers
# differs from its own float32 with the same rounding: tokens at gaps of up to 0.17, log-probabilities by up
# to 0.24. vLLM also rounds queries, which no reference here does.
ROUNDED_NEAR_TIE = 0.4
ROUNDED_DIFFERENCE = 0.75


@dataclass(frozen=True)
class Device:
    """
    Attributes:
        arguments: of an engine's servers.
        environment: of all servers.
        arguments_of_ranks, environment_of_ranks: additional ones for servers with several ranks.
        near_tie: the largest gap at which answers may differ (natural log); None: all must be equal.
        largest_difference: between a token's log probability and transformers' float32.
    """

    name: str
    dtype: str
    arguments: dict[str, tuple[str, ...]]
    environment: dict[str, str]
    near_tie: float | None
    largest_difference: float
    arguments_of_ranks: tuple[str, ...] = ()
    environment_of_ranks: dict[str, str] = field(default_factory=dict)

    def of(self, asks: tuple[str, ...]) -> Device:
        """The device for the models of a run. Tolerances are larger for 8-bit rounding in models that the
        engines have only in 16 bits.
        """
        rounded = replace(
            self, dtype="bfloat16", near_tie=ROUNDED_NEAR_TIE, largest_difference=ROUNDED_DIFFERENCE
        )
        return rounded if set(asks) & {*ROUNDED, *TOKEN_SCALED} else self

    def holds(self, outcome: Outcome) -> bool:
        parted = all(
            self.near_tie is not None and difference.is_near_tie(self.near_tie)
            for difference in outcome.differences
        )
        return outcome.prompts > 0 and parted and outcome.largest_logprob_difference < self.largest_difference

    def says(self, outcome: Outcome) -> str:
        text = (
            f"{outcome.equal} of {outcome.prompts} answers are equal, log probabilities within "
            f"{outcome.largest_logprob_difference:.1e}"
        )
        if not outcome.differences or self.near_tie is None:
            return text
        wide = [difference for difference in outcome.differences if not difference.is_near_tie(self.near_tie)]
        return (
            f"{text}, "
            f"{f'{len(wide)} part where there is no near tie' if wide else 'the others part at near ties'}"
        )


def _a_core_for_each_rank() -> dict[str, str]:
    """SGLang needs a NUMA node for each rank, or a list of cores."""
    cores = sorted(os.sched_getaffinity(0))
    return {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}


CPU = Device(
    "cpu",
    "float32",
    arguments={"vllm": (), "sglang": ()},
    # Engines with one thread, which share the cores with other processes, and compile nothing.
    environment={"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"},
    near_tie=None,
    # with the adapter, transformers' own float32 differs from its float64 by up to 5e-4; without it by 5e-6
    largest_difference=1e-3,
    environment_of_ranks=_a_core_for_each_rank(),
)
# Several servers share a GPU, so they get a cache size instead of a share of the memory. vLLM's servers may
# use little of it, SGLang's the memory that is left. Decodes use graphs, without torch.compile, which takes
# longer than everything else and needs a C++ compiler.
GPU = Device(
    "cuda",
    "bfloat16",
    arguments={
        "vllm": (
            *("--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(64 << 20)),
            *("--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'),
        ),
        "sglang": (
            *(
                "--mem-fraction-static",
                "0.9",
                "--max-total-tokens",
                "4096",
                "--cuda-graph-max-bs-decode",
                "4",
            ),
            *("--cuda-graph-bs-prefill", "16", "64", "256", "--cuda-graph-max-bs-prefill", "256"),
        ),
    },
    # Without NVLink multicast: a machine may lack it, or the rights to it. Nothing is measured here.
    environment={"NCCL_NVLS_ENABLE": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"},
    # only NCCL: the engines' own all-reduces need the other GPU's memory, which a container may refuse
    arguments_of_ranks=("--disable-custom-all-reduce",),
    # transformers itself in bfloat16 on a CPU differs from its float32 by up to 0.1 (root mean square 0.025),
    # with different tokens at gaps of up to 0.07. If 40 tokens of the context are missing, all answers differ
    # at once, at gaps of 0.07 to 5.
    near_tie=0.1,
    largest_difference=0.25,
)
DEVICES = {device.name: device for device in (CPU, GPU)}
