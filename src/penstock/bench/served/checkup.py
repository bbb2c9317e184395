"""Look at a server twice, and say what is the matter with it. It is asked for nothing but what it
tells of itself, unless a probe is wanted.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.bench.finding import Finding
from penstock.bench.serve.http_client import HttpClient, Server
from penstock.bench.serve.probe import ServedModel, served_model
from penstock.bench.served.checks import CHECKS, Seen
from penstock.bench.served.limits import Limits
from penstock.bench.served.quality import TEXT, Losses, quality_findings, shuffled
from penstock.bench.served.scrape import Span, models_in, parse
from penstock.errors import ConfigError
from penstock.http1 import ExchangeError

TIMEOUT_S = 20.0
"""Of a look."""

PROBE_S = 120.0
"""Of a request."""

REST_S = 2.0
"""Between two looks, unless asked otherwise."""


@dataclass(slots=True)
class ServedCheckup:
    """What was found, and of what."""

    url: str
    model: str
    seconds: float  # between two looks
    requests: float = 0.0  # that ended in what was looked at
    since_start: bool = True  # counters are since the server's, else of those seconds
    checks: list[str] = field(default_factory=list)  # that could be run
    findings: list[Finding] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        """Whether the server works."""
        return all(found.level == "hint" for found in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "runs": self.runs}


def check_up_served(
    url: str,
    *,
    seconds: float | None = None,
    model: str | None = None,
    api_key: str | None = None,
    limits: Limits | None = None,
    probe: bool = False,
) -> ServedCheckup:
    """Of one model of a server of Penstock's, or another that has vLLM's metrics.

    seconds: what happens in them alone is looked at; None: all since the server started, and what
    changes in REST_S. probe: it is asked for the likelihood of a text, and twice for one answer.
    Raises ConfigError where there is no such server or model.
    """
    client = HttpClient(Server.parse(url), api_key=api_key)

    async def look() -> ServedCheckup:
        try:
            return await _look(client, url, seconds, model, limits or Limits(), probe)
        finally:
            await client.close()

    return asyncio.run(look())


async def _look(
    client: HttpClient,
    url: str,
    seconds: float | None,
    model: str | None,
    limits: Limits,
    probe: bool,
) -> ServedCheckup:
    found = ServedCheckup(url, model or "?", REST_S if seconds is None else seconds)
    found.findings += await _state(client, found)
    try:
        served = await served_model(client, model, timeout_s=TIMEOUT_S)
        text = await _metrics(client)
    except ConfigError as error:  # in the words of another command
        if found.findings:
            return found  # it says what it is doing meanwhile
        said = str(error).partition(" --ready-timeout")[0].replace("--model", "--served-model")
        raise ConfigError(said) from error
    found.model = served.name
    named = models_in(text)
    # an adapter's requests are counted with its model's
    of = served.name if served.name in named or len(named) > 1 else None
    begin = parse(text, time.monotonic(), of)
    await asyncio.sleep(found.seconds)
    try:
        last = parse(await _metrics(client), time.monotonic(), of)
    except ConfigError as error:
        found.findings.append(
            Finding("process", "fault", f"It went away while it was looked at: {error}")
        )
        return found
    restarted = begin.sum("process_start_time_seconds") != last.sum("process_start_time_seconds")
    found.since_start = seconds is None or restarted
    span = Span(None if found.since_start else begin, last, last if restarted else begin)
    found.requests = span.count("vllm:request_success")
    if restarted:
        found.findings.append(
            Finding("process", "fault", "The server was started again while it was looked at.")
        )
    seen = Seen(span, limits)
    for name, (check, needs) in CHECKS.items():
        if last.has(needs):
            found.checks.append(name)
            found.findings += check(seen)
    if probe:
        await _probe(client, served, found)
    return found


async def _metrics(client: HttpClient) -> str:
    try:
        status, body = await client.get_text("/metrics", timeout_s=TIMEOUT_S)
    except ExchangeError as failure:
        raise ConfigError(f"{client.server.authority} doesn't tell its metrics: {failure}") from (
            failure
        )
    if status != 200:
        raise ConfigError(
            f"{client.server.authority} answers HTTP {status} to /metrics, from which a checkup "
            "reads. vLLM and Penstock have it; a proxy may keep it back, or want a key (--api-key)."
        )
    return body


async def _state(client: HttpClient, found: ServedCheckup) -> list[Finding]:
    """What /health and /ready say, where there are such."""
    findings = []
    for path, what in (("/health", "doesn't serve"), ("/ready", "isn't ready")):
        try:
            status, body = await client.get_json(path, timeout_s=TIMEOUT_S)
        except ExchangeError as failure:
            if failure.kind == "connect":
                return []  # nobody is there: an error, which is told of by the next
            findings.append(Finding("health", "fault", f"{path} isn't answered: {failure}"))
            continue
        if status == 404:
            continue
        if path == "/health":
            found.checks.append("health")
        if status >= 500:
            why = body.get("reason", body.get("status", "")) if isinstance(body, dict) else ""
            said = f"HTTP {status}, {str(why or '–').rstrip('.')}"
            findings.append(Finding("health", "fault", f"It {what}: {path} says {said}."))
    return findings


async def _probe(client: HttpClient, served: ServedModel, found: ServedCheckup) -> None:
    """Ask for a text's likelihood, and for one answer twice."""
    try:
        words = TEXT.split()
        if served.max_model_len is not None:  # a word has three tokens at most, about
            words = words[: max(served.max_model_len // 3, 1)]
        text = " ".join(words)
        ordered = await _losses(client, served.name, text)
        mixed = await _losses(client, served.name, shuffled(text))
        found.checks.append("quality")
        uniform = None if served.vocab_size is None else math.log(served.vocab_size)
        found.findings += quality_findings(ordered, mixed, len(words), uniform)
        asked = {"prompt": " ".join(words[:20]), "max_tokens": 12, "temperature": 0}
        answers = [await _ask(client, served.name, asked) for _ in range(2)]
        found.checks.append("repeats")
        first, second = (one["choices"][0]["text"] for one in answers)
        if first != second:
            found.findings.append(
                Finding(
                    "repeats",
                    "hint",
                    f"The same greedy request had two answers: {first!r:.80} and {second!r:.80}. "
                    "Penstock's are always the same: something between changes requests, or two "
                    "servers with different weights share the address.",
                )
            )
    except (ExchangeError, KeyError, IndexError, TypeError, ValueError) as failure:
        found.findings.append(
            Finding("probe", "fault", f"A completion of a short text failed: {failure}")
        )


async def _losses(client: HttpClient, model: str, text: str) -> Losses:
    """Of a text's tokens; null among them is no number."""
    asked = {"prompt": text, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 0}
    answer = await _ask(client, model, asked)
    logprobs = answer["choices"][0]["logprobs"]["token_logprobs"][1:-1]
    return Losses(-sum(math.nan if one is None else one for one in logprobs), len(logprobs))


async def _ask(client: HttpClient, model: str, asked: dict[str, Any]) -> Any:
    parts: list[bytes] = []
    await client.post(
        "/v1/completions",
        json.dumps({"model": model, **asked}).encode(),
        on_body=parts.append,
        on_sent=lambda: None,
        timeout_s=PROBE_S,
    )
    return json.loads(b"".join(parts))
