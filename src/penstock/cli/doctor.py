"""`penstock doctor`: what this machine has, what runs on it, and what is off."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.checkup_options import LOOK, Look, facts
from penstock.cli.diagnosis import EXTRAS, Diagnosis, GpuFound, diagnose
from penstock.cli.examined import Examined, examine
from penstock.cli.options import grouped
from penstock.errors import ConfigError, KernelError, get_extra

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from penstock.bench.finding import Finding
    from penstock.bench.served.quality import Probed
    from penstock.bench.speculate.checkup import Checkup
    from penstock.config import SpeculativeConfig


@grouped
def doctor(
    path: Annotated[
        str | None,
        typer.Argument(
            help="An engine, an export, a model's folder or a .gguf file: what it is, if it runs."
        ),
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Measure bandwidth and matrix peaks again, a GPU's too."),
    ] = False,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Drafts for the model at PATH (default: the embedded one): run it for seconds to "
            "see why few of them may be accepted.",
        ),
    ] = None,
    look: Look = LOOK,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what this machine has, which kernel runs for each operator and why; or with --base-url
    what is the matter with a server that runs.

    Exit code 1: what was given doesn't run here, or the server doesn't work.
    """
    look.check(path, speculative_config)
    if look.base_url is not None:
        _look(look, calibrate, as_json)
        return
    asked = _asked(speculative_config)
    examined = None if path is None else examine(path)
    found = diagnose(calibrate=calibrate)
    runs = examined is None or examined.runs
    checked = None
    if asked is not None and runs:
        checked = _check_up(path, asked, found)
    probed = _probed(path) if look.probe and runs else None
    if as_json:
        extra: dict[str, Any] = {} if examined is None else {"examined": examined.as_dict()}
        extra |= {} if checked is None else {"speculation": checked.as_dict()}
        extra |= {} if probed is None else {"probe": asdict(probed)}
        typer.echo(json.dumps({**as_dict(found), **extra}, indent=2))
    else:
        _print(found, examined, checked, probed)
    wrong = probed is not None and bool(probed.findings)
    if not runs or wrong or (checked is not None and not checked.runs):
        raise typer.Exit(1)


def _asked(text: str | None) -> SpeculativeConfig | None:
    """What --speculative-config says. Raises ConfigError for what it can't."""
    from penstock.cli.options import speculation
    from penstock.config import SpeculativeConfig

    return SpeculativeConfig.of(speculation(text))


def _look(look: Look, calibrate: bool, as_json: bool) -> None:
    """At a server, and nothing else."""
    from rich.console import Console

    if calibrate:
        raise ConfigError("--calibrate measures this machine. Leave it or --base-url out.")
    found = look.look()
    if as_json:
        typer.echo(json.dumps({"served": found.as_dict()}, indent=2))
    else:
        console = Console(highlight=False, soft_wrap=True)
        console.print(pairs(facts(found)))
        _print_findings(console, found.findings)
        if not found.findings:
            console.print("[green]Nothing is off.[/green]")
    if not found.runs:
        raise typer.Exit(1)


def _probed(path: str | None) -> Probed:
    """What a model makes of a text."""
    from penstock.bench.served.quality import probe_model
    from penstock.cli.options import MODEL

    return probe_model(path or MODEL)


def _check_up(path: str | None, asked: SpeculativeConfig, found: Diagnosis) -> Checkup:
    """Short runs with drafts."""
    from penstock.bench.speculate.checkup import check_up
    from penstock.cli.options import MODEL

    if found.peaks is None:
        raise KernelError("Drafts are held against the machine's peaks, which aren't known here.")
    return check_up(path or MODEL, asked, found.peaks)


def _print(
    found: Diagnosis,
    examined: Examined | None,
    checked: Checkup | None,
    probed: Probed | None,
) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    if checked is None:  # or the answer to what was asked would stand below all this
        _print_machine(console, found)
    if examined is not None:
        console.print(pairs(_about(examined)))
        if examined.weights:
            console.print(_weights(examined))
    if checked is not None:
        console.print(pairs(_drafts(checked)))
    for text in found.warnings:
        console.print(f"[yellow]warning:[/yellow] {text}", markup=True)
    if probed is not None:
        said = f"{probed.ordered:.2f} nats a token of English, {probed.mixed:.2f} in no order"
        console.print(pairs([("Language", said)]))
    findings = [*([] if checked is None else checked.findings)]
    findings += [] if probed is None else probed.findings
    _print_findings(console, findings)
    if not found.warnings and not findings and (examined is None or examined.runs):
        console.print("[green]Nothing is off.[/green]")


def _print_findings(console: Console, findings: Sequence[Finding]) -> None:
    from rich.markup import escape

    for one in findings:
        colour = "yellow" if one.level == "hint" else "red"
        console.print(f"[{colour}]{one.level}, {one.check}:[/{colour}] {escape(one.text)}")


def _print_machine(console: Console, found: Diagnosis) -> None:
    console.print(pairs(_facts(found)))
    console.print(_operators(found.kernels.operators))
    if found.gpu.operators:
        console.print(_operators(found.gpu.operators, "operator on the GPU"))
    if found.kernels.linear:
        console.print(_linear(found))
    console.print(_cache(found))


def _about(examined: Examined) -> list[tuple[str, str]]:
    by = "its files match their sums"
    if examined.kind in ("model", "GGUF file"):
        by = "as far as its headers say"
    return [
        (examined.kind[0].upper() + examined.kind[1:], examined.path),
        *examined.facts.items(),
        ("Runs here", f"yes, {by}" if examined.runs else examined.why),
    ]


def _drafts(checked: Checkup) -> list[tuple[str, str]]:
    """What was run with drafts, and what came."""
    from penstock.bench.report import percent

    rates = ", ".join(
        f"{name} {'–' if rate is None else percent(rate)}" for name, rate in checked.rates.items()
    )
    least = "none pays" if checked.break_even is None else f"{percent(checked.break_even)} pays"
    rows = [("Drafts", f"{checked.method}; looked at: {', '.join(checked.checks)}")]
    if rates:
        rows.append(("Right, of guesses compared", f"{rates}; {least}"))
    if checked.positions:
        rows.append(("Computed again", f"{checked.positions:,} positions of the caches"))
    return rows


def _weights(examined: Examined) -> Table:
    """How its matrices are stored, and what they run as."""
    table = _table("stored as", "matrices", "values", "runs as", "how")
    for row in examined.weights:
        values = f"{row.values / 1e6:,.1f} M"
        table.add_row(row.stored, f"{row.matrices:,}", values, row.runs_as, row.how)
    return table


def as_dict(found: Diagnosis) -> dict[str, Any]:
    """What `--json` prints."""
    data = asdict(found)
    operators = found.kernels.operators
    data["kernels"]["operators"] = [
        {"operator": name, "runs": runs, "why": why} for name, runs, why in operators
    ]
    data["gpu"]["operators"] = [
        {"operator": name, "runs": runs, "why": why} for name, runs, why in found.gpu.operators
    ]
    data["kernels"]["linear"] = [
        {"weights": weights, "few_rows": few, "many_rows": many}
        for weights, few, many in found.kernels.linear
    ]
    data["kernels"]["cache"] = [
        {"kv_cache_dtype": name, "activations": beside, "runs": runs, "how": how}
        for name, beside, runs, how in found.kernels.cache
    ]
    data["extras"] = {
        name: {"installed": there, "for": EXTRAS[name][1], "get": get_extra(name)}
        for name, there in found.extras.items()
    }
    return data


def pairs(rows: list[tuple[str, str]]) -> Table:
    """Names and what they are."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, escape(value))
    return table


def _table(*columns: str) -> Table:
    from rich.table import Table

    return Table(*columns, box=None, header_style="bold", padding=(0, 2, 0, 0))


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
        bfloat16 = "neither AMX nor AVX512_BF16: as fast as float32"
        if unit := peaks.bfloat16_unit:
            fed = "AMX tiles, fed from L1" if unit == "AMX" else f"{unit}, from registers"
            bfloat16 = f"{peaks.bfloat16_flops / 1e12:.2f} TFLOP/s ({fed})"
        int8 = "not measured: counts as bfloat16"
        if peaks.int8_ops:
            int8 = f"{peaks.int8_ops / 1e12:.2f} TOP/s"
            if peaks.int4_ops:
                int8 += f"; by int4 {peaks.int4_ops / 1e12:.2f}"
        rows += [
            ("Memory read", f"{peaks.read_bytes_per_s / 1e9:.1f} GB/s"),
            ("Matrix, bfloat16", bfloat16),
            ("Matrix, int8", int8),
            ("Matrix, float32", f"{peaks.fma_flops / 1e12:.2f} TFLOP/s (FMA, from registers)"),
            ("Measured", f"{peaks.measured_at}, {peaks.threads} threads"),
        ]
    rows += _gpu_facts(found.gpu)
    for model in found.models:
        size = f"{model.weight_bytes / 1e6:.1f} MB, {model.folder}"
        rows.append((f"Model {model.name}", size if model.folder else "not in this installation"))
    for name, there in found.extras.items():
        missing = f"not installed ({EXTRAS[name][1]}): {get_extra(name)}"
        rows.append((f"Extra {name}", "installed" if there else missing))
    if found.environment:
        rows.append(("Environment", " ".join(f"{k}={v}" for k, v in found.environment.items())))
    return rows


def _gpu_facts(found: GpuFound) -> list[tuple[str, str]]:
    gpu, peaks, gib = found.gpu, found.peaks, 1 << 30
    if gpu is None:
        return [("GPU", f"none: {found.why_none}")]
    major, minor = gpu.capability
    driver = f"driver {gpu.driver}, " if gpu.driver else ""
    memory = f"{gpu.memory_bytes / gib:.1f} GiB, {gpu.free_bytes / gib:.1f} free"
    rows = [
        ("GPU", f"{gpu.name}, sm_{major}{minor}, {gpu.multiprocessors} multiprocessors"),
        ("GPU's software", f"{driver}CUDA {gpu.runtime}"),
        ("GPU's memory", memory),
    ]
    if peaks is None:
        return rows
    rows += [
        ("GPU's memory read", f"{peaks.read_bytes_per_s / 1e12:.2f} TB/s"),
        ("GPU's memory copied", f"{peaks.copy_bytes_per_s / 1e12:.2f} TB/s, read and written"),
    ]
    for name, value in (
        ("bfloat16", peaks.bfloat16_flops),
        ("float16", peaks.float16_flops),
        ("float8", peaks.float8_flops),
        ("int8", peaks.int8_ops),
        ("tf32", peaks.tf32_flops),
        ("float32", peaks.float32_flops),
    ):
        unit = "TOP/s" if name == "int8" else "TFLOP/s"
        rows.append((f"GPU matrix, {name}", f"{value / 1e12:.1f} {unit}" if value else "none"))
    return [
        *rows,
        ("GPU launch", f"{peaks.launch_s * 1e6:.1f} µs of the host's time a kernel"),
        ("GPU measured", peaks.measured_at),
    ]


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
    from penstock.kernels.load import TILE_MIN_ROWS

    rows = found.kernels.linear
    few, many = f"below {TILE_MIN_ROWS} rows", f"from {TILE_MIN_ROWS} rows"
    same = all(a == b for _, a, b in rows)
    table = _table("linear by weights", *(["any number of rows"] if same else [few, many]))
    for row in rows:
        table.add_row(*(row[:2] if same else row))
    return table


def _cache(found: Diagnosis) -> Table:
    """What writes and reads each kind of keys and values."""
    table = _table("keys and values", "beside", "runs", "how")
    for row in found.kernels.cache:
        table.add_row(*row)
    return table


def _operators(rows: list[tuple[str, str, str]], name: str = "operator") -> Table:
    """Those that run alike, for one reason, together: of most there is nothing else to say."""
    alike: dict[tuple[str, str], list[str]] = {}
    for operator, *how in rows:
        alike.setdefault((how[0], how[1]), []).append(operator)
    table = _table(name, "runs", "why")
    for (runs, why), operators in alike.items():
        table.add_row(", ".join(operators), runs, why)
    return table
