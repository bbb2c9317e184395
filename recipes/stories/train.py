"""Pre-training within a time budget: cosine schedule, clipping, best held-out model kept."""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from recipes.stories.model import CONTEXT, build, export, shape
from recipes.stories.prepare import Packed


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How long, how fast, on what."""

    minutes: float = 27.0  # wall-clock budget of this stage
    max_steps: int = 1_000_000
    batch_tokens: int = 4096
    context: int = 256  # most stories fit; the last stage lengthens to CONTEXT
    long_context_from: float = 0.75  # share of the budget after which it does
    learning_rate: float = 5e-3
    warmup: float = 0.03  # share of the budget
    weight_decay: float = 0.1
    clip: float = 1.0
    muon: bool = True
    chat_share: float = 0.2
    tales_share: float = 0.4  # at the start; falls to zero at tales_until
    tales_until: float = 0.7
    evaluate_every_s: float = 90.0
    hidden_size: int = 256
    num_layers: int = 6
    compile: bool = True
    seed: int = 0


@dataclass(slots=True)
class Progress:
    """What a resumed run has to know besides weights and optimizer state."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    best_loss: float = math.inf
    history: list[dict[str, float]] = field(default_factory=list)


class Stream:
    """An endless shuffled run of whole documents, cut into rows of any length."""

    def __init__(self, packed: Packed, seed: int) -> None:
        self.packed = packed
        self.rng = np.random.default_rng(seed)
        self.buffer: list[NDArray[np.uint16]] = []
        self.buffered = 0
        self.documents = self._shuffled()

    def _shuffled(self) -> Iterator[NDArray[np.uint16]]:
        offsets = self.packed.offsets
        while True:
            for i in self.rng.permutation(len(offsets) - 1):
                yield self.packed.ids[offsets[i] : offsets[i + 1]]

    def row(self, length: int) -> NDArray[np.uint16]:
        """The next `length` tokens."""
        while self.buffered < length:
            document = next(self.documents)
            self.buffer.append(document)
            self.buffered += len(document)
        joined = np.concatenate(self.buffer)
        self.buffer, self.buffered = [joined[length:]], len(joined) - length
        return joined[:length]


class Mixture:
    """Draws rows of the three streams; the tales fade out as training goes on."""

    def __init__(self, folder: Path, config: TrainConfig, seed: int) -> None:
        self.config = config
        self.rng = np.random.default_rng(seed)
        self.streams = {
            name: Stream(Packed.load(folder / f"{name}.npz"), seed)
            for name in ("stories", "chat", "tales")
        }

    def batch(self, done: float) -> Tensor:
        """[B, T + 1] token ids at `done` (0 to 1) of the budget."""
        config = self.config
        length = config.context if done < config.long_context_from else CONTEXT
        fade = max(0.0, 1.0 - done / config.tales_until)
        tales = config.tales_share * fade
        chat = config.chat_share * (1.0 - tales)
        names = self.rng.choice(
            ["stories", "chat", "tales"],
            size=max(1, config.batch_tokens // length),
            p=[1.0 - tales - chat, chat, tales],
        )
        rows = [self.streams[name].row(length + 1) for name in names]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


def learning_rate(config: TrainConfig, done: float) -> float:
    """Linear warm-up, then a cosine down to 2% of the peak, over shares of the budget."""
    if done < config.warmup:
        return config.learning_rate * done / config.warmup
    phase = min(1.0, (done - config.warmup) / (1.0 - config.warmup))
    return config.learning_rate * (0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * phase)))


def make_optimizers(model: LlamaForCausalLM, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW; weight decay on matrices only. With `muon`, Muon takes the layers' matrices."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    tables = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" in n]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizers: list[torch.optim.Optimizer] = []
    decay, decayed = config.weight_decay, tables
    if config.muon:
        optimizers.append(
            torch.optim.Muon(matrices, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        )
    else:
        decayed = tables + matrices
    groups = [{"params": decayed, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizers.append(torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True))
    return optimizers


def loss_function(model: LlamaForCausalLM, compiled: bool) -> Callable[[Tensor], Tensor]:
    """Mean next-token cross-entropy of [B, T + 1] ids; bfloat16 matmuls, float32 weights."""

    def loss(ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state
            logits = model.lm_head(hidden)
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    return torch.compile(loss) if compiled else loss


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, packed: Packed) -> float:
    """Nats per token over whole documents, each predicted from its own start."""
    total, count = 0.0, 0
    for start, end in zip(packed.offsets[:-1], packed.offsets[1:], strict=True):
        ids = torch.from_numpy(packed.ids[start:end].astype(np.int64))[None, : CONTEXT + 1]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids[:, :-1]).logits
        total += float(F.cross_entropy(logits.float()[0], ids[0, 1:], reduction="sum"))
        count += ids.shape[1] - 1
    return total / count


class Trainer:
    """The loop's state: model, optimizers, data position and progress, saved together."""

    def __init__(self, work: Path, vocab_size: int, config: TrainConfig) -> None:
        self.work, self.config = work, config
        self.shape: dict[str, Any] = shape(vocab_size, config.hidden_size, config.num_layers)
        self.model = build(self.shape, config.seed)
        self.optimizers = make_optimizers(self.model, config)
        self.progress = Progress()
        self.checkpoint = work / "checkpoint.pt"
        if self.checkpoint.exists():
            self._restore()
        self.mixture = Mixture(work, config, config.seed + self.progress.step)
        self.held_out = Packed.load(work / "held_out.npz")
        self.loss = loss_function(self.model, config.compile)

    def _restore(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": asdict(self.progress),
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    @property
    def done(self) -> float:
        """Share of the budget used, by the clock or by steps, whichever is further."""
        by_clock = self.progress.elapsed_s / (60.0 * self.config.minutes)
        return max(by_clock, self.progress.step / self.config.max_steps)

    def step(self) -> tuple[float, int]:
        """One optimizer step; returns its loss and its tokens."""
        ids = self.mixture.batch(self.done)
        loss = self.loss(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        rate = learning_rate(self.config, self.done)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach()), ids.shape[0] * (ids.shape[1] - 1)

    def evaluate(self, train_loss: float) -> None:
        """Score the held-out stories, keep the best model, and save the resumable state."""
        progress = self.progress
        loss = held_out_loss(self.model, self.held_out)
        best = loss < progress.best_loss
        if best:
            progress.best_loss = loss
            export(self.model, self.shape, self.work / "best")
        progress.history.append(
            {
                "step": progress.step,
                "tokens": progress.tokens,
                "elapsed_s": round(progress.elapsed_s, 1),
                "train_loss": round(train_loss, 4),
                "held_out_loss": round(loss, 4),
            }
        )
        self._save()
        print(f"  held-out {loss:.4f} nats/token{' (best)' if best else ''}", flush=True)

    def run(self) -> Progress:
        """Train until the budget is spent."""
        progress = self.progress
        last = time.perf_counter()
        since_evaluation, smooth = 0.0, math.nan
        while self.done < 1.0:
            loss, tokens = self.step()
            now = time.perf_counter()
            took, last = now - last, now
            progress.step += 1
            progress.tokens += tokens
            progress.elapsed_s += took
            since_evaluation += took
            smooth = loss if math.isnan(smooth) else 0.98 * smooth + 0.02 * loss
            if progress.step % 50 == 0:
                print(
                    f"step {progress.step} {progress.elapsed_s:.0f}s loss {smooth:.4f} "
                    f"{tokens / took:.0f} tokens/s {progress.tokens / 1e6:.2f}M tokens",
                    flush=True,
                )
            if since_evaluation >= self.config.evaluate_every_s:
                since_evaluation = 0.0
                self.evaluate(smooth)
        if since_evaluation > 0.0:
            self.evaluate(smooth)
        (self.work / "training.json").write_text(
            json.dumps({"config": asdict(self.config), **asdict(progress)}, indent=2) + "\n"
        )
        return progress
