"""`penstock bench`: how fast a model runs here, and the share of what this machine allows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.bench_serve import serve
from penstock.cli.bench_speculate import speculate
from penstock.cli.bench_structured import structured
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
from penstock.cli.reach_options import MaxAttentionWindow, SinkTokenLength, reaching

if TYPE_CHECKING:
    from penstock.bench.report import Report

app = typer.Typer(
    help="Measure a model's speed, and its share of what this machine allows.",
    no_args_is_help=True,
)

InputLen = Annotated[int, typer.Option(min=1, help="Tokens of each prompt, chosen at random.")]
OutputLen = Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")]


@app.command()
@grouped
def latency(
    model: Model = MODEL,
    input_len: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of each prompt. Default: 512, or what the model has."),
    ] = None,
    output_len: OutputLen = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens in the cache when decoding starts. Default: --input-len."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs; the figures are their median.")] = 3,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    max_attention_window: MaxAttentionWindow = None,
    sink_token_length: SinkTokenLength = None,
    placed: Placed = PLACED,
    json_file: JsonFile = None,
) -> None:
    """Time a batch that starts together: its prompts (prefill), then each step (decode)."""
    from penstock.bench import latency as benchmark
    from penstock.bench.workload import check_length, longest

    if input_len is None:
        input_len = max(1, min(512, longest(model) - output_len))
    if max_attention_window is None:
        check_length(
            model, max(input_len, context or input_len), output_len,
            "--input-len, --context or --output-len",
        )  # fmt: skip
    workload = benchmark.Workload(
        input_len=input_len,
        output_len=output_len,
        batch_size=batch_size,
        context=context or input_len,
        repeats=repeats,
    )
    config = workload.config(
        model,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        **reaching(max_attention_window, sink_token_length),
        **placed.chosen(),
    )
    _show(benchmark.run(config, load(config), workload), json_file)


@app.command()
@grouped
def throughput(
    model: Model = MODEL,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests, all there at the start.")] = 64,
    input_len: InputLen = 128,
    output_len: OutputLen = 64,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 64,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    max_attention_window: MaxAttentionWindow = None,
    sink_token_length: SinkTokenLength = None,
    placed: Placed = PLACED,
    json_file: JsonFile = None,
) -> None:
    """Time many requests through the scheduler."""
    from penstock.bench import throughput as benchmark
    from penstock.bench.workload import check_length

    if max_attention_window is None:
        check_length(model, input_len, output_len, "--input-len or --output-len")
    workload = benchmark.Workload(
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        max_num_seqs=max_num_seqs,
    )
    config = workload.config(
        model,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        **reaching(max_attention_window, sink_token_length),
        **placed.chosen(),
    )
    _show(benchmark.run(config, load(config), workload), json_file)


app.command()(serve)
app.command()(speculate)
app.command()(structured)


def _show(report: Report, file: Path | None) -> None:
    from rich.console import Console

    Console(highlight=False, soft_wrap=True).print(report.table())
    if file is not None:
        keep_json(file, report.as_dict())
