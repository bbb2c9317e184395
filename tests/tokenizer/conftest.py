"""Tokenizers of the shared data, as folders that both Penstock and transformers can open."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.tokenizer import Tokenizer

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"

# folder name → source files, and what to write beside them
FOLDERS: dict[str, tuple[str, tuple[str, ...], dict[str, object]]] = {
    "stories260K": ("models/stories260K/hf", ("tokenizer.json", "tokenizer_config.json"), {}),
    "gpt2": ("tokenizers/gpt2-hf", ("tokenizer.json",), {"config.json": {"model_type": "gpt2"}}),
    "gpt2-slow": (
        "tokenizers/gpt2-hf",
        ("vocab.json", "merges.txt"),
        {"tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"}},
    ),
    "qwen2.5": (
        "tokenizers/qwen2.5",
        ("vocab.json", "merges.txt", "tokenizer_config.json"),
        {},
    ),
    "llama2": ("tokenizers/llama2", ("tokenizer.model",), {}),
    "llama2-no-legacy": (
        "tokenizers/llama2",
        ("tokenizer.model",),
        {"tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", "legacy": False}},
    ),
    "llama3": ("tokenizers/llama3", ("tokenizer.model",), {}),
}


@pytest.fixture(scope="session")
def shared_data() -> Path:
    if not DATA.is_dir():
        pytest.skip(f"the shared data isn't at {DATA}")
    return DATA


@pytest.fixture(scope="session")
def folder_of(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            source, files, written = FOLDERS[name]
            if not (shared_data / source).is_dir():
                pytest.skip(f"the shared data has no {source}")
            folder = tmp_path_factory.mktemp(name)
            for file in files:
                shutil.copy(shared_data / source / file, folder / file)
            for file, content in written.items():
                (folder / file).write_text(json.dumps(content))
            made[name] = folder
        return made[name]

    return make


@pytest.fixture(scope="session")
def tokenizer_of(folder_of: Callable[[str], Path]) -> Callable[[str], Tokenizer]:
    made: dict[str, Tokenizer] = {}

    def load(name: str) -> Tokenizer:
        if name not in made:
            folder = folder_of(name)
            if name.startswith("llama2"):
                pytest.importorskip("sentencepiece")
            made[name] = Tokenizer.from_folder(folder)
        return made[name]

    return load
