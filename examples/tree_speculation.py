"""Speculative decoding by hand: one pass of the model verifies guesses as a tree (greedy), or as a chain
(sampled).

    python examples/tree_speculation.py                    # a small random model
    python examples/tree_speculation.py --model HuggingFaceTB/SmolLM2-135M-Instruct
    python examples/tree_speculation.py --temperature 0.8  # a chain, verified by chain_speculative_sampling

The guesses come from the text itself: the tokens that followed earlier occurrences of the last token (prompt
lookup). Several occurrences make a tree. Its root is the last token of the text, and a node sees the text and
its ancestors, which `builtin.tree_mask` encodes in bits. The longest path that the model would have chosen
itself is kept, and its K and V are moved together.
"""

from __future__ import annotations

import argparse

import llama
import torch
from torch import Tensor

from attn_backend import (
    Attention,
    BSRView,
    KVCache,
    PageTable,
    Rotary,
    append_qkv,
    chain_speculative_sampling,
    sample,
    segment_packbits,
)
from attn_backend.variants import builtin

PAGE_SIZE = 16
MAX_NODES = 32


class Tree:
    """Tokens and parents of nodes; node 0 is the last token of the text, and a node comes after its
    parent."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.depths = [root], [-1], [0]

    def add_path(self, tokens: list[int]) -> None:
        """Adds a path from the root; it shares existing nodes."""
        node = 0
        for token in tokens:
            child = next(
                (
                    c
                    for c in range(1, len(self.tokens))
                    if self.parents[c] == node and self.tokens[c] == token
                ),
                None,
            )
            if child is None:
                if len(self.tokens) == MAX_NODES:
                    return
                child = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
                self.depths.append(self.depths[node] + 1)
            node = child

    def mask(self) -> Tensor:
        """bool [nodes, nodes]: a node sees itself and its ancestors."""
        mask = torch.eye(len(self.tokens), dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], 1):
            mask[node] |= mask[parent]
        return mask


def guess(text: list[int], depth: int, width: int) -> Tree:
    """The tree of the tokens that followed the last `width` occurrences of the last token."""
    tree = Tree(text[-1])
    places = [place for place in range(len(text) - 2, -1, -1) if text[place] == text[-1]][:width]
    for place in places:
        tree.add_path(text[place + 1 : place + 1 + depth])
    return tree


class Verifier:
    """The model, and the KV cache of one text: the first `length` slots are its tokens except the last."""

    def __init__(self, model: llama.Llama, device: str, max_tokens: int) -> None:
        self.model, self.device, self.length = model, device, 0
        num_heads, num_kv_heads, head_dim = model.heads
        dtype = model.embedding.dtype
        pages = -(-(max_tokens + MAX_NODES) // PAGE_SIZE)
        self.kv = [
            torch.zeros(pages, 2, PAGE_SIZE, num_kv_heads, head_dim, dtype=dtype, device=device)
            for _ in range(model.num_layers)
        ]
        self.block_table = torch.arange(pages, dtype=torch.int32, device=device)[None]
        self.rotary = Rotary(model.frequencies.float().to(device))
        self.attention = Attention(
            num_heads,
            num_kv_heads,
            head_dim,
            dtype=dtype,
            device=device,
            max_rows=pages * PAGE_SIZE,
            max_batch=1,
            variant=builtin.tree_mask(),
        )

    def logits(self, tree: Tree) -> Tensor:
        """[nodes, vocab].

        Node i's K and V go to slot length + i, rotated for the position given by its depth.
        """
        count = len(tree.tokens)
        bits = tree.mask().flatten()
        packed, indptr = segment_packbits(bits, torch.tensor([0, bits.numel()], dtype=torch.int32), "little")
        mask = {"packed_mask": packed.to(self.device), "mask_indptr": indptr.to(self.device)}
        slots = torch.arange(self.length, self.length + count, device=self.device)
        positions = self.length + torch.tensor(tree.depths, device=self.device)
        kv_lens = torch.tensor([self.length + count], dtype=torch.int32, device=self.device)
        qo_indptr = torch.tensor([0, count], dtype=torch.int32, device=self.device)
        self.attention.plan(
            BSRView(qo_indptr, PageTable.block_table(self.block_table, kv_lens, PAGE_SIZE)), variant_args=mask
        )

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache = KVCache.from_tensor(self.kv[layer])
            append_qkv(q, k, v, cache, slots, rotary=self.rotary, positions=positions)
            return self.attention.run(q, cache, variant_args=mask)

        return self.model.forward(torch.tensor(tree.tokens, device=self.device), attend)

    def prefill(self, tokens: list[int]) -> None:
        """A text is a tree without branches."""
        tree = Tree(tokens[0])
        tree.tokens, tree.parents, tree.depths = (
            tokens,
            list(range(-1, len(tokens) - 1)),
            list(range(len(tokens))),
        )
        self.logits(tree)
        self.length = len(tokens)

    def keep(self, path: list[int]) -> None:
        """Moves K and V of these nodes, which begin with the root, to the end of the text."""
        source = self.length + torch.tensor(path, device=self.device)
        target = self.length + torch.arange(len(path), device=self.device)
        for kv in self.kv:
            kv[target // PAGE_SIZE, :, target % PAGE_SIZE] = kv[source // PAGE_SIZE, :, source % PAGE_SIZE]
        self.length += len(path)


def accepted_path(tree: Tree, choices: list[int]) -> list[int]:
    """The longest path from the root on which each node is the model's choice (choices[node]) after its
    parent."""
    path = [0]
    while True:
        child = next(
            (
                c
                for c in range(1, len(tree.tokens))
                if tree.parents[c] == path[-1] and tree.tokens[c] == choices[path[-1]]
            ),
            None,
        )
        if child is None:
            return path
        path.append(child)


def generate(
    model: llama.Llama,
    device: str,
    prompt: list[int],
    count: int,
    depth: int,
    width: int,
    temperature: float = 0.0,
) -> tuple[list[int], int]:
    """(the next tokens, the number of model calls for them). width 0: no guesses, one token per call."""
    verifier = Verifier(model, device, len(prompt) + count + depth + 1)
    text, calls = list(prompt), 0
    if len(text) > 1:
        verifier.prefill(text[:-1])
    while len(text) < len(prompt) + count:
        tree = guess(text, depth, width if temperature == 0 else min(width, 1))
        logits = verifier.logits(tree)
        calls += 1
        if temperature == 0:
            choices = sample(logits, temperature=0.0).token_ids.tolist()
            path = accepted_path(tree, choices)
            new = [tree.tokens[node] for node in path[1:]] + [choices[path[-1]]]
        else:  # a chain: the nodes are the draft, with certainty
            target = torch.softmax(logits.float() / temperature, -1)[None]
            drafted = torch.tensor([tree.tokens[1:]], dtype=torch.int64, device=device).view(1, -1)
            draft_probs = torch.nn.functional.one_hot(drafted, target.shape[-1]).float().contiguous()
            result = chain_speculative_sampling(
                draft_probs, drafted, target.contiguous(), seed=1, position=len(text)
            )
            new = [token for token in result.token_ids[0].tolist() if token >= 0]
            path = list(range(len(new)))
        verifier.keep(path)
        text += new
    return text[len(prompt) : len(prompt) + count], calls


def main(argv: list[str] | None = None) -> tuple[list[int], int]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or name on the hub; default: small and random")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="tokens to generate (%(default)s)")
    parser.add_argument("--depth", type=int, default=6, help="depth of the draft tree (%(default)s)")
    parser.add_argument("--width", type=int, default=3, help="branches of the draft tree (%(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="above 0, drafts are chains (%(default)s)"
    )
    parser.add_argument(
        "--prompt",
        default="one two three one two four one two three one two four one two",
        help="text to continue (%(default)s)",
    )
    arguments = parser.parse_args(argv)
    device = llama.pick_device(arguments.device)
    model = llama.load(arguments.model, device)
    prompt = model.encode(arguments.prompt)
    tokens, calls = generate(
        model,
        device,
        prompt,
        arguments.max_new_tokens,
        arguments.depth,
        arguments.width,
        arguments.temperature,
    )
    print(f"{arguments.prompt}{model.decode(tokens)}\n")
    print(f"{len(tokens)} tokens with {calls} calls of the model: {len(tokens) / calls:.2f} per call")
    if arguments.model is None and arguments.temperature > 0:
        print("A random model seldom repeats itself when it samples: use --model to see a gain.")
    if arguments.temperature == 0:
        alone, _ = generate(model, device, prompt, arguments.max_new_tokens, arguments.depth, 0)
        print(
            "the same text as without drafts"
            if alone == tokens
            else "a different text without drafts (in 16 bits, near-ties can differ)"
        )
    return tokens, calls


if __name__ == "__main__":
    main()
