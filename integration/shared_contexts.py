"""Prompts that begin with one of several long contexts: agents that work on the same repository, and
questions about documents.

An agent's later turns repeat its earlier ones and their answers, as a chat API does. A client cannot send an
answer back, so the repeated answer is a text of the same length. Turns are sent in rounds: the first of every
agent, then the second of every agent. With --max-concurrency as large as the number of agents, a turn begins
about when the agent's last one has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from integration.text import TextMaker
from integration.workload import Prompt, ShareGPT, Workload


@dataclass(frozen=True)
class SharedContexts(Workload):
    """Prompt i begins with context `of_prompt[i]`, and continues the turns of conversation `talks[i]`.

    context_lens: tokens of each context, including those that the tokenizer adds. own_lens, output_lens:
    tokens of each prompt's own part and answer. None: the turns in `sharegpt`, with answers of `output_len`
    tokens, or as long as the recorded ones.
    """

    context_lens: list[int]
    of_prompt: list[int]
    talks: list[int]
    own_lens: list[int] | None
    output_lens: list[int] | None
    max_model_len: int
    sharegpt: Path | None = None
    output_len: int | None = None

    def prompts(self, seed: int) -> list[Prompt]:
        maker = TextMaker(self.model_folder, seed)
        contexts = [maker.text(max(length - maker.special_tokens, 0)) for length in self.context_lens]
        history = [""] * (max(self.talks) + 1)
        prompts = []
        turns = self._turns(maker, seed)
        for context, talk, turn in zip(self.of_prompt, self.talks, turns, strict=True):
            text = contexts[context] + history[talk] + turn.text
            history[talk] += turn.text + maker.text(turn.output_len)
            prompts.append(Prompt(text, turn.output_len, turn.answer))
        self._check_lengths(maker, prompts)
        return prompts

    def _turns(self, maker: TextMaker, seed: int) -> list[Prompt]:
        """Each prompt's own part."""
        if self.own_lens is None or self.output_lens is None:
            if self.sharegpt is None:
                raise ValueError("own_lens: missing, and there are no conversations")
            recorded = ShareGPT(
                self.num_prompts, 1, self.description, self.model_folder, self.sharegpt, self.output_len
            )
            # a text of TextMaker begins with a space
            return [replace(turn, text=f"\n\n{turn.text}") for turn in recorded.prompts(seed)]
        return [
            Prompt(maker.text(own), output, maker.text(max(output - maker.special_tokens, 1)))
            for own, output in zip(self.own_lens, self.output_lens, strict=True)
        ]

    def _check_lengths(self, maker: TextMaker, prompts: list[Prompt]) -> None:
        longest = max(prompts, key=lambda prompt: len(prompt.text))
        total = maker.count(longest.text) + longest.output_len
        if total > self.max_model_len:
            raise ValueError(
                f"max-model-len: {self.max_model_len}, but the longest prompt and its answer have {total} "
                f"tokens"
            )


def agents(contexts: int, turns: int, num_prompts: int) -> tuple[list[int], list[int]]:
    """(context, agent) of each prompt, in rounds. Raises ValueError unless the turns are whole."""
    num_agents = _whole(num_prompts, turns, "turns of an agent")
    talks = [agent for _ in range(turns) for agent in range(num_agents)]
    return [agent % contexts for agent in talks], talks


def documents(questions: int, num_prompts: int) -> tuple[list[int], list[int]]:
    """(document, conversation) of each prompt: the questions about a document are neighbors, and none repeats
    another.
    """
    num_documents = _whole(num_prompts, questions, "questions to a document")
    of_prompt = [document for document in range(num_documents) for _ in range(questions)]
    return of_prompt, list(range(num_prompts))


def _whole(num_prompts: int, each: int, what: str) -> int:
    if num_prompts % each:
        raise ValueError(f"num-prompts: {num_prompts}, must be a multiple of {each}, the {what}")
    return num_prompts // each
