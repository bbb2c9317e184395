"""Tokenizers from metadata, against published vectors and the files they were made of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf import TokenType
from gguf_writing import scores_of, types_of

from penstock.errors import TokenizerError
from penstock.models.gguf.tokenizer import gguf_tokenizer
from penstock.models.gguf.words import word_rule
from penstock.models.sources import open_tokenizer
from penstock.tokenizer import Tokenizer

DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"
VOCAB = DATA / "tokenizers" / "llama.cpp-vocab"
TEXTS = [
    "", " ", "  ", "\n", "Hello world", " Hello  world ", "It's 12345 o'clock, WE'LL see.",
    "línea única: naïve façade",
    "日本語のテキスト 🙂👩‍👩‍👧 العربية",
    "x = {\n    'a': [1, 2],\n}\n\n\n",
    "<s>", "a<s>b</s> c", "<unk>", "tabs\tand\r\nreturns", "\u00e9 e\u0301",
]  # fmt: skip


def vectors(name: str) -> list[tuple[str, list[int]]]:
    stem = VOCAB / f"ggml-vocab-{name}.gguf"
    if not stem.parent.is_dir():
        pytest.skip(f"the shared data isn't at {DATA}")
    texts = Path(f"{stem}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    assert texts.pop() == ""
    lines = Path(f"{stem}.out").read_text().splitlines()
    return list(zip(texts, ([int(w) for w in line.split()] for line in lines), strict=True))


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def write_byte_level(tokenizer: Tokenizer, path: Path, pre: str, **ids: int) -> None:
    """As a converter writes a tokenizer.json."""
    backend: Any = tokenizer._backend
    data = json.loads(backend._tokenizer.to_str())
    added = {t["id"]: t for t in data["added_tokens"]}
    words = {i: token for token, i in data["model"]["vocab"].items()}
    words |= {i: t["content"] for i, t in added.items()}
    tokens, types = [], []
    for i in range(max(words) + 1):
        tokens.append(words.get(i, f"[PAD{i}]"))
        kind = TokenType.NORMAL if i in words else TokenType.UNUSED
        if i in added:
            kind = TokenType.CONTROL if added[i]["special"] else TokenType.USER_DEFINED
        types.append(kind)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in data["model"]["merges"]])
    for name, value in ids.items():
        getattr(writer, f"add_{name}_token_id")(value)
    finish(writer)


def write_sentencepiece(model: Path, path: Path, *, spaced: bool = True) -> None:
    """As a converter writes a tokenizer.model."""
    sentencepiece = pytest.importorskip("sentencepiece")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ids = range(processor.vocab_size())
    kinds = {
        TokenType.UNKNOWN: processor.is_unknown, TokenType.CONTROL: processor.is_control,
        TokenType.UNUSED: processor.is_unused, TokenType.BYTE: processor.is_byte,
    }  # fmt: skip
    types = [next((k for k, test in kinds.items() if test(i)), TokenType.NORMAL) for i in ids]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([processor.id_to_piece(i) for i in ids])
    writer.add_token_scores([processor.get_score(i) for i in ids])
    writer.add_token_types(types)
    writer.add_bos_token_id(processor.bos_id())
    writer.add_eos_token_id(processor.eos_id())
    writer.add_unk_token_id(processor.unk_id())
    if not spaced:
        writer.add_add_space_prefix(False)
    finish(writer)


def folder(source: str, files: list[str], target: Path, **config: Any) -> Tokenizer:
    if not (DATA / source).is_dir():
        pytest.skip(f"the shared data has no {source}")
    target.mkdir()
    for file in files:
        shutil.copy(DATA / source / file, target / Path(file).name.split(".model")[0])
        if ".model" in file:
            (target / Path(file).name.split(".model")[0]).rename(target / "tokenizer.model")
    if config:
        (target / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_folder(target)


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm", "phi-3"])
def test_published_files_give_the_published_vectors(name: str) -> None:
    cases = vectors(name)
    assert len(cases) == 46
    tokenizer = gguf_tokenizer(VOCAB / f"ggml-vocab-{name}.gguf")
    got = {text: tokenizer.encode(text, add_special_tokens=False) for text, _ in cases}
    assert got == dict(cases)
    assert all(tokenizer.decode(ids) == text for text, ids in cases)


BYTE_LEVEL: dict[str, tuple[str, list[str], str, dict[str, int], dict[str, Any]]] = {
    "gpt-2": ("tokenizers/gpt2-hf", ["tokenizer.json"], "gpt-2",
              {"bos": 50256, "eos": 50256}, {"tokenizer_class": "GPT2Tokenizer"}),
    "qwen2": ("tokenizers/qwen2.5", ["vocab.json", "merges.txt", "tokenizer_config.json"], "qwen2",
              {"bos": 151643, "eos": 151645, "pad": 151643}, {}),
    "llama-bpe": ("tokenizers/llama3", ["tokenizer.model"], "llama-bpe",
                  {"bos": 128000, "eos": 128001}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_byte_level_is_the_same_as_its_files(name: str, tmp_path: Path) -> None:
    source, files, pre, ids, config = BYTE_LEVEL[name]
    expected = folder(source, files, tmp_path / "hf", **config)
    write_byte_level(expected, tmp_path / "m.gguf", pre, **ids)
    tokenizer = gguf_tokenizer(tmp_path / "m.gguf")
    cases = vectors(name)
    got = {text: tokenizer.encode(text, add_special_tokens=False) for text, _ in cases}
    assert got == dict(cases)
    special = [expected.id_to_token(i) or "" for i in sorted(expected.special_ids)]
    same(tokenizer, expected, [*(t for t, _ in cases), *(f"a{s} b" for s in special)])
    assert tokenizer.special_ids == expected.special_ids
    assert tokenizer.vocab_size == expected.vocab_size


def same(tokenizer: Tokenizer, expected: Tokenizer, texts: list[str]) -> None:
    for text in [*texts, *TEXTS]:
        ids = expected.encode(text)
        assert tokenizer.encode(text) == ids, text
        for skip in (True, False):
            back = tokenizer.decode(ids, skip_special_tokens=skip)
            assert back == expected.decode(ids, skip_special_tokens=skip)
    for name in ("bos_token_id", "eos_token_id"):
        if getattr(expected, name) is not None:
            assert getattr(tokenizer, name) == getattr(expected, name)


SENTENCEPIECE = [
    "llama2/tokenizer.model", "mistral/tokenizer.model.v1",
    "mistral/mistral_instruct_tokenizer_240323.model.v3",
]  # fmt: skip


@pytest.mark.parametrize("file", SENTENCEPIECE)
def test_sentencepiece_is_the_same_as_its_model(file: str, tmp_path: Path) -> None:
    model = DATA / "tokenizers" / file
    write_sentencepiece(model, tmp_path / "m.gguf") if model.exists() else pytest.skip(str(model))
    expected = folder(f"tokenizers/{file.split('/', 1)[0]}", [Path(file).name], tmp_path / "hf")
    tokenizer = gguf_tokenizer(tmp_path / "m.gguf")
    same(tokenizer, expected, [text for text, _ in vectors("llama-spm")])
    assert tokenizer.special_ids == expected.special_ids
    assert tokenizer.strip_leading_space
    assert tokenizer.unk_token_id == expected.unk_token_id == 0


def test_no_space_before_the_text(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    model = DATA / "tokenizers" / "llama2" / "tokenizer.model"
    if not model.exists():
        pytest.skip(str(model))
    write_sentencepiece(model, tmp_path / "m.gguf", spaced=False)
    tokenizer = gguf_tokenizer(tmp_path / "m.gguf")
    bare = model.read_bytes() + b"\x1a\x02\x18\x00"  # normalizer_spec: add_dummy_prefix false
    processor = sentencepiece.SentencePieceProcessor(model_proto=bare)
    assert not tokenizer.strip_leading_space
    for text, _ in vectors("llama-spm"):
        ids = processor.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == text


def test_stories(tmp_path: Path) -> None:
    hf = DATA / "models" / "stories260K" / "hf"
    if not hf.is_dir():
        pytest.skip(str(hf))
    expected = Tokenizer.from_folder(hf)
    raw = json.loads((hf / "tokenizer.json").read_text())["model"]
    tokens = sorted(raw["vocab"], key=raw["vocab"].__getitem__)
    write(tmp_path / "m.gguf", tokens=tokens, scores=scores_of(raw), token_type=types_of(tokens))
    tokenizer = gguf_tokenizer(tmp_path / "m.gguf")
    story = (hf.parent / "expected_greedy_200steps.txt").read_text()
    same(tokenizer, expected, [story])


def write(path: Path, model: str = "llama", **changes: Any) -> None:
    """A small vocabulary; a value of None leaves its key out."""
    values: dict[str, Any] = {
        "tokens": ["<unk>", "<s>", "</s>", "▁", "a", "b", "ab"],
        "scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -1.5],
        "token_type": [2, 3, 3, 1, 1, 1, 1],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    } | changes
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(model)
    for key, value in values.items():
        name = key if key.startswith("tokenizer.") else f"tokenizer.ggml.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    finish(writer)


BYTES = {"tokens": ["a", "b", "ab", "1", "2", "12", "<|x|>"], "token_type": [1] * 6 + [3]}
BPE: dict[str, Any] = {
    "model": "gpt2", **BYTES, "scores": None, "pre": "gpt-2", "merges": ["a b", "1 2"],
    "bos_token_id": None, "eos_token_id": 6, "unknown_token_id": None,
}  # fmt: skip


def test_digits_stand_alone_where_the_name_says_so(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", **BPE)
    write(tmp_path / "b.gguf", **{**BPE, "pre": "smollm"})
    together, alone = (gguf_tokenizer(tmp_path / f"{n}.gguf") for n in "ab")
    assert together.encode("ab12") == [2, 5]
    assert alone.encode("ab12") == [2, 3, 4]


@pytest.mark.parametrize(
    ("changes", "ids"),
    [({}, [1, 3, 6]), ({"add_bos_token": False}, [3, 6]), ({"add_eos_token": True}, [1, 3, 6, 2])],
)
def test_what_goes_around_a_text(changes: dict[str, Any], ids: list[int], tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", **changes)
    assert gguf_tokenizer(tmp_path / "m.gguf").encode("ab") == ids


def test_chat_templates(tmp_path: Path) -> None:
    text = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    write(
        tmp_path / "m.gguf",
        **{"tokenizer.chat_template": text, "tokenizer.chat_template.tool_use": "{{ tools }}"},
    )
    tokenizer = open_tokenizer(tmp_path / "m.gguf")
    assert tokenizer.chat_template == text
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}]) == "<s>ab</s>"
    assert tokenizer.apply_chat_template([], tools=[]) == "[]"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"model": "rwkv"}, r"tokenizer\.ggml\.model is 'rwkv', which isn't built"),
    "pre": ({**BPE, "pre": "llama-x"}, r"splitting words 'llama-x' \(tokenizer\.ggml\.pre\)"),
    "no pre": ({**BPE, "pre": None}, "doesn't say how words are split"),
    "merges": ({**BPE, "merges": ["a b", "ab"]}, r"merge 'ab' isn't two pieces"),
    "merge of nothing": ({**BPE, "merges": ["a x"]}, "7 tokens and 1 merges don't make a BPE"),
    "no tokens": ({"tokens": None}, "has no tokenizer.ggml.tokens"),
    "twice": ({"tokens": ["<unk>", "<s>", "</s>", "a", "a", "b", "ab"]}, "'a' is there twice"),
    "scores": ({"scores": [0.0]}, r"scores has 1 values for 7 tokens"),
    "types": ({"token_type": [1] * 8}, r"token_type has 8 values for 7 tokens"),
    "ids": ({"eos_token_id": 7}, "eos_token_id is 7, but there are 7 tokens"),
    "no bos": ({"bos_token_id": None}, "should have its bos_token, but there is no id"),
    "text": ({"tokens": [1, 2]}, "tokens has values of another type"),
    "unused": (
        {"token_type": [5, 3, 3, 1, 1, 1, 1]},
        "unknown token, '<unk>', is marked as unused",
    ),
    "spaces": ({"remove_extra_whitespaces": True}, "drops repeated white space"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_metadata_is_named(name: str, tmp_path: Path) -> None:
    changes, said = WRONG[name]
    write(tmp_path / "m.gguf", **changes)
    with pytest.raises(TokenizerError, match=rf"(?s){said}.*tokenizer=…"):
        gguf_tokenizer(tmp_path / "m.gguf")


def test_more_tokens_than_rows(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    with pytest.raises(TokenizerError, match=r"can produce the id 6 \('ab'\).* has 6 ids"):
        open_tokenizer(tmp_path / "m.gguf", vocab_size=6)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("deepseek-v3", "ab 12345 .x\u4f60", ["ab", " ", "123", "45", " .", "x", "\u4f60"]),
        ("deepseek-llm", "Ab 123 .x\n", ["Ab", " ", "1", "2", "3", " .", "x", "\n"]),
        ("glm4", "it's 12345", ["it", "'s", " ", "123", "45"]),
        ("qwen35", "It's e\u0301t\u0301 12", ["It", "'s", " e\u0301t\u0301", " ", "1", "2"]),
        ("qwen2", "It's e\u0301t 12", ["It", "'s", " e", "\u0301t", " ", "1", "2"]),
    ],
)
def test_words_by_hand(name: str, text: str, words: list[str]) -> None:
    """By hand, from their tokenizer.json's patterns; byte-level letters are turned back."""
    rule = word_rule(name)
    assert rule is not None
    split = rule.split(add_prefix_space=False)
    found = [text[a:b] for _, (a, b) in split.pre_tokenize_str(text)]
    assert found == words
    assert word_rule("kimi-k2") is None
