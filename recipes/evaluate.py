"""What the family is worth, measured by Penstock itself on texts that nobody was trained on."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from penstock.bench.dialogue import read_conversations, score_dialogues
from penstock.bench.evaluate import TextScore, read_text
from penstock.bench.evaluate import evaluate as score_text
from penstock.bench.workload import longest
from penstock.config import EngineConfig
from penstock.runtime import Runtime, load_runtime
from recipes.card import write_cards
from recipes.corpus import Corpus
from recipes.family import ADAPTERS
from recipes.lora import merge
from recipes.model import load, write_weights
from recipes.prepare import CONTEXT
from recipes.replies import tokenize_replies

MAX_TOKENS = 128  # of a reply
AT_ONCE = 16
TINYSTORIES, SHORT_STORIES, DIALOGUES = 0.75, 1.40, 0.60  # bits per byte, at most
TOOL_CALLS, AGREEMENT, ADAPTER_GAIN = 0.60, 0.60, 0.10  # at least


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value and what is asked of it."""

    model: str
    name: str
    value: float
    limit: float | None = None
    at_most: bool = False  # the limit is an upper one

    @property
    def passed(self) -> bool | None:
        if self.limit is None:
            return None
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def line(self) -> str:
        """A row of the table that is printed and that model cards show."""
        sign = "≤" if self.at_most else "≥"
        asked = "" if self.limit is None else f"{sign} {self.limit:.4g}"
        verdict = {None: "", True: "yes", False: "**no**"}[self.passed]
        return f"| {self.model} | {self.name} | {self.value:.4f} | {asked} | {verdict} |"


TABLE = "| model | figure | value | asked | met |\n|---|---|---|---|---|"


def evaluate(work: Path, max_bytes: int, max_dialogues: int, compare: Path | None) -> str:
    """Score the models in `work`; returns the table, and writes it and the cards beside them.

    max_bytes, max_dialogues: how much is read of each held-out file. compare: another model, which
    `base` has to beat on TinyStories.
    """
    corpus = Corpus(work)
    files = corpus.held_out(work / "held_out")
    figures: list[Figure] = []
    present = {name for name in ("base", "chat", "draft") if _is_whole(work / name)}
    other = None
    if compare is not None and compare.exists():
        other = _bits(compare, files["tinystories.txt"], max_bytes)
        figures.append(Figure(compare.parent.name, "TinyStories, bits a byte", other))
    if "base" in present:
        figures += score_base(work / "base", files, max_bytes, other)
    if "chat" in present:
        figures += score_chat(work / "chat", files, max_bytes, max_dialogues)
    if {"chat", "draft"} <= present:
        share = agreement(corpus, work / "draft", work / "chat", max_dialogues)
        figures.append(Figure("draft", "likeliest token is chat's, in replies", share, AGREEMENT))
    if "base" in present:
        for style in ADAPTERS:
            if (work / style / "adapter_model.safetensors").exists():
                figures += score_adapter(work, style, files[f"{style}.txt"], max_bytes)
    table = "\n".join([TABLE, *(figure.line() for figure in figures)])
    (work / "figures.json").write_text(json.dumps([asdict(f) for f in figures], indent=2) + "\n")
    write_cards(work, {f"{f.model}\t{f.name}": f.line() for f in figures}, TABLE)
    return table


def _is_whole(folder: Path) -> bool:
    return (folder / "model.safetensors").exists()


def _runtime(model: Path, length: int | None = None) -> tuple[EngineConfig, Runtime]:
    config = EngineConfig.of(model=str(model), max_model_len=length, max_num_seqs=AT_ONCE)
    return config, load_runtime(config)


def _score(runtime: Runtime, file: Path, window: int, max_bytes: int) -> TextScore:
    assert runtime.tokenizer is not None
    text = read_text(file, runtime.tokenizer, max_bytes)
    return score_text(runtime, text, window, max(1, window // 2))


def _bits(model: Path, file: Path, max_bytes: int) -> float:
    window = min(CONTEXT, longest(str(model)))
    return _score(_runtime(model, window)[1], file, window, max_bytes).bits_per_byte


def score_base(
    model: Path, files: dict[str, Path], max_bytes: int, other: float | None
) -> Iterator[Figure]:
    """Bits per byte of every kind of held-out text."""
    _, runtime = _runtime(model)
    window = runtime.model.max_model_len
    asked = {"tinystories": TINYSTORIES, "short_stories": SHORT_STORIES, "dialogues": DIALOGUES}
    for name in (*asked, "talk", "unseen_services", *ADAPTERS):
        bits = _score(runtime, files[f"{name}.txt"], window, max_bytes).bits_per_byte
        yield Figure(model.name, f"{name}, bits a byte", bits, asked.get(name), at_most=True)
        if name == "tinystories" and other is not None:
            gain = other - bits
            yield Figure(model.name, "tinystories, below the other model's by", gain, 0.0)


def score_chat(
    model: Path, files: dict[str, Path], max_bytes: int, max_dialogues: int
) -> Iterator[Figure]:
    """Bits per byte of dialogues, and what becomes of the replies."""
    config, runtime = _runtime(model)
    window = runtime.model.max_model_len
    for name, limit in (("dialogues", DIALOGUES), ("talk", None), ("tinystories", None)):
        bits = _score(runtime, files[f"{name}.txt"], window, max_bytes).bits_per_byte
        yield Figure(model.name, f"{name}, bits a byte", bits, limit, at_most=True)
    for name, limit in (("dialogues", TOOL_CALLS), ("unseen_services", None)):
        talks = read_conversations(files[f"{name}.jsonl"], max_dialogues)
        found = score_dialogues(config, runtime, name, talks, MAX_TOKENS)
        replies, calling = max(1, found.replies), max(1, found.calling)
        yield Figure(
            model.name, f"{name}: tool calls exactly the same", found.exact / calling, limit
        )
        yield Figure(model.name, f"{name}: tool calls of the same name", found.named / calling)
        yield Figure(model.name, f"{name}: replies in the right format", found.valid / replies)
        yield Figure(
            model.name,
            f"{name}: calls where there are none",
            found.uncalled_for / max(1, found.replies - found.calling),
        )


@torch.inference_mode()
def agreement(corpus: Corpus, draft: Path, chat: Path, max_dialogues: int) -> float:
    """Share of reply tokens in held-out dialogues where both find the same token likeliest."""
    tokenizer = Tokenizer.from_str(corpus.text("tokenizer.json"))
    texts = corpus.text("held_out/dialogues.txt").split("<|endoftext|>")[1 : max_dialogues + 1]
    student, teacher = load(draft).eval(), load(chat).eval()
    context = teacher.shape.context
    talks = tokenize_replies(tokenizer, [f"<|endoftext|>{text}" for text in texts], context)
    same = total = 0
    for start, end in zip(talks.offsets[:-1], talks.offsets[1:], strict=True):
        ids = torch.from_numpy(talks.tokens[start:end].astype("int64"))[None, :-1]
        counted = torch.from_numpy(talks.mask[start + 1 : end])
        equal = student(ids).argmax(-1)[0] == teacher(ids).argmax(-1)[0]
        same += int(equal[counted].sum())
        total += int(counted.sum())
    return same / max(1, total)


def score_adapter(work: Path, style: str, file: Path, max_bytes: int) -> Iterator[Figure]:
    """Perplexity of the style's held-out text with the adapter merged, and without."""
    _, runtime = _runtime(work / "base")
    window = runtime.model.max_model_len
    before = _score(runtime, file, window, max_bytes).perplexity
    with tempfile.TemporaryDirectory() as folder:
        merged = Path(folder)
        for name in ("config.json", "generation_config.json", *_TOKENIZER):
            shutil.copyfile(work / "base" / name, merged / name)
        weights = merge(load_file(work / "base" / "model.safetensors"), work / style)
        write_weights(weights, merged / "model.safetensors")
        after = _score(_runtime(merged)[1], file, window, max_bytes).perplexity
    yield Figure(style, "perplexity of base", before)
    yield Figure(style, "perplexity with the adapter", after)
    yield Figure(style, "perplexity, lower by", 1 - after / before, ADAPTER_GAIN)


_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
