"""From options to a folder: text, the target's own text, training, measuring, saving."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.models.hub import resolve
from recipes.batches import Batch
from recipes.family import device_of
from recipes.speculation.acceptance import WIDTHS, Acceptance, measure
from recipes.speculation.card import card
from recipes.speculation.default_text import default_text
from recipes.speculation.generate import continuations, prompts
from recipes.speculation.guesser import Guesser
from recipes.speculation.load import load_guesser
from recipes.speculation.settings import Settings
from recipes.speculation.target import Target, load_config
from recipes.speculation.text import (
    Row,
    Rows,
    count_tokens,
    fingerprint,
    pad,
    read_documents,
    text_rows,
)
from recipes.train import TrainConfig, Trainer, same_run

REPORT = "acceptance.json"
HELD_OUT_ROWS = 8  # of each kind, scored during training


@dataclass(frozen=True, slots=True)
class Data:
    """Rows to train on, and rows that are held out."""

    text: list[Row]
    own: list[Row]
    held_out: dict[str, list[Row]]  # `text`, and what the target says: `greedy`, `sampled`


Make = Callable[[Target, Tensor], Guesser]
"""A guesser for a target whose training text has so many of each token [V]."""


def prepare(settings: Settings, data: Path, target: Target, seed: int) -> Data:
    """Read the text, split it, and let the target write what is asked for."""
    documents = read_documents(data)
    training = [document for document in documents if not document.is_held_out]
    held_out = [document for document in documents if document.is_held_out]
    if not held_out:
        raise ConfigError(
            f"None of the {len(documents)} documents of {data} is held out by its hash: "
            "acceptance needs some. Bring more documents, or mark some in JSON lines by "
            '"held_out": true.'
        )
    length = settings.for_positions(target.context).length
    assert length is not None
    cache = settings.work / "texts"

    def written(of: Sequence[Any], count: int, temperatures: Sequence[float]) -> list[Row]:
        starts = prompts(target.tokenizer, of, count, length, seed)
        return continuations(target, starts, temperatures, length, seed, cache)

    return Data(
        text_rows(target.tokenizer, training, length),
        written(training, settings.self_distill, settings.temperatures),
        {
            "text": _some(text_rows(target.tokenizer, held_out, length), settings.evaluate),
            "greedy": written(held_out, settings.evaluate, (0.0,)),
            "sampled": written(held_out, settings.evaluate, (settings.sampled_at,)),
        },
    )


def _some(rows: list[Row], count: int) -> list[Row]:
    """So many rows, from all parts of a text."""
    return rows[:: max(1, len(rows) // count)][:count]


class HeadTrainer(Trainer):
    """The recipes' loop, with a bar where somebody watches."""

    _bar: Progress | None = None

    def run(self) -> Any:
        console = Console(stderr=True)
        if not console.is_terminal:
            return super().run()
        columns = (
            TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=console) as self._bar:
            self._task = self._bar.add_task("training", total=1.0, completed=self.done)
            found = super().run()
            self._bar.update(self._task, completed=1.0)
        self._bar = None
        return found

    def _report(self, loss: float) -> None:
        if self._bar is None:
            super()._report(loss)
            return
        words = f"step {self.progress.step:,}, loss {loss:.3f}"
        self._bar.update(self._task, description=words, completed=self.done)


def optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon for the matrices of layers if asked for; see recipes/train.py."""
    assert isinstance(model, Guesser)
    inner, rest = model.weight_groups()
    if not config.muon:
        inner, rest = [], inner + rest
    decayed = [p for p in rest if p.dim() == 2]
    vectors = [p for p in rest if p.dim() != 2]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    found: list[torch.optim.Optimizer] = []
    if groups:
        found.append(torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95)))
    if inner:
        found.append(
            torch.optim.Muon(
                inner, lr=config.learning_rate, weight_decay=config.weight_decay, momentum=0.95,
                adjust_lr_fn="match_rms_adamw",
            )
        )  # fmt: skip
    return found


def train(
    method: str, make: Make, own_options: dict[str, Any], settings: Settings, config: TrainConfig
) -> dict[str, Acceptance]:
    """Make a guesser, train it or go on, measure it, and write its folder."""
    model = Path(resolve(settings.model))
    settings = settings.for_positions(load_config(model).max_position_embeddings)
    settings.work.mkdir(parents=True, exist_ok=True)
    text = settings.data or default_text(settings.texts, settings.work)
    folder = settings.work / f"{settings.output.name}.training"
    known_by = _settings(method, own_options | {"text": fingerprint(text)}, settings, config)
    same_run(folder, known_by)  # before anything takes long
    target = Target(model, device_of(settings.device))
    data = prepare(settings, text, target, config.seed)
    counts = count_tokens(data.text + data.own, target.vocab_size)
    guesser = make(target, counts).to(target.device)
    rows = Rows(data.text, data.own, config.rows, config.seed, settings.text_share)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return guesser.loss(target.look(batch.tokens, guesser.stream_ids), batch.weights)

    held_out = {name: pad(found[:HELD_OUT_ROWS]) for name, found in data.held_out.items()}
    trainer = HeadTrainer(
        folder, guesser, rows, config, loss=loss, held_out=held_out,
        held_out_loss=loss, optimizers=optimizers,
        flops_per_token=6.0 * guesser.num_weights() + 2.0 * target.num_weights(),
        settings=known_by,
    )  # fmt: skip
    print(
        f"{method}: {guesser.num_weights():,} weights; an epoch is {len(rows):,} steps, "
        f"{len(data.own):,} texts of the target's and {rows.text_count:,} rows of text",
        flush=True,
    )
    progress = trainer.run()
    guesser.save(settings.output)
    stored = load_guesser(settings.output, target)
    found = _measure(stored, target, data.held_out, settings.depth)
    report = {
        "method": method,
        "text": settings.data.name if settings.data else None,  # None: the default
        "weights": guesser.num_weights(),
        "steps": progress.step,
        "tokens": progress.tokens,
        "elapsed_s": round(progress.elapsed_s, 1),
        "epochs": round(rows.epochs(), 2),
    }
    _write_card(settings, _keep(settings, report, found))
    return found


def _keep(
    settings: Settings, report: Mapping[str, Any], found: Mapping[str, Acceptance]
) -> dict[str, Any]:
    """Write acceptance.json into the guesser's folder: how it was made, and what is accepted."""
    shares = {name: asdict(acceptance) for name, acceptance in found.items()}
    whole = {**report, "sampled_at": settings.sampled_at, "acceptance": shares}
    text = json.dumps(whole, indent=2) + "\n"
    (settings.output / REPORT).write_text(text, encoding="utf-8")
    read: dict[str, Any] = json.loads(text)
    return read


def _write_card(settings: Settings, report: Mapping[str, Any]) -> None:
    target = Path(settings.model).name
    words = card(settings.output.name, target, report, report.get("text"))
    (settings.output / "README.md").write_text(words, encoding="utf-8")


def measure_again(settings: Settings, seed: int, keep: bool = False) -> dict[str, Acceptance]:
    """Measure what a folder, `settings.output`, holds, as `train` does at its end.

    keep: write what was found to its acceptance.json, beside what that says of the training.
    """
    folder = settings.output
    model = Path(resolve(settings.model))
    settings = settings.for_positions(load_config(model).max_position_embeddings)
    settings.work.mkdir(parents=True, exist_ok=True)
    target = Target(model, device_of(settings.device))
    stored = load_guesser(folder, target)
    text = settings.data or default_text(settings.texts, settings.work)
    held_out = prepare(settings, text, target, seed).held_out
    found = _measure(stored, target, held_out, settings.depth)
    if keep:
        file = folder / REPORT
        before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        about = {"method": type(stored).__name__.lower(), "weights": stored.num_weights()}
        report = _keep(settings, before | about, found)
        if "steps" in report:  # else it has a card of its own
            _write_card(settings, report)
    return found


def _measure(
    stored: Guesser, target: Target, held_out: Mapping[str, list[Row]], depth: int
) -> dict[str, Acceptance]:
    found = {
        name: measure(stored, target, held_out[name], depth)
        for name in ("greedy", "sampled", "text")
    }
    show(found)
    return found


def _settings(
    method: str, own_options: Mapping[str, Any], settings: Settings, config: TrainConfig
) -> dict[str, Any]:
    """By which a run is known again.

    own_options has the text's fingerprint: what it says counts, not where it lies.
    """
    may_change = {"evaluate", "sampled_at", "depth", "device", "work", "texts", "data"}
    entries = {"method": method, **own_options, **asdict(settings), **asdict(config)}
    return {name: value for name, value in entries.items() if name not in may_change}


def show(found: Mapping[str, Acceptance]) -> None:
    """Print the share of drafts whose first guesses come true."""
    table = Table(title="Guesses accepted, by position")
    depth = max(len(acceptance.right) for acceptance in found.values())
    for name in ("text", "candidates", *map(str, range(1, depth + 1)), "tokens a step", "places"):
        table.add_column(name, justify="left" if name == "text" else "right")
    for name, acceptance in found.items():
        for width in WIDTHS:
            shares = [f"{share:.3f}" for share in acceptance.chains[width]]
            shares += [""] * (depth - len(shares))
            tokens = f"{acceptance.tokens(width):.2f}"
            table.add_row(name, str(width), *shares, tokens, f"{acceptance.places:,}")
    Console(width=120).print(table)
