import json
from pathlib import Path

import numpy as np
import pytest
from recipes.corpus import Corpus, Examples, PackWriter, Stream
from recipes.dialogues import read_dialogues
from recipes.prepare import prepare

from penstock.bench.dialogue import read_conversations
from penstock.errors import ConfigError


@pytest.fixture(scope="module")
def packed(made_up_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed")
    table = prepare(made_up_data, out, vocab_size=512)
    assert "finetune.zip" in table
    return out


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 65_536, 1000).astype(np.uint16)
    mask = rng.random(1000) < 0.5
    writer = PackWriter(tmp_path / "finetune.zip")
    writer.add_stream("a", Stream(tokens, 1234))
    writer.add_examples("b", Examples(tokens, mask, np.array([0, 300, 1000])))
    assert not (tmp_path / "finetune.zip").exists()
    assert writer.close() == (tmp_path / "finetune.zip").stat().st_size
    corpus = Corpus(tmp_path)
    assert np.array_equal(corpus.stream("a").tokens, tokens)
    assert corpus.stream("a").bytes == 1234
    found = corpus.examples("b")
    assert np.array_equal(found.tokens, tokens)
    assert np.array_equal(found.mask, mask)
    assert found.offsets.tolist() == [0, 300, 1000]
    assert corpus.names("streams") == ["a"]


def test_a_missing_pack_and_a_missing_member_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"python -m recipes prepare"):
        Corpus(tmp_path)
    PackWriter(tmp_path / "finetune.zip").close()
    with pytest.raises(ConfigError, match=r"neither"):
        Corpus(tmp_path)
    writer = PackWriter(tmp_path / "finetune.zip")
    writer.add_text("tokenizer.json", "{}")
    writer.close()
    with pytest.raises(ConfigError, match=r"novels.*Is one of pretrain.zip"):
        Corpus(tmp_path).stream("novels")


def test_the_same_data_gives_the_same_bytes(
    made_up_data: Path, packed: Path, tmp_path: Path
) -> None:
    prepare(made_up_data, tmp_path, vocab_size=512)
    for name in ("pretrain.zip", "finetune.zip"):
        assert (tmp_path / name).read_bytes() == (packed / name).read_bytes()


def test_every_source_is_there(packed: Path) -> None:
    corpus = Corpus(packed)
    assert corpus.names("streams") == [
        *("novels", "science_fiction", "shakespeare", "short_stories", "tinystories", "verse"),
    ]
    assert corpus.names("examples") == ["instructions", "requests", "small_talk", "talk", "tools"]
    sizes = json.loads(corpus.text("manifest.json"))
    for name in corpus.names("streams"):
        assert sizes[name] == [len(corpus.stream(name).tokens), corpus.stream(name).bytes]


def test_nothing_held_out_is_trained_on(packed: Path) -> None:
    from tokenizers import Tokenizer

    corpus = Corpus(packed)
    tokenizer = Tokenizer.from_str(corpus.text("tokenizer.json"))
    for name in ("tinystories", "short_stories", "science_fiction", "shakespeare", "verse"):
        trained = tokenizer.decode(corpus.stream(name).tokens.tolist()).replace("\n", " ")
        held = corpus.text(f"held_out/{name}.txt").split("<|endoftext|>")
        assert held
        for document in held:
            middle = " ".join(document.split())[100:180]
            assert middle and middle not in trained, name


def test_held_out_services_are_in_no_training_dialogue(packed: Path, made_up_data: Path) -> None:
    corpus = Corpus(packed)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(corpus.text("tokenizer.json"))
    for kind in ("tools", "talk"):
        text = tokenizer.decode(corpus.examples(kind).tokens.tolist(), skip_special_tokens=False)
        assert "FindHome" in text or kind == "talk"
        assert "FindHotel" not in text
        assert "look for a hotel" not in text
    held = [c for c in read_dialogues(made_up_data) if c.held_out]
    assert any("Hotels_4" in c.services for c in held)
    assert any("Hotels_4" not in c.services for c in held)


def test_held_out_dialogues_are_what_penstock_eval_reads(packed: Path, tmp_path: Path) -> None:
    files = Corpus(packed).held_out(tmp_path)
    for name in ("dialogues", "unseen_services"):
        talks = read_conversations(files[f"{name}.jsonl"])
        assert all(talk.tools for talk in talks)
        calls = [m for talk in talks for m in talk.messages if m.get("tool_calls")]
        assert len(calls) == len(talks)
        text = files[f"{name}.txt"].read_text()
        assert text.count("<|endoftext|>") == len(talks)


def test_results_that_are_spoken_of_are_kept(made_up_data: Path) -> None:
    for talk in read_dialogues(made_up_data):
        if talk.kind == "tools":
            (result,) = (m["content"] for m in talk.messages if m["role"] == "tool")
            names = [entry["name"] for entry in json.loads(result)]
            said = talk.messages[-1]["content"]
            assert len(names) == 2  # the second of three isn't mentioned
            assert all(name in said for name in names)


def test_a_tool_is_a_json_schema(made_up_data: Path) -> None:
    talk = next(c for c in read_dialogues(made_up_data) if c.kind == "tools" and not c.held_out)
    assert talk.tools == [
        {
            "type": "function",
            "function": {
                "name": "FindHome",
                "description": "Find a home",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "city": {"type": "string", "description": "The city"},
                        "has_garden": {
                            "type": "string",
                            "description": "With a garden",
                            "enum": ["True", "False"],
                        },
                    },
                    "required": ["city"],
                },
            },
        }
    ]
