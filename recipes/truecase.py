"""Give lower-cased stories their capitals back, learning names from cased ones."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

KIN = {"mom", "mommy", "mum", "mummy", "mama", "dad", "daddy", "papa", "grandma", "grandpa"}
DETERMINERS = {"a", "the", "my", "your", "his", "her", "their", "our", "its", "and", "both"}
SAYING = {
    *("said", "asked", "replied", "cried", "shouted", "yelled", "called", "exclaimed"),
    *("answered", "whispered", "laughed", "thought", "says", "asks", "screamed", "begged"),
}
TOKEN = re.compile(r"[A-Za-z]+(?:'[a-z]+)?|[^A-Za-z]+")
MID_SENTENCE = re.compile(r"(?<=[a-z,] )([A-Za-z]+)")
INTRODUCED = re.compile(r"(?:named|called|name was|name is) ([a-z]+)")


@dataclass(frozen=True, slots=True)
class Truecaser:
    """`truecaser(text)` capitalises sentence starts, quotations, names and the word I."""

    names: frozenset[str]
    common: frozenset[str]

    @classmethod
    def learn(cls, cased: Iterable[str]) -> "Truecaser":
        """A name is a word that is capitalised more often than not inside a sentence."""
        upper: Counter[str] = Counter()
        lower: Counter[str] = Counter()
        for text in cased:
            for word in MID_SENTENCE.findall(text):
                (upper if word[0].isupper() else lower)[word.lower()] += 1
        names = {word for word, count in upper.items() if count > lower[word] and word not in KIN}
        return cls(frozenset(names), frozenset(word for word, n in lower.items() if n >= 2))

    def __call__(self, text: str) -> str:
        """Restore the capitals of one lower-cased story."""
        introduced = {word for word in INTRODUCED.findall(text) if word not in self.common}
        names = self.names | introduced
        tokens = TOKEN.findall(text)
        out: list[str] = []
        for i, token in enumerate(tokens):
            if not token[0].isalpha():
                out.append(token)
                continue
            before = tokens[i - 1] if i else ""
            stem = token.split("'")[0]
            previous = tokens[i - 2] if i > 1 else ""
            capital = (
                i < 2  # the first word, after an opening quote or not
                or stem == "i"
                or stem in names
                or (stem in KIN and before == " " and not is_determined(previous))
                or opens_sentence(before, tokens[i : i + 8])
            )
            out.append(token[0].upper() + token[1:] if capital else token)
        return "".join(out)


def is_determined(previous: str) -> bool:
    """Whether the word before makes a kin word a common noun: `her mom`, `Tim's dad`."""
    return previous in DETERMINERS or previous.endswith("'s")


def opens_sentence(before: str, following: list[str]) -> bool:
    """Whether what stands between two words starts a sentence or a quotation."""
    if "\n" in before or re.search(r"(?:^|[\s,])\"$", before):
        return True
    if not re.search(r"[.!?][\"')]*\s+[\"'(]*$", before):
        return False
    if re.search(r"[!?]\"\s$", before):  # "stop!" he said
        return not SAYING & set(following[2:])
    return True
