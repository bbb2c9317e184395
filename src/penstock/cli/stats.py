"""What a run reached, and its share of what this machine allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from penstock.bench.meter import Meter
    from penstock.engine import Engine, RequestOutput
    from penstock.hardware import AnyPeaks
    from penstock.roofline import StepRecord, Totals
    from penstock.speculate import DraftCounts


SHOWN_PLACES = 16
"""Places of a draft that a line tells of; all are in JSON."""


def machine_peaks(device: torch.device | None = None) -> AnyPeaks:
    """The measured peaks of the CPU, or of a device; measured now where none are kept."""
    from penstock.roofline import peaks, peaks_on

    return peaks() if device is None else peaks_on(device)


def counted(counts: DraftCounts) -> dict[str, Any]:
    """Drafts and what became of them, for JSON."""
    return {
        "drafts": counts.drafts,
        "draft_tokens": counts.draft_tokens,
        "accepted_tokens": counts.accepted_tokens,
        "acceptance_rate": counts.acceptance_rate,
        "accepted_per_position": list(counts.accepted_at),
        "mean_acceptance_length": counts.mean_acceptance_length,
    }


@dataclass(frozen=True, slots=True)
class DraftStats:
    """What became of a run's drafts."""

    method: str
    counts: DraftCounts
    adaptive: bool  # whether a controller decides on them …
    is_on: bool  # … and found last that they pay
    failed: str  # why there were none any more; empty where nothing failed

    @classmethod
    def of(cls, engine: Engine, before: DraftCounts | None = None) -> DraftStats | None:
        """An engine's, since its counts were those of `before`; None where nobody guesses."""
        found = engine.speculation
        if found is None:
            return None
        counts = found.counts if before is None else found.counts.since(before)
        control, broken = found.controller, found.broken
        failed = "" if broken is None else repr(broken)
        return cls(
            found.proposer.name, counts, control.adaptive, bool(control.is_on), failed
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "method": self.method,
            **counted(self.counts),
            "adaptive": self.adaptive,
            "on": self.is_on and not self.failed,
            "failed": self.failed or None,
        }

    def line(self) -> str:
        """For a reader."""
        from penstock.bench.report import count, percent

        counts = self.counts
        state = "always" if not self.adaptive else "on" if self.is_on else "off: they don't pay"
        if self.failed:
            state = f"off: guessing has failed, {self.failed}"
        line = f"drafts     {self.method}, {state}"
        if counts.acceptance_rate is None or counts.mean_acceptance_length is None:
            return f"{line}; none was verified"
        shown = counts.accepted_at[:SHOWN_PLACES]
        places = ", ".join(percent(right / counts.drafts) for right in shown)
        places += ", …" * (len(shown) < len(counts.accepted_at))
        return (
            f"{line}; {counts.accepted_tokens:,} of {count(counts.draft_tokens, 'token')} "
            f"accepted ({percent(counts.acceptance_rate)}) in {counts.drafts:,} drafts, "
            f"{counts.mean_acceptance_length:.2f} tokens a verified draft; by position "
            f"{places or '–'}"
        )


@dataclass(frozen=True, slots=True)
class RunStats:
    """A run's steps in two phases, and what they ran on."""

    prefill: Totals  # steps in which any prompt was computed
    decode: Totals  # the others
    weights: str
    isa: str
    threads: int
    drafts: DraftStats | None = None

    @classmethod
    def of(
        cls,
        meter: Meter,
        records: Sequence[StepRecord],
        peaks: AnyPeaks,
        drafts: DraftStats | None = None,
    ) -> RunStats:
        """Add the records up."""
        import torch

        from penstock.kernels import native

        return cls(
            prefill=meter.phase([r for r in records if r.size.is_prefill], peaks),
            decode=meter.phase([r for r in records if not r.size.is_prefill], peaks),
            weights=meter.weight_format,
            isa=native.isa or "reference",
            threads=torch.get_num_threads(),
            drafts=drafts,
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "prefill": self.prefill.as_dict(),
            "decode": self.decode.as_dict(),
            "weights": self.weights,
            "isa": self.isa,
            "threads": self.threads,
            **({} if self.drafts is None else {"drafts": self.drafts.as_dict()}),
        }

    def lines(self, outputs: Sequence[RequestOutput]) -> list[str]:
        """For a reader."""
        from penstock.bench.report import count, describe_lost

        prompt = sum(len(o.prompt_token_ids) for o in outputs)
        cached = sum(o.metrics.cached_tokens for o in outputs)
        generated = sum(len(sample.token_ids) for o in outputs for sample in o.outputs)
        first = [o.metrics.ttft_s for o in outputs if o.metrics.ttft_s is not None]
        found = f" ({cached} of them from the prefix cache)" if cached else ""
        lines = [
            f"prompt     {prompt:>7,} tokens{found}   generated {count(generated, 'token')}",
            f"prefill    {_phase(self.prefill)}",
            f"decode     {_phase(self.decode)}",
            *([] if self.drafts is None else [self.drafts.line()]),
        ]
        if first:
            worst = f", slowest of {len(first)}" if len(first) > 1 else ""
            lines.append(f"first token after {max(first) * 1e3:,.1f} ms{worst}")
        lines += describe_lost({"prefill": self.prefill, "decode": self.decode})
        lines.append(f"{self.weights} weights, {self.isa} kernels, {count(self.threads, 'thread')}")
        return lines


def _phase(phase: Totals) -> str:
    from penstock.bench.report import count, percent

    if not phase.steps:
        return "      – (no such step)"
    return (
        f"{phase.tokens_per_s:>9,.1f} tok/s, {percent(phase.share or 0.0)} of the hardware floor "
        f"({phase.bound}-bound, {count(phase.steps, 'step')})"
    )


def metrics(output: RequestOutput) -> dict[str, Any]:
    """A request's own times, in seconds."""
    m = output.metrics
    return {
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": m.cached_tokens,
        "queue_s": m.queue_s,
        "ttft_s": m.ttft_s,
        "e2e_s": m.e2e_s,
        "preemptions": m.preemptions,
        "floor_s": m.floor_s,
        "achieved": m.achieved,
        "bound": m.bound,
        **({"drafts": counted(m.drafts)} if m.drafts.drafts else {}),
    }
