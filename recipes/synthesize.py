"""More simple stories, told by a model that was trained on TinyStories. Optional.

Sampled at temperature 1 they follow that model's distribution; they help a new model only as far
as the teller is better than what the real stories alone would give (docs/training.md).
"""

from pathlib import Path

from penstock import LLM, SamplingParams
from recipes.tokenizer import END_OF_TEXT

AT_ONCE = 64


def synthesize(model: Path, out: Path, stories: int, seed: int) -> str:
    """Write `stories` stories to `out`, parted by <|endoftext|>; returns a summary.

    A story ends where the model starts another one, or at its context's end, after a sentence.
    """
    llm = LLM(str(model), max_num_seqs=AT_ONCE, seed=seed)
    bos = {"prompt_token_ids": [1]}
    length = 500
    told: list[str] = []
    params = SamplingParams(temperature=1.0, max_tokens=length)
    while len(told) < stories:
        for output in llm.generate([bos] * min(AT_ONCE, stories - len(told)), params):
            text = output.outputs[0].text
            opening = text.find("Once upon a time", 20)
            text = text[:opening] if opening > 0 else text
            told.append(text[: max(text.rfind(mark) for mark in ".!?") + 1].strip())
    kept = [text for text in told if text]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(f"\n{END_OF_TEXT}\n".join(kept) + "\n", encoding="utf-8")
    return f"{len(kept):,} stories, {out.stat().st_size:,} bytes in {out}"
