"""What servers of `integration.features` have on a CPU and on GPUs, besides what a run is about, and how near
their answers must be.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from integration.compare_tokens import Outcome
from integration.features.model import ROUNDED

# A last bit decides how a number is rounded to 8 bits. With what bfloat16 does to the layers around it,
# transformers parts from its own float32 with the same roundings at gaps of up to 0.17, and is up to 0.24
# away; vLLM rounds queries besides, which no reference here does.
ROUNDED_NEAR_TIE = 0.4
ROUNDED_DIFFERENCE = 0.75


@dataclass(frozen=True)
class Device:
    """
    Attributes:
        arguments: of an engine's servers.
        environment: of all servers.
        arguments_of_ranks, environment_of_ranks: further ones, of servers of several ranks.
        near_tie: the largest gap of one, where answers may part (natural log); None: all must be equal.
        largest_difference: of a token's log probability from transformers' float32.
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
        """The device for the models that a run asks: with more room where numbers are rounded to 8 bits, in
        models that the engines have in 16 bits alone.
        """
        rounded = replace(
            self, dtype="bfloat16", near_tie=ROUNDED_NEAR_TIE, largest_difference=ROUNDED_DIFFERENCE
        )
        return rounded if set(asks) & set(ROUNDED) else self

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
    """SGLang wants a NUMA node for each rank, or to be told which cores."""
    cores = sorted(os.sched_getaffinity(0))
    return {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}


CPU = Device(
    "cpu",
    "float32",
    arguments={"vllm": (), "sglang": ()},
    # Engines of one thread, which other processes may share the cores with, and which compile nothing.
    environment={"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"},
    near_tie=None,
    # with the adapter, transformers' own float32 is up to 5e-4 away from its float64; without it 5e-6
    largest_difference=1e-3,
    environment_of_ranks=_a_core_for_each_rank(),
)
# Several servers share a GPU: the size of a cache is given, not the share of the memory, of which each engine
# is told to be content with little (vLLM), or with what is there (SGLang). Graphs of decodes, and nothing
# that torch.compile makes, which takes longer than all else and wants a C++ compiler.
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
    # Without NVLink multicast, which a machine may lack, or the rights to it; nothing is measured here.
    environment={"NCCL_NVLS_ENABLE": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"},
    # NCCL alone: the engines' own all-reduces want memory of the other GPU, which a container may refuse
    arguments_of_ranks=("--disable-custom-all-reduce",),
    # transformers itself in bfloat16 on a CPU is up to 0.1 away from its float32 (root mean square 0.025),
    # and parts from it at gaps of up to 0.07; where
    # 40 tokens of the context are missing, all answers part at once, at gaps of 0.07 to 5.
    near_tie=0.1,
    largest_difference=0.25,
)
DEVICES = {device.name: device for device in (CPU, GPU)}
