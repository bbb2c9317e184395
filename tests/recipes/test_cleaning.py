import pytest
from recipes.cleaning import clean_novel, is_held_out, tidy, unwrap


def test_lines_of_a_paragraph_are_joined_and_paragraphs_are_not() -> None:
    assert (
        unwrap("One line\nand another.\n\n  Next\tone.  \r\n")
        == "One line and another.\n\nNext one."
    )


def test_a_word_broken_at_its_hyphen_is_whole_again() -> None:
    assert unwrap("a well-\nknown man --\nhe said") == "a well-known man -- he said"


def test_verse_keeps_its_lines() -> None:
    verse = "The wind was high,\nThe sea was deep,\nAnd all the ships"
    assert unwrap(verse) == verse


def test_rules_between_sections_are_dropped() -> None:
    assert unwrap("One.\n\n* * * * *\n\nTwo.") == "One.\n\nTwo."


def test_gaps_that_mark_up_left_are_closed() -> None:
    assert clean_novel("I don't  know what they are , you see .") == (
        "I don't know what they are, you see."
    )


def test_control_characters_and_byte_order_marks_go() -> None:
    assert tidy("\ufeffa\x00b\x0c \r\nc") == "ab\nc"


@pytest.mark.parametrize("percent", [2.0, 10.0])
def test_the_held_out_share_is_what_was_asked_for(percent: float) -> None:
    held = sum(is_held_out(f"document {i}", percent) for i in range(20_000))
    # four standard deviations of a binomial
    assert abs(held / 200 - percent) < 4 * (percent * (100 - percent) / 20_000) ** 0.5


def test_held_out_at_two_percent_stays_held_out_at_ten() -> None:
    names = [f"document {i}" for i in range(5000)]
    assert all(is_held_out(name, 10) for name in names if is_held_out(name, 2))
