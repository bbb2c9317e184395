"""Capitals of lower-cased stories."""

from recipes.truecase import Truecaser


def test_truecaser_restores_capitals() -> None:
    truecaser = Truecaser.learn(["He saw Lily. Then the cat saw Lily and the dog and the cat."])
    lowered = 'zed said, "i am called zed." "stop!" he said to mom and her mom.\nit was fun.'
    restored = 'Zed said, "I am called Zed." "Stop!" he said to Mom and her mom.\nIt was fun.'
    assert truecaser(lowered) == restored
