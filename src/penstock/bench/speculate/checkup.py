"""Why little of what is guessed may be accepted: short runs, each of which can show a cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from penstock.bench.finding import Finding
from penstock.bench.report import percent
from penstock.bench.speculate.benchmark import Options
from penstock.bench.speculate.figures import Figures, figures_of
from penstock.bench.speculate.floors import draft_floor
from penstock.bench.speculate.mismatch import CONVERSATION, folder_findings, rendered
from penstock.bench.speculate.prompts import Workload, built_in
from penstock.bench.speculate.runs import in_waves, measure_runs
from penstock.bench.speculate.stale import cache_findings
from penstock.config import EngineConfig, SpeculativeConfig
from penstock.hardware import AnyPeaks
from penstock.models.hub import resolve, shipped
from penstock.roofline import peaks_on
from penstock.runtime import Runtime, load_runtime

TEMPERATURES: Final = (0.0, 1.0)

MAX_TOKENS: Final = 32
"""Of an output."""

WORSE: Final = 0.9
"""Raw text of which less than this share of a conversation's guesses is accepted is told."""

FOREIGN: Final = 0.05
"""Heads of which less than this share of greedy guesses is right may be another model's."""

_IDS: Final = [list(range(3, 19)), [5, 6, 7, 8] * 4]
"""Prompts of a model without a tokenizer."""


Chat = Sequence[dict[str, str]]


@dataclass(slots=True)
class Checkup:
    """What was found, and the figures behind it."""

    method: str
    checks: list[str] = field(default_factory=list)  # that could be run
    findings: list[Finding] = field(default_factory=list)
    rates: dict[str, float | None] = field(default_factory=dict)  # of compared guesses: right ones
    break_even: float | None = None  # the rate at which the best length pays; None: none does
    positions: int = 0  # whose keys and values were computed again

    @property
    def runs(self) -> bool:
        """Whether drafts work here as they should."""
        return all(found.level == "hint" or found.check == "template" for found in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "runs": self.runs}


def check_up(model: str, asked: SpeculativeConfig, peaks: AnyPeaks, **forms: Any) -> Checkup:
    """Look at the folders, and where they go together run short requests. Takes seconds.

    peaks: of the CPU; a GPU's are found where the target runs on one. forms: dtype, quantization, …
    of the target. Raises ConfigError for drafts that this model can't have.
    """
    assert asked.method is not None  # a configuration has filled it in
    found = Checkup(asked.method)
    if asked.method == "draft_model":
        folder = resolve(model)
        guesser = (
            shipped(folder, asked.method)
            if asked.model is None
            else resolve(asked.model, asked.revision)
        )
        found.checks += ["tokenizer", "template"]
        found.findings += folder_findings(folder, guesser)
        if any(one.check == "tokenizer" and one.level == "mismatch" for one in found.findings):
            return found  # an engine would refuse it
    fixed = replace(asked, adaptive=False)
    runtime, config = _loaded(model, fixed, forms)
    if runtime.device.type == "cuda":
        peaks = peaks_on(runtime.device)
    workloads = _workloads(runtime)
    figures = {
        name: [
            _figures(workload, config, runtime, fixed, temperature, peaks)
            for temperature in (TEMPERATURES if name == "raw text" else TEMPERATURES[:1])
        ]
        for name, workload in workloads.items()
    }
    _temperatures(found, figures["raw text"])
    if "conversation" in figures:
        (conversation,) = figures["conversation"]
        found.checks.append("raw text")
        found.rates["conversation"] = conversation.alpha
        found.findings += raw_findings(figures["raw text"][0].alpha, conversation.alpha)
    if asked.method in ("medusa", "eagle", "eagle3"):
        found.checks.append("heads")
        found.findings += head_findings([one[0].alpha for one in figures.values()])
    findings, found.positions = cache_findings(config, runtime, _encoded(workloads, runtime))
    found.checks += ["cache"] * (found.positions > 0)
    found.findings += findings
    return found


def _loaded(
    model: str, asked: SpeculativeConfig, forms: dict[str, Any]
) -> tuple[Runtime, EngineConfig]:
    """With a tokenizer where there is one."""
    options = Options(asked, MAX_TOKENS, 1, 0.0, 1, 0)
    folder = resolve(model)
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    bare = folder.is_dir() and not any((folder / name).is_file() for name in names)
    longest = [Workload("ids", _IDS)] if bare else [_raw(), Workload("chat", ["x" * 600])]
    config = options.config(model, longest, **forms)
    return load_runtime(config), config


def _raw() -> Workload:
    stories, copies = built_in()
    return Workload("raw text", [*stories.prompts[:2], copies.prompts[0]])


def _workloads(runtime: Runtime) -> dict[str, Workload]:
    """Raw text, or ids; the same as conversations where the model has a template."""
    tokenizer = runtime.tokenizer
    if tokenizer is None:
        return {"raw text": Workload("raw text", _IDS)}
    raw = _raw()
    found = {raw.name: raw}
    if rendered(tokenizer) is not None:
        chats: list[Chat] = [[{"role": "user", "content": str(text)}] for text in raw.prompts]
        texts = [tokenizer.apply_chat_template(chat) for chat in [*chats, CONVERSATION]]
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        most = runtime.model.max_model_len - MAX_TOKENS
        fitting = [one for one in ids if len(one) <= most]
        if fitting:
            found["conversation"] = Workload("conversation", fitting)
    return found


def _encoded(workloads: dict[str, Workload], runtime: Runtime) -> list[list[int]]:
    tokenizer, found = runtime.tokenizer, []
    for workload in workloads.values():
        for prompt in workload.prompts:
            if isinstance(prompt, str):
                assert tokenizer is not None  # there would be no text
                found.append(tokenizer.encode(prompt))
            else:
                found.append(prompt)
    return found


def _figures(
    workload: Workload,
    config: EngineConfig,
    runtime: Runtime,
    asked: SpeculativeConfig,
    temperature: float,
    peaks: AnyPeaks,
) -> Figures:
    prompts = _encoded({"": workload}, runtime)
    waves = in_waves(prompts, 1, MAX_TOKENS, temperature, 0)
    runs = measure_runs(workload.name, config, runtime, waves, 1, None, lambda *_: None)
    return figures_of(runs, peaks, draft_floor(config, runtime, None))


def _temperatures(into: Checkup, figures: Sequence[Figures]) -> None:
    """What becomes of acceptance from greedy to lively."""
    into.checks.append("temperature")
    for temperature, one in zip(TEMPERATURES, figures, strict=True):
        into.rates[f"temperature {temperature:g}"] = one.alpha
    cool, lively = (one.alpha for one in figures)
    into.break_even = figures[0].break_even
    into.findings += temperature_findings(cool, lively, into.break_even)


def temperature_findings(
    cool: float | None, lively: float | None, least: float | None
) -> list[Finding]:
    """cool, lively: shares of compared guesses that were right at both temperatures; least: what
    pays by measured costs, None where nothing does.
    """
    if cool is None and lively is None:
        words = "Nothing was guessed: n-grams need text that repeats, or that came before."
        return [Finding("temperature", "hint", words)]
    rates = ", ".join(
        f"{'–' if rate is None else percent(rate)} at {temperature:g}"
        for temperature, rate in zip(TEMPERATURES, (cool, lively), strict=True)
    )
    if least is None:
        words = (
            f"No rate would pay here: verifying and drafting cost more than the tokens they can "
            f"bring (right, of guesses compared: {rates}). Choose a cheaper method, or larger "
            "weights to speed up."
        )
        return [Finding("temperature", "hint", words)]
    below = [
        temperature
        for temperature, rate in zip(TEMPERATURES, (cool, lively), strict=True)
        if rate is not None and rate < least
    ]
    if not below:
        return []
    words = (
        f"Below break-even at a temperature of {' and of '.join(f'{t:g}' for t in below)}: guesses "
        f"pay from {percent(least)} on, and of those compared this was right: {rates}. The "
        "controller (adaptive) leaves drafts out there"
        + ("." if 0.0 in below else "; a lower temperature brings more of them.")
    )
    return [Finding("temperature", "hint", words)]


def head_findings(rates: Sequence[float | None]) -> list[Finding]:
    """Of heads, which only fit the model whose states they were trained on: its sizes don't tell.

    rates: greedy ones, of each kind of prompt.
    """
    seen = [rate for rate in rates if rate is not None]
    if not seen or max(seen) >= FOREIGN:
        return []
    words = (
        f"Of greedy guesses at most {percent(max(seen))} were right. Heads guess by states of the "
        "very model that they were trained on: these have its sizes, but may be another's, or of "
        "another fine-tune. Train them on this one (recipes/), or choose its own."
    )
    return [Finding("heads", "hint", words)]


def raw_findings(raw: float | None, conversation: float | None) -> list[Finding]:
    """Of the same requests as they are and by the chat template."""
    if raw is None or conversation is None or raw >= WORSE * conversation:
        return []
    words = (
        f"Of guesses after raw text {percent(raw)} were right, and {percent(conversation)} of "
        "those after the same requests by the chat template: the model may be made for "
        "conversations. Send messages (LLM.chat, /v1/chat/completions), not text."
    )
    return [Finding("raw text", "hint", words)]
