"""What a run of `penstock bench structured` found: tables for a reader, JSON for a program."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from penstock.bench.report import count, percent, seconds
from penstock.bench.structured.compiling import Compiled
from penstock.bench.structured.outputs import HOW_TO_GET_IT, Outputs
from penstock.bench.structured.speed import Jumps, Overhead

if TYPE_CHECKING:
    from rich.console import RenderableType

Rows = list[tuple[str, str]]

_SHOWN: Final = 12
"""Reasons and failures on the terminal; the JSON file has all."""


@dataclass(slots=True)
class StructuredResult:
    """One run's result; None for a part that wasn't asked for."""

    title: str
    setup: dict[str, Any]
    environment: dict[str, Any]
    compiled: Compiled
    outputs: Outputs | None = None
    overhead: Overhead | None = None
    jumps: list[Jumps] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """What must not be: invalid outputs, and outputs that a jump has changed."""
        found = list(self.outputs.problems) if self.outputs else []
        for one in self.jumps:
            found += [f"{name}: another output without jumps" for name in one.differing]
        return found

    def as_dict(self) -> dict[str, Any]:
        """What is kept."""
        return {
            "benchmark": "structured",
            "setup": self.setup,
            "results": {
                "compile": self.compiled.as_dict(),
                "outputs": self.outputs.as_dict() if self.outputs else None,
                "overhead": self.overhead.as_dict() if self.overhead else None,
                "jump_forward": [one.as_dict() for one in self.jumps],
            },
            **self.environment,
        }

    def table(self) -> RenderableType:
        """The result for a terminal."""
        from rich.console import Group
        from rich.markup import escape
        from rich.table import Table
        from rich.text import Text

        parts: list[RenderableType] = [Text(self.title, style="bold")]
        for heading, rows in self._sections():
            table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
            table.add_column(escape(heading))
            table.add_column("")
            for name, value in rows:
                table.add_row(escape(name), escape(value))
            parts.append(table)
        parts += [Text(remark, style="dim") for remark in self._remarks()]
        parts += [Text(one, style="red") for one in self.problems[:_SHOWN]]
        return Group(*parts)

    def _sections(self) -> list[tuple[str, Rows]]:
        found = [("schemas", _compile_rows(self.compiled))]
        if self.outputs is not None:
            found.append(("outputs at temperature 1", _output_rows(self.outputs)))
        if self.overhead is not None:
            found.append(
                (f"masks, {self.overhead.batch_size} at once", _overhead_rows(self.overhead))
            )
        for one in self.jumps:
            heading = f"jumps, {'compact' if one.compact else 'any whitespace'}"
            found.append((heading, _jump_rows(one)))
        return found

    def _remarks(self) -> list[str]:
        found = [
            f"Refused {len(same.names):,}: {reason}"
            for reason, same in list(self.compiled.refused.items())[:_SHOWN]
        ]
        more = len(self.compiled.refused) - _SHOWN
        if more > 0:
            found.append(f"Refused for {count(more, 'other reason')}: see --json's file.")
        if self.outputs is not None:
            found += [
                f"Failed {number:,}: {reason}"
                for reason, number in self.outputs.failed.most_common(_SHOWN)
            ]
            if not self.outputs.validated:
                found.append(HOW_TO_GET_IT)
        return found


def _compile_rows(found: Compiled) -> Rows:
    times = found.as_dict()["compile_ms"]
    return [
        (
            "compiled",
            f"{len(found.schemas):,} of {found.total:,} "
            f"({len(found.schemas) / found.total:.1%}), {found.num_refused:,} refused",
        ),
        ("time to compile", _times(times)),
        (
            "second round",
            f"{found.hits:,} of {found.total:,} found in the cache, {seconds(found.hit_s)} each",
        ),
    ]


def _output_rows(found: Outputs) -> Rows:
    rows = [
        (
            "ended",
            f"{found.finished:,} finished, {found.cut:,} cut at --max-tokens, "
            f"{found.failed.total():,} failed",
        ),
        (
            "tokens",
            f"{found.tokens:,} in {seconds(found.seconds)}, "
            f"{found.tokens / found.seconds:,.1f} a second",
        ),
    ]
    if found.validated:
        judged = found.finished - len(found.unread)
        line = f"{found.valid:,} of {judged:,} finished outputs (jsonschema)"
        if found.unread:
            line += f"; it can't read {count(len(found.unread), 'schema')}"
        rows.append(("valid", line))
    return rows


def _overhead_rows(found: Overhead) -> Rows:
    figures = found.as_dict()
    parts = ", ".join(f"{part} {more:+.2f}" for part, more in found.more_by_part_ms.items())
    rounds = ", ".join(f"{share:+.1%}" for share in found.shares)
    return [
        ("step, held to a form", seconds(found.held_s)),
        ("step, free", seconds(found.free_s)),
        (
            "overhead",
            f"{found.share:+.1%} (rounds: {rounds})",
        ),
        (
            "measured otherwise",
            f"all steps {found.share_of_sums:+.1%}, fastest tenth {found.share_of_fastest:+.1%}, "
            f"processor time {found.share_of_cpu:+.1%}",
        ),
        ("by part, in ms", parts),
        ("one mask", _times(figures["mask_ms"])),
        (
            "waited for masks",
            f"{_times(figures['wait_ms'])}, {percent(figures['waited_share'])} of the time",
        ),
        ("applied", _times(figures["apply_ms"])),
    ]


def _jump_rows(found: Jumps) -> Rows:
    figures = found.as_dict()
    speeds, steps = figures["tokens_per_s"], figures["steps"]
    equal = "all equal" if not found.differing else f"{len(found.differing):,} DIFFER"
    return [
        ("tokens/s", f"{speeds['on']:,.1f}, without jumps {speeds['off']:,.1f}"),
        ("gain", f"{found.gain:.2f} ×"),
        ("steps", f"{steps['on']:,}, without jumps {steps['off']:,}"),
        (
            "tokens jumped",
            f"{figures['jumped']:,} of {figures['tokens']:,} ({percent(found.jumped_share)})",
        ),
        ("outputs", equal),
    ]


def _times(milliseconds: dict[str, float]) -> str:
    names = (("P50", "p50"), ("P99", "p99"), ("most", "max"))
    return ", ".join(f"{name} {seconds(milliseconds[key] / 1e3)}" for name, key in names)
