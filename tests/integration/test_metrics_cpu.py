"""ATTN_BACKEND_METRICS=1: both engines' /metrics show this package's counters, on a CPU."""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PREFIX, OWN, MAX_TOKENS = 512, 8, 128
OPTIONS = {"vllm": [], "sglang": ["--enable-metrics"]}


@pytest.mark.parametrize("name", OPTIONS)
def test_two_requests_that_share_a_prefix(name, need_engine, forked_engines, smollm2, tmp_path):
    need_engine(name)
    from integration.engines import ENGINES, Launch
    from integration.engines.base import OURS
    from integration.http import counter, get_text
    from integration.server import free_port, running_server

    launch = Launch(
        sys.executable,
        smollm2,
        OURS,
        "cpu",
        free_port(),
        "float32",
        max_model_len=1024,
        max_num_seqs=4,
        extra_arguments=OPTIONS[name],
        environment={"ATTN_BACKEND_METRICS": "1"},
    )
    engine, log = ENGINES[name], tmp_path / "server.log"
    shared = [1000 + i % 500 for i in range(PREFIX)]
    with running_server(engine, launch, log, timeout_s=600) as url:

        def ask(request: int) -> None:
            engine.generate(url, shared + [2000 + request] * OWN, MAX_TOKENS, 1)

        def count(which: str, label: str = "") -> int:
            return counter(url, f"attn_backend:{which}_total", label)

        ask(0)
        alone = count("plans"), count("kv_tokens"), count("kv_tokens_read")
        assert alone[0] >= MAX_TOKENS
        assert alone[1] >= MAX_TOKENS * PREFIX
        assert alone[1] == alone[2]  # nothing is shared
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(ask, (1, 2)))
        plans, kv_tokens, read = (
            now - before
            for now, before in zip(
                (count("plans"), count("kv_tokens"), count("kv_tokens_read")), alone, strict=True
            )
        )
        assert plans >= MAX_TOKENS
        # A slow machine may start the second request late: an eighth of the steps is enough.
        assert kv_tokens - read >= MAX_TOKENS // 8 * PREFIX, plans
        assert (kv_tokens - read) % PREFIX == 0
        assert count("rows", 'tile_rows="16"') > 0
        assert count("clamped_plans") == count("refusals") == 0

        print(*re.findall("^.*attn_backend:.*$", get_text(f"{url}/metrics"), re.MULTILINE), sep="\n")

    (start,) = re.findall(r"attn_backend \S+: .* ready in .*", log.read_text(errors="replace"))
    assert re.fullmatch(
        r"attn_backend \S+: cpu kernels \(in the library\), cascade on, batch invariance off, KV float32, "
        r"ready in \d+\.\d\d s\.",
        start,
    )
    assert "exports nothing" not in log.read_text(errors="replace")
