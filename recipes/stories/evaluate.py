"""What the model is worth: bits per byte on held-out stories, and unedited samples.

`python -m recipes.stories.evaluate MODEL_FOLDER` scores any Hugging Face folder on the same bytes.
"""

import argparse
import json
import math
import shutil
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

WORK = Path(__file__).resolve().parents[2] / "build" / "stories"
PROMPTS = ["Once upon a time", "One day, a little fox", 'Lily looked at the big box and said, "']


def publish(work: Path, output: Path) -> None:
    """Copy the best model and its tokenizer to where the package ships them."""
    output.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copyfile(work / "best" / name, output / name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(work / name, output / name)


@torch.inference_mode()
def bits_per_byte(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, documents: list[str]
) -> tuple[float, float]:
    """(bits per byte of the text, nats per token); each document starts after one BOS.

    A document longer than the context is scored in windows that overlap by half.
    """
    window: int = model.config.max_position_embeddings - 1
    nats, tokens, size = 0.0, 0, 0
    for text in documents:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        size += len(text.encode())
        tokens += len(ids)
        scored = 0
        while scored < len(ids):
            start = max(0, scored - window // 2)
            piece = torch.tensor([[tokenizer.bos_token_id, *ids[start : start + window]]])
            logits = model(input_ids=piece).logits[0, :-1].float()
            losses = F.cross_entropy(logits, piece[0, 1:], reduction="none")
            nats += float(losses[scored - start :].sum())
            scored = start + piece.shape[1] - 1
    return nats / math.log(2) / size, nats / tokens


@torch.inference_mode()
def sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: Tensor, seed: int = 0
) -> str:
    """One continuation with the shipped generation settings, prompt included."""
    torch.manual_seed(seed)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=300)
    return str(tokenizer.decode(out[0], skip_special_tokens=True))


def report(folder: Path, work: Path) -> None:
    """Print the held-out figures and samples of the model in `folder`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    held_out: dict[str, list[str]] = json.loads((work / "held_out.json").read_text())
    for name, documents in held_out.items():
        bits, nats = bits_per_byte(model, tokenizer, documents)
        size = sum(len(text.encode()) for text in documents)
        print(
            f"held-out {name}: {len(documents)} stories, {size} bytes, "
            f"{bits:.4f} bits/byte, {nats:.4f} nats/token, perplexity {math.exp(nats):.2f}"
        )
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        print(f"\n--- {prompt!r}\n{sample(model, tokenizer, ids)}")
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": "Tell me a story about a frog."}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        print(f"\n--- chat\n{sample(model, tokenizer, ids)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--work", type=Path, default=WORK)
    arguments = parser.parse_args()
    report(arguments.model, arguments.work)
