"""Small talk that was written for the chat model: right, varied, and not what its card asks."""

import re

from recipes.prompts import PROMPTS
from recipes.small_talk import CAPITALS, MAKERS, NUMBERS, small_talk
from recipes.sources import letters

TALKS = list(small_talk(2000))


def exchanges() -> list[tuple[str, str]]:
    return [
        (asked["content"], answered["content"])
        for talk in TALKS
        for asked, answered in zip(talk.messages[::2], talk.messages[1::2], strict=True)
    ]


def test_conversations_are_whole() -> None:
    assert len({str(talk.messages) for talk in TALKS}) == len(TALKS) == 2000
    lengths = {len(talk.messages) for talk in TALKS}
    assert lengths == {2, 4, 6, 8}
    for talk in TALKS:
        roles = [message["role"] for message in talk.messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
    for said in (text for exchange in exchanges() for text in exchange):
        assert said == said.strip() and said
        assert not re.search(r"[{}|]|\ba [aeio]\w", said), said


def test_it_is_the_same_each_time() -> None:
    assert [talk.messages for talk in small_talk(50)] == [talk.messages for talk in TALKS[:50]]


def test_it_is_varied() -> None:
    assert len({asked for asked, _ in exchanges()}) > 500
    assert len(MAKERS) > 35


def test_numbers_and_facts_are_right() -> None:
    seen = 0
    for asked, answered in exchanges():
        if found := re.fullmatch(r"What is (\w+) plus (\w+)\?", asked):
            a, b = (int(x) if x.isdigit() else NUMBERS.index(x) for x in found.groups())
            assert answered.rstrip(".").split()[-1] in (str(a + b), NUMBERS[a + b])
            seen += 1
        if found := re.search(r"(\w+) names for", asked):
            count = int(found[1]) if found[1].isdigit() else NUMBERS.index(found[1])
            listed = re.split(r", | and ", answered.split(": ")[-1].rstrip("."))
            assert len(listed) == len(set(listed)) == count
            seen += 1
        if found := re.search(r"capital of (\w+)", asked):
            assert answered == f"The capital of {found[1]} is {CAPITALS[found[1]]}."
            seen += 1
    assert seen > 200


def test_nothing_of_the_card_is_asked() -> None:
    asked = {letters(text) for text, _ in exchanges()}
    assert not asked & {letters(prompt) for prompt, _ in PROMPTS}
    assert len(PROMPTS) == 20


def test_a_goodbye_comes_last() -> None:
    ends = re.compile(
        r"\b(?:goodbye|bye|see you soon|come back soon|you are (?:very )?welcome)\b", re.IGNORECASE
    )
    assert sum(bool(ends.search(answered)) for _, answered in exchanges()) > 100
    for talk in TALKS:
        for message in talk.messages[:-2]:
            assert not ends.search(message["content"]), talk.messages
