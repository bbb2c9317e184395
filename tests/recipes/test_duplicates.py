import random

import numpy as np
from recipes.duplicates import Deduplicator, Seen, passages, sketch


def prose(seed: int, words: int) -> str:
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefgh", k=5)) for _ in range(words))


def test_case_and_punctuation_do_not_hide_a_copy() -> None:
    text = prose(0, 300)
    assert np.array_equal(sketch(text), sketch(text.upper().replace(" ", ", ")))


def test_a_copy_is_seen_whole_and_new_text_not_at_all() -> None:
    seen = Seen()
    seen.add(prose(1, 500))
    assert seen.share(prose(1, 500)) == 1.0
    assert seen.share(prose(2, 500)) == 0.0


def test_half_a_copy_is_seen_by_half() -> None:
    seen = Seen()
    seen.add(prose(1, 4000))
    mixed = " ".join(prose(1, 4000).split()[:2000]) + " " + prose(2, 2000)
    assert abs(seen.share(mixed) - 0.5) < 0.08  # the sketch has about 500 hashes


def test_a_short_text_has_a_sketch() -> None:
    seen = Seen()
    seen.add("The end.")
    assert seen.share("the end") == 1.0
    assert seen.share("") == 0.0


def test_passages_are_the_text_again() -> None:
    text = "\n\n".join(prose(i, 60) for i in range(20))
    assert "\n\n".join(passages(text, 700)) == text
    assert len(passages(text, 700)) > 5


def test_a_passage_that_is_held_out_is_dropped_and_the_rest_stays() -> None:
    parts = [prose(i, 400) for i in range(3)]
    filtered = Deduplicator()
    filtered.held_out.add(parts[1])
    assert filtered.keep("\n\n".join(parts)) == f"{parts[0]}\n\n{parts[2]}"
    assert filtered.dropped_bytes == len(parts[1])


def test_a_second_copy_is_dropped() -> None:
    filtered = Deduplicator()
    assert filtered.keep(prose(0, 400)) == prose(0, 400)
    assert filtered.keep(prose(0, 400)) == ""
