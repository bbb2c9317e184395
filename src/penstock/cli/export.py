"""`penstock export`: a checkpoint folder with the model's graph and a manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import console
from penstock.cli.options import MODEL, KvCacheDtype, MaxModelLen, Model
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.pipeline.export import Export


def export(
    model: Model = MODEL,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The folder to write.")
    ] = None,
    *,
    kv_cache_dtype: KvCacheDtype = "auto",
    max_model_len: MaxModelLen = None,
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
    if output is None and onnx is None:
        raise ConfigError("Nothing to write: give a folder by -o DIR, a file by --onnx, or both.")
    if output is None:
        given = {"--kv-cache-dtype": kv_cache_dtype != "auto", "--json": as_json}
        for name, is_given in given.items():
            if is_given:
                raise ConfigError(f"{name} is about the folder: give one by -o DIR.")
    if onnx is not None:
        _write_onnx(model, onnx, max_model_len, force)
    if output is None:
        return
    from penstock.pipeline.export import export_model

    done = export_model(
        model,
        output,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        force=force,
        progress=lambda what: console.note(f"{what} …") if console.is_terminal() else None,
    )
    if as_json:
        from dataclasses import asdict

        typer.echo(json.dumps(asdict(done.manifest), indent=2))
    else:
        _report(done)


def _report(done: Export) -> None:
    files: dict[str, dict[str, Any]] = done.manifest.files
    size = sum(entry["bytes"] for entry in files.values())
    graph = done.manifest.graph
    typer.echo(f"{done.folder}: {len(files) + 1} files, {size / 1e6:,.1f} MB")
    typer.echo(
        f"  graph of {graph['operators']} operators, {graph['formats']}, cache "
        f"{done.manifest.kv_cache_dtype}, blocks of {graph['block_size']} tokens"
    )


def _write_onnx(model: str, file: Path, max_model_len: int | None, force: bool) -> None:
    from penstock.pipeline.onnx import export_onnx

    size = export_onnx(model, file, max_model_len=max_model_len, force=force)
    typer.echo(f"{file}: ONNX, float32, {size / 1e6:,.1f} MB")
