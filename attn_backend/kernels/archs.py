"""The GPU architectures that kernels are built for."""

from __future__ import annotations

from dataclasses import dataclass

SM90, SM80 = "sm_90a", "sm_80"


@dataclass(frozen=True)
class Arch:
    """A build of the kernels.

    Attributes:
        gpus: those that use it, for messages.
        capability: the compute capability of GPUs that run it.
        has_ptx: all newer GPUs run it, too.
        flags: of nvcc, beside those that all have.
        has_clusters: CTAs of a cluster read each other's shared memory.
        has_siblings: there are GPUs of another compute capability with the same major version.
    """

    gpus: str
    capability: tuple[int, int]
    has_ptx: bool
    flags: tuple[str, ...]
    has_clusters: bool
    has_siblings: bool


# The first that a GPU can run is its own.
BUILDS = {
    SM90: Arch(
        "Hopper",
        (9, 0),
        False,
        ("-gencode=arch=compute_90a,code=sm_90a", "-cubin"),
        has_clusters=True,
        has_siblings=False,
    ),
    SM80: Arch(
        "all other GPUs, from Ampere on",
        (8, 0),
        True,
        ("-gencode=arch=compute_80,code=[sm_80,compute_80]", "-fatbin"),
        has_clusters=False,
        has_siblings=True,
    ),
}
ARCHS = tuple(BUILDS)


def runnable_archs(capability: tuple[int, int]) -> tuple[str, ...]:
    """Those that a GPU of this compute capability can run."""
    return tuple(
        name
        for name, arch in BUILDS.items()
        if capability == arch.capability or (arch.has_ptx and capability > arch.capability)
    )
