"""`penstock doctor`: what this machine has, what runs on it, and what is off."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.diagnosis import EXTRAS, Diagnosis, diagnose
from penstock.errors import EngineFolderError

if TYPE_CHECKING:
    from rich.table import Table


def doctor(
    engine: Annotated[
        Path | None, typer.Argument(help="An engine folder to look at: what it is, if it runs.")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure bandwidth and matrix peaks again.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what this machine has, which kernel runs for each operator and why."""
    found = diagnose(calibrate=calibrate)
    built = None if engine is None else examine(engine)
    if as_json:
        extra = {} if built is None else {"engine": built}
        typer.echo(json.dumps({**as_dict(found), **extra}, indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.print(_machine(found))
    console.print(_operators(found))
    if found.kernels.linear:
        console.print(_linear(found))
    if built is not None:
        console.print(_engine(built))
    for text in found.warnings:
        console.print(f"[yellow]warning:[/yellow] {text}", markup=True)
    if not found.warnings:
        console.print("[green]Nothing is off.[/green]")


def examine(folder: Path) -> dict[str, Any]:
    """What an engine folder was built for, its weights held against their sums, and whether it
    runs here; `why` says what keeps it from that.
    """
    from penstock.runtime.engine_folder import EngineFolder, read_manifest

    facts: dict[str, Any] = {"folder": str(folder), "runs": False, "why": ""}
    try:
        EngineFolder.open(folder, verify=True)
        facts["runs"] = True
    except EngineFolderError as error:
        facts["why"] = str(error)
    try:
        manifest = read_manifest(folder)
    except EngineFolderError:
        return facts
    return facts | {
        "weight_formats": manifest["weight_formats"],
        "weights_bytes": manifest["weights"]["bytes"],
        "workspace_bytes": manifest["workspace_bytes"],
        "choices": manifest["choices"],
        "fingerprint": manifest["fingerprint"],
    }


def _engine(built: dict[str, Any]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    rows = [("Engine", built["folder"])]
    if "choices" in built:
        choices, made_for = built["choices"], built["fingerprint"]
        rows += [
            ("Model", f"{choices['model']}, {built['weight_formats']}"),
            (
                "Limits",
                f"{choices['max_num_seqs']} sequences of up to {choices['max_model_len']} tokens, "
                f"cache in {choices['kv_cache_dtype']}",
            ),
            (
                "Made for",
                f"{made_for['arch']} {made_for['isa']}, Penstock {made_for['penstock']}, "
                f"torch {made_for['torch']} (on {made_for['machine']['processor']})",
            ),
            (
                "Bytes",
                f"{built['weights_bytes'] / 1e6:,.1f} MB of weights, "
                f"{built['workspace_bytes'] / 1e6:,.1f} MB of workspace",
            ),
        ]
    rows.append(
        ("Runs here", "yes, and its weights match their sums" if built["runs"] else built["why"])
    )
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, escape(value))
    return table


def as_dict(found: Diagnosis) -> dict[str, Any]:
    """What `--json` prints."""
    data = asdict(found)
    operators = found.kernels.operators
    data["kernels"]["operators"] = [
        {"operator": name, "runs": runs, "why": why} for name, runs, why in operators
    ]
    data["kernels"]["linear"] = [
        {"weights": weights, "few_rows": few, "many_rows": many}
        for weights, few, many in found.kernels.linear
    ]
    data["extras"] = {
        name: {"installed": there, "for": EXTRAS[name][1], "get": _get(name)}
        for name, there in found.extras.items()
    }
    return data


def _get(extra: str) -> str:
    return f"pip install penstock[{extra}]"


def _machine(found: Diagnosis) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _facts(found):
        table.add_row(name, escape(value))
    return table


def _facts(found: Diagnosis) -> list[tuple[str, str]]:
    hardware, kernels, peaks = found.hardware, found.kernels, found.peaks
    gib = 1 << 30
    rows = [
        ("Penstock", ", ".join(f"{name} {version}" for name, version in found.versions.items())),
        ("Processor", f"{hardware.processor}, {hardware.cores} cores"),
        ("Instruction sets", " ".join(hardware.flags) or "none that matter here"),
        ("In use", kernels.isa or f"reference kernels: {kernels.reason}"),
        ("Threads", f"{found.threads}, on {_cores(found)}"),
        ("Waiting threads", found.waiting),
        (
            "Memory",
            f"{hardware.memory_bytes / gib:.1f} GiB, {hardware.available_bytes / gib:.1f} free",
        ),
    ]
    if peaks is not None:
        tiles = "no AMX: as fast as float32"
        if peaks.tile_flops:
            tiles = f"{peaks.tile_flops / 1e12:.2f} TFLOP/s (AMX tiles, fed from L1)"
        int8 = "not measured: counts as bfloat16"
        if peaks.int8_ops:
            int8 = f"{peaks.int8_ops / 1e12:.2f} TOP/s"
        rows += [
            ("Memory read", f"{peaks.read_bytes_per_s / 1e9:.1f} GB/s"),
            ("Matrix, bfloat16", tiles),
            ("Matrix, int8", int8),
            ("Matrix, float32", f"{peaks.fma_flops / 1e12:.2f} TFLOP/s (FMA, from registers)"),
            ("Measured", f"{peaks.measured_at}, {peaks.threads} threads"),
        ]
    for model in found.models:
        size = f"{model.weight_bytes / 1e6:.1f} MB, {model.folder}"
        rows.append((f"Model {model.name}", size if model.folder else "not in this installation"))
    for name, there in found.extras.items():
        missing = f"not installed ({EXTRAS[name][1]}): {_get(name)}"
        rows.append((f"Extra {name}", "installed" if there else missing))
    if found.environment:
        rows.append(("Environment", " ".join(f"{k}={v}" for k, v in found.environment.items())))
    return rows


def _cores(found: Diagnosis) -> str:
    """`cores 0–3 of 8`."""
    runs: list[list[int]] = []
    for core in found.affinity:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    names = ", ".join(f"{a}" if a == b else f"{a}–{b}" for a, b in runs)
    return f"core{'s' * (len(found.affinity) != 1)} {names} of {found.machine_cores}"


def _linear(found: Diagnosis) -> Table:
    """How `linear` multiplies each kind of weights."""
    from rich.table import Table

    from penstock.kernels.load import TILE_MIN_ROWS

    rows = found.kernels.linear
    few, many = f"below {TILE_MIN_ROWS} rows", f"from {TILE_MIN_ROWS} rows"
    same = all(a == b for _, a, b in rows)
    names = ("linear by weights", *(["any number of rows"] if same else [few, many]))
    table = Table(*names, box=None, header_style="bold", padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*(row[:2] if same else row))
    return table


def _operators(found: Diagnosis) -> Table:
    from rich.table import Table

    table = Table("operator", "runs", "why", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for row in found.kernels.operators:
        table.add_row(*row)
    return table
