"""More simple stories, told by a model that was trained on TinyStories. Optional.

Sampled at temperature 1 they follow that model's distribution; they help a new model only as far
as the teller is better than what the real stories alone would give (docs/training.md).
"""

from pathlib import Path

from penstock import LLM, SamplingParams
from penstock.errors import ConfigError
from recipes.tokenizer import END_OF_TEXT

AT_ONCE = 64
OPENING = "Once upon a time"
TOKENS = 500  # of a story, at most


def synthesize(model: Path, out: Path, stories: int, seed: int) -> str:
    """Write `stories` stories to `out`, parted by <|endoftext|>; returns a summary.

    A story begins with OPENING, for a model may tell other things, too; it ends where the model
    ends it or starts another one, or at TOKENS, after a sentence. Raises ConfigError if none of the
    model's texts has the end of a sentence.
    """
    llm = LLM(str(model), max_num_seqs=AT_ONCE, seed=seed)
    opened = len(llm.get_tokenizer().encode(OPENING))
    length = min(TOKENS, llm.runtime.model.max_model_len - opened - 1)
    params = SamplingParams(temperature=1.0, max_tokens=length)
    told: list[str] = []
    while len(told) < stories:
        prompts = [OPENING] * min(AT_ONCE, stories - len(told))
        told += [
            whole_sentences(OPENING + o.outputs[0].text) for o in llm.generate(prompts, params)
        ]
    kept = [text for text in told if text]
    if not kept:
        raise ConfigError(f"None of {stories} texts by {model} has the end of a sentence.")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(f"\n{END_OF_TEXT}\n".join(kept) + "\n", encoding="utf-8")
    return f"{len(kept):,} stories, {out.stat().st_size:,} bytes in {out}"


def whole_sentences(text: str) -> str:
    """The first story in `text`, up to its last whole sentence."""
    second = text.find(OPENING, len(OPENING))
    text = text[:second] if second > 0 else text
    return text[: max(text.rfind(mark) for mark in ".!?") + 1].strip()
