"""The pages of messages: each message that they explain still exists in the package or an engine, and each
message that a user may meet is explained.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from attn_backend import Attention, BSRView, KVCache, PageTable, Variant

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "troubleshooting.md",
    "operate/errors_install.md",
    "operate/errors_kernels.md",
    "operate/errors_pytorch.md",
)
TEXT = "\n".join((ROOT / "docs" / page).read_text() for page in PAGES)
NOT_IN_SOURCES = {
    "CPU FP8 KV cache requires ...",  # SGLang's own
    "invalid choice: 'attn_backend'",  # SGLang's own
    "Backend CUSTOM must be registered before use",  # vLLM's own
    "...: CUDA_ERROR_... (...)",  # the driver's name for an error
}


def attend(
    q_dtype: torch.dtype = torch.float32,
    cache: torch.Tensor | None = None,
    page: int = 0,
    device: str = "cpu",
    stride: int = 1,
    variant: Variant | None = None,
) -> None:
    """A run of one request over two pages of 16 tokens, with one mistake."""
    attention = Attention(
        4, 2, 64, dtype=torch.float32, device=device, max_rows=1, max_batch=1, variant=variant
    )
    attention.plan(
        BSRView(
            torch.tensor([0, 1]),
            PageTable.block_table(torch.tensor([[page, 0]], dtype=torch.int32), torch.tensor([20]), 16),
        )
    )
    q = torch.zeros(1, 4, 64 * stride, dtype=q_dtype)[..., ::stride]
    attention.run(q, KVCache.from_tensor(torch.zeros(2, 2, 16, 2, 64) if cache is None else cache))


# Built from names, values and constraints.
MADE = {
    "q.stride(2) is ..., must be 1": lambda: attend(stride=2),
    "q.dtype is ..., must be ...": lambda: attend(torch.bfloat16),
    "kv.k.dtype is float8_e4m3fn, must be ...": lambda: attend(
        cache=torch.zeros(2, 2, 16, 2, 64).to(torch.float8_e4m3fn)
    ),
    "kv.k.shape is ..., must be [pages, page_size = ..., ...]": lambda: attend(
        cache=torch.zeros(2, 2, 2, 16, 64)
    ),
    "token_scales is False, must be True with kv_dtype=...": lambda: Attention(
        4, 2, 64, kv_dtype="int4", token_scales=False, device="cpu", max_rows=1, max_batch=1
    ),
    "kv_dtype is torch.uint8, must be another one: ...; pass 'int4', ... for bytes of two columns": lambda: (
        Attention(4, 2, 64, kv_dtype=torch.uint8, device="cpu", max_rows=1, max_batch=1)
    ),
    "block_table: page ... of request ... is ..., must be in [0, ...)": lambda: attend(page=9),
    "device is 'cuda', must be 'cpu': torch sees no GPU": lambda: attend(device="cuda"),
    "cpp of <variant ...> has ..., must include no file": lambda: Variant.from_source(
        "#include <cmath>", name="mine"
    ),
    "value of '...' is ..., must be at least of shape [...]": lambda: attend(
        variant=Variant.builtin("alibi", torch.ones(3))
    ),
}


@pytest.mark.parametrize("message", MADE)
def test_a_message_that_is_put_together(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert f"`{message}`" in TEXT
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\.\.", ".*")):
        MADE[message]()


def messages() -> list[str]:
    """Text in backquotes in the first column of the tables."""
    rows = re.findall(r"^\| (.*?) \| ", TEXT, re.MULTILINE)
    return [
        message
        for row in rows
        for message in re.findall(r"`([^`]+)`", row)
        if message not in NOT_IN_SOURCES | set(MADE)
    ]


def said() -> str:
    """The sources, with each message in one piece: no line breaks, no values in between."""
    files = [
        *sorted((ROOT / "attn_backend").rglob("*.py")),
        ROOT / "integration" / "preflight.py",
        *sorted((ROOT / "csrc").rglob("*.cpp")),
        *sorted((ROOT / "csrc").rglob("*.h")),
    ]
    text = "\n".join(file.read_text() for file in files)
    text = re.sub(r'"\s*(<<\s*)?\n?\s*f?"', "", text)
    return text


SAID = said()


def parts(message: str) -> list[str]:
    """The words between the values; values appear as `...` or in capitals."""
    pieces = (piece.strip(" :;,()") for piece in re.split(r"\.\.\.|\b[A-Z]{4,}\b", message))
    return [piece for piece in pieces if len(piece) > 5]


@pytest.mark.parametrize("message", messages())
def test_a_message_is_still_in_the_sources(message: str) -> None:
    missing = [part for part in parts(message) if part not in SAID]
    assert not missing


def test_messages_are_found() -> None:
    assert len(messages()) > 50


# Each has one form: `NAME is VALUE, must be ...`; `... cannot be traced: ...`; `attn_backend does not support
# ...: ...`.
OF_ONE_FORM = {
    "ValueError",
    "AttributeError",
    "TracingError",
    "ExpressionError",
    "error_at_definition",
    "refuse",
}
WITHOUT_A_ROW = {
    "... has the fields ...; got ...": "a mistake in this package",
    "... has the arguments ...; got ...": "a mistake in this package",
    "....... cannot be ...": "a mistake in this package",
    "....apply": "a mistake in this package",
    "append's kernel is not loaded on ...": "a mistake in this package",
    "selected_slots' kernel is not loaded on ...": "a mistake in this package",
    "the variant's Params were not set": "a mistake in this package",
    "a layer's forward was called before init_forward_metadata": "a mistake in SGLang",
    "this release of vLLM lays out the KV cache itself": "vLLM asks only where it does not",
    "flashinfer is an alias of this package": "bench leaves that peer out",
    "is ..., must be at least 1": "an option of the program that builds the kernels",
    # the text after `vLLM's own sampler does: `
    "neither of vLLM's model runners is loaded (..., ...)": "a reason",
    "....... takes (...), known releases take (...)": "a reason",
    "... of ... draws from ... logits are not among the tokens that vLLM leaves, one with ...": "a reason",
    "draws from ... logits change with the batch that they are made in": "a reason",
    "tokens of probabilities ... were drawn with frequencies ...": "a reason",
    "the sampler flags rows of ordinary logits as invalid": "a reason",
    # after a reason and an advice
    "attn_backend: ....... Until then compiled kernels are kept in a private folder instead: ...": "complete",
    # the text before `Attention is slower by a few percent`
    "kernels are used without addresses of their code, since the driver rejects them (...)": "a reason",
    "compiled kernels do not say where their code lies (...: ...)": "a reason",
    "..., and ... cannot be made: ...; ...": "it begins with `compiled kernels cannot be kept in`",
    "... cannot be compiled: ...": "it begins with `variant`",
    "..., which torch cannot allocate: ...": "it begins with `need a workspace of`",
}


def text_of(node: ast.expr) -> str | None:
    """A message with `...` for its values; None if only another function knows it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
    if isinstance(node, ast.BinOp):
        left, right = text_of(node.left), text_of(node.right)
        return None if left is None or right is None else left + right
    return None


def raised() -> Iterator[str]:
    """Messages of errors and warnings in the Python sources."""
    for file in (*sorted((ROOT / "attn_backend").rglob("*.py")), ROOT / "integration" / "preflight.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call) or not call.args:
                continue
            name = ast.unparse(call.func)
            warns = name.rpartition(".")[2].lstrip("_").startswith("warn")
            if not (isinstance(node, ast.Raise) or warns) or name in OF_ONE_FORM:
                continue
            text = text_of(call.args[0])
            if text is not None and re.search("[a-z]{3}", text.replace("attn_backend", "")):
                yield text.strip().splitlines()[0]


def thrown() -> Iterator[str]:
    """Messages of errors in the C++ sources, except ValueError and TypeError, which have one form."""
    for file in sorted((ROOT / "csrc").rglob("*")):
        if file.suffix not in (".cpp", ".h"):
            continue
        for name, streamed in re.findall(r"TVM_FFI_THROW\((\w+)\)\s*<<(.*?);\n", file.read_text(), re.DOTALL):
            if name not in ("ValueError", "TypeError"):
                pieces = (
                    re.findall(r'"((?:[^"\\]|\\.)*)"', piece) or ["..."] for piece in streamed.split("<<")
                )
                text = "".join("".join(piece) for piece in pieces)
                if re.search("[a-z]{3}", text):
                    yield text


ROWS = [parts(message) for message in messages() if parts(message)]


@pytest.mark.parametrize("text", sorted({*raised(), *thrown()} - set(WITHOUT_A_ROW)))
def test_a_message_is_explained(text: str) -> None:
    assert any(all(part in text for part in row) for row in ROWS)


def test_raised_messages_are_found() -> None:
    assert len(set(raised())) > 50
    assert len(set(thrown())) > 6
    assert {*raised(), *thrown()} >= set(WITHOUT_A_ROW)
