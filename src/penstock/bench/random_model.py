"""An engine's runtime over random weights of a given shape, to time what no checkpoint is at hand
for."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from penstock.config import EngineConfig
from penstock.runtime import Runtime, load_runtime


def random_runtime(shape: dict[str, Any], **options: Any) -> tuple[EngineConfig, Runtime]:
    """The configuration and the runtime of a model of that shape, a config.json's content.

    options: those of an engine (`penstock.config`): device, dtype, quantization, …
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape), encoding="utf-8")
        config = EngineConfig.of(
            model=folder, load_format="dummy", skip_tokenizer_init=True, **options
        )
        return config, load_runtime(config)
