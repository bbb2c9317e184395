"""Conversations in the OpenAI API's form: dialogues with tool calls, instructions, requests."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from recipes.cleaning import digest, is_held_out
from recipes.tinystories import chat_documents

HELD_OUT_SERVICES = frozenset({"Hotels_4", "Media_2"})
"""Never trained on: what the model does with tools it hasn't seen."""
DIALOGUES_PERCENT = 3
PLAIN_SHARE = 6  # one dialogue in six is talk alone, without tools
MAX_ANSWER = 600  # characters of a made-up instruction's answer; long ones are beyond this model
CHATTERBOT = (
    *("conversations", "emotion", "food", "greetings", "health", "history", "humor"),
    *("literature", "science", "sports", "trivia"),
)
"""Topics of the chatterbot corpus; the others are about computers, or gossip."""
MARKS = re.compile(r"<\|[a-z_]+\|>")

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, the tools on offer, and which part of the training data it belongs to."""

    kind: str  # tools, talk, instructions or requests
    identity: str
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    services: frozenset[str] = frozenset()
    held_out: bool = False

    def as_dict(self) -> dict[str, Any]:
        """A line of the file that `penstock eval --dialogues` reads."""
        return {"messages": self.messages} | ({"tools": self.tools} if self.tools else {})


def function_schema(intent: dict[str, Any], slots: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One method of a service as a function with a JSON schema."""
    names = [*intent["required_slots"], *intent["optional_slots"]]
    properties = {}
    for name in names:
        slot = slots[name]
        properties[name] = {"type": "string", "description": slot["description"]}
        if slot["is_categorical"] and slot["possible_values"]:
            properties[name]["enum"] = slot["possible_values"]
    return {
        "type": "function",
        "function": {
            "name": intent["name"],
            "description": intent["description"],
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": intent["required_slots"],
            },
        },
    }


def read_services(file: Path) -> dict[str, list[dict[str, Any]]]:
    """The functions of each service in a schema file of the Schema-Guided Dialogue data."""
    found = {}
    for service in json.loads(file.read_text(encoding="utf-8")):
        slots = {slot["name"]: slot for slot in service["slots"]}
        found[service["service_name"]] = [function_schema(i, slots) for i in service["intents"]]
    return found


def read_dialogues(folder: Path) -> Iterator[Conversation]:
    """The Schema-Guided dialogues whose services have no two methods of one name."""
    for part in ("train", "dev"):
        services = read_services(folder / "dialogue" / f"sgd_{part}_schema.json")
        lines = (folder / "dialogue" / f"sgd_{part}.jsonl").read_text(encoding="utf-8")
        for line in lines.splitlines():
            entry = json.loads(line)
            tools = [tool for name in entry["services"] for tool in services[name]]
            if len({tool["function"]["name"] for tool in tools}) < len(tools):
                continue
            identity = f"{part} {entry['id']}"
            held = is_held_out(identity, DIALOGUES_PERCENT)
            plain = digest("plain " + identity) % PLAIN_SHARE == 0 and not held
            spoken = " ".join(t["content"] for t in entry["turns"] if t["role"] == "assistant")
            messages = [m for turn in entry["turns"] for m in _messages(turn, plain, spoken)]
            yield Conversation(
                "talk" if plain else "tools",
                identity,
                messages,
                [] if plain else tools,
                frozenset(entry["services"]),
                held or bool(HELD_OUT_SERVICES & set(entry["services"])),
            )


def _messages(turn: dict[str, Any], plain: bool, spoken: str) -> Iterator[Message]:
    """A turn's messages: the calls, their results, then what is said."""
    calls = [] if plain else turn.get("tool_calls", [])
    for call, results in zip(calls, turn.get("tool_results", []), strict=False):
        function = {"name": call["method"], "arguments": call["parameters"]}
        yield {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        }
        kept = results[:1] + [r for r in results[1:] if _is_mentioned(r, results[0], spoken)]
        yield {"role": "tool", "content": json.dumps(kept, ensure_ascii=False)}
    yield {"role": turn["role"], "content": MARKS.sub("", turn["content"]).strip()}


def _is_mentioned(result: dict[str, str], first: dict[str, str], spoken: str) -> bool:
    """Whether the assistant says something that stands in this result and not in the first.

    Results that nobody speaks of only fill the context; the others keep replies grounded.
    """
    own = [value for name, value in result.items() if value != first.get(name)]
    return any(len(value) >= 5 and value in spoken for value in own)


def _exchange(kind: str, asked: str, answered: str) -> Conversation:
    asked, answered = MARKS.sub("", asked).strip(), MARKS.sub("", answered).strip()
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return Conversation(kind, f"{kind} {asked}", messages)


def read_instructions(folder: Path) -> Iterator[Conversation]:
    """Short instructions and small talk."""
    for name in ("seed_tasks", "user_oriented_instructions"):
        file = folder / "instruct" / "self-instruct" / f"{name}.jsonl"
        for line in file.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            for instance in entry["instances"]:
                asked = f"{entry['instruction']}\n{instance['input']}".strip()
                if len(instance["output"]) <= MAX_ANSWER and len(asked) <= 2 * MAX_ANSWER:
                    yield _exchange("instructions", asked, instance["output"])
    for topic in CHATTERBOT:
        file = folder / "instruct" / "chatterbot-english" / f"{topic}.yml"
        if not file.exists():
            continue
        for lines in yaml.safe_load(file.read_text(encoding="utf-8"))["conversations"]:
            asked, answered = str(lines[0]), str(lines[1]) if len(lines) > 1 else ""
            if asked.strip() and answered.strip():
                yield _exchange("instructions", asked, answered)


def story_requests(stories: list[str]) -> Iterator[Conversation]:
    """Each story as an answer: to a request for one, and to its own beginning."""
    for (asked, story), text in zip(chat_documents(stories), stories, strict=True):
        yield _exchange("requests", asked, story)
        sentences = re.split(r"(?<=[.!?])\s+", text)
        if len(sentences) >= 6 and digest("continue " + text) % 4 == 0:
            begin = " ".join(sentences[:2])
            rest = text[text.find(sentences[1]) + len(sentences[1]) :].strip()
            yield _exchange("requests", f"Continue this story: {begin}", rest)
