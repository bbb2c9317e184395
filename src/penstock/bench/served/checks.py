"""What a server's metrics can show to be the matter, one check for each cause.

A check says nothing where too little happened to tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.bench.finding import Finding
from penstock.bench.report import percent
from penstock.bench.served.limits import FEW, FULL, Limits
from penstock.bench.served.scrape import Span

IDLE_GROWTH = 64 << 20
"""Bytes that a process which does nothing may grow by."""

OWN_SHARE, OWN_STEP_S = 0.2, 0.002
"""Of a decoding step, spent outside its forward pass: more is told of steps that are longer."""

LOW_FLOOR = 0.5
"""A share of what the machine allows that is low for steps of several milliseconds."""

LOW_HITS, LONG_PROMPT = 0.05, 256
"""Share of prompts' tokens that is found in the cache, and the mean prompt where it matters."""

_ACCEPTED, _CUT, _LEFT, _REFUSED = 0.3, 0.5, 0.2, 0.01


@dataclass(frozen=True, slots=True)
class Seen:
    """What checks read."""

    span: Span
    limits: Limits

    @property
    def idle(self) -> bool:
        """Whether nothing ran, and nothing waited, at either end or between."""
        span = self.span
        names = ("running", "waiting", "swapped")
        busy = sum(span.gauge(f"vllm:num_requests_{name}") for name in names)
        before, after = (one.sum("penstock:steps_total") for one in (span.begin, span.last))
        return not busy and before == after

    @property
    def full(self) -> bool:
        """Whether the cache was."""
        used = self.span.gauge("vllm:kv_cache_usage_perc")
        return used >= FULL or self.span.count("vllm:num_preemptions") > 0

    @property
    def hits(self) -> float | None:
        """Share of prompts' tokens that was found."""
        asked = self.span.count("vllm:prefix_cache_queries")
        return self.span.count("vllm:prefix_cache_hits") / asked if asked else None


def ms(seconds: float) -> str:
    """`7.50 ms`, `1,200 ms`."""
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.2f} ms"


def slow_first_token(seen: Seen) -> Iterator[Finding]:
    """Where first tokens are late, what they waited for."""
    span, limit = seen.span, seen.limits.ttft_ms / 1e3
    first = span.distribution("vllm:time_to_first_token_seconds")
    late = first.quantile(0.99)
    if first.count < FEW or late <= limit:
        return
    queue = span.distribution("vllm:request_queue_time_seconds").mean
    prefill = span.distribution("vllm:request_prefill_time_seconds").mean
    said = (
        f"The slowest 1% of first tokens took {first.told(0.99, ms)} and longer, where {ms(limit)} "
        f"is the limit. Of a request on average: {ms(queue)} in the queue, {ms(prefill)} from "
        "there to its first token. "
    )
    text = _of_queue(seen) if queue > prefill else _of_prompts(seen)
    yield Finding("first token", "hint", said + text)


def _of_queue(seen: Seen) -> str:
    span = seen.span
    if seen.full:
        return (
            "They waited for blocks: the cache was full. See what is said of it; shorter max_tokens"
            " and prompts need less."
        )
    running, most = span.gauge("penstock:sequences_running"), span.gauge("penstock:max_sequences")
    if running >= most if most else span.gauge("vllm:num_requests_waiting") > 0:
        return (
            f"They waited for others to end, of which {running:,.0f} ran at once: raise "
            "--max-num-seqs as far as penstock tune says, or start another instance (penstock "
            "fleet does so with demand)."
        )
    return (
        "They waited for a step's tokens, which others' prompts took: --scheduling-policy sjf lets "
        "short ones pass, and a fleet's prefill instances compute long ones apart."
    )


def _of_prompts(seen: Seen) -> str:
    span, hits = seen.span, seen.hits
    size = span.distribution("vllm:request_prompt_tokens").mean
    found = "" if hits is None else f", {percent(hits)} of them found in the cache"
    said = f"Prompts had {size:,.0f} tokens on average{found}. "
    if hits is not None and hits < 0.2 and size >= LONG_PROMPT:
        said += "What they share should stand first, word by word, so that it is found. "
    reached = span.last.most("penstock:floor_ratio", phase="prefill")
    if 0 < reached < LOW_FLOOR:
        return said + (
            f"Their steps reached {percent(reached)} of what this machine allows: others may keep "
            "it busy, or --max-num-batched-tokens be small. penstock profile says what binds them."
        )
    return said + "Weights in fewer bits (--quantization w8a8) or a GPU compute them faster."


def uneven_tokens(seen: Seen) -> Iterator[Finding]:
    """Where tokens are late, whether all are or some."""
    span, limit = seen.span, seen.limits.itl_ms / 1e3
    between = span.distribution("vllm:inter_token_latency_seconds")
    late, usual = between.quantile(0.99), between.quantile(0.5)
    if between.count < 100 or late <= limit:
        return
    said = (
        f"1% of tokens came more than {ms(late)} after the one before, which is more than "
        f"{ms(limit)}; half of them within {ms(usual)}. "
    )
    if usual <= limit:
        said += (
            "Those waited for others' prompts in their step, or gave way: lower "
            "--max-num-batched-tokens (penstock tune finds it), or let a fleet compute prompts "
            "apart."
        )
    else:
        running = span.gauge("penstock:sequences_running")
        at_once = f", up to {running:,.0f} sequences at once" if running else ""
        said += (
            f"All are slow{at_once}: lower --max-num-seqs (penstock "
            "tune --goodput chat finds it), or take weights in fewer bits (--quantization w8a8)."
        )
    yield Finding("between tokens", "hint", said)


def full_cache(seen: Seen) -> Iterator[Finding]:
    """Who runs out of blocks is computed again, or swapped."""
    span = seen.span
    used, gave_way = span.gauge("vllm:kv_cache_usage_perc"), span.count("vllm:num_preemptions")
    if used < FULL and not gave_way:
        return
    waiting = span.gauge("vllm:num_requests_waiting")
    if not gave_way and not waiting:
        return
    swapped = span.count("penstock:preemptions_swap")
    yield Finding(
        "cache",
        "hint",
        f"The cache of {span.gauge('penstock:kv_cache_blocks'):,.0f} blocks is too small for what "
        f"runs at once: {percent(used)} of it in use, {waiting:,.0f} requests waiting, sequences "
        f"gave way {gave_way:,.0f} times ({swapped:,.0f} of them swapped, the others computed "
        "again). Give it more (--num-gpu-blocks-override, --gpu-memory-utilization), store keys "
        "and values in fewer bits (--kv-cache-dtype int8), or lower --max-num-seqs.",
    )


def leaks(seen: Seen) -> Iterator[Finding]:
    """What an idle server holds or takes."""
    span = seen.span
    if not seen.idle:
        return
    sizes_of = {of.get("engine"): n for of, n in span.last.each("penstock:kv_cache_blocks")}
    used = [
        share * sizes_of.get(of.get("engine"), 0.0)
        for of, share in span.last.each("vllm:kv_cache_usage_perc")
    ]
    held = round(sum(x for x in used if math.isfinite(x)))
    if held > 0:
        yield Finding(
            "leak",
            "bug",
            f"Nothing runs and nothing waits, but {held:,} blocks of {sum(sizes_of.values()):,.0f} "
            "are in use: requests will have less and less. Restart it, and report this with what "
            "was asked of it before.",
        )
    sizes = [one.sum("process_resident_memory_bytes") for one in (span.begin, span.last)]
    if min(sizes) > 0 and sizes[1] - sizes[0] > IDLE_GROWTH:
        grown, over = (sizes[1] - sizes[0]) / (1 << 20), span.last.at - span.begin.at
        yield Finding(
            "leak",
            "bug",
            f"Its memory grew by {grown:,.0f} MiB in {over:,.0f} s in which it computed nothing. "
            "Report this with what was asked of it before.",
        )


def poor_drafts(seen: Seen) -> Iterator[Finding]:
    """Guesses that are mostly wrong."""
    span = seen.span
    drafted = span.count("vllm:spec_decode_num_draft_tokens")
    accepted = span.count("vllm:spec_decode_num_accepted_tokens")
    on = span.last.has("penstock:spec_decode_on") and not span.gauge("penstock:spec_decode_on")
    rate = accepted / drafted if drafted else 0.0
    if drafted < 100 or (rate >= _ACCEPTED and not on):
        return
    off = " They are off now, since they don't pay." if on else ""
    yield Finding(
        "drafts",
        "hint",
        f"{accepted:,.0f} of {drafted:,.0f} guessed tokens were right ({percent(rate)}).{off} "
        "penstock doctor MODEL --speculative-config JSON looks for the cause; without drafts their "
        "cost goes.",
    )


def broken_forms(seen: Seen) -> Iterator[Finding]:
    """Outputs that don't come to the end of their form, and forms that are new each time."""
    span = seen.span
    formed = span.by("penstock:structured_outputs", "complete")
    cut, all_of = formed.get("false", 0.0), sum(formed.values())
    if all_of >= FEW and cut / all_of > 0.1:
        yield Finding(
            "structure",
            "hint",
            f"{cut:,.0f} of {all_of:,.0f} outputs that were held to a form were cut off before its "
            "end: max_tokens is too small for it, or it has no end in sight. Bound its strings and "
            "arrays (maxLength, maxItems), and what may repeat in a grammar.",
        )
    new = span.count("penstock:grammar_cache_queries") - span.count("penstock:grammar_cache_hits")
    if all_of >= 2 * FEW and new / all_of > 0.5:
        yield Finding(
            "forms",
            "hint",
            f"{new:,.0f} forms were compiled for {all_of:,.0f} outputs: requests hardly ever ask "
            "for one twice. Send the same schema with the same bytes, and put what varies into the "
            "prompt.",
        )
    called = span.by("penstock:tool_calls", "valid")
    wrong, calls = called.get("false", 0.0), sum(called.values())
    if calls >= FEW and wrong / calls > 0.05:
        yield Finding(
            "tools",
            "hint",
            f"{wrong:,.0f} of {calls:,.0f} calls of tools have arguments that don't follow the "
            'tool\'s schema: set "strict": true in it, or tool_choice, so that they are held to '
            "it.",
        )


def early_ends(seen: Seen) -> Iterator[Finding]:
    """How requests end."""
    ends = seen.span.by("vllm:request_success", "finished_reason")
    count = sum(ends.values())
    if failed := ends.get("error", 0.0):
        yield Finding(
            "errors",
            "fault",
            f"{failed:,.0f} of {count:,.0f} requests failed in the engine. Its log says of what.",
        )
    if count < FEW:
        return
    if (cut := ends.get("length", 0.0)) / count > _CUT:
        yield Finding(
            "answers",
            "hint",
            f"{cut:,.0f} of {count:,.0f} answers were cut off: by max_tokens, or because a "
            "conversation filled the context. A chat model that never ends by itself may have "
            "another model's template or stop tokens.",
        )
    if (left := ends.get("abort", 0.0)) / count > _LEFT:
        yield Finding(
            "clients",
            "hint",
            f"In {left:,.0f} of {count:,.0f} requests the client left before the end: its time-out "
            "may be shorter than an answer takes.",
        )


def refusals(seen: Seen) -> Iterator[Finding]:
    """Requests that were turned away, and answers of 5xx."""
    span = seen.span
    answers = span.by("penstock:http_requests", "status")
    count = sum(answers.values())
    broken = sum(n for status, n in answers.items() if status.startswith("5") and status != "503")
    if broken:
        yield Finding(
            "errors",
            "fault",
            f"{broken:,.0f} of {count:,.0f} HTTP requests were answered with a failure of the "
            "server's. Its log says of what.",
        )
    ways = {
        "queue_full": "more wait than --max-queue-len lets: start another instance",
        "rate_limit": "keys sent more than their limits let",
        "concurrency_limit": "keys had more at once than their limits let",
        "timeout": "they waited for longer than their time-out",
        "context_length": "prompts were longer than the context: truncation 'auto' drops the "
        "oldest turns, --max-model-len or --max-attention-window let longer ones in",
        "unauthorized": "they had no key, or a wrong one",
        "invalid": "they said something that the API doesn't know; the answers say what",
        "unavailable": "it was starting or ending",
    }
    found = span.by("penstock:request_rejections", "reason")
    for reason, refused in found.items():
        if refused >= FEW and refused / max(count, 1.0) > _REFUSED and reason in ways:
            yield Finding(
                "refusals",
                "hint",
                f"{refused:,.0f} of {count:,.0f} HTTP requests were refused ({reason}): "
                f"{ways[reason]}.",
            )


def slow_steps(seen: Seen) -> Iterator[Finding]:
    """Where decoding steps are far from what the machine allows, what their time goes to."""
    span = seen.span
    spent = span.by("penstock:step_seconds", "cause", phase="decode")
    all_of, forward = sum(spent.values()), spent.get("forward", 0.0)
    steps, whole = span.count("penstock:steps"), span.count("penstock:step_seconds")
    if not steps or not all_of or whole / steps < OWN_STEP_S:
        return
    own = {cause: seconds for cause, seconds in spent.items() if cause != "forward"}
    if own and 1 - forward / all_of > OWN_SHARE:
        cause, most = max(own.items(), key=lambda one: one[1])
        yield Finding(
            "steps",
            "hint",
            f"{percent(1 - forward / all_of)} of decoding steps' time was spent outside the "
            f"forward pass, most of it on {cause} ({percent(most / all_of)}). {_cause(cause)}",
        )
    reached = span.last.most("penstock:floor_ratio", phase="decode")
    if 0 < reached < LOW_FLOOR:
        yield Finding(
            "floor",
            "hint",
            f"Decoding reached {percent(reached)} of what this machine allows, since it started: "
            "other programs may keep its cores or its memory busy, or threads share cores. "
            "penstock doctor on that machine tells, penstock profile where the time goes.",
        )


def _cause(cause: str) -> str:
    return {
        "draft": "Guesses take that long: shorter drafts, or none.",
        "sample": "Samplers that go over the whole vocabulary cost the most: see docs/sampling.md.",
        "detokenize": "Long stop strings, and many of them, cost the most.",
        "wait": "Its threads waited for a core: other programs take them.",
    }.get(cause, "With steps as short as this model's that may be as it is; see penstock profile.")


def unfound_prefixes(seen: Seen) -> Iterator[Finding]:
    """Long prompts of which nothing is found again."""
    hits, prompts = seen.hits, seen.span.distribution("vllm:request_prompt_tokens")
    if hits is None or hits >= LOW_HITS or prompts.count < 2 * FEW or prompts.mean < LONG_PROMPT:
        return
    yield Finding(
        "prefixes",
        "hint",
        f"{percent(hits)} of {prompts.count:,.0f} prompts' tokens were found in the cache, and "
        f"prompts have {prompts.mean:,.0f} on average. If they share a beginning, it isn't the "
        "same to the byte: a date, a name or an id may stand in it. Put what varies at the end.",
    )


CHECKS: dict[str, tuple[Callable[[Seen], Iterator[Finding]], str]] = {
    "first token": (slow_first_token, "vllm:time_to_first_token_seconds_bucket"),
    "between tokens": (uneven_tokens, "vllm:inter_token_latency_seconds_bucket"),
    "cache": (full_cache, "vllm:kv_cache_usage_perc"),
    "leak": (leaks, "penstock:steps_total"),
    "drafts": (poor_drafts, "vllm:spec_decode_num_draft_tokens_total"),
    "structure": (broken_forms, "penstock:grammar_cache_queries_total"),
    "answers": (early_ends, "vllm:request_success_total"),
    "refusals": (refusals, "penstock:http_requests_total"),
    "steps": (slow_steps, "penstock:step_seconds_total"),
    "prefixes": (unfound_prefixes, "vllm:prefix_cache_queries_total"),
}
"""What is checked, and a metric without which it can't be."""
