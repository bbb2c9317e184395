"""Reading a fleet's file: TOML, strict both ways."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.cpus import parse_cpus
from penstock.errors import ConfigError, nearest
from penstock.fleet.config import FleetConfig, ModelConfig
from penstock.fleet.ensemble import Ensemble, Stage
from penstock.fleet.needs import Needs
from penstock.server import ServerConfig

_FLEET: dict[str, type | tuple[type, ...]] = {
    "policy": str,
    "ray": str,
    "max_loaded": int,
    "start_timeout_s": (int, float),
    "max_attempts": int,
}
_MODEL: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "model": str,
    "instances": (int, list),
    "options": (dict, list),
    "cpus": (str, list),
    "workers": list,
    "api_key_env": str,
    "idle_timeout_s": (int, float),
    "target_demand": (int, float),
    "prefill": int,
    "prefill_workers": list,
    "prefill_from": int,
    "prefill_space": (int, float),
    "on": str,
    "ray": dict,
}
_RAY: dict[str, type | tuple[type, ...]] = {"num_cpus": int, "num_gpus": int, "resources": dict}
_ENSEMBLE: dict[str, type | tuple[type, ...]] = {"name": str, "stage": list}
_STAGE: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "model": str,
    "prompt": str,
    "system": str,
    "parameters": dict,
}
_KINDS = {str: "a text", int: "an integer", float: "a number", list: "a list", dict: "a table"}
Choices = Mapping[str, Any]


def read_fleet(path: Path, server: ServerConfig, chosen: Choices | None = None) -> FleetConfig:
    """The fleet that a file describes. chosen: what counts for more than the file's own.

    Raises ConfigError naming the place.
    """
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"The fleet's file {path} can't be read: {error}.") from error
    entries = _tables(document.pop("model", []), f"{path}: model")
    ensembles = _tables(document.pop("ensemble", []), f"{path}: ensemble")
    _check(document, _FLEET, str(path), ("model", "ensemble"))
    folder = path.resolve().parent
    models = [_model(x, f"{path}, model {i + 1}", folder) for i, x in enumerate(entries)]
    several = [_ensemble(x, f"{path}, ensemble {i + 1}") for i, x in enumerate(ensembles)]
    return FleetConfig(
        tuple(models), server, ensembles=tuple(several), **{**document, **(chosen or {})}
    )


def _tables(found: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(found, list) or not all(isinstance(x, dict) for x in found):
        raise ConfigError(f"{where} must be tables, each below [[{where.rsplit(maxsplit=1)[-1]}]].")
    return found


def _check(
    table: Choices,
    known: dict[str, type | tuple[type, ...]],
    where: str,
    also: tuple[str, ...] = (),
) -> None:
    """Raises ConfigError for what isn't known, or of another kind."""
    for name, value in table.items():
        kinds = known.get(name)
        if kinds is None:
            names = [*known, *also]
            raise ConfigError(
                f"{where}: {name!r} isn't known.{nearest(name, names)} There are: "
                f"{', '.join(names)}."
            )
        allowed = kinds if isinstance(kinds, tuple) else (kinds,)
        if not isinstance(value, allowed) or isinstance(value, bool):
            told = " or ".join(_KINDS[kind] for kind in allowed)
            raise ConfigError(f"{where}: {name} is {value!r}; it must be {told}.")


def _model(table: Choices, where: str, folder: Path) -> ModelConfig:
    _check(table, _MODEL, where)
    fields = dict(table)
    if "name" not in fields:
        raise ConfigError(f"{where}: needs a name.")
    here = f"{where} ({fields['name']})"
    if "instances" in fields:
        fields["instances"] = instances_of(fields["instances"], here)
    if "options" in fields:
        fields["options"] = _options(fields["options"], here)
    if "cpus" in fields:
        fields["cpus"] = _cpus(fields["cpus"], here)
    if "ray" in fields:
        fields["ray"] = _needs(fields["ray"], f"{here}: ray")
    for name in ("workers", "prefill_workers"):
        if name in fields:
            fields[name] = _texts(fields[name], f"{here}: {name}")
    if fields.get("model") and (folder / fields["model"]).exists():
        fields["model"] = str(folder / fields["model"])  # as seen from the file
    return ModelConfig(**fields)


def instances_of(found: Any, where: str) -> tuple[int, int]:
    """`2`, or `[0, 3]`: at least and at most. Raises ConfigError."""
    pair = found if isinstance(found, list) else [found, found]
    whole = all(isinstance(x, int) and not isinstance(x, bool) for x in pair)
    if len(pair) != 2 or not whole:
        raise ConfigError(f"{where}: instances is {found!r}; write 2, or [0, 3] (least, most).")
    return pair[0], pair[1]


def _options(found: Any, where: str) -> tuple[str, ...]:
    """A list of words, or a table: `quantization = "w4a8"`, `enable-prefix-caching = false`."""
    if isinstance(found, list):
        return _texts(found, f"{where}: options")
    words: list[str] = []
    for name, value in found.items():
        option = name.replace("_", "-")
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, bool):
                words.append(f"--{option}" if one else f"--no-{option}")
            elif isinstance(one, str | int | float):
                words.append(f"--{option}={one}")
            else:
                raise ConfigError(f"{where}: options: {name} can't be {one!r}.")
    return tuple(words)


def _cpus(found: Any, where: str) -> Any:
    if isinstance(found, list):
        return tuple(parse_cpus(x) for x in _texts(found, f"{where}: cpus"))
    if found not in ("shared", "split", "numa"):
        raise ConfigError(
            f"{where}: cpus is {found!r}; it must be shared, split, numa, or a list with a set "
            'each, like ["0-7", "8-15"].'
        )
    return found


def _needs(found: dict[str, Any], where: str) -> Needs:
    _check(found, _RAY, where)
    try:
        return Needs(**found)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _texts(found: list[Any], where: str) -> tuple[str, ...]:
    if not all(isinstance(x, str) for x in found):
        raise ConfigError(f"{where} must be a list of texts, not {found!r}.")
    return tuple(found)


def _ensemble(table: Choices, where: str) -> Ensemble:
    _check(table, _ENSEMBLE, where)
    if "name" not in table:
        raise ConfigError(f"{where}: needs a name.")
    here = f"{where} ({table['name']})"
    stages: list[Stage] = []
    for i, stage in enumerate(_tables(table.get("stage", []), f"{here}: stage")):
        at = f"{here}, stage {i + 1}"
        _check(stage, _STAGE, at)
        missing = next((x for x in ("name", "model", "prompt") if x not in stage), None)
        if missing is not None:
            raise ConfigError(f"{at}: needs a {missing}.")
        stages.append(Stage(**stage))
    return Ensemble(table["name"], tuple(stages))
