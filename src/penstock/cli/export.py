"""`penstock export`: a checkpoint folder with the model's graph and a manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from penstock.cli import console
from penstock.cli.options import MODEL, KvCacheDtype, MaxModelLen, Model
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.pipeline.export import Export
    from penstock.quant.files import Layout


def export(
    model: Model = MODEL,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The folder to write.")
    ] = None,
    *,
    kv_cache_dtype: KvCacheDtype = "auto",
    max_model_len: MaxModelLen = None,
    quant: Annotated[
        str | None,
        typer.Option(
            help="Store the layers' matrices in this scheme: w4a16-g128, w8a8, fp8, nf4, … "
            "(see --quantization of generate)."
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="How values are chosen: rtn, gptq, awq, smoothquant, awq+gptq, smoothquant+gptq, "
            "qat. Default: gptq with --calib, else rtn."
        ),
    ] = None,
    calib: Annotated[
        list[Path] | None,
        typer.Option(help="A text that values are fitted to; may be repeated."),
    ] = None,
    num_samples: Annotated[int, typer.Option(min=1, help="Windows of the calibration text.")] = 128,
    window: Annotated[int, typer.Option(min=2, help="Tokens of each window.")] = 512,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Choose each matrix's scheme by what it loses on the text: 4.5bpw, or a loss."
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(help="A scheme of the output head, too. Default: it stays as it is."),
    ] = None,
    layout: Annotated[
        str,
        typer.Option(help="compressed-tensors, awq, gptq, fp8 or bitsandbytes."),
    ] = "compressed-tensors",
    reduce_vocab: Annotated[
        str | None,
        typer.Option(
            help="Keep so many tokens, the most frequent of --calib, or those that a file lists."
        ),
    ] = None,
    merge_lora: Annotated[
        Path | None, typer.Option(help="Add the LoRA adapter in this folder (PEFT's layout).")
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
    if output is None and onnx is None:
        raise ConfigError("Nothing to write: give a folder by -o DIR, a file by --onnx, or both.")
    if output is None:
        given = {
            "--kv-cache-dtype": kv_cache_dtype != "auto",
            "--json": as_json,
            "--quant": quant is not None,
            "--budget": budget is not None,
            "--method": method is not None,
            "--calib": bool(calib),
            "--num-samples": num_samples != 128,
            "--window": window != 512,
            "--head": head is not None,
            "--layout": layout != "compressed-tensors",
            "--reduce-vocab": reduce_vocab is not None,
            "--merge-lora": merge_lora is not None,
        }
        for name, is_given in given.items():
            if is_given:
                raise ConfigError(f"{name} is about the folder: give one by -o DIR.")
    changed = (quant, budget, reduce_vocab, merge_lora) != (None, None, None, None)
    if onnx is not None and changed:
        raise ConfigError(
            "--onnx writes the model as it is, in float32, so --quant, --budget, --reduce-vocab "
            "and --merge-lora don't reach it. Write it by a command of its own; an adapter can be "
            "merged into a folder first, which is then the model."
        )
    if onnx is not None:
        _write_onnx(model, onnx, max_model_len, force)
    if output is None:
        return
    from penstock.pipeline.export import export_model
    from penstock.pipeline.new_weights import NewWeights
    from penstock.pipeline.vocabulary import VocabularyChoice

    texts = tuple(calib or ())
    vocabulary = None
    if reduce_vocab is not None:
        vocabulary = VocabularyChoice.parse(reduce_vocab, texts)
    fitted = quant is not None or budget is not None
    if vocabulary is not None and vocabulary.keep is not None and texts and not fitted:
        raise ConfigError(
            f"--reduce-vocab {reduce_vocab} lists the tokens, so --calib can't take effect. Leave "
            "one of them out."
        )
    done = export_model(
        model,
        output,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        weights=NewWeights(
            quant=quant,
            method=method,
            calib=texts if fitted or vocabulary is None else (),
            num_samples=num_samples,
            window=window,
            layout=cast("Layout", layout),
            head=head,
            budget=budget,
            merge_lora=merge_lora,
        ),
        reduce_vocab=vocabulary,
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
