"""A tiny checkpoint with every kind of file beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.models.tiny import make_tiny


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
