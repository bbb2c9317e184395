from pathlib import Path

import pytest
from recipes.sources import VERSE, read_verse

MILTON = """[Paradise Lost by John Milton 1667]


Book I


Of Man's first disobedience, and the fruit
Of that forbidden tree whose mortal
     taste
Brought death into the World, and all our woe,

}  A Title

[BOOK II]
 With loss of Eden, till one greater Man

Restore us.
"""


@pytest.fixture
def books(tmp_path: Path) -> Path:
    for name in VERSE:
        file = tmp_path / "nltk-gutenberg" / f"{name}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text(MILTON)
    return tmp_path


def test_verse_keeps_its_lines_and_drops_what_isnt_verse(books: Path) -> None:
    trained, held_out = list(read_verse(books))[:2]
    assert trained.text == (
        "Book I\n\nOf Man's first disobedience, and the fruit\n"
        "Of that forbidden tree whose mortal taste\n"
        "Brought death into the World, and all our woe,\n\nA Title\n\n"
        "With loss of Eden, till one greater Man"
    )
    assert not trained.held_out
    assert held_out.text == "Restore us."
    assert held_out.held_out


def test_of_each_book_an_end_is_held_out(books: Path) -> None:
    found = list(read_verse(books))
    assert [one.held_out for one in found] == [False, True] * len(VERSE)
    assert {one.source for one in found} == {"verse"}
