"""Checkpoints that others quantized: loaded, with the right logits."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from penstock import LLM, SamplingParams
from penstock.errors import ConfigError, UnsupportedModelError, WeightsError
from penstock.models.checkpoint import Checkpoint
from penstock.models.hub import resolve
from penstock.models.load import LoadedModel, load_model
from penstock.nn import Decoder
from penstock.nn.linear import Linear
from penstock.quant import Codes, Integer, format_of, parse_scheme
from penstock.quant.files import write_checkpoint
from tests.models.tiny import Case, Sequence, make_model, make_tiny
from tests.quant.files.made import random_codes

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
CASE = {
    "llama": Case("LlamaForCausalLM", "LlamaConfig", SIZES),
    "qwen2": Case("Qwen2ForCausalLM", "Qwen2Config", {**SIZES, "tie_word_embeddings": True}),
}
TOKENS = torch.arange(5, 45)


def sized_codes(name: str, n: int, k: int, seed: int) -> Codes:
    """Random codes of the size that weights have; their scales are moved by a power of two."""
    codes = random_codes(name, n, k, seed)
    if codes.scheme.kind == "mxfp4":
        codes = replace(codes, scale=2.0 ** (codes.scale.log2() % 3))
    factor = 2.0 ** torch.round(torch.log2(k**-0.5 / codes.dequantize().std()))
    if codes.outer is not None:
        return replace(codes, outer=codes.outer * factor)
    return replace(codes, scale=codes.scale * factor)


class Made:
    """A quantized checkpoint on disk, and what it was made of."""

    def __init__(
        self, folder: Path, case: Case, choose: Callable[[str], str | None], layout: Any
    ) -> None:
        self.folder, self.model = folder, make_model(case).bfloat16()
        self.codes: dict[str, Codes] = {}
        config = json.loads(self.model.config.to_json_string(use_diff=False))
        config |= {"architectures": [case.model], "dtype": "bfloat16"}
        write_checkpoint(folder, config, self._tensors(choose), layout)
        self.model.generation_config.save_pretrained(folder)
        with torch.no_grad():  # to what the codes mean
            for name, parameter in self.model.named_parameters():
                if name in self.codes:
                    parameter.copy_(self.codes[name].dequantize())

    def _tensors(self, choose: Callable[[str], str | None]) -> Iterator[tuple[str, Tensor | Codes]]:
        tied = self.model.config.tie_word_embeddings
        for i, (name, tensor) in enumerate(self.model.state_dict().items()):
            if tied and name == "lm_head.weight":
                continue
            scheme = choose(name)
            if scheme is None:
                yield name, tensor
            else:
                self.codes[name] = sized_codes(scheme, *tensor.shape, seed=i)
                yield name, self.codes[name]

    def expected(self) -> Tensor:
        """transformers' logits, in float32 with the values that the codes stand for."""
        model = type(self.model)(self.model.config).eval().float()
        state = {name: t.float() for name, t in self.model.state_dict().items()}
        state |= {name: codes.dequantize() for name, codes in self.codes.items()}
        model.load_state_dict(state)
        return logits_of(model)


def logits_of(model: Any) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(TOKENS[None]).logits[0].float()
    return found


def feed(loaded: LoadedModel) -> Tensor:
    return Sequence(loaded.model).feed(TOKENS)


def check_close(logits: Tensor, expected: Tensor, part: float) -> None:
    """The largest difference is less than `part` of the largest logit."""
    assert torch.isfinite(logits).all()
    assert float((logits - expected).abs().max() / expected.abs().max()) < part


def loss_of(name: str) -> float:
    """What rounded activations may change of these random models: three bits and a sign are few."""
    return 0.25 if name.startswith("fp8-w8a8") else 0.1 if "a8" in name else 0.04


def linear(name: str) -> bool:
    return "_proj" in name and name.endswith("weight")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """transformers says which of its loading steps take long."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    yield
    transformers.utils.logging.set_verbosity_warning()


LOADED = [
    ("w4a16-g32", "compressed-tensors"),
    ("w4a8-g64-asym", "compressed-tensors"),
    ("w8a8", "compressed-tensors"),
    ("w8a8-static", "compressed-tensors"),
    ("w8a16-tensor", "compressed-tensors"),
    ("fp8", "compressed-tensors"),
    ("fp8-w8a8", "compressed-tensors"),
    ("fp8-w8a8-tensor-static", "compressed-tensors"),
    ("mxfp4", "compressed-tensors"),
    ("nvfp4", "compressed-tensors"),
    ("w4a16-g128-asym", "awq"),
    ("w4a16-g128", "gptq"),
    ("w8a16-g64-asym", "gptq"),
    ("fp8-w8a8-block", "fp8"),
    ("fp8-w8a8-tensor-static", "fp8"),
    ("fp8-e5m2", "fp8"),
    ("nf4", "bitsandbytes"),
]


@pytest.mark.parametrize("family", CASE)
@pytest.mark.parametrize(("name", "layout"), LOADED)
def test_logits(name: str, layout: str, family: str, tmp_path: Path) -> None:
    """Those of the same codes packed by hand, and about those of transformers."""
    made = Made(tmp_path, CASE[family], lambda n: name if linear(n) else None, layout)
    loaded = load_model(tmp_path, strict=True)
    assert loaded.dtype == torch.bfloat16
    logits = feed(loaded)
    store = format_of(parse_scheme(name))
    by_hand(loaded.model, made, store)
    assert torch.equal(logits, feed(loaded))
    if "static" not in name:  # whose scales of activations are made up: they cut off
        check_close(logits, made.expected(), loss_of(name))


def by_hand(model: Decoder, made: Made, store: Any) -> None:
    """Pack every matrix anew, straight from the codes."""
    count = 0
    for i in range(2):
        layer = f"model.layers.{i}"
        for target, parts in {
            "attention.qkv": [f"{layer}.self_attn.{x}_proj.weight" for x in "qkv"],
            "attention.out": [f"{layer}.self_attn.o_proj.weight"],
            "mlp.up": [f"{layer}.mlp.{x}_proj.weight" for x in ("gate", "up")],
            "mlp.down": [f"{layer}.mlp.down_proj.weight"],
        }.items():
            module = model.get_submodule(f"layers.{i}.{target}")
            assert isinstance(module, Linear)
            assert module.weight_format == store
            codes = Codes.stack([made.codes[part] for part in parts])
            before = {part: stored.clone() for part, stored in module.packed.items()}
            module.hold(store.pack_codes(codes, target == "mlp.up"))
            assert before.keys() == module.packed.keys()
            count += 1
    assert count == 8


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("w4a16-g32", "compressed-tensors"),
        ("w4a16-g64-asym", "compressed-tensors"),
        ("w8a16", "compressed-tensors"),
        ("w8a8", "compressed-tensors"),
        ("w8a8-static", "compressed-tensors"),
        ("w4a8-g32", "compressed-tensors"),
        ("fp8-tensor", "compressed-tensors"),
        ("fp8-block", "compressed-tensors"),
        ("fp8-w8a8", "compressed-tensors"),
        ("fp8-w8a8-tensor-static", "compressed-tensors"),
        ("fp8-w8a8-block", "compressed-tensors"),
        ("mxfp4", "compressed-tensors"),
        ("nvfp4", "compressed-tensors"),
        ("fp8-w8a8-block", "fp8"),
        ("fp8-w8a8-tensor-static", "fp8"),
        ("fp8-e5m2", "fp8"),
        ("nf4", "bitsandbytes"),
    ],
)
def test_transformers_loads_what_is_written(name: str, layout: str, tmp_path: Path) -> None:
    package = {"fp8": "accelerate"}.get(layout, layout.replace("-", "_"))
    pytest.importorskip(package)
    made = Made(tmp_path, CASE["llama"], lambda n: name if linear(n) else None, layout)
    narrow = name in ("mxfp4", "nvfp4")  # compressed-tensors gives those in bfloat16
    short = narrow or layout == "fp8"  # which transformers runs in the checkpoint's own type
    options: dict[str, Any] = {"dtype": torch.bfloat16 if short else torch.float32}
    if "asym" in name:  # its other way of loading doesn't take packed zero points
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    unpacked = {part: by_bitsandbytes(model, part) for part in made.codes if name == "nf4"}
    logits = logits_of(model)  # matrices are decompressed, or packed anew, as they are first used
    for part, codes in made.codes.items():
        want = codes.dequantize()
        weight = unpacked[part] if unpacked else model.get_parameter(part).data
        if narrow:  # the product of value, scale and 1 / global scale is rounded otherwise
            assert torch.allclose(weight.float(), want, rtol=2**-7, atol=0)
        elif "asym" in name:  # in float16, as the scales are stored
            zero, group = codes.zero, codes.scheme.group
            assert zero is not None
            of = torch.arange(codes.shape[1]) // group
            half = (codes.values.half() - zero.half()[:, of]) * codes.scale.half()[:, of]
            assert torch.equal(weight, half.float())
        else:
            assert torch.equal(weight, want.to(options["dtype"]))
    if "static" not in name:
        check_close(feed(load_model(tmp_path)), logits, loss_of(name))


def by_bitsandbytes(model: Any, part: str) -> Tensor:
    import bitsandbytes as bnb

    module = model.get_submodule(part.removesuffix(".weight"))
    assert isinstance(module, bnb.nn.Linear4bit)
    state = module.weight.quant_state
    state.dtype = torch.float32
    found: Tensor = bnb.functional.dequantize_4bit(module.weight.data, state)
    return found


def test_the_engine_says_the_same_from_a_file(tmp_path: Path) -> None:
    """`quantization=` rounds as it loads; the same codes from a file give the same tokens."""
    source = Checkpoint(resolve("stories"))
    scheme = parse_scheme("w8a16")
    store = format_of(scheme)
    assert isinstance(store, Integer)

    def tensors() -> Iterator[tuple[str, Tensor | Codes]]:
        for name in source.names():
            tensor = source.read(name)
            if tensor.ndim < 2:
                yield name, tensor
            else:
                n, k = tensor.shape
                codes = store.codes(store.pack(tensor), n, k)
                yield name, codes

    write_checkpoint(tmp_path, source.config, tensors(), shard_bytes=1_000_000)
    for file in source.path.glob("*.json"):
        if file.name != "config.json" and "index" not in file.name:
            shutil.copy(file, tmp_path)
    greedy = SamplingParams(temperature=0, max_tokens=24)
    prompts = ["Once upon a time", "The little dog"]
    texts = []
    for model, quantization in ((str(tmp_path), None), ("stories", "w8a16")):
        llm = LLM(model, quantization=quantization, max_model_len=128)
        texts.append([out.outputs[0].token_ids for out in llm.generate(prompts, greedy)])
    assert texts[0] == texts[1]


def test_matrices_of_several_kinds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each layer otherwise, a quantized head, and q otherwise than k and v: that one is widened."""

    def choose(name: str) -> str | None:
        if name == "lm_head.weight":
            return "w8a16"
        if not linear(name) or "layers.1.mlp.down" in name:
            return None
        return "w8a8" if "layers.1" in name and "q_proj" not in name else "w4a8-g32"

    made = Made(tmp_path, CASE["llama"], choose, "compressed-tensors")
    with caplog.at_level(logging.WARNING, "penstock"):
        loaded = load_model(tmp_path, strict=True)
    assert "3 quantized tensors are widened to bfloat16" in caplog.text
    kinds = {
        name: module.weight_format.name
        for name, module in loaded.model.named_modules()
        if isinstance(module, Linear)
    }
    assert kinds == {
        "head": "w8a16",
        "layers.0.attention.qkv": "w4a8-g32", "layers.0.attention.out": "w4a8-g32",
        "layers.0.mlp.up": "w4a8-g32", "layers.0.mlp.down": "w4a8-g32",
        "layers.1.attention.qkv": "bfloat16", "layers.1.attention.out": "w8a8",
        "layers.1.mlp.up": "w8a8", "layers.1.mlp.down": "bfloat16",
    }  # fmt: skip
    check_close(feed(loaded), made.expected(), 0.1)


def test_a_quantized_table_that_is_tied(tmp_path: Path) -> None:
    made = Made(
        tmp_path, CASE["qwen2"], lambda n: "w8a16" if "embed" in n else None, "compressed-tensors"
    )
    loaded = load_model(tmp_path, strict=True)
    assert loaded.model.head.weight_format.name == "w8a16"
    check_close(feed(loaded), made.expected(), 0.03)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_bitsandbytes_quantized(bits: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    make_model(CASE["llama"]).bfloat16().save_pretrained(tmp_path / "plain")
    chosen = {
        4: {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, 8: {},
    }[bits]  # fmt: skip
    config = transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True}, **chosen)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=config, dtype=torch.bfloat16
    )
    model.save_pretrained(tmp_path / "theirs")
    loaded = load_model(tmp_path / "theirs", strict=True)
    name = loaded.model.get_submodule("layers.0.mlp.up").weight_format.name  # type: ignore[union-attr]
    assert str(name).startswith("nf4-g64" if bits == 4 else "w8a16")
    check_close(feed(loaded), logits_of(model), 0.05)


@pytest.mark.parametrize(
    ("preset", "name"),
    [
        ("W4A16", "w4a16-g128"),
        ("W8A8", "w8a8"),
        ("FP8_DYNAMIC", "fp8-w8a8"),
        ("FP8_BLOCK", "fp8-w8a8-block"),
        ("FP8", "fp8-w8a8-tensor-static"),
    ],
)
def test_what_compressed_tensors_quantized(preset: str, name: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = make_model(CASE["llama"])
    config = QuantizationConfig(config_groups={preset: ["Linear"]}, ignore=["re:.*lm_head"])
    apply_quantization_config(model, config, show_progress=False)
    top = {"W4A16": 7.0, "W8A8": 127.0}.get(preset, 448.0)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            rows, groups = module.weight_scale.view(-1, module.weight_scale.shape[-1]).shape
            blocks = module.weight.unflatten(1, (groups, -1)).unflatten(0, (rows, -1))
            largest = blocks.abs().amax((1, 3)).view(module.weight_scale.shape)
            module.weight_scale.data.copy_(largest / top)
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(5.0 / top)
    x = torch.randn(7, 256, generator=torch.manual_seed(0)).bfloat16()
    with torch.inference_mode():
        expected = model(TOKENS[None]).logits[0]  # quantized as it runs, activations too
        product = model.model.layers[0].mlp.down_proj(x[None].float())[0]
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(str(tmp_path))
    loaded = load_model(tmp_path)
    up = loaded.model.get_submodule("layers.0.mlp.up")
    assert isinstance(up, Linear)
    assert up.weight_format.name == name
    down = loaded.model.get_submodule("layers.0.mlp.down")
    assert isinstance(down, Linear)
    ours = down.weight_format.matmul(x, down.packed, None, 128, out_dtype=torch.float32)
    near = 0.01 if preset == "W8A8" else 1e-5  # whose scale is max|x| / 127.5 there
    check_close(ours, product, near)
    check_close(feed(loaded), expected, max(0.05, loss_of(name)))


def test_rows_in_another_order_are_widened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """GPT-NeoX has q, k and v of a head together, which loading takes apart."""
    model = make_tiny("gpt-neox", tmp_path / "plain").oracle
    state = {k: v for k, v in model.state_dict().items() if "rotary" not in k}
    tensors = [
        (n, sized_codes("w8a16", *t.shape, 1) if n.endswith("dense.weight") or ("query" in n
         and n.endswith("weight")) else t) for n, t in state.items()
    ]  # fmt: skip
    config = {**model.config.to_dict(), "architectures": ["GPTNeoXForCausalLM"]}
    write_checkpoint(tmp_path, config, tensors)
    with caplog.at_level(logging.WARNING, "penstock"):
        loaded = load_model(tmp_path)
    assert "3 quantized tensors are widened to bfloat16" in caplog.text
    values = {n: c.dequantize() if isinstance(c, Codes) else c for n, c in tensors}
    oracle = type(model)(model.config).eval()
    oracle.load_state_dict(values, strict=False)
    check_close(feed(loaded), logits_of(oracle), 0.03)


def gptq_folder(folder: Path) -> Path:
    Made(folder, CASE["llama"], lambda n: "w4a16-g64" if linear(n) else None, "gptq")
    return folder


def edit(folder: Path, change: Callable[[dict[str, Tensor]], None], **config: Any) -> None:
    file = folder / "model.safetensors"
    tensors = {name: t.clone() for name, t in safetensors.torch.load_file(file).items()}
    change(tensors)
    safetensors.torch.save_file(tensors, file)
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] |= config
    (folder / "config.json").write_text(json.dumps(described))


def test_biases_of_zeros_that_the_model_has_not(tmp_path: Path) -> None:
    """AutoGPTQ gives every matrix a bias."""
    logits = feed(load_model(gptq_folder(tmp_path)))
    names = [f"model.layers.{i}.{m}" for i in (0, 1) for m in ("self_attn.q_proj", "mlp.up_proj")]
    sizes = {"self_attn.q_proj": 128, "mlp.up_proj": 256}
    biases = {f"{n}.bias": torch.zeros(sizes[n.split(".", 3)[3]]).half() for n in names}
    edit(tmp_path, lambda tensors: tensors.update(biases))
    assert torch.equal(feed(load_model(tmp_path)), logits)
    biases[f"{names[1]}.bias"][3] = 1e-3
    edit(tmp_path, lambda tensors: tensors.update(biases))
    with pytest.raises(WeightsError, match=r"1 of the .* have no place.*up_proj\.bias"):
        load_model(tmp_path)


def test_columns_in_the_order_of_activations(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """desc_act: one matrix has its columns out of order, and is widened."""
    gptq_folder(tmp_path)
    name = "model.layers.0.self_attn.o_proj.g_idx"
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    edit(tmp_path, lambda tensors: tensors.update({name: tensors[name][order]}), desc_act=True)
    with caplog.at_level(logging.WARNING, "penstock"):
        loaded = load_model(tmp_path)
    assert "desc_act" in caplog.text
    formats = {
        n: m.weight_format.name for n, m in loaded.model.named_modules() if isinstance(m, Linear)
    }
    assert formats["layers.0.attention.out"] == "bfloat16"
    assert formats["layers.1.attention.out"] == "w4a16-g64"
    assert torch.isfinite(feed(loaded)).all()


def test_what_cannot_take_effect(tmp_path: Path) -> None:
    gptq_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"is quantized already \(w4a16-g64\)"):
        load_model(tmp_path, quantization="w8a8")
    with pytest.raises(ConfigError, match="dtype='float32' can't take effect"):
        load_model(tmp_path, dtype="float32")
    edit(tmp_path, lambda _: None, quant_method="quark")
    with pytest.raises(UnsupportedModelError, match=r"quant_method='quark'.* Read are compressed"):
        load_model(tmp_path)


def test_a_cut_off_file(tmp_path: Path) -> None:
    gptq_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(WeightsError, match="corrupt or was cut off"):
        load_model(tmp_path)
