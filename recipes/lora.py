"""Low-rank adapters: trained beside frozen weights, kept in PEFT's layout.

Source: Hu et al. 2021, arXiv:2106.09685. y = W x + (alpha / rank) · B A x.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from recipes.model import Llama, write_weights

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """An adapter's size."""

    rank: int = 16
    alpha: int = 32


class LoraLinear(nn.Module):
    """A frozen Linear and its low-rank change, which starts at zero."""

    def __init__(self, linear: nn.Linear, config: LoraConfig) -> None:
        super().__init__()
        self.weight = linear.weight.requires_grad_(False)
        self.scale = config.alpha / config.rank
        self.lora_A = nn.Parameter(torch.empty(config.rank, linear.in_features))
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, config.rank))

    def forward(self, x: Tensor) -> Tensor:
        low = nn.functional.linear(x, self.lora_A)
        change = nn.functional.linear(low, self.lora_B)
        return nn.functional.linear(x, self.weight) + self.scale * change


def add_adapter(model: Llama, config: LoraConfig, seed: int) -> Llama:
    """Freeze `model` and put an adapter on every projection of its layers, in place."""
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name in TARGETS:
                if hasattr(block, name):
                    adapted = LoraLinear(getattr(block, name), config)
                    bound = adapted.lora_A.shape[1] ** -0.5
                    with torch.no_grad():
                        adapted.lora_A.uniform_(-bound, bound, generator=generator)
                    setattr(block, name, adapted)
    return model


def adapter_state(model: Llama) -> dict[str, Tensor]:
    """The adapter's tensors under PEFT's names."""
    return {
        f"{PREFIX}{name}.weight": parameter.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        if name.endswith(("lora_A", "lora_B"))
    }


def save_adapter(state: dict[str, Tensor], config: LoraConfig, base: str, folder: Path) -> None:
    """Write adapter_config.json and adapter_model.safetensors, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(TARGETS),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(about, indent=2) + "\n")
    write_weights(state, folder / "adapter_model.safetensors")


def merge(weights: dict[str, Tensor], adapter: Path) -> dict[str, Tensor]:
    """`weights` with the adapter of that folder added in; for engines that know none."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    found = load_file(adapter / "adapter_model.safetensors")
    merged = dict(weights)
    for name, a in found.items():
        if name.endswith(".lora_A.weight"):
            b = found[name.replace("lora_A", "lora_B")]
            target = name.removeprefix(PREFIX).replace(".lora_A.weight", ".weight")
            merged[target] = weights[target].float() + scale * (b.float() @ a.float())
    return merged
