"""Responses that instances keep: who goes on from one is sent to where it is."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from penstock.fleet.ask import Ask
from penstock.fleet.kept import Kept, Place
from penstock.server import Key
from penstock.server.errors import ApiError
from tests.fleet.conftest import Pair, elsewhere, front
from tests.fleet.test_fleet_routes import Scripted, before, fleet_of, scripted

ANSWER = "/v1/responses"
BODY: Any = {"model": "stories", "input": "Hello", "max_output_tokens": 5, "temperature": 0}
HERE = Place("everybody", "stories", "stories/0")
__all__ = ["scripted"]


def ask(**fields: Any) -> Ask:
    return Ask(ANSWER, {**BODY, **fields}, b"")


def reference(name: Any) -> dict[str, Any]:
    return {"type": "item_reference", "id": name}


def test_the_latest_are_known() -> None:
    kept = Kept(2)
    for name in "ab":
        kept.put(name, HERE)
    assert kept.get("a", "everybody") == HERE
    kept.put("c", HERE)
    assert kept.get("b", "everybody") is None
    assert kept.get("a", "everybody") == HERE
    assert kept.get("a", "another") is None
    kept.forget("a")
    kept.forget("a")
    assert kept.get("a", "everybody") is None


def test_where_a_request_goes() -> None:
    kept, there = Kept(), Place("everybody", "stories", "stories/1")
    kept.put("resp_a-1", HERE)
    kept.put("resp_b-1", there)
    for request, worker in (
        (ask(), None),
        (ask(previous_response_id="resp_b-1"), "stories/1"),
        (ask(input=[reference("msg_a-1")]), "stories/0"),
        (ask(input=[reference("msg_a-1"), reference("rs_b-1_2")]), "stories/1"),
        (ask(previous_response_id="resp_a-1", input=[reference("msg_b-1")]), "stories/0"),
        (ask(previous_response_id=7, input=[reference(7), 7]), None),  # for an instance to refuse
    ):
        assert kept.worker_for(request, "stories", "everybody") == worker
    for request, code in (
        (ask(previous_response_id="resp_c"), "previous_response_not_found"),
        (ask(input=[reference("msg_c")]), "item_not_found"),
        (ask(input=[reference("")]), "item_not_found"),
    ):
        with pytest.raises(ApiError) as refused:
            kept.worker_for(request, "stories", "everybody")
        assert (refused.value.status, refused.value.code) == (400, code)
    for model, key in (("another", "everybody"), ("stories", "another")):
        with pytest.raises(ApiError) as refused:
            kept.worker_for(ask(previous_response_id="resp_a-1"), model, key)
        assert refused.value.code == "previous_response_not_found"


def test_none_of_it_is_handed_over() -> None:
    assert ask().may_be_handed_over
    assert ask().prefill().data["store"] is False
    assert not ask(previous_response_id="resp_a").may_be_handed_over
    assert not ask(input=[reference("msg_a")]).may_be_handed_over


def test_it_goes_on_where_it_is(pair: Pair) -> None:
    """Though the policy is one after the other."""
    first = pair.fleet.post(ANSWER, BODY)
    worker, name = first.headers["x-penstock-worker"], first.json()["id"]
    assert first.headers["x-penstock-stored"] == name
    for stream in (False, True, False):
        more = {"previous_response_id": name, "stream": stream}
        answer = pair.fleet.post(ANSWER, {**BODY, **more})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-penstock-worker"] == worker
        name = answer.headers["x-penstock-stored"]
    item = first.json()["output"][0]["id"]
    given = [reference(item), {"role": "user", "content": "Why?"}]
    for _ in range(2):
        answer = pair.fleet.post(ANSWER, {**BODY, "input": given})
        assert answer.headers["x-penstock-worker"] == worker
    counted = pair.fleet.post(
        f"{ANSWER}/input_tokens", {"input": "Why?", "previous_response_id": name}
    )
    assert counted.json()["input_tokens"] > 20


def test_a_clients_library_finds_it(pair: Pair) -> None:
    with openai.OpenAI(base_url=f"{pair.fleet.url}/v1", api_key="none", max_retries=0) as client:
        first = client.responses.create(**BODY)
        second = client.responses.create(**BODY, previous_response_id=first.id)
        assert client.responses.retrieve(second.id) == second
        listed = client.responses.input_items.list(second.id, order="asc", limit=1)
        assert len(list(listed)) == 3
        client.responses.delete(second.id)
        for method in (client.responses.retrieve, client.responses.delete):
            for name in (second.id, "resp_x"):
                with pytest.raises(openai.NotFoundError, match="not found"):
                    method(name)
        with pytest.raises(openai.BadRequestError, match="Previous response with id") as refused:
            client.responses.create(**BODY, previous_response_id=second.id)
        assert refused.value.code == "previous_response_not_found"
        assert client.responses.create(**BODY, store=False).store is False


def test_it_ends_with_its_instance(pair: Pair) -> None:
    pair.fleet.fleet.kept.put("resp_old", Place("everybody", "stories", "stories/9"))
    with pair.fleet.client() as client:
        assert client.get(f"{ANSWER}/resp_old").json()["error"]["code"] == "response_not_found"
        answer = client.post(ANSWER, json={**BODY, "previous_response_id": "resp_old"})
    assert answer.status_code == 400
    assert "which has ended" in answer.json()["error"]["message"]


def test_each_key_has_its_own(scripted: Scripted) -> None:
    """To an instance all are the fleet."""
    keys = (Key.of("one", "one"), Key.of("two", "two"))
    scripted.answer = (200, {"ok": True}, {"x-penstock-stored": "resp_a-1"})
    with fleet_of(elsewhere(scripted.url), server=front(keys=keys)) as fleet:
        one, two = ({"authorization": f"Bearer {name}"} for name in ("one", "two"))
        fleet.headers = one
        fleet.until(lambda x: x["models"][0]["state"] == "loaded")
        assert fleet.post(ANSWER, BODY).status_code == 200
        assert fleet.post(ANSWER, {**BODY, "previous_response_id": "resp_a-1"}).status_code == 200
        with fleet.client() as client:
            assert client.get(f"{ANSWER}/resp_a-1").json() == {}  # the instance was asked
        asked, fleet.headers = len(scripted.asked), two
        for more in ({"previous_response_id": "resp_a-1"}, {"input": [reference("msg_a-1")]}):
            assert fleet.post(ANSWER, {**BODY, **more}).status_code == 400
        with fleet.client() as client:
            for path in (f"{ANSWER}/resp_a-1", f"{ANSWER}/resp_a-1/input_items"):
                assert client.get(path).json()["error"]["code"] == "response_not_found"
            assert client.delete(f"{ANSWER}/resp_a-1").status_code == 404
        assert len(scripted.asked) == asked


def test_one_that_breaks_is_not_replaced(scripted: Scripted) -> None:
    with before(scripted) as fleet:
        fleet.fleet.kept.put("resp_a-1", HERE)
        scripted.answer = (503, {"error": {"message": "no"}}, {"x-penstock-code": "engine_dead"})
        answer = fleet.post(ANSWER, {**BODY, "previous_response_id": "resp_a-1"})
        assert answer.status_code in (400, 502, 503)
        assert answer.json()["error"]["code"] in ("previous_response_not_found", "worker_lost",
                                                  "model_not_ready")  # fmt: skip
