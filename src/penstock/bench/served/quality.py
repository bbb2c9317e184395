"""Whether a model knows the language that it is asked in: by what it makes of a text, and of the
same words in no order.

A model that was loaded wrongly (another tokenizer, weights of another shape, a broken file, a rope
that isn't its own) says fluent nonsense or none; nothing of that shows in a server's metrics.
No reference is needed: whoever has learnt a language finds words in their order likelier.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from penstock.bench.finding import Finding
from penstock.engine import LLM
from penstock.errors import ConfigError
from penstock.sampling import SamplingParams

TEXT = (
    "There was once a little girl who lived with her mother in a small house near the woods. One "
    "day her mother gave her a basket of bread and apples and said: take this to your "
    "grandmother, who is ill, and do not talk to anybody on the way. The girl put on her red coat, "
    "took the basket and went into the woods. The sun was warm and the birds were singing in the "
    "trees, so she stopped to look at the flowers. After a while she heard a sound behind her. It "
    "was a big grey dog. The dog looked at the basket and the girl looked at the dog. Then she "
    "laughed, gave it some of the bread, and they walked on together."
)
"""Plain enough for the smallest models."""

GAIN = 1.5
"""Nats a word by which its order must help, at least: the embedded models gain 6 to 8, one of a
million weights 5.7, random weights 0.04.
"""

LEAST_KNOWN = 0.7
"""Of the loss of one who knows nothing but how many tokens there are: more is next to nothing."""


def shuffled(text: str) -> str:
    """The same words, in an order that is always the same and means nothing."""
    words = text.split()
    order = sorted(range(len(words)), key=lambda i: (i * 7919 + 13) % len(words))
    return " ".join(words[i] for i in order)


@dataclass(frozen=True, slots=True)
class Losses:
    """Nats that the tokens of a text took, the first of all left out."""

    total: float
    tokens: int

    @property
    def mean(self) -> float:
        return self.total / max(self.tokens, 1)


@dataclass(frozen=True, slots=True)
class Probed:
    """What a model made of a text, and of its words in no order; nats a token."""

    ordered: float
    mixed: float
    findings: list[Finding]


def probe_model(model: str, **forms: Any) -> Probed:
    """Of a model here; forms: dtype, quantization, … Raises ConfigError without a tokenizer."""
    llm = LLM(model, max_num_seqs=2, **forms)
    tokenizer = llm.runtime.tokenizer
    if tokenizer is None:
        raise ConfigError(f"{model} has no tokenizer, without which no text can be given to it.")
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found, words, room = [], TEXT.split(), llm.engine.max_model_len - 2
    texts = [TEXT, shuffled(TEXT)]
    while max(len(tokenizer.encode(text)) for text in texts) > room and len(words) > 20:
        words = words[: len(words) // 2]
        texts = [" ".join(words), shuffled(" ".join(words))]
    for output in llm.generate(texts, params):
        assert output.prompt_logprobs is not None  # asked for
        pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        each = [one[token].logprob for token, one in pairs if one is not None]
        found.append(Losses(-sum(each), len(each)))
    ordered, mixed = found
    findings = quality_findings(ordered, mixed, len(words), math.log(llm.runtime.vocab_size))
    return Probed(ordered.mean, mixed.mean, findings)


def quality_findings(
    ordered: Losses, mixed: Losses, words: int, uniform: float | None
) -> list[Finding]:
    """Of a text of so many words. uniform: nats a token of one who knows nothing, where the
    vocabulary's size is known.
    """
    gain = (mixed.total - ordered.total) / words
    said = (
        f"A plain English text of {words} words took {ordered.mean:.2f} nats a token, the same "
        f"words in no order {mixed.mean:.2f}"
    )
    if not (math.isfinite(ordered.total) and math.isfinite(mixed.total)):
        return [
            Finding(
                "quality",
                "mismatch",
                f"{said}: its logits aren't numbers. Weights are damaged or overflow in this "
                "dtype; penstock doctor FOLDER checks the files, dtype='float32' shows which.",
            )
        ]
    if gain >= GAIN and (uniform is None or ordered.mean < LEAST_KNOWN * uniform):
        return []
    more = "" if uniform is None else f", one who knows nothing {uniform:.2f}"
    return [
        Finding(
            "quality",
            "mismatch",
            f"{said}{more}: it hardly knows English words from their order. Unless it was made for "
            "another language or for no text, its weights, tokenizer or config.json aren't of one "
            "model, or a format lost too much (penstock drift compares two).",
        )
    ]
