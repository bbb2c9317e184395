"""`penstock export`: a checkpoint folder with the model's graph and a manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.export_options import MethodFlags, WeightFlags
from penstock.cli.options import MODEL, KvCacheDtype, MaxModelLen, Model, grouped
from penstock.cli.progress import progress_line
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.pipeline.export import Export
    from penstock.pipeline.vocabulary import VocabularyChoice

_OF_ONNX = ("model", "output", "onnx", "max_model_len", "force")
"""What an ONNX file is written by; all else is about the folder."""


@grouped
def export(
    context: typer.Context,
    weights: WeightFlags,
    method: MethodFlags,
    model: Model = MODEL,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The folder to write.")
    ] = None,
    *,
    kv_cache_dtype: KvCacheDtype = "auto",
    max_model_len: MaxModelLen = None,
    reduce_vocab: Annotated[
        str | None,
        typer.Option(
            help="Keep so many tokens, the most frequent of --calib, or those that a file lists."
        ),
    ] = None,
    onnx: Annotated[
        Path | None,
        typer.Option(help="Write the model as ONNX, in float32, to this file; with or without -o."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Write a model as a folder: checkpoint, tokenizer, graph and manifest.

    The folder loads wherever a model is asked for, here and in other tools; `penstock build` makes
    an engine of it. It is there whole or not at all.
    """
    _check_targets(context, output, onnx)
    if onnx is not None:
        _write_onnx(model, onnx, max_model_len, force)
    if output is None:
        return
    from penstock.pipeline.export import export_model

    vocabulary, texts = _texts(reduce_vocab, weights)
    new_weights = weights.new_weights(method, texts)
    with progress_line() as progress:
        done = export_model(
            model,
            output,
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=max_model_len,
            weights=new_weights,
            reduce_vocab=vocabulary,
            force=force,
            progress=progress,
        )
    _report(done, as_json)


def _check_targets(context: typer.Context, output: Path | None, onnx: Path | None) -> None:
    """Raises ConfigError where nothing is to be written, or an option doesn't reach what is."""
    if output is None and onnx is None:
        raise ConfigError("Nothing to write: give a folder by -o DIR, a file by --onnx, or both.")
    given = {
        name
        for name in context.params
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }
    for name in sorted(given.difference(_OF_ONNX)) if output is None else ():
        flag = "--json" if name == "as_json" else f"--{name.replace('_', '-')}"
        raise ConfigError(f"{flag} is about the folder: give one by -o DIR.")
    if output is not None and onnx is not None and output.resolve() in onnx.resolve().parents:
        raise ConfigError(
            f"--onnx {onnx} lies in {output}, which is written whole, by itself. Choose a place "
            "outside of it."
        )
    if onnx is not None and given & {"quant", "budget", "reduce_vocab", "merge_lora"}:
        raise ConfigError(
            "--onnx writes the model as it is, in float32, so --quant, --budget, --reduce-vocab "
            "and --merge-lora don't reach it. Write it by a command of its own; an adapter can be "
            "merged into a folder first, which is then the model."
        )


def _texts(
    reduce_vocab: str | None, weights: WeightFlags
) -> tuple[VocabularyChoice | None, tuple[Path, ...]]:
    """Which tokens stay, and the texts that values are fitted to."""
    from penstock.pipeline.vocabulary import VocabularyChoice

    texts = tuple(weights.calib or ())
    if reduce_vocab is None:
        return None, texts
    vocabulary = VocabularyChoice.parse(reduce_vocab, texts)
    if _is_fitted(weights):
        return vocabulary, texts
    if vocabulary.keep is not None and texts:
        raise ConfigError(
            f"--reduce-vocab {reduce_vocab} lists the tokens, so --calib can't take effect. Leave "
            "one of them out."
        )
    return vocabulary, ()


def _is_fitted(weights: WeightFlags) -> bool:
    """Whether the quantization asked for looks at a text."""
    if weights.budget is not None or weights.quant is None:
        return weights.budget is not None
    static = any(name.endswith("-static") for name in (weights.quant, *(weights.special or ())))
    return weights.method != "rtn" or static


def _report(done: Export, as_json: bool) -> None:
    if as_json:
        from dataclasses import asdict

        typer.echo(json.dumps(asdict(done.manifest), indent=2))
        return
    files: dict[str, dict[str, Any]] = done.manifest.files
    size = sum(entry["bytes"] for entry in files.values())
    graph, weights = done.manifest.graph, done.manifest.choices["weights"]
    typer.echo(f"{done.folder}: {len(files) + 1} files, {size / 1e6:,.1f} MB")
    if "quant" in weights:
        typer.echo(
            f"  weights in {weights['quant']} by {weights['method']}, layout {weights['layout']}"
        )
    typer.echo(
        f"  graph of {graph['operators']} operators, {graph['formats']}, cache "
        f"{done.manifest.kv_cache_dtype}, blocks of {graph['block_size']} tokens"
    )


def _write_onnx(model: str, file: Path, max_model_len: int | None, force: bool) -> None:
    from penstock.pipeline.onnx import export_onnx

    size = export_onnx(model, file, max_model_len=max_model_len, force=force)
    typer.echo(f"{file}: ONNX, float32, {size / 1e6:,.1f} MB")
