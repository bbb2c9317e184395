"""EAGLE heads in plain torch, their checkpoints with random weights, and trees by brute force.

Nothing of Penstock's is in here: a head runs over all rows of a text at once, every row over those
before it, and a tree asks for each of its nodes by a text of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

Tensors = dict[str, Tensor]
Path_ = tuple[int, ...]

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 4, 2, 16, 320
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "torch_dtype": "float32",
}
STATES = (2, 1, 0)  # what vLLM's choice is for three layers
DRAFT_IDS = torch.arange(0, VOCAB, 3)  # tokens that an EAGLE-3 head's own head has


def make_tensors(
    fuses: bool, seed: int = 1, states: int = 3, hidden: int = HIDDEN, vocab: int = VOCAB
) -> Tensors:
    """A head's, by the names of the authors' layout."""
    ids = torch.arange(0, vocab, 3)
    random = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=random) / columns**0.5

    def norm() -> Tensor:
        return 1 + 0.2 * torch.randn(hidden, generator=random)

    layer = "midlayer" if fuses else "layers.0"
    inputs = 2 * hidden if fuses else hidden
    made = {
        "fc.weight": matrix(hidden, states * hidden if fuses else 2 * hidden),
        f"{layer}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, inputs),
        f"{layer}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, inputs),
        f"{layer}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, inputs),
        f"{layer}.self_attn.o_proj.weight": matrix(hidden, HEADS * HEAD_DIM),
        f"{layer}.mlp.gate_proj.weight": matrix(INNER, hidden),
        f"{layer}.mlp.up_proj.weight": matrix(INNER, hidden),
        f"{layer}.mlp.down_proj.weight": matrix(hidden, INNER),
        f"{layer}.post_attention_layernorm.weight": norm(),
    }
    if not fuses:
        return made | {"fc.bias": 0.1 * torch.randn(hidden, generator=random)}
    marked = torch.zeros(vocab, dtype=torch.bool)
    marked[ids] = True
    return made | {
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.hidden_norm.weight": norm(),
        "norm.weight": norm(),
        "lm_head.weight": 2 * matrix(len(ids), hidden),
        "d2t": ids - torch.arange(len(ids)),
        "t2d": marked,
    }


def write(folder: Path, tensors: Tensors, *, binary: bool = False, **changes: Any) -> Path:
    """A checkpoint of a head; draft_vocab_size is filled in where it has one."""
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(CONFIG)
    if "lm_head.weight" in tensors:
        config["draft_vocab_size"] = len(tensors["lm_head.weight"])
    (folder / "config.json").write_text(json.dumps(config | changes))
    if binary:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


@dataclass(frozen=True)
class Reference:
    """A head over the embedding and the head of its target."""

    tensors: Tensors
    fuses: bool
    embedding: Tensor  # [V, D]
    head: Tensor  # [V, D]
    normed_residual: bool = False

    def get(self, name: str) -> Tensor:
        found = {k.replace("midlayer.", "layers.0."): t for k, t in self.tensors.items()}
        return found[name if "." in name and name in found else f"layers.0.{name}"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"])
        return scaled * self.get(name)

    def feature(self, states: Tensor) -> Tensor:
        """What the target's states [R, W] are to the layer; EAGLE-1's are normed already."""
        return states @ self.tensors["fc.weight"].T if self.fuses else states

    def rows(self, features: Tensor, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What the head gives and its logits [R, V] for rows that each see those before them."""
        embedded = self.embedding[tokens]
        if self.fuses:
            normed = self.norm(features, "hidden_norm.weight")
            x = torch.cat((self.norm(embedded, "input_layernorm.weight"), normed), -1)
            residual = normed if self.normed_residual else features
        else:
            both = torch.cat((embedded, features), -1)
            x = residual = F.linear(both, self.tensors["fc.weight"], self.tensors["fc.bias"])
        residual = residual + self._attention(x, positions)
        h = self.norm(residual, "post_attention_layernorm.weight")
        gate, up = h @ self.get("mlp.gate_proj.weight").T, h @ self.get("mlp.up_proj.weight").T
        given = residual + (F.silu(gate) * up) @ self.get("mlp.down_proj.weight").T
        if not self.fuses:
            return given, given @ self.head.T
        ids = torch.arange(len(self.tensors["d2t"])) + self.tensors["d2t"]
        logits = torch.full((len(given), len(self.embedding)), -torch.inf)
        logits[:, ids] = self.norm(given, "norm.weight") @ self.tensors["lm_head.weight"].T
        return given, logits

    def _attention(self, x: Tensor, positions: Tensor) -> Tensor:
        frequencies = CONFIG["rope_theta"] ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.cat([positions[:, None] * frequencies] * 2, -1)[:, None]  # [R, 1, Dh]

        def turned(y: Tensor) -> Tensor:
            a, b = y.chunk(2, -1)
            return y * angles.cos() + torch.cat((-b, a), -1) * angles.sin()

        q, k, v = (
            (x @ self.get(f"self_attn.{n}_proj.weight").T).unflatten(-1, (-1, HEAD_DIM))
            for n in "qkv"
        )
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for y in (turned(k), v))
        mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        seen = F.scaled_dot_product_attention(turned(q).transpose(0, 1), k, v, attn_mask=mask)
        return seen.transpose(0, 1).flatten(1) @ self.get("self_attn.o_proj.weight").T

    def after(
        self,
        states: Tensor,
        tokens: Sequence[int],
        path: Sequence[int] = (),
        seen: Sequence[int] | None = None,
    ) -> Tensor:
        """Logarithms [V] of the shares of what follows `tokens` and the guesses of `path`.

        states [T − 1, W] of the tokens before the last; seen: positions that the head knows of.
        """
        chosen = list(range(len(tokens) - 1)) if seen is None else list(seen)
        features = self.feature(states)[chosen]
        ids = [tokens[p + 1] for p in chosen]
        positions = [float(p) for p in chosen]
        given, logits = self.rows(features, torch.tensor(ids), torch.tensor(positions))
        for token in path:
            features = torch.cat((features, given[-1:]))
            ids.append(token)
            positions.append(positions[-1] + 1)
            given, logits = self.rows(features, torch.tensor(ids), torch.tensor(positions))
        return logits[-1].log_softmax(-1)

    def tree(
        self,
        states: Tensor,
        tokens: Sequence[int],
        depth: int,
        width: int,
        most: int,
        seen: Sequence[int] | None = None,
        temperature: float = 1.0,
    ) -> list[Path_]:
        """The nodes of EAGLE-2's tree as the ways to them, likelier ones first."""

        def children(path: Path_, chance: float) -> list[tuple[Path_, float]]:
            logits = self.after(states, tokens, path, seen) / temperature
            values, ids = logits.log_softmax(-1).topk(width)
            pairs = zip(ids.tolist(), values.tolist(), strict=True)
            return [((*path, token), chance + value) for token, value in pairs]

        def best(nodes: list[tuple[Path_, float]], count: int) -> list[tuple[Path_, float]]:
            return sorted(nodes, key=lambda node: -node[1])[:count]

        level = children((), 0.0)
        nodes = list(level)
        for _ in range(depth - 1):
            level = [c for path, chance in best(level, width) for c in children(path, chance)]
            nodes += level
        return [path for path, _ in best(nodes, most)]
