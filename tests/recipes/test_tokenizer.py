import json
from pathlib import Path
from typing import Any

import pytest
from recipes.replies import tokenize_replies
from recipes.tokenizer import TAGS, render, save_tokenizer, train_tokenizer
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from penstock.tokenizer import Tokenizer as PenstockTokenizer

HOSTILE = [
    'She said, "It\'s 3.14!"\n\n  Two  spaces,\ttabs and a trailing space ',
    "naïve façade — “quoted” … has_live_music",
    "🐸👩‍👩‍👧‍👦 한국어, 日本語, العربية",
    "\x00\x01\x7f\u200b\ufeff",
]
TOOL = {
    "type": "function",
    "function": {
        "name": "FindHome",
        "description": "Find a home",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where"},
                "rooms": {"type": "integer"},
                "garden": {"type": "string", "enum": ["True", "False"]},
            },
            "required": ["city"],
        },
    },
}
CALL = {"type": "function", "function": {"name": "FindHome", "arguments": {"city": "Zürich"}}}
CONVERSATIONS: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [
    ([{"role": "user", "content": "Hello"}], None),
    ([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}], [TOOL]),
    (
        [
            {"role": "user", "content": "A home in Zürich"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": '[{"rooms": "3"}]'},
            {"role": "assistant", "content": "It has 3 rooms."},
        ],
        [TOOL],
    ),
    ([{"role": "user", "content": [{"type": "text", "text": "Hello"}]}], None),
    ([{"role": "user", "content": "x"}], [{"type": "function", "function": {"name": "Now"}}]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    texts = [render(messages, tools) for messages, tools in CONVERSATIONS] * 20
    save_tokenizer(train_tokenizer(texts, 512).to_str(), path, 1024)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("text", HOSTILE)
def test_any_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=True) == text


def test_ids_of_marks_and_tags(tokenizer: Tokenizer) -> None:
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *TAGS]
    assert [tokenizer.token_to_id(name) for name in names] == list(range(7))
    assert tokenizer.encode("A").ids[0] == 0


def test_tags_stay_visible_where_special_tokens_are_skipped(tokenizer: Tokenizer) -> None:
    text = "<tool_call>{}</tool_call>"
    ids = tokenizer.encode(text + "<|im_end|>", add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_training_is_deterministic() -> None:
    texts = [text * 30 for text in HOSTILE]
    assert train_tokenizer(texts, 400).to_str() == train_tokenizer(texts, 400).to_str()


@pytest.mark.parametrize(("messages", "tools"), CONVERSATIONS)
@pytest.mark.parametrize("prompt", [False, True])
def test_transformers_and_penstock_render_what_was_trained_on(
    folder: Path, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, prompt: bool
) -> None:
    ours = render(messages, tools, add_generation_prompt=prompt)
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=prompt
    )
    assert ours == theirs
    engine = PenstockTokenizer.from_folder(folder)
    found = engine.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt)
    assert ours == found


def test_the_rendered_form() -> None:
    messages, tools = CONVERSATIONS[2]
    assert render(messages, tools) == (
        "<|endoftext|><|im_start|>system\n"
        "Tools:\n"
        "FindHome(city, rooms?: integer, garden?=True|False): Find a home<|im_end|>\n"
        "<|im_start|>user\nA home in Zürich<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "FindHome", "arguments": {"city": "Zürich"}}'
        "</tool_call><|im_end|>\n"
        '<|im_start|>tool\n<tool_response>[{"rooms": "3"}]</tool_response><|im_end|>\n'
        "<|im_start|>assistant\nIt has 3 rooms.<|im_end|>\n"
    )


def test_a_prompt_is_the_beginning_of_what_follows_it() -> None:
    messages, tools = CONVERSATIONS[2]
    for i in (1, 3):
        prompt = render(messages[:i], tools, add_generation_prompt=True)
        assert render(messages[: i + 1], tools).startswith(prompt)


def test_only_what_the_assistant_says_is_marked(tokenizer: Tokenizer) -> None:
    messages, tools = CONVERSATIONS[2]
    found = tokenize_replies(tokenizer, [render(messages, tools)], 1024)
    said = tokenizer.decode(found.tokens[found.mask].tolist(), skip_special_tokens=False)
    assert said == (
        '<tool_call>{"name": "FindHome", "arguments": {"city": "Zürich"}}</tool_call><|im_end|>'
        "It has 3 rooms.<|im_end|>"
    )


def test_a_long_conversation_ends_with_the_last_reply_that_fits(tokenizer: Tokenizer) -> None:
    messages, tools = CONVERSATIONS[2]
    text = render(messages, tools)
    whole = tokenize_replies(tokenizer, [text], 1024)
    cut = tokenize_replies(tokenizer, [text, text], len(whole.tokens) - 2)
    assert len(cut) == 2
    assert tokenizer.decode(cut.tokens[cut.mask].tolist()[:9]).startswith("<tool_call>")
    assert "rooms." not in tokenizer.decode(cut.tokens[: cut.offsets[1]].tolist())
    with pytest.raises(ValueError, match="need at least one array"):
        tokenize_replies(tokenizer, [text], 8)
