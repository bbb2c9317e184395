"""`penstock prune`: a smaller checkpoint, and how far from the whole one it is."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError, UnsupportedModelError
from penstock.models.checkpoint import Source
from penstock.models.files import copy_settings
from penstock.models.hub import resolve
from penstock.models.low_rank import why_not
from penstock.models.over import Over
from penstock.models.sources import open_source, open_tokenizer
from penstock.nn.decoder import has_states
from penstock.nn.spec import DecoderSpec
from penstock.pipeline import qat
from penstock.pipeline.calibration import NUM_SAMPLES, WINDOW, CalibrationSet, calibration_set
from penstock.pipeline.new_folder import check_apart, new_folder
from penstock.pipeline.overlay import Overlay
from penstock.pipeline.parts import Parts
from penstock.pipeline.probe import Probe
from penstock.pipeline.prune.bases import Ranked, choose_bases
from penstock.pipeline.prune.choose import (
    NEURONS,
    Removed,
    Report,
    choose_layers,
    choose_neurons,
)
from penstock.pipeline.prune.pruned import Pruned
from penstock.quant.files import write_checkpoint
from penstock.runtime.engine_folder import is_engine
from penstock.tokenizer import VocabMap

REPORT = "pruning.json"
"""In the new checkpoint: what was left out, and the figures."""

_LEFT = ("config.json", "penstock.json", "graph.pt2", "README.md")
"""Files of a checkpoint that speak of its weights as they were."""


_OF_TRAINING = {
    "batch": "--batch-size",
    "learning_rate": "--learning-rate",
    "seed": "--seed",
}


@dataclass(frozen=True, slots=True)
class PruneOptions:
    """What is to go, what it is chosen by, and how what is left is trained."""

    calib: tuple[Path, ...] = ()
    layers: int = 0  # that go
    neurons: float = 0.0  # share of each feed-forward's
    kv_rank: int = 0  # dimensions that keys and values of a head are kept in; 0: all
    num_samples: int = NUM_SAMPLES  # windows of the text
    window: int = WINDOW  # tokens
    trial_windows: int = 4  # on which layers are tried and neurons watched
    held_out: int = 8  # windows that nothing is chosen by or trained on, for the figures
    held_out_text: tuple[Path, ...] = ()  # theirs; none: the text's last windows
    steps: int = 0  # of distillation from the whole model
    batch: int = 4
    learning_rate: float = 2e-4
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.calib:
            raise ConfigError("What goes is chosen by a text: give --calib.")
        if self.layers < 0:
            raise ConfigError(f"--layers {self.layers} is below 0.")
        if not 0 <= self.neurons < 1:
            raise ConfigError(f"--neurons {self.neurons:g} is no share from 0 to below 1.")
        if self.kv_rank < 0:
            raise ConfigError(f"--kv-rank {self.kv_rank} is below 0.")
        if not self.layers and not self.neurons and not self.kv_rank:
            raise ConfigError("Nothing to leave out: give --layers, --neurons or --kv-rank.")
        least = self.trial_windows + self.held_out * (not self.held_out_text)
        if min(self.trial_windows, self.held_out) < 1:
            raise ConfigError(
                f"--trial-windows {self.trial_windows}, --held-out {self.held_out}: one of each is "
                "the least."
            )
        if self.num_samples < least:
            raise ConfigError(
                f"--num-samples {self.num_samples} are fewer than the {least} windows that are "
                f"tried on ({self.trial_windows}) and held out."
            )
        if self.steps < 0:
            raise ConfigError(f"--steps {self.steps} is below 0.")
        if self.steps:
            self.training()  # refuses what it can't do
            return
        usual = {f.name: f.default for f in fields(self)}
        for name, option in _OF_TRAINING.items():
            if getattr(self, name) != usual[name]:
                raise ConfigError(f"{option} is of training: give --steps too.")

    def training(self) -> qat.QatOptions:
        """Of the distillation."""
        return qat.QatOptions(
            self.steps, self.batch, self.learning_rate, distillation=1.0, seed=self.seed
        )


@dataclass(slots=True)
class Pruning:
    """What was left out, and what it cost, on windows that were held out."""

    model: str
    layers: list[Removed] = field(default_factory=list)  # in the order in which they went
    neurons: int | None = None  # of each feed-forward that stay
    neurons_before: int = 0
    kv_rank: int | None = None  # dimensions that keys and values of a head are kept in
    head_dim: int = 0
    kv_values: int = 0  # that the cache has of a token, in all layers
    kv_values_before: int = 0
    weights: int = 0
    weights_before: int = 0
    tokens: int = 0  # of the windows that were held out
    divergence: float = 0.0  # mean KL from the whole model, nats
    recovered: float | None = None  # the same after training
    perplexity: dict[str, float] = field(default_factory=dict)  # whole, pruned, trained

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def prune_model(
    model: str | Path,
    output: Path,
    options: PruneOptions,
    *,
    force: bool = False,
    report: Report | None = None,
) -> Pruning:
    """Write `model` without some layers, neurons and dimensions of keys and values to the folder
    `output`, a checkpoint like any.

    Raises ConfigError for what can't be left out, UnsupportedModelError for models with experts,
    latents or pictures, or whose config.json can't say what is left.
    """
    tell = report or (lambda *_: None)
    source = resolve(model)
    if is_engine(source):
        raise ConfigError(f"{source} is an engine: prune the model that it was built from.")
    check_apart(source, output)
    parts = _parts(source)
    _check(parts, options)
    text = _texts(source, parts, options)
    found = Pruning(str(model), weights_before=_count(parts.source), tokens=0)
    with new_folder(output, force=force, own_files=_own_files) as folder:
        read, held = text
        found.tokens = held.num_tokens
        pruned = _chosen(parts, read, options, found, tell)
        tensors: Sequence[tuple[str, Any]] | None = None
        if options.steps:
            small = Parts.of(pruned)

            def step(done: int, total: int, loss: float) -> None:
                tell(f"training, KL {loss:.4f}", done, total)

            tensors = list(qat.distil(small, parts, read, options.training(), step))
        tell("comparing", 0, 0)
        trained = None if tensors is None else Overlay(pruned, tensors)
        _compare(parts, pruned, trained, held, found)
        tell("writing", 0, 0)
        last = trained or pruned
        found.weights = _count(last)
        write_checkpoint(folder, last.config, ((name, last.read(name)) for name in last.names()))
        copy_settings(source, folder, but=_LEFT)
        files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
        said = {**found.as_dict(), "files": files}
        (folder / REPORT).write_text(json.dumps(said, indent=2) + "\n")
    return found


def _parts(source: Path) -> Parts:
    try:
        return Parts.of(open_source(source))
    except UnsupportedModelError as error:
        why = str(error).partition(", so codes")[0].rstrip(".")
        raise UnsupportedModelError(f"{source}: pruning isn't built for it. {why}.") from error


def _check(parts: Parts, options: PruneOptions) -> None:
    decoder = parts.spec.decoder
    if why := _why_not(decoder) or ("norms without weights" if parts.has_plain_norms else None):
        raise UnsupportedModelError(
            f"{parts.spec.family!r} has {why}, which pruning isn't built for."
        )
    if options.steps:
        qat.check_trainable(decoder, parts.spec.family)
    if options.layers >= parts.num_layers:
        raise ConfigError(
            f"--layers {options.layers}, but the model has {parts.num_layers}: one at least stays."
        )
    if options.kv_rank:
        _check_rank(decoder, options.kv_rank)
    if options.neurons:
        before = decoder.layers[0].mlp.intermediate
        if stay(before, options.neurons) >= before:
            raise ConfigError(
                f"--neurons {options.neurons:g} of {before:,} leaves them all: what stays is a "
                f"multiple of {NEURONS}. Raise it, or leave it out."
            )


def _check_rank(decoder: DecoderSpec, rank: int) -> None:
    for layer in decoder.layers:
        dim = layer.attention.head_dim
        if layer.attention.kv_rank:
            raise ConfigError(
                f"The model keeps keys and values in {layer.attention.kv_rank} dimensions already: "
                "give the one that it was made of, or leave --kv-rank out."
            )
        if rank == dim:
            raise ConfigError(f"--kv-rank {rank} of {dim} dimensions leaves them all. Lower it.")
        if why := why_not(layer.attention, rank):
            can = [r for r in range(1, dim) if why_not(layer.attention, r) is None]
            way_out = (
                f"It may be {', '.join(map(str, can))}." if can else "It can't be for this model."
            )
            raise ConfigError(f"--kv-rank {rank} isn't built: {why}. {way_out}")


def _why_not(decoder: DecoderSpec) -> str | None:
    if decoder.vision is not None:
        return "a tower for pictures"
    if any(layer.mlp.experts is not None for layer in decoder.layers):
        return "experts"
    if any(layer.attention.latent is not None for layer in decoder.layers):
        return "attention over latents (MLA)"
    if has_states(decoder.layers):
        return "layers with states"
    if decoder.reads_beside or any(layer.attention.value_norm for layer in decoder.layers):
        return "normed values, or layers that read more than the stream"
    if not all(layer.mlp.intermediate for layer in decoder.layers):
        return "layers without a feed-forward block"
    if any(layer.attention.is_absent for layer in decoder.layers):
        return "layers without attention"
    return None


def stay(neurons: int, share: float) -> int:
    """How many of so many stay where a share goes."""
    return max(math.ceil(neurons * (1 - share) / NEURONS) * NEURONS, NEURONS)


def _texts(
    source: Path, parts: Parts, options: PruneOptions
) -> tuple[CalibrationSet, CalibrationSet]:
    """What is read, and what is held out: windows of one length, enough of them."""
    size, reduced = parts.spec.decoder.vocab_size, VocabMap.load(source)
    whole = size if reduced is None else reduced.original_size
    window, most = options.window, parts.spec.decoder.max_position
    if window > most and window != WINDOW:
        raise ConfigError(f"--window {window} is more than the model's {most} positions. Lower it.")
    window = min(window, most)
    tokenizer = open_tokenizer(source, vocab_size=whole)

    def windows(files: tuple[Path, ...], count: int, least: int) -> CalibrationSet:
        text = calibration_set(files, tokenizer, num_samples=count, window=window, reduced=reduced)
        text.check(size, parts.spec.decoder.max_position)
        full = CalibrationSet(text.name, tuple(x for x in text.windows if len(x) == window))
        if len(full.windows) < least:
            raise ConfigError(
                f"{text.name} has {len(full.windows)} windows of {window} tokens, but {least} are "
                "tried on or held out. Give more text, or shorter windows (--window)."
            )
        return full

    held, tried = options.held_out, options.trial_windows
    if options.held_out_text:
        text = windows(options.calib, options.num_samples, tried)
        return text, windows(options.held_out_text, held, held)
    text = windows(options.calib, options.num_samples, tried + held)
    return (
        CalibrationSet(text.name, text.windows[:-held]),
        CalibrationSet(text.name, text.windows[-held:]),
    )


def _chosen(
    parts: Parts, text: CalibrationSet, options: PruneOptions, found: Pruning, tell: Report
) -> Over:
    probe = Probe(parts, text.first(options.trial_windows))
    layers = list(range(parts.num_layers))
    if options.layers:
        probe.remember()
        found.layers = choose_layers(probe, options.layers, tell)
        gone = {one.layer for one in found.layers}
        layers = [i for i in layers if i not in gone]
    neurons: list[Tensor] | None = None
    found.neurons_before = parts.spec.decoder.layers[0].mlp.intermediate
    if options.neurons:
        found.neurons = stay(found.neurons_before, options.neurons)
        neurons = choose_neurons(probe, layers, found.neurons, tell)
    pruned: Over = Pruned(parts, layers, neurons)
    found.kv_values_before = _kept(parts)
    if options.kv_rank:
        found.kv_rank = options.kv_rank
        found.head_dim = parts.spec.decoder.layers[0].attention.head_dim
        left = Parts.of(pruned)
        probe = Probe(left, text.first(options.trial_windows))
        pruned = Ranked(left, choose_bases(left, probe, options.kv_rank, tell))
    found.kv_values = _kept(Parts.of(pruned))
    return pruned


def _kept(parts: Parts) -> int:
    """Values that a cache has of a token."""
    return sum(2 * math.prod(x.attention.cached) for x in parts.spec.decoder.layers)


def _compare(
    parts: Parts, pruned: Source, trained: Source | None, held: CalibrationSet, found: Pruning
) -> None:
    """The models on windows that were held out."""
    whole = Probe(parts, held)
    whole.remember()
    found.perplexity["whole"] = _perplexity(whole.reference, held)
    small = Probe(Parts.of(pruned), held)
    found.divergence = whole.compare(small)
    found.perplexity["pruned"] = _own(small, held)
    if trained is not None:
        after = Probe(Parts.of(trained), held)
        found.recovered = whole.compare(after)
        found.perplexity["trained"] = _own(after, held)


def _own(probe: Probe, held: CalibrationSet) -> float:
    probe.remember()
    return _perplexity(probe.reference, held)


def _perplexity(predicted: Sequence[Tensor], held: CalibrationSet) -> float:
    """Of the windows' tokens but their first."""
    total, count = 0.0, 0
    rows = torch.cat(list(predicted))
    at = 0
    for window in held.tensors():
        own = rows[at : at + len(window) - 1]
        total -= float(own.gather(1, window[1:, None].long()).sum(dtype=torch.float64))
        count += len(window) - 1
        at += len(window)
    return math.exp(total / count)


def _count(source: Source) -> int:
    return sum(math.prod(source.shape(name)) for name in source.names())


def _own_files(folder: Path) -> frozenset[str] | None:
    """What a pruning has put into `folder`, by its report."""
    try:
        files = json.loads((folder / REPORT).read_text(encoding="utf-8"))["files"]
        return frozenset((REPORT, *files)) if isinstance(files, list) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
