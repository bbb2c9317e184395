"""Which projector a model in GGUF sees through: settled once, before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.config import EngineConfig, ModelConfig
from penstock.errors import ConfigError
from penstock.models.gguf.seeing import projector_beside


def with_projector(folder: Path, config: EngineConfig) -> EngineConfig:
    """`config` with the projector that was asked for or lies beside the model; False: none.

    Raises ConfigError and ModelError as `projector_beside` does.
    """
    model = config.model
    if folder.is_dir() and model.mmproj is None:
        return config
    found = projector_beside(folder, model.mmproj)
    return replace(config, model=replace(model, mmproj=found or False))


def projector_of(model: ModelConfig) -> Path | None:
    """The file of a configuration that is settled; None where there is none."""
    return Path(model.mmproj) if isinstance(model.mmproj, str | Path) else None


def check_unasked(folder: Path, model: ModelConfig) -> None:
    """Raises ConfigError for a projector beside an engine, which has its tower."""
    if model.mmproj is not None:
        raise ConfigError(
            f"{folder} was built with what it sees through, or without: leave mmproj out."
        )
