"""What `penstock plan` has found out, as data and for readers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.hardware import AnyPeaks, Compute
    from penstock.roofline.outlook import Load, Outlook
    from penstock.runtime.footprint import Footprint

_CACHED = 256 << 20
"""Bytes beyond which even large caches are no faster than memory."""


_TOKEN_BYTES = 48
"""A token of a sequence in Python's lists and in the prefix tree, measured: 39 to 81."""


def noted_bytes(found: Footprint, sequences: int, tokens: int) -> int:
    """What Python has of so many sequences of so many tokens, of the memory that is planned."""
    return 0 if found.device.is_gpu else _TOKEN_BYTES * sequences * tokens


@dataclass(frozen=True, slots=True)
class Processes:
    """Bytes that Python and torch take of the same memory, before there is a model."""

    own: int  # of the first process
    other: int = 0  # of each other rank, but for files
    files: int = 0  # of libraries, which all map
    others: int = 0

    def of(self, number: int) -> int:
        """One of them, as its own memory shows it."""
        return self.own if number == 0 else self.other + self.files

    @property
    def total(self) -> int:
        """Of all; files are there once."""
        return self.own + self.others * self.other


@dataclass(frozen=True, slots=True)
class Planned:
    """All that is told."""

    parts: tuple[Footprint, ...]  # of each process that has one
    load: Load
    outlook: Outlook
    peaks: AnyPeaks
    processes: Processes
    available: int | None  # bytes; None: nobody said
    most: int | None  # sequences of the load that fit at once
    share: float
    usd_hour: float | None

    @property
    def found(self) -> Footprint:
        """The first process's."""
        return self.parts[0]

    @property
    def computes(self) -> Compute:
        """What products of activations as they are run in."""
        return "float32" if self.found.described.dtype.itemsize == 4 else "bfloat16"

    @property
    def may_stay_in_cache(self) -> bool:
        """Whether a CPU's cache may hold all that a step reads, which it then gets sooner."""
        return not self.found.device.is_gpu and self.weights + self.cache < _CACHED

    @property
    def weights(self) -> int:
        return sum(part.weights for part in self.parts)

    @property
    def cache(self) -> int:
        """Bytes of the load's keys and values."""
        return sum(map(self.cache_of, self.parts))

    def cache_of(self, part: Footprint) -> int:
        """Of one process's."""
        return part.cache_bytes(self.load.concurrency, self.load.tokens)

    @property
    def workspace(self) -> int:
        return sum(part.workspace for part in self.parts)

    @property
    def total(self) -> int:
        from penstock.runtime.footprint import total_of

        total = total_of(self.parts, self.load.concurrency, self.load.tokens)
        return total + self.process

    @property
    def process(self) -> int:
        """Of all, with the load's tokens in the first."""
        return self.processes.total + self._noted

    @property
    def _noted(self) -> int:
        return noted_bytes(self.found, self.load.concurrency, self.load.tokens)

    def ranks(self) -> list[dict[str, int]]:
        """Each process's bytes as it shows them itself, what others share counted; none where there
        is one."""
        found = []
        for number, part in enumerate(self.parts if len(self.parts) > 1 else ()):
            assert part.ranks is not None
            stage = 1 if part.ranks.stage is None else part.ranks.stage.number + 1
            taken = {
                "weights_bytes": part.weights,
                "kv_cache_bytes": self.cache_of(part),
                "workspace_bytes": part.workspace,
                "meeting_bytes": part.meeting,
                "process_bytes": self.processes.of(number) + (0 if number else self._noted),
            }
            found.append(
                {"rank": number, "stage": stage, **taken, "total_bytes": sum(taken.values())}
            )
        return found

    @property
    def num_blocks(self) -> int:
        """That hold the load, with one for each to grow into, as the scheduler wants it."""
        load = self.load
        return self.found.blocks(load.concurrency, load.tokens) + load.concurrency

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints: bytes, seconds and dollars."""
        from penstock.runtime.footprint import meetings_of

        found, seen, share = self.found, self.outlook, self.share
        data: dict[str, Any] = {
            "family": found.described.spec.family,
            "dtype": str(found.described.dtype).removeprefix("torch."),
            "weight_formats": found.described.formats.described,
            "load": asdict(self.load),
            "memory": {
                "weights_bytes": self.weights,
                "kv_cache_dtype": found.layout.stored,
                "kv_bytes_per_token": sum(part.kv_bytes_per_token for part in self.parts),
                "kv_cache_bytes": self.cache,
                "num_blocks": self.num_blocks,
                "workspace_bytes": self.workspace,
                "process_bytes": self.process,
                "total_bytes": self.total,
                "available_bytes": self.available,
                "fits": None if self.available is None else self.total <= self.available,
                "max_sequences": self.most,
            },
            "speed": {
                "read_bytes_per_s": self.peaks.read_bytes_per_s,
                "share_of_floor": share,
                "prefill_s": seen.prefill_s / share,
                "prefill_bound": seen.prefill_bound,
                "decode_step_s": seen.decode_s / share,
                "decode_bound": seen.decode_bound,
                "requests_per_s": seen.requests_per_s * share,
                "output_tokens_per_s": seen.output_tokens_per_s * share,
            },
        }
        if ranks := self.ranks():
            data["memory"] |= {"meeting_bytes": meetings_of(self.parts), "ranks": ranks}
        if self.usd_hour is not None:
            data["cost"] = {"usd_hour": self.usd_hour, **self.prices(self.usd_hour)}
        return data

    def prices(self, usd_hour: float) -> dict[str, float]:
        """Dollars of a million tokens, and of a thousand requests."""
        seen, dear = self.outlook, usd_hour / self.share
        return {
            "usd_per_million_input_tokens": seen.usd_per_million_input(dear),
            "usd_per_million_output_tokens": seen.usd_per_million_output(dear),
            "usd_per_thousand_requests": dear / 3600 * seen.request_s * 1000,
        }


def show(model: str, planned: Planned) -> None:
    """Print it for readers."""
    from rich.console import Console

    from penstock.bench.report import rate
    from penstock.cli.doctor import pairs

    found, console = planned.found, Console(highlight=False, soft_wrap=True)
    described, decoder, peaks = found.described, found.decoder, planned.peaks
    rows = [
        (
            "Model",
            f"{model}: {described.spec.family}, {decoder.depth} layers of {decoder.hidden}, "
            f"{described.formats.name}" + ("" if described.source else ", without its weights"),
        ),
        *_memory(planned),
        (
            "Peaks",
            f"{peaks.read_bytes_per_s / 1e9:.1f} GB/s, {rate(peaks.of(planned.computes))} in "
            f"{planned.computes}, {rate(peaks.of('int8'))} in int8"
            + (f"; measured {peaks.measured_at[:16]}" if peaks.measured_at else ", as given"),
        ),
        *_speed(planned),
    ]
    console.print(pairs(rows))


def _memory(planned: Planned) -> list[tuple[str, str]]:
    from penstock.bench.report import amount

    found, load, total = planned.found, planned.load, amount(planned.total, "B")
    steps = f"up to {found.workspace_tokens:,} tokens"
    each = sum(part.kv_bytes_per_token for part in planned.parts)
    process = planned.process
    sequences = f"{load.concurrency:,} × {load.tokens:,} tokens"
    horizon = found.horizon
    window = f", the last {horizon.window:,} of each" if horizon else ""
    if horizon.sink_tokens:
        window += f" and the first {horizon.sink_tokens}"
    states = found.layout.states
    if states is not None:
        size = amount(2 * states.bytes_per_slot, "B")
        window += f", and {load.concurrency:,} × two states ({size})"
    fits = ", compared with nothing: --memory says what there is"
    if planned.available is not None:
        free = f"{amount(planned.available, 'B')} ({planned.available / 2**30:.3g} GiB)"
        fits = f"; {'fits' if planned.total <= planned.available else 'DOES NOT FIT'} in {free}"
        fits += f", which hold up to {planned.most:,} such sequences"
    return [
        ("Weights", amount(planned.weights, "B")),
        (
            "Keys and values",
            f"{amount(planned.cache, 'B')}: {sequences} of {each:,} B in "
            f"{found.layout.stored}{window} (num_blocks={planned.num_blocks:,})",
        ),
        ("Workspace", f"{amount(planned.workspace, 'B')}, of steps of {steps}"),
        *([("Process", amount(process, "B"))] if process else []),
        ("In all", f"{total}{fits}"),
        *_ranks(planned.ranks()),
    ]


_PARTS = {
    "weights_bytes": "weights",
    "kv_cache_bytes": "keys and values",
    "workspace_bytes": "workspace",
    "meeting_bytes": "where ranks meet",
    "process_bytes": "process",
}


def _ranks(ranks: list[dict[str, int]]) -> list[tuple[str, str]]:
    """A row for each, or for those alike that follow each other."""
    from penstock.bench.report import amount

    def figures(taken: dict[str, int]) -> tuple[int, ...]:
        return taken["stage"], *(taken[name] for name in _PARTS)

    rows = []
    for _, alike in groupby(ranks, figures):
        first, *more = alike
        last = more[-1]["rank"] if more else first["rank"]
        name = f"Ranks {first['rank']} to {last}" if more else f"Rank {last}"
        said = amount(first["total_bytes"], "B") + (" each" if more else "")
        said += f", stage {first['stage']}" if ranks[-1]["stage"] > 1 else ""
        parts = [f"{what} {amount(first[x], 'B')}" for x, what in _PARTS.items() if first[x]]
        rows.append((name, f"{said}: {', '.join(parts)}"))
    return rows


def _speed(planned: Planned) -> list[tuple[str, str]]:
    from penstock.bench.report import percent, seconds

    load, seen, share = planned.load, planned.outlook, planned.share
    bounds = share == 1 and not planned.may_stay_in_cache
    least, most = ("at least ", "at most ") if bounds else ("", "")
    together = f" of {load.concurrency:,} sequences" if load.concurrency > 1 else ""
    hit = f", {load.cached_len:,} of them cached" if load.cached_len else ""
    rows = [
        (
            "A prompt",
            f"of {load.input_len:,} tokens{hit}: {least}{seconds(seen.prefill_s / share)}, bound "
            f"by {seen.prefill_bound}",
        ),
        (
            "A token",
            f"{least}{seconds(seen.decode_s / share)}, bound by {seen.decode_bound}: "
            f"{most}{seen.decode_tokens_per_s * share:,.1f} tokens/s{together}",
        ),
        (
            "Requests",
            f"{seen.requests_per_s * 3600 * share:,.1f} an hour, "
            f"{seen.output_tokens_per_s * share:,.1f} tokens/s, each prompt in steps of its own",
        ),
    ]
    if planned.may_stay_in_cache:
        rows.append(
            ("Beyond", "a CPU's cache may hold all that a step reads: then tokens come sooner")
        )
    if share < 1:
        rows.append(("Share", f"{percent(share)} of the floor, as was asked for"))
    if planned.usd_hour is not None:
        prices = planned.prices(planned.usd_hour)
        answers = prices["usd_per_million_output_tokens"]
        of_answers = f"${answers:.4g} a million output tokens, " if load.output_len > 1 else ""
        rows.append(
            (
                "Price",
                f"${prices['usd_per_million_input_tokens']:.4g} a million input tokens, "
                f"{of_answers}"
                f"${prices['usd_per_thousand_requests']:.4g} a thousand requests",
            )
        )
    return rows
