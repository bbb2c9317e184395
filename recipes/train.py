"""One training loop for all of the family: pre-training, fine-tuning, distillation, adapters.

A run ends after so many steps, or within so many minutes; its learning rate is annealed either
way. It can be killed at any moment and goes on from its last checkpoint; on a CPU, by steps, it
ends with the same bits as if nothing had happened. What it ends with are the weights that did best
on held-out rows: sources are small, and a long run learns them by heart.
"""

import json
import math
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.errors import ConfigError
from recipes.batches import Batch, Mixture
from recipes.checks import check_run
from recipes.curve import draw
from recipes.throughput import matrix_peak

WARM_UP_STEPS = 3  # compilation and first allocations; not counted
MEASURED_STEPS = 10  # after which the number of steps that fit into --minutes is known
REPORT_STEPS = 20
RESERVE = 0.03  # of the minutes, for the last evaluation and saving


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How a run goes. Exactly one of `steps` and `minutes` is given."""

    steps: int | None = None
    minutes: float | None = None
    rows: int = 256  # of context tokens, a step
    micro_rows: int = 64  # at once; gradients of a step's micro-batches are added up
    learning_rate: float = 3e-3
    muon: bool = True  # for the layers' matrices; AdamW for the rest
    warm_up: float = 0.02  # of the run
    decay: float = 0.3  # of the run, its last part, in which the rate falls to zero
    short_length: int | None = None  # of rows at first, tokens; None: the context's
    short_until: float = 0.7  # of the run
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    compile: bool = False
    dtype: str = "float32"  # of products; weights are kept in float32
    save_every: int | None = None  # steps; None: every minute
    evaluate_every: float = 0.05  # of the run

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ConfigError(
                f"A run needs --steps or --minutes, and not both: steps={self.steps}, "
                f"minutes={self.minutes}."
            )
        check_run(self.steps, self.minutes, self.learning_rate)
        if self.rows % self.micro_rows:
            raise ConfigError(
                f"{self.rows} rows a step can't be split into micro-batches of {self.micro_rows}."
            )


@dataclass(slots=True)
class Progress:
    """How far a run is; saved with it."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    total_steps: int | None = None  # known from the start, or once the speed is measured
    evaluated_at: float = 0.0
    best_loss: float = math.inf  # mean over the held-out texts
    history: list[dict[str, Any]] = field(default_factory=list)


Loss = Callable[[nn.Module, Batch], Tensor]
"""The sum of a batch's losses, each times its weight."""


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Nats of the next tokens, weighted and summed."""
    logits = model(batch.tokens[:, :-1], batch.documents)
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), batch.tokens[:, 1:].flatten(), reduction="none"
    )
    return (losses * batch.weights.flatten()).sum()


def learning_rate(progress: float, config: TrainConfig) -> float:
    """Linear warm-up, the peak, and at the end down to zero by one minus a square root.

    A run that is lengthened before its end goes on at the peak.
    Source: Hägele et al. 2024, arXiv:2405.18392.
    """
    if progress < config.warm_up:
        return config.learning_rate * max(progress, 1e-4) / config.warm_up
    along = min(1.0, max(0.0, 1 - (1 - progress) / config.decay))
    return config.learning_rate * (1 - math.sqrt(along))


def make_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon for the layers' matrices if asked for.

    Muon: Jordan et al. 2024; its updates are scaled to AdamW's size (Moonshot, arXiv:2502.16982),
    so that both take one learning rate.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    inner = [p for name, p in named if config.muon and p.dim() == 2 and ".layers." in name]
    taken = {id(p) for p in inner}
    rest = [p for _, p in named if id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.dim() == 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.dim() != 2], "weight_decay": 0.0},
    ]
    on_gpu = rest[0].device.type == "cuda" if rest else False
    found: list[torch.optim.Optimizer] = []
    groups = [group for group in groups if group["params"]]
    if groups:
        found.append(
            torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=on_gpu)
        )
    if inner:
        found.append(
            torch.optim.Muon(
                inner,
                lr=config.learning_rate,
                weight_decay=config.weight_decay,
                momentum=0.95,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return found


MAY_CHANGE = ("steps", "minutes", "save_every", "evaluate_every", "compile")
"""What a run may go on with otherwise than it began."""


def same_run(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse to go on with another run's checkpoint; a longer run is the same one.

    settings: by name; those in MAY_CHANGE don't count.
    """
    now = {name: str(value) for name, value in settings.items() if name not in MAY_CHANGE}
    file = folder / "settings.json"
    if (folder / "checkpoint.pt").exists() and file.exists():
        before = json.loads(file.read_text(encoding="utf-8"))
        if changed := [name for name in now if now[name] != before.get(name)]:
            words = ", ".join(f"{name} {before.get(name)} → {now[name]}" for name in changed)
            raise ConfigError(
                f"{folder} holds a run with other settings ({words}). Repeat its command to go "
                "on, or delete the folder to start over."
            )
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")


Optimizers = Callable[[nn.Module, TrainConfig], list[torch.optim.Optimizer]]


class Trainer:
    """A model on its way: optimizers, data position, progress, saved together.

    folder: where checkpoint, log and curve go. held_out: batches by name, scored now and then by
    `held_out_loss`.
    settings: by which a run is known again; None: the config's.
    flops_per_token: of a step's forward and backward pass.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        mixture: Mixture,
        config: TrainConfig,
        *,
        loss: Loss = cross_entropy,
        held_out: Mapping[str, Batch] | None = None,
        held_out_loss: Loss = cross_entropy,
        optimizers: Optimizers = make_optimizers,
        flops_per_token: float = 0.0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder, self.model, self.mixture, self.config = folder, model, mixture, config
        self.loss, self.held_out_loss = loss, held_out_loss
        self.device = next(model.parameters()).device
        self.held_out = {k: b.to(self.device) for k, b in (held_out or {}).items()}
        self.flops_per_token = flops_per_token
        self.optimizers = optimizers(model, config)
        self.progress = Progress(total_steps=config.steps)
        self.best: dict[str, Tensor] = {}  # weights, on the CPU
        self.forward = torch.compile(model, dynamic=False) if config.compile else model
        self.checkpoint = folder / "checkpoint.pt"
        same_run(folder, asdict(config) if settings is None else settings)
        torch.manual_seed(config.seed)
        if self.checkpoint.exists():
            self._restore()
        self.dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
        self._first_step = self.progress.step
        self._saved_s = self._measured_from = self.progress.elapsed_s
        self._reported = self.progress.tokens, self.progress.elapsed_s
        self._apart_s = 0.0  # since then, for evaluation and saving
        self._peak = matrix_peak(self.device, self.dtype)

    @property
    def done(self) -> float:
        """Share of the run: by steps, and where minutes are given also by the clock."""
        progress = self.progress
        by_steps = progress.step / progress.total_steps if progress.total_steps else 0.0
        if self.config.minutes is None:
            return by_steps
        budget = 60 * self.config.minutes * (1 - RESERVE)
        return max(by_steps, progress.elapsed_s / budget)

    def run(self) -> Progress:
        """Train from wherever the last checkpoint was; the model ends with its best weights."""
        progress, since = self.progress, time.perf_counter()
        smooth = math.nan
        while self.done < 1.0:
            loss = self._step()
            progress.step += 1
            looked = progress.step % REPORT_STEPS == 0 or progress.step < REPORT_STEPS
            if looked:  # reading the loss waits for the device: not at every step
                value = self._finite(float(loss))
                smooth = value if math.isnan(smooth) else 0.8 * smooth + 0.2 * value
            now = time.perf_counter()
            progress.elapsed_s += now - since
            since = now
            self._plan()
            if progress.step % REPORT_STEPS == 0:
                self._report(smooth)
            if self.done - progress.evaluated_at >= self.config.evaluate_every:
                self._evaluate(smooth)
            if self._is_due():
                self.save()
            now = time.perf_counter()
            self._apart_s += now - since  # counts as time, not as training's
            progress.elapsed_s += now - since
            since = now
        if progress.evaluated_at < self.done:
            self._evaluate(smooth)
        self.save()
        if self.best:
            self.model.load_state_dict(self.best)
        return progress

    def _step(self) -> Tensor:
        """One optimizer step; returns the mean loss, still on the device."""
        config = self.config
        self.model.train()
        batch = self.mixture.batch(min(1.0, self.done))
        count = batch.weights.sum().clamp(min=1.0).to(self.device)
        total = torch.zeros((), device=self.device)
        for part in self._parts(batch):
            with self._autocast():
                loss = self.loss(self.forward, part.to(self.device)) / count
            loss.backward()
            total += loss.detach()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        nn.utils.clip_grad_norm_(trained, config.clip)
        rate = learning_rate(self.done, config)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.progress.tokens += batch.weights.numel()
        return total

    def _parts(self, batch: Batch) -> list[Batch]:
        """Micro-batches; their rows are short while the run's are, since a model that has seen no
        later position can't be judged there.
        """
        config, parts = self.config, batch.split(self.config.micro_rows)
        if config.short_length and self.done < config.short_until:
            return [part.cut(config.short_length) for part in parts]
        return parts

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, self.dtype == torch.bfloat16)

    def _finite(self, loss: float) -> float:
        if not math.isfinite(loss):
            raise ConfigError(
                f"The loss is {loss} at step {self.progress.step}: lower --learning-rate, now "
                f"{self.config.learning_rate:g}, or raise --warm-up, now {self.config.warm_up:g}."
            )
        return loss

    def _plan(self) -> None:
        """Once the speed is known, say how many steps fit into the minutes."""
        progress = self.progress
        here = progress.step - self._first_step
        if here == WARM_UP_STEPS:
            self._measured_from = progress.elapsed_s
        elif progress.total_steps is None and here == WARM_UP_STEPS + MEASURED_STEPS:
            assert self.config.minutes is not None
            step_s = (progress.elapsed_s - self._measured_from) / MEASURED_STEPS
            left = 60 * self.config.minutes * (1 - RESERVE) - progress.elapsed_s
            progress.total_steps = progress.step + max(1, int(left / step_s))
            print(f"{step_s:.3f} s a step: {progress.total_steps:,} steps fit", flush=True)

    def _is_due(self) -> bool:
        if self.config.save_every is not None:
            return self.progress.step % self.config.save_every == 0
        return self.progress.elapsed_s - self._saved_s > 60

    def _report(self, loss: float) -> None:
        tokens, elapsed_s = self._reported
        self._reported = self.progress.tokens, self.progress.elapsed_s
        seconds = self.progress.elapsed_s - elapsed_s - self._apart_s
        self._apart_s = 0.0
        speed = (self.progress.tokens - tokens) / seconds
        share = speed * self.flops_per_token / self._peak
        rate = learning_rate(self.done, self.config)
        print(
            f"step {self.progress.step:,} of {self.progress.total_steps or 0:,} "
            f"{self.progress.elapsed_s:.0f} s loss {loss:.4f} rate {rate:.2e} "
            f"{speed:,.0f} tokens/s, {share:.1%} of {self._peak / 1e12:.1f} TFLOP/s",
            flush=True,
        )

    @torch.no_grad()
    def _evaluate(self, train_loss: float) -> None:
        """Score the held-out batches; log, and draw the curve."""
        self.model.eval()
        losses = {}
        for name, batch in self.held_out.items():
            total = 0.0
            for part in self._parts(batch):
                with self._autocast():
                    total += float(self.held_out_loss(self.model, part))
            losses[name] = round(total / float(batch.weights.sum()), 4)
        progress = self.progress
        progress.evaluated_at = self.done
        entry = {
            "step": progress.step,
            "tokens": progress.tokens,
            "elapsed_s": round(progress.elapsed_s, 1),
            "train_loss": None if math.isnan(train_loss) else round(train_loss, 4),
            **losses,
        }
        progress.history.append(entry)
        mean = sum(losses.values()) / len(losses) if losses else math.inf
        best = mean < progress.best_loss
        if best:
            progress.best_loss = mean
            state = self.model.state_dict()
            self.best = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
        shown = "  ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
        print(f"  {shown}{'  (best)' if best else ''}", flush=True)
        lines = [json.dumps(entry) for entry in progress.history]
        (self.folder / "log.jsonl").write_text("\n".join(lines) + "\n")
        series = {
            name: [(e["tokens"] / 1e6, e[name]) for e in progress.history if e[name] is not None]
            for name in ("train_loss", *losses)
        }
        draw(
            series, f"{self.folder.name}: nats a token", "million tokens", self.folder / "loss.svg"
        )

    def save(self) -> None:
        """Write the checkpoint; the previous one stands until the new one is whole."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "mixture": self.mixture.state(),
            "progress": asdict(self.progress),
            "best": self.best,
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)
        self._saved_s = self.progress.elapsed_s

    def _read_checkpoint(self) -> dict[str, Any]:
        """The checkpoint. Raises ConfigError for one that is damaged, or of another run."""
        try:
            state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
            weights = state["model"]
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError, LookupError) as error:
            raise ConfigError(
                f"{self.checkpoint} can't be read: it is damaged, or no checkpoint. Delete "
                f"{self.folder} to start anew."
            ) from error
        sizes = {name: tensor.shape for name, tensor in self.model.state_dict().items()}
        if sizes != {name: tensor.shape for name, tensor in weights.items()}:
            raise ConfigError(
                f"{self.folder} holds a run of a model of another shape. Repeat its command to go "
                "on, or delete the folder to start over."
            )
        return state

    def _restore(self) -> None:
        state = self._read_checkpoint()
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.mixture.restore(state["mixture"])
        self.progress = Progress(**state["progress"])
        self.best = state["best"]
        if self.config.steps is not None:
            self.progress.total_steps = self.config.steps
        # a run that had ended and is lengthened has been looked at for less of its length
        self.progress.evaluated_at = min(self.progress.evaluated_at, self.done)
        torch.set_rng_state(state["random"])
        if state["cuda_random"] and self.device.type == "cuda":
            torch.cuda.set_rng_state_all(state["cuda_random"])
        print(f"resumed at step {self.progress.step:,}", flush=True)
