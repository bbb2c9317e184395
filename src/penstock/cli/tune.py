"""`penstock tune`: the batch and the size of steps that keep requests within their levels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import console
from penstock.cli.device_options import PLACED, Placed
from penstock.cli.loading import load
from penstock.cli.options import (
    MODEL,
    Dtype,
    JsonFile,
    KvCacheDtype,
    Model,
    Quantization,
    grouped,
)
from penstock.cli.outputs import keep_json

if TYPE_CHECKING:
    from penstock.bench.tune import Point, Tuned, Workload

_NAMES = {"ttft": "first token", "tpot": "a token", "itl": "gap", "e2el": "answer"}


@grouped
def tune(
    model: Model = MODEL,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            help="What 99% of the requests must keep: chat (ttft:500 tpot:50), voice (ttft:200 "
            "tpot:30), or 'ttft:500 tpot:50 itl:100 e2el:9000' in milliseconds. Default: chat."
        ),
    ] = None,
    input_len: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of each prompt. Default: 512, or what the model has."),
    ] = None,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 128,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="The most sequences at once.")] = 256,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Of each measurement, at least.")
    ] = 2.0,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    placed: Placed = PLACED,
    json_file: JsonFile = None,
) -> None:
    """Find how many sequences at once, in steps of what size, keep their time limits.

    Measured here, with random prompts, by clients that each ask again when they are answered.
    """
    from penstock.bench.serve.figures import parse_goodput
    from penstock.bench.tune import Workload, tune
    from penstock.bench.workload import check_length, longest

    levels = parse_goodput(goodput or ["chat"], ("ttft", "tpot", "itl", "e2el"))
    if input_len is None:
        input_len = max(1, min(512, longest(model) - output_len))
    check_length(model, input_len, output_len, "--input-len or --output-len")
    workload = Workload(input_len, output_len, levels, max_num_seqs, seconds)
    config = workload.config(
        model,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        **placed.chosen(),
    )
    runtime = load(config)
    console.note(_heading(workload))
    found = tune(config, runtime, workload, lambda point: console.note(_line(point)))
    _conclude(model, found, workload, placed)
    if json_file is not None:
        keep_json(json_file, found.as_dict())


def _heading(w: Workload) -> str:
    levels = ", ".join(f"{_NAMES[name]} {limit * 1e3:g} ms" for name, limit in w.levels.items())
    return f"{w.input_len:,} tokens in, {w.output_len:,} out; 99% of the requests within: {levels}"


def _line(point: Point) -> str:
    from penstock.bench.report import percent, seconds

    if point.ttft_p99_s is None or point.tpot_p99_s is None or point.itl_p99_s is None:
        return f"steps of {point.chunk:,}, {point.clients:,} at once: none ended in time"
    return (
        f"steps of {point.chunk:,}, {point.clients:,} at once: "
        f"{point.output_tokens_per_s:,.1f} tokens/s, first token {seconds(point.ttft_p99_s)}, "
        f"a token {seconds(point.tpot_p99_s)}, gap {seconds(point.itl_p99_s)} (99%); "
        f"{percent(point.kept)} within{'' if point.holds else ', too few'}"
    )


def _conclude(model: str, found: Tuned, workload: Workload, placed: Placed) -> None:
    """What to start a server with. Exit code 1 where nothing keeps the levels."""
    best = found.best
    if best is None:
        console.error(
            "Not even one request at a time keeps these limits here: raise them, shorten "
            "--input-len, or take a smaller model or --quantization."
        )
        raise typer.Exit(1)
    if best.clients == min(workload.max_num_seqs, best.chunk):
        console.note("More might hold as well: no more were tried.")
    typer.echo(
        f"penstock serve {model} --max-num-seqs {best.clients} "
        f"--max-num-batched-tokens {max(best.chunk, best.clients)}{placed.among}"
    )
