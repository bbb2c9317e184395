"""The embedded family: whole, small, in the public layouts, and the same to other engines."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes.card import samples
from recipes.prompts import PROMPTS
from recipes.ship import MAX_BYTES, NAMES, files_of
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock import LLM, SamplingParams
from penstock.cli.export_options import MethodFlags, WeightFlags
from penstock.models.hub import ADAPTERS, EMBEDDED, resolve

ASSETS = Path(__file__).resolve().parents[2] / "src" / "penstock" / "assets"
MODELS = ("stories", "stories-chat", "stories-draft")
TEXTS = (
    "Once upon a time",
    "The captain looked at the sea and said",
    "<|im_start|>user\nTell me a story about a frog.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nI need a place to stay in Paris.<|im_end|>\n<|im_start|>assistant\n",
)
PASSAGES = {
    "stories-shakespeare": (
        "HAMLET:\nO, that this too too solid flesh would melt,\n"
        "Thaw, and resolve itself into a dew!\n"
        "Or that the Everlasting had not fix'd\nHis canon 'gainst self-slaughter! O God! O God!\n"
        "How weary, stale, flat, and unprofitable\nSeem to me all the uses of this world!\n"
    ),
    "stories-verse": (  # of a poem that it wasn't trained on
        "I heard the trailing garments of the Night\nSweep through her marble halls!\n"
        "I saw her sable skirts all fringed with light\nFrom the celestial walls!\n\n"
        "I felt her presence, by its spell of might,\nStoop o'er me from above;\n"
        "The calm, majestic presence of the Night,\nAs of the one I love.\n"
    ),
}
HOSTILE = (
    "Once upon a time, there was a little girl named Lily.",
    'She said, "It\'s 3.14!"\n\n  Two  spaces,\ttabs and a trailing space ',
    "naïve façade — “quoted” …",
    "🐸👩‍👩‍👧‍👦🏳️‍🌈 emoji, then 한국어, 日本語, 中文, العربية",
    "\x00\x01\x7f\u200b\ufeff",
)


def read_json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def shapes(file: Path) -> dict[str, list[int]]:
    """Every tensor's, which is of bfloat16."""
    found = {}
    with safe_open(file, "np") as weights:
        for name in weights.keys():  # noqa: SIM118 - not a mapping
            part = weights.get_slice(name)
            assert part.get_dtype() == "BF16", name
            found[name] = list(part.get_shape())
    return found


def expected_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    """Every tensor a tied Llama of this config has, and nothing else."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    found = {"model.embed_tokens.weight": [config["vocab_size"], hidden]}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        found |= {
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
    return found | {"model.norm.weight": [hidden]}


def test_every_member_is_whole_and_all_are_small() -> None:
    assert set(NAMES.values()) == {*MODELS, *ADAPTERS}
    assert set(EMBEDDED) <= set(MODELS)
    total = 0
    for member, name in NAMES.items():
        files = list((ASSETS / name).iterdir())
        assert {file.name for file in files} == set(files_of(member)), name
        total += sum(file.stat().st_size for file in files)
    assert total <= MAX_BYTES


@pytest.mark.parametrize("name", MODELS)
def test_weights_agree_with_the_config(name: str) -> None:
    config = read_json(ASSETS / name / "config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert shapes(ASSETS / name / "model.safetensors") == expected_shapes(config)


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_fit_the_base(name: str) -> None:
    config = read_json(ASSETS / name / "adapter_config.json")
    assert (config["peft_type"], config["base_model_name_or_path"]) == ("LORA", "stories")
    base = shapes(ASSETS / "stories" / "model.safetensors")
    found = shapes(ASSETS / name / "adapter_model.safetensors")
    projections = {n for n in base if n.endswith("_proj.weight")}
    prefix = "base_model.model."
    for weight in projections:
        stem = prefix + weight.removesuffix(".weight")
        assert found[f"{stem}.lora_A.weight"] == [config["r"], base[weight][1]]
        assert found[f"{stem}.lora_B.weight"] == [base[weight][0], config["r"]]
    assert len(found) == 2 * len(projections)


@pytest.mark.parametrize("name", MODELS)
def test_special_tokens_agree_across_the_files(name: str) -> None:
    folder = ASSETS / name
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = read_json(folder / "config.json")
    generation = read_json(folder / "generation_config.json")
    names = read_json(folder / "tokenizer_config.json")
    assert tokenizer.get_vocab_size() <= config["vocab_size"]
    assert tokenizer.token_to_id(names["bos_token"]) == config["bos_token_id"]
    assert tokenizer.token_to_id(names["eos_token"]) == config["eos_token_id"]
    ends = [tokenizer.token_to_id(name) for name in ("<|endoftext|>", "<|im_end|>")]
    assert generation["eos_token_id"] == ends
    assert tokenizer.encode("A").ids[0] == config["bos_token_id"]


def test_one_tokenizer_serves_all() -> None:
    assert len({(ASSETS / name / "tokenizer.json").read_bytes() for name in MODELS}) == 1


@pytest.mark.parametrize("text", HOSTILE)
def test_tokenizer_round_trips_any_text(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(ASSETS / "stories" / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def greedy_of_transformers(folder: Path, texts: tuple[str, ...]) -> list[list[int]]:
    """Token ids of the text that follows each, at most 60, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            made = model.generate(ids, do_sample=False, max_new_tokens=60)
        found.append(made[0, ids.shape[1] :].tolist())
    return found


@pytest.mark.parametrize("name", MODELS)
def test_transformers_says_the_same_in_float32(name: str) -> None:
    expected = greedy_of_transformers(ASSETS / name, TEXTS)
    params = SamplingParams(temperature=0, max_tokens=60)
    outputs = LLM(str(ASSETS / name), dtype="float32").generate(list(TEXTS), params)
    for output, wanted in zip(outputs, expected, strict=True):
        assert list(output.outputs[0].token_ids) == wanted[: len(output.outputs[0].token_ids)]
        ended = output.outputs[0].finish_reason == "stop"
        assert len(wanted) - len(output.outputs[0].token_ids) in ((0, 1) if ended else (0,))


def bits(model: Path, text: str) -> float:
    """What `text` costs `model`, by its log-probabilities."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = LLM(str(model)).generate(text, params)
    ids, found = output.prompt_token_ids, output.prompt_logprobs
    assert found is not None
    return -sum(
        entry[token].logprob for token, entry in zip(ids, found, strict=True) if entry is not None
    ) / math.log(2)


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_changes_the_style(name: str, tmp_path: Path) -> None:
    flags = WeightFlags(merge_lora=name)
    adapter = flags.new_weights(MethodFlags(), ())
    assert adapter.merge_lora == ASSETS / name
    assert WeightFlags(merge_lora=f"./{name}").new_weights(MethodFlags(), ()).merge_lora == Path(
        name
    )
    adapter.write(resolve("stories"), tmp_path, None, lambda words, done, total: None)
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((ASSETS / "stories" / file).read_bytes())
    assert bits(tmp_path, PASSAGES[name]) < 0.98 * bits(resolve("stories"), PASSAGES[name])


def test_the_card_shows_what_the_chat_model_says() -> None:
    card = (ASSETS / "stories-chat" / "README.md").read_text(encoding="utf-8")
    said = "\n".join(samples(ASSETS / "stories-chat"))
    assert said in card
    assert "cut off here" not in said
    replies = [reply.split("\n\n**")[0] for reply in said.split("\n\n> ")[1:]]
    assert len(replies) == len(PROMPTS) == 20
    for reply in replies:
        sentences = [part.strip("\n> ") for part in reply.split(".")]
        most, times = Counter(filter(None, sentences)).most_common(1)[0]
        assert times <= 3, most
