"""What `penstock doctor` looks at beside the machine: a server that runs, or what a model knows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.bench.served import ServedCheckup

_SERVER = "A server that runs"


@dataclass(frozen=True, slots=True)
class Look:
    """Which server, and against what it is held."""

    base_url: Annotated[
        str | None,
        typer.Option(
            help="Look at this server of Penstock's, or another that has vLLM's metrics: why first "
            "tokens are late, what leaks, what is refused, …",
            rich_help_panel=_SERVER,
        ),
    ] = None
    api_key: Annotated[
        str | None, typer.Option(help="Default: OPENAI_API_KEY.", rich_help_panel=_SERVER)
    ] = None
    served_model: Annotated[
        str | None,
        typer.Option(help="Default: the first that it lists.", rich_help_panel=_SERVER),
    ] = None
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Look at what happens in so many seconds. Default: all since it started.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    ttft_ms: Annotated[
        float | None,
        typer.Option(
            help="First tokens are late, where more than 1% take longer. Default: 500.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    itl_ms: Annotated[
        float | None,
        typer.Option(help="The same of tokens after it. Default: 50.", rich_help_panel=_SERVER),
    ] = None
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Ask for the likelihood of a short text: does the server's model, or that at "
            "PATH, know its language?",
        ),
    ] = False

    def check(self, path: str | None, speculative_config: str | None) -> None:
        """Raises ConfigError for what doesn't go together."""
        named = {
            "--api-key": self.api_key,
            "--served-model": self.served_model,
            "--seconds": self.seconds,
            "--ttft-ms": self.ttft_ms,
            "--itl-ms": self.itl_ms,
        }
        for name, value in named.items():
            if value is not None and self.base_url is None:
                raise ConfigError(f"{name} is of a server: give its --base-url too.")
            if isinstance(value, float) and not 0 < value < 1e6:
                raise ConfigError(f"{name} must be above 0 and below a million, not {value:g}.")
        if self.base_url is None:
            return
        for name, value in (("PATH", path), ("--speculative-config", speculative_config)):
            if value is not None:
                raise ConfigError(
                    f"--base-url looks at a server, {name} at what is here. Leave one of them out."
                )

    def look(self) -> ServedCheckup:
        """At the server."""
        from penstock.bench.served import check_up_served
        from penstock.bench.served.limits import Limits

        assert self.base_url is not None
        usual = Limits()
        return check_up_served(
            self.base_url,
            seconds=self.seconds,
            model=self.served_model,
            api_key=self.api_key or os.environ.get("OPENAI_API_KEY") or None,
            limits=Limits(self.ttft_ms or usual.ttft_ms, self.itl_ms or usual.itl_ms),
            probe=self.probe,
        )


LOOK = Look()


def facts(found: ServedCheckup) -> list[tuple[str, str]]:
    """What was looked at."""
    since = "since it started" if found.since_start else f"in {found.seconds:g} s"
    return [
        ("Server", f"{found.url}, model {found.model}"),
        ("Requests that ended", f"{found.requests:,.0f}, {since}"),
        ("Looked at", ", ".join(found.checks) or "nothing: it tells none of what is read here"),
    ]
