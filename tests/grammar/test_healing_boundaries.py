"""Prompts that end anywhere in a text: healed, they go on to exactly the text's own tokens.

The model is one that would write the text: of two tokens it prefers the one of the whole text's own
tokenization. Unhealed, most prompts end in tokens that aren't among these.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.grammar.healing import Healer
from penstock.sampling import num_words
from penstock.tokenizer import IncrementalDetokenizer, Tokenizer, VocabMap

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
STORIES = Path(penstock.__file__).parent / "assets" / "stories"
SOURCES: dict[str, tuple[str, dict[str, str]]] = {  # folder, and what its files are called
    "gpt2": ("gpt2-hf", {"tokenizer.json": "tokenizer.json"}),
    "qwen2.5": (
        "qwen2.5",
        {x: x for x in ("vocab.json", "merges.txt", "tokenizer_config.json")},
    ),
    "llama2": ("llama2", {"tokenizer.model": "tokenizer.model"}),
    "llama3": ("llama3", {"tokenizer.model": "tokenizer.model"}),
    "mistral": ("mistral", {"tokenizer.model.v1": "tokenizer.model"}),
}
NAMES = [*SOURCES, "stories"]
PROMPTS = {  # kind → prompt, and how the model goes on
    "spaces": [("The book is ", "on the table."), ("a  ", " b"), ("One\n\n", "\nTwo")],
    "URLs": [("The link is http:", "//www.example.org/a?b=1"), ("at https://www.exa", "mple.org")],
    "code": [("def f(x):\n  ret", "urn x + 1"), ("foo(ba", "r, baz)"), ("if (a =", "= b) {\n")],
    "Unicode": [
        ("Ein Übe", "rmaß"),
        ("naïve caf", "és"),
        ("Скажи пр", "ивет 🦙"),
        ("日本", "語です"),
    ],
    "numbers": [("Pi is 3.14", "159265"), ("In 20 2", "024-11-22"), ("1,23", "4,567.89")],
}


@pytest.fixture(scope="module")
def healer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Healing]:
    made: dict[str, Healing] = {}

    def make(name: str) -> Healing:
        if name not in made:
            made[name] = Healing(Tokenizer.from_folder(_folder(name, tmp_path_factory)))
        return made[name]

    return make


def _folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if name == "stories":
        return STORIES
    source, files = SOURCES[name]
    if not (DATA / "tokenizers" / source).is_dir():
        pytest.skip(f"the shared data isn't at {DATA}")
    if name in ("llama2", "mistral"):
        pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp(name)
    for file, called in files.items():
        shutil.copy(DATA / "tokenizers" / source / file, folder / called)
    if name == "gpt2":
        (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return folder


class Healing:
    """A tokenizer, its healer, and a model that would write a certain text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.size = tokenizer.vocab_size + 7  # a few padding rows
        self.healer = Healer(tokenizer, self.size)

    def generate(self, prompt: Sequence[int], natural: Sequence[int], healed: bool) -> list[int]:
        """Greedy, to the text's end: the sequence's tokens."""
        found = self.healer.heal(prompt) if healed else None
        constraint = self.healer.constraint(b"" if found is None else found.prefix)
        tokens = list(prompt if found is None else found.kept)
        bits = np.empty(num_words(self.size), dtype=np.int32)
        while len(tokens) < len(natural):
            logits = np.zeros(self.size)
            if tokens == list(natural[: len(tokens)]):
                logits[natural[len(tokens)]] = 1.0
            constraint.fill(bits)
            may = np.unpackbits(bits.view(np.uint8), bitorder="little")[: self.size]
            token = int(np.where(may, logits, -1.0).argmax())
            constraint.accept(token)
            tokens.append(token)
        return tokens

    def text_after(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """What an answer shows, streamed token by token."""
        found = self.healer.heal(prompt)
        detokenizer = IncrementalDetokenizer(
            self.tokenizer, prompt_ids=prompt, skip_bytes=len(found.prefix)
        )
        parts = [detokenizer.append([token]) for token in tokens[len(found.kept) :]]
        return "".join(parts) + detokenizer.finish()


def named() -> Iterator[tuple[str, str, str]]:
    for kind, prompts in PROMPTS.items():
        for prompt, more in prompts:
            yield kind, prompt, more


@pytest.mark.parametrize("name", NAMES)
def test_boundaries(name: str, healer_of: Callable[[str], Healing]) -> None:
    healing = healer_of(name)
    broken = set()
    for kind, prompt, more in named():
        ids, natural = healing.tokenizer.encode(prompt), healing.tokenizer.encode(prompt + more)
        assert healing.generate(ids, natural, healed=True) == natural, prompt
        assert healing.text_after(ids, natural) == more
        if healing.generate(ids, natural, healed=False) != natural:
            broken.add(kind)
    assert broken >= {"spaces", "URLs", "code", "Unicode"}  # digits may each be a token


def passages() -> Iterator[str]:
    """Prose, code, mark-up, and what is named above in a row."""
    yield Path(penstock.__file__).parent.joinpath("engine/engine.py").read_text()[:3000]
    yield Path(penstock.__file__).parents[2].joinpath("README.md").read_text()[:2000]
    novel = DATA / "text/100_english_novels/Doyle_Hound_1902.txt"
    if novel.is_file():
        yield novel.read_text()[5000:8000]
    yield "\n".join(prompt + more for _, prompt, more in named())


@pytest.mark.parametrize("name", NAMES)
def test_a_text_cut_anywhere(
    name: str, healer_of: Callable[[str], Healing], record_property: Callable[[str, object], None]
) -> None:
    healing = healer_of(name)
    tokenizer = healing.tokenizer
    cuts = broken = taken = 0
    for text in passages():
        natural = tokenizer.encode(text)
        for cut in range(1, len(text), 29):
            prompt = tokenizer.encode(text[:cut])
            if len(prompt) == 1:  # no BOS, and the first token stays
                assert healing.healer.heal(prompt).kept == prompt
                continue
            found = healing.healer.heal(prompt)
            end = natural[: len(prompt) + 3]  # beyond the prompt's end
            assert healing.generate(prompt, end, healed=True) == end, text[max(0, cut - 30) : cut]
            cuts += 1
            taken += len(prompt) - len(found.kept)
            broken += healing.generate(prompt, end, healed=False) != end
    record_property("cuts, broken unhealed, taken back", (cuts, broken, taken / cuts))
    assert cuts > 200
    assert broken > cuts / 3
    assert taken < 1.4 * cuts


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_that_ends_within_a_character(
    name: str, healer_of: Callable[[str], Healing]
) -> None:
    healing = healer_of(name)
    tokenizer = healing.tokenizer
    single: dict[bytes, int] = {}  # the byte tokens of a vocabulary that has both come first
    for token in range(tokenizer.vocab_size):
        piece = tokenizer.token_bytes(token)
        if len(piece) == 1 and token not in tokenizer.special_ids:
            single.setdefault(piece, token)
    broken = 0
    for before, character, after in [
        ("Ein gr", "ö", "ßeres"),
        ("A llama: ", "🦙", " and a rocket"),
        ("日本", "語", "のテキスト"),
    ]:
        text = before + character + after
        natural = tokenizer.encode(text)
        for count in range(1, len(character.encode())):
            half = [single[bytes([byte])] for byte in character.encode()[:count]]
            prompt = tokenizer.encode(before) + half
            assert healing.generate(prompt, natural, healed=True) == natural
            assert healing.text_after(prompt, natural) == character + after
            broken += healing.generate(prompt, natural, healed=False) != natural
    assert broken or name == "stories"  # whose only tokens beyond ASCII are single bytes


def test_a_reduced_vocabulary_has_no_tokens_but_its_own() -> None:
    tokenizer = Tokenizer.from_folder(STORIES)
    text = "Once upon a time there was a little girl"
    whole = tokenizer.encode(text)
    lost = whole[-1]
    piece = tokenizer.token_bytes(lost)
    left = [i for i in range(tokenizer.vocab_size) if i != lost]
    parts = _written(tokenizer, piece, lost)
    tokenizer.vocab_map = VocabMap.of(tokenizer.vocab_size, left, {lost: parts})
    healing = Healing(tokenizer)
    natural = tokenizer.encode(text)
    assert natural == [*whole[:-1], *parts]
    for cut in range(1, len(text)):
        prompt = tokenizer.encode(text[:cut])
        assert healing.generate(prompt, natural, healed=True) == natural
    constraint = healing.healer.constraint(piece[:-1])
    bits = np.empty(num_words(healing.size), dtype=np.int32)
    constraint.fill(bits)
    assert not bits[lost // 32] >> (lost % 32) & 1


def _written(tokenizer: Tokenizer, piece: bytes, lost: int) -> list[int]:
    """The piece in two other tokens."""
    known = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if i != lost}
    return next(
        [known[piece[:at]], known[piece[at:]]]
        for at in range(1, len(piece))
        if piece[:at] in known and piece[at:] in known
    )


def test_a_prompt_that_no_tokenizer_makes_keeps_its_bytes(
    healer_of: Callable[[str], Healing],
) -> None:
    """Token by token in bytes, or at random: what is kept and what is taken back are the prompt."""
    healing = healer_of("stories")
    tokenizer = healing.tokenizer
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    spelled = [single[bytes([byte])] for byte in b"Preemption waver"]
    draw = np.random.default_rng(7)
    prompts = [draw.integers(0, tokenizer.vocab_size, 30).tolist() for _ in range(50)]
    healed = 0
    for prompt in [spelled, *prompts]:
        found = healing.healer.heal(prompt)
        taken = prompt[len(found.kept) :]
        assert found.kept == prompt[: len(found.kept)]
        assert found.prefix == b"".join(map(tokenizer.token_bytes, taken))
        assert not tokenizer.special_ids.intersection(taken)
        healed += bool(taken)
        assert healing.healer.constraint(found.prefix).is_over == (not taken)
    assert healed > 40
