"""A cache of the tests' own; tiny checkpoints, engines, calibration windows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.kernels import native
from penstock.pipeline.build import BuildOptions, build
from penstock.pipeline.calibration import CalibrationSet
from tests.models.tiny import Tiny, make_tiny, makes_once

needs_native = pytest.mark.skipif(
    native.handle is None, reason=f"nothing is timed, no step is one call: {native.reason}"
)
Build = Callable[..., Path]


@pytest.fixture(scope="package", autouse=True)
def _quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("penstock.pipeline.tuning.waited_s", lambda: 0.0)  # as on an idle machine
        patch.setattr("penstock.pipeline.tuning._ENOUGH_S", 0.0)
        patch.setattr("penstock.pipeline.tuning._MOST_RUNS", 2)
        yield


@pytest.fixture(scope="package")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Engines by their options, each built once."""
    made: dict[str, Path] = {}

    def get(model: str | Path = "stories", **options: Any) -> Path:
        key = repr((str(model), sorted(options.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("engines") / "engine"
            options = {"profile": (1, 8, 128), "max_num_seqs": 8, **options}
            build(BuildOptions(model=model, output=made[key], **options))
        return made[key]

    return get


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the qwen2 family, tied, float32."""
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny("qwen2", folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    templates = folder / "additional_chat_templates"
    templates.mkdir()
    (templates / "tools.jinja").write_text("{{ tools }}")
    (folder / "pytorch_model.bin").write_bytes(b"not taken along")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    return makes_once(tmp_path_factory)


@pytest.fixture(scope="session")
def calibration() -> CalibrationSet:
    random = torch.Generator().manual_seed(0)
    windows = [torch.randint(3, 320, (size,), generator=random) for size in (100, 90, 120, 60)]
    return CalibrationSet("random", tuple(tuple(window.tolist()) for window in windows))
