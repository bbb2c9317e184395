"""What a run of `penstock bench speculate` found: tables for a reader, JSON for a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from penstock.bench.report import BEYOND, amount, count, describe_peaks, percent, seconds
from penstock.bench.speculate.figures import Figures
from penstock.bench.speculate.whiteboard import draw
from penstock.errors import ConfigError
from penstock.hardware import AnyPeaks, Compute
from penstock.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

Rows = list[tuple[str, str]]

_SHOWN: Final = 12
"""Problems on the terminal; the JSON file has all."""


@dataclass(frozen=True, slots=True)
class SpeculateResult:
    """One run's result."""

    title: str
    setup: dict[str, Any]
    environment: dict[str, Any]
    memory: dict[str, Any]
    workloads: Sequence[Figures]
    peaks: AnyPeaks  # medians of those measured around the runs
    compute: Compute  # of the target's matrices

    @property
    def problems(self) -> list[str]:
        """What must not be: outputs that drafts have changed, and guessing that failed."""
        found = []
        for one in self.workloads:
            runs = one.runs
            found += [f"{runs.name} {i}: another output with drafts" for i in runs.differing]
            if runs.speculation.broken is not None:
                found.append(f"{runs.name}: guessing has failed: {runs.speculation.broken!r}")
        return found

    def picture(self, tokenizer: Tokenizer | None) -> str:
        """The draft of which the most came true, as SVG. Raises ConfigError where there is none."""
        shown = [one.runs.shown for one in self.workloads if one.runs.shown is not None]
        if not shown:
            raise ConfigError(
                "No draft was verified in the run before the timed ones, so there is none to draw. "
                "--fixed makes drafts whether they pay or not; longer outputs (--max-tokens) help."
            )
        best = max(shown, key=lambda one: one.worth)
        return draw(best, str if tokenizer is None else tokenizer.decode)

    def as_dict(self) -> dict[str, Any]:
        """What is kept."""
        return {
            "benchmark": "speculate",
            "setup": self.setup,
            "results": {
                "memory": self.memory,
                "workloads": [one.as_dict() for one in self.workloads],
                "problems": self.problems,
            },
            "peaks": asdict(self.peaks),
            **self.environment,
        }

    def table(self) -> RenderableType:
        """The result for a terminal."""
        from rich.console import Group
        from rich.text import Text

        parts: list[RenderableType] = [
            Text(self.title, style="bold"),
            _pairs("memory", _memory_rows(self.memory)),
        ]
        for one in self.workloads:
            parts.append(_pairs(_heading(one), _speed_rows(one)))
            parts += [_places(one)] if one.places else []
        parts.append(Text(describe_peaks(self.peaks, self.compute), style="dim"))
        if any(max(*one.shares, *one.pass_shares.values()) > 1.05 for one in self.workloads):
            parts.append(Text(BEYOND, style="dim"))
        parts += [Text(problem, style="red") for problem in self.problems[:_SHOWN]]
        return Group(*parts)


def _heading(one: Figures) -> str:
    return f"{one.runs.name}, {count(one.runs.requests, 'request')}, {one.runs.batch} at once"


def _pairs(heading: str, rows: Rows) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(escape(heading))
    table.add_column("")
    for name, value in rows:
        table.add_row(escape(name), escape(value))
    return table


def _places(one: Figures) -> Table:
    """Acceptance and cost by place in a draft."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    columns = ("place", "right, of all drafts", "where those before are", "drafts of this length")
    for name in columns:
        table.add_column(name, justify="right")
    lengths, drafts = one.lengths, one.runs.log.drafts
    for i, place in enumerate(one.places, 1):
        table.add_row(
            str(i),
            percent(place.accepted / drafts),
            percent(place.rate) if place.tested else "–",
            f"{lengths[i]:,}",
        )
    return table


def _memory_rows(memory: dict[str, Any]) -> Rows:
    return [
        (
            name,
            f"{amount(held['weight_bytes'], 'B')} of weights, "
            f"{amount(held['kv_bytes_per_token'], 'B')} of keys and values a token, "
            f"a cache of {amount(held['cache_bytes'], 'B')}"
            if held["weight_bytes"]
            else "nothing beside the target",
        )
        for name, held in memory.items()
    ]


def _speed_rows(one: Figures) -> Rows:
    runs, expected = one.runs, one.expected
    plain, drafted = one.tokens_per_s()
    whole = one.tokens_per_s(whole=True)
    rounds = ", ".join(f"{a_round.gain:.2f}" for a_round in runs.rounds)
    equal = "all equal" if not runs.differing else f"{len(runs.differing):,} DIFFER"
    if runs.given:
        equal += f"; {runs.given:,} were given beforehand"
    return [
        ("tokens/s, decoding", f"{drafted:,.1f}, plain {plain:,.1f}"),
        ("with prompts", f"{whole[1]:,.1f}, plain {whole[0]:,.1f}"),
        ("speed-up", f"{one.speedup:.2f} × (rounds: {rounds})"),
        ("expected, by one rate", f"{expected.geometric:.2f} ×, verification for a plain step"),
        ("expected, by costs", f"{expected.measured:.2f} ×"),
        (
            "predicted by the ledger",
            f"{expected.ledger:.2f} ×, {one.ledger_error:+.0%} of what came",
        ),
        (
            "at the floor",
            f"{expected.floors:.2f} ×; share of it {percent(one.shares[1])}, plain "
            f"{percent(one.shares[0])}; passes by rows "
            + ", ".join(f"{rows}: {percent(share)}" for rows, share in one.pass_shares.items()),
        ),
        ("outputs", equal),
        *_draft_rows(one),
    ]


def _without_drafts(kept_off: bool) -> str:
    why = "; the controller kept them off, --fixed makes them" if kept_off else ""
    return f"no draft took part in the timed runs{why}"


def _draft_rows(one: Figures) -> Rows:
    log, costs, control = one.runs.log, one.costs, one.runs.speculation.controller
    decided = "adaptive" if control.adaptive else "fixed"
    rows = [
        (
            "drafts",
            f"{decided}, up to {one.most} tokens; {percent(one.share_with_drafts)} of steps, "
            f"{percent(one.time_with_drafts)} of the time",
        ),
        ("plain step", seconds(costs.plain_s)),
        (
            "steps by tokens verified",
            ", ".join(f"{n}: {seconds(took.seconds)}" for n, took in one.steps_at.items()),
        ),
    ]
    if one.alpha is None or log.acceptance_rate is None:
        return [*rows, ("accepted", _without_drafts(not control.is_on))]
    best, length = costs.best(one.alpha, one.most)
    least = one.break_even
    by = "a token" if costs.by_passes else "a draft"
    return [
        *rows,
        ("drafting", f"{seconds(costs.draft_s)} {by}, {percent(one.drafting)} of a step a token"),
        (
            "accepted",
            f"{percent(log.acceptance_rate)} of {log.draft_tokens:,} tokens, "
            f"{log.mean_acceptance_length:.2f} a step; {percent(one.alpha)} of those compared",
        ),
        (
            "break-even",
            "none: no rate would pay" if least is None else f"{percent(least)} of those compared",
        ),
        ("best length", f"{length}, which should give {best:.2f} ×"),
    ]
