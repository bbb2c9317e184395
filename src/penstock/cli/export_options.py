"""Options of `penstock export` in groups: which weights it writes, what their method is told."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.pipeline.new_weights import NewWeights

_WEIGHTS, _TEXT, _METHOD = "Weights", "Calibration text", "What a method is told"
_TRAINING = "What --method qat is told"


@dataclass(frozen=True, slots=True)
class WeightFlags:
    """What becomes of the weights."""

    quant: Annotated[
        str | None,
        typer.Option(
            help="Store the layers' matrices in this scheme: w4a16-g128, w8a8, fp8, nf4, … "
            "(see --quantization of generate).",
            rich_help_panel=_WEIGHTS,
        ),
    ] = None
    method: Annotated[
        str | None,
        typer.Option(
            help="How values are chosen: rtn, gptq, awq, smoothquant, awq+gptq, smoothquant+gptq, "
            "qat. Default: gptq with --calib, else rtn.",
            rich_help_panel=_WEIGHTS,
        ),
    ] = None
    head: Annotated[
        str | None,
        typer.Option(
            help="A scheme of the output head, too. Default: it stays as it is.",
            rich_help_panel=_WEIGHTS,
        ),
    ] = None
    special: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MATRIX=SCHEME",
            help="Another scheme, or none, for matrices by name: 'layers.0.*=w8a16', "
            "'*.mlp.down=none'. May be repeated; of several that match, the last.",
            rich_help_panel=_WEIGHTS,
        ),
    ] = None
    layout: Annotated[
        str,
        typer.Option(
            help="compressed-tensors, awq, gptq, fp8 or bitsandbytes. auto: the first of them that "
            "can hold the schemes.",
            rich_help_panel=_WEIGHTS,
        ),
    ] = "auto"
    budget: Annotated[
        str | None,
        typer.Option(
            help="Choose each matrix's scheme by what it loses on the text: 4.5bpw, or a loss.",
            rich_help_panel=_WEIGHTS,
        ),
    ] = None
    mixture: Annotated[
        str | None,
        typer.Option(
            help="Schemes that --budget chooses from, joined by commas. Default: "
            "w4a16-g128,w4a16-g32,w8a16-g128.",
            rich_help_panel=_WEIGHTS,
        ),
    ] = None
    merge_lora: Annotated[
        str | None,
        typer.Option(
            metavar="<path>",
            help="Add the LoRA adapter in this folder (PEFT's layout), or the embedded model's "
            "stories-shakespeare or stories-verse.",
            rich_help_panel=_WEIGHTS,
        ),
    ] = None
    calib: Annotated[
        list[Path] | None,
        typer.Option(
            help="A text that values are fitted to; may be repeated.", rich_help_panel=_TEXT
        ),
    ] = None
    num_samples: Annotated[
        int, typer.Option(min=1, help="Windows of the text.", rich_help_panel=_TEXT)
    ] = 128
    window: Annotated[
        int, typer.Option(min=2, help="Tokens of each window.", rich_help_panel=_TEXT)
    ] = 512
    budget_windows: Annotated[
        int,
        typer.Option(
            min=1,
            help="Windows on which --budget tries each matrix in each scheme.",
            rich_help_panel=_TEXT,
        ),
    ] = 4

    def new_weights(self, method: MethodFlags, texts: tuple[Path, ...]) -> NewWeights:
        """These choices, fitted to `texts`. Raises ConfigError for what can't be."""
        from penstock.models.hub import adapter_folder
        from penstock.pipeline.method_options import MethodOptions
        from penstock.pipeline.new_weights import MIXTURE, NewWeights

        adapter = None if self.merge_lora is None else adapter_folder(self.merge_lora)
        mixture: tuple[str, ...] = MIXTURE
        if self.mixture is not None:
            mixture = tuple(name.strip() for name in self.mixture.split(","))
        return NewWeights(
            quant=self.quant,
            method=self.method,
            options=MethodOptions(**asdict(method)),
            calib=texts,
            num_samples=self.num_samples,
            window=self.window,
            layout=self.layout,
            head=self.head,
            special=dict(map(_special, self.special or ())),
            budget=self.budget,
            mixture=mixture,
            budget_windows=self.budget_windows,
            merge_lora=adapter,
        )


@dataclass(frozen=True, slots=True)
class MethodFlags:
    """`pipeline.method_options.MethodOptions`, with help."""

    act_order: Annotated[
        bool | None,
        typer.Option(
            help="GPTQ (desc_act): columns of the largest inputs first, under scales chosen "
            "before; or in their order, each group's scale when its turn comes. Default: first.",
            rich_help_panel=_METHOD,
        ),
    ] = None
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="GPTQ: columns that are finished before the rest is updated. Default: 128.",
            rich_help_panel=_METHOD,
        ),
    ] = None
    damp_percent: Annotated[
        float | None,
        typer.Option(
            help="GPTQ (dampening_frac): share of the Hessian's mean diagonal that is added to "
            "it. Default: 0.01, which is 1%.",
            rich_help_panel=_METHOD,
        ),
    ] = None
    clip: Annotated[
        bool | None,
        typer.Option(
            help="GPTQ, AWQ: search how far each group's ends are drawn in. Default: AWQ does.",
            rich_help_panel=_METHOD,
        ),
    ] = None
    n_grid: Annotated[
        int | None,
        typer.Option(
            min=1, help="AWQ: exponents that are tried. Default: 20.", rich_help_panel=_METHOD
        ),
    ] = None
    search_rows: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="AWQ: rows of each matrix that its search looks at. Default: 512.",
            rich_help_panel=_METHOD,
        ),
    ] = None
    alpha: Annotated[
        float | None,
        typer.Option(
            help="SmoothQuant: share of the difficulty that moves to the weights, 0 to 1. "
            "Default: 0.5.",
            rich_help_panel=_METHOD,
        ),
    ] = None
    calibrator: Annotated[
        str | None,
        typer.Option(
            help="Static activations (…-static): where values are cut off: minmax, percentile, "
            "entropy or mse. Default: minmax.",
            rich_help_panel=_METHOD,
        ),
    ] = None
    percentile: Annotated[
        float | None,
        typer.Option(
            help="Of --calibrator percentile: the share of values below the cut. Default: 99.99.",
            rich_help_panel=_METHOD,
        ),
    ] = None
    from_quantized: Annotated[
        bool | None,
        typer.Option(
            help="Fit each layer to what the quantized layers before it give, or the float ones. "
            "Default: the quantized.",
            rich_help_panel=_METHOD,
        ),
    ] = None
    steps: Annotated[
        int | None, typer.Option(min=1, help="Default: 100.", rich_help_panel=_TRAINING)
    ] = None
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Windows a step. Default: 4.", rich_help_panel=_TRAINING),
    ] = None
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="At the start; a cosine takes it to a tenth. Default: 2e-4.",
            rich_help_panel=_TRAINING,
        ),
    ] = None
    weight_decay: Annotated[
        float | None, typer.Option(help="AdamW's. Default: 0.", rich_help_panel=_TRAINING)
    ] = None
    distillation: Annotated[
        float | None,
        typer.Option(
            help="Share of the loss that is KL from the float model, the rest being the text's "
            "own. Default: 1.",
            rich_help_panel=_TRAINING,
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Of the order of windows. Default: 0.", rich_help_panel=_TRAINING),
    ] = None


def _special(words: str) -> tuple[str, str | None]:
    """`*.mlp.down=w8a16` → ("*.mlp.down", "w8a16"); none → None."""
    pattern, equals, scheme = words.rpartition("=")
    if not equals or not pattern or not scheme:
        raise ConfigError(
            f"--special {words} isn't MATRIX=SCHEME: 'layers.0.*=w8a16', '*.mlp.down=none'."
        )
    return pattern, None if scheme == "none" else scheme
