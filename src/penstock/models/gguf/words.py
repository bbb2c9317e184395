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
_CASED = (  # letters with an upper and a lower form, as far as DeepSeek's list of them goes
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{0560}-\x{0588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C88}"
    r"\x{2D00}-\x{2D2D}\x{A790}-\x{A7FA}\x{AB30}-\x{AB68}\x{10570}-\x{105BC}"
    r"\x{16E40}-\x{16E7F}\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DF1E}]]"
)
_DEEPSEEK = (
    r"[\r\n]",
    r"\s?" + _CASED + "+",
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
    r"\s+$",
    r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+",
    r"\p{N}",
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True, slots=True)
class WordRule:
    """How a byte-level BPE splits a text, and what goes with it."""

    pattern: str | tuple[str, ...] | None = None  # several: one after another; None: GPT-2's own
    digits: bool = False  # each stands alone, before the pattern
    composed: bool = False  # text is brought into Unicode's form NFC
    whole_words: bool = False  # a word that is a token is taken as it is
    adds_bos: bool = False

    def split(self, add_prefix_space: bool) -> Any:
        """The pre-tokenizer."""
        steps: list[Any] = []
        if self.digits:
            steps.append(pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"))
        patterns = (self.pattern,) if isinstance(self.pattern, str) else self.pattern or ()
        steps += [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in patterns]
        steps.append(
            pre_tokenizers.ByteLevel(
                add_prefix_space=add_prefix_space, use_regex=self.pattern is None
            )
        )
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


_RULES: tuple[tuple[WordRule, str], ...] = (
    (WordRule(), "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 exaone4 mpt"),
    (WordRule(composed=True), "olmo"),
    (WordRule(_LLAMA3, whole_words=True, adds_bos=True), "llama3 llama-v3 llama-bpe falcon3 lfm2"),
    (WordRule(_LLAMA3), "dbrx smaug-bpe"),
    (WordRule(_QWEN2, composed=True), "qwen2"),
    (WordRule(_QWEN2), "deepseek-r1-qwen megrez stablelm2"),
    (WordRule(_QWEN35, composed=True), "qwen35"),
    (WordRule(digits=True), "smollm starcoder refact command-r codeshell exaone minerva-7b"),
    (WordRule(_GPT4O), "gpt-4o llama4 kanana2"),
    (WordRule(_LLAMA3, whole_words=True), "glm4 glm5"),
    (WordRule(_DEEPSEEK), "deepseek-llm"),
    (WordRule(_DEEPSEEK3), "deepseek-v3 hunyuan-dense"),
    (WordRule(_TEKKEN, whole_words=True, adds_bos=True), "tekken"),
)
_BY_NAME = {name: rule for rule, names in _RULES for name in names.split()}


def word_rule(name: str) -> WordRule | None:
    """The rule called `name` in a file; None where it isn't known."""
    return _BY_NAME.get(name)
