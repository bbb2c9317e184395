"""One benchmark of a server, from its options to its result."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, assert_never

import numpy as np

from penstock.bench.serve import texts, traces, workload
from penstock.bench.serve.api import ENDPOINTS, Api
from penstock.bench.serve.arrivals import gamma_arrivals, trace_arrivals
from penstock.bench.serve.figures import figures
from penstock.bench.serve.http_client import HttpClient, Server
from penstock.bench.serve.load import LoadGenerator, Plan, Progress
from penstock.bench.serve.options import Options, PromptForm
from penstock.bench.serve.probe import (
    ServedModel,
    agree,
    choose_vocabulary,
    find_tokenizer,
    served_model,
)
from penstock.bench.serve.result import ServeResult
from penstock.bench.serve.texts import Texts
from penstock.bench.serve.vocabulary import FALLBACK_SIZE, Vocabulary, of_texts
from penstock.bench.serve.workload import Lengths, Workload
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.tokenizer import Tokenizer


def build_workload(
    options: Options,
    vocab_size: int,
    found: Texts | None = None,
    tokenizer: Tokenizer | None = None,
) -> Workload:
    """The workload that the options describe; of texts `found`, as `tokenizer` reads them."""
    o = options
    number = o.num_prompts or 200
    inputs, outputs = Lengths(o.input_len, o.range_ratio), Lengths(o.output_len, o.range_ratio)
    drawn: dict[str, int] = {"vocab_size": vocab_size, "seed": o.seed}
    match o.dataset_name:
        case "random":
            made = workload.random_prompts(number, inputs, outputs, **drawn)
        case "shared-prefix":
            made = workload.shared_prefix(
                number,
                num_groups=o.num_groups,
                prefix_len=o.prefix_len,
                suffix_len=o.suffix_len,
                outputs=outputs,
                **drawn,
            )
        case "multi-turn":
            made = workload.multi_turn(
                number,
                num_turns=o.num_turns,
                think_time_s=o.think_time_s,
                inputs=inputs,
                outputs=outputs,
                **drawn,
            )
        case "azure" | "mooncake":
            made = _read_trace(o, vocab_size=vocab_size)
        case "sharegpt" | "custom":
            assert found is not None and tokenizer is not None
            made = _of_texts(o, number, found, tokenizer)
        case _:
            assert_never(o.dataset_name)
    return workload.limit(
        made,
        max_input_len=o.max_input_len,
        max_output_len=o.max_output_len,
        cut=o.long_prompts == "cut",
    )


def _of_texts(options: Options, number: int, found: Texts, tokenizer: Tokenizer) -> Workload:
    length, seed = options.answer_len, options.seed
    if options.dataset_name == "custom":
        return texts.custom(found, number, tokenizer=tokenizer, output_len=length)
    return texts.sharegpt(found, number, tokenizer=tokenizer, output_len=length, seed=seed)


def _read_trace(options: Options, *, vocab_size: int) -> Workload:
    o = options
    assert o.dataset_path is not None
    if o.dataset_name == "azure":
        return traces.azure(o.dataset_path, o.num_prompts, vocab_size=vocab_size, seed=o.seed)
    return traces.mooncake(
        o.dataset_path,
        o.num_prompts,
        block_tokens=o.block_tokens,
        vocab_size=vocab_size,
        seed=o.seed,
    )


def build_plan(options: Options, work: Workload) -> Plan:
    """When the workload is sent: in a closed loop, at a rate, or at a trace's own times."""
    o = options
    arrivals = None
    if o.request_rate is None and work.is_timed:
        arrivals = trace_arrivals(work, o.time_scale)
    elif o.max_concurrency is None or (
        o.request_rate is not None and math.isfinite(o.request_rate)
    ):
        rate = math.inf if o.request_rate is None else o.request_rate
        arrivals = gamma_arrivals(len(work.conversations), rate, o.burstiness, o.seed)
    return Plan(
        arrivals_s=arrivals,
        max_concurrency=o.max_concurrency,
        timeout_s=o.timeout_s,
        max_retries=o.max_retries,
        think_time_s=o.think_time_s,
    )


def describe_plan(plan: Plan, options: Options) -> str:
    """One phrase about the load."""
    limit = "" if plan.max_concurrency is None else f", at most {plan.max_concurrency} at once"
    if plan.arrivals_s is None:
        return f"closed loop of {plan.max_concurrency}"
    of_a_trace = options.dataset_path is not None and not options.has_texts
    if options.request_rate is None and of_a_trace:
        scale = "" if options.time_scale == 1 else f" × {options.time_scale:g}"
        return f"open loop at the trace's times{scale}{limit}"
    if options.request_rate is None or math.isinf(options.request_rate):
        return f"all at once{limit}"
    kind = "Poisson" if options.burstiness == 1 else f"gamma, burstiness {options.burstiness:g}"
    return f"open loop at {options.request_rate:g} requests/s ({kind}){limit}"


def run(options: Options, on_progress: Callable[[Progress], None], every_s: float) -> ServeResult:
    """Measure. Raises `ConfigError` for what can't work, before the load begins."""
    server = Server.parse(options.base_url)
    found: Texts | None = None  # a bad file is told before a server is asked
    if options.dataset_path is not None and options.has_texts:
        found = texts.read(options.dataset_name, options.dataset_path)
    elif options.dataset_path is not None:
        _read_trace(replace(options, num_prompts=1), vocab_size=FALLBACK_SIZE)
    return asyncio.run(_run(options, server, found, on_progress, every_s))


async def _run(
    options: Options,
    server: Server,
    found: Texts | None,
    on_progress: Callable[[Progress], None],
    every_s: float,
) -> ServeResult:
    client = HttpClient(server, api_key=options.api_key)
    try:
        served = await served_model(
            client, options.model, timeout_s=options.timeout_s, wait_s=options.ready_timeout_s
        )
        tokenizer = find_tokenizer(options.tokenizer, served.name)
        api, vocabulary = await _agree(client, options, served, tokenizer)
        work = build_workload(options, vocabulary.size, found, tokenizer and tokenizer[0])
        workload.check_positions(work, served.max_model_len)
        await _warm_up(client, api, vocabulary, options, work)
        plan = build_plan(options, work)
        load = LoadGenerator(client, api, vocabulary, work, plan, on_progress, every_s)
        result = await load.run()
    finally:
        await client.close()
    return ServeResult(
        figures=figures(
            result,
            work,
            percentiles=options.percentiles,
            goodput=options.goodput,
            block_size=options.block_size,
        ),
        records=result.records,
        interrupted=result.interrupted,
        server=server.authority,
        model=served.name,
        load=describe_plan(plan, options),
        setup={
            "server": {"base_url": options.base_url, "kind": served.owned_by},
            "model": served.name,
            "api": {k: v for k, v in asdict(api).items() if k != "model"},
            "vocabulary": {"size": vocabulary.size, "source": vocabulary.source},
            "workload": {
                "name": work.name,
                "requests": work.num_requests,
                **work.settings,
                "seed": options.seed,
                "remarks": list(work.remarks),
            },
            "load": {
                "kind": describe_plan(plan, options),
                "request_rate": None if options.request_rate is None else str(options.request_rate),
                "burstiness": options.burstiness,
                "time_scale": options.time_scale,
                "max_concurrency": options.max_concurrency,
                "num_warmups": options.num_warmups,
                "timeout_s": options.timeout_s,
                "max_retries": options.max_retries,
            },
        },
        remarks=work.remarks,
    )


async def _agree(
    client: HttpClient,
    options: Options,
    served: ServedModel,
    tokenizer: tuple[Tokenizer, str] | None,
) -> tuple[Api, Vocabulary]:
    """How requests are written, and of what."""
    api = Api(
        backend=options.backend,
        endpoint=options.endpoint or ENDPOINTS[options.backend],
        model=served.name,
        as_text=options.needs_text,
        ignore_eos=options.ignore_eos,
        temperature=options.temperature,
        extra_body=options.extra_body,
    )
    if options.has_texts and tokenizer is None:
        raise ConfigError(
            f"--dataset-name {options.dataset_name} needs the model's tokenizer to count tokens: "
            "give --tokenizer FOLDER or a hub id."
        )
    if options.needs_text and not options.has_texts:  # told before the server is asked
        choose_vocabulary(True, tokenizer, options.vocab_size, served)
    form: PromptForm = "text" if options.needs_text else options.prompt_form
    api = await agree(client, api, form, tokenizer is not None, timeout_s=options.timeout_s)
    if options.has_texts:
        assert tokenizer is not None
        return api, of_texts(*tokenizer)
    return api, choose_vocabulary(api.as_text, tokenizer, options.vocab_size, served)


async def _warm_up(
    client: HttpClient, api: Api, vocabulary: Vocabulary, options: Options, work: Workload
) -> None:
    """Requests as long as the workload's first ones, of other tokens; nothing of it is kept."""
    if not options.num_warmups:
        return
    generator = np.random.default_rng([options.seed, 2])
    sizes = [c.turns[0] for c in work.conversations[: options.num_warmups]]
    turns = [
        workload.Turn(
            workload.tokens(generator, vocabulary.size, len(turn.prompt)), turn.output_len
        )
        for i in range(options.num_warmups)
        for turn in [sizes[i % len(sizes)]]
    ]
    warm = Workload("warm-up", tuple(workload.Conversation((t,)) for t in turns), {})
    plan = Plan(None, options.max_concurrency or 8, timeout_s=options.timeout_s)
    result = await LoadGenerator(client, api, vocabulary, warm, plan).run()
    if result.interrupted:
        raise KeyboardInterrupt
    failed = [r for r in result.records if r.failed]
    if len(failed) == len(turns):
        raise ConfigError(
            f"Every request of the warm-up failed, the first with: {failed[0].message}"
        )
