"""Checkpoints on disk: every way to be broken, and every way to be right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import Make, Sequence
from torch import Tensor

from penstock.errors import ModelNotFoundError, WeightsError
from penstock.models import Checkpoint
from penstock.models.load import load_model

Tensors = dict[str, Tensor]
Copy = Callable[[str], Path]
WEIGHTS = "model.safetensors"


@pytest.fixture
def copy(tiny: Make, tmp_path: Path) -> Copy:
    """A tiny checkpoint to spoil."""

    def make(name: str) -> Path:
        return Path(shutil.copytree(tiny(name).folder, tmp_path / name))

    return make


def change(folder: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / WEIGHTS)


def configure(folder: Path, **keys: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


Q = "model.layers.1.self_attn.q_proj.weight"

BROKEN: list[tuple[str, Callable[[Tensors], object], str]] = [
    ("extra tensor", lambda t: t.update(zeta=torch.zeros(2)), "1 of the .* no place .*: zeta"),
    ("extra layer", lambda t: t.update({Q.replace(".1.", ".7."): t[Q]}), r"no place .*layers\.7\."),
    ("bias of no bias", lambda t: t.update({"lm_head.bias": torch.zeros(320)}), "lm_head.bias"),
    (
        "missing part",
        lambda t: t.pop(Q),
        r"lacks 1 of the tensors.*attention\.qkv\.weight \(from .*q_proj",
    ),
    (
        "missing whole",
        lambda t: t.pop("model.norm.weight"),
        r"lacks 1 of the tensors .*norm\.weight",
    ),
    (
        "other shape",
        lambda t: t.update({Q: t[Q][:-1]}),
        "needs shape .*config.json and the",
    ),
    ("other width", lambda t: t.update({Q: t[Q][:, 1:]}), "don't fit together.*q_proj"),
    (
        "other type",
        lambda t: t.update({Q: t[Q].to(torch.int8)}),
        r"torch\.int8; .* need scales beside them",
    ),
    (
        "both layouts",
        lambda t: t.update({"model.layers.1.self_attn.qkv_proj.weight": t[Q].clone()}),
        "no place",
    ),
]


@pytest.mark.parametrize(
    ("edit", "message"), [pytest.param(e, m, id=what) for what, e, m in BROKEN]
)
def test_tensors_that_do_not_fit(
    copy: Copy, edit: Callable[[Tensors], object], message: str
) -> None:
    folder = copy("llama")
    change(folder, edit)
    with pytest.raises(WeightsError, match=message):
        load_model(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_cut_off_files(copy: Copy, keep: int) -> None:
    file = copy("llama") / WEIGHTS
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=rf"{WEIGHTS} \(\d+ bytes\) can't be read.*cut off"):
        load_model(file.parent)


def test_no_weights(copy: Copy) -> None:
    folder = copy("llama")
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelNotFoundError, match=r"no \*\.safetensors file.*pytorch_model\.bin"):
        load_model(folder)


def shard(folder: Path, count: int = 3) -> dict[str, str]:
    """Split the weights over files with an index, as big checkpoints are."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    where = {name: f"model-{i % count}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(where.values()):
        save_file({n: t for n, t in tensors.items() if where[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return where


def test_shards_with_an_index(tiny: Make, copy: Copy) -> None:
    case, folder = tiny("llama"), copy("llama")
    shard(folder)
    (folder / "consolidated.safetensors").write_bytes(b"another layout, which the index leaves out")
    got = Sequence(load_model(folder).model).feed(case.prompt)
    assert torch.equal(got, Sequence(case.load().model).feed(case.prompt))


def test_shards_without_an_index(copy: Copy) -> None:
    folder = copy("llama")
    shard(folder)
    (folder / "model.safetensors.index.json").unlink()
    load_model(folder)
    shutil.copy(folder / "model-0.safetensors", folder / "model-7.safetensors")
    with pytest.raises(WeightsError, match=r"is in model-0\.safetensors and in model-7"):
        load_model(folder)


def test_other_safetensors_beside_the_model(copy: Copy) -> None:
    folder = copy("llama")
    save_file({"lora": torch.zeros(1)}, folder / "adapter_model.safetensors")
    load_model(folder)


@pytest.mark.parametrize("kept", [("model-0", "model-1", "model-2"), ()])
def test_shards_of_an_earlier_save(tiny: Make, copy: Copy, kept: tuple[str, ...]) -> None:
    """transformers reads model.safetensors, whatever an index beside it names."""
    case, folder = tiny("llama"), copy("llama")
    whole = (folder / WEIGHTS).read_bytes()
    change(folder, lambda tensors: [t.zero_() for t in tensors.values()])
    shard(folder)
    for file in folder.glob("model-*.safetensors"):
        if file.stem not in kept:
            file.unlink()
    (folder / WEIGHTS).write_bytes(whole)
    got = Sequence(load_model(folder).model).feed(case.prompt)
    assert torch.equal(got, Sequence(case.load().model).feed(case.prompt))


def test_missing_shards(copy: Copy) -> None:
    folder = copy("llama")
    shard(folder)
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"names 3 files, 1 of them missing .*model-1"):
        load_model(folder)


LONG, DEEP = '{"weight_map": {"a": ' + "9" * 5000 + "}}", "[" * 100_000


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": [1]}', LONG, DEEP],
    ids=lambda content: content[:18],
)
def test_broken_index(copy: Copy, content: str) -> None:
    folder = copy("llama")
    (folder / WEIGHTS).unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(WeightsError, match="not a valid index"):
        load_model(folder)


def test_config_and_weights_of_different_sizes(copy: Copy) -> None:
    folder = copy("llama")
    configure(folder, num_hidden_layers=4)
    with pytest.raises(WeightsError, match=r"lacks 1\d of"):
        load_model(folder)
    configure(folder, num_hidden_layers=2)
    with pytest.raises(WeightsError, match=r"have no place in 'llama': model\.layers\.2\."):
        load_model(folder)
    configure(folder, num_hidden_layers=3, vocab_size=321)
    with pytest.raises(WeightsError, match=r"needs shape \[321, 64\]"):
        load_model(folder)


TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_tied_embeddings(tiny: Make, copy: Copy) -> None:
    """Stored as the table, as the head, or as both: one matrix in memory."""
    case, folder = tiny("llama3-rope"), copy("llama3-rope")
    want = Sequence(case.load().model).feed(case.prompt)
    edits: list[Callable[[Tensors], object]] = [
        lambda t: t.update({HEAD: t[TABLE]}),
        lambda t: t.pop(TABLE),
    ]
    for edit in edits:
        change(folder, edit)
        model = load_model(folder).model
        assert torch.equal(Sequence(model).feed(case.prompt), want)
        assert sum(p.shape[0] == 20 for p in model.parameters()) == 1  # panels of 16 of 320 rows
    change(folder, lambda t: t.update({TABLE: t[HEAD] + 1}))
    with pytest.raises(WeightsError, match=r"ties the embeddings, but .*differ"):
        load_model(folder)
    configure(folder, tie_word_embeddings=False)
    load_model(folder)


def test_sizes_that_nobody_said_are_told(copy: Copy) -> None:
    """config.json lacks a size, and the family's default isn't the weights'."""
    folder = copy("qwen3_5")
    config = json.loads((folder / "config.json").read_text())
    del config["linear_num_key_heads"]
    config["linear_num_value_heads"] = 16
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=r"doesn't say linear_num_key_heads \(16\): those are"):
        load_model(folder)


def test_untied_needs_a_head(copy: Copy) -> None:
    folder = copy("llama3-rope")
    configure(folder, tie_word_embeddings=False)
    with pytest.raises(WeightsError, match=r"lacks 1 of the tensors of 'llama': lm_head\.weight"):
        load_model(folder)


def test_gpt2_as_openai_stored_it(tiny: Make, copy: Copy) -> None:
    """Without the prefix, and with the causal masks."""
    case, folder = tiny("gpt2"), copy("gpt2")

    def strip(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 256, 256, dtype=torch.uint8).tril()
        tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)

    change(folder, strip)
    got = Sequence(load_model(folder).model).feed(case.prompt)
    assert torch.equal(got, Sequence(case.load().model).feed(case.prompt))


def test_pythia_as_it_was_released(tiny: Make, copy: Copy) -> None:
    case, folder = tiny("gpt-neox"), copy("gpt-neox")

    def rename(tensors: Tensors) -> None:
        names = ("embed_out.weight", HEAD)
        head = next(tensors.pop(name) for name in names if name in tensors)
        tensors["embed_out.weight"] = head
        for i in range(3):
            attention = f"gpt_neox.layers.{i}.attention."
            tensors[attention + "bias"] = torch.ones(1, 1, 256, 256, dtype=torch.bool).tril()
            tensors[attention + "masked_bias"] = torch.tensor(-1e9)
            tensors[attention + "rotary_emb.inv_freq"] = torch.ones(4)

    change(folder, rename)
    got = Sequence(load_model(folder).model).feed(case.prompt)
    assert torch.equal(got, Sequence(case.load().model).feed(case.prompt))
    change(folder, lambda t: t.update({HEAD: t["embed_out.weight"]}))
    with pytest.raises(WeightsError, match=r"embed_out\.weight and lm_head\.weight both give head"):
        load_model(folder)


def test_phi3_with_split_projections_too(copy: Copy) -> None:
    folder = copy("phi3")
    change(folder, lambda t: t.update({Q: torch.zeros(64, 64)}))
    with pytest.raises(WeightsError, match=r"both give layers\.1\.attention\.qkv\.weight"):
        load_model(folder)


def test_llama_with_its_old_buffers(copy: Copy) -> None:
    folder = copy("llama")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(folder, lambda t: t.update({name: torch.ones(12)}))
    load_model(folder)


def test_the_type_that_most_of_a_checkpoint_is_in(copy: Copy) -> None:
    folder = copy("llama")
    assert Checkpoint(folder).dtype() == torch.float32
    norm = "model.norm.weight"
    change(folder, lambda t: t.update({n: x.half() for n, x in t.items() if n != norm}))
    assert Checkpoint(folder).dtype() == torch.float16
