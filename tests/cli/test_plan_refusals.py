"""attn-backend plan: errors name the problem. Inputs that are too large are refused before memory is
allocated for them, and large batches are planned in little memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import forked_python
import pytest
from tiers import mostly_slow

from attn_backend.cli import batches
from attn_backend.cli.main import main
from attn_backend.cli.planned import Planned

Capture = pytest.CaptureFixture[str]
GIB = 1 << 30

# Runs main() for each list of arguments, with a limit on the address space beyond its imports; prints how
# much of it all runs took.
LIMITED = """
import contextlib, io, json, resource, sys
memory, batches = int(sys.argv[1]), json.loads(sys.argv[2])
from attn_backend.cli import picture, planned
from attn_backend.cli.main import main
memory += resource.getpagesize() * int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
results = []
for arguments in batches:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main(["plan", *arguments])
    results.append((status, out.getvalue(), err.getvalue()))
# Not ru_maxrss, which begins with that of the process that started this one.
taken = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([results, int(taken) << 10]))
"""


def plan(*batches: list[str], memory: int = 4 * GIB) -> tuple[list[tuple[int, str, str]], int]:
    """The exit status, stdout and stderr for each list of arguments; and bytes of memory.

    Runs in a separate process.
    """
    results, taken = json.loads(
        forked_python.run(LIMITED, [str(memory), json.dumps(batches)], dict(os.environ))
    )
    return results, taken


def write(folder: Path, text: str, name: str = "batch.json") -> Path:
    (folder / name).write_text(text)
    return folder / name


def request(input_length: int, hash_ids: list[object], output_length: int = 20) -> str:
    return json.dumps(
        {"timestamp": 0, "input_length": input_length, "output_length": output_length, "hash_ids": hash_ids}
    )


# Errors name the problem


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--decode", ""], "--decode is '', must be REQUESTSx(const|uniform|zipf):TOKENS"),
        (["--decode", "64"], "--decode is '64', must be REQUESTSx(const|uniform|zipf):TOKENS"),
        (["--decode", "0xconst:5"], "--decode is '0xconst:5', must be of 1 to 8192 requests"),
        (["--prefill", "9xnormal:5"], "--prefill is '9xnormal:5'"),
        (["--decode", "8000xconst:999999999"], "with at most 16777216 pages"),
        (["--shared-prefix", "128x8192"], "--shared-prefix is '128x8192'"),
        (["--shared-prefix", "2x3x8192+1"], "--shared-prefix is '2x3x8192+1'"),
        (["--shared-prefix", "0x8192+1"], "--shared-prefix is '0x8192+1', must be of 1 to"),
        (["--mixed", "1x2@"], "--mixed is '1x2@'"),
        (["--decode", "1xconst:5", "--heads", "32"], "heads is '32', must be QO/KV, as 32/8"),
        (
            ["--decode", "1xconst:5", "--head-dim", "84"],
            "head_dim is 84, must be a multiple of 8 up to 256, 512, or (head_dim, head_dim_v) = (576, 512) "
            "with the costs of a GPU",
        ),
        (["--decode", "2xzipf:5", "--seed", "-1"], "seed is -1, must be at least 0"),
        (["--decode", "1xconst:5", "--heads", "32/5"], "num_qo_heads is 32"),
        (["--decode", "1xconst:5", "--head-dim", "7"], "head_dim is 7"),
        (["--decode", "1xconst:5", "--page-size", "0"], "--page-size is 0"),
        (["--decode", "1xconst:5", "--num-ctas", "0"], "num_ctas is 0"),
        (["--decode", "1xconst:5", "--batch", "4"], "--batch is 4, must be left out"),
        (["batch.json", "--at", "0"], "--at is 0.0, must be left out"),
        (["nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_options_are_named(arguments: list[str], message: str, capsys: Capture) -> None:
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("attn-backend plan: ")
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kv_lens": [1]}, "qo_lens is missing"),
        ({"qo_lens": [1]}, "kv_lens is missing"),
        ({"qo_lens": [], "kv_lens": []}, "qo_lens is []"),
        ({"qo_lens": [1, 1], "kv_lens": [5]}, "len(kv_lens) is 1, must be len(qo_lens) = 2"),
        ({"qo_lens": [1], "kv_lens": [-5]}, "kv_lens[0] is -5"),
        ({"qo_lens": [1.5], "kv_lens": [5]}, "qo_lens[0] is 1.5"),
        ({"qo_lens": 3, "kv_lens": [5]}, "qo_lens is 3"),
        (
            {"qo_lens": [1], "kv_lens": [33], "block_table": [[0, 1]]},
            "kv_lens[0] is 33, must be at most 32: block_table[0] has 2 pages of 16 tokens",
        ),
        (
            {"qo_lens": [1], "kv_lens": [33], "block_table": [[0], [1]]},
            "block_table is [[0], [1]], must be a list of len(kv_lens) = 1 lists",
        ),
        ({"qo_lens": [1], "kv_lens": [3], "block_table": [["a"]]}, "block_table[0][0] is 'a'"),
        ({"qo_lens": [1], "kv_lens": [3], "page_size": 0}, "page_size is 0"),
        ({"qo_lens": [1], "kv_lens": [3], "heads": 32}, "heads is 32"),
        ({"qo_lens": [1], "kv_lens": [3], "head_dim": "x"}, "head_dim is 'x'"),
        ({"qo_lens": [1], "kv_lens": [3], "causal": 1}, "causal is 1"),
        (
            {"qo_lens": [1], "kv_lens": [3], "costs": "cuda"},
            "costs is 'cuda', must be 'hopper', 'generic' or 'cpu'",
        ),
        ({"qo_lens": [1], "kv_len": [3]}, "'kv_len' is unknown; known are page_size, heads, "),
    ],
)
def test_bad_json_is_named(values: dict[str, object], message: str, tmp_path: Path, capsys: Capture) -> None:
    assert main(["plan", str(write(tmp_path, json.dumps(values)))]) == 2
    assert message in capsys.readouterr().err


def test_what_is_no_json_is_named(tmp_path: Path, capsys: Capture) -> None:
    for text, message in (("{", "not JSON"), ("[1]", "must be a JSON object")):
        (tmp_path / "batch.json").write_text(text)
        assert main(["plan", str(tmp_path / "batch.json")]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"timestamp": 0, "input_length": 5, "output_length": 1}, "trace.jsonl:1: hash_ids is missing"),
        (
            json.loads(request(600, [1])),
            "trace.jsonl:1: len(hash_ids) is 1, must be input_length / 512, rounded up: 2",
        ),
        (json.loads(request(600, ["a", "b"])), "trace.jsonl:1: hash_ids[0] is 'a'"),
        (json.loads(request(-1, [])), "trace.jsonl:1: input_length is -1"),
        (json.loads(request(600, [1, 2])), "--at is 100.0"),
    ],
)
def test_bad_traces_are_named(line: dict[str, object], message: str, tmp_path: Path, capsys: Capture) -> None:
    assert main(["plan", str(write(tmp_path, json.dumps(line), "trace.jsonl")), "--at", "100"]) == 2
    assert message in capsys.readouterr().err


def test_page_size_of_a_trace_divides_its_blocks(tmp_path: Path, capsys: Capture) -> None:
    path = write(tmp_path, request(600, [1, 2]), "trace.jsonl")
    assert main(["plan", str(path), "--page-size", "48"]) == 2
    assert "page_size is 48, must be a divisor of 512" in capsys.readouterr().err
    assert main(["plan", str(path), "--batch", "0"]) == 2
    assert "--batch is 0" in capsys.readouterr().err


# Inputs that are too large


MOST = 2**31 - 1
TOO_LARGE = {
    "tokens": (
        {"qo_lens": [1], "kv_lens": [MOST]},
        "pages of kv_lens is 134217728, must be at most 16777216, of 16 tokens each",
    ),
    "pages of one token": (
        {"qo_lens": [1], "kv_lens": [MOST], "page_size": 1},
        "pages of kv_lens is 2147483647",
    ),
    "tokens together": ({"qo_lens": [1] * 1000, "kv_lens": [1 << 20] * 1000}, "pages of kv_lens is 65536000"),
    "rows": (
        {"qo_lens": [MOST], "kv_lens": [100]},
        "sum(qo_lens) is 2147483647, must be at most 4194304 with 32 query heads",
    ),
    "rows together": (
        {"qo_lens": [1 << 20] * 5, "kv_lens": [100] * 5, "heads": "64/8"},
        "sum(qo_lens) is 5242880, must be at most 2097152 with 64 query",
    ),
    "requests": (
        {"qo_lens": [1] * 8193, "kv_lens": [1] * 8193},
        "len(qo_lens) is 8193, must be at most 8192",
    ),
    "heads": (
        {"qo_lens": [1], "kv_lens": [1], "heads": "4294967296/4294967296"},
        "heads is '4294967296/4294967296', must be QO/KV",
    ),
    "more heads": (
        {"qo_lens": [1], "kv_lens": [1], "heads": "257/1"},
        "heads is '257/1', must be of 1 to 256 each",
    ),
    "no heads": (
        {"qo_lens": [1], "kv_lens": [1], "heads": "0/0"},
        "heads is '0/0', must be of 1 to 256 each",
    ),
    "window": (
        {"qo_lens": [1], "kv_lens": [1], "window_left": 10**30},
        "window_left is 1000000000000000000000000000000, must be less than 2147483648",
    ),
    "CTAs": ({"qo_lens": [1], "kv_lens": [1], "num_ctas": 10**12}, "num_ctas is 1000000000000"),
}


TRACES_TOO_LARGE = {
    "one run": (
        [request(5000, [[0, MOST]])],
        "trace.jsonl:1: len(hash_ids) is 2147483647, must be input_length / 512, rounded up: 10",
    ),
    "many runs": ([request(5000, [[0, MOST]] * 100)], "trace.jsonl:1: len(hash_ids) is 214748364700"),
    "input": (
        [request(MOST, [[0, 1 << 22]])],
        "--batch is 32, must be of 1 to 8192 requests with at most 16777216 pages of 16 tokens together",
    ),
    "output": ([request(5000, [[0, 10]], MOST)], "--batch is 32"),
    "lines": ([request(MOST, [])] + [request(MOST, [[0, 1 << 22]])] * 9, "trace.jsonl:1: len(hash_ids) is 0"),
}


@pytest.mark.slow
def test_what_is_too_large_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    files, messages = [], []
    for name, (values, message) in TOO_LARGE.items():
        files.append(write(tmp_path, json.dumps(values), f"{name}.json"))
        messages.append(message)
    for name, (lines, message) in TRACES_TOO_LARGE.items():
        (tmp_path / name).mkdir()
        files.append(write(tmp_path / name, "\n".join(lines), "trace.jsonl"))
        messages.append(message)
    (tmp_path / "endless.jsonl").symlink_to("/dev/zero")
    files.append(tmp_path / "endless.jsonl")
    messages.append("endless.jsonl:1: longer than 268435456 characters")
    results, taken = plan(*([str(file)] for file in files))
    for (status, out, err), message, file in zip(results, messages, files, strict=True):
        assert (status, out) == (2, ""), file
        assert err.startswith("attn-backend plan: ")
        assert message in err
        assert err.count("\n") == 1
    assert taken < GIB


def test_a_trace_has_so_many_hash_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(batches, "MAX_HASH_IDS", 25)
    path = write(tmp_path, "\n".join([request(5000, [[0, 10]])] * 3), "trace.jsonl")
    assert main(["plan", str(path)]) == 2
    assert (
        "trace.jsonl:3: input_length is 5000, must be smaller: a trace may have 25 blocks of 512 tokens "
        "together" in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["batch.json", "trace.jsonl"])
def test_what_is_nested_deeply_is_named(name: str, tmp_path: Path, capsys: Capture) -> None:
    for text in ("[" * 100_000, '{"qo_lens": ' + "[" * 100_000 + "]" * 100_000 + "}"):
        assert main(["plan", str(write(tmp_path, text, name))]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"attn-backend plan: {tmp_path / name}")
        assert err.endswith(": nested too deeply\n")


def test_files_without_an_end_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    monkeypatch.setattr(batches, "MAX_TEXT", 1000)
    assert main(["plan", "/dev/zero"]) == 2
    assert capsys.readouterr().err == "attn-backend plan: /dev/zero: longer than 1000 characters\n"
    path = write(tmp_path, request(5000, [[0, 10]]) + "\n" + " " * 2000, "trace.jsonl")
    assert main(["plan", str(path)]) == 2
    assert capsys.readouterr().err == f"attn-backend plan: {path}:2: longer than 1000 characters\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "batch.json: not JSON: "),
        (b'{"qo_lens": [' + b"9" * 5000 + b"]}", "batch.json: not JSON: Exceeds the limit"),
    ],
)
def test_what_is_no_text_or_no_number_is_named(
    content: bytes, message: str, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "batch.json").write_bytes(content)
    assert main(["plan", str(tmp_path / "batch.json")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--decode", f"1xconst:{10**12}", "--page-size", "1000000"],
            "kv_lens[0] is 1000000000000, must be below 2^31",
        ),
        (["--mixed", f"1x{2**32}@5"], "qo_lens[0] is 4294967296, must be below 2^31"),
        (["--decode", f"1xconst:{'9' * 5000}"], "--decode is '1xconst:999"),
        (["--mixed", f"{'9' * 5000}x1"], "--mixed is '999"),
        (["--shared-prefix", "1x" * 65 + "1+" * 65 + "1"], "--shared-prefix is '1x1x"),
        (
            ["--shared-prefix", "100000x100000x1+1+1"],
            "--shared-prefix is '100000x100000x1+1+1', must be of 1 to 8192",
        ),
    ],
)
def test_options_that_are_too_large_are_named(arguments: list[str], message: str, capsys: Capture) -> None:
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("beside", mostly_slow([16, 96, 160], fast=1))
def test_no_memory_is_a_message(beside: int, tmp_path: Path) -> None:
    """Wherever it ends."""
    [(status, _, err)], _ = plan(
        ["--decode", "1024xconst:131072", "--svg", str(tmp_path / "plan.svg")], memory=beside << 20
    )
    assert (status, err) == (2, "attn-backend plan: there is not enough memory for this batch\n")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "there is not enough memory for this batch"),
        (RecursionError("maximum recursion depth exceeded"), "batch.json is nested too deeply"),
    ],
)
def test_what_python_has_no_room_for_is_a_message(
    error: Exception, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(Planned, "make", fails_with(error))
    assert main(["plan", str(write(tmp_path, '{"qo_lens": [1], "kv_lens": [1]}'))]) == 2
    assert capsys.readouterr().err.endswith(f"{message}\n")


def test_a_runtime_error_that_is_not_of_memory_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planned, "make", fails_with(RuntimeError("a fault in the program")))
    with pytest.raises(RuntimeError, match="a fault in the program"):
        main(["plan", "--decode", "1xconst:1"])


def fails_with(error: Exception) -> Callable[..., None]:
    def fails(*arguments: object) -> None:
        raise error

    return fails


# Large batches


def test_large_batches_take_little_memory() -> None:
    """A block table as wide as the longest request of the second batch would have 8192 x 6250000 entries."""
    results, taken = plan(
        ["--decode", "1024xconst:131072"], ["--mixed", "8191x16+1x100000000"], memory=2 * GIB
    )
    assert [(status, err) for status, _, err in results] == [(0, "")] * 2
    assert "1024 requests, 1024 rows of Q, 134217728 tokens of KV in 8388608 pages of 16" in results[0][1]
    assert "8192 requests, 8192 rows of Q, 100131056 tokens of KV" in results[1][1]
    assert taken < GIB


@pytest.mark.slow
def test_1024_requests_of_128k_tokens_with_a_block_table(tmp_path: Path) -> None:
    table = [
        list(range(8192)),
        *(list(range(4096)) + list(range(n * 4096, (n + 1) * 4096)) for n in range(2, 1025)),
    ]
    path = write(
        tmp_path, json.dumps({"qo_lens": [1] * 1024, "kv_lens": [131072] * 1024, "block_table": table})
    )
    [(status, out, err)], _ = plan([str(path)], memory=2 * GIB)
    assert (status, err) == (0, "")
    assert "0 - 4096" in out
    assert "taken: row group 1024" in out


def test_members_of_a_long_prefix_among_short_ones() -> None:
    kv_lens = [1 << 20] * 2 + [4096] * 300
    long = batches.shared_prefix("2x1048000+576", 16).block_table
    short = [row + (1 << 20) for row in batches.shared_prefix("300x4000+96", 16).block_table]
    planned = Planned.make(batches.Batch("", [1] * 302, kv_lens, [*long, *short], 16), batches.PlanOptions())
    assert sorted(planned.members) == [[0, 1], list(range(2, 302))]
