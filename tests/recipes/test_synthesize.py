from pathlib import Path

import pytest
from recipes.synthesize import synthesize, whole_sentences

STORIES = Path(__file__).resolve().parents[2] / "src" / "penstock" / "assets" / "stories"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("It was late. She slept. And th", "It was late. She slept."),
        ("Once upon a time it rained. Once upon a time it", "Once upon a time it rained."),
        ("no end at all", ""),
    ],
)
def test_a_story_ends_with_a_sentence_and_before_the_next_story(text: str, kept: str) -> None:
    assert whole_sentences(text) == kept


@pytest.mark.slow
def test_stories_are_told_apart_and_again_the_same(tmp_path: Path) -> None:
    synthesize(STORIES, tmp_path / "a.txt", 10, seed=1)
    synthesize(STORIES, tmp_path / "b.txt", 10, seed=1)
    text = (tmp_path / "a.txt").read_text()
    assert text == (tmp_path / "b.txt").read_text()
    stories = [story.strip() for story in text.split("<|endoftext|>")]
    assert len(set(stories)) == len(stories) >= 2
    assert all(story.startswith("Once upon a time") and len(story) > 99 for story in stories)
