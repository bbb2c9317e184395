"""Folders as they come: incomplete, broken, contradictory."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import InvalidPromptError, MissingExtraError, TokenizerError
from penstock.tokenizer import Tokenizer
from penstock.tokenizer.pieces import byte_level_bytes, piece_rule, sentencepiece_bytes
from penstock.tokenizer.vocab_map import VocabMap

BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": True,
    "trim_offsets": True,
    "use_regex": True,
}


FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}


def write_bpe(folder: Path, config: dict[str, Any] | None = None, **sections: Any) -> Path:
    """A tokenizer of five pieces, with anything in it replaced by `sections`."""
    content = {
        "version": "1.0",
        "added_tokens": [],
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "vocab": {"a": 0, "b": 1, "ab": 2, "Ġ": 3, "<s>": 4},
            "merges": ["a b"],
        },
    } | sections
    (folder / "tokenizer.json").write_text(json.dumps(content))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_configuration(tmp_path: Path) -> None:
    """Tokens as their texts, and nothing of the machine that wrote the file."""
    token = {"content": "<s>", **FLAGS}
    config = {
        "tokenizer_class": "LlamaTokenizerFast", "bos_token": {"__type": "AddedToken", **token},
        "added_tokens_decoder": {"4": token}, "model_max_length": 512,
        "tokenizer_file": "/home/a/tokenizer.json", "name_or_path": "/home/a",
    }  # fmt: skip
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    found = Tokenizer.from_folder(write_bpe(tmp_path, config)).configuration
    assert found == {
        "tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "model_max_length": 512,
        "added_tokens_decoder": {"4": "<s>"}, "chat_template": "{{ messages }}",
    }  # fmt: skip


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="empty or doesn't exist"):
        Tokenizer.from_folder(tmp_path / "absent")
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(
        TokenizerError, match=r"no vocab.json with merges.txt \(it has vocab.json\)"
    ):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"model": 1}',
        '{"model": {"type": "BPE", "vocab": {}, "merges": ["a b"]}}',
    ],
)
def test_corrupt_tokenizer_json(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=f"has {len(content)} bytes.*download it again"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer_config.json", '{"a": ', "isn't valid JSON"),
        ("tokenizer_config.json", "[1]", "holds a JSON list"),
        ("tokenizer_config.json", f'{{"a": {"9" * 5000}}}', "isn't valid JSON"),
        ("tokenizer_config.json", "[" * 100_000, "isn't valid JSON"),
        (
            "tokenizer_config.json",
            '{"additional_special_tokens": 5}',
            "must be a list of tokens: 5",
        ),
        ("special_tokens_map.json", '{"extra_special_tokens": "<s>"}', "must be a list of tokens"),
        ("special_tokens_map.json", "nul", "isn't valid JSON"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"x": {}}}',
            "added_tokens_decoder must",
        ),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"4": "<s>"}}', "added_tokens_decoder"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template is an int"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x"}]}', "'template'"),
    ],
)
def test_corrupt_settings(file: str, content: str, message: str, tmp_path: Path) -> None:
    write_bpe(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_folder(tmp_path)


PIECES = {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "?",
          "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}  # fmt: skip
WORDS = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}
UNIGRAM = {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]]}
CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
NOTHING = {"type": "Replace", "pattern": {"Regex": ""}, "content": "x"}
UNDEFINED = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "X", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [],
    "special_tokens": {},
}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"normalizer": CHARSMAP}, "Precompiled"),
        ({"normalizer": NOTHING, "pre_tokenizer": BYTE_LEVEL}, "index out of bounds"),
        ({"post_processor": UNDEFINED}, "no entry found"),
    ],
)
def test_what_the_library_panics_at(sections: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_bpe(tmp_path, **sections)
    with pytest.raises(TokenizerError, match=rf"{tmp_path}.*{message}.* again"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("model", "message"),
    [(WORDS, "WordLevel error"), (PIECES, "WordPiece error"), (UNIGRAM, "`unk_id` is missing")],
)
def test_a_tokenizer_of_few_letters(model: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Without a token for what is unknown: it may be all that its texts need."""
    write_bpe(tmp_path, model=model, pre_tokenizer={"type": "Whitespace"})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("a") == [0]
    with pytest.raises(TokenizerError, match=rf"can't encode .*{message}"):
        tokenizer.encode("b")


def test_a_text_that_can_not_be_encoded(tmp_path: Path) -> None:
    """Of ASCII alone, without a token for what is unknown: other texts can be."""
    ascii_only = [[chr(i), -1.0] for i in range(32, 127)]
    write_bpe(tmp_path, model={"type": "Unigram", "unk_id": None, "vocab": ascii_only})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("ab") == [65, 66]
    with pytest.raises(TokenizerError, match="can't encode a text of 3 characters"):
        tokenizer.encode("aßb")


def test_settings_that_are_not_utf8(tmp_path: Path) -> None:
    write_bpe(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match="can't be read as UTF-8"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("kept", [0, 100, 1_000, 300_000])
def test_truncated_sentencepiece_model(kept: int, shared_data: Path, tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    model = (shared_data / "tokenizers" / "llama2" / "tokenizer.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(model[:kept])
    with pytest.raises(TokenizerError, match=f"isn't a SentencePiece model.*{kept:,} bytes"):
        Tokenizer.from_folder(tmp_path)


def test_truncated_tiktoken_model(shared_data: Path, tmp_path: Path) -> None:
    model = (shared_data / "tokenizers" / "llama3" / "tokenizer.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(model[:100_000])
    with pytest.raises(TokenizerError, match=r"isn't 'base64 rank'|tiktoken file with"):
        Tokenizer.from_folder(tmp_path)
    lines = model.split(b"\n")[:5000]
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join(lines))
    with pytest.raises(TokenizerError, match=r"tiktoken file with 5,000 ranks.*128,000"):
        Tokenizer.from_folder(tmp_path)


def test_sentencepiece_not_installed(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(shared_data / "tokenizers" / "llama2" / "tokenizer.model", tmp_path)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(MissingExtraError, match=r"pip install sentencepiece"):
        Tokenizer.from_folder(tmp_path)


def test_vocabulary_and_merges_that_do_not_fit(shared_data: Path, tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    with pytest.raises(TokenizerError, match=r"tokenizer_class None.*GPT2Tokenizer"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2TokenizerFast"}')
    with pytest.raises(TokenizerError, match=r"\(1 entries\) and merges.txt \(1 merges\)"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "merges.txt").write_text("abc\n")
    with pytest.raises(TokenizerError, match="line 1: 'abc'"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokeniser"}')
    with pytest.raises(TokenizerError, match="Did you mean 'Qwen2Tokenizer'"):
        Tokenizer.from_folder(tmp_path)


def test_family_from_config_json(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    for file in ("vocab.json", "merges.txt"):
        shutil.copy(folder_of("qwen2.5") / file, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("don't 12") == [15007, 944, 220, 16, 17]


def test_vocabulary_of_another_model(tmp_path: Path) -> None:
    write_bpe(tmp_path)
    assert Tokenizer.from_folder(tmp_path, vocab_size=5).vocab_size == 5
    assert Tokenizer.from_folder(tmp_path, vocab_size=64).vocab_size == 5
    with pytest.raises(TokenizerError, match=r"the id 4 \('<s>'\).*has 4 ids"):
        Tokenizer.from_folder(tmp_path, vocab_size=4)


def test_added_tokens_beyond_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As Gemma 3's `<image_soft_token>`, and as [PAD] where the embedding wasn't resized."""
    added = [{"id": 5, "content": "<image>", "special": True}]
    write_bpe(tmp_path, added_tokens=[a | FLAGS for a in added])
    tokenizer = Tokenizer.from_folder(tmp_path, vocab_size=5)
    assert "1 added token(s) beyond the model's vocabulary of 5 ids, the first of them" in (
        caplog.text
    )
    assert tokenizer.vocab_size == 5
    assert tokenizer.encode("a<image>b") == [0, 5, 1]  # which an engine refuses
    assert tokenizer.id_to_token(5) == "<image>"
    tokenizer.vocab_map = VocabMap.of(5, [0, 1, 2], {})
    with pytest.raises(InvalidPromptError, match=r"5 \('<image>'\) is outside the vocabulary of 5"):
        tokenizer.encode("a<image>b")
    with pytest.raises(TokenizerError, match="can produce the id 4"):
        Tokenizer.from_folder(tmp_path, vocab_size=4)
    caplog.clear()
    assert Tokenizer.from_folder(tmp_path, vocab_size=6).vocab_size == 6
    assert not caplog.records


@pytest.mark.parametrize("content", ['{"<x>": "5"}', '{"<x>": true}', '{"<x>": -1}'])
def test_added_tokens_json_that_is_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "added_tokens.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"added_tokens\.json must map tokens to their ids"):
        Tokenizer.from_folder(tmp_path)


def test_size_counts_gaps_and_added_tokens(tmp_path: Path) -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": 10, "content": "<x>", "special": True} | flags]
    model = {"type": "BPE", "vocab": {"a": 0, "b": 9}, "merges": []}
    with pytest.raises(TokenizerError, match=r"gives '<x>' the id 10.*numbers it 2"):
        Tokenizer.from_folder(write_bpe(tmp_path, model=model, added_tokens=added))
    model["vocab"] = {"a": 0, "b": 9, "<x>": 10}
    tokenizer = Tokenizer.from_folder(write_bpe(tmp_path, model=model, added_tokens=added))
    assert tokenizer.vocab_size == 11
    assert tokenizer.special_ids == {10}
    assert tokenizer.id_to_token(5) is None
    assert tokenizer.id_to_token(-1) is tokenizer.id_to_token(99) is None
    assert tokenizer.token_bytes(5) == tokenizer.token_bytes(99) == b""
    assert tokenizer.decode([0, 5, 10, 9, 99]) == "ab"
    assert tokenizer.decode([0, 10], skip_special_tokens=False) == "a<x>"


def test_bos_and_eos(tmp_path: Path) -> None:
    named: dict[str, Any] = {"bos_token": "<s>", "eos_token": {"content": "b"}}
    tokenizer = Tokenizer.from_folder(write_bpe(tmp_path, named))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (4, 1)
    assert tokenizer.special_ids == {1, 4}
    assert tokenizer.encode("a") == [0]
    both = named | {"add_bos_token": True, "add_eos_token": True}
    tokenizer = Tokenizer.from_folder(write_bpe(tmp_path, both))
    assert tokenizer.encode("a") == [4, 0, 1]
    assert tokenizer.encode("a", add_special_tokens=False) == [0]
    for wrong in ({"add_bos_token": True}, {"add_bos_token": True, "bos_token": "<bos>"}):
        with pytest.raises(TokenizerError, match="asks for add_bos_token"):
            Tokenizer.from_folder(write_bpe(tmp_path, wrong))


def test_special_tokens_map_fills_in(tmp_path: Path) -> None:
    write_bpe(tmp_path, {"eos_token": "b"})
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "a"}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (4, 1)


def test_added_tokens_of_the_configuration(tmp_path: Path) -> None:
    decoder = {"5": {"content": "<|x|>", "special": True}, "4": {"content": "<s>"}}
    tokenizer = Tokenizer.from_folder(write_bpe(tmp_path, {"added_tokens_decoder": decoder}))
    assert tokenizer.encode("a<|x|>b<s>") == [0, 5, 1, 4]
    assert tokenizer.special_ids == {5}
    decoder["9"] = {"content": "<|y|>"}
    with pytest.raises(TokenizerError, match=r"'<\|y\|>' the id 9, but in the vocabulary it has 6"):
        Tokenizer.from_folder(write_bpe(tmp_path, {"added_tokens_decoder": decoder}))


def test_sentencepiece_added_tokens(shared_data: Path, tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    shutil.copy(shared_data / "tokenizers" / "llama2" / "tokenizer.model", tmp_path)
    decoder = {"32000": {"content": "<|im_end|>", "special": True, "rstrip": True}}
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"added_tokens_decoder": decoder, "add_bos_token": False}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.vocab_size == 32001
    assert tokenizer.encode("Hello<|im_end|> \n") == [15043, 32000]
    assert tokenizer.id_to_token(32000) == "<|im_end|>"
    assert Tokenizer.from_folder(tmp_path, vocab_size=32000).vocab_size == 32000  # it is added
    with pytest.raises(TokenizerError, match="the id 31999"):
        Tokenizer.from_folder(tmp_path, vocab_size=31999)
    config.write_text('{"added_tokens_decoder": {"15043": {"content": "<x>"}}}')
    with pytest.raises(TokenizerError, match="that id is '▁Hello'"):
        Tokenizer.from_folder(tmp_path)


def test_padding_and_truncation_in_the_file_are_off(tmp_path: Path) -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer = Tokenizer.from_folder(write_bpe(tmp_path, truncation=truncation))
    assert len(tokenizer.encode("aaaaaaaa")) == 8


def test_text_that_is_not_unicode(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_bpe(tmp_path))
    with pytest.raises(InvalidPromptError, match=r"surrogate U\+D83E at character 2 of 3"):
        tokenizer.encode("ab\ud83e")


def test_unknown_decoder(tmp_path: Path) -> None:
    write_bpe(
        tmp_path,
        decoder={"type": "CTC", "pad_token": "<pad>", "cleanup": True}
        | {"word_delimiter_token": "|"},
    )
    with pytest.raises(TokenizerError, match="can't be streamed"):
        Tokenizer.from_folder(tmp_path)


def test_token_bytes(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    gpt2, llama = tokenizer_of("gpt2"), tokenizer_of("llama2")
    space = gpt2.encode(" the")[0]
    assert (gpt2.id_to_token(space), gpt2.token_bytes(space)) == ("Ġthe", b" the")
    assert llama.token_bytes(3 + 0xE2) == b"\xe2"
    assert llama.token_bytes(llama.encode("the")[1]) == b" the"
    assert llama.token_bytes(1) == b"<s>"
    for tokenizer in (gpt2, llama, tokenizer_of("llama3")):
        single = set(map(tokenizer.token_bytes, range(tokenizer.vocab_size)))
        assert {bytes([byte]) for byte in range(256)} <= single
        text = "Naïve 🦙 日本\n x"
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode().removeprefix(" ") == text


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
DECODERS: list[dict[str, Any] | None] = [
    None,
    BYTE_LEVEL,
    METASPACE,
    METASPACE | {"prepend_scheme": "never"},
    {"type": "WordPiece", "prefix": "##", "cleanup": True},
    {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
]


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: str(decoder)[:40])
def test_decoders_give_the_librarys_text(decoder: dict[str, Any] | None, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    pieces = ["Ġthe", "▁the", "the", "##ing", ".", "n't", "<0xC3><0xA9>", "<0x41>", "日", "é", "!"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "the"}
    write_bpe(tmp_path, decoder=decoder, model=model)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    for first in range(len(pieces)):
        for second in range(len(pieces)):
            if pieces[first].startswith("##"):
                continue  # half a word can't start a text
            ids = [first, second, 1, 2]
            assert tokenizer.decode(ids) == library.decode(ids), (pieces[first], pieces[second])


def test_piece_bytes() -> None:
    assert byte_level_bytes("ĠÃ©") == " é".encode()
    assert byte_level_bytes("<｜begin▁of▁sentence｜>") == "<｜begin▁of▁sentence｜>".encode()
    assert sentencepiece_bytes("▁a▁") == b" a "
    assert sentencepiece_bytes("<0x0A>") == b"\n"
    assert piece_rule(None).to_bytes("a") == b" a"
