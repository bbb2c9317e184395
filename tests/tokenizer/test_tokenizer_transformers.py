"""Against transformers on the same folders."""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from penstock.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")

TEXTS = [
    "",
    "Hello world",
    "Don't we'll I'VE they're 12345 3.14 1,000,000",
    "emoji 🦙🇩🇪👩\u200d👩\u200d👧 done",
    "日本語のテキスト、中文文本 한국어 ไทย",
    "tabs\tand   runs \n\n\n of   space \r\n end   ",
    "e\u0301 decomposed, é composed, ﬁ ligature, İ",
    "def f(x):\n    return {'a': [1, 2]}  # comment\n",
    "control \x00\x01\x7f and \ufffd and \ufeff and nbsp\u00a0",
    "العربية עברית नमस्ते",
    "a" * 300 + "_" * 77 + "=" * 40,
]
SPECIAL_TEXTS = {
    "gpt2": ["a<|endoftext|>b", "<|endoftext|>", "x <|endoftext|> y"],
    "qwen2.5": [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        "<tool_call>\n{}\n</tool_call>",
        " <|im_end|> ",
    ],
    "stories260K": ["a</s>", "<s><s>"],
    "llama2-no-legacy": ["a</s>b", "<s>Hello", "x <s> y </s>\n z"],
}
# transformers 5 rebuilds a Llama tokenizer with its own Metaspace pre-tokenizer, which drops one
# leading space (SentencePiece and llama.cpp keep it), so texts here start with something else.
AUTO = ["stories260K", "gpt2", "gpt2-slow", "qwen2.5", "llama2-no-legacy"]
# file → control pieces, which are cut out of the text
SENTENCEPIECE_FILES = {
    "llama2/tokenizer.model": ["<s>", "</s>"],
    "mistral/tokenizer.model.v1": ["</s>"],
    "mistral/mistral_instruct_tokenizer_240216.model.v2": ["[INST]", "[/INST]", "[TOOL_CALLS]"],
    "mistral/mistral_instruct_tokenizer_240323.model.v3": ["[INST]", "[IMG]", "</s>"],
}


@pytest.fixture(scope="module")
def reference_of(folder_of: Callable[[str], Path]) -> Callable[[str], Any]:
    made: dict[str, Any] = {}

    def load(name: str) -> Any:
        if name not in made:
            made[name] = transformers.AutoTokenizer.from_pretrained(folder_of(name))
        return made[name]

    return load


@pytest.mark.parametrize("name", AUTO)
def test_encodes_and_decodes_as_auto_tokenizer(
    name: str, tokenizer_of: Callable[[str], Tokenizer], reference_of: Callable[[str], Any]
) -> None:
    tokenizer, reference = tokenizer_of(name), reference_of(name)
    for text in TEXTS + SPECIAL_TEXTS.get(name, []):
        if name == "llama2-no-legacy" and "  " in text:
            continue  # transformers 5.23 ignores the model's scores: see the next test
        ids = reference.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        if name != "llama2-no-legacy":  # transformers 5 adds BOS only if the folder asks for it
            assert tokenizer.encode(text) == reference.encode(text), text
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(
                ids, skip_special_tokens=skip
            ), text


@pytest.mark.parametrize("file", sorted(SENTENCEPIECE_FILES))
def test_sentencepiece_models_encode_as_sentencepiece(
    file: str, shared_data: Path, tmp_path: Path
) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    path = shared_data / "tokenizers" / file
    shutil.copy(path, tmp_path / "tokenizer.model")
    tokenizer = Tokenizer.from_folder(tmp_path)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert tokenizer.vocab_size == processor.vocab_size()
    for text in [*TEXTS, " a", "  two", "x\n    return"]:
        ids = processor.encode(text)
        assert tokenizer.encode(text) == [1, *ids], text
        assert tokenizer.decode(ids) == text == processor.decode(ids)
    for control in SENTENCEPIECE_FILES[file]:
        got = tokenizer.encode(f"a{control}b", add_special_tokens=False)
        cut = processor.piece_to_id(control)
        expected = [*processor.encode("a"), cut, *processor.encode("b")]
        assert got == expected


@pytest.mark.parametrize("name", AUTO)
def test_agrees_on_special_tokens_and_size(
    name: str, tokenizer_of: Callable[[str], Tokenizer], reference_of: Callable[[str], Any]
) -> None:
    tokenizer, reference = tokenizer_of(name), reference_of(name)
    assert tokenizer.bos_token_id == reference.bos_token_id
    assert tokenizer.eos_token_id == reference.eos_token_id
    assert tokenizer.vocab_size == max(reference.get_vocab().values()) + 1
    # transformers counts only tokens with a role; the vocabulary's own flags name more.
    assert tokenizer.special_ids >= set(reference.all_special_ids)
    assert tokenizer.chat_template == reference.chat_template


def test_tokenizer_json_is_taken_as_written(
    folder_of: Callable[[str], Path], tokenizer_of: Callable[[str], Tokenizer]
) -> None:
    """The generic fast class doesn't rebuild the file: equal also with leading spaces."""
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder_of("stories260K"))
    for text in [*TEXTS, " a", "  a", "<s>Hello", "a <s> b", " <s>"]:
        assert tokenizer_of("stories260K").encode(text) == reference.encode(text), text


@pytest.mark.parametrize("name", ["gpt2", "qwen2.5"])
def test_random_ids_decode_as_in_transformers(
    name: str, tokenizer_of: Callable[[str], Tokenizer], reference_of: Callable[[str], Any]
) -> None:
    """Byte-level: mostly invalid UTF-8, and the replacement characters agree too."""
    tokenizer, reference = tokenizer_of(name), reference_of(name)
    draw = random.Random(0)
    for _ in range(200):
        ids = [draw.randrange(min(tokenizer.vocab_size, 600)) for _ in range(draw.randrange(30))]
        ids += [draw.randrange(tokenizer.vocab_size) for _ in range(5)]
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_random_sentencepiece_ids_decode_as_in_transformers(
    tokenizer_of: Callable[[str], Tokenizer], reference_of: Callable[[str], Any]
) -> None:
    """Byte fallback: equal where bytes are valid UTF-8 (transformers spoils whole runs if not)."""
    tokenizer, reference = tokenizer_of("llama2-no-legacy"), reference_of("llama2-no-legacy")
    draw = random.Random(0)
    for _ in range(200):
        ids: list[int] = []
        for _ in range(draw.randrange(12)):
            ids += [3 + byte for byte in draw.choice("🦙é日a\n").encode()]
            ids += [draw.randrange(259, tokenizer.vocab_size)] * draw.randrange(3)
            ids += [draw.randrange(3)] * draw.randrange(2)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(
                ids, skip_special_tokens=skip
            )


def test_llama2_chat_prompt_is_metas(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    """Without a word from the folder, what follows a special token is a text of its own."""
    # Meta's own reference encodes "[INST] hi [/INST]" alone and puts BOS before it.
    ids = tokenizer_of("llama2").encode("<s>[INST] hi [/INST]", add_special_tokens=False)
    assert ids == [1, 518, 25580, 29962, 7251, 518, 29914, 25580, 29962]
    ids = tokenizer_of("llama2-no-legacy").encode("<s>[INST] hi", add_special_tokens=False)
    assert ids == [1, 29961, 25580, 29962, 7251]


# --- small folders, as others have saved them -----------------------------------------------------

SPECIAL = ["<s>", "</s>", "<|im_end|>", "[gMASK]", "<sop>"]
PLAIN = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "additional_special_tokens": SPECIAL[2:],
}
SMALL_TEXTS = ["Hello world", " two  spaces ", "a<s>  b </s> c<|im_end|>  d", "é <think> [PAD] x"]


def byte_level(template: str | None = None) -> tokenizers.Tokenizer:
    """A tokenizer of single bytes and a few merges, with a post-processor where one is given."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("\u0120", "w"), ("\u0120", "a")]
    words = [*alphabet, *("".join(merge) for merge in merges)]
    made = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    if template is not None:
        known = [(token, made.token_to_id(token)) for token in SPECIAL]
        made.post_processor = processors.TemplateProcessing(template, special_tokens=known)
    return made


def write_small(folder: Path, config: dict[str, Any], **files: Any) -> Path:
    """A folder of a `tokenizer_config.json` and of `files`: name without its dots → content."""
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        data = content if isinstance(content, bytes | str) else json.dumps(content)
        data = data if isinstance(data, bytes) else data.encode()
        (folder / name.replace("__", ".")).write_bytes(data)
    return folder


def hold_to_transformers(folder: Path) -> None:
    """Ids, texts and special tokens, with and without special ones."""
    want, got = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    for text in SMALL_TEXTS:
        for adds in (True, False):
            ids = want.encode(text, add_special_tokens=adds)
            assert got.encode(text, add_special_tokens=adds) == ids, text
            for skip in (True, False):
                assert got.decode(ids, skip_special_tokens=skip) == want.decode(
                    ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )
    assert got.special_ids == set(want.all_special_ids)


@pytest.mark.parametrize("template", ["<s> $A", "[gMASK] <sop> $A", "[gMASK] <s> $A </s>"])
@pytest.mark.parametrize(
    "flags",
    [
        {"add_eos_token": False},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
    ],
)
def test_a_post_processor_is_taken_as_written(
    template: str, flags: dict[str, bool], tmp_path: Path
) -> None:
    files = {"tokenizer__json": byte_level(template).to_str()}
    hold_to_transformers(write_small(tmp_path, {**PLAIN, **flags}, **files))


def test_a_named_token_keeps_its_flags(tmp_path: Path) -> None:
    """It isn't marked as special where it is added; that it takes spaces stays."""
    made = byte_level()
    token = tokenizers.AddedToken("<x>", lstrip=True, rstrip=True, normalized=False)
    made.add_tokens([token])
    folder = write_small(tmp_path, {**PLAIN, "eos_token": "<x>"}, tokenizer__json=made.to_str())
    want, got = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    assert got.encode("a  <x>  b") == want.encode("a  <x>  b") == [64, 265, 65]
    assert 265 in got.special_ids


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_gpt2s_prefix_space_beside_tokenizer_json(add: bool, own: bool, tmp_path: Path) -> None:
    made = byte_level()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=own)
    config = {**PLAIN, "tokenizer_class": "GPT2Tokenizer", "add_prefix_space": add}
    folder = write_small(tmp_path, config, tokenizer__json=made.to_str())
    want = transformers.AutoTokenizer.from_pretrained(folder)
    for text in SMALL_TEXTS[:2]:
        assert Tokenizer.from_folder(folder).encode(text) == want.encode(text)


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_added_tokens_json_beside_vocab_and_merges(kind: str, tmp_path: Path) -> None:
    saved = json.loads(byte_level().to_str())["model"]
    vocabulary = saved["vocab"] | {"<|endoftext|>": len(saved["vocab"])}
    size = len(vocabulary)
    merges = [" ".join(m) if isinstance(m, list) else m for m in saved["merges"]]
    folder = write_small(
        tmp_path,
        {"tokenizer_class": kind, "unk_token": "<|endoftext|>"},
        vocab__json=vocabulary,
        merges__txt="#version: 0.2\n" + "\n".join(merges) + "\n",
        added_tokens__json={"<|im_end|>": size, "<think>": size + 1, "[PAD]": size + 2},
        special_tokens_map__json={"eos_token": "<|im_end|>", "pad_token": "[PAD]"},
    )
    hold_to_transformers(folder)
    got = Tokenizer.from_folder(folder)
    assert got.encode("<think>") == [size + 1]
    assert {size, size + 2} <= got.special_ids and size + 1 not in got.special_ids


def sentencepiece_model() -> bytes:
    sentencepiece = pytest.importorskip("sentencepiece")
    lines = ["Hello world a b c d x two spaces", *(" ".join(chr(97 + i)) for i in range(26))]
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 9),
        model_writer=made,
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
    )
    return made.getvalue()


@pytest.mark.parametrize("space", [None, True, False])
def test_added_tokens_json_and_prefix_space_of_sentencepiece(
    space: bool | None, tmp_path: Path
) -> None:
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
        "legacy": False,
    }
    config |= {} if space is None else {"add_prefix_space": space}
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    model = sentencepiece_model()
    folder = write_small(tmp_path, config, tokenizer__model=model)
    size = Tokenizer.from_folder(folder).vocab_size
    added = {"[PAD]": size, "<|im_end|>": size + 1}
    (folder / "added_tokens.json").write_text(json.dumps(added))
    want, got = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    assert got.strip_leading_space == (space is not False)
    for text in ("Hello world", "x [PAD] two", "a<|im_end|>b"):
        ids = want.encode(text)
        assert got.encode(text) == ids
        assert got.decode(ids) == want.decode(ids, skip_special_tokens=True)
    assert got.eos_token_id == size + 1 and size + 1 in got.special_ids


def test_a_models_own_named_tokens_are_template_variables(tmp_path: Path) -> None:
    template = "{{ image_token }}|{{ boi_token }}|{{ eoi_token }}|{{ eos_token }}"
    config = PLAIN | {"image_token": "<sop>", "eoi_token": "[gMASK]"}
    config = {k: v for k, v in config.items() if k != "additional_special_tokens"}
    config |= {"extra_special_tokens": {"boi_token": "<|im_end|>"}, "chat_template": template}
    folder = write_small(tmp_path, config, tokenizer__json=byte_level().to_str())
    want, got = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    talk = [{"role": "user", "content": "hi"}]
    text = got.apply_chat_template(talk)
    assert text == "<sop>|<|im_end|>|[gMASK]|</s>" == want.apply_chat_template(talk, tokenize=False)
