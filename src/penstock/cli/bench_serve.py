"""`penstock bench serve`: load on a server with OpenAI's API, and what its users would see."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from penstock.bench.serve.options import Backend, Dataset, LongPrompts, Options, PromptForm
from penstock.cli import console
from penstock.cli.outputs import checked, keep
from penstock.errors import ConfigError, nearest

if TYPE_CHECKING:
    from penstock.bench.serve.result import ServeResult

INTERRUPTED = 130
_DEFAULT = Options()
_METRICS = ("ttft", "tpot", "itl", "e2el")


def _server(*names: str, help: str, **limits: Any) -> Any:  # noqa: A002
    return typer.Option(*names, help=help, rich_help_panel="Server and requests", **limits)


def _data(*names: str, help: str, **limits: Any) -> Any:  # noqa: A002
    return typer.Option(*names, help=help, rich_help_panel="Workload", **limits)


def _load(*names: str, help: str, **limits: Any) -> Any:  # noqa: A002
    return typer.Option(*names, help=help, rich_help_panel="Load", **limits)


def _report(*names: str, help: str, **limits: Any) -> Any:  # noqa: A002
    return typer.Option(*names, help=help, rich_help_panel="Figures", **limits)


BaseUrl = Annotated[str, _server(help="The server, with or without /v1.")]
Model = Annotated[str | None, _server(help="Default: the first that the server lists.")]
BackendName = Annotated[
    str, _server(help="openai (/v1/completions) or openai-chat (/v1/chat/completions).")
]
Endpoint = Annotated[str | None, _server(help="Another path.")]
ApiKey = Annotated[str | None, _server(help="Default: OPENAI_API_KEY.")]
IgnoreEos = Annotated[
    bool,
    _server("--ignore-eos", help="Answers of exactly the wanted length; not every server can."),
]
Temperature = Annotated[float, _server(min=0.0, help="0 is greedy.")]
ExtraBody = Annotated[str | None, _server(help="A JSON object: more fields of each request.")]
RequestTimeout = Annotated[
    float, _server("--request-timeout", help="Seconds until a request has failed.")
]
ReadyTimeout = Annotated[
    float, _server("--ready-timeout", min=0.0, help="Seconds to wait for a starting server.")
]
MaxRetries = Annotated[
    int,
    _server(
        min=0,
        help="Send again this often after status 429, when Retry-After says; the latency goes on "
        "counting.",
    ),
]
DatasetName = Annotated[
    str,
    _data(
        help="random, shared-prefix, multi-turn; of a file: azure, mooncake (traces), sharegpt, or "
        "custom (lines of JSON with a prompt and perhaps output_tokens)."
    ),
]
DatasetPath = Annotated[Path | None, _data(help="The file of what is of one.")]
NumPrompts = Annotated[
    int | None,
    _data(min=1, help="Requests; multi-turn: conversations. Default: 200, or the whole trace."),
]
InputLen = Annotated[
    int | None,
    _data(
        "--random-input-len", "--input-len", min=1,
        help="Tokens of a prompt; multi-turn: that each turn adds."
        f" Default: {_DEFAULT.input_len}.",
    ),
]  # fmt: skip
OutputLen = Annotated[
    int | None,
    _data(
        "--random-output-len", "--output-len", min=1,
        help=f"Tokens to ask for; not of traces. Default: {_DEFAULT.output_len}.",
    ),
]  # fmt: skip
AnswerLen = Annotated[
    int | None,
    _data(
        "--sharegpt-output-len", "--custom-output-len", min=1,
        help="sharegpt, custom: tokens to ask for. Default: as many as the file says, or 256.",
    ),
]  # fmt: skip
RangeRatio = Annotated[
    float | None,
    _data(
        "--random-range-ratio",
        help="Lengths are uniform within this share of the mean; not of traces. Default: 0.",
    ),
]
NumGroups = Annotated[
    int | None,
    _data(min=1, help=f"shared-prefix: different prefixes. Default: {_DEFAULT.num_groups}."),
]
PrefixLen = Annotated[
    int | None,
    _data(
        min=1, help=f"shared-prefix: tokens that a group shares. Default: {_DEFAULT.prefix_len}."
    ),
]
SuffixLen = Annotated[
    int | None,
    _data(min=1, help=f"shared-prefix: tokens of its own. Default: {_DEFAULT.suffix_len}."),
]
NumTurns = Annotated[
    int | None, _data(min=1, help=f"multi-turn: of a conversation. Default: {_DEFAULT.num_turns}.")
]
ThinkTime = Annotated[
    float | None,
    _data(
        "--think-time", min=0.0,
        help=f"multi-turn: seconds from answer to next turn. Default: {_DEFAULT.think_time_s:g}.",
    ),
]  # fmt: skip
BlockTokens = Annotated[
    int | None,
    _data(min=1, help="mooncake: instead of each block of 512; shortens all prompts alike."),
]
MaxInputLen = Annotated[int | None, _data(min=1, help="Leave longer prompts out.")]
MaxOutputLen = Annotated[int | None, _data(min=1, help="Ask for no more tokens than this.")]
LongPromptsName = Annotated[
    str | None, _data(help="drop, or cut to --max-input-len. Default: drop.")
]
TokenizerName = Annotated[
    str | None,
    _data(help="Folder, hub id or embedded model. Default: --model's, where that is a folder."),
]
PromptFormName = Annotated[
    str, _data(help="ids (token ids), text (needs the tokenizer), or auto: what the server takes.")
]
VocabSize = Annotated[
    int | None,
    _data(
        min=1,
        help="Draw ids below this; not of text. Default: the tokenizer's, the server's, or 256.",
    ),
]
Seed = Annotated[int, _data(min=0, help="The same seed, the same load.")]
RequestRate = Annotated[
    float | None,
    _load(help="Requests a second, whatever the answers. Default: a trace's own times, else inf."),
]
Burstiness = Annotated[
    float | None,
    _load(help="Shape of a rate's gamma-distributed gaps: 1 (default) is Poisson, below: bursts."),
]
TimeScale = Annotated[
    float | None, _load(help="Multiplies a trace's times: 0.5 is twice as fast. Default: 1.")
]
MaxConcurrency = Annotated[
    int | None,
    _load(
        min=1,
        help="Requests at once. Without a rate or a trace: so many users, each of whom waits for "
        "the answer.",
    ),
]
NumWarmups = Annotated[int, _load(min=0, help="Requests before the clock starts.")]
Goodput = Annotated[
    list[str] | None,
    _report(
        help="chat (ttft:500 tpot:50), voice (ttft:200 tpot:30), or 'ttft:500 tpot:50 e2el:9000' "
        "in milliseconds."
    ),
]
PercentileMetrics = Annotated[str, _report(help="Latencies to show.")]
MetricPercentiles = Annotated[str, _report(help="Percentiles to find.")]
BlockSize = Annotated[
    int, _report(min=1, help="Tokens of a block in the cache that bounds the prefix hits.")
]
JsonFile = Annotated[
    Path | None,
    _report(
        "--json", "--save-result", callback=checked, help="Write the figures to this file as JSON."
    ),
]
SaveDetailed = Annotated[
    bool, _report("--save-detailed", help="With every request's times (in --json's file).")
]
HtmlFile = Annotated[
    Path | None,
    _report("--html", callback=checked, help="Write a page with charts to this file."),
]


def serve(
    base_url: BaseUrl = _DEFAULT.base_url,
    model: Model = None,
    backend: BackendName = _DEFAULT.backend,
    endpoint: Endpoint = None,
    api_key: ApiKey = None,
    ignore_eos: IgnoreEos = False,
    temperature: Temperature = 0.0,
    extra_body: ExtraBody = None,
    timeout_s: RequestTimeout = _DEFAULT.timeout_s,
    ready_timeout_s: ReadyTimeout = 0.0,
    max_retries: MaxRetries = 0,
    dataset_name: DatasetName = _DEFAULT.dataset_name,
    dataset_path: DatasetPath = None,
    num_prompts: NumPrompts = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    answer_len: AnswerLen = None,
    range_ratio: RangeRatio = None,
    num_groups: NumGroups = None,
    prefix_len: PrefixLen = None,
    suffix_len: SuffixLen = None,
    num_turns: NumTurns = None,
    think_time_s: ThinkTime = None,
    block_tokens: BlockTokens = None,
    max_input_len: MaxInputLen = None,
    max_output_len: MaxOutputLen = None,
    long_prompts: LongPromptsName = None,
    tokenizer: TokenizerName = None,
    prompt_form: PromptFormName = _DEFAULT.prompt_form,
    vocab_size: VocabSize = None,
    seed: Seed = 0,
    request_rate: RequestRate = None,
    burstiness: Burstiness = None,
    time_scale: TimeScale = None,
    max_concurrency: MaxConcurrency = None,
    num_warmups: NumWarmups = 0,
    goodput: Goodput = None,
    percentile_metrics: PercentileMetrics = "ttft,tpot,itl,e2el",
    metric_percentiles: MetricPercentiles = "50,90,99",
    block_size: BlockSize = _DEFAULT.block_size,
    json_file: JsonFile = None,
    save_detailed: SaveDetailed = False,
    html_file: HtmlFile = None,
) -> None:
    """Load an OpenAI-compatible server: TTFT, TPOT, ITL, throughput, goodput, prefix hits."""
    given = dict(locals())
    own = ("percentile_metrics", "metric_percentiles", "json_file", "save_detailed", "html_file")
    options = _options({name: value for name, value in given.items() if name not in own},
                       _numbers(metric_percentiles))  # fmt: skip
    words = percentile_metrics.split(",")
    shown = [_one_of("--percentile-metrics", word.strip(), _METRICS) for word in words]
    if save_detailed and json_file is None:
        raise ConfigError("--save-detailed adds to the file of --json: give one.")

    from penstock.bench.serve import benchmark
    from penstock.bench.serve.progress import showing

    with showing(sys.stderr, watched=console.is_terminal()) as (show, every_s):
        result = benchmark.run(options, show, every_s)
    _present(result, shown, json_file, save_detailed, html_file)


def _options(given: dict[str, Any], percentiles: tuple[float, ...]) -> Options:
    """The run's options from the command line's, which have their names."""
    from penstock.bench.serve.figures import parse_goodput

    for name, allowed in {
        "backend": Backend,
        "prompt_form": PromptForm,
        "dataset_name": Dataset,
        "long_prompts": LongPrompts,
    }.items():
        if given[name] is not None:
            _one_of("--" + name.replace("_", "-"), given[name], get_args(allowed))
    given["api_key"] = given["api_key"] or os.environ.get("OPENAI_API_KEY") or None
    given["extra_body"] = _json_object(given["extra_body"])
    given["goodput"] = parse_goodput(given["goodput"] or [])
    return Options.of(**given, percentiles=percentiles)


def _present(
    result: ServeResult,
    metrics: list[str],
    json_file: Path | None,
    save_detailed: bool,
    html_file: Path | None,
) -> None:
    from rich.console import Console

    from penstock.bench.environment import environment
    from penstock.bench.serve.page import html_page
    from penstock.hardware import detect

    Console(highlight=False, soft_wrap=True).print(result.table(metrics))
    where = environment(detect())
    if json_file is not None:
        keep(json_file, result.as_json(where, detailed=save_detailed))
    if html_file is not None:
        keep(html_file, html_page(result, where))
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)
    if not result.figures.completed:
        kind, (_, message) = next(iter(result.figures.errors.items()))
        raise ConfigError(f"No request was answered. The first error, {kind}: {message}")


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ConfigError(
            f"{option} {value!r} isn't one of {', '.join(allowed)}.{nearest(value, allowed)}"
        )
    return value


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError as wrong:
        raise ConfigError(
            f"--metric-percentiles {text!r} isn't a list of numbers like 50,90,99."
        ) from wrong


def _json_object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as wrong:
        raise ConfigError(f"--extra-body isn't JSON: {wrong}.") from wrong
    if not isinstance(found, dict):
        raise ConfigError(f"--extra-body is {text!r}, not a JSON object.")
    return found
