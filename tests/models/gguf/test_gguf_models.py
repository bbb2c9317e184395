"""Whole models: a GGUF file gives the logits of the checkpoint whose tensors it holds."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf_writing import Choose, Floats, write_model
from safetensors.torch import save_file
from tiny import CASES, FALCON, YARN_ROPE, Sequence, make_model
from torch import Tensor

from penstock.errors import ConfigError, UnsupportedModelError
from penstock.models import load_model
from penstock.models.gguf.architectures import ARCHITECTURES
from penstock.models.gguf.blocks import BLOCKS
from penstock.models.gguf.metadata import Metadata
from penstock.models.gguf.source import GgufSource
from penstock.quant import ROWS, Codes
from penstock.quant.formats.quantized import Quantized

FAMILIES = [
    "llama", "llama3-rope", "mistral", "mistral-full", "qwen2", "qwen3", "gemma2", "gemma3",
    "phi3", "phi3-short", "phi3-long", "olmo2", "smollm3", "gpt2", "gpt-neox", "gpt-neox-serial",
    "mixtral", "olmoe", "qwen2-moe", "qwen3-moe", "gpt-oss", "deepseek-v2", "deepseek-v2-groups",
    "deepseek-v3", "glm4-moe", "glm4-moe-lite", "olmo3", "granite", "gemma", "cohere", "cohere2",
    "glm4", "starcoder2-full", "exaone4", "exaone4-full", "seed-oss", "ernie4_5", "phi", "stablelm",
    "stablelm-parallel", "ministral3", "arcee", "hunyuan", "qwen3-next", "qwen3_5", "qwen3_5-moe",
    "lfm2", "lfm2-moe", "granite-moe", "granite-moe-shared", "granite-hybrid", "granite-hybrid-moe",
    "nemotron", "olmo", "dots1", "minimax-m2", "ernie4_5-moe", "hunyuan-moe",
    "nemotron-h", "nemotron-h-moe", "nemotron-h-latent", "bamba", "falcon-h1", "falcon-h1-normed",
    "gemma4", "gemma4-mixed", "gemma4-inputs",
]  # fmt: skip
QUANTIZED = [Kind(kind) for kind, block in BLOCKS.items() if block.plain is None]
SHARPER = {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.7}
MULTIPLIED = dict.fromkeys([name for name in FALCON if name.endswith("multiplier")], 1.0)
MULTIPLIED |= {"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5}
"""A Falcon-H1's are in a file's tensors."""
UNSAID = {  # what no key of the format says
    "gpt2": {"scale_attn_by_inverse_layer_idx": False},
    "gpt-neox-serial": {"hidden_act": "gelu"},
    "deepseek-v2": {"rope_parameters": SHARPER},
    "deepseek-v3": {"rope_parameters": SHARPER},
    "glm4-moe-lite": {"attention_bias": False, "rope_interleave": True},
    "qwen2-moe": {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": False,
        "use_sliding_window": False,
    },
    "qwen3-moe": {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen3-next": {"mlp_only_layers": []},
    "dots1": {"sliding_window": None},
    "ernie4_5-moe": {"moe_layer_end_index": -1},
    "falcon-h1": MULTIPLIED,
    "falcon-h1-normed": {"ssm_multipliers": [1.0] * 5},
}
TOKENS = torch.randint(3, 320, (40,), generator=torch.Generator().manual_seed(1))


def whole(kind: Kind) -> Choose:
    """Everything in one type."""
    return lambda name, values: kind


def matrices(kind: Kind) -> Choose:
    """As llama.cpp's own quantizer does it: vectors in F32, rows that blocks don't fill in F16."""

    def choose(name: str, values: Floats) -> Kind:
        plain = ("position_embd", "ffn_gate_inp", ".bias")
        if values.ndim == 1 or any(part in name for part in plain):
            return Kind.F32
        return kind if values.shape[-1] % BLOCKS[kind].values == 0 else Kind.F16

    return choose


def make(name: str, **changes: Any) -> Any:
    case = CASES[name]
    more = UNSAID.get(name, {})
    return make_model(replace(case, changes={**case.changes, **more, **changes}))


def as_checkpoint(model: Any, tensors: dict[str, Tensor], folder: Path) -> Path:
    """A Hugging Face checkpoint of the same model with these tensors, in float32."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors")
    return folder


def logits(path: Path, dtype: str, max_len: int = 128, quantization: str | None = None) -> Tensor:
    loaded = load_model(
        path, dtype=dtype, max_model_len=max_len, strict=True, quantization=quantization
    )
    return Sequence(loaded.model).feed(TOKENS)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_float32_file_is_the_checkpoint(name: str, tmp_path: Path) -> None:
    model = make(name)
    back = write_model(model, tmp_path / "m.gguf", whole(Kind.F32))
    folder = as_checkpoint(model, back, tmp_path / "hf")
    got = logits(tmp_path / "m.gguf", "float32")
    assert torch.equal(got, logits(folder, "float32"))
    with torch.inference_mode():
        expected = model(TOKENS[None]).logits[0]
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
def test_heads_of_latents_in_one_matrix(name: str, tmp_path: Path) -> None:
    """As they were written once, whose keys and values have the lengths of heads."""
    model = make(name)
    for apart in (True, False):
        write_model(model, tmp_path / f"{apart}.gguf", whole(Kind.F32), heads_apart=apart)
    names = {name for name in GgufSource(tmp_path / "False.gguf").names() if "kv_b_proj" in name}
    assert names and names <= set(GgufSource(tmp_path / "True.gguf").names())
    old, new = (logits(tmp_path / f"{apart}.gguf", "float32") for apart in (False, True))
    assert torch.equal(old, new)


@pytest.mark.parametrize(
    "name",
    [
        *("deepseek-v3", "glm4-moe", "glm4-moe-lite"),
        *("qwen3-next", "qwen3_5", "qwen3_5-moe", "nemotron-h-moe"),
    ],
)
def test_layers_that_guess(name: str, tmp_path: Path) -> None:
    model = make(name)
    for guesses in (0, 2):
        write_model(model, tmp_path / f"{guesses}.gguf", whole(Kind.F32), guesses=guesses)
    plain, more = (logits(tmp_path / f"{guesses}.gguf", "float32") for guesses in (0, 2))
    assert torch.equal(plain, more)


@pytest.mark.parametrize(
    ("layers", "experts", "vocab", "gate", "expected"),
    [
        (61, 256, 129280, 2, ("DeepseekV3ForCausalLM", 8, 4)),  # R1's first files
        (60, 256, 129280, 2, ("DeepseekV3ForCausalLM", 1, 1)),
        (47, 64, 154880, None, ("DeepseekV3ForCausalLM", 1, 1)),  # GLM-4.7-Flash's
        (27, 64, 102400, None, ("DeepseekV2ForCausalLM", 1, 1)),
    ],
)
def test_what_first_files_leave_out(
    layers: int, experts: int, vocab: int, gate: int | None, expected: tuple[Any, ...]
) -> None:
    said: dict[str, Any] = {
        "general.architecture": "deepseek2", "block_count": layers, "expert_count": experts,
        "expert_used_count": 4, "expert_feed_forward_length": 64, "feed_forward_length": 64,
        "embedding_length": 64, "attention.head_count": 4, "attention.kv_lora_rank": 32,
        "attention.key_length_mla": 24, "attention.value_length_mla": 16, "context_length": 64,
        "rope.dimension_count": 8, "attention.layer_norm_rms_epsilon": 1e-6, "vocab_size": vocab,
    }  # fmt: skip
    if gate is not None:
        said["expert_gating_func"] = gate
    own = {
        k if "." in k and k.startswith("general") else f"deepseek2.{k}": v for k, v in said.items()
    }
    m = Metadata(own, "a.gguf")
    container = SimpleNamespace(tensors=dict.fromkeys(map(str, range(99))), path="a.gguf")
    found = ARCHITECTURES["deepseek2"].read_config(m, container)  # type: ignore[arg-type]
    assert (*found["architectures"], found["n_group"], found["topk_group"]) == expected


def test_a_command_r_with_norms_of_queries_is_refused(tmp_path: Path) -> None:
    """As its config.json is: Command-R+."""
    model = make("cohere")
    norms = {f"model.layers.0.self_attn.{x}_norm.weight": torch.ones(16) for x in "qk"}
    whole_state = model.state_dict
    model.state_dict = lambda: whole_state() | norms
    write_model(model, tmp_path / "m.gguf", whole(Kind.F32))
    with pytest.raises(UnsupportedModelError, match="use_qk_norm=True"):
        load_model(tmp_path / "m.gguf")


def test_a_sliding_olmo2_is_an_olmo3(tmp_path: Path) -> None:
    write_model(make("olmo3"), tmp_path / "3.gguf", whole(Kind.F32))
    write_model(make("olmo2"), tmp_path / "2.gguf", whole(Kind.F32))
    assert [load_model(tmp_path / f"{n}.gguf").spec.family for n in (2, 3)] == ["olmo2", "olmo3"]


def test_quantized_heads_of_latents_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One of the two parts of a matrix, too."""
    model = make("deepseek-v3", qk_nope_head_dim=32, kv_lora_rank=64)

    def choose(stem: str, values: Floats) -> Kind:
        return Kind.Q8_0 if "attn_k_b" in stem else Kind.F32

    write_model(model, tmp_path / "m.gguf", choose)
    source = GgufSource(tmp_path / "m.gguf")
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    assert source.stored_as(name) == "Q8_0 and F32" and source.is_widened(name)
    with caplog.at_level("WARNING", "penstock"):
        source.announce()
    assert "3 tensors (3 Q8_0) are widened" in caplog.text


MATRICES = [
    "llama",
    "qwen2",
    "gemma3",
    "phi3",
    "gpt2",
    "gpt-neox",
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "gpt-oss",
    "deepseek-v3",
    "qwen3-next",
    "qwen3_5",
    "qwen3_5-moe",
]

MIXED = (
    "mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss", "deepseek-v3", "qwen3-next", "qwen3_5-moe",
)  # fmt: skip


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q5_1])
def test_matrices_in_any_family(name: str, kind: Kind, tmp_path: Path) -> None:
    sizes = {"n_embd": 64} if name == "gpt2" else {"intermediate_size": 96, "hidden_size": 64}
    if name in ("qwen2-moe", "qwen3-moe", "deepseek-v3", "qwen3-next", "qwen3_5-moe"):
        sizes["moe_intermediate_size"] = 64
    if name == "deepseek-v3":
        sizes |= {"qk_nope_head_dim": 32, "kv_lora_rank": 64}
    model = make(name, **sizes)
    back = write_model(model, tmp_path / "m.gguf", matrices(kind))
    folder = as_checkpoint(model, back, tmp_path / "hf")
    source = GgufSource(tmp_path / "m.gguf")
    experts = {stem: values for stem, values in back.items() if ".experts." in stem}
    assert bool(experts) is (name in MIXED)
    for stem, want in experts.items():
        found = source.read(stem)
        values = found.dequantize() if isinstance(found, Codes) else found.float()
        assert torch.equal(values, want.float()), stem
    compare(tmp_path / "m.gguf", folder, kind)


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_every_block_type_in_a_llama(kind: Kind, tmp_path: Path) -> None:
    model = make("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    back = write_model(model, tmp_path / "m.gguf", matrices(kind))
    folder = as_checkpoint(model, back, tmp_path / "hf")
    compare(tmp_path / "m.gguf", folder, kind)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_experts_in_k_quants(name: str, tmp_path: Path) -> None:
    """A bank of experts of one kind, another of the other, as `Q4_K_M` has them."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    if name == "qwen3-moe":
        sizes["moe_intermediate_size"] = 256
    model = make(name, **sizes)

    def choose(stem: str, values: Floats) -> Kind:
        return matrices(Kind.Q6_K if "_down" in stem else Kind.Q4_K)(stem, values)

    back = write_model(model, tmp_path / "m.gguf", choose)
    folder = as_checkpoint(model, back, tmp_path / "hf")
    held = load_model(tmp_path / "m.gguf").model.formats
    assert held.of("layers.1.mlp.up").name == "q4_k-a8"
    assert held.of("layers.1.mlp.down").name == "q6_k-a8"
    compare(tmp_path / "m.gguf", folder, Kind.Q4_K)


def compare(path: Path, folder: Path, kind: Kind) -> None:
    """Widened, or K-quants: equal to the checkpoint in bfloat16. Kept otherwise: within the
    rounding of bfloat16. Activations in 8 bits, where that is what the file gets: near those in 16.
    What a random model with a delta rule makes of any rounding is larger, bfloat16's own too: there
    float32 says that each value is the file's.
    """
    layers = load_model(path).spec.decoder.layers
    wide = 1
    if any(layer.attention.delta is not None for layer in layers):
        wide = 4
        assert torch.equal(logits(path, "float32"), logits(folder, "float32"))
    schemes = [f.scheme for f in formats(path) if isinstance(f, Quantized)]
    in_blocks = any(scheme.activations == "int8_blocks" for scheme in schemes)
    got = logits(path, "auto", quantization="a16" if in_blocks else None)
    expected = logits(folder, "bfloat16")
    if in_blocks:
        rounded = logits(path, "auto")
        assert not torch.equal(rounded, got)
        apart = (rounded - got).abs().amax(-1) / got.abs().max()
        assert apart.median() < 0.05 * wide  # experts chosen otherwise take the rest along
    if any(not scheme.is_k for scheme in schemes):
        mixed = any(layer.mlp.experts is not None for layer in layers)
        if mixed:  # what bfloat16 rounds otherwise takes another expert, and all after it see it
            expected = logits(folder, "float32")
        errors = ((got - expected).abs().amax(-1) / expected.abs().max()).sort().values
        assert errors[: len(errors) * 3 // 4 if mixed else None].max() < 0.03 * wide
    else:
        assert torch.equal(got, expected)


def formats(path: Path) -> list[Any]:
    found = load_model(path).model.formats
    return [found.matrix, found.head, *found.special.values()]


def test_what_a_scheme_holds_is_kept(tmp_path: Path) -> None:
    model = make("llama", intermediate_size=96)
    write_model(model, tmp_path / "q4.gguf", matrices(Kind.Q4_0))
    assert {f.name for f in formats(tmp_path / "q4.gguf")} == {"w4a8-g32-blocks"}
    for kind in (Kind.Q8_0, Kind.Q5_0):
        write_model(model, tmp_path / "q8.gguf", matrices(kind))
        assert {f.name for f in formats(tmp_path / "q8.gguf")} == {"w8a8-g32-blocks"}


@pytest.mark.parametrize("most", [Kind.Q4_0, Kind.Q4_K], ids=lambda kind: kind.name)
def test_a_mixture_of_types(most: Kind, tmp_path: Path) -> None:
    """As quantizers mix them: the head and a matrix of each layer in more bits than the others.

    What is stored as one matrix stays as it is where all of its parts are K-quants.
    """
    model = make("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=2)

    def choose(name: str, values: Floats) -> Kind:
        better = name in ("output.weight", "blk.1.ffn_down.weight", "blk.0.attn_v.weight")
        return matrices(Kind.Q6_K if better else most)(name, values)

    back = write_model(model, tmp_path / "m.gguf", choose)
    folder = as_checkpoint(model, back, tmp_path / "hf")
    got = logits(tmp_path / "m.gguf", "auto", quantization="a16")
    expected = logits(folder, "bfloat16")
    assert (got - expected).abs().max() / expected.abs().max() < 0.03
    if most is Kind.Q4_K:
        assert torch.equal(got, expected)
    found = load_model(tmp_path / "m.gguf").model.formats
    assert found.matrix.name == {Kind.Q4_0: "w4a8-g32-blocks", Kind.Q4_K: "q4_k-a8"}[most]
    assert {found.of(m).name for m in ("head", "layers.1.mlp.down")} == {"q6_k-a8"}
    together = {Kind.Q4_0: "bfloat16", Kind.Q4_K: "mixed_k-a8"}[most]
    assert found.of("layers.0.attention.qkv").name == together


@pytest.mark.parametrize("kind", [Kind.Q5_K, Kind.Q5_0, Kind.Q8_0], ids=lambda kind: kind.name)
def test_float32_keeps_every_bit(kind: Kind, tmp_path: Path) -> None:
    model = make("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    back = write_model(model, tmp_path / "m.gguf", matrices(kind))
    folder = as_checkpoint(model, back, tmp_path / "hf")
    assert torch.equal(logits(tmp_path / "m.gguf", "float32"), logits(folder, "float32"))


@pytest.mark.parametrize("quantization", ["a8", "a16"])
def test_activations_have_no_float32(quantization: str, tmp_path: Path) -> None:
    write_model(make("llama"), tmp_path / "m.gguf", matrices(Kind.Q8_0))
    with pytest.raises(ConfigError, match=r"quantized \(Q8_0\) and computes in bfloat16, so dtype"):
        load_model(tmp_path / "m.gguf", dtype="float32", quantization=quantization)


def test_gpus_refuse_blocks(tmp_path: Path) -> None:
    """Where nobody asked for them, activations stay in bfloat16 there."""
    model = make("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=1)
    for kind, name in ((Kind.Q8_0, "w8a16-g32"), (Kind.Q4_K, "bfloat16")):
        write_model(model, tmp_path / "m.gguf", matrices(kind))
        assert load_model(tmp_path / "m.gguf", storage=ROWS).model.formats.matrix.name == name
        with pytest.raises(ConfigError, match="isn't built for GPUs"):
            load_model(tmp_path / "m.gguf", storage=ROWS, quantization="a8")
    write_model(model, tmp_path / "m.gguf", whole(Kind.F32))
    with pytest.raises(ConfigError, match="isn't built for GPUs"):
        load_model(tmp_path / "m.gguf", storage=ROWS, quantization="w4a8-g32-blocks")


def test_codes_are_the_files_own(tmp_path: Path) -> None:
    model = make("llama", intermediate_size=96)
    back = write_model(model, tmp_path / "m.gguf", matrices(Kind.Q4_0))
    decoder = load_model(tmp_path / "m.gguf").model
    layer = decoder.layers[0]
    qkv = torch.cat([back[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"])
    linear = layer.attention.qkv
    stored = linear.weight_format.unpack(linear.packed, linear.out_features, linear.in_features)
    assert torch.equal(stored, qkv)


def test_widening_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    write_model(model, tmp_path / "m.gguf", matrices(Kind.Q4_1))
    load_model(tmp_path / "m.gguf")
    said = [r.getMessage() for r in caplog.records if "widened" in r.getMessage()]
    assert len(said) == 1
    assert "16 tensors (16 Q4_1)" in said[0]


def test_float_files_are_rounded_on_load(tmp_path: Path) -> None:
    model = make("qwen2")
    back = write_model(model, tmp_path / "m.gguf", whole(Kind.F32))
    folder = as_checkpoint(model, back, tmp_path / "hf")
    got, expected = (
        Sequence(load_model(path, quantization="w8a8").model).feed(TOKENS)
        for path in (tmp_path / "m.gguf", folder)
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_K])
def test_quantized_files_are_not_rounded_again(kind: Kind, tmp_path: Path) -> None:
    model = make("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=1)
    write_model(model, tmp_path / "m.gguf", matrices(kind))
    with pytest.raises(ConfigError, match=r"m\.gguf is quantized already \("):
        load_model(tmp_path / "m.gguf", quantization="w4a16")


def test_a_head_that_is_the_embedding_is_stored_once(tmp_path: Path) -> None:
    model = make("qwen3")
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight)
    write_model(model, tmp_path / "m.gguf", whole(Kind.F32))
    assert load_model(tmp_path / "m.gguf").spec.decoder.tied
    model.lm_head.weight.data[0, 0] += 1
    write_model(model, tmp_path / "n.gguf", whole(Kind.F32))
    assert not load_model(tmp_path / "n.gguf").spec.decoder.tied


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "phi3"])
def test_transformers_reads_the_same_file(name: str, tmp_path: Path) -> None:
    """A file that llama.cpp's own converter could have written, read by somebody else's reader."""
    pytest.importorskip("accelerate", reason="transformers needs it to read GGUF")
    plain = {"rope_parameters": None} if name == "qwen2" else {}
    if name == "llama":
        plain = {"attention_bias": False, "mlp_bias": False, "head_dim": 16}
    if name == "phi3":
        plain = {"sliding_window": None}
    if name == "gemma2":
        plain = {
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        }
    model = make(name, **plain)
    write_model(model, tmp_path / "m.gguf", matrices(Kind.Q8_0))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32
    ).eval()
    with torch.inference_mode():
        expected = theirs(TOKENS[None]).logits[0]
    got = logits(tmp_path / "m.gguf", "auto")
    assert (got.float() - expected).abs().max() / expected.abs().max() < 0.05
    shutil.rmtree(tmp_path)
