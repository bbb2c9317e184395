"""Chat templates: real ones, rendered as transformers renders them or refused clearly."""

from __future__ import annotations

import copy
import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ChatTemplateError
from penstock.tokenizer import Tokenizer
from penstock.tokenizer.chat import render_chat

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
TEMPLATES = sorted((DATA / "templates").rglob("*.jinja"))

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather in a city – <now>",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Ort"}},
                "required": ["city"],
            },
        },
    }
]


def tool_conversation(arguments: object) -> list[dict[str, Any]]:
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    return [
        {"role": "user", "content": "Weather in Köln?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {
            "role": "tool",
            "content": '{"t": 21}',
            "tool_call_id": "abcdefghi",
            "name": "get_weather",
        },
        {"role": "assistant", "content": "21 degrees."},
        {"role": "user", "content": "Thanks!"},
    ]


PLAIN: list[dict[str, Any]] = [{"role": "user", "content": "Hi <b>&\n"}]
CASES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "plain": (PLAIN, None),
    "many turns": (
        [
            {"role": "system", "content": " Be brief. "},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "<think>x</think> Hello! "},
            {"role": "user", "content": "日本?"},
        ],
        None,
    ),
    "tools": (PLAIN, TOOLS),
    "tool calls": (tool_conversation({"city": "Köln", "days": 2}), TOOLS),
    "tool calls as text": (tool_conversation('{"city": "Köln"}'), TOOLS),
    "reasoning": (
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yo", "thinking": "hm"},
            {"role": "user", "content": "?"},
        ],
        None,
    ),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], None),
}


@pytest.mark.skipif(not TEMPLATES, reason=f"the shared data isn't at {DATA}")
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_renders_or_fails_as_transformers(path: Path) -> None:
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    template = path.read_text(encoding="utf-8")
    for name, (messages, tools) in CASES.items():
        variables = {"bos_token": "<s>", "eos_token": "</s>", "enable_thinking": False}
        try:
            expected = reference.render_jinja_template(
                [messages],
                tools=tools,
                chat_template=template,
                add_generation_prompt=True,
                **variables,
            )[0][0]
        except Exception:  # templates raise anything
            with pytest.raises(ChatTemplateError, match="The chat template failed"):
                render_chat(template, messages, tools=tools, variables=variables)
        else:
            got = render_chat(template, messages, tools=tools, variables=variables)
            assert got == expected, name


@pytest.mark.skipif(not TEMPLATES, reason=f"the shared data isn't at {DATA}")
def test_continues_the_final_message_as_transformers() -> None:
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    compared = 0
    contents = [
        "The answer is",
        "ends in a space ",
        "\n two\nlines",
        [{"type": "text", "text": "é"}],
    ]
    for path, content in itertools.product(TEMPLATES, contents):
        template = path.read_text(encoding="utf-8")
        chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
        before = copy.deepcopy(chat)
        ours = functools.partial(
            render_chat, template, chat, add_generation_prompt=False, continue_final_message=True
        )
        try:
            expected = reference.render_jinja_template(
                [chat], chat_template=template, continue_final_message=True
            )[0][0]
        except Exception:
            with pytest.raises(ChatTemplateError):
                ours()
        else:
            assert ours() == expected, path
            assert chat == before
            compared += 1
    assert compared > 200


def test_qwen_chat_prompt(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    tokenizer = tokenizer_of("qwen2.5")
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert prompt == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
        "assistant.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert ids[0] == 151644
    assert tokenizer.decode(ids, skip_special_tokens=False) == prompt
    without = tokenizer.apply_chat_template(PLAIN, add_generation_prompt=False)
    assert without.endswith("<|im_end|>\n")
    own = tokenizer.apply_chat_template(PLAIN, chat_template="{{ eos_token }}{{ x }}", x=3)
    assert own == "<|im_end|>3"


def write(folder: Path, config: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture
def small_folder(tmp_path: Path) -> Path:
    model = {"type": "BPE", "vocab": {"a": 0, "<s>": 1}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    return tmp_path


def test_named_templates(small_folder: Path) -> None:
    entries = [
        {"name": "default", "template": "D{{ bos_token }}"},
        {"name": "tool_use", "template": "T"},
    ]
    write(small_folder, {"chat_template": entries, "bos_token": {"content": "<s>"}})
    tokenizer = Tokenizer.from_folder(small_folder)
    assert tokenizer.chat_template == "D{{ bos_token }}"
    assert tokenizer.apply_chat_template(PLAIN) == "D<s>"
    assert tokenizer.apply_chat_template(PLAIN, tools=TOOLS) == "T"
    assert tokenizer.apply_chat_template(PLAIN, chat_template="tool_use") == "T"
    assert tokenizer.apply_chat_template(PLAIN, chat_template="{{ 1 + 1 }}") == "2"

    write(small_folder, {"chat_template": entries[1:]})
    tokenizer = Tokenizer.from_folder(small_folder)
    assert tokenizer.chat_template is None
    with pytest.raises(ChatTemplateError, match="none is the default: tool_use"):
        tokenizer.apply_chat_template(PLAIN)


def test_template_files_win_over_the_configuration(small_folder: Path) -> None:
    write(small_folder, {"chat_template": "config"})
    assert Tokenizer.from_folder(small_folder).chat_template == "config"
    (small_folder / "chat_template.json").write_text('{"chat_template": "json"}')
    assert Tokenizer.from_folder(small_folder).chat_template == "json"
    (small_folder / "chat_template.jinja").write_text("jinja")
    (small_folder / "additional_chat_templates").mkdir()
    (small_folder / "additional_chat_templates" / "rag.jinja").write_text("R")
    tokenizer = Tokenizer.from_folder(small_folder)
    assert tokenizer.chat_template == "jinja"
    assert tokenizer.apply_chat_template(PLAIN, chat_template="rag") == "R"


def test_no_template(small_folder: Path) -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        Tokenizer.from_folder(small_folder).apply_chat_template(PLAIN)


def test_wrong_calls_say_so() -> None:
    with pytest.raises(ChatTemplateError, match="add_generation_prompt=False"):
        render_chat("x", PLAIN, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match=r"messages\[0\] is a str"):
        render_chat("x", ["Hi"])  # type: ignore[list-item]
    with pytest.raises(ChatTemplateError, match=r"tools\[0\] of 1 is a builtin"):
        render_chat("x", PLAIN, tools=[print])  # type: ignore[list-item]
    for last in ([], [{"role": "assistant", "content": None}]):
        with pytest.raises(ChatTemplateError, match="no text to continue"):
            render_chat("x", last, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="doesn't keep the last message"):
        render_chat("x", PLAIN, add_generation_prompt=False, continue_final_message=True)


def test_the_templates_own_words_and_line() -> None:
    template = (
        "{% for m in messages %}\n{{ raise_exception('Roles must alternate') }}\n{% endfor %}"
    )
    with pytest.raises(ChatTemplateError, match=r"at line 2: Roles must alternate\. "):
        render_chat(template, PLAIN)
    with pytest.raises(ChatTemplateError, match="at line 3: Expected an expression"):
        render_chat("a\nb\n{% if %}", PLAIN)
    with pytest.raises(ChatTemplateError, match="at line 1: ZeroDivisionError: division by zero"):
        render_chat("{{ 1 / 0 }}", PLAIN)


def test_objects_reach_templates_as_plain_data() -> None:
    class Image:
        def __init__(self) -> None:
            self.secret = "s"

    template = "{{ messages[0].content[0].image }} {{ messages[0].content[0].image.secret }}"
    messages = [{"role": "user", "content": [{"type": "image", "image": Image()}]}]
    assert render_chat(template, messages) == "<Image> "
