"""Several models as one: stages whose answers are parts of later stages' prompts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from penstock.errors import ConfigError
from penstock.server.protocol.chat import ChatRequest
from penstock.server.validation import describe

INPUT = "input"
"""What the caller's last message is called in prompts."""
_PLACE = re.compile(r"\{([A-Za-z0-9_-]+)\}")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FIXED = ("messages", "model", "stream", "stream_options", "n", "tools", "tool_choice")


@dataclass(frozen=True, slots=True)
class Stage:
    """One question to one model."""

    name: str
    model: str
    prompt: str  # {input} and {names of stages before} stand for texts
    system: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)  # of the request

    @property
    def needs(self) -> set[str]:
        """What stands in its prompt."""
        return set(_PLACE.findall(self.prompt))

    def check(self, here: str) -> None:
        """Raises ConfigError for parameters that a request can't have."""
        body = {"model": self.model, "messages": self.messages(dict.fromkeys(self.needs, "x"))}
        try:
            ChatRequest.model_validate(body | self.parameters)
        except ValidationError as error:
            said = describe(error.errors(), "").message
            raise ConfigError(f"{here}: parameters: {said}") from error

    def messages(self, texts: dict[str, str]) -> list[dict[str, str]]:
        """The conversation that it is asked with."""
        prompt = _PLACE.sub(lambda place: texts[place[1]], self.prompt)
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": prompt}]


@dataclass(frozen=True, slots=True)
class Ensemble:
    """Stages; the last one's answer is the ensemble's."""

    name: str
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError(f"The ensemble {self.name!r} has no stage.")
        known = {INPUT}
        for stage in self.stages:
            here = f"The ensemble {self.name!r}, stage {stage.name!r}"
            if not _NAME.fullmatch(stage.name) or stage.name in known:
                raise ConfigError(
                    f"{here}: a name has letters, digits, _ and -, and is given once."
                )
            unknown = stage.needs - known
            if unknown:
                raise ConfigError(
                    f"{here}: {{{min(unknown)}}} is no stage before it. There is: "
                    f"{', '.join(sorted(known))}."
                )
            wrong = next((x for x in stage.parameters if x in _FIXED), None)
            if wrong is not None:
                raise ConfigError(f"{here}: {wrong} can't be among its parameters.")
            stage.check(here)
            known.add(stage.name)
        unused = (
            known - {INPUT} - {x for s in self.stages for x in s.needs} - {self.stages[-1].name}
        )
        if unused:
            raise ConfigError(
                f"The ensemble {self.name!r}: nobody reads what the stage {min(unused)!r} says."
            )

    def check(self, models: Sequence[str]) -> None:
        """Raises ConfigError for a stage of a model that isn't there."""
        for stage in self.stages:
            if stage.model not in models:
                raise ConfigError(
                    f"The ensemble {self.name!r}, stage {stage.name!r}: there is no model "
                    f"{stage.model!r}."
                )

    @property
    def rounds(self) -> list[list[Stage]]:
        """Stages that can run at once, round after round; the last stage is the last round's."""
        left, done, found = list(self.stages[:-1]), {INPUT}, []
        while left:
            now = [stage for stage in left if stage.needs <= done]
            found.append(now)
            done |= {stage.name for stage in now}
            left = [stage for stage in left if stage not in now]
        return [*found, [self.stages[-1]]]
