"""`penstock build`: a model packed, planned and timed for this machine, as an engine folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.device_options import Mmproj, NoMmproj, through
from penstock.cli.options import Dtype, KvCacheDtype, MaxModelLen, Model, Quantization
from penstock.cli.progress import progress_line

_WORDS = {
    "pack": "packing weights",
    "plan": "planning steps",
    "compile": "compiling the step",
    "time": "timing steps",
}

Profile = Annotated[
    str | None,
    typer.Option(
        help="Tokens of a step: MIN,OPT,MAX. MIN to MAX are timed; prompts are computed in "
        "steps of at least OPT. Default: 1,512,2048."
    ),
]
Passes = Annotated[
    str | None,
    typer.Option(
        help="Passes over the graph, by name, joined by commas; none for none of them. "
        "Default: all (docs/graph.md)."
    ),
]
Forward = Annotated[
    str,
    typer.Option(
        help="What a step runs by: program, one native call; package, the graph compiled by "
        "AOTInductor, which needs a C++ compiler here and none where it runs."
    ),
]


def build(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="The engine folder to make.")],
    quantization: Quantization = None,
    dtype: Dtype = "auto",
    kv_cache_dtype: KvCacheDtype = "auto",
    max_num_seqs: Annotated[int, typer.Option(help="Sequences in one step, at most.")] = 64,
    max_model_len: MaxModelLen = None,
    profile: Profile = None,
    passes: Passes = None,
    device: Annotated[
        str, typer.Option(help="What it runs on: cpu or cuda, which needn't be here.")
    ] = "cpu",
    forward: Forward = "program",
    mmproj: Mmproj = None,
    no_mmproj: NoMmproj = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    no_timing_cache: Annotated[
        bool,
        typer.Option("--no-timing-cache", help="Time anew what an earlier build has measured."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an engine there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Make an engine folder: it starts in a moment and runs without being prepared."""
    from penstock.pipeline.build import BuildOptions, parse_profile
    from penstock.pipeline.build import build as run

    options = BuildOptions(
        model=model,
        output=output,
        revision=revision,
        quantization=quantization,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        profile=None if profile is None else parse_profile(profile),
        passes=None if passes is None else _names(passes),
        device=device,
        forward=forward,
        force=force,
        timing_cache=not no_timing_cache,
        **through(mmproj, no_mmproj),
    )
    with progress_line() as show:
        report = run(options, lambda phase, done, total: show(_WORDS[phase], done, total))
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    for line in lines(report, output):
        typer.echo(line)


def _names(passes: str) -> tuple[str, ...]:
    return () if passes == "none" else tuple(name.strip() for name in passes.split(","))


def lines(report: dict[str, Any], output: Path) -> list[str]:
    """The report for a reader."""
    sizes, chosen = report["bytes"], report["chosen"]
    low, usual, most = report["choices"]["profile"]
    seconds = report["seconds"]
    limits = report["choices"]
    by = {
        "program": "in one call",
        "package": "in a compiled package",
        "graphs": "by CUDA graphs, recorded when it starts",
    }[limits["forward"]]
    steps = f"{len(report['operators'])} operators {by}"
    tokens = chosen["prefill_tokens"] or most
    graph = report["graph"]
    before, after = (sum(graph[when].values()) for when in ("before", "after"))
    found = "disturbed, nothing chosen" if report["disturbed"] else report["timings"]
    return [
        f"engine     {output}",
        f"weights    {report['weight_formats']}, {sizes['weights_file'] / 1e6:,.1f} MB",
        f"step       {steps}, {low} to {most} tokens, usually {usual}",
        f"graph      {graph['source']}: {before} operators, {after} after passes",
        f"limits     {limits['max_num_seqs']} sequences of up to {limits['max_model_len']} tokens",
        f"workspace  {sizes['workspace'] / 1e6:,.1f} MB for prompts and decoding; "
        f"cache {sizes['cache_per_token']:,} bytes a token",
        f"timings    {found}; steps with prompts of {tokens} tokens",
        "took       " + ", ".join(f"{phase} {s:.1f} s" for phase, s in seconds.items())
        + f"; at most {report['peak_bytes'] / 1e6:,.0f} MB of memory",
    ]  # fmt: skip
