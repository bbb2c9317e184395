"""Ways of splitting a text into words by their names in GGUF (`tokenizer.ggml.pre`).

The patterns are those of the models' own tokenizer.json; which name means which is llama.cpp's
(llama-vocab.cpp). A name that isn't here is refused: a wrong pattern gives plausible wrong tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASH_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
) + _SLASH_TAIL
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
) + _SLASH_TAIL


@dataclass(frozen=True, slots=True)
class WordRule:
    """How a byte-level BPE splits a text, and what goes with it."""

    pattern: str | None = None  # None: GPT-2's own
    digits: bool = False  # each stands alone, before the pattern
    composed: bool = False  # text is brought into Unicode's form NFC
    whole_words: bool = False  # a word that is a token is taken as it is
    adds_bos: bool = False

    def split(self, add_prefix_space: bool) -> Any:
        """The pre-tokenizer."""
        steps: list[Any] = []
        if self.digits:
            steps.append(pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"))
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        steps.append(
            pre_tokenizers.ByteLevel(
                add_prefix_space=add_prefix_space, use_regex=self.pattern is None
            )
        )
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


_RULES: tuple[tuple[WordRule, str], ...] = (
    (WordRule(), "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 exaone4 mpt"),
    (WordRule(composed=True), "olmo"),
    (WordRule(_LLAMA3, whole_words=True, adds_bos=True), "llama3 llama-v3 llama-bpe falcon3"),
    (WordRule(_LLAMA3), "dbrx smaug-bpe"),
    (WordRule(_QWEN2, composed=True), "qwen2"),
    (WordRule(_QWEN2), "deepseek-r1-qwen megrez stablelm2"),
    (WordRule(_QWEN35, composed=True), "qwen35"),
    (WordRule(digits=True), "smollm starcoder refact command-r codeshell exaone minerva-7b"),
    (WordRule(_GPT4O), "gpt-4o llama4 kanana2"),
    (WordRule(_TEKKEN, whole_words=True, adds_bos=True), "tekken"),
)
_BY_NAME = {name: rule for rule, names in _RULES for name in names.split()}


def word_rule(name: str) -> WordRule | None:
    """The rule called `name` in a file; None where it isn't known."""
    return _BY_NAME.get(name)
