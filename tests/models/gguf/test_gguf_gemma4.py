"""Gemma 4 from GGUF: its vocabulary, what it is refused for, and the other forms of its tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_writing import write_model, write_vocab
from test_gguf_llm import STORIES, needs_stories
from test_gguf_models import as_checkpoint, compare, logits, make, matrices, whole
from test_gguf_tokenizer import TEXTS
from torch import Tensor
from transformers import GemmaTokenizer

from penstock.errors import UnsupportedModelError
from penstock.models import load_model
from penstock.models.gguf.architectures import ARCHITECTURES
from penstock.models.gguf.container import Container, read_container
from penstock.models.gguf.metadata import Metadata
from penstock.models.gguf.source import GgufSource
from penstock.models.gguf.tokenizer import gguf_tokenizer
from penstock.quant import Codes

SIZES = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
AT = "gemma4.attention."


def gemma4_vocab(writer: gguf.GGUFWriter, tokens: list[str], merges: list[str]) -> None:
    """As the converter writes it: what tells turns apart is control, what tells tools isn't."""
    kinds = [6 if len(t) == 6 and t.startswith("<0x") else 1 for t in tokens]
    for i, token in enumerate(tokens):
        if token in ("<unk>", "<s>", "</s>", "<turn|>"):
            kinds[i] = 3
        if token == "<|tool_response>":
            kinds[i] = 4
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(tokens)
    writer.add_token_scores([-1000.0] * len(tokens))
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(True)


@needs_stories
def test_its_vocabulary_is_that_of_its_own_tokenizer(tmp_path: Path) -> None:
    raw = json.loads((STORIES / "hf" / "tokenizer.json").read_text())["model"]
    tokens = sorted(raw["vocab"], key=raw["vocab"].__getitem__)
    pairs = [tuple(m.split(" ") if isinstance(m, str) else m) for m in raw["merges"]]
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "gemma4")
    gemma4_vocab(writer, tokens, [" ".join(pair) for pair in pairs])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>", "mask_token": "<unk>"}
    theirs = GemmaTokenizer(vocab=raw["vocab"], merges=pairs, **names)
    ours = gguf_tokenizer(tmp_path / "m.gguf")
    story = (STORIES / "expected_greedy_200steps.txt").read_text(encoding="utf-8")
    for text in [story, *TEXTS]:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.encode(text) == [1, *ids]
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


def test_what_ends_a_text(tmp_path: Path) -> None:
    def vocab(writer: gguf.GGUFWriter, size: int) -> None:
        tokens = ["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(3, size))]
        tokens[7], tokens[8], tokens[9] = "<|tool_response>", "<turn|>", "<end_of_turn>"
        gemma4_vocab(writer, tokens, [])

    write_model(make("gemma4"), tmp_path / "m.gguf", whole(Kind.F32), vocab=vocab)
    assert load_model(tmp_path / "m.gguf").eos_token_ids == (2, 7, 8)


@pytest.mark.parametrize("name", ["gemma4", "gemma4-mixed", "gemma4-inputs"])
@pytest.mark.parametrize("kind", [Kind.BF16, Kind.Q8_0, Kind.Q5_1], ids=lambda kind: kind.name)
def test_matrices(name: str, kind: Kind, tmp_path: Path) -> None:
    """Every value is the file's; the table of inputs, and halves of one tensor of experts, too."""
    more = {"hidden_size_per_layer_input": 32} if name == "gemma4-inputs" else {}
    model = make(name, **SIZES, **more)
    back = write_model(model, tmp_path / "m.gguf", matrices(kind))
    source = GgufSource(tmp_path / "m.gguf")
    assert source.names() == sorted(back)
    for stem, want in back.items():
        found = source.read(stem)
        assert source.shape(stem) == tuple(want.shape)
        assert torch.equal(found.dequantize() if isinstance(found, Codes) else found.float(), want)
    folder = as_checkpoint(model, back, tmp_path / "hf")
    assert torch.equal(logits(tmp_path / "m.gguf", "float32"), logits(folder, "float32"))


@pytest.mark.parametrize("name", ["gemma4", "gemma4-mixed", "gemma4-inputs"])
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_K], ids=lambda kind: kind.name)
def test_what_schemes_hold_is_kept(
    name: str, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal in K-quants; else as far from float32 as bfloat16 is, where scores aren't scaled."""
    monkeypatch.setattr("penstock.nn.linear._ROWS", 100)  # of tables, at once
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 256)
    more = {"hidden_size_per_layer_input": 256} if name == "gemma4-inputs" else {}
    model = make(name, **sizes, head_dim=64, global_head_dim=128, **more)
    back = write_model(model, tmp_path / "m.gguf", matrices(kind))
    folder = as_checkpoint(model, back, tmp_path / "hf")
    held = load_model(tmp_path / "m.gguf").model.formats
    assert held.matrix.name == {Kind.Q8_0: "w8a8-g32-blocks", Kind.Q4_K: "q4_k-a8"}[kind]
    if kind is Kind.Q4_K:
        compare(tmp_path / "m.gguf", folder, kind)
        return
    exact = logits(folder, "float32")
    got, plain = logits(tmp_path / "m.gguf", "auto", quantization="a16"), logits(folder, "bfloat16")
    apart, usual = ((x - exact).abs().amax(-1).median() for x in (got, plain))
    assert apart < 1.5 * usual


def test_gate_and_up_of_experts_apart(tmp_path: Path) -> None:
    """In tensors of their own, as llama.cpp takes them, too."""
    model = make("gemma4-mixed")
    write_model(model, tmp_path / "one.gguf", whole(Kind.F32))
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate_proj", "up_proj"), tensor.chunk(2, 1), strict=True):
                state[name.replace("gate_up_proj", f"{part}.weight")] = half.contiguous()
        else:
            state[name] = tensor
    model.state_dict = lambda: state
    write_model(model, tmp_path / "two.gguf", whole(Kind.F32))
    one, two = (logits(tmp_path / f"{n}.gguf", "float32") for n in ("one", "two"))
    assert torch.equal(one, two)


def test_keys_that_no_layer_reads(tmp_path: Path) -> None:
    """Files have them for layers that read another's."""
    model = make("gemma4-inputs")
    write_model(model, tmp_path / "m.gguf", whole(Kind.F32))
    state = dict(model.state_dict())
    for part in ("k_proj", "v_proj", "k_norm"):
        at = "model.layers.{}.self_attn." + part + ".weight"
        state[at.format(4)] = state[at.format(0)]
    model.state_dict = lambda: state
    write_model(model, tmp_path / "more.gguf", whole(Kind.F32))
    plain, more = (logits(tmp_path / f"{n}.gguf", "float32") for n in ("m", "more"))
    assert torch.equal(plain, more)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Container]:
    """One of each kind."""
    folder, found = tmp_path_factory.mktemp("gemma4"), {}
    for name in ("gemma4", "gemma4-inputs"):
        write_model(make(name), folder / f"{name}.gguf", whole(Kind.F32), vocab=write_vocab)
        found[name] = read_container(folder / f"{name}.gguf")
    return found


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma4", {f"{AT}head_count_kv": [2, 1, 1, 1]}, "the same for all layers that slide"),
        ("gemma4", {f"{AT}head_count_kv": [2, 1]}, "one for each of 4 layers"),
        ("gemma4", {f"{AT}head_count_kv": 0}, "a whole number above 0"),
        ("gemma4-inputs", {f"{AT}head_count_kv": [2, 1] * 3}, "all have matrices of values"),
        ("gemma4-inputs", {"gemma4.feed_forward_length": [100] * 5 + [200]}, "in the last 3 of 6"),
        ("gemma4", {f"{AT}value_length": 24}, "the key's length, 40"),
        ("gemma4", {f"{AT}scale": 0.5}, "attention.scale must be 1"),
        ("gemma4", {f"{AT}key_length_swa": None}, "has no gemma4.attention.key_length_swa"),
        ("gemma4", {"gemma4.embedding_length_per_layer_input": 8}, "0 without per_layer_token_emb"),
        ("gemma4", {"gemma4.rope.dimension_count": 10}, "the length of a head, 40"),
        ("gemma4", {"gemma4.rope.dimension_count_swa": 12}, "the length of a head, 24"),
        (
            "gemma4",
            {"gemma4.rope.scaling.type": "yarn", "gemma4.rope.scaling.factor": 4.0},
            "none for this family",
        ),
    ],
)
def test_what_is_refused(
    name: str, changes: dict[str, Any], message: str, files: dict[str, Container]
) -> None:
    container = files[name]
    values = {k: v for k, v in (dict(container.metadata) | changes).items() if v is not None}
    with pytest.raises(UnsupportedModelError, match=message):
        ARCHITECTURES["gemma4"].read_config(Metadata(values, "a.gguf"), container)


@pytest.mark.parametrize(
    ("divisors", "message"),
    [
        ([1.0, 1e30] * 10, "must be 1 for the first pairs, and 1e30 for others"),
        ([1.0] * 5 + [2.0] * 15, "must be 1 for the first pairs"),
        ([1e30] * 20, "must be 1 for the first pairs"),
        ([1.0] * 12, r"must be F32 \[20\]"),
        (None, "has no rope_freqs.weight, which says"),
    ],
)
def test_pairs_that_turn(
    divisors: list[float] | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {} if divisors is None else {"rope_freqs.weight": np.array(divisors, np.float32)}
    monkeypatch.setattr("gguf_writing.rope_gemma4", lambda c: tensors)
    write_model(make("gemma4"), tmp_path / "m.gguf", whole(Kind.F32))
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(tmp_path / "m.gguf")


def test_one_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    """As its config.json is."""

    def vocab(writer: gguf.GGUFWriter, size: int) -> None:
        write_vocab(writer, size)
        writer.add_causal_attention(False)

    write_model(make("gemma4"), tmp_path / "m.gguf", whole(Kind.F32), vocab=vocab)
    with pytest.raises(UnsupportedModelError, match="use_bidirectional_attention='all'"):
        load_model(tmp_path / "m.gguf")
