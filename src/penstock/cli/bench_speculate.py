"""`penstock bench speculate`: what guessing tokens ahead gains, beside what it should gain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.device_options import PLACED, Placed
from penstock.cli.loading import load
from penstock.cli.options import (
    MODEL,
    Dtype,
    JsonFile,
    KvCacheDtype,
    Model,
    Quantization,
    TokenizerFrom,
    given,
    grouped,
    speculation,
)
from penstock.cli.outputs import checked, keep, keep_json
from penstock.cli.progress import progress_line
from penstock.config import SpeculativeConfig
from penstock.errors import ConfigError, PenstockError, TokenizerError

if TYPE_CHECKING:
    from penstock.bench.speculate.planted import Planted

Config = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help='Who guesses, as LLM takes it: \'{"method": "draft_model", "model": "FOLDER"}\'.',
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        help="The same, where that is all there is to say: ngram, suffix, self; with the embedded "
        "model draft_model, medusa, eagle.",
    ),
]
Number = Annotated[int | None, typer.Option(min=1, help="The most tokens in a draft.")]
Fixed = Annotated[
    bool, typer.Option("--fixed", help="Always as many: drafts aren't kept to what pays.")
]
PlantedRate = Annotated[
    float | None,
    typer.Option(
        "--planted",
        metavar="RATE",
        help="Guess by what a plain run gave, each token right with this probability: what a "
        "method would gain that is right so often.",
    ),
]
PlantedCost = Annotated[
    float | None,
    typer.Option(help="Of a plain step, what each planted guess takes. Default: nothing."),
]
PromptsFile = Annotated[
    Path | None,
    typer.Option(
        help='A prompt a line; in a .jsonl file an object a line with "prompt", a text or a list '
        'of token ids, and maybe "output", which is then taken for what the model says, and '
        '"prediction", what is expected of it, for ngram and suffix to guess by. Default: stories '
        "to go on with, and texts to repeat."
    ),
]
MaxTokens = Annotated[int, typer.Option(min=2, help="Of an output; longer ones are cut.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Requests at once.")]
Temperature = Annotated[
    float, typer.Option(help="0 is greedy. Sampled outputs must be equal, too.")
]
Rounds = Annotated[
    int, typer.Option(min=1, help="Runs of each request, in turns with plain ones; medians count.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of sampled requests.")]


def _picture(option: typer.CallbackParam, path: Path | None) -> Path | None:
    if path is not None and path.suffix.lower() != ".svg":
        raise ConfigError(f"--draw {path} must end in .svg: that is what is drawn.")
    return checked(option, path)


Picture = Annotated[
    Path | None,
    typer.Option(
        "--draw",
        callback=_picture,
        help="Draw the draft that the most of came true into this .svg.",
    ),
]


@grouped
def speculate(
    model: Model = MODEL,
    speculative_config: Config = None,
    method: Method = None,
    num_speculative_tokens: Number = None,
    fixed: Fixed = False,
    planted: PlantedRate = None,
    planted_cost: PlantedCost = None,
    prompts: PromptsFile = None,
    max_tokens: MaxTokens = 128,
    batch_size: BatchSize = 1,
    temperature: Temperature = 0.0,
    rounds: Rounds = 3,
    seed: Seed = 0,
    tokenizer: TokenizerFrom = None,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    placed: Placed = PLACED,
    json_file: JsonFile = None,
    picture: Picture = None,
) -> None:
    """Time requests with tokens guessed ahead and without, and say what was to be expected."""
    from rich.console import Console

    from penstock.bench.speculate import benchmark
    from penstock.bench.speculate.prompts import built_in, read_prompts

    asked = _asked(speculative_config, method, num_speculative_tokens, fixed)
    options = benchmark.Options(
        _drafts(asked, planted, planted_cost), max_tokens, batch_size, temperature, rounds, seed
    )
    if placed.is_divided:
        raise ConfigError(
            "penstock bench speculate looks into one process's cache and times its passes: leave "
            "--tensor-parallel-size, --pipeline-parallel-size, --context-parallel-size and --stage "
            "out."
        )
    workloads = built_in() if prompts is None else [read_prompts(prompts)]
    config = options.config(
        model,
        workloads,
        quantization=quantization,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        **given(tokenizer=tokenizer),
        **placed.chosen(),
    )
    try:
        runtime = load(config)
    except TokenizerError as error:
        raise TokenizerError(
            f'{error} Or give --prompts a .jsonl file whose "prompt" are lists of token ids.'
        ) from error
    with progress_line() as show:
        result = benchmark.run(config, runtime, workloads, options, show)
    Console(highlight=False, soft_wrap=True).print(result.table())
    if json_file is not None:
        keep_json(json_file, result.as_dict())
    if picture is not None:
        keep(picture, result.picture(runtime.tokenizer))
    if result.problems:
        raise PenstockError(
            f"Drafts have changed what comes, or failed, {len(result.problems)} times. The first: "
            f"{result.problems[0]}"
        )


def _asked(text: str | None, method: str | None, number: int | None, fixed: bool) -> dict[str, Any]:
    """The speculative_config, with what other options say. Raises ConfigError for two of a kind."""
    asked = speculation(text) or {}
    options = given(method=method, num_speculative_tokens=number, adaptive=False if fixed else None)
    for name in options.keys() & asked.keys():
        option = "--fixed" if name == "adaptive" else f"--{name.replace('_', '-')}"
        raise ConfigError(
            f"--speculative-config and {option} both say {name}. Leave one of them out."
        )
    return {**asked, **options}


def _drafts(
    asked: dict[str, Any], planted: float | None, cost: float | None
) -> SpeculativeConfig | Planted:
    """Who guesses."""
    from penstock.bench.speculate.planted import Planted

    if planted is not None:
        return Planted.of(planted, 0.0 if cost is None else cost, asked)
    if cost is not None:
        raise ConfigError(f"--planted-cost {cost:g} has no effect without --planted RATE.")
    found = SpeculativeConfig.of(asked) if asked else None
    if found is None:
        raise ConfigError(
            "Nobody guesses yet. Give --method ngram, suffix or self, with an embedded model also "
            "draft_model, medusa or eagle, --speculative-config for one that needs more, or "
            "--planted RATE."
        )
    return found
