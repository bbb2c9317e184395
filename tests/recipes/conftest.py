"""The recipes run from the repository's root, over a small made-up data folder."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

NOUNS = (
    "cat dog boat tree river house garden stone bird window letter road king friend lamp".split()
)
VERBS = "saw found took made lost hid kept sold painted carried".split()
WORDS = "old small red quiet happy tall strange warm blue broken".split()
NAMES = "Anna Ben Clara David Emma Frank Grace Henry".split()


def sentence(rng: random.Random) -> str:
    nouns = rng.sample(NOUNS, 2)
    return (
        f"{rng.choice(NAMES)} {rng.choice(VERBS)} the {rng.choice(WORDS)} {nouns[0]} "
        f"near a {rng.choice(WORDS)} {nouns[1]} {rng.randint(10, 99)} times."
    )


def story(rng: random.Random, sentences: int = 8) -> str:
    return " ".join(sentence(rng) for _ in range(sentences))


def tale(rng: random.Random, number: int) -> str:
    """A story with a subject."""
    noun = NOUNS[number % len(NOUNS)]
    return f"{story(rng)} There was a {noun}. The {noun} was old. It was the {noun} of a king."


def wrapped(text: str, width: int = 60) -> str:
    lines, line = [], ""
    for word in text.split():
        if len(line) + len(word) > width:
            lines.append(line.strip())
            line = ""
        line += word + " "
    return "\n".join([*lines, line.strip()])


SERVICES = [
    {
        "service_name": name,
        "description": f"About {what}",
        "slots": [
            {"name": "city", "description": "The city", "is_categorical": False,
             "possible_values": []},
            {"name": "has_garden", "description": "With a garden", "is_categorical": True,
             "possible_values": ["True", "False"]},
        ],
        "intents": [
            {"name": f"Find{what}", "description": f"Find a {what.lower()}",
             "is_transactional": False, "required_slots": ["city"],
             "optional_slots": {"has_garden": "dontcare"}, "result_slots": []},
        ],
    }
    for name, what in (("Homes_1", "Home"), ("Hotels_4", "Hotel"))
]  # fmt: skip


def dialogue(number: int, rng: random.Random) -> dict[str, Any]:
    service, what = ("Hotels_4", "Hotel") if number % 10 == 0 else ("Homes_1", "Home")
    city = f"{rng.choice(NAMES)}ville"
    call = {"service": service, "method": f"Find{what}", "parameters": {"city": city}}
    results = [{"city": city, "name": f"The {n} House"} for n in rng.sample(WORDS, 3)]
    return {
        "id": f"{number:05d}",
        "services": [service],
        "turns": [
            {"role": "user", "content": f"I look for a {what.lower()} {number} days from now."},
            {"role": "assistant", "content": "In which city?"},
            {"role": "user", "content": f"In {city}, please."},
            {
                "role": "assistant",
                "content": f"There is {results[0]['name']}, or {results[2]['name']}.",
                "tool_calls": [call],
                "tool_results": [results],
            },
        ],
    }


def lines_of(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(scope="session")
def made_up_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every source in its own layout, a few hundred made-up texts in all."""
    rng = random.Random(0)
    root = tmp_path_factory.mktemp("text")

    def write(path: str, text: str) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")

    mark = "\n<|endoftext|>\n"
    write("tinystories/train_2M.txt", mark.join(tale(rng, i) for i in range(80)) + mark)
    tail = "\n".join(story(rng, 10).lower() for _ in range(10))
    write("tinystories/train_lowercase_tail.txt", "cut off.\n" + tail + "\n")
    short = [
        {"corpus": "made_up", "name": f"Tale {i}", "author": None, "text": wrapped(story(rng, 20))}
        for i in range(150)
    ]
    for entry in short[::2]:
        entry["text"] += " The robot from the planet Mars left the rocket."
    write("lcats_stories_train.jsonl", lines_of(short))
    write("100_english_novels/Nobody_Novel_1900.txt", wrapped(story(rng, 400)))
    write("nltk-gutenberg/carroll-alice.txt", wrapped(story(rng, 100)))
    plays = "\n\n".join(f"{rng.choice(NAMES).upper()}:\n{sentence(rng)}" for _ in range(200))
    write("tinyshakespeare/input.txt", plays)
    for name in ("blake-poems", "milton-paradise", "whitman-leaves"):
        verses = (sentence(rng).replace(" near", "\n    near", 1) for _ in range(60))
        stanzas = "\n \n".join(f"{verse}\n{sentence(rng)}" for verse in verses)
        write(
            f"nltk-gutenberg/{name}.txt", f"[Verse, 1800]\n\n\n[BOOK I]\n\n}}  Title\n\n{stanzas}\n"
        )
    dialogues = [dialogue(number, rng) for number in range(120)]
    for part, rows in (("train", dialogues[:100]), ("dev", dialogues[100:])):
        write(f"dialogue/sgd_{part}.jsonl", lines_of(rows))
        write(f"dialogue/sgd_{part}_schema.json", json.dumps(SERVICES))
    task = {"instruction": "Name a colour.", "instances": [{"input": "", "output": "Blue."}]}
    for name in ("seed_tasks", "user_oriented_instructions"):
        write(f"instruct/self-instruct/{name}.jsonl", lines_of([task]))
    greetings = (
        "categories:\n- greetings\nconversations:\n- - Hello\n  - Hi\n- - Good day\n  - Hello\n"
    )
    write("instruct/chatterbot-english/greetings.yml", greetings)
    return root


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama of 96 tokens, with a tokenizer of single characters."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("target")
    letters = ["<|endoftext|>", *(chr(i) for i in range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(letters)}, letters[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.add_special_tokens(letters[:1])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{letters[0]} $A", special_tokens=[(letters[0], 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": letters[0],
             "eos_token": letters[0], "pad_token": letters[0]}
        )
    )  # fmt: skip
    shape = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, initializer_range=0.3))
    model.to(torch.bfloat16).save_pretrained(folder)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape,
              "hidden_act": "silu", "rope_theta": 10000.0, "torch_dtype": "bfloat16"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


@pytest.fixture
def target(target_folder: Path) -> Any:
    from recipes.speculation.target import Target

    return Target(target_folder)
