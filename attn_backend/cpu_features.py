"""This CPU's instructions as Linux lists them, and the dtype in which engines serve fastest with them."""

from __future__ import annotations

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
BF16_FLAGS = ("avx512_bf16", "amx_bf16")
FIGURES_OF_A_CPU = "The figures are a CPU's: they show that both backends work, not how fast a GPU is."


def cpu_flags() -> frozenset[str]:
    """The flags of the first core, named as in /proc/cpuinfo; empty where the operating system does not list
    them.
    """
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def serving_dtype() -> str:
    """The `--dtype` for an engine on this CPU: "auto", the model's own, or float32, which is several times
    faster on CPUs without bf16 instructions.
    """
    return "auto" if cpu_flags().intersection(BF16_FLAGS) else "float32"


def serving_choice(dtype: str) -> str:
    """One sentence for the user: the dtype and the mode that servers on this CPU run in.

    The engines run eagerly: compiling delays the first answer.
    """
    reason = (
        f" (this CPU has neither {' nor '.join(BF16_FLAGS)})" if dtype == serving_dtype() == "float32" else ""
    )
    name = "the model's dtype" if dtype == "auto" else dtype
    return (
        f"Servers run in {name}{reason} and in eager mode, which gives the first answer sooner. This "
        f"holds for both backends."
    )
