"""From messages to a prompt: what is left out, what is too long, what is pinned."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from penstock.server.conversation import Prompts
from penstock.server.errors import ApiError
from penstock.server.prompt import PromptText, Rendering
from penstock.server.protocol.chat import Message
from penstock.tokenizer import Tokenizer
from penstock.tokenizer.sandbox import compile_template
from tests.server.conftest import Running

TEMPLATES = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "templates"
FOLDERS = ["llama.cpp-2025-02", "ik_llama.cpp-2026-08", "vllm-examples"]


@pytest.fixture(scope="module")
def tokenizer(server: Running) -> Tokenizer:
    return server.service.prompts.tokenizer


def _turns(*said: str, roles: str = "") -> list[Message]:
    """u, a, s: who speaks; without roles, user and assistant in turns."""
    names = {"u": "user", "a": "assistant", "s": "system", "d": "developer"}
    chosen = roles or "".join(itertools.islice(itertools.cycle("ua"), len(said)))
    return [Message(role=names[r], content=x) for r, x in zip(chosen, said, strict=True)]


def _fits(prompts: Prompts, messages: list[Message], most: int) -> bool:
    return len(prompts.rendered(messages, Rendering())) <= most


@pytest.mark.parametrize("roles", ["suauauau", "uauauau", "ssuauau", "duaauuau", "sauauau", "suuu"])
def test_the_oldest_turns_go_until_the_rest_fits(tokenizer: Tokenizer, roles: str) -> None:
    words = ["The dog ran to the sea and back again." * (1 + i % 3) for i in range(len(roles))]
    messages = _turns(*(f"{i}: {w}" for i, w in enumerate(words)), roles=roles)
    whole = len(Prompts(tokenizer, 10**6).rendered(messages, Rendering()))
    head = len(roles) - len(roles.lstrip("sd"))
    starts = [i for i in range(head + 1, len(roles)) if roles[i] == "u"]
    for max_len in range(20, whole + 12, 9):
        for reserve in (1, 8):
            prompts = Prompts(tokenizer, max_len)
            room = max_len - reserve
            # The oracle: all, or else the longest end that begins with a user's turn.
            kept = [messages, *(messages[:head] + messages[start:] for start in starts)]
            best = next((one for one in kept if _fits(prompts, one, room)), kept[-1])
            expected = prompts.rendered(best, Rendering())
            if len(expected) >= max_len:
                with pytest.raises(ApiError, match="maximum context length is") as error:
                    prompts.of_messages(messages, Rendering(), truncation="auto", reserve=reserve)
                assert error.value.code == "context_length_exceeded"
                assert "old turns" not in error.value.message  # they are gone already
                continue
            made = prompts.of_messages(messages, Rendering(), truncation="auto", reserve=reserve)
            assert made.tokens == expected
            assert made.dropped == len(messages) - len(best)
            for i in range(head):
                assert f"{i}: " in (made.text or "")
            assert f"{len(messages) - 1}: " in (made.text or "")


def test_without_truncation_nothing_goes(tokenizer: Tokenizer) -> None:
    messages = _turns(*["A long walk by the sea. " * 4] * 7)
    count = len(Prompts(tokenizer, 10**6).rendered(messages, Rendering()))
    assert Prompts(tokenizer, count + 1).of_messages(messages, Rendering()).dropped == 0
    with pytest.raises(ApiError, match=f"The prompt has {count:,} tokens") as error:
        Prompts(tokenizer, count).of_messages(messages, Rendering())
    assert (error.value.status, error.value.code) == (400, "context_length_exceeded")
    assert 'truncation: "auto"' in error.value.message


@pytest.mark.parametrize("keep", [1, 5, 99, 100, 200, -1])
def test_a_texts_end_is_kept(tokenizer: Tokenizer, keep: int) -> None:
    prompts = Prompts(tokenizer, 60)
    ids = list(range(3, 103))
    most = 59 if keep == -1 else keep
    if min(most, 100) >= 60:
        with pytest.raises(ApiError, match="maximum context length is 60 tokens"):
            prompts.of_tokens(ids, keep=keep)
        return
    assert prompts.of_tokens(ids, keep=keep).tokens == ids[-most:]


def test_limits(tokenizer: Tokenizer) -> None:
    prompts = Prompts(tokenizer, 100)
    prompt = PromptText(list(range(90)))
    assert prompts.limit(prompt, None, "max_tokens") == 10
    assert prompts.limit(prompt, 10, "max_tokens") == 10
    with pytest.raises(ApiError, match="max_tokens is 11, but after a prompt of 90") as error:
        prompts.limit(prompt, 11, "max_tokens")
    assert error.value.param == "max_tokens"
    assert len(prompts.of_tokens(list(range(99))).tokens) == 99
    with pytest.raises(ApiError):
        prompts.of_tokens(list(range(100)))
    with pytest.raises(ApiError, match="12,801 characters"):
        prompts.of_text("a" * 12_801)


def test_without_a_tokenizer() -> None:
    prompts = Prompts(None, 10)
    assert prompts.of_tokens([1, 2]).tokens == [1, 2]
    with pytest.raises(ApiError, match="Send token ids"):
        prompts.of_text("a")
    with pytest.raises(ApiError, match="Send token ids"):
        prompts.of_messages(_turns("a"), Rendering())


def _pinned(
    messages: list[Message], at: int, *, part: bool = False, ttl: str = "10m"
) -> list[Message]:
    one = messages[at]
    content: Any = one.content
    control = {"type": "ephemeral", "ttl": ttl}
    if part:
        content = [{"type": "text", "text": content, "cache_control": control}]
        changed = Message.model_validate({"role": one.role, "content": content})
    else:
        changed = Message.model_validate(
            {"role": one.role, "content": content, "cache_control": control}
        )
    return [*messages[:at], changed, *messages[at + 1 :]]


SAID = ("You are kind. Rules: §1 be brief.", "What is the tide?", "It rises, and falls.\n- twice",
        "And why?", "The moon pulls.", "Thanks!")  # fmt: skip
OTHERS = ("zebra", "Ä", "17", "\n\nq", "the moon")


def _common(one: list[int], other: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def _check_pin(prompts: Prompts, rendering: Rendering, roles: str, at: int, part: bool) -> None:
    messages = _turns(*SAID[: len(roles)], roles=roles)
    made = prompts.of_messages(_pinned(messages, at, part=part), rendering)
    ids = prompts.rendered(messages, rendering)
    assert made.tokens == ids  # a pin changes nothing of the prompt
    if made.unpinned:
        raise ApiError(400, "The mark can't be placed.", param="cache_control")
    (pin,) = made.pins
    assert pin.ttl_s == 600.0
    # Whatever comes after the pinned messages, these tokens are the same.
    for other in OTHERS:
        rest = [Message(role=m.role, content=other) for m in messages[at + 1 :]]
        found = prompts.rendered([*messages[: at + 1], *rest], rendering)
        assert _common(ids, found) >= pin.tokens
    # And they are all of the text up to there, but for a token that could go on otherwise.
    text = made.text or ""
    end = 0
    for message in messages[: at + 1]:
        content = str(message.content).strip()
        end = text.index(content, end) + len(content)
    count = len(prompts.encode(text[:end], rendering.add_special_tokens))
    assert count - 1 <= pin.tokens <= count


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("at", range(5))
def test_a_pin_is_what_its_messages_decide(tokenizer: Tokenizer, at: int, part: bool) -> None:
    _check_pin(Prompts(tokenizer, 10**6), Rendering(), "suauau", at, part)


# They write the system's message into the last user's: its pin takes along what lies between.
LATE_SYSTEM = ("Mistral-Nemo-Instruct", "tool_chat_template_mistral")
LATE = pytest.mark.xfail(reason="the system's message is written last", strict=True)


def _real() -> list[Any]:
    files = [file for folder in FOLDERS for file in sorted((TEMPLATES / folder).glob("*.jinja"))]
    absent = pytest.mark.skip(reason=f"no templates at {TEMPLATES}")
    return [
        pytest.param(
            file,
            id=f"{file.parent.name}-{file.stem}",
            marks=[LATE] if _is_late(file) else [],
        )
        for file in files
    ] or [pytest.param(None, marks=absent)]


def _is_late(file: Path) -> bool:
    return any(name in file.stem for name in LATE_SYSTEM) and not file.stem.endswith("mistral3")


# Templates that leave out or rewrite what was said in such a conversation: there is no pin.
LOOKED_AT: list[Path] = []
WORKED: list[Path] = []


@pytest.mark.parametrize("file", _real())
def test_pins_through_real_templates(tokenizer: Tokenizer, file: Path) -> None:
    LOOKED_AT.append(file)
    prompts = Prompts(tokenizer, 10**6)
    rendering = Rendering(chat_template=file.read_text())
    for roles, at in (("suau", 0), ("uau", 1)):
        try:
            _check_pin(prompts, rendering, roles, at, part=False)
        except ApiError as error:
            if error.status != 400 or error.param not in ("messages", "cache_control"):
                raise
        else:
            WORKED.append(file)


def test_most_real_templates_pin() -> None:
    if len(LOOKED_AT) < 10:
        pytest.skip(f"too few templates were looked at: {len(LOOKED_AT)} of those at {TEMPLATES}")
    assert len(set(WORKED)) > 0.75 * len(LOOKED_AT)


def test_each_mark_has_its_own_time(tokenizer: Tokenizer) -> None:
    messages = _turns(*SAID, roles="suauau")
    prompts = Prompts(tokenizer, 10**6)
    (one,) = prompts.of_messages(_pinned(messages, 1, ttl="1h"), Rendering()).pins
    (last,) = prompts.of_messages(_pinned(messages, 3), Rendering()).pins
    both = prompts.of_messages(_pinned(_pinned(messages, 1, ttl="1h"), 3), Rendering())
    assert both.pins == (one, last)
    assert (one.ttl_s, last.ttl_s) == (3600.0, 600.0) and last.tokens > one.tokens > 0
    assert prompts.of_messages(messages, Rendering()).pins == ()
    for at in range(5):
        messages = _pinned(messages, at)
    with pytest.raises(ApiError, match="set 5 times; at most 4") as error:
        prompts.of_messages(messages, Rendering())
    assert error.value.param == "cache_control"


def test_a_mark_on_a_part_ends_there(tokenizer: Tokenizer) -> None:
    control = {"type": "ephemeral"}
    parts = [{"type": "text", "text": "First.", "cache_control": control},
             {"type": "text", "text": "And then the second."}]  # fmt: skip
    message = Message.model_validate({"role": "user", "content": parts})
    prompts = Prompts(tokenizer, 10**6)
    made = prompts.of_messages([message], Rendering())
    (pin,) = made.pins
    assert made.text is not None
    start = made.text[: made.text.index("First.") + len("First.")]
    assert pin.tokens <= len(prompts.encode(start, False)) <= pin.tokens + 1


def test_marks_of_what_is_left_in_hold(tokenizer: Tokenizer) -> None:
    """Marks on turns that were left out go with them; the system's stays where it was."""
    messages = _turns(*SAID, roles="suauau")
    prompts = Prompts(tokenizer, 10**6)
    whole = prompts.of_messages(_pinned(messages, 0), Rendering())
    short = Prompts(tokenizer, len(whole.tokens) - 5)
    cut = short.of_messages(
        _pinned(_pinned(messages, 0), 1, ttl="1h"), Rendering(), truncation="auto"
    )
    assert cut.dropped == 2
    assert cut.pins == whole.pins
    with pytest.raises(ApiError, match="cuts the start of the prompt") as error:
        prompts.of_messages(_pinned(messages, 0), Rendering(), keep=len(whole.tokens) - 1)
    assert error.value.param == "cache_control"
    assert prompts.of_messages(_pinned(messages, 0), Rendering(), keep=9999).pins == whole.pins


def test_words_that_the_template_writes_too_never_pin_too_much(tokenizer: Tokenizer) -> None:
    for word in ("user", "im_start", "a", "s", "\n", "assistant"):
        prompts = Prompts(tokenizer, 10**6)
        messages = _turns(word, word, word, roles="sua")
        made = prompts.of_messages(_pinned(messages, 0), Rendering())
        for other in OTHERS:
            rest = [Message(role=m.role, content=other) for m in messages[1:]]
            found = prompts.rendered([messages[0], *rest], Rendering())
            assert _common(made.tokens, found) >= made.pins[0].tokens


def test_a_template_that_rewrites_leaves_marks_unheeded(tokenizer: Tokenizer) -> None:
    rendering = Rendering(
        chat_template="{% for m in messages %}{{ m.content|upper if loop.index0 else m.content }}"
        "{% endfor %}"
    )
    messages = _pinned(_pinned(_turns("Hello.", "well?", roles="su"), 0), 1)
    made = Prompts(tokenizer, 1000).of_messages(messages, rendering)
    (pin,) = made.pins
    assert made.text == "Hello.WELL?" and made.unpinned == 1 and 0 < pin.tokens < len(made.tokens)


def test_marks_where_the_system_comes_first(tokenizer: Tokenizer) -> None:
    """In messages it comes later, too, as agents have it."""
    strict = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('first') }}{% endif %}{{ m.content }}\n{% endfor %}"
    )
    messages = [Message(role=role, content=f"{role} {i}.") for i, role in
                enumerate(("system", "user", "system", "user"))]  # fmt: skip
    for i in (0, 1, 3):
        messages = _pinned(messages, i)
    made = Prompts(tokenizer, 1000).of_messages(messages, Rendering(chat_template=strict))
    assert made.text == "system 0.\n\nsystem 2.\nuser 1.\nuser 3.\n"
    assert len(made.pins) == 3 and made.unpinned == 0


@pytest.mark.parametrize(
    ("ttl", "seconds"), [(None, 300.0), ("5m", 300.0), ("1h", 3600.0), ("90s", 90.0)]
)
def test_how_long(ttl: str | None, seconds: float) -> None:
    message = Message.model_validate(
        {"role": "user", "content": "x", "cache_control": {"type": "ephemeral", "ttl": ttl}}
    )
    assert [mark.seconds for _, mark in message.passages() if mark is not None] == [seconds]


@pytest.mark.parametrize("ttl", ["", "m", "0m", "-5m", "5", "5d", "10000h", "1.5h", "5m "])
def test_a_time_that_cant_be_read(tokenizer: Tokenizer, ttl: str) -> None:
    message = Message.model_validate(
        {"role": "user", "content": "hello", "cache_control": {"type": "ephemeral", "ttl": ttl}}
    )
    if ttl == "":
        (pin,) = Prompts(tokenizer, 1000).of_messages([message], Rendering()).pins
        assert pin.ttl_s == 300.0
        return
    with pytest.raises(ApiError, match="ttl is"):
        Prompts(tokenizer, 1000).of_messages([message], Rendering())


# ── earlier calls of tools ───────────────────────────────────────────────────────────────────


def _called(arguments: object, content: str | None = None) -> list[dict[str, Any]]:
    """What the guides of OpenAI's API send back."""
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    return [
        {"role": "user", "content": "Weather in Köln?"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": '{"t": 21}', "tool_call_id": "abcdefghi"},
    ]


TOOL_TEMPLATES = ["Qwen-Qwen2.5-7B-Instruct", "meta-llama-Llama-3.1-8B-Instruct"]


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_calls_are_written_as_transformers_writes_their_objects(
    tokenizer: Tokenizer, name: str
) -> None:
    file = TEMPLATES / "llama.cpp-2025-02" / f"{name}.jinja"
    if not file.is_file():
        pytest.skip(f"no templates at {TEMPLATES}")
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    rendering = Rendering(chat_template=file.read_text())
    for arguments in (
        '{"city": "Köln", "days": [1, 2]}',
        '{\n "city" : "K\\u00f6ln",\t"days":[1,2]}',
    ):
        said = _called({"city": "Köln", "days": [1, 2]}, "")
        ((expected,), _) = reference.render_jinja_template(
            [said],
            chat_template=file.read_text(),
            add_generation_prompt=True,
            bos_token="<|endoftext|>",
        )
        messages = [Message.model_validate(x) for x in _called(arguments)]
        made = Prompts(tokenizer, 10**6).of_messages(messages, rendering)
        assert made.text == expected
        assert made.tokens == tokenizer.encode(expected, add_special_tokens=False)


def test_templates_that_join_arguments_to_text_get_the_text(tokenizer: Tokenizer) -> None:
    template = "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    template += "{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}"
    for given, text in (('{"a":  1}', '{"a":  1}'), ({"a": "ä"}, '{"a": "ä"}')):
        messages = [Message.model_validate(x) for x in _called(given)]
        made = Prompts(tokenizer, 10**6).of_messages(messages, Rendering(chat_template=template))
        assert f"get_weather{text}" in (made.text or "")


def test_a_tool_history_is_answered(server: Running) -> None:
    ask = {"max_tokens": 2, "messages": _called('{"city": "Köln"}')}
    with server.client() as client:
        assert client.post("/v1/chat/completions", json=ask).status_code == 200
        counted = client.post("/tokenize", json={"messages": _called("")}).json()
        assert counted["tokens"] == client.post(
            "/tokenize", json={"messages": _called({}, "")}
        ).json()["tokens"]  # fmt: skip
        for wrong in ("[1]", "{", "nonsense", '{"a": NaN}', '{"a": 1, "a": 2}', '{"a":"\\ud800"}',
                      '{"a": ' + "[" * 5000 + "]" * 5000 + "}"):  # fmt: skip
            answer = client.post("/v1/chat/completions", json={"messages": _called(wrong)})
            assert answer.status_code == 400, wrong
            error = answer.json()["error"]
            assert error["param"].endswith("tool_calls[0].function.arguments")
            assert "JSON object" in error["message"]


def test_templates_are_compiled_before_a_request(tokenizer: Tokenizer) -> None:
    prompts = Prompts(tokenizer, 1000)
    compile_template.cache_clear()
    prompts.compile_templates(None)
    before = compile_template.cache_info().misses
    assert before > 0
    prompts.rendered(_turns("Hello."), Rendering())
    assert compile_template.cache_info().misses == before


def test_a_broken_template_is_told_of_at_once(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, and the server starts: other requests need none."""
    Prompts(tokenizer, 1000).compile_templates("{% if messages %}")
    [said] = [r.message for r in caplog.records if "can't be sent conversations" in r.message]
    assert "The chat template failed at line 1" in said
    Prompts(None, 1000).compile_templates(None)
