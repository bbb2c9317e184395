"""Options that several commands share, and from them the arguments of the engine and sampler."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from penstock.cli.outputs import checked
from penstock.config import DEFAULT_CHAT_MODEL, DEFAULT_MODEL
from penstock.errors import ConfigError, InvalidSamplingError

if TYPE_CHECKING:
    from penstock.sampling import SamplingParams

MODEL = DEFAULT_MODEL
CHAT_MODEL = DEFAULT_CHAT_MODEL
_SAMPLING, _ENGINE = "Sampling", "Engine"
_BY_NAME = inspect.Parameter.KEYWORD_ONLY

Model = Annotated[
    str, typer.Argument(help="A folder, a .gguf file, a hub id, or the name of an embedded model.")
]
Temperature = Annotated[
    float | None,
    typer.Option(help="0 is greedy. Default: the model's own, else 1.", rich_help_panel=_SAMPLING),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Keep the likeliest tokens up to this probability.", rich_help_panel=_SAMPLING
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(help="Keep this many of the likeliest tokens.", rich_help_panel=_SAMPLING),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Drop tokens below this share of the likeliest one's probability.",
        rich_help_panel=_SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(help="Above 1 discourages what was there before.", rich_help_panel=_SAMPLING),
]
Sampling = Annotated[
    list[str] | None,
    typer.Option(
        "--sampling",
        metavar="NAME=VALUE",
        help="Any other sampling parameter (docs/sampling.md): mirostat=2, typical_p=0.9, "
        "dry_multiplier=0.8; may be repeated.",
        rich_help_panel=_SAMPLING,
    ),
]
Seed = Annotated[
    int | None, typer.Option(help="The same seed, the same text.", rich_help_panel=_SAMPLING)
]
MaxTokens = Annotated[
    int, typer.Option(help="At most this many tokens.", rich_help_panel=_SAMPLING)
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="End before this text; may be repeated.", rich_help_panel=_SAMPLING),
]
TokenHealing = Annotated[
    bool,
    typer.Option(
        "--token-healing",
        help="Choose the prompt's last tokens anew: for prompts that end within a word.",
        rich_help_panel=_SAMPLING,
    ),
]
Images = Annotated[
    list[str] | None,
    typer.Option(
        "--image",
        metavar="FILE",
        help="A picture's file, or a data: URL, for models that see; again for another. They stand "
        "where the text has the model's placeholder, or before it.",
    ),
]
Expected = Annotated[
    Path | None,
    typer.Option(
        "--prediction",
        metavar="FILE",
        help="The text that is expected to come, or much like it: drafts by ngram or suffix are "
        "made by it (--speculative-config).",
        rich_help_panel=_SAMPLING,
    ),
]
Samples = Annotated[int, typer.Option(help="Samples of each.", rich_help_panel=_SAMPLING)]
IgnoreEos = Annotated[
    bool,
    typer.Option(
        "--ignore-eos", help="Go on after the end of the text.", rich_help_panel=_SAMPLING
    ),
]
Dtype = Annotated[
    str,
    typer.Option(help="auto (the checkpoint's), float32 or bfloat16.", rich_help_panel=_ENGINE),
]
Quantization = Annotated[
    str | None,
    typer.Option(
        help="Round the weights to 8 or 4 bits, activations in 16 or 8: w8a16, w8a8, w4a16, w4a8 "
        "with -tensor, -channel, -g32, -g64 or -g128, -asym and, with a8, -rotated or -blocks; fp8 "
        "with -tensor or -block; nf4, mxfp4, nvfp4. Default: as they are. Of weights that are "
        "quantized already: a8, a16.",
        rich_help_panel=_ENGINE,
    ),
]
KvCacheDtype = Annotated[
    str,
    typer.Option(
        help="int8 or fp8: keys and values in half the bytes; int4, or kivi, which drifts less: in "
        "less than a third; bfloat16 (or float32): as the model computes. auto: what an export or "
        "engine was made with, else as the model computes.",
        rich_help_panel=_ENGINE,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Longest prompt and text, in tokens. Default: what the model was made for.",
        rich_help_panel=_ENGINE,
    ),
]
SpeculativeConfig = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help='Guess tokens ahead: \'{"method": "ngram"}\', suffix, self, or draft_model, medusa, '
        "eagle, eagle3 with a model of their own (docs/speculation.md).",
        rich_help_panel=_ENGINE,
    ),
]
Prompts = Annotated[
    list[str], typer.Option("--prompt", "-p", help="The text to complete; - reads stdin.")
]
Stats = Annotated[
    bool, typer.Option("--stats", help="Show the speed and its share of the floor, on stderr.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object a sample instead of the text.")
]
TokenizerFrom = Annotated[
    str | None, typer.Option(help="Folder or hub id. Default: the model's own.")
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", callback=checked, help="Write the figures to this file as JSON."),
]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """`command` for typer, each field of a parameter that is a dataclass an option of its own."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    options = []
    for parameter in inspect.signature(command).parameters.values():
        kind = groups.get(parameter.name)
        if kind is None:
            options.append(parameter.replace(annotation=hints[parameter.name], kind=_BY_NAME))
            continue
        annotations = get_type_hints(kind, include_extras=True)
        options += [
            inspect.Parameter(f.name, _BY_NAME, default=f.default, annotation=annotations[f.name])
            for f in fields(kind)
        ]

    @wraps(command)
    def run(**arguments: Any) -> None:
        for name, kind in groups.items():
            arguments[name] = kind(**{f.name: arguments.pop(f.name) for f in fields(kind)})
        command(**arguments)

    run.__annotations__ = {option.name: option.annotation for option in options}
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return run


def to_path(text: str) -> Path:
    """For options whose path must be named: of an empty text, say of a variable that isn't set,
    typer makes the folder that the program runs in.
    """
    if not text:
        raise typer.BadParameter("it is empty, and must name a file or a folder.")
    return Path(text)


def given(**arguments: Any) -> dict[str, Any]:
    """The arguments that were given: those that aren't None."""
    return {name: value for name, value in arguments.items() if value is not None}


def speculation(text: str | None) -> dict[str, Any] | None:
    """The value of --speculative-config. Raises ConfigError for what isn't a JSON object."""
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"--speculative-config isn't JSON: {error}. An object such as "
            '{"method": "ngram"} is.'
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(
            f'--speculative-config must be an object such as {{"method": "ngram"}}, not {text!r}.'
        )
    return found


def named_values(pairs: list[str] | None) -> dict[str, Any]:
    """`["mirostat=2"]` → {"mirostat": 2}: values are JSON, or text where they aren't."""
    found: dict[str, Any] = {}
    for pair in pairs or ():
        name, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"--sampling {pair!r} must be NAME=VALUE, such as mirostat=2.")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


def together(*groups: dict[str, Any]) -> dict[str, Any]:
    """The arguments of all groups, the last those of --sampling. Raises ConfigError for two."""
    found: dict[str, Any] = {}
    for group in groups:
        for name in group.keys() & found.keys():
            raise ConfigError(f"{name} has an option of its own: give it there, not by --sampling.")
        found |= group
    return found


def sampling(**chosen: Any) -> SamplingParams:
    """Sampling parameters from what was given; the rest has SamplingParams' defaults. Raises
    InvalidSamplingError with ways out that a command line has.
    """
    from penstock.sampling import SamplingParams

    try:
        return SamplingParams.from_kwargs(**given(**chosen))
    except InvalidSamplingError as error:
        said = str(error)
        for before, now in _WAYS_OUT.items():
            said = said.replace(before, now)
        raise InvalidSamplingError(said) from error


_WAYS_OUT = {
    "Use None for as many as the context holds.": "One beyond the context is as many as fit.",
    "Use None, or -1,": "Leave it out, or give -1,",
}
"""What Python's callers may do → what stands for it here."""
