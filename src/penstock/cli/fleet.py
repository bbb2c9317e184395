"""`penstock fleet`: several models, and instances of them, behind one server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import given, grouped
from penstock.cli.server_options import (
    FRONT,
    NAMES,
    FrontOptions,
    check_extra,
    named,
    option,
)
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.fleet.config import FleetConfig, ModelConfig
    from penstock.server import ServerConfig

_PANEL = "Fleet"
_COUNT = re.compile(r"(?:(?P<name>[^=]+)=)?(?P<least>\d{1,4})(?:-(?P<most>\d{1,4}))?")
_CPUS = re.compile(r"(?:(?P<name>[^=]+)=)?(?P<count>\d{1,5})")
_OPTIONS = NAMES | {
    "max_loaded": "--max-loaded",
    "max_attempts": "--max-attempts",
    "start_timeout_s": "--start-timeout",
    "^policy": "--policy",
    "^ray(?= is)": "--ray",
    "^num_cpus": "--num-cpus",
}


@grouped
def fleet(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE.toml | [NAME=]MODEL …",
            help="A fleet's file, or models: folders, .gguf files, embedded ones. Default: "
            "stories-chat and stories.",
        ),
    ] = None,
    instances: Annotated[
        list[str] | None,
        option(
            help="How many of a model: NAME=2, or NAME=0-3 for as many as are needed; without a "
            "name of every model. May be repeated.",
            panel=_PANEL,
        ),
    ] = None,
    policy: Annotated[
        str | None,
        option(
            help="Whom a request goes to: prefix (who computed its beginning), least (who is "
            "least busy) or round_robin. Default: prefix.",
            panel=_PANEL,
        ),
    ] = None,
    max_loaded: Annotated[
        int | None,
        option(help="Models loaded at once; the one that rests longest makes room.", panel=_PANEL),
    ] = None,
    max_attempts: Annotated[
        int | None,
        option(help="Instances that a request may meet breaking. Default: 3.", panel=_PANEL),
    ] = None,
    start_timeout: Annotated[
        float | None,
        option(help="Seconds for an instance to be ready. Default: 600.", panel=_PANEL),
    ] = None,
    ray: Annotated[
        str | None,
        option(
            help="Have instances run as actors of a Ray cluster: HOST:PORT of its head, auto (the "
            "one that this machine belongs to), or local (one that starts here, to try it).",
            panel=_PANEL,
        ),
    ] = None,
    num_cpus: Annotated[
        list[str] | None,
        option(
            help="CPUs that Ray reserves for an instance, which are its threads: NAME=4; without a "
            "name of every model. May be repeated. Default: 1.",
            panel=_PANEL,
        ),
    ] = None,
    front: FrontOptions = FRONT,
) -> None:
    """Serve several models, each in processes of its own, under one address.

    Requests name a model. An instance that ends is started again, and its answers go on. What
    penstock serve takes for one model stands in a file, below \\[model.options]. With --ray
    instances run on the machines of a Ray cluster.
    """
    check_extra()
    from penstock.fleet.app import serve_fleet
    from penstock.server import ServerConfig
    from penstock.server.logs import configure

    server = named(_OPTIONS, ServerConfig, **front.chosen())
    chosen = given(
        policy=policy,
        max_loaded=max_loaded,
        max_attempts=max_attempts,
        start_timeout_s=start_timeout,
        ray=ray,
    )
    files = [word for word in models or [] if word.endswith(".toml")]
    names = {} if files else _OPTIONS  # a file's words are its own
    config = named(names, _config, models or [], instances or [], num_cpus or [], server, chosen)
    configure(server.log_format)
    serve_fleet(config)


def _config(
    words: list[str],
    instances: list[str],
    num_cpus: list[str],
    server: ServerConfig,
    chosen: dict[str, Any],
) -> FleetConfig:
    """The fleet of a file, or of what was named. Raises ConfigError."""
    from penstock.fleet.config import FleetConfig
    from penstock.fleet.files import read_fleet

    files = [word for word in words if word.endswith(".toml")]
    if files:
        if len(words) > 1:
            raise ConfigError(f"{files[0]} is a fleet's file; give it alone.")
        for option, texts in (("--instances", instances), ("--num-cpus", num_cpus)):
            if texts:
                raise ConfigError(
                    f"{option} is for models that are named here; a file has its own."
                )
        return read_fleet(Path(files[0]), server, chosen)
    counts, cpus = _counts(instances), _cpus(num_cpus)
    models = [_model(word, counts, cpus) for word in words or ["stories-chat", "stories"]]
    for option, found in (("--instances", list(counts)), ("--num-cpus", list(cpus))):
        unknown = [name for name in found if name and name not in [x.name for x in models]]
        if unknown:
            raise ConfigError(f"{option} has {unknown[0]!r}, and no model is named so.")
    return FleetConfig(tuple(models), server, **chosen)


def _model(
    word: str, counts: dict[str, tuple[int, int]], cpus: dict[str, int]
) -> ModelConfig:  # fmt: skip
    from penstock.fleet.config import ModelConfig
    from penstock.fleet.needs import Needs

    name, found, model = word.partition("=")
    if not found:
        name, model = Path(word).stem if word.endswith(".gguf") else Path(word).name, word
    if word.startswith(("http://", "https://")) or model.startswith(("http://", "https://")):
        raise ConfigError(f"{word}: servers that run elsewhere are named in a fleet's file.")
    reserved = cpus.get(name, cpus.get(""))
    return ModelConfig(
        name,
        model,
        counts.get(name, counts.get("", (1, 1))),
        ray=None if reserved is None else Needs(reserved),
    )


def _counts(texts: list[str]) -> dict[str, tuple[int, int]]:
    """By model; of every model under an empty name."""
    found: dict[str, tuple[int, int]] = {}
    for text in texts:
        match = _COUNT.fullmatch(text)
        if match is None:
            raise ConfigError(f"--instances is {text!r}; write NAME=2, NAME=0-3, or 2.")
        least = int(match["least"])
        name = match["name"] or ""
        if name in found:
            raise ConfigError(f"--instances says twice how many of {name or 'every model'}.")
        found[name] = (least, int(match["most"] or least))
    return found


def _cpus(texts: list[str]) -> dict[str, int]:
    """By model; of every model under an empty name."""
    found: dict[str, int] = {}
    for text in texts:
        match = _CPUS.fullmatch(text)
        if match is None:
            raise ConfigError(f"--num-cpus is {text!r}; write NAME=4, or 4.")
        name = match["name"] or ""
        if name in found:
            raise ConfigError(f"--num-cpus says twice how many of {name or 'every model'}.")
        found[name] = int(match["count"])
    return found
