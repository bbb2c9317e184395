"""Adapters over HTTP: named as models, loaded and unloaded while others run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock import LLM, AsyncLLM, LoRARequest, SamplingParams
from penstock.engine.lora import load_adapter
from penstock.errors import (
    ConfigError,
    ModelNotFoundError,
    RequestError,
    RequestTimeoutError,
)
from penstock.models.hub import adapter_folder
from penstock.server import ServerConfig, Service

from .conftest import Running, serving

ONCE = "Once upon a time"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def adapted() -> Iterator[Running]:
    """A server that lets anybody change its adapters."""
    config = ServerConfig(allow_runtime_lora_updating=True)
    with serving(config, enable_lora=True, max_loras=2) as running:
        yield running


@pytest.fixture
def verse(adapted: Running) -> Iterator[Running]:
    """With one that is called verse."""
    load_adapter(adapted.llm.runtime, "verse", "stories-verse")
    yield adapted
    adapters = adapted.llm.runtime.adapters
    assert adapters is not None
    for name in adapters.names:
        adapters.unload(name)
    adapted.rest()
    assert sorted(adapters._free) == [0, 1]


@pytest.fixture(scope="module")
def texts() -> dict[str | None, str]:
    """What each says, in this process."""
    llm = LLM(enable_lora=True, max_num_seqs=4)
    asked = [None, LoRARequest("stories-verse"), LoRARequest("stories-shakespeare")]
    outputs = llm.generate([ONCE] * 3, GREEDY, lora_request=asked)
    return {
        None if one is None else one.lora_name: output.outputs[0].text
        for one, output in zip(asked, outputs, strict=True)
    }


def client_of(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=running.v1, api_key="none", max_retries=0)


def said(client: openai.OpenAI, model: str) -> Any:
    return client.completions.create(model=model, prompt=ONCE, max_tokens=24, temperature=0)


def test_a_model_of_that_name(verse: Running, texts: dict[str | None, str]) -> None:
    client = client_of(verse)
    listed = {model.id: model for model in client.models.list()}
    assert list(listed) == ["stories", "verse"]
    assert listed["verse"].parent == "stories"  # type: ignore[attr-defined]
    assert listed["verse"].root == str(adapter_folder("stories-verse"))  # type: ignore[attr-defined]
    assert listed["stories"].parent is None  # type: ignore[attr-defined]
    assert client.models.retrieve("verse").id == "verse"
    for model, name in (("verse", "stories-verse"), ("stories", None)):
        answer = said(client, model)
        assert (answer.model, answer.choices[0].text) == (model, texts[name])
    with pytest.raises(openai.NotFoundError, match="There is: stories, verse"):
        said(client, "other")


def test_hits_are_its_own(verse: Running) -> None:
    with verse.client() as client:
        body = {"prompt": ONCE * 20, "max_tokens": 1, "temperature": 0}
        cached = []
        for model in ("stories", "verse", "stories", "verse"):
            usage = client.post("/v1/completions", json={"model": model, **body}).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[1] == 0 and cached[2] == cached[3] > 0


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/completions"])
def test_other_endpoints(verse: Running, path: str) -> None:
    field = "input" if path.endswith("embeddings") else "prompt"
    more = {} if field == "input" else {"echo": True, "logprobs": 1, "max_tokens": 1}
    with verse.client() as client:
        answers = [
            client.post(path, json={"model": model, field: ONCE, **more}).json()
            for model in ("stories", "verse")
        ]
    key = "data" if field == "input" else "choices"
    assert answers[0][key] != answers[1][key]
    assert [answer["model"] for answer in answers] == ["stories", "verse"]


def test_loading_and_unloading(verse: Running, texts: dict[str | None, str]) -> None:
    """vLLM's endpoints."""
    with verse.client() as client:
        name = {"lora_name": "new", "lora_path": "stories-shakespeare"}
        answer = client.post("/v1/load_lora_adapter", json=name)
        assert answer.text == "Success: LoRA adapter 'new' added successfully."
        assert said(client_of(verse), "new").choices[0].text == texts["stories-shakespeare"]
        again = client.post("/v1/load_lora_adapter", json=name)
        assert again.status_code == 400 and "loaded already" in again.json()["error"]["message"]
        full = client.post("/v1/load_lora_adapter", json=name | {"lora_name": "third"})
        assert full.status_code == 400 and "no slot" in full.json()["error"]["message"]
        answer = client.post("/v1/unload_lora_adapter", json={"lora_name": "new"})
        assert answer.text == "Success: LoRA adapter 'new' removed successfully."
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "new"}).status_code == 404
        answer = client.post("/v1/completions", json={"model": "new", "prompt": ONCE})
        assert answer.status_code == 404
        for wrong, status in (
            ({"lora_name": "x", "lora_path": "/nowhere"}, 400),
            ({"lora_name": "x", "lora_path": "x" * 3000}, 400),
            ({"lora_name": "x", "lora_path": "x\0y"}, 400),
            ({"lora_name": " ", "lora_path": "stories-verse"}, 400),
            ({"lora_name": "stories", "lora_path": "stories-verse"}, 400),
            ({"lora_name": "", "lora_path": "stories-verse"}, 400),
            ({"lora_name": "x"}, 400),
            ({"lora_name": 3, "lora_path": "stories-verse"}, 400),
            ({"lora_name": "x", "lora_path": "stories-verse", "rank": 3}, 400),
        ):
            assert client.post("/v1/load_lora_adapter", json=wrong).status_code == status
    assert verse.llm.list_loras() == ["verse"]


def test_others_run_meanwhile(verse: Running, texts: dict[str | None, str]) -> None:
    """Whoever runs with one that is unloaded goes on to the same end."""
    found: list[str] = []

    def ask() -> None:
        found.append(said(client_of(verse), "verse").choices[0].text)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    with verse.client() as client:
        for _ in range(5):
            name = {"lora_name": "new", "lora_path": "stories-shakespeare"}
            assert client.post("/v1/load_lora_adapter", json=name).status_code == 200
            assert client.post("/v1/unload_lora_adapter", json=name | {"lora_path": None})
    for thread in threads:
        thread.join()
    assert found == [texts["stories-verse"]] * 6


def test_nobody_may_unless_it_is_allowed(server: Running) -> None:
    with server.client() as client:
        for path in ("load", "unload"):
            body = {"lora_name": "x", "lora_path": "stories-verse"}
            if path == "unload":
                del body["lora_path"]
            answer = client.post(f"/v1/{path}_lora_adapter", json=body)
            assert answer.status_code == 403
            assert "--allow-runtime-lora-updating" in answer.json()["error"]["message"]


def test_an_adapter_of_the_models_name() -> None:
    llm = AsyncLLM(enable_lora=True, max_num_seqs=2)
    try:
        load_adapter(llm.runtime, "stories", "stories-verse")
        with pytest.raises(ConfigError, match="An adapter has the model's own name, 'stories'"):
            Service(ServerConfig()).start(llm, "stories")
    finally:
        llm.shutdown()


def test_a_request_runs_with_what_it_holds(adapted: Running, texts: dict[str | None, str]) -> None:
    """Whatever becomes of its name while it waits for the engine."""
    llm = adapted.llm
    adapters = llm.runtime.adapters
    assert adapters is not None

    async def swap() -> str:
        busy, asked = threading.Event(), LoRARequest("a", 1, "stories-verse")
        llm._send(busy.wait)
        task = asyncio.ensure_future(last(llm.generate(ONCE, GREEDY, lora_request=asked)))
        while "a" not in adapters.names or len(llm._commands) < 1:
            await asyncio.sleep(0.01)
        await llm.unload_lora("a")
        await llm.load_lora("a", "stories-shakespeare")
        busy.set()
        return await task

    async def last(outputs: Any) -> str:
        text = ""
        async for output in outputs:
            text = output.outputs[0].text
        return text

    assert asyncio.run(swap()) == texts["stories-verse"]
    adapted.rest()
    adapters.unload("a")
    assert sorted(adapters._free) == [0, 1]


def test_by_vllms_class(adapted: Running, texts: dict[str | None, str], tmp_path: Path) -> None:
    """AsyncLLM: loaded when first asked for; who leaves or fails holds nothing."""
    llm = adapted.llm
    adapters = llm.runtime.adapters
    assert adapters is not None

    async def ask(lora: LoRARequest | None, leave: bool = False, **more: Any) -> str:
        text = ""
        async for output in llm.generate(ONCE, GREEDY, lora_request=lora, **more):
            text = output.outputs[0].text
            if leave:
                break
        return text

    async def all_of_it() -> None:
        asked = [None, LoRARequest("stories-verse"), LoRARequest("stories-shakespeare")]
        got = await asyncio.gather(*(ask(one) for one in asked for _ in range(3)))
        assert got == [texts[one and one.lora_name] for one in asked for _ in range(3)]
        vectors = [
            (await llm.embed(ONCE, lora_request=one)).outputs.embedding for one in asked[:2] * 2
        ]
        assert vectors[0] == vectors[2] != vectors[1] == vectors[3]
        await ask(asked[1], leave=True)
        with pytest.raises(ModelNotFoundError, match="is no adapter"):
            await ask(LoRARequest("broken", 1, tmp_path))
        with pytest.raises(RequestTimeoutError):
            await ask(asked[1], timeout_s=1e-6)
        with pytest.raises(RequestError, match="lora_request must be a LoRARequest, not str"):
            await ask("stories-verse")  # type: ignore[arg-type]

    asyncio.run(all_of_it())
    adapted.rest()
    assert not any(adapter.users for adapter in adapters.loaded)
    for name in adapters.names:
        adapters.unload(name)
