"""Options in groups: how tokens are drawn, the form of an output, what guides it, a search in
place of sampling, and how a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.device_options import (
    AsyncScheduling,
    Compilation,
    ContextParallelSize,
    Deterministic,
    Device,
    EnableExpertParallel,
    EnforceEager,
    LoadFormat,
    MmProcessor,
    Mmproj,
    NoMmproj,
    Nvtx,
    PipelineParallelSize,
    Placed,
    StageAddresses,
    TensorParallelSize,
    how_to_cut,
    through,
)
from penstock.cli.disk_options import PrefixCacheDir, PrefixCacheDiskSpace, on_disk
from penstock.cli.lora_options import Lora, one_adapter, single
from penstock.cli.options import (
    Dtype,
    KvCacheDtype,
    MaxModelLen,
    MinP,
    Quantization,
    RepetitionPenalty,
    Sampling,
    Seed,
    SpeculativeConfig,
    Temperature,
    TopK,
    TopP,
    given,
    named_values,
    speculation,
    together,
)
from penstock.cli.reach_options import MaxAttentionWindow, SinkTokenLength, reaching
from penstock.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from penstock.config import EngineConfig
    from penstock.engine import RequestOptions
    from penstock.runtime import Runtime
    from penstock.sampling import BeamSearchParams

_FORM, _GUIDANCE, _BEAMS = "Form of the output", "Guidance", "Beam search"
_LONGEST_NAME = 4096  # of a file
_ENDINGS = frozenset((".gbnf", ".lark", ".ebnf", ".bnf", ".txt"))


@dataclass(frozen=True, slots=True)
class Drawn:
    """How tokens are drawn."""

    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    more: Sampling = None
    seed: Seed = None

    def with_(self, *groups: dict[str, Any]) -> dict[str, Any]:
        """What was given, and in the groups. Raises ConfigError for what is given twice."""
        own = given(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
        )
        return together(own, *groups, named_values(self.more))


DRAWN = Drawn()


@dataclass(frozen=True, slots=True)
class Loaded:
    """How a model is loaded, and where."""

    dtype: Dtype = "auto"
    quantization: Quantization = None
    kv_cache_dtype: KvCacheDtype = "auto"
    max_model_len: MaxModelLen = None
    speculative_config: SpeculativeConfig = None
    device: Device = "auto"
    deterministic: Deterministic = None
    enforce_eager: EnforceEager = False
    compilation_config: Compilation = None
    load_format: LoadFormat = "auto"
    async_scheduling: AsyncScheduling = None
    nvtx: Nvtx = False
    tensor_parallel_size: TensorParallelSize = None
    pipeline_parallel_size: PipelineParallelSize = None
    context_parallel_size: ContextParallelSize = None
    stage_addresses: StageAddresses = None
    enable_expert_parallel: EnableExpertParallel = False
    lora: Lora = None
    mm_processor_kwargs: MmProcessor = None
    mmproj: Mmproj = None
    no_mmproj: NoMmproj = False
    prefix_cache_dir: PrefixCacheDir = None
    prefix_cache_disk_space: PrefixCacheDiskSpace = None
    max_attention_window: MaxAttentionWindow = None
    sink_token_length: SinkTokenLength = None

    def config(self, model: str) -> EngineConfig:
        """An engine's, for this model."""
        from penstock.config import EngineConfig

        options = given(
            dtype=self.dtype,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            max_model_len=self.max_model_len,
            speculative_config=speculation(self.speculative_config),
            mm_processor_kwargs=how_to_cut(self.mm_processor_kwargs),
        )
        options |= Placed(
            self.device,
            self.deterministic,
            self.enforce_eager,
            self.compilation_config,
            self.load_format,
            self.async_scheduling,
            self.nvtx,
            self.tensor_parallel_size,
            self.pipeline_parallel_size,
            self.context_parallel_size,
            self.stage_addresses,
            self.enable_expert_parallel,
        ).chosen()
        options |= through(self.mmproj, self.no_mmproj)
        options |= on_disk(self.prefix_cache_dir, self.prefix_cache_disk_space)
        options |= reaching(self.max_attention_window, self.sink_token_length)
        return EngineConfig.of(model=model, **options, **one_adapter(single(self.lora)))

    def wishes(self, runtime: Runtime, prediction: str | None = None) -> RequestOptions:
        """Of each request to a model that was loaded so; its adapter is loaded as well."""
        from penstock.engine import RequestOptions
        from penstock.engine.lora import load_adapter

        adapter = single(self.lora)
        if adapter is not None:
            load_adapter(runtime, adapter, adapter)
        return RequestOptions(prediction=prediction, adapter=adapter)


LOADED = Loaded()


@dataclass(frozen=True, slots=True)
class Form:
    """What an output is held to."""

    json_schema: Annotated[
        str | None,
        typer.Option(
            metavar="SCHEMA|FILE",
            help="JSON that follows this schema: the schema itself, such as '{}', or a file.",
            rich_help_panel=_FORM,
        ),
    ] = None
    regex: Annotated[
        str | None,
        typer.Option(help="The whole text matches it (Rust's syntax).", rich_help_panel=_FORM),
    ] = None
    choice: Annotated[
        list[str] | None,
        typer.Option(help="The text is one of these; may be repeated.", rich_help_panel=_FORM),
    ] = None
    grammar: Annotated[
        str | None,
        typer.Option(
            metavar="GRAMMAR|FILE",
            help="GBNF, as llama.cpp reads it, or Lark: the grammar itself, or a file.",
            rich_help_panel=_FORM,
        ),
    ] = None

    def chosen(self) -> dict[str, Any]:
        """As sampling parameters. Raises ConfigError or InvalidSamplingError."""
        from penstock.sampling import StructuredOutputs

        asked = given(
            json=None if self.json_schema is None else _schema(self.json_schema),
            regex=self.regex,
            choice=self.choice or None,
            grammar=None if self.grammar is None else _grammar(self.grammar),
        )
        if not asked:
            return {}
        if len(asked) > 1:
            first, second = [_OPTIONS[name] for name in asked][:2]
            raise ConfigError(f"{first} and {second} both say what form the text has. Choose one.")
        try:
            closed = "json" in asked  # as over HTTP: nothing is invented that it doesn't name
            return {
                "structured_outputs": StructuredOutputs(
                    **asked, disable_additional_properties=closed
                )
            }
        except PenstockError as error:
            raise as_given(error) from error


_OPTIONS = {
    "json": "--json-schema",
    "regex": "--regex",
    "choice": "--choice",
    "grammar": "--grammar",
}
"""What is called by these names in `StructuredOutputs`."""


def as_given(error: PenstockError) -> PenstockError:
    """The error in the words of the options."""
    said = str(error)
    for name, option in _OPTIONS.items():
        said = said.replace(f"structured_outputs.{name}", option)
    return type(error)(said)


def _schema(value: str) -> str:
    """A schema as text."""
    if value.lstrip().startswith("{") or value.strip() in ("true", "false"):
        return value
    return _read("--json-schema", value, '{"type": "object"}')


def _grammar(value: str) -> str:
    """A grammar as text: a file's, if there is one of that name."""
    is_name = "\n" not in value and len(value.encode()) < _LONGEST_NAME
    if is_name and (Path(value).is_file() or _looks_like_name(value)):
        return _read("--grammar", value, 'root ::= "yes" | "no"')
    return value


def _looks_like_name(value: str) -> bool:
    """Whether a line is meant as a file's name: every grammar has a colon, and few an ending."""
    return ":" not in value or (not set(value) & set(' "') and Path(value).suffix in _ENDINGS)


def _read(option: str, name: str, such: str) -> str:
    """A file's text. such: what could be written out in its place."""
    if not name.strip():
        raise ConfigError(f"{option} is empty. Give a file, or write out {such}.")
    try:
        return Path(name).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"{option} {name!r:.200} looks like the name of a file, and there is none, seen from "
            f"{Path.cwd()}. Give the path of one, or write it out, such as {such}."
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{option} {name!r} is neither written out nor a file that can be read: {error}."
        ) from error


@dataclass(frozen=True, slots=True)
class Guided:
    """What an output is led away from."""

    guidance_scale: Annotated[
        float | None,
        typer.Option(
            help="Above 1: away from the negative prompt (llama.cpp's --cfg-scale).",
            rich_help_panel=_GUIDANCE,
        ),
    ] = None
    negative_prompt: Annotated[
        str | None,
        typer.Option(
            help="What to get away from. Default: what follows the prompt's last token alone.",
            rich_help_panel=_GUIDANCE,
        ),
    ] = None

    def chosen(self) -> dict[str, Any]:
        """As sampling parameters."""
        return given(guidance_scale=self.guidance_scale, negative_prompt=self.negative_prompt)


@dataclass(frozen=True, slots=True)
class Search:
    """A beam search in place of sampling."""

    beam_width: Annotated[
        int | None,
        typer.Option(
            help="Keep this many of the likeliest texts at each token, and show the --n best.",
            rich_help_panel=_BEAMS,
        ),
    ] = None
    length_penalty: Annotated[
        float | None,
        typer.Option(
            help="Above 0 favours long texts, below 0 short ones. Default: 1, the mean.",
            rich_help_panel=_BEAMS,
        ),
    ] = None

    def params(self, chosen: dict[str, Any]) -> BeamSearchParams | None:
        """Of the search, or None where there is none to be. Raises ConfigError."""
        from penstock.sampling import BeamSearchParams

        if self.beam_width is None:
            if self.length_penalty is not None:
                raise ConfigError("--length-penalty ranks a search's texts: give --beam-width too.")
            return None
        known = {one.name for one in fields(BeamSearchParams)}
        for name in chosen:
            if name not in known:
                raise ConfigError(
                    f"{name} has no effect on a search: --beam-width looks for the likeliest "
                    "texts. Leave out one of them."
                )
        penalty = given(length_penalty=self.length_penalty)
        return BeamSearchParams(beam_width=self.beam_width, **penalty, **chosen)
