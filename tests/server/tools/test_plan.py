"""What is chosen for a template and a tokenizer, and what becomes of special tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.server import ServerConfig
from penstock.server.tools.events import collect
from penstock.server.tools.families import TOOL_PARSERS
from penstock.server.tools.offer import Choice, Function, Offer, offer_of
from penstock.server.tools.plan import Tooling
from penstock.server.tools.schema import problem_of
from penstock.tokenizer import Tokenizer
from tests.server.tools.recorded import SCHEMAS
from tests.server.tools.test_templates import DATA, template

STORIES = Path(__file__).resolve().parents[3] / "src" / "penstock" / "assets" / "stories"


def offer(parallel: bool = True) -> Offer:
    functions = [Function("t", name, None, schema) for name, schema in SCHEMAS.items()]
    return offer_of(functions, Choice("auto"), parallel)


@pytest.fixture(scope="module")
def stories() -> Tokenizer:
    return Tokenizer.from_folder(STORIES)


def test_special_tokens_are_seen_by_the_reader_alone() -> None:
    """Llama 3's tag is a special token: it is read, and no other is shown."""
    folder = DATA / "tokenizers" / "llama3"
    if not (folder / "tokenizer.model").is_file():
        pytest.skip(f"the shared data has no {folder.name}")
    tooling = Tooling(Tokenizer.from_folder(folder), ServerConfig())
    source = template("llama.cpp-2025-02/meta-llama-Llama-3.1-8B-Instruct")
    plan = tooling.plan(source, offer())
    assert (plan.family.name, plan.sees_special) == ("llama3_json", True)
    reader = plan.answer(inside=False)
    text = 'Hi<|eom_id|>.<|python_tag|>{"name": "get_time", "parameters": {}}<|eot_id|>'
    found = collect(reader.feed(text) + reader.finish())
    assert (found.content, [call.name for call in found.calls]) == ("Hi.", ["get_time"])
    none = tooling.plan(source, Offer())
    assert not none.sees_special
    assert not none.reads


def test_tokens_that_are_no_special_ones_change_nothing(stories: Tokenizer) -> None:
    plan = Tooling(stories, ServerConfig()).plan(None, offer())
    assert (plan.family.name, plan.sees_special, plan.hidden) == ("hermes", False, ())


def test_one_call_where_only_one_may_be_made(stories: Tokenizer) -> None:
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    broken = '<tool_call>\n{"name": "note", "arguments": {"a"}}\n</tool_call>'
    for parallel, count in ((True, 2), (False, 1)):
        reader = Tooling(stories, ServerConfig()).plan(None, offer(parallel)).answer(inside=False)
        found = collect(reader.feed(f"{broken}\n{call}\n{call} Done.") + reader.finish())
        assert len(found.calls) == count
        assert found.content.split() == f"{broken} Done.".split()


def test_a_broken_second_call_is_content(stories: Tokenizer) -> None:
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    broken = '<tool_call>\n{"name": "note", "arguments": {"a": \n and then I say: hello'
    reader = Tooling(stories, ServerConfig()).plan(None, offer(False)).answer(inside=False)
    found = collect(reader.feed(f"{call}\n{broken}") + reader.finish())
    assert (len(found.calls), found.content) == (1, broken)


def test_a_form_that_isnt_known_is_told_of_in_hermes_words(stories: Tokenizer) -> None:
    tooling = Tooling(stories, ServerConfig())
    plan = tooling.plan(template("ik_llama.cpp-2026-08/Kimi-K2-Instruct"), offer())
    assert plan.family.name == "hermes"
    assert plan.telling.tools == ()
    assert "<tool_call>" in (plan.telling.instructions or "")
    known = tooling.plan(template("llama.cpp-2025-02/Qwen-Qwen2.5-7B-Instruct"), offer())
    assert known.telling.instructions is None
    assert [tool["function"]["name"] for tool in known.telling.tools] == list(SCHEMAS)
    assert known.telling.history is None
    deepseek = template("ik_llama.cpp-2026-08/deepseek-ai-DeepSeek-V3.1")  # reads no tools
    told = tooling.plan(deepseek, offer()).telling.instructions or ""
    assert "<｜tool▁call▁begin｜><name><｜tool▁sep｜>" in told


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_the_option_chooses(stories: Tokenizer, name: str) -> None:
    tooling = Tooling(stories, ServerConfig(tool_call_parser=name))
    assert tooling.plan(None, offer()).family is TOOL_PARSERS[name]


def test_options_that_arent_any_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tool_call_parser is 'hermess'. Did you mean 'hermes'"):
        ServerConfig(tool_call_parser="hermess")
    with pytest.raises(ConfigError, match="reasoning_parser is 'x'"):
        ServerConfig(reasoning_parser="x")


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"properties": {"a": True, "b": {"type": ["string", "null"], "enum": ["x", None]}}},
        {"properties": {"a": {"items": [{"type": "string"}], "minItems": 1, "maxItems": 1.0}}},
        {"$defs": {"a/b": {"type": "integer"}}, "properties": {"x": {"$ref": "#/$defs/a~1b"}}},
        {"$defs": {"a b": {"type": "integer"}}, "properties": {"x": {"$ref": "#/$defs/a%20b"}}},
        {"properties": {"t": {"$ref": "#"}}, "required": ["t", "u"]},
        {"properties": {"n": {"type": "number", "const": 1, "exclusiveMinimum": 1e999}}},
    ],
)
def test_schemas_that_are_some(schema: dict[str, object]) -> None:
    assert problem_of(schema) is None


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        ({"type": 5}, ".x.type"),
        ({"enum": 7}, ".x.enum"),
        ({"anyOf": [{"not": 3}]}, ".x.anyOf[0].not"),
    ],
)
def test_what_a_reference_leads_to_is_looked_at(wrong: object, place: str) -> None:
    schema = {"properties": {"a": {"$ref": "#/x"}}, "x": wrong}
    assert (problem_of(schema) or ("",))[0] == place
