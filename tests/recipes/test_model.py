from pathlib import Path

import pytest
import torch
from recipes.lora import LoraConfig, adapter_state, add_adapter, merge, save_adapter
from recipes.model import SHAPES, Llama, Shape, load, save_model
from recipes.tokenizer import train_tokenizer
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from penstock.errors import ConfigError

SMALL = Shape(vocab_size=320, hidden_size=64, intermediate_size=192, num_layers=3, num_heads=4,
              num_kv_heads=2, head_dim=32, context=64)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model = Llama(SMALL).initialise(1)
    for name, weight in model.named_parameters():  # norms that are one would hide mistakes
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    tokenizer = train_tokenizer(["some words to learn from, and some more"] * 5, 300)
    save_model(model.state_dict(), SMALL, tokenizer.to_str(), path, chat=True)
    return path


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, 320, (rows, length), generator=torch.Generator().manual_seed(0))


def test_logits_are_those_of_transformers(folder: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert isinstance(theirs, LlamaForCausalLM)
    ids = tokens(2, 64)
    with torch.no_grad():
        torch.testing.assert_close(
            load(folder).eval()(ids), theirs(ids).logits, atol=2e-5, rtol=1e-4
        )


def test_every_tensor_is_bfloat16_and_the_embedding_is_stored_once(folder: Path) -> None:
    from safetensors.torch import load_file

    found = load_file(folder / "model.safetensors")
    assert {t.dtype for t in found.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in found
    assert Shape.read(folder) == SMALL


def test_a_document_does_not_see_the_one_before_it(folder: Path) -> None:
    model = load(folder).eval()
    ids = tokens(1, 40)
    documents = torch.tensor([[0] * 25 + [1] * 15])
    with torch.no_grad():
        packed = model(ids, documents)[0, 25:]
        alone = model(ids[:, 25:])[0]
        together = model(ids)[0, 25:]
    # rotary positions are relative: only the offset's rounding differs
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=1e-4)
    assert (packed - together).abs().max() > 0.01


def test_the_number_of_weights() -> None:
    for shape in (SMALL, *SHAPES.values()):
        with torch.device("meta"):
            model = Llama(shape)
        assert shape.num_weights() == sum(p.numel() for p in model.parameters() if p.dim() == 2)


def test_the_family_is_as_large_as_it_should_be() -> None:
    assert 15e6 < SHAPES["base"].num_weights() < 16e6
    assert 1e6 < SHAPES["draft"].num_weights() < 1.5e6
    assert all(shape.hidden_size % 64 == 0 for shape in SHAPES.values())


def test_flops_are_counted_as_a_profiler_does() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    model, length = Llama(SMALL).eval(), 64
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens(1, length))
    # the profiler counts attention over all keys, a causal model needs half of them
    attention = SMALL.flops_per_token(length) - 2 * SMALL.num_weights()
    assert counter.get_total_flops() == length * (2 * SMALL.num_weights() + 2 * attention)


def test_a_shape_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="multiple of 4"):
        Shape(num_heads=6, num_kv_heads=4)


def adapted(folder: Path) -> Llama:
    model = add_adapter(load(folder), LoraConfig(4, 8), seed=0)
    for name, weight in model.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(weight, std=0.05)
    return model


def test_a_fresh_adapter_changes_nothing_and_trains_nothing_else(folder: Path) -> None:
    model = add_adapter(load(folder), LoraConfig(4, 8), seed=0)
    with torch.no_grad():
        assert model(tokens(1, 20)).equal(load(folder)(tokens(1, 20)))
    trained = {name.rsplit(".", 1)[1] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"lora_A", "lora_B"}


def test_a_merged_adapter_gives_the_adapted_logits(folder: Path, tmp_path: Path) -> None:
    model = adapted(folder)
    state = {name: t.bfloat16().float() for name, t in adapter_state(model).items()}
    save_adapter(state, LoraConfig(4, 8), "base", tmp_path)
    parameters = dict(model.named_parameters())
    for name, tensor in state.items():  # as they are stored
        key = name.removeprefix("base_model.model.").removesuffix(".weight")
        parameters[key].data.copy_(tensor)
    plain = load(folder)
    plain.load_state_dict(merge(plain.state_dict(), tmp_path))
    with torch.no_grad():
        torch.testing.assert_close(plain(tokens(2, 30)), model(tokens(2, 30)), atol=2e-5, rtol=1e-4)


def test_the_adapter_loads_in_peft(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft isn't installed")
    model = adapted(folder)
    save_adapter(adapter_state(model), LoraConfig(4, 8), "base", tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path).eval()
    with torch.no_grad():
        expected = theirs(tokens(1, 20)).logits.float()
        torch.testing.assert_close(model(tokens(1, 20)), expected, atol=2e-2, rtol=1e-2)
