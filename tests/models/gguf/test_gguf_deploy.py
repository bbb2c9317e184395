"""From a GGUF file to an exported folder and to an engine: the same weights, tokens and logits."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf_writing import write_model, write_vocab
from test_gguf_llm import SMALL, TEMPLATE, edited, greedy, needs_stories, stories_vocab
from test_gguf_models import FAMILIES, TOKENS, logits, make, matrices, whole
from test_gguf_tokenizer import TEXTS, write_byte_level
from torch import Tensor

from penstock import LLM
from penstock.errors import ConfigError
from penstock.models.gguf.source import GgufSource
from penstock.models.hub import resolve
from penstock.models.load import Asked, load_model
from penstock.models.registry import read_spec
from penstock.models.sources import open_source, open_tokenizer
from penstock.pipeline.build import BuildOptions, build
from penstock.pipeline.export import export_model
from penstock.pipeline.new_weights import NewWeights
from penstock.pipeline.vocabulary import VocabularyChoice
from penstock.quant import Codes
from penstock.tokenizer import Tokenizer

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
KINDS = [
    Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q5_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K,
    Kind.MXFP4,
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Builds time as on an idle machine; transformers is silent."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("penstock.pipeline.tuning.waited_s", lambda: 0.0)
        patch.setattr("penstock.pipeline.tuning._ENOUGH_S", 0.0)
        yield
    transformers.utils.logging.set_verbosity_warning()


def chatty(writer: gguf.GGUFWriter, size: int) -> None:
    write_vocab(writer, size)
    writer.add_chat_template([{"name": "default", "template": TEMPLATE},
                              {"name": "tool_use", "template": "{{ tools }}"}])  # fmt: skip
    writer.add_float32("general.sampling.temp", 0.7)


def file_of(folder: Path, kind: Kind, name: str = "llama", **sizes: Any) -> Path:
    model = make(name, **(SIZES | sizes))
    write_model(model, folder / "m.gguf", matrices(kind), vocab=chatty)
    return folder / "m.gguf"


def in_transformers(folder: Path, **chosen: Any) -> Any:
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, dtype=torch.float32, **chosen).eval()


def values(tensor: Tensor | Codes) -> Tensor:
    return tensor.dequantize() if isinstance(tensor, Codes) else tensor.float()


def llm(path: Path, **chosen: Any) -> LLM:
    return LLM(path, **SMALL, **chosen)


OURS_ALONE = ("gpt-oss", "granite-moe", "granite-moe-shared", "granite-hybrid-moe", "gemma4-mixed")

# ── export ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in OURS_ALONE])
def test_every_family_is_the_same_model_to_transformers(name: str, tmp_path: Path) -> None:
    """Configs and names: an exported file of float32 gives the very logits of the model, but for
    the last bits of rates, whose logarithms a file hasn't.
    """
    model = make(name)
    write_model(model, tmp_path / "m.gguf", whole(Kind.F32))
    export_model(tmp_path / "m.gguf", tmp_path / "out")
    loaded = in_transformers(tmp_path / "out", attn_implementation="eager")
    with torch.inference_mode():
        got, want = (each(TOKENS[None]).logits for each in (loaded, model))
    rates = name.startswith(("granite-hybrid", "nemotron-h", "bamba", "falcon-h1"))
    within = 1e-4 if rates else 0.0
    torch.testing.assert_close(got, want, rtol=0.0, atol=within)
    assert read_spec(tmp_path / "out", strict=True) == read_spec(tmp_path / "m.gguf")
    assert torch.equal(logits(tmp_path / "out", "auto"), logits(tmp_path / "m.gguf", "auto"))


@pytest.mark.parametrize("name", OURS_ALONE)
def test_experts_that_are_ours_alone(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers has them in one tensor: what is exported says that it doesn't read this."""
    write_model(make(name), tmp_path / "m.gguf", whole(Kind.F32))
    with caplog.at_level("WARNING", "penstock"):
        export_model(tmp_path / "m.gguf", tmp_path / "out")
    assert "which Penstock reads and transformers doesn't" in caplog.text
    assert torch.equal(logits(tmp_path / "out", "auto"), logits(tmp_path / "m.gguf", "auto"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_keeps_its_values(kind: Kind, tied: bool, tmp_path: Path) -> None:
    file = file_of(tmp_path, kind, "qwen2", tie_word_embeddings=tied)
    export_model(file, tmp_path / "out")
    takes = kind in (Kind.Q8_0, Kind.Q5_0, Kind.Q4_0, Kind.Q4_K, Kind.Q6_K)
    got = logits(tmp_path / "out", "auto")
    assert torch.equal(got, logits(file, "auto", quantization="a16" if takes else None))
    if kind in (Kind.Q8_0, Kind.Q5_0, Kind.Q4_0):  # K-quants are widened there
        same = logits(tmp_path / "out", "auto", quantization="a8")
        assert torch.equal(same, logits(file, "auto"))
    before, after = open_source(file), open_source(tmp_path / "out")
    table = "model.embed_tokens.weight"
    scheme = before.scheme(table)
    head = [] if scheme is None or scheme.is_k or not tied else ["lm_head.weight"]
    assert sorted([*before.names(), *head]) == after.names()
    for name in before.names():
        want, got = before.read(name), after.read(name)
        if name == table and isinstance(want, Codes):
            assert isinstance(got, Tensor) and got.dtype is torch.bfloat16
            assert torch.equal(got, want.dequantize().bfloat16())
            if tied and not want.scheme.is_k:
                assert torch.equal(values(after.read("lm_head.weight")), values(want))
        elif isinstance(want, Codes) and want.scheme.is_k:
            assert isinstance(got, Tensor) and torch.equal(got, want.dequantize().bfloat16())
        elif isinstance(before, GgufSource) and before.is_widened(name):
            assert torch.equal(values(got), values(want).bfloat16().float())
        else:
            assert type(got) is type(want) and torch.equal(values(got), values(want))


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q5_K], ids=lambda kind: kind.name)
def test_transformers_loads_quantized_exports(kind: Kind, tmp_path: Path) -> None:
    """Matrices become the same numbers there, the tied head's too."""
    pytest.importorskip("compressed_tensors")
    file = file_of(tmp_path, kind, "qwen2", tie_word_embeddings=True)
    export_model(file, tmp_path / "out")
    model, source = in_transformers(tmp_path / "out"), open_source(tmp_path / "out")
    with torch.inference_mode():
        theirs = model(TOKENS[None]).logits[0]  # matrices are decompressed as they are used
    for name in source.names():
        assert torch.equal(model.get_parameter(name).float(), values(source.read(name))), name
    got = logits(tmp_path / "out", "auto")
    assert float((got - theirs).abs().max() / theirs.abs().max()) < 0.05


def test_tokens_and_settings(tmp_path: Path) -> None:
    file = file_of(tmp_path, Kind.Q8_0)
    export_model(file, tmp_path / "out")
    ours, theirs = open_tokenizer(tmp_path / "out"), open_tokenizer(file)
    other = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in [*TEXTS, "ab abc</s>"]:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids == other(text)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == ids[1:]
        assert ours.decode(ids) == theirs.decode(ids)
    assert ours.special_ids == theirs.special_ids and ours.vocab_size == theirs.vocab_size
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (1, 2, 0)
    messages = [{"role": "user", "content": "ab"}]
    for tools in (None, [{"x": 1}]):
        said = ours.apply_chat_template(messages, tools=tools)
        assert said == theirs.apply_chat_template(messages, tools=tools)
    assert other.apply_chat_template(messages, tokenize=False) == "ab"
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert generation.temperature == pytest.approx(0.7) and generation.eos_token_id == [2]
    before, after = load_model(file), load_model(tmp_path / "out")
    assert after.eos_token_ids == before.eos_token_ids
    assert after.generation.items() >= before.generation.items()
    for otherwise in (Asked(dtype="float32"), Asked(quantization="a8"), Asked(quantization="a16")):
        found = load_model(file, **otherwise)  # whatever lies over the file's tensors
        assert found.generation == before.generation != {}
        assert found.eos_token_ids == before.eos_token_ids


def test_byte_level_tokens(tmp_path: Path) -> None:
    """The embedded model's tokenizer, through a file of metadata and back."""
    tokenizer = Tokenizer.from_folder(resolve("stories"))
    ends = {"eos": tokenizer.eos_token_id, "bos": tokenizer.eos_token_id}
    write_byte_level(tokenizer, tmp_path / "vocab.gguf", "gpt-2", **ends)  # type: ignore[arg-type]
    reader = gguf.GGUFReader(tmp_path / "vocab.gguf")

    def vocab(writer: gguf.GGUFWriter, size: int) -> None:
        for key, field in reader.fields.items():
            if key.startswith("tokenizer.") and "chat" not in key:
                kind, value = field.types[0], field.contents()
                more = field.types[1] if kind == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(key, value, kind, sub_type=more)

    model = make("llama", vocab_size=4096)
    write_model(model, tmp_path / "m.gguf", whole(Kind.BF16), vocab=vocab)
    export_model(tmp_path / "m.gguf", tmp_path / "out")
    ours = open_tokenizer(tmp_path / "out")
    other = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in [*TEXTS, "a<|endoftext|>b"]:
        assert ours.encode(text) == open_tokenizer(tmp_path / "m.gguf").encode(text)
        assert other(text)["input_ids"] == ours.encode(text)


@needs_stories
def test_the_text_of_stories260k(tmp_path: Path) -> None:
    """That of the file, from the export and from the engine of it."""
    from test_gguf_llm import STORIES

    model = transformers.AutoModelForCausalLM.from_pretrained(STORIES / "hf")
    file = tmp_path / "m.gguf"
    write_model(model, file, whole(Kind.F32), vocab=stories_vocab, split_max_tensors=20)
    file = tmp_path / "m-00002-of-00003.gguf"  # any part stands for all
    export_model(file, tmp_path / "out")
    for name, source in (("engine", file), ("of-export", tmp_path / "out")):
        options = BuildOptions(source, tmp_path / name, profile=(1, 8, 64), max_num_seqs=4)
        build(options)
    want = (STORIES / "expected_greedy_200steps.txt").read_text(encoding="utf-8")
    for name in ("out", "engine", "of-export"):
        loaded = LLM(tmp_path / name)
        (found,) = loaded.generate([{"prompt_token_ids": [1]}], greedy(200))
        assert found.outputs[0].text == want
        (chat,) = loaded.chat([{"role": "user", "content": "Once"}], greedy(4), use_tqdm=False)
        assert len(chat.outputs[0].token_ids) == 4


def test_a_float_file_is_quantized_on_its_way(tmp_path: Path) -> None:
    """As its own export would be; an adapter and fewer tokens go through the same door."""
    file = file_of(tmp_path, Kind.BF16)
    export_model(file, tmp_path / "plain")
    weights = NewWeights("w4a16-g32", head="w8a16")
    for source, name in ((file, "of-file"), (tmp_path / "plain", "of-folder")):
        export_model(source, tmp_path / name, weights=weights)
    one, two = (tmp_path / n / "model.safetensors" for n in ("of-file", "of-folder"))
    assert one.read_bytes() == two.read_bytes()
    (tmp_path / "keep.txt").write_text("ab\nabc\n")
    few = VocabularyChoice.parse(str(tmp_path / "keep.txt"), ())
    export_model(file, tmp_path / "few", weights=weights, reduce_vocab=few)
    (a,), (b,) = (llm(tmp_path / n).generate(["ab"], greedy(1)) for n in ("few", "of-file"))
    assert a.prompt_token_ids == b.prompt_token_ids
    names = {path.name for path in (tmp_path / "few").iterdir()}
    assert {"vocab_map.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert not {"stages", "whole"} & names
    assert (tmp_path / "few" / "additional_chat_templates" / "tool_use.jinja").is_file()


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_K], ids=lambda kind: kind.name)
def test_a_quantized_file_is_not_changed(kind: Kind, tmp_path: Path) -> None:
    file = file_of(tmp_path, kind)
    (tmp_path / "keep.txt").write_text("ab\n")
    few = VocabularyChoice.parse(str(tmp_path / "keep.txt"), ())
    for chosen in ({"weights": NewWeights("w8a8")}, {"reduce_vocab": few},
                   {"weights": NewWeights(merge_lora=tmp_path)}):  # fmt: skip
        with pytest.raises(ConfigError, match=rf"m\.gguf is quantized already \({kind.name}\)"):
            export_model(file, tmp_path / "out", **chosen)  # type: ignore[arg-type]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["keep.txt", "m.gguf"]


# ── build ────────────────────────────────────────────────────────────────────────────────────────


def engine_of(file: Path, **chosen: Any) -> Path:
    folder = file.with_name("engine")
    chosen = {"profile": (1, 8, 64), "max_num_seqs": 4, **chosen}
    build(BuildOptions(file, folder, **chosen))
    return folder


def scores(path: Path, **chosen: Any) -> tuple[Any, list[dict[int, float]]]:
    """Tokens and log-probabilities of a prompt and of what follows it."""
    from penstock import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, logprobs=5, prompt_logprobs=5
    )
    loaded = llm(path, **chosen)
    (found,) = loaded.generate([{"prompt_token_ids": TOKENS[:20].tolist()}], params)
    output = found.outputs[0]
    assert output.logprobs is not None and found.prompt_logprobs is not None
    each = [*found.prompt_logprobs[1:], *output.logprobs]
    return output.token_ids, [{t: p.logprob for t, p in (at or {}).items()} for at in each]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_an_engine_computes_what_the_file_does(kind: Kind, tmp_path: Path) -> None:
    file = file_of(tmp_path, kind, "qwen2", tie_word_embeddings=True)
    engine = engine_of(file)
    formats = load_model(file).model.formats
    assert json.loads((engine / "engine.json").read_text())["weight_formats"] == formats.described
    want = scores(file)
    file.unlink()  # the engine needs nothing of it
    assert scores(engine) == want


@pytest.mark.parametrize("name", ["gemma3", "phi3", "gpt2", "gpt-neox", "mistral", "smollm3"])
def test_engines_of_other_families(name: str, tmp_path: Path) -> None:
    model = make(name)
    write_model(model, tmp_path / "m.gguf", matrices(Kind.Q8_0), vocab=chatty)
    assert scores(engine_of(tmp_path / "m.gguf")) == scores(tmp_path / "m.gguf")


def test_an_engine_has_the_files_tokenizer_and_settings(tmp_path: Path) -> None:
    file = file_of(tmp_path, Kind.F32)
    engine, same = llm(engine_of(file, quantization="w8a8")), llm(file, quantization="w8a8")
    (a,), (b,) = (x.generate(["ab abc"], greedy(8)) for x in (engine, same))
    assert a.prompt_token_ids == b.prompt_token_ids
    assert a.outputs[0].token_ids == b.outputs[0].token_ids
    (chat,) = engine.chat([{"role": "user", "content": "ab"}], greedy(2), use_tqdm=False)
    assert chat.prompt_token_ids == open_tokenizer(file).encode("ab", add_special_tokens=False)
    assert engine.runtime.model.generation.items() >= same.runtime.model.generation.items()
    assert engine.runtime.model.eos_token_ids == same.runtime.model.eos_token_ids
    assert "penstock build" in json.loads((file.with_name("engine") / "engine.json").read_text())[
        "command"
    ]  # fmt: skip


def test_a_quantized_file_is_not_rounded_again(tmp_path: Path) -> None:
    file = file_of(tmp_path, Kind.Q4_0)
    with pytest.raises(ConfigError, match=r"quantized already \(Q4_0\), so quantization='w8a8'"):
        engine_of(file, quantization="w8a8")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_a_file_without_a_tokenizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Engine and export go without; whoever runs them gives one."""
    write_model(make("llama"), tmp_path / "m.gguf", whole(Kind.F32), vocab=None)
    with caplog.at_level(logging.WARNING, "penstock"):
        engine = engine_of(tmp_path / "m.gguf")
    assert "has no tokenizer.ggml.model" in caplog.text
    assert "No tokenizer is written" in caplog.text
    assert not (engine / "tokenizer.json").exists()
    file = file_of(tmp_path, Kind.F32)
    (found,) = LLM(engine, tokenizer=str(file)).generate(["ab"], greedy(2))
    assert found.prompt_token_ids == open_tokenizer(file).encode("ab")


def test_a_damaged_file_leaves_nothing(tmp_path: Path) -> None:
    edited(tmp_path / "m.gguf", "llama", {}, ["token_embd.weight"])
    for make_it in (lambda p: export_model(p, tmp_path / "out"), engine_of):
        with pytest.raises(Exception, match=r"has no llama\.attention\.head_count"):
            make_it(tmp_path / "m.gguf")
    shutil.copy(tmp_path / "m.gguf", tmp_path / "n.gguf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "n.gguf"]
