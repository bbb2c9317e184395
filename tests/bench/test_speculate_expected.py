"""What speculation should gain: formulas against closed forms, prompts as they are read."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from penstock.bench.speculate.benchmark import Options
from penstock.bench.speculate.expected import (
    Costs,
    DraftLog,
    Place,
    geometric_tokens,
    rate_of,
    speedup_of,
    tokens_by_place,
)
from penstock.bench.speculate.planted import Planted
from penstock.bench.speculate.prompts import Workload, built_in, read_prompts
from penstock.errors import ConfigError
from penstock.roofline import StepSize


def test_the_theorem() -> None:
    """Leviathan et al. 2023, theorem 3.8, and their table 1's ratio of operations' denominator."""
    alpha, gamma, c = 0.8, 5, 0.05
    want = (1 - alpha ** (gamma + 1)) / ((1 - alpha) * (gamma * c + 1))
    found = speedup_of(
        [StepSize([6], [30], 6, drafted=5)] * 3,
        lambda length: geometric_tokens(alpha, length),
        lambda size: 1 + c * size.drafted,
        1.0,
    )
    assert found == pytest.approx(want, rel=1e-12)
    assert geometric_tokens(1.0, 7) == 8.0 and geometric_tokens(0.0, 7) == 1.0
    assert geometric_tokens(0.6, 3) == pytest.approx(1 + 0.6 + 0.36 + 0.216)


def test_one_rate_for_all_places_is_the_geometric_sum() -> None:
    places = [Place(drafts=10, tested=4, accepted=3)] * 5
    for length in range(6):
        assert tokens_by_place(places, length) == pytest.approx(geometric_tokens(0.75, length))


def test_steps_of_several_sequences() -> None:
    """Two give 3 and 1 tokens in two plain steps' time: as fast as plain, whose step gives 2."""
    size = StepSize([3, 1], [10, 11], 4, drafted=2)
    assert speedup_of([size], lambda n: n + 1.0, lambda _: 2.0, 1.0) == 1.0


def test_places_of_drafts() -> None:
    log = DraftLog()
    for drafted, accepted in [(3, 3), (3, 1), (2, 0), (2, 2), (1, 1)]:
        log.count(drafted, accepted, drafted)
    assert (log.drafts, log.draft_tokens, log.accepted_tokens) == (5, 11, 7)
    assert log.places() == [Place(5, 5, 4), Place(4, 3, 2), Place(2, 1, 1)]
    assert rate_of(log.places()) == pytest.approx(7 / 9)  # two mismatches were compared
    assert rate_of([]) is None and DraftLog().places() == []


def test_the_rate_of_a_coin_is_found() -> None:
    """Drafts of mixed lengths, cut short: the rate is neither's fault."""
    rng, log = Random(1), DraftLog()
    for _ in range(20_000):
        drafted = rng.randint(1, 6)
        accepted = next((i for i in range(drafted) if rng.random() >= 0.7), drafted)
        log.count(drafted, accepted, drafted)
    assert rate_of(log.places()) == pytest.approx(0.7, abs=0.01)
    assert [place.rate for place in log.places()] == pytest.approx([0.7] * 6, abs=0.03)


def test_break_even() -> None:
    """With free verification and c a token, one token breaks even where 1 + α = 1 + c."""
    costs = Costs(1, 1.0, [1.0] * 9, 0.25, by_passes=True)
    assert costs.break_even(1) == pytest.approx(0.25)
    assert costs.break_even(8) == pytest.approx(0.25)  # the first token is the surest
    assert costs.best(0.8, 8)[0] == max(
        geometric_tokens(0.8, n) / (1 + 0.25 * n) for n in range(1, 9)
    )
    per_draft = Costs(1, 1.0, [1.0] * 9, 0.5, by_passes=False)
    at = per_draft.break_even(8)
    assert at is not None
    assert geometric_tokens(at, 8) == pytest.approx(1.5)  # the longest, for the price is the same
    assert Costs(1, 1.0, [1.0] * 9, 2.0, by_passes=True).break_even(8) is None
    assert Costs(1, 1.0, [0.9] * 9, 0.0, by_passes=False).break_even(8) == 0.0


def test_verification_of_a_batch_is_of_all_its_tokens() -> None:
    """Four sequences with two guesses each: a step that verifies eight."""
    costs = Costs(4, 1.0, [1.0 + 0.1 * n for n in range(9)], 0.0, by_passes=False)
    assert costs.best(1.0, 2) == (pytest.approx(3 / 1.8), 2)


# ── prompts and options ──────────────────────────────────────────────────────────────────────


def test_prompts_of_a_file(tmp_path: Path) -> None:
    text, lines = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_text("One day\n\n Tom and\n")
    assert read_prompts(text) == Workload("prompts.txt", ["One day", " Tom and"])
    lines.write_text('{"prompt": "One\\nday", "id": 3}\n\n{"prompt": [5, 6]}\n')
    found = read_prompts(lines)
    assert found == Workload("prompts.jsonl", ["One\nday", [5, 6]])
    assert found.is_text and not Workload("ids", [[5, 6]]).is_text
    assert Workload("ids", [[5, 6]]).most_tokens == 2


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.txt", None, "none.txt can't be read: No such file"),
        ("a.txt", "\n\n", "holds no prompts: it has 2 lines"),
        ("a.txt", b"\xff\xfe", "isn't UTF-8"),
        ("a.jsonl", "{", "Line 1 of .*isn't JSON"),
        ("a.jsonl", '{"prompt": "x"}\n["x"]', 'Line 2 of .*the key "prompt"'),
        ("a.jsonl", '{"prompt": ""}', "not empty"),
        ("a.jsonl", '{"prompt": [1, true]}', "a list of token ids"),
        ("a.jsonl", '{"prompt": []}', "not empty"),
    ],
)
def test_what_holds_no_prompts(
    name: str, content: str | bytes | None, words: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=words):
        read_prompts(tmp_path / name)


def test_our_own_prompts() -> None:
    names = [workload.name for workload in built_in()]
    assert names == ["stories", "copy"]
    assert all("\n\n" in prompt for prompt in built_in()[1].prompts)  # a request and its text


def test_planted_takes_no_method() -> None:
    asked = Planted.of(0.5, 0.0, {"num_speculative_tokens": 3, "adaptive": False})
    assert (asked.num_speculative_tokens, asked.adaptive) == (3, False)
    with pytest.raises(ConfigError, match="no use for 'method'"):
        Planted.of(0.5, 0.0, {"method": "self"})
    with pytest.raises(ConfigError, match="num_speculative_tokens must be a positive integer"):
        Planted.of(0.5, 0.0, {"num_speculative_tokens": 0})


def test_options_are_kept_without_what_is_not_set() -> None:
    told = json.loads(json.dumps(Options(Planted(0.5), 8, 1, 0.0, 1, 0).as_dict()))
    assert told["drafts"] == {
        "method": "planted", "rate": 0.5, "cost": 0.0, "num_speculative_tokens": 8,
        "adaptive": True,
    }  # fmt: skip
