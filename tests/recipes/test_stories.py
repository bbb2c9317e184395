"""The embedded story model: the shipped folder is whole, and its recipe runs end to end."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
ASSET = ROOT / "src" / "penstock" / "assets" / "stories"
DATA = ROOT.parent / "shared" / "data" / "text"
MAX_BYTES = 12_000_000
HOSTILE = [
    "Once upon a time, there was a little girl named Lily.",
    'She said, "It\'s 3.14!"\n\n  Two  spaces,\ttabs and a trailing space ',
    "naïve façade — “quoted” …",
    "🐸👩‍👩‍👧‍👦🏳️‍🌈 emoji, then 한국어, 日本語, 中文, العربية",
    "\x00\x01\x7f\u200b\ufeff",
]


def expected_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    """Every tensor a tied Llama of this config has, and nothing else."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], hidden]}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": [hidden],
            prefix + "self_attn.q_proj.weight": [queries, hidden],
            prefix + "self_attn.k_proj.weight": [keys, hidden],
            prefix + "self_attn.v_proj.weight": [keys, hidden],
            prefix + "self_attn.o_proj.weight": [hidden, queries],
            prefix + "post_attention_layernorm.weight": [hidden],
            prefix + "mlp.gate_proj.weight": [inner, hidden],
            prefix + "mlp.up_proj.weight": [inner, hidden],
            prefix + "mlp.down_proj.weight": [hidden, inner],
        }
    return shapes | {"model.norm.weight": [hidden]}


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def test_config_names_a_tied_bfloat16_llama() -> None:
    config = read_json(ASSET / "config.json")
    assert config["model_type"] == "llama"
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["torch_dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert config["hidden_size"] % 32 == 0
    assert config["intermediate_size"] % 32 == 0


def test_weights_agree_with_the_config() -> None:
    shapes: dict[str, list[int]] = {}
    with safe_open(ASSET / "model.safetensors", "np") as weights:
        for name in weights.keys():  # noqa: SIM118 - not a mapping
            part = weights.get_slice(name)
            shapes[name] = list(part.get_shape())
            assert part.get_dtype() == "BF16", name
    assert shapes == expected_shapes(read_json(ASSET / "config.json"))


@pytest.mark.parametrize("text", HOSTILE)
def test_tokenizer_round_trips_any_text(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(ASSET / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_special_tokens_agree_across_the_files() -> None:
    tokenizer = Tokenizer.from_file(str(ASSET / "tokenizer.json"))
    config = read_json(ASSET / "config.json")
    generation = read_json(ASSET / "generation_config.json")
    names = read_json(ASSET / "tokenizer_config.json")
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert tokenizer.token_to_id(names["bos_token"]) == config["bos_token_id"]
    assert tokenizer.token_to_id(names["eos_token"]) == config["eos_token_id"]
    ends = [tokenizer.token_to_id(name) for name in ("<|endoftext|>", "<|im_end|>")]
    assert generation["eos_token_id"] == ends
    assert tokenizer.encode("A").ids[0] == config["bos_token_id"]


def test_asset_folder_is_complete_and_small() -> None:
    names = {path.name for path in ASSET.iterdir()}
    assert names == {
        *("README.md", "config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    assert sum(path.stat().st_size for path in ASSET.iterdir()) <= MAX_BYTES


def test_truecaser_restores_capitals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from recipes.stories.truecase import Truecaser

    truecaser = Truecaser.learn(["He saw Lily. Then the cat saw Lily and the dog and the cat."])
    lowered = 'zed said, "i am called zed." "stop!" he said to mom and her mom.\nit was fun.'
    restored = 'Zed said, "I am called Zed." "Stop!" he said to Mom and her mom.\nIt was fun.'
    assert truecaser(lowered) == restored


def run_recipe(folder: Path, *options: str) -> str:
    """Run the recipe at its smallest in `folder`; returns what it printed."""
    command = [sys.executable, "-m", "recipes.stories"]
    command += ["--data", str(DATA), "--work", str(folder), "--output", str(folder / "out")]
    command += ["--limit", "30", "--vocab-size", "600", "--hidden-size", "64", "--layers", "1"]
    command += ["--no-compile", *options]
    done = subprocess.run(
        command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_recipe_runs_end_to_end_and_resumes(tmp_path: Path) -> None:
    if not (DATA / "lcats_stories_train.jsonl").exists():
        pytest.skip(f"the recipe's texts are not in {DATA}")
    printed = run_recipe(tmp_path, "--max-steps", "3")
    assert "bits/byte" in printed
    assert "whole recipe" in printed
    first = read_json(tmp_path / "training.json")
    assert first["step"] == 3
    config = read_json(tmp_path / "out" / "config.json")
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as weights:
        assert set(weights.keys()) == set(expected_shapes(config))

    run_recipe(tmp_path, "--max-steps", "6")
    second = read_json(tmp_path / "training.json")
    assert second["step"] == 6
    assert second["elapsed_s"] > first["elapsed_s"]
    assert second["history"][0] == first["history"][0]
