"""Options about LoRA adapters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.options import given
from penstock.config.lora import LoraConfig
from penstock.errors import ConfigError

_PANEL = "Adapters"

Lora = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        metavar="NAME|FOLDER",
        help="Answer with this LoRA adapter (PEFT's layout, or stories-verse, "
        "stories-shakespeare of the embedded stories).",
        rich_help_panel=_PANEL,
    ),
]
LoraModules = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=FOLDER",
        help="An adapter, which requests name as their model; may be repeated. Or vLLM's JSON.",
        rich_help_panel=_PANEL,
    ),
]


def _option(*names: str, help: str) -> Any:  # noqa: A002
    return typer.Option(*names, help=help, rich_help_panel=_PANEL)


@dataclass(frozen=True, slots=True)
class ServedAdapters:
    """Which adapters a server has, and may get."""

    lora_modules: LoraModules = None
    enable_lora: Annotated[
        bool, _option("--enable-lora", help="Have room for adapters, also without any to start.")
    ] = False
    max_loras: Annotated[
        int | None, _option(help="Adapters in memory. Default: 8, or as many as are given.")
    ] = None
    max_lora_rank: Annotated[
        int | None,
        _option(help="The largest rank. Default: 16, or the largest of those that are given."),
    ] = None
    allow_runtime_lora_updating: Annotated[
        bool,
        _option(
            "--allow-runtime-lora-updating",
            help="Let requests load adapters of this machine's folders, and unload them.",
        ),
    ] = False

    def modules(self, own: Sequence[str] = ()) -> dict[str, Path]:
        """Folders by the names of their adapters. own: the model's names. Raises ConfigError."""
        from penstock.models.hub import adapter_folder

        found: dict[str, Path] = {}
        for text in self.lora_modules or ():
            name, path = _module(text)
            if name in found:
                raise ConfigError(f"--lora-modules has two adapters named {name!r}.")
            if name in own:
                raise ConfigError(f"--lora-modules has the model's own name, {name!r}.")
            found[name] = adapter_folder(path)
        return found

    def chosen(self, modules: dict[str, Path]) -> dict[str, Any]:
        """As arguments of an engine that has room for `modules`."""
        enabled = self.enable_lora or bool(modules) or self.allow_runtime_lora_updating
        count, rank = self.max_loras, self.max_lora_rank
        if count is not None and len(modules) > count:
            raise ConfigError(
                f"--lora-modules has {len(modules)} adapters, but --max-loras is {count}. Raise "
                "it, or leave it out."
            )
        largest = max((_rank(folder) for folder in modules.values()), default=0)
        if rank is not None and largest > rank:
            raise ConfigError(
                f"--lora-modules has an adapter of rank {largest}, but --max-lora-rank is {rank}. "
                "Raise it, or leave it out."
            )
        usual = LoraConfig()
        if count is None and len(modules) > usual.max_loras:
            count = len(modules)
        if rank is None and modules:
            rank = max(usual.max_lora_rank, largest)
        return given(enable_lora=enabled or None, max_loras=count, max_lora_rank=rank)


ADAPTERS = ServedAdapters()


def single(names: Sequence[str] | None) -> str | None:
    """The adapter of --lora. Raises ConfigError for several."""
    if not names:
        return None
    if len(names) > 1:
        raise ConfigError(
            f"--lora is given {len(names)} times ({', '.join(names)}), but a text is written with "
            "one adapter. Choose one; penstock serve has several at once (--lora-modules)."
        )
    return names[0]


def one_adapter(name: str | None) -> dict[str, Any]:
    """Arguments of an engine that has room for --lora."""
    if name is None:
        return {}
    from penstock.models.hub import adapter_folder

    rank = max(LoraConfig().max_lora_rank, _rank(adapter_folder(name)))
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}


def _rank(folder: Path) -> int:
    from penstock.models.lora import LoraFiles

    return LoraFiles(folder).rank


def _module(text: str) -> tuple[str, str]:
    """A name and a folder. Raises ConfigError."""
    if text.lstrip().startswith("{"):
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"--lora-modules isn't JSON: {error}. Got {text!r}.") from error
        name, path = found.get("name"), found.get("path")
    else:
        name, _, path = text.partition("=")
    if not (isinstance(name, str) and name and isinstance(path, str) and path):
        raise ConfigError(
            f"--lora-modules has {text!r}; give NAME=FOLDER, or "
            '{"name": NAME, "path": FOLDER}, once for each adapter.'
        )
    return name, path
