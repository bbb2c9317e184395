"""What the target says itself: continuations of documents' beginnings, sampled once and kept.

Guesses are judged by what the target says, not by what others have written (self-distillation, as
in Cai et al. 2024, arXiv:2401.10774, and Zhou et al. 2023, arXiv:2310.08461).
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerBase

from penstock import LLM, SamplingParams
from penstock.errors import ConfigError
from recipes.speculation.target import Target
from recipes.speculation.text import Document, Row, encode

AT_ONCE = 384  # requests between two looks at the progress, and between two saves
GIVEN = (4, 32)  # tokens of a beginning where the document doesn't say


def prompts(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    count: int,
    length: int,
    seed: int,
) -> list[list[int]]:
    """Token ids of `count` beginnings; documents come in turn, each time cut elsewhere."""
    if count and not documents:
        raise ConfigError(
            "There is no document to begin with: all are held out, or none is. "
            "Bring a text of more documents."
        )
    generator = np.random.default_rng([seed, 1])
    order = generator.permutation(len(documents)) if documents else []
    found: list[list[int]] = []
    for i in range(count):
        document = documents[order[i % len(documents)]]
        if document.prompt is not None:
            ids = encode(tokenizer, document.prompt)
        else:
            ids = encode(tokenizer, document.text)
            ids = ids[: int(generator.integers(GIVEN[0], GIVEN[1] + 1))]
        found.append(ids[: max(1, length // 2)])
    return found


def continuations(
    target: Target,
    starts: Sequence[list[int]],
    temperatures: Sequence[float],
    length: int,
    seed: int,
    cache: Path,
) -> list[Row]:
    """Rows of at most `length` tokens: each start, and how the target goes on from it.

    Starts take turns with the temperatures, of which 0 is greedy. What was sampled is kept in
    `cache` by all that decides it, so a run that was interrupted goes on, and another recipe over
    the same text samples nothing.
    """
    if not starts:
        return []
    if not temperatures or min(temperatures) < 0:
        raise ConfigError(f"Temperatures must be 0 or more, not {list(temperatures)}.")
    key = _key(target.folder, starts, temperatures, length, seed)
    cache.mkdir(parents=True, exist_ok=True)
    file = cache / f"{key}.jsonl"
    done = [json.loads(line) for line in _whole_lines(file)]
    if len(done) < len(starts):
        wanted = _requests(starts, temperatures, length, seed)
        with file.open("a", encoding="utf-8") as out:
            for tokens in _sample(target.folder, wanted, len(done), length):
                done.append(tokens)
                out.write(json.dumps(tokens) + "\n")
                out.flush()
    return [Row([*start, *rest], len(start)) for start, rest in zip(starts, done, strict=True)]


def _requests(
    starts: Sequence[list[int]], temperatures: Sequence[float], length: int, seed: int
) -> list[tuple[list[int], SamplingParams]]:
    return [
        (
            start,
            SamplingParams(
                temperature=temperatures[i % len(temperatures)],
                max_tokens=max(1, length - len(start)),
                seed=seed * 1_000_003 + i,
            ),
        )
        for i, start in enumerate(starts)
    ]


def _sample(
    folder: Path, wanted: list[tuple[list[int], SamplingParams]], done: int, length: int
) -> Iterator[list[int]]:
    llm = LLM(folder, max_num_seqs=96, max_model_len=length)
    columns = (
        TextColumn("the target's own text"), BarColumn(), MofNCompleteColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(wanted), completed=done)
        for start in range(done, len(wanted), AT_ONCE):
            part = wanted[start : start + AT_ONCE]
            prompts_of = [{"prompt_token_ids": ids} for ids, _ in part]
            for output in llm.generate(prompts_of, [params for _, params in part]):
                yield list(output.outputs[0].token_ids)
                bar.advance(task)


def _key(
    folder: Path,
    starts: Sequence[list[int]],
    temperatures: Sequence[float],
    length: int,
    seed: int,
) -> str:
    weights = sorted(
        (file.name, file.stat().st_size, hashlib.sha256(_edges(file)).hexdigest())
        for file in folder.glob("*.safetensors")
    )
    decides = json.dumps([weights, list(starts), list(temperatures), length, seed])
    return hashlib.sha256(decides.encode()).hexdigest()[:16]


def _edges(file: Path, size: int = 1 << 20) -> bytes:
    """The first and the last bytes: enough to tell one training from another."""
    with file.open("rb") as opened:
        first = opened.read(size)
        opened.seek(max(0, file.stat().st_size - size))
        return first + opened.read(size)


def _whole_lines(file: Path) -> list[bytes]:
    """Lines of a file, from which a torn last one is cut: what is whole is never written again."""
    if not file.exists():
        return []
    raw = file.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) < len(raw):
        os.truncate(file, len(whole))
    return whole.splitlines()
