"""The family's members: what each is trained on, from what, and how often.

base: stories, novels and dialogues. chat: base, fine-tuned on replies. draft: small, distilled from
chat. shakespeare, verse: adapters of base.
"""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from penstock.errors import ConfigError
from recipes.batches import Batch, Mixture, PackedExamples, Source, Windows
from recipes.corpus import Corpus
from recipes.lora import LoraConfig, adapter_state, add_adapter, save_adapter
from recipes.model import Llama, Shape, load, save_model
from recipes.replies import tokenize_replies
from recipes.tokenizer import END_OF_TEXT
from recipes.train import Progress, TrainConfig, Trainer

Paces = Mapping[str, tuple[float, float]]

# How often each source is read next to the others, (at the start, at the end). Paces, not shares:
# stories are few, and a fixed share would repeat them the more often the faster the machine is.
# They and the dialogues come late, when it counts most. A source that is read much more often than
# the others is what a model learns by heart first.
PRETRAIN: Paces = {
    "novels": (1.2, 0.4),
    "short_stories": (1.2, 1.6),
    "science_fiction": (1.2, 0.8),
    "tinystories": (0.4, 1.6),
    "tools": (0.8, 1.6),
    "talk": (0.8, 1.6),
    "requests": (0.2, 0.6),
}
SYNTHETIC_PACE = (1.0, 0.0)  # if there is any
FINETUNE: Paces = {  # `base` has read the tools' dialogues often
    "tools": (0.5, 0.5),
    "talk": (1.0, 1.0),
    "instructions": (3.0, 3.0),
    "small_talk": (3.0, 3.0),
    "requests": (2.0, 2.0),
    "tinystories": (0.5, 0.5),
}
DISTILL: Paces = {
    "tools": (1.0, 1.0),
    "talk": (1.0, 1.0),
    "instructions": (1.0, 1.0),
    "small_talk": (2.0, 2.0),
    "requests": (2.0, 1.0),
    "tinystories": (2.0, 0.5),
}
ADAPTERS = ("shakespeare", "verse")
KL_SHARE = 0.7  # of the distillation's loss; the rest is cross-entropy
HELD_OUT = {
    "base": ("tinystories", "short_stories", "dialogues"),
    "chat": ("dialogues", "unseen_services"),  # the replies alone: what is asked is forgotten
    "draft": ("dialogues", "tinystories"),
}
HELD_OUT_ROWS = 32  # of each text, scored during training


def sources(
    corpus: Corpus, names: Mapping[str, object], length: int, replies: bool
) -> dict[str, Source]:
    """Rows of `length` tokens. replies: of conversations only what the assistant says counts."""
    found: dict[str, Source] = {}
    streams = corpus.names("streams")
    for name in names:
        if name in streams:
            found[name] = Windows(corpus.stream(name), length)
        else:
            found[name] = PackedExamples(corpus.examples(name), length, all_tokens=not replies)
    return found


def held_out_batches(corpus: Corpus, names: tuple[str, ...], length: int) -> dict[str, Batch]:
    """The first rows of held-out texts, as plain windows."""
    tokenizer = Tokenizer.from_str(corpus.text("tokenizer.json"))
    found = {}
    for name in names:
        documents = corpus.text(f"held_out/{name}.txt").split("<|endoftext|>")
        kept: list[int] = []
        for document in documents:
            if text := document.strip("\n"):
                kept += tokenizer.encode(text).ids
            if len(kept) > HELD_OUT_ROWS * (length + 1):
                break
        rows = max(1, min(HELD_OUT_ROWS, len(kept) // (length + 1)))
        flat = np.resize(np.array(kept, np.int64), rows * (length + 1))
        tokens = torch.from_numpy(flat).view(rows, length + 1)
        found[name] = Batch(tokens, torch.ones(rows, length), None)
    return found


def held_out_replies(corpus: Corpus, names: tuple[str, ...], length: int) -> dict[str, Batch]:
    """Rows of held-out conversations, the longest first; only what the assistant says counts."""
    tokenizer = Tokenizer.from_str(corpus.text("tokenizer.json"))
    found = {}
    for name in names:
        talks = corpus.text(f"held_out/{name}.txt").split(END_OF_TEXT)
        if not any(talk.strip() for talk in talks):
            continue
        rendered = [END_OF_TEXT + talk for talk in talks if talk.strip()]
        packed = PackedExamples(tokenize_replies(tokenizer, rendered, length), length)
        rows = [packed.row(i, 0.0) for i in range(min(HELD_OUT_ROWS, len(packed)))]
        found[name] = Batch(*(torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True)))
    return found


def paces_with(paces: Paces, chosen: list[str]) -> Paces:
    """`paces` with others for some sources, each written SOURCE=START:END.

    Raises ConfigError for a source that isn't there, or numbers that aren't.
    """
    found = dict(paces)
    for text in chosen:
        name, _, numbers = text.partition("=")
        try:
            start, end = (float(x) for x in numbers.split(":"))
        except ValueError:
            raise ConfigError(
                f"A pace is SOURCE=START:END, like novels=1:0.5; got {text!r}."
            ) from None
        if name not in (*paces, "synthetic") or not (0 <= start < math.inf and 0 <= end < math.inf):
            raise ConfigError(
                f"{text!r}: paces are numbers from 0 up, of one of {', '.join(sorted(paces))}."
            )
        found[name] = start, end
    return found


def device_of(name: str | None) -> torch.device:
    """The device asked for, or a GPU where there is one. Raises ConfigError without one."""
    found = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if found.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {found}: this torch ({torch.__version__}) finds no GPU.")
    return torch.device(found)


def read_model(work: Path, name: str, dropout: float, device: torch.device) -> Llama:
    """A member that an earlier step made. Raises ConfigError if it isn't there."""
    folder = work / name
    if not (folder / "model.safetensors").exists():
        raise ConfigError(
            f"{folder} has no model.safetensors: train `{name}` first, or join its parts with "
            "`python -m recipes join`."
        )
    return load(folder, dropout).to(device)


def pretrain(
    work: Path,
    config: TrainConfig,
    shape: Shape,
    dropout: float,
    device: torch.device,
    paces: Paces = PRETRAIN,
    start: Path | None = None,
) -> Progress:
    """Train `base` on every source but the adapters', from nothing or from `start`'s weights."""
    corpus = Corpus(work)
    if config.short_length and shape.context % config.short_length:
        raise ConfigError(
            f"Rows of {shape.context} tokens can't be cut into ones of {config.short_length}: "
            "--short-length must divide the context."
        )
    paces = dict(paces)
    if "synthetic" in corpus.names("streams"):
        paces.setdefault("synthetic", SYNTHETIC_PACE)
    shape = replace(shape, vocab_size=_vocabulary(corpus))
    rows = sources(corpus, paces, shape.context, replies=False)
    mixture = Mixture(rows, paces, config.rows, config.seed, isolate=False)
    model = _begin(shape, dropout, config.seed, start).to(device)
    trainer = Trainer(
        work / "base.training", model, mixture, config,
        held_out=held_out_batches(corpus, HELD_OUT["base"], shape.context),
        flops_per_token=3 * shape.flops_per_token(shape.context),
    )  # fmt: skip
    progress = trainer.run()
    save_model(model.state_dict(), shape, corpus.text("tokenizer.json"), work / "base", chat=False)
    _finish(trainer, work / "base")
    return progress


def _begin(shape: Shape, dropout: float, seed: int, start: Path | None) -> Llama:
    """Random weights, or those of the model in the folder `start`, which must be of that shape."""
    if start is None:
        return Llama(shape, dropout).initialise(seed)
    if not (start / "model.safetensors").is_file():
        raise ConfigError(f"--start {start}: there is no model.safetensors.")
    model = load(start, dropout)
    if model.shape != shape:
        raise ConfigError(
            f"--start {start} is {model.shape}, but this run trains {shape}: choose another "
            "--size, or the vocabulary that it was trained with."
        )
    return model


def finetune(
    work: Path,
    config: TrainConfig,
    dropout: float,
    device: torch.device,
    paces: Paces = FINETUNE,
) -> Progress:
    """Train `chat` from `base` on what assistants say."""
    corpus = Corpus(work)
    model = read_model(work, "base", dropout, device)
    length = model.shape.context
    rows = sources(corpus, paces, length, replies=True)
    mixture = Mixture(rows, paces, config.rows, config.seed, isolate=True)
    trainer = Trainer(
        work / "chat.training", model, mixture, config,
        held_out=held_out_replies(corpus, HELD_OUT["chat"], length),
        flops_per_token=3 * model.shape.flops_per_token(length),
    )  # fmt: skip
    progress = trainer.run()
    folder = work / "chat"
    save_model(model.state_dict(), model.shape, corpus.text("tokenizer.json"), folder, chat=True)
    _finish(trainer, folder)
    return progress


class Distillation:
    """KL divergence from the teacher's distribution, and cross-entropy.

    Source: Hinton et al. 2015, arXiv:1503.02531, at temperature 1: a draft is to agree with what
    the teacher samples.
    """

    def __init__(self, teacher: nn.Module) -> None:
        self.teacher = teacher.eval().requires_grad_(False)

    def __call__(self, student: nn.Module, batch: Batch) -> Tensor:
        inputs = batch.tokens[:, :-1]
        with torch.no_grad():
            target = self.teacher(inputs, batch.documents).float().log_softmax(-1)
        found = student(inputs, batch.documents).float().log_softmax(-1)
        divergence = (target.exp() * (target - found)).sum(-1)
        chosen = -found.gather(-1, batch.tokens[:, 1:, None])[..., 0]
        losses = KL_SHARE * divergence + (1 - KL_SHARE) * chosen
        return (losses * batch.weights).sum()


def distill(work: Path, config: TrainConfig, shape: Shape, device: torch.device) -> Progress:
    """Train `draft` to predict what `chat` would say."""
    corpus = Corpus(work)
    teacher = read_model(work, "chat", 0.0, device)
    length = teacher.shape.context
    shape = replace(shape, vocab_size=teacher.shape.vocab_size, context=length)
    rows = sources(corpus, DISTILL, length, replies=False)
    mixture = Mixture(rows, DISTILL, config.rows, config.seed, isolate=True)
    model = Llama(shape).initialise(config.seed).to(device)
    teacher_forward = torch.compile(teacher) if config.compile else teacher
    trainer = Trainer(
        work / "draft.training", model, mixture, config,
        loss=Distillation(teacher_forward),
        held_out=held_out_batches(corpus, HELD_OUT["draft"], length),
        flops_per_token=3 * shape.flops_per_token(length) + teacher.shape.flops_per_token(length),
    )  # fmt: skip
    progress = trainer.run()
    folder = work / "draft"
    (folder / "acceptance.json").unlink(missing_ok=True)  # of the draft that was there
    save_model(model.state_dict(), shape, corpus.text("tokenizer.json"), folder, chat=True)
    _finish(trainer, folder)
    return progress


def adapt(
    work: Path, style: str, config: TrainConfig, lora: LoraConfig, device: torch.device
) -> Progress:
    """Train an adapter of `base` on one style."""
    if style not in ADAPTERS:
        raise ConfigError(f"There is no style {style!r}: choose {' or '.join(ADAPTERS)}.")
    corpus = Corpus(work)
    base = read_model(work, "base", 0.0, torch.device("cpu"))
    model = add_adapter(base, lora, config.seed).to(device)
    length = model.shape.context
    rows = sources(corpus, {style: None}, length, replies=False)
    mixture = Mixture(rows, {style: (1.0, 1.0)}, config.rows, config.seed, isolate=False)
    trainer = Trainer(
        work / f"{style}.training", model, mixture, config,
        held_out=held_out_batches(corpus, (style,), length),
        flops_per_token=2 * model.shape.flops_per_token(length),  # no gradients of frozen weights
    )  # fmt: skip
    progress = trainer.run()
    save_adapter(adapter_state(model), lora, "base", work / style)
    _finish(trainer, work / style)
    return progress


def _vocabulary(corpus: Corpus) -> int:
    """Tokens of the corpus's tokenizer, rounded up to a multiple of 64."""
    size = Tokenizer.from_str(corpus.text("tokenizer.json")).get_vocab_size()
    return -(-size // 64) * 64


def _finish(trainer: Trainer, folder: Path) -> None:
    """Put the run's log and curve beside the weights."""
    for name in ("log.jsonl", "loss.svg"):
        shutil.copyfile(trainer.folder / name, folder / name)
    epochs = {name: round(count, 2) for name, count in trainer.mixture.epochs().items()}
    about = {"tokens": trainer.progress.tokens, "steps": trainer.progress.step, "epochs": epochs}
    (folder / "training.json").write_text(json.dumps(about, indent=2) + "\n")
