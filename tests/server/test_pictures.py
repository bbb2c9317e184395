"""Pictures over HTTP, in the words of three APIs, and what is wrong with some."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from penstock import LLM, SamplingParams
from penstock.server import ServerConfig
from tests.models.seeing import IMAGE, make_idefics3, picture

from .conftest import Running, serving


def png(image: Any) -> str:
    memory = io.BytesIO()
    image.save(memory, "PNG")
    return base64.b64encode(memory.getvalue()).decode()


IMAGES = [picture(120, 60, 1), picture(60, 60, 2)]
DATA = [png(image) for image in IMAGES]
URLS = [f"data:image/png;base64,{data}" for data in DATA]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_idefics3(tmp_path_factory.mktemp("seeing")).folder


@pytest.fixture(scope="module")
def seeing(folder: Path) -> Iterator[Running]:
    with serving(ServerConfig(), model=str(folder), dtype="float32") as running:
        yield running


@pytest.fixture(autouse=True)
def at_rest(seeing: Running) -> Iterator[None]:
    yield
    assert seeing.rest()["used_blocks"] == 0


@pytest.fixture(scope="module")
def wanted(folder: Path) -> tuple[str, int]:
    """What the model says of both pictures, and how long the prompt is."""
    llm = LLM(str(folder), dtype="float32")
    parts: list[Any] = [{"type": "image", "image": image} for image in IMAGES]
    asked = [{"role": "user", "content": [*parts, {"type": "text", "text": "Hm?"}]}]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = llm.chat(asked, params)
    return output.outputs[0].text, len(output.prompt_token_ids)


def parts(kind: str = "image_url") -> list[Any]:
    if kind == "image_url":
        seen: list[Any] = [{"type": kind, kind: {"url": url, "detail": "auto"}} for url in URLS]
        return [*seen, {"type": "text", "text": "Hm?"}]
    seen = [{"type": kind, "image_url": url} for url in URLS]
    return [*seen, {"type": "input_text", "text": "Hm?"}]


def test_chat_completions(seeing: Running, wanted: tuple[str, int]) -> None:
    client = openai.OpenAI(base_url=seeing.v1, api_key="none")
    options: Any = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    messages: Any = [{"role": "user", "content": parts()}]
    answer = client.chat.completions.create(model="stories", messages=messages, **options)
    assert answer.usage is not None
    assert (answer.choices[0].message.content, answer.usage.prompt_tokens) == wanted
    chunks = client.chat.completions.create(
        model="stories", messages=messages, stream=True, **options
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == wanted[0]


def test_responses(seeing: Running, wanted: tuple[str, int]) -> None:
    client = openai.OpenAI(base_url=seeing.v1, api_key="none")
    given: Any = [{"role": "user", "content": parts("input_image")}]
    answer = client.responses.create(
        model="stories", input=given, temperature=0, max_output_tokens=8,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert answer.output_text == wanted[0]


def test_anthropics_messages(seeing: Running, wanted: tuple[str, int]) -> None:
    client = anthropic.Anthropic(base_url=seeing.url, api_key="none")
    content: Any = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
        for data in DATA
    ]
    content.append({"type": "text", "text": "Hm?"})
    ended = wanted[0].partition("<end>")[0]
    answer = client.messages.create(
        model="stories", max_tokens=8, messages=[{"role": "user", "content": content}],
        extra_body={"temperature": 0},
    )  # fmt: skip
    assert answer.content[0].type == "text" and answer.content[0].text == ended
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == wanted[1]
    counted = client.messages.count_tokens(
        model="stories", messages=[{"role": "user", "content": content}]
    )
    assert counted.input_tokens == wanted[1]


def ask(seeing: Running, content: Any, role: str = "user", **more: Any) -> tuple[int, str]:
    body = {"messages": [{"role": role, "content": content}], "max_tokens": 2, **more}
    with seeing.client() as client:
        answer = client.post("/v1/chat/completions", json=body)
    said = answer.json()
    return answer.status_code, said["error"]["message"] if "error" in said else ""


def image(url: str, **more: Any) -> list[Any]:
    return [{"type": "image_url", "image_url": {"url": url, **more}}]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (image("http://169.254.169.254/x.png"), "Nothing is fetched here"),
        (image("file:///etc/passwd"), "Nothing is fetched here"),
        (image("/etc/passwd"), "Nothing is fetched here"),
        (image("data:image/png;base64,AAAA"), "3 bytes aren't a picture"),
        (image("data:image/png;base64,%%"), "isn't base64"),
        (image("data:image/png,AAAA"), "must look like data:image/png;base64"),
        (image(URLS[0][:-4000]), "can't be read"),
        (image(URLS[0], detail="high"), "detail"),
        ([{"type": "image_url"}], "has no image_url"),
        ([{"type": "image_url", "image_url": {}}], "url"),
        ([{"type": "image_url", "image_url": {"url": URLS[0]}, "text": "x"}], "has no text"),
        ([{"type": "text", "text": "x", "image_url": URLS[0]}], "has no image_url"),
        ([{"type": "input_audio", "input_audio": {}}], "Text and pictures are read"),
        ([{"type": "text", "text": "See <image>"}], "stand for pieces of pictures"),
        ([*image(URLS[0]), {"type": "text", "text": "<image>"}], "2 × <image> for 1 pictures"),
    ],
)
def test_what_is_refused(content: Any, said: str, seeing: Running) -> None:
    status, message = ask(seeing, content)
    assert status == 400 and said in message, message


def test_roles_that_show_nothing(seeing: Running) -> None:
    status, message = ask(seeing, image(URLS[0]), role="system")
    assert status == 400 and "a message of the system has no pictures" in message


SHOWN = {"type": "input_image", "image_url": URLS[0]}
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("item", "whose"),
    [
        ({"type": "function_call_output", "call_id": "a", "output": [SHOWN]}, "function_call_out"),
        ({"type": "reasoning", "summary": [SHOWN]}, "an item of type 'reasoning'"),
        ({"role": "assistant", "content": [SHOWN]}, "the assistant"),
        ({"role": "system", "content": [SHOWN]}, "the system"),
    ],
)
def test_items_that_show_nothing(item: dict[str, Any], whose: str, seeing: Running) -> None:
    body = {"input": [{"role": "user", "content": "x"}, CALL, item], "max_output_tokens": 16}
    with seeing.client() as client:
        answer = client.post("/v1/responses", json=body)
    assert answer.status_code == 400
    said = answer.json()["error"]["message"]
    assert whose in said and "send them as a message of the user" in said


SOURCE = {"type": "base64", "media_type": "image/png", "data": URLS[0].partition(",")[2]}


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"type": "text", "text": "lost?", "source": SOURCE}, "'text' has no source"),
        ({"type": "image", "source": SOURCE, "text": "lost?"}, "'image' has no text"),
        ({"type": "image", "source": {**SOURCE, "url": "http://x"}}, "'base64' has no url"),
    ],
)
def test_blocks_of_two_kinds(block: dict[str, Any], said: str, seeing: Running) -> None:
    messages = [{"role": "user", "content": [block]}]
    body = {"model": "stories", "messages": messages, "max_tokens": 2}
    with seeing.client() as client:
        answer = client.post("/v1/messages", json=body)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]


def test_a_conversation_that_is_too_long(seeing: Running) -> None:
    """With its pictures it is; old turns are left out with theirs."""
    turn = {"role": "user", "content": image(URLS[0])}
    said = {"role": "assistant", "content": "y" * 100}
    messages = [m for _ in range(6) for m in (turn, said)][:-1]
    body = {"messages": messages, "max_tokens": 4}
    with seeing.client() as client:
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400 and "Shorten it" in answer.json()["error"]["message"]
        answer = client.post("/v1/chat/completions", json=body | {"truncation": "auto"})
        assert answer.status_code == 200
        assert answer.json()["usage"]["prompt_tokens"] < 512
        cut = body | {"truncate_prompt_tokens": 100}
        answer = client.post("/v1/chat/completions", json=cut)
        assert answer.status_code == 400 and "cuts the start of a prompt" in answer.text


def test_metrics(seeing: Running) -> None:
    assert ask(seeing, image(URLS[1]))[0] == ask(seeing, image(URLS[1]))[0] == 200
    with seeing.client() as client:
        text = client.get("/metrics").text
    lines = [x for x in text.splitlines() if x.startswith(("vllm:mm_cache", "penstock:picture"))]
    found = {line.split("{")[0]: line.rsplit(" ", 1)[1] for line in lines}
    assert float(found["vllm:mm_cache_queries_total"]) > float(found["vllm:mm_cache_hits_total"])
    assert float(found["penstock:picture_tiles_total"]) >= 1


def test_models_say_what_they_read(seeing: Running, server: Running) -> None:
    for running, reads in ((seeing, ["text", "image"]), (server, ["text"])):
        with running.client() as client:
            card = client.get("/v1/models").json()["data"][0]
        assert card["input_modalities"] == reads
        assert card["meta"].get("image_token_id") == (IMAGE if running is seeing else None)


def test_a_model_that_sees_nothing(server: Running) -> None:
    """However they are sent: that they aren't fetched is of no use to know here."""
    told = "This model sees no pictures. Leave them out."
    away = "https://example.org/x.png"
    by_url = [{"type": "image", "source": {"type": "url", "url": away}}]
    with server.client() as client:
        for path, content, place in (
            ("/v1/chat/completions", image(URLS[0]), ""),
            ("/v1/chat/completions", image(away), ""),
            ("/v1/messages", by_url, "messages[0].content[0].source: "),
        ):
            body = {"model": "stories", "messages": [{"role": "user", "content": content}]}
            answer = client.post(path, json={**body, "max_tokens": 1})
            assert answer.status_code == 400
            assert answer.json()["error"]["message"] == place + told
