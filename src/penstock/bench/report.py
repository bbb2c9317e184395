"""What a benchmark found, for a reader (`table`) and for a program (`write`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from penstock.hardware import AnyPeaks, Compute, Peaks
from penstock.roofline import Totals

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class Column:
    """One measured phase."""

    phase: str
    time: str
    speed: str  # tokens/s
    achieved: str  # bytes or FLOPs per second
    of_peak: str  # that, of what was measured to be possible
    floor: str  # the least time, and what binds it
    share: float  # floor ÷ time

    @property
    def values(self) -> tuple[str, ...]:
        return (
            self.time, self.speed, self.achieved, self.of_peak, self.floor, percent(self.share)
        )  # fmt: skip


BEYOND = (
    "More than 100%: what is read fits into a cache, which is faster than the memory whose speed "
    "is measured, or other programs ran while it was."
)

_LINES = ("time", "tokens/s", "achieved", "of the peak", "floor", "share of the floor")


@dataclass(frozen=True, slots=True)
class Report:
    """One benchmark's result."""

    benchmark: str
    title: str
    setup: dict[str, Any]  # model, dtype, workload
    results: dict[str, Any]
    peaks: AnyPeaks  # medians of those measured around the runs
    environment: dict[str, Any]
    columns: Sequence[Column]
    remarks: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        """What is kept."""
        return {
            "benchmark": self.benchmark,
            "setup": self.setup,
            "results": self.results,
            "peaks": asdict(self.peaks),
            **self.environment,
        }

    def table(self) -> RenderableType:
        """The result for a terminal."""
        from rich.console import Group
        from rich.markup import escape
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
        for name in ("", *(column.phase for column in self.columns)):
            table.add_column(escape(name), justify="right" if name else "left")
        for i, name in enumerate(_LINES):
            style = "bold green" if i == len(_LINES) - 1 else None
            table.add_row(name, *(escape(c.values[i]) for c in self.columns), style=style)
        lines = [Text(remark, style="dim") for remark in self.remarks]
        lines += [Text(beyond, style="dim")] if (beyond := above(self.columns)) else []
        return Group(Text(self.title, style="bold"), table, *lines)


def above(columns: Sequence[Column]) -> str | None:
    """Why a share of the floor may be above 100%, where one clearly is."""
    return BEYOND if any(column.share > 1.05 for column in columns) else None


def seconds(value: float) -> str:
    """A duration in the unit that suits it."""
    if value >= 10:
        return f"{value:.1f} s"
    if value >= 1:
        return f"{value:.2f} s"
    if abs(value) >= 1e-3:
        return f"{value * 1e3:.2f} ms"
    return f"{value * 1e6:.0f} µs" if abs(value) >= 1e-5 else f"{value * 1e6:.1f} µs"


def count(number: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def percent(share: float) -> str:
    """A share, with a digit more where it is small."""
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def rate(flops: float) -> str:
    """FLOPs per second in the unit that suits it."""
    return f"{flops / 1e12:.2f} TFLOP/s" if flops >= 1e11 else f"{flops / 1e9:.2f} GFLOP/s"


def amount(value: float, unit: str) -> str:
    """`988 MB`, `1.98 GFLOP`: three digits in the prefix that suits it."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * factor:
            scaled = value / factor
            digits = 0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2
            return f"{scaled:.{digits}f} {prefix}{unit}"
    return f"{value:.0f} {unit}"


def describe_peaks(peaks: AnyPeaks, compute: Compute) -> str:
    """One line about what the shares refer to; `compute`: of the model's matrices."""
    if not isinstance(peaks, Peaks):
        return (
            f"Measured peaks, {peaks.name}: read {peaks.read_bytes_per_s / 1e9:,.0f} GB/s, "
            f"matrix {rate(peaks.of(compute))} ({compute}), "
            f"{seconds(peaks.launch_s)} of the host's time a launch."
        )
    kind = {
        "float32": "float32 FMA",
        "bfloat16": f"bfloat16, {unit}" if (unit := peaks.bfloat16_unit) else "float32 FMA",
        "int8": "int8" if peaks.int8_ops else "bfloat16: int8 wasn't measured",
    }
    kind["int4"] = "int8 by int4" if peaks.int4_ops else kind["int8"]
    kind["float8"] = kind["bfloat16"]  # to which it is widened
    return (
        f"Measured peaks, {count(peaks.threads, 'thread')}: "
        f"read {peaks.read_bytes_per_s / 1e9:.1f} GB/s, "
        f"matrix {rate(peaks.of(compute))} ({kind[compute]})."
    )


def describe_lost(phases: Mapping[str, Totals]) -> list[str]:
    """A line a phase about the time outside the forward pass, by cause."""
    lines = []
    for name, phase in phases.items():
        whole = phase.seconds + phase.wait_s
        if not phase.steps or not whole:
            continue
        lost = {cause: s for cause, s in phase.lost.items() if s or cause != "draft"}
        causes = ", ".join(f"{cause} {percent(s / whole)}" for cause, s in lost.items())
        lines.append(
            f"{name}: {percent(1 - phase.forward_s / whole)} outside the forward pass ({causes})"
        )
    return lines
