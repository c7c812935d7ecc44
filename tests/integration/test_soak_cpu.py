"""A short soak of both engines on a CPU: no errors, preempted and aborted requests, JSON by a schema, and the
same texts when requested again one at a time.
"""

from __future__ import annotations

import pytest


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("engine_name", ["vllm", "sglang"])
def test_a_server_holds_out(engine_name, need_engine, smollm2, tmp_path, capsys):
    need_engine(engine_name)
    from integration import soak

    arguments = [
        "--engine",
        engine_name,
        "--device",
        "cpu",
        "--minutes",
        "0.5",
        "--warm-up",
        "15",
        "--sample-every",
        "1",
        "--replay-every",
        "8",
    ]
    assert soak.run(soak.parse_arguments([*arguments, "--results", str(tmp_path)])), capsys.readouterr().out
