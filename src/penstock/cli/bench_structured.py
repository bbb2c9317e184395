"""`penstock bench structured`: outputs of a given form, whether they have it and what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
)
from penstock.cli.outputs import keep_json
from penstock.cli.progress import progress_line
from penstock.errors import ConfigError, PenstockError, nearest

Schemas = Annotated[
    Path | None,
    typer.Option(
        help="JSON schemas: a .json or .jsonl file, a folder of them, or a .tar.xz archive. "
        "Default: eight of our own."
    ),
]
NumPrompts = Annotated[
    int | None,
    typer.Option(min=1, help="Outputs to validate. Default: one for each schema that compiles."),
]
MaxNumSeqs = Annotated[int, typer.Option(min=1, help="Sequences that run at once.")]
MaxTokens = Annotated[int, typer.Option(min=2, help="Of an output; longer ones are cut.")]
Rounds = Annotated[
    int, typer.Option(min=1, help="Of what is timed, in turns with and without; medians count.")
]
Parts = Annotated[
    str, typer.Option(help="What to measure, with commas: compile, outputs, overhead, jumps.")
]
Seed = Annotated[int, typer.Option(min=0, help="The same seed, the same outputs.")]


@grouped
def structured(
    model: Model = MODEL,
    schemas: Schemas = None,
    num_prompts: NumPrompts = None,
    max_num_seqs: MaxNumSeqs = 16,
    max_tokens: MaxTokens = 128,
    rounds: Rounds = 3,
    parts: Parts = "compile,outputs,overhead,jumps",
    seed: Seed = 0,
    tokenizer: TokenizerFrom = None,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    placed: Placed = PLACED,
    json_file: JsonFile = None,
) -> None:
    """Compile JSON schemas, validate outputs, time masks and jumps."""
    from rich.console import Console

    from penstock.bench.structured import benchmark
    from penstock.bench.structured.schemas import built_in, read_schemas
    from penstock.bench.workload import check_length

    options = benchmark.Options(
        num_prompts, max_num_seqs, max_tokens, rounds, seed, _parts(parts, benchmark.PARTS)
    )
    found = built_in() if schemas is None else read_schemas(schemas)
    check_length(model, benchmark.MOST_PROMPT_TOKENS, max_tokens, "--max-tokens")
    config = options.config(
        model,
        quantization=quantization,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        **given(tokenizer=tokenizer),
        **placed.chosen(),
    )
    runtime = load(config)
    with progress_line() as show:
        result = benchmark.run(config, runtime, found, schemas, options, show)
    Console(highlight=False, soft_wrap=True).print(result.table())
    if json_file is not None:
        keep_json(json_file, result.as_dict())
    if result.problems:
        raise PenstockError(
            f"{len(result.problems)} outputs aren't what they must be. The first: "
            f"{result.problems[0]}"
        )


def _parts(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The parts that were asked for, in their order."""
    asked = [word.strip() for word in text.split(",")]
    for word in asked:
        if word not in known:
            raise ConfigError(
                f"--parts {word!r} isn't one of {', '.join(known)}.{nearest(word, known)}"
            )
    return tuple(part for part in known if part in asked)
