"""What is asked of the server: conversations of one or more turns, the same for the same seed.

Prompts are indices into a vocabulary (`Vocabulary`); lengths are in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.bench.report import count
from penstock.bench.serve.vocabulary import Indices
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: what is new in it, and how long an answer it asks for."""

    prompt: Indices  # [N]; a later turn's comes behind the conversation so far
    output_len: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow each other; most workloads have one."""

    turns: tuple[Turn, ...]
    arrival_s: float | None = None  # where a trace says when


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations in the order in which they arrive."""

    name: str
    conversations: tuple[Conversation, ...]
    settings: dict[str, Any]
    remarks: tuple[str, ...] = ()  # what a trace lost on the way

    @property
    def num_requests(self) -> int:
        """Turns of all conversations."""
        return sum(len(c.turns) for c in self.conversations)

    @property
    def is_timed(self) -> bool:
        """Whether it brings its own arrival times."""
        return bool(self.conversations) and self.conversations[0].arrival_s is not None

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens of the longest conversation at its end: (of its prompts, of its answers)."""
        return max(
            (
                (sum(len(t.prompt) for t in c.turns), sum(t.output_len for t in c.turns))
                for c in self.conversations
            ),
            key=sum,
        )


@dataclass(frozen=True, slots=True)
class Lengths:
    """Uniform in [mean · (1 − ratio), mean · (1 + ratio)], as in vLLM's random data."""

    mean: int
    ratio: float = 0.0

    def draw(self, generator: np.random.Generator, number: int) -> list[int]:
        """`number` lengths, none below 1."""
        low = max(1, int(np.floor(self.mean * (1 - self.ratio))))
        high = max(low, int(np.ceil(self.mean * (1 + self.ratio))))
        lengths: list[int] = generator.integers(low, high, number, endpoint=True).tolist()
        return lengths


def tokens(generator: np.random.Generator, vocab_size: int, length: int) -> Indices:
    """Random indices [length]."""
    return generator.integers(0, vocab_size, length, dtype=np.int32)


def random_prompts(
    number: int, inputs: Lengths, outputs: Lengths, *, vocab_size: int, seed: int
) -> Workload:
    """Prompts that share nothing."""
    lengths, contents = _generators(seed, "random")
    ins, outs = inputs.draw(lengths, number), outputs.draw(lengths, number)
    return Workload(
        "random",
        tuple(
            Conversation((Turn(tokens(contents, vocab_size, i), o),))
            for i, o in zip(ins, outs, strict=True)
        ),
        {"input_len": inputs.mean, "output_len": outputs.mean, "range_ratio": inputs.ratio},
    )


def shared_prefix(
    number: int,
    *,
    num_groups: int,
    prefix_len: int,
    suffix_len: int,
    outputs: Lengths,
    vocab_size: int,
    seed: int,
) -> Workload:
    """Groups whose prompts begin alike, as under a few system prompts, in random order."""
    lengths, contents = _generators(seed, "shared-prefix")
    prefixes = [tokens(contents, vocab_size, prefix_len) for _ in range(num_groups)]
    suffixes = Lengths(suffix_len, outputs.ratio).draw(lengths, number)
    outs = outputs.draw(lengths, number)
    groups = lengths.permutation(np.arange(number) % num_groups)
    return Workload(
        "shared-prefix",
        tuple(
            Conversation((Turn(np.concatenate([prefixes[g], tokens(contents, vocab_size, s)]), o),))
            for g, s, o in zip(groups, suffixes, outs, strict=True)
        ),
        {
            "num_groups": num_groups,
            "prefix_len": prefix_len,
            "suffix_len": suffix_len,
            "output_len": outputs.mean,
            "range_ratio": outputs.ratio,
        },
    )


def multi_turn(
    number: int,
    *,
    num_turns: int,
    think_time_s: float,
    inputs: Lengths,
    outputs: Lengths,
    vocab_size: int,
    seed: int,
) -> Workload:
    """`number` conversations: each turn sends all that was said before and something new."""
    lengths, contents = _generators(seed, "multi-turn")
    conversations = []
    for _ in range(number):
        ins, outs = inputs.draw(lengths, num_turns), outputs.draw(lengths, num_turns)
        turns = (Turn(tokens(contents, vocab_size, i), o) for i, o in zip(ins, outs, strict=True))
        conversations.append(Conversation(tuple(turns)))
    return Workload(
        "multi-turn",
        tuple(conversations),
        {
            "num_turns": num_turns,
            "think_time_s": think_time_s,
            "input_len": inputs.mean,
            "output_len": outputs.mean,
            "range_ratio": inputs.ratio,
        },
    )


def _generators(seed: int, dataset: str) -> tuple[np.random.Generator, np.random.Generator]:
    """Of lengths and of contents: another vocabulary keeps the lengths.

    Apart for each dataset, or what one has left in the server's cache would be found by another.
    """
    lengths, contents = np.random.SeedSequence([seed, *dataset.encode()]).spawn(2)
    return np.random.default_rng(lengths), np.random.default_rng(contents)


def limit(
    workload: Workload, *, max_input_len: int | None, max_output_len: int | None, cut: bool
) -> Workload:
    """Leave out the conversations that are too long, or with `cut` shorten their prompts.

    max_input_len: of all that a request may send but answers; max_output_len: answers are always
    shortened to it. What was done is counted in the workload's remarks.
    """
    kept: list[Conversation] = []
    dropped = shortened = fewer = 0
    for conversation in workload.conversations:
        turns = conversation.turns
        length = sum(len(turn.prompt) for turn in turns)
        if max_input_len is not None and length > max_input_len:
            if not cut or len(turns) > 1:
                dropped += 1
                continue
            shortened += 1
            turns = (replace(turns[0], prompt=turns[0].prompt[:max_input_len]),)
        if max_output_len is not None:
            fewer += sum(turn.output_len > max_output_len for turn in turns)
            turns = tuple(
                replace(turn, output_len=min(turn.output_len, max_output_len)) for turn in turns
            )
        kept.append(replace(conversation, turns=turns))
    number = len(workload.conversations)
    done = [
        (dropped, f"left out: longer than {max_input_len} tokens"),
        (shortened, f"cut to {max_input_len} tokens"),
        (fewer, f"asked for an answer cut to {max_output_len} tokens"),
    ]
    if not kept:
        raise ConfigError(
            f"All {count(number, 'conversation')} have more than --max-input-len {max_input_len} "
            "tokens. Raise it, or shorten them with --long-prompts cut."
        )
    remarks = tuple(f"{n:,} of {number:,} {what}." for n, what in done if n)
    return replace(workload, conversations=tuple(kept), remarks=(*workload.remarks, *remarks))


def check_positions(workload: Workload, max_model_len: int | None) -> None:
    """Refuse what the server has said it can't hold."""
    prompt, output = workload.longest
    if max_model_len is not None and prompt + output > max_model_len:
        raise ConfigError(
            f"The longest request has {prompt} tokens and asks for {output}, but the server's "
            f"model has {max_model_len} positions. Lower the lengths, or for a trace use "
            "--max-input-len, --max-output-len or --block-tokens."
        )
