"""Arguments for a server in one argument (attn_backend/cli/demo.py)."""

from attn_backend.cli.demo import split_arguments


def test_a_command_of_several_lines_may_be_pasted():
    assert split_arguments("--a 1 \\\n    --b='x  y'\\\n --c --lo\\\nng") == [
        "--a",
        "1",
        "--b=x  y",
        "--c",
        "--long",
    ]
