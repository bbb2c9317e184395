"""`penstock profile`: where a step's time goes, operator by operator, beside the floor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
from penstock.cli.outputs import checked, keep
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.bench.profile import PhaseProfile, Profile, Row


@grouped
def profile(
    model: Model = MODEL,
    prompt_len: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of each prompt. Default: 512, or what the model has."),
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", "--output-len", min=1, help="Decoding steps to look at.")
    ] = 16,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    context: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens in the cache when decoding starts. Default: --prompt-len."
        ),
    ] = None,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    placed: Placed = PLACED,
    json_file: JsonFile = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            callback=checked, help="Write a trace to this file, for chrome://tracing or Perfetto."
        ),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(callback=checked, help="Write a roofline plot to this file.")
    ] = None,
) -> None:
    """Show where prefill and decode spend their time: a row an operator, with its floor."""
    from rich.console import Console

    from penstock.bench import profile as benchmark
    from penstock.bench.latency import WARM_UP_STEPS, Workload
    from penstock.bench.workload import check_length, longest

    if placed.has_stages:
        raise ConfigError(
            "penstock profile times the operators of one process, and stages have them in several: "
            "leave --pipeline-parallel-size and --stage out."
        )
    if placed.shares_context:
        raise ConfigError(
            "penstock profile times the operators of one process beside the floor of a whole step, "
            "of which others compute some rows: leave --context-parallel-size out."
        )
    output_len = steps + WARM_UP_STEPS + 1
    if prompt_len is None:
        prompt_len = max(1, min(512, longest(model) - output_len))
    check_length(
        model, max(prompt_len, context or prompt_len), output_len,
        "--prompt-len, --context or --steps",
    )  # fmt: skip
    workload = Workload(
        input_len=prompt_len,
        output_len=output_len,
        batch_size=batch_size,
        context=context or prompt_len,
        repeats=3,
    )
    config = workload.config(
        model,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        **placed.chosen(),
    )
    found = benchmark.run(config, load(config), workload)
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, _WIDTH)
    for phase in found.phases:
        console.print(_table(phase))
        console.print()
    for line in _remarks(found):
        console.print(line, style="dim", markup=False)
    _write(found, json_file, trace, svg)


def _title(found: Profile) -> str:
    s = found.setup
    return f"{s['model']}, {s['weights']} weights"


def _write(found: Profile, json_file: Path | None, trace: Path | None, svg: Path | None) -> None:
    from penstock.roofline.plot import Dot, roofline_svg
    from penstock.roofline.trace import chrome_trace

    texts: dict[Path, str] = {}
    if json_file is not None:
        texts[json_file] = json.dumps(found.as_dict(), indent=2) + "\n"
    if trace is not None:
        texts[trace] = json.dumps(chrome_trace(found.spans, f"penstock: {_title(found)}"))
    if svg is not None:
        dots = [
            Dot(
                label=row.op,
                phase=f"{phase.name}, {phase.what}",
                intensity=row.intensity,
                flops_per_s=row.flops / row.seconds,
                share=row.share,
                cached=row.bound == "cache",
            )
            for phase in found.phases
            for row in phase.rows
            if row.flops and row.seconds
        ]
        processor = found.environment["hardware"]["processor"]
        kernels = f"{found.environment['threads']} threads, {found.environment['isa']} kernels"
        gpu = getattr(found.peaks, "name", "")
        caption = f"{gpu}, Triton's kernels" if gpu else f"{processor}, {kernels}"
        texts[svg] = roofline_svg(found.peaks, dots, f"Roofline: {_title(found)}", caption)
    for file, text in texts.items():
        keep(file, text)


_WIDTH = 112
"""Of the tables: a narrower terminal wraps their lines rather than lose figures."""

_COLUMNS = (
    "calls", "time", "of step", "bytes", "FLOPs", "FLOP/B", "floor", "achieved/floor", "bound",
)  # fmt: skip


def _table(phase: PhaseProfile) -> Table:
    from rich.table import Table

    from penstock.bench.report import percent, seconds

    table = Table(
        title=f"{phase.name}: {phase.what}",
        title_style="bold",
        title_justify="left",
        box=None,
        header_style="bold",
        padding=(0, 2, 0, 0),
    )
    table.add_column("operator", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "bound" else "right", no_wrap=True)
    for row in phase.rows:
        table.add_row(*_cells(row))

    def add(name: str, time: float, style: str = "dim") -> None:
        table.add_row(name, "", seconds(time), percent(time / phase.seconds), style=style)

    add("between operators", phase.between_s)
    for part, time in phase.parts.items():
        add(part, time)
    moved, flops = sum(r.bytes_moved for r in phase.rows), sum(r.flops for r in phase.rows)
    table.add_row(
        "step",
        "",
        seconds(phase.seconds),
        "100%",
        *_amounts(moved, flops),
        seconds(phase.floor.seconds),
        percent(phase.floor.seconds / phase.seconds),
        phase.floor.bound,
        style="bold green",
    )
    return table


def _cells(row: Row) -> tuple[str, ...]:
    from penstock.bench.report import amount, percent, seconds

    if row.bound == "–":
        counted = ("", "", "", "", "")
    elif row.bound == "cache":
        counted = ("0", amount(row.flops, ""), f"({row.intensity:.2f})", "", "")
    else:
        counted = (
            *_amounts(row.bytes_moved, row.flops),
            seconds(row.floor_s),
            percent(row.achieved or 0.0),
        )
    return row.op, f"{row.calls:g}", seconds(row.seconds), percent(row.share), *counted, row.bound


def _amounts(moved: float, flops: float) -> tuple[str, str, str]:
    from penstock.bench.report import amount

    return amount(moved, "B"), amount(flops, ""), f"{flops / moved:,.2f}" if moved else ""


def _about_gaps(found: Profile) -> list[str]:
    """Where a GPU stood still; nothing of a CPU."""
    from penstock.bench.report import count, percent

    gaps = found.gaps
    if gaps is None:
        why = found.why_no_gaps
        return [f"The GPU's gaps weren't seen: {why}"] if why else []
    other = gaps.other_s / gaps.wall_s if gaps.wall_s else 0.0
    return [
        f"The GPU while it decodes: busy {percent(gaps.busy_share)} of the time, waiting for a "
        f"launch {percent(gaps.launch_share)}, between kernels {percent(other)}; "
        f"{count(gaps.kernels, 'kernel')} by {gaps.launches:,} launches; "
        f"{percent(gaps.hidden)} of the host's work is hidden behind the GPU's."
    ]


def _remarks(found: Profile) -> list[str]:
    from penstock.bench.report import describe_peaks, seconds

    lines = [
        f"{phase.name}: {seconds(phase.seconds)} undisturbed, of which the forward pass "
        f"{seconds(phase.forward_s)}; its operators, timed one by one, {seconds(phase.ops_s)}."
        for phase in found.phases
    ]
    if any(phase.between_s < 0 for phase in found.phases):
        lines.append(
            "Below zero between operators: timing each costs about a microsecond, and the machine "
            "was busier while they were timed."
        )
    lines += [
        f"{phase.name}: {phase.experts:.1f} experts are read in a layer and step."
        for phase in found.phases
        if phase.experts is not None
    ]
    lines += _about_gaps(found)
    return [
        *lines,
        "bytes: weights, keys and values; 'cache': only activations move, and stay there "
        "(FLOPs per byte of them in brackets).",
        describe_peaks(found.peaks, found.setup["compute"]),
    ]
