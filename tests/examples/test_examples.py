"""Each example runs on a CPU with small sizes, and does what it claims."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of that name, found with its imports as `python examples/NAME.py` finds them."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for file in EXAMPLES.glob("*.py"):
        monkeypatch.delitem(sys.modules, file.stem, raising=False)
    return import_module(request.param)


def of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("example", [name], indirect=True)


def alone(engine: ModuleType, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of a prompt: dense attention over the whole text for each token."""
    llama = import_module("llama")
    model = llama.load(None, "cpu")
    tokens = list(prompt)
    for _ in range(count):
        positions = torch.arange(len(tokens))
        angles = positions[:, None] * model.frequencies

        def turned(x: torch.Tensor, angles: torch.Tensor = angles) -> torch.Tensor:
            a, b = x.double().chunk(2, -1)
            cos, sin = angles.cos()[:, None], angles.sin()[:, None]
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        def attend(
            _: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, turned: object = turned
        ) -> torch.Tensor:
            q, k = turned(q), turned(k)  # type: ignore[operator]
            heads = [x.double().transpose(0, 1) for x in (q, k, v)]
            return (
                torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
                .transpose(0, 1)
                .float()
            )

        tokens.append(int(model.forward(torch.tensor(tokens), attend)[-1].argmax()))
    return tokens[len(prompt) :]


@of("engine")
def test_engine_gives_each_request_the_tokens_that_it_gets_alone(example: ModuleType) -> None:
    llama = import_module("llama")
    model = llama.load(None, "cpu")
    # too few pages, rows and request slots for all at once
    engine = example.Engine(model, "cpu", num_pages=24, max_batch=3, max_rows=24)
    common = list(range(70, 110))
    prompts = [[*common, 1, 2], [*common, 3], list(range(9)), [*common[:20], 9], [5], common]
    requests = [example.Request(list(prompt), 6) for prompt in prompts]
    engine.generate(requests)
    assert [request.tokens[len(prompt) :] for request, prompt in zip(requests, prompts, strict=True)] == [
        alone(example, prompt, 6) for prompt in prompts
    ]
    assert set(requests[0].pages[:2]) == set(requests[1].pages[:2]), (
        "the pages of the common prompt are shared"
    )
    assert sorted(engine.free_pages) == list(range(1, 24))
    assert not engine.page_of_prefix


@of("engine")
def test_engine_refuses_a_request_that_never_fits(example: ModuleType) -> None:
    engine = example.Engine(import_module("llama").load(None, "cpu"), "cpu", num_pages=4)
    with pytest.raises(RuntimeError, match="needs more pages than the cache has"):
        engine.generate([example.Request([1] * 100)])


@of("engine")
def test_engine_main(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    texts = example.main(["--device", "cpu", "--max-new-tokens", "2"])
    assert len(texts) == 3
    assert "capital of France" in capsys.readouterr().out


@pytest.mark.slow
@of("streaming_llm")
def test_streaming_cache_stays_constant_and_full_attention_is_its_limit(example: ModuleType) -> None:
    model = import_module("llama").load(None, "cpu")
    tokens = torch.randint(256, (120,)).tolist()
    streams = [example.Stream(model, "cpu", window) for window in (32, 256)]
    small, large = (
        [stream.feed(tokens[begin : begin + 16]) for begin in range(0, 120, 16)] for stream in streams
    )
    assert [(a - b).abs().max() < 1e-4 for a, b in zip(small[:4], large[:4], strict=True)] == [True] * 4, (
        "nothing is dropped yet"
    )
    assert (small[-1] - large[-1]).abs().max() > 1e-2
    assert len(streams[0].pages) == 4
    assert streams[0].pages[0] == 0, "the sinks stay"


@pytest.mark.slow
@of("streaming_llm")
def test_streaming_main(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "loss.svg"
    options = ["--model", "random", "--tokens", "160", "--window", "64", "--plot", str(plot)]
    example.main(["--device", "cpu", *options])
    assert "with sinks" in capsys.readouterr().out
    assert "window only" in plot.read_text()
    rows = example.benchmark(example.SMALL, "cpu", [64], 2)
    assert rows[0][0] == 64
    assert min(rows[0][1:]) > 0


@of("streaming_llm")
def test_streaming_takes_the_real_small_model(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str | None] = []

    def load(name: str | None, device: str) -> None:
        loaded.append(name)
        raise KeyboardInterrupt

    llama = import_module("llama")
    monkeypatch.setattr(llama, "load", load)
    monkeypatch.setenv("ATTN_BACKEND_CACHE", str(tmp_path))
    for arguments in ([], ["--model", "random"]):
        with pytest.raises(KeyboardInterrupt):
            example.main(arguments)
    folder = tmp_path / "models/smollm2-135m-instruct"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    with pytest.raises(KeyboardInterrupt):
        example.main([])
    assert loaded == ["HuggingFaceTB/SmolLM2-135M-Instruct", None, str(folder)]


@of("agent_load")
def test_agents_read_each_context_once(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    agents, contexts, context = 6, 2, 1024
    options = (torch.float32, "cpu")
    load = example.make(example.SMALL, agents, contexts, context, *options)
    assert load.read_once == load.read - (agents - contexts) * context
    shape = example.SMALL
    attention = example.Attention(
        shape.num_qo_heads,
        shape.num_kv_heads,
        shape.head_dim,
        dtype=torch.float32,
        device="cpu",
        max_rows=agents,
        max_batch=agents,
    )
    attention.plan(load.view)
    taken = [node for node in attention.schedule().forest if node.group >= 0]
    assert [node.num_requests for node in taken] == [agents // contexts] * contexts
    assert {node.end_page * example.PAGE_SIZE for node in taken} == {context}
    model = example.DecodeStep(shape, agents, *options)
    off, on = (example.step_of(model, load, agents, cascade, *options)() for cascade in (False, True))
    torch.testing.assert_close(on, off, rtol=1e-4, atol=1e-4)
    times = example.main(["--device", "cpu", "--agents", "6", "--context", "1024"])
    assert min(times) > 0
    assert f"{load.read_once:22,}\n" in capsys.readouterr().out


@of("parallel_generation")
def test_parallel_generation(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    example.main(["--device", "cpu", "-n", "3", "--max-new-tokens", "3"])
    out = capsys.readouterr().out
    assert "3 page tables with " in out
    assert " distinct\n" in out
    rows = example.benchmark(example.SMALL, "cpu", [1, 4], 1, 1024, 16)
    assert [(n, taken) for n, _, _, taken in rows] == [(1, 0), (4, 1)]


@of("page_selection")
def test_page_selection_errs_less_with_more_pages(example: ModuleType) -> None:
    results = example.main(["--device", "cpu", "--tokens", "1024"])
    errors = [error for _, error, _ in results]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.05
    assert errors[-1] < 0.05


@pytest.mark.slow
@of("tree_speculation")
def test_tree_speculation_gives_the_text_of_one_token_at_a_time(example: ModuleType) -> None:
    llama = import_module("llama")
    prompt = [1, 2, 3, 1, 2, 4, 1, 2]
    tokens, calls = example.generate(llama.load(None, "cpu"), "cpu", prompt, 40, depth=4, width=3)
    assert tokens == alone(example, prompt, 40)
    assert calls < 40
    sampled, _ = example.generate(
        llama.load(None, "cpu"), "cpu", prompt, 10, depth=4, width=1, temperature=0.8
    )
    assert len(sampled) == 10


@of("tree_speculation")
def test_a_tree_shares_what_paths_have_in_common(example: ModuleType) -> None:
    tree = example.Tree(7)
    tree.add_path([1, 2])
    tree.add_path([1, 3])
    assert tree.tokens == [7, 1, 2, 3]
    assert tree.parents == [-1, 0, 1, 1]
    assert tree.mask().int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    assert example.accepted_path(tree, [1, 3, 0, 9]) == [0, 1, 3]


@pytest.mark.slow
@of("custom_variant")
def test_custom_variant(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "heads.svg"
    bias, difference, served = example.main(["--device", "cpu", "--steps", "24", "--plot", str(plot)])
    assert "head 3, after learning" in plot.read_text()
    assert example.picture(bias) in capsys.readouterr().out
    seen = example.weights(bias, 12)
    assert [seen[h, 6:].argmax(1).tolist() for h in range(4)] == [
        list(range(5 - h, 11 - h)) for h in range(4)
    ]
    assert bias.argmax(1).tolist() == [1, 2, 3, 4]
    assert difference < 1e-5
    assert served < 1e-5


@pytest.mark.parametrize(
    ("example", "missing", "install"),
    [
        ("transformers_attention", "transformers", "pip install --upgrade transformers"),
        (
            "mini_sglang",
            "minisgl",
            "pip install --upgrade git+https://github.com/sgl-project/mini-sglang",
        ),
        ("engine --model .", "tokenizers", "pip install --upgrade safetensors tokenizers"),
        ("engine --model name/of-hub", "huggingface_hub", "pip install --upgrade huggingface_hub"),
    ],
)
def test_a_missing_package_is_named_with_what_installs_it(example: str, missing: str, install: str) -> None:
    if missing == "huggingface_hub":
        pytest.importorskip("tokenizers", reason="what is imported before huggingface_hub")
        pytest.importorskip("safetensors", reason="what is imported before huggingface_hub")
    name, *arguments = example.split()
    program = (
        f"import runpy, sys; sys.modules[{missing!r}] = None; sys.argv = {[name, *arguments]}; "
        f"runpy.run_path('{name}.py', run_name='__main__')"
    )
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])])
    }
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=EXAMPLES,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert missing in ended.stderr
    assert ended.stderr.endswith(f"{install}\n")


def test_a_model_that_the_hub_does_not_give_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("huggingface_hub", "tokenizers", "safetensors"):
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with pytest.raises(
        SystemExit, match=r"error: --model is 'no name', must be a folder, or a name that the hub gives: "
    ):
        import_module("llama").load("no name", "cpu")
