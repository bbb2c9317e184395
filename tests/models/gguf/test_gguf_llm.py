"""From a file to text: `LLM`, the command line, and what goes wrong."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf_writing import scores_of, types_of, write_model, write_vocab
from test_gguf_models import make, matrices, whole
from tiny import COMMON
from typer.testing import CliRunner

from penstock import LLM, SamplingParams
from penstock.cli.main import app
from penstock.errors import ModelError, TokenizerError, UnsupportedModelError, WeightsError
from penstock.models import load_model, read_spec
from penstock.models.gguf.source import GgufSource

STORIES = Path(__file__).resolve().parents[3].parent / "shared/data/models/stories260K"
needs_stories = pytest.mark.skipif(not (STORIES / "hf").is_dir(), reason=f"no {STORIES}")
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
SMALL = {"num_gpu_blocks_override": 32, "max_num_seqs": 4}


def stories_vocab(writer: gguf.GGUFWriter, size: int) -> None:
    raw = json.loads((STORIES / "hf" / "tokenizer.json").read_text())["model"]
    tokens = sorted(raw["vocab"], key=raw["vocab"].__getitem__)
    assert len(tokens) == size
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores_of(raw))
    writer.add_token_types(types_of(tokens))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260K in one file of float32."""
    path = tmp_path_factory.mktemp("stories") / "stories.gguf"
    model = transformers.AutoModelForCausalLM.from_pretrained(STORIES / "hf")
    write_model(model, path, whole(Kind.F32), vocab=stories_vocab)
    return path


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


@needs_stories
def test_stories260k_to_the_byte(stories: Path) -> None:
    """The text that llama2.c itself writes."""
    want = (STORIES / "expected_greedy_200steps.txt").read_text(encoding="utf-8")
    llm = LLM(stories)
    (out,) = llm.generate([{"prompt_token_ids": [1]}], greedy(200))
    assert out.outputs[0].text == want
    assert llm.runtime.tokenizer is not None
    (chat,) = llm.chat([{"role": "user", "content": "Once"}], greedy(4), use_tqdm=False)
    assert chat.prompt_token_ids == llm.runtime.tokenizer.encode("Once", add_special_tokens=False)


@needs_stories
def test_the_command_line_takes_a_file(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = (STORIES / "expected_greedy_200steps.txt").read_text(encoding="utf-8")
    arguments = ["generate", str(stories), "-p", "Once upon a time", "--temperature", "0"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert len(done.stdout) > 200
    assert want.startswith("Once upon a time" + done.stdout.removesuffix("\n"))


@needs_stories
def test_a_file_in_parts(stories: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(STORIES / "hf")
    write_model(
        model, tmp_path / "m.gguf", whole(Kind.F32), vocab=stories_vocab, split_max_tensors=20
    )
    assert len(list(tmp_path.iterdir())) == 3
    prompts = [{"prompt_token_ids": [1]}]
    (one,) = LLM(stories, **SMALL).generate(prompts, greedy(20))
    for path in (tmp_path, tmp_path / "m-00002-of-00003.gguf"):
        (parts,) = LLM(path, **SMALL).generate(prompts, greedy(20))
        assert parts.outputs[0].token_ids == one.outputs[0].token_ids


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_what_ends_a_text(tmp_path: Path) -> None:
    def vocab(writer: gguf.GGUFWriter, size: int) -> None:
        tokens = [f"t{i}" for i in range(size)]
        tokens[7], tokens[8] = "<|im_end|>", "<end_of_turn>"
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_types([3 if i == 7 else 1 for i in range(size)])
        writer.add_token_scores([0.0] * size)
        writer.add_bos_token_id(4)
        writer.add_eos_token_id(5)
        writer.add_eot_token_id(6)
        writer.add_float32("general.sampling.temp", 0.7)
        writer.add_uint32("general.sampling.top_k", 20)

    write_model(make("llama"), tmp_path / "m.gguf", whole(Kind.F32), vocab=vocab)
    loaded = load_model(tmp_path / "m.gguf")
    assert loaded.eos_token_ids == (5, 6, 7)
    assert loaded.spec.bos_token_id == 4
    assert loaded.generation == {"temperature": 0.7, "top_k": 20}


def test_tokens_that_are_no_texts(tmp_path: Path) -> None:
    """What ends a text is looked for among them; the tokenizer refuses them."""
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    for key, value in LLAMA.items():
        writer.add_uint32(key, value) if isinstance(value, int) else writer.add_float32(key, value)
    writer.add_array("tokenizer.ggml.tokens", [[1], [2]])
    writer.add_array("tokenizer.ggml.token_type", [3, 3])
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), dtype=np.float32))
    finish(writer)
    assert read_spec(tmp_path / "m.gguf").eos_token_ids == ()


def test_unread_keys_are_named(tmp_path: Path) -> None:
    def vocab(writer: gguf.GGUFWriter, size: int) -> None:
        write_vocab(writer, size)
        writer.add_float32("llama.attention.twist", 2.0)
        writer.add_string("general.author", "somebody")

    write_model(make("llama"), tmp_path / "m.gguf", whole(Kind.F32), vocab=vocab)
    with pytest.warns(UserWarning, match=r"nothing reads: llama\.attention\.twist\. If"):
        load_model(tmp_path / "m.gguf")
    with pytest.raises(UnsupportedModelError, match=r"llama\.attention\.twist"):
        read_spec(tmp_path / "m.gguf", strict=True)


Add = Callable[[gguf.GGUFWriter], None]
REFUSED: dict[str, tuple[Add, str]] = {
    "experts": (lambda w: w.add_expert_count(8), "mixtures of experts"),
    "alibi": (lambda w: w.add_max_alibi_bias(8.0), "ALiBi"),
    "clipped": (lambda w: w.add_clamp_kqv(6.0), "clip_qkv=6.0"),
    "causal": (lambda w: w.add_causal_attention(False), "attention to later tokens"),
    "scale": (lambda w: w.add_attention_scale(0.5), "attention_multiplier=0.5"),
    "logits": (lambda w: w.add_logit_scale(0.25), "logit_scale=0.25"),
    "yarn": (lambda w: w.add_rope_scaling_yarn_ext_factor(0.5), "yarn_ext_factor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_isnt_built_is_refused(name: str, tmp_path: Path) -> None:
    add, said = REFUSED[name]

    def vocab(writer: gguf.GGUFWriter, size: int) -> None:
        write_vocab(writer, size)
        if name == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(2.0)
        add(writer)

    write_model(make("llama"), tmp_path / "m.gguf", whole(Kind.F32), vocab=vocab)
    with pytest.raises(UnsupportedModelError, match=said):
        load_model(tmp_path / "m.gguf")


def edited(path: Path, architecture: str, keys: dict[str, Any], tensors: list[str]) -> None:
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in keys.items():
        writer.add_uint32(key, value) if isinstance(value, int) else writer.add_float32(key, value)
    for name in tensors:
        writer.add_tensor(name, np.zeros((8, 8), dtype=np.float32))
    finish(writer)


LLAMA: dict[str, Any] = {
    "llama.context_length": 64, "llama.embedding_length": 8, "llama.block_count": 1,
    "llama.feed_forward_length": 8, "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
BROKEN: dict[str, tuple[str, dict[str, Any], list[str], str]] = {
    "architecture": (
        "llava",
        LLAMA,
        ["token_embd.weight"],
        "'llava', which isn't built. Did you m",
    ),
    "key": ("llama", {}, ["token_embd.weight"], "has no llama.attention.head_count, which"),
    "type": ("llama", {**LLAMA, "llama.block_count": 1.5}, ["token_embd.weight"], "a whole number"),
    "no tensors": ("llama", LLAMA, [], "has no token_embd.weight"),
    "missing": ("llama", LLAMA, ["token_embd.weight"], "lacks 7 of the tensors of 'llama'"),
    "unknown": ("llama", LLAMA, ["token_embd.weight", "blk.0.x.weight"], r"blk\.0\.x"),
    "heads": (
        "llama",
        {**LLAMA, "llama.attention.head_count": 3},
        ["token_embd.weight"],
        "3 heads",
    ),
    "vocabulary": ("llama", {**LLAMA, "llama.vocab_size": 9}, ["token_embd.weight"], "is 9, but"),
    "layers": (
        "llama",
        {**LLAMA, "llama.block_count": 20_000_000},
        ["token_embd.weight"],
        "block_count must be at most 1, the tensors that the file has, not 20000000",
    ),
    "scale": (
        "llama",
        {**LLAMA, "llama.attention.scale": float("nan")},
        ["token_embd.weight"],
        r"attention\.scale must be a number, not nan",
    ),
}
GEMMA: dict[str, Any] = {k.replace("llama", "gemma2"): v for k, v in LLAMA.items()}
BROKEN |= {
    f"gemma's {key} of {value}": (
        "gemma2",
        {**GEMMA, f"gemma2.{key}": value},
        ["token_embd.weight"],
        f"gemma2.{key} must be {said}",
    )
    for key, value, said in (
        ("block_count", 20_000_000, "at most 1, the tensors"),
        ("attention.scale", float("nan"), "a number, not nan"),
        ("attention.scale", float("inf"), "a number, not inf"),
        ("attention.scale", 1e-40, "above 0"),
        ("attention.scale", -0.5, "above 0"),
    )
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_models_are_named(name: str, tmp_path: Path) -> None:
    architecture, keys, tensors, said = BROKEN[name]
    edited(tmp_path / "m.gguf", architecture, keys, tensors)
    with pytest.raises(ModelError, match=said):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "key",
    [*LLAMA, "llama.attention.key_length", "llama.attention.head_count_kv", "llama.rope.freq_base",
     "llama.rope.dimension_count", "tokenizer.ggml.eos_token_id"],
)  # fmt: skip
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "text", [1, 2], [], [[1]]], ids=repr)
def test_no_value_crashes(key: str, value: Any, tmp_path: Path) -> None:
    """Wrong values, on a model that lacks tensors in any case."""
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    for name, one in (LLAMA | {key: value}).items():
        kind = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        kind.get(type(one), writer.add_array)(name, one)
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), dtype=np.float32))
    writer.add_tensor("rope_freqs.weight", np.ones(2, dtype=np.float32))
    finish(writer)
    with pytest.raises(ModelError):
        load_model(tmp_path / "m.gguf")


def test_rows_that_dont_fit_the_heads(tmp_path: Path) -> None:
    keys = {**LLAMA, "llama.attention.head_count": 8, "llama.attention.key_length": 16}
    keys["llama.attention.value_length"] = 16
    edited(tmp_path / "m.gguf", "llama", keys, ["token_embd.weight", "blk.0.attn_q.weight"])
    with pytest.raises(WeightsError, match=r"blk\.0\.attn_q\.weight has 8 rows, no multiple of 16"):
        GgufSource(tmp_path / "m.gguf").read("model.layers.0.self_attn.q_proj.weight")


def test_a_file_without_a_tokenizer_takes_another(tmp_path: Path) -> None:
    write_model(make("llama"), tmp_path / "bare.gguf", whole(Kind.F32), vocab=None)
    write_model(make("llama"), tmp_path / "full.gguf", whole(Kind.F32))
    with pytest.raises(TokenizerError, match=r"bare\.gguf: it has no tokenizer\.ggml\.model"):
        LLM(tmp_path / "bare.gguf", **SMALL)
    llm = LLM(tmp_path / "bare.gguf", tokenizer=str(tmp_path / "full.gguf"), **SMALL)
    expected = LLM(tmp_path / "full.gguf", **SMALL)
    (got,), (want,) = (x.generate(["ab abc"], greedy(8)) for x in (llm, expected))
    assert got.outputs[0].token_ids == want.outputs[0].token_ids


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
@pytest.mark.parametrize("change", [1.0, 1.25])
def test_divisors_of_frequencies(base: float, change: float, tmp_path: Path) -> None:
    """Llama 3's parameters are found where the divisors follow from some, and aren't where not."""
    rope = {
        "rope_type": "llama3", "rope_theta": base, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    model = make("llama", rope_parameters=rope, head_dim=32)

    def vocab(writer: gguf.GGUFWriter, size: int) -> None:
        write_vocab(writer, size)
        if change != 1.0:
            model.config.rope_parameters = {"rope_type": "default", "rope_theta": base}
            divisors = np.linspace(1.0, 3.0, 16).astype(np.float32)
            writer.add_tensor("rope_freqs.weight", divisors)

    write_model(model, tmp_path / "m.gguf", whole(Kind.F32), vocab=vocab)
    spec = load_model(tmp_path / "m.gguf", strict=True).spec.decoder.layers[0].attention.rope
    assert spec is not None
    if change == 1.0:
        assert (spec.kind, spec.factor, spec.original_max_position) == ("llama3", 8.0, 64)
    else:
        assert spec.kind == "longrope"
        assert spec.attention_factor == 1.0
        assert np.array_equal(
            np.float32(spec.long_factors), np.linspace(1.0, 3.0, 16).astype(np.float32)
        )
        assert spec.short_factors == spec.long_factors


def test_quantized_text_is_that_of_its_values(tmp_path: Path) -> None:
    """Tokens of a Q4_K file and of the same file dequantized to BF16 are equal."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    model = make("qwen3", **sizes)
    back = write_model(model, tmp_path / "q.gguf", matrices(Kind.Q4_K))
    model.load_state_dict(back | {k: v for k, v in model.state_dict().items() if k not in back})
    write_model(model, tmp_path / "b.gguf", matrices(Kind.BF16))
    prompts = [{"prompt_token_ids": [3, 4, 5, 260, 261]}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = LLM(tmp_path / "q.gguf", quantization="a16", **SMALL)
        want = LLM(tmp_path / "b.gguf", **SMALL)
    assert COMMON["vocab_size"] == got.runtime.model.spec.decoder.vocab_size
    (a,), (b,) = got.generate(prompts, greedy(16)), want.generate(prompts, greedy(16))
    assert a.outputs[0].token_ids == b.outputs[0].token_ids


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K, Kind.Q4_0], ids=lambda kind: kind.name)
def test_a_text_doesnt_depend_on_others(kind: Kind, tmp_path: Path) -> None:
    """By activations in int8: together, in chunks and alone the tokens are the same."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    write_model(make("qwen3", **sizes), tmp_path / "m.gguf", matrices(kind))
    prompts = [{"prompt_token_ids": list(range(3, 3 + n))} for n in (1, 5, 23, 60)]

    def texts(**chosen: Any) -> list[Any]:
        llm = LLM(tmp_path / "m.gguf", **(SMALL | chosen))
        together = [x.outputs[0].token_ids for x in llm.generate(prompts, greedy(12))]
        alone = [llm.generate([p], greedy(12))[0].outputs[0].token_ids for p in prompts]
        assert together == alone
        return together

    assert texts() == texts(max_num_batched_tokens=16)
