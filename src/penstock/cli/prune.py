"""`penstock prune`: a checkpoint without what a text needs the least of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import MODEL, Model
from penstock.cli.progress import progress_line

if TYPE_CHECKING:
    from penstock.pipeline.prune import Pruning

_TEXT, _TRAINING = "Calibration text", "Training"


def prune(
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    calib: Annotated[
        list[Path],
        typer.Option(
            help="A text that what goes is chosen by; may be repeated.", rich_help_panel=_TEXT
        ),
    ],
    model: Model = MODEL,
    layers: Annotated[int, typer.Option(min=0, help="So many layers go.")] = 0,
    neurons: Annotated[
        float, typer.Option(help="This share of each feed-forward's neurons goes: 0.25.")
    ] = 0.0,
    kv_rank: Annotated[
        int,
        typer.Option(
            help="Keys and values of a head are kept in so many dimensions. Default: all."
        ),
    ] = 0,
    num_samples: Annotated[
        int, typer.Option(min=1, help="Windows of the text.", rich_help_panel=_TEXT)
    ] = 128,
    window: Annotated[
        int, typer.Option(min=2, help="Tokens of each window.", rich_help_panel=_TEXT)
    ] = 512,
    trial_windows: Annotated[
        int,
        typer.Option(
            help="Windows on which each layer is left out, and neurons are watched.",
            rich_help_panel=_TEXT,
        ),
    ] = 4,
    held_out: Annotated[
        int, typer.Option(help="Windows kept for the figures.", rich_help_panel=_TEXT)
    ] = 8,
    held_out_text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Of this text; may be repeated. Default: --calib's last.", rich_help_panel=_TEXT
        ),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(
            help="Steps of training to say what the whole model says. Default: none.",
            rich_help_panel=_TRAINING,
        ),
    ] = 0,
    batch_size: Annotated[
        int, typer.Option(help="Windows of a step.", rich_help_panel=_TRAINING)
    ] = 4,
    learning_rate: Annotated[
        float, typer.Option(help="Its largest.", rich_help_panel=_TRAINING)
    ] = 2e-4,
    seed: Annotated[
        int, typer.Option(help="Of the order of windows.", rich_help_panel=_TRAINING)
    ] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier pruning.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Write a model without some of its layers, neurons and dimensions of keys and values, and say
    how far from it that is.

    The folder is a checkpoint like any other: export, build, quantize, serve it (docs/pruning.md).
    """
    from penstock.pipeline.prune import PruneOptions, prune_model

    options = PruneOptions(
        calib=tuple(calib),
        layers=layers,
        neurons=neurons,
        kv_rank=kv_rank,
        num_samples=num_samples,
        window=window,
        trial_windows=trial_windows,
        held_out=held_out,
        held_out_text=tuple(held_out_text or ()),
        steps=steps,
        batch=batch_size,
        learning_rate=learning_rate,
        seed=seed,
    )
    with progress_line() as progress:
        found = prune_model(model, output, options, force=force, report=progress)
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        _report(found, output)


def _report(found: Pruning, output: Path) -> None:
    share = 1 - found.weights / found.weights_before
    typer.echo(
        f"{output}: {found.weights / 1e6:,.1f} M of {found.weights_before / 1e6:,.1f} M weights, "
        f"{share:.0%} left out"
    )
    if found.layers:
        gone = ", ".join(f"{one.layer} (KL {one.divergence:.4f})" for one in found.layers)
        typer.echo(f"layers gone, in this order: {gone}")
    if found.neurons is not None:
        typer.echo(f"neurons of each feed-forward: {found.neurons:,} of {found.neurons_before:,}")
    after = "" if found.recovered is None else f"; trained {found.recovered:.4f}"
    if found.kv_rank is not None:
        typer.echo(
            f"keys and values of a head: {found.kv_rank} of {found.head_dim} dimensions; of a "
            f"token {found.kv_values:,} of {found.kv_values_before:,} values in the cache"
        )
    each = ", ".join(f"{name} {value:.2f}" for name, value in found.perplexity.items())
    typer.echo(
        f"on {found.tokens:,} tokens held out: KL from the whole model {found.divergence:.4f}"
        f"{after}; perplexity {each}"
    )
