"""`python -m release.kernels`: compiles all standard kernels ahead of time, in parallel.

It fails if a source does not compile, if registers spill, or if ptxas serializes wgmma.
"""

from __future__ import annotations

import argparse
import os
import sys

from attn_backend.jit import build, manifest


def distinct_kernels(arch: str) -> dict[str, manifest.Kernel]:
    """The kernels that CI compiles, which has no time for all. A release compiles all (`make wheel`).

    float16 attention differs from bfloat16 only in the element, and the generic design for Hopper equals
    the design for Ampere: of these, CI compiles the plainest kernel. It compiles sinks and ALiBi for the
    narrowest heads, and sampling from float32 for Ampere, from bfloat16 for Hopper.
    """

    def is_distinct(name: str) -> bool:
        shape = manifest.shape_of(name)
        if shape is None:
            return name not in (
                manifest.sampling_name("f16"),
                manifest.sampling_name("f32" if arch == manifest.SM90 else "bf16"),
            )
        own = manifest.default_design(arch, shape.dims).cubins.values()
        is_own = name.startswith(tuple(f"attention_{stem}_" for stem in own))
        is_plain = name.endswith("_standard")
        if (
            shape == manifest.KernelShape(shape.element, manifest.HeadDims.of(128))
            and is_plain
            and arch == manifest.SM90
        ):
            return is_own or shape.element == "bf16"
        return is_own and shape.element != "f16" and (is_plain or shape.dims == manifest.HeadDims.of(64))

    return {name: kernel for name, kernel in manifest.kernels(arch).items() if is_distinct(name)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    build.add_arguments(parser, os.cpu_count() or 1)
    parser.add_argument(
        "--distinct",
        action="store_true",
        help="skip kernels that closely resemble others (distinct_kernels)",
    )
    arguments = parser.parse_args()
    sys.exit(build.run(arguments, distinct_kernels if arguments.distinct else None))


if __name__ == "__main__":
    main()
