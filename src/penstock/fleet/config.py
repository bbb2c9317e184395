"""What a fleet is made of: models, how many instances of each, and where they run."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field, replace
from typing import Literal, get_args
from urllib.parse import urlsplit

from penstock.cpus import numa_cpus, usable_cpus
from penstock.errors import ConfigError, nearest
from penstock.fleet.ensemble import Ensemble
from penstock.fleet.needs import Needs
from penstock.server import ServerConfig

Policy = Literal["prefix", "least", "round_robin"]
DISK_DIR, DISK_SPACE = "--prefix-cache-dir", "--prefix-cache-disk-space"
POLICIES: tuple[str, ...] = get_args(Policy)
MAX_INSTANCES = 256
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_RAY = re.compile(r"auto|local|(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
_URL = re.compile(r"https?://[^\s/?#@]+(?:/[^\s?#@]*)?")
_LISTENS, _LETS_IN = "the fleet listens", "the fleet lets callers in"
_LIMITS, _ITS_OWN = "the fleet bounds requests", "it is the fleet's"
RESERVED = {
    "--host": _LISTENS,
    "--port": _LISTENS,
    "--uds": _LISTENS,
    "--api-key": _LETS_IN,
    "--api-key-file": _LETS_IN,
    "--allow-unauthenticated": _LETS_IN,
    "--allowed-host": _LETS_IN,
    "--allowed-origin": _LETS_IN,
    "--allowed-origins": _LETS_IN,
    "--max-queue-size": _LIMITS,
    "--requests-per-minute": _LIMITS,
    "--tokens-per-minute": _LIMITS,
    "--max-concurrency": _LIMITS,
    "--request-timeout": _LIMITS,
    "--max-body-size": _LIMITS,
    "--write-timeout": _LIMITS,
    "--body-timeout": _LIMITS,
    "--shutdown-timeout": _ITS_OWN,
    "--log-format": _ITS_OWN,
    "--log-requests": _ITS_OWN,
    "--page": "the fleet has the page",
    "--served-model-name": "a model's name is its [[model]]'s",
    "--allow-runtime-lora-updating": "an adapter would be loaded by one instance only",
}
"""Options of `penstock serve` that a model can't have, and why."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model of a fleet: processes of ours, or servers that run elsewhere."""

    name: str
    model: str | None = None  # a folder, a file, an embedded model
    instances: tuple[int, int] = (1, 1)  # at least, at most; from 0, it is loaded when asked for
    options: tuple[str, ...] = ()  # of `penstock serve`
    cpus: Literal["shared", "split", "numa"] | tuple[tuple[int, ...], ...] = "shared"
    workers: tuple[str, ...] = ()  # their addresses, where they run elsewhere
    api_key_env: str | None = None  # the variable that holds those servers' key
    idle_timeout_s: float = 300.0  # until an instance more than is needed ends
    target_demand: float = 0.75  # of an instance, beyond which there shall be another
    prefill: int = 0  # further instances, which compute long prompts for the others
    prefill_workers: tuple[str, ...] = ()  # those that run elsewhere
    prefill_from: int | None = None  # characters of a prompt, from which they do; 4096
    prefill_space: float | None = None  # GiB at most for what they hand over; 4
    on: Literal["here", "ray"] | None = None  # None: on Ray where the fleet has it
    ray: Needs | None = None  # what Ray is to reserve for an instance; None: a CPU
    is_prefill: bool = False  # these are they
    first: int = 0  # instance's number, among those that share CPUs

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"A model is named {self.name!r}; a name has up to 128 letters, digits and any of "
                ". _ : / -"
            )
        if self.model == "":
            raise ConfigError(f"{self._here}: model is empty.")
        elsewhere = bool(self.workers) and not self.is_prefill
        if elsewhere and (self.instances, self.cpus, self.idle_timeout_s) != (
            (1, 1),
            "shared",
            300,
        ):
            raise ConfigError(
                f"{self._here} runs elsewhere; instances, cpus and idle_timeout_s are for models "
                "started here."
            )
        if (self.model is None) == (not self.workers):
            raise ConfigError(f"{self._here}: give either model or workers.")
        least, most = self.instances
        if not 0 <= least <= most or not 1 <= most <= MAX_INSTANCES:
            raise ConfigError(
                f"{self._here}: instances is {least} to {most}; there may be 0 to "
                f"{MAX_INSTANCES}, and at most 1 or more."
            )
        if not math.isfinite(self.idle_timeout_s) or self.idle_timeout_s <= 0:
            raise ConfigError(
                f"{self._here}: idle_timeout_s is {self.idle_timeout_s}; it must be a time above 0."
            )
        self._check_prefill()
        if not 0 < self.target_demand <= 1:
            raise ConfigError(
                f"{self._here}: target_demand is {self.target_demand}; it must be in (0, 1]."
            )
        self._check_options()
        self._check_workers()
        self._check_cpus()
        self._check_place()

    @property
    def _here(self) -> str:
        return f"The model {self.name!r}"

    def _check_prefill(self) -> None:
        if not 0 <= self.prefill <= MAX_INSTANCES or (self.prefill and self.workers):
            raise ConfigError(
                f"{self._here}: prefill is {self.prefill}; it must be 0 to {MAX_INSTANCES}, and "
                "0 of a model that runs elsewhere: give prefill_workers."
            )
        if self.prefill and not self.instances[0]:
            raise ConfigError(
                f"{self._here}: prefill is {self.prefill}, and its instances may all rest. Let at "
                "least 1 always run."
            )
        least, space = self.prefill_from, self.prefill_space
        if (least is not None and least < 1) or (space is not None and not 0 < space < math.inf):
            raise ConfigError(
                f"{self._here}: prefill_from is {least} and prefill_space {space}; both must be "
                "above 0."
            )
        if least is not None and not (self.prefill or self.prefill_workers or self.is_prefill):
            raise ConfigError(f"{self._here}: prefill_from is for models with prefill.")
        own = self.given(DISK_DIR)
        if space is not None and (own or not (self.prefill or self.is_prefill)):
            raise ConfigError(
                f"{self._here}: prefill_space is for models with prefill and without a "
                f"{DISK_DIR} of their own."
            )
        if self.prefill and self.given(DISK_SPACE) and not own:
            raise ConfigError(
                f"{self._here}: {DISK_SPACE} is for a {DISK_DIR}; give prefill_space."
            )

    @property
    def least_prefill(self) -> int:
        """Characters of a prompt, from which it is computed apart."""
        return self.prefill_from or 4096

    def _check_options(self) -> None:
        for option in self.options:
            word = option.partition("=")[0].replace("--no-", "--")
            if word in RESERVED:
                raise ConfigError(f"{self._here} can't have the option {word}: {RESERVED[word]}.")
        if self.workers and self.options:
            raise ConfigError(f"{self._here} runs elsewhere; options are for models started here.")

    def _check_workers(self) -> None:
        if self.prefill_workers and not self.workers:
            raise ConfigError(
                f"{self._here}: prefill_workers are for workers that run elsewhere; here, say how "
                "many with prefill."
            )
        for url in (*self.workers, *self.prefill_workers):
            if not _is_address(url):
                raise ConfigError(
                    f"{self._here}: {url!r} isn't an address like http://10.0.0.2:8000."
                )
        urls = [*self.workers, *self.prefill_workers]
        if len(set(urls)) < len(urls):
            raise ConfigError(f"{self._here}: an address is there twice.")
        if self.api_key_env is not None and not self.workers:
            raise ConfigError(f"{self._here}: api_key_env is for workers that run elsewhere.")
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise ConfigError(f"{self._here}: the variable {self.api_key_env} isn't set.")

    def _check_cpus(self) -> None:
        if isinstance(self.cpus, str):
            return
        if len(self.cpus) != self._parts:
            raise ConfigError(
                f"{self._here}: cpus has {len(self.cpus)} sets, and there may be "
                f"{self._parts} instances. Give one each."
            )
        missing = {cpu for one in self.cpus for cpu in one} - set(usable_cpus())
        if missing or not all(self.cpus):
            told = f"{min(missing)} isn't usable here" if missing else "one set is empty"
            raise ConfigError(f"{self._here}: cpus: {told}.")

    def _check_place(self) -> None:
        if self.on not in (None, "here", "ray"):
            raise ConfigError(f"{self._here}: on is {self.on!r}; it must be here or ray.")
        if self.workers and not self.is_prefill and (self.on or self.ray):
            raise ConfigError(
                f"{self._here} runs elsewhere; on and ray are for models started by the fleet."
            )
        if self.on == "here" and self.ray is not None:
            raise ConfigError(f"{self._here} runs here, and has a table ray. Leave one out.")

    def check_ray(self) -> None:
        """Raises ConfigError for what can't be where Ray chooses machines and CPUs."""
        if self.cpus != "shared":
            raise ConfigError(
                f"{self._here}: cpus is for models that run here; Ray reserves CPUs: give its "
                "table ray num_cpus."
            )
        if self.prefill and not self.given(DISK_DIR):
            raise ConfigError(
                f"{self._here}: prefill hands prompts over in this machine's memory, and Ray may "
                f"choose others. Give it the option {DISK_DIR} with a folder that all nodes have."
            )

    def given(self, option: str) -> list[str]:
        """What an option of its instances is given, as often as it is."""
        words = list(self.options)
        after = [words[i + 1] for i, word in enumerate(words[:-1]) if word == option]
        return after + [x.partition("=")[2] for x in words if x.startswith(f"{option}=")]

    @property
    def adapters(self) -> list[str]:
        """Names that its instances are told to serve adapters as."""
        return [x.partition("=")[0] for x in self.given("--lora-modules") if not x.startswith("{")]

    @property
    def policy(self) -> str | None:
        """By which its instances schedule; None: they aren't ours."""
        if self.workers:
            return None
        return (self.given("--scheduling-policy") or ["fcfs"])[-1]

    @property
    def _parts(self) -> int:
        """Instances that share CPUs, of both kinds."""
        return self.first + self.instances[1] + self.prefill

    @property
    def prefillers(self) -> ModelConfig | None:
        """Those that compute prompts for the others, where there are some."""
        if not self.prefill and not self.prefill_workers:
            return None
        count = self.prefill or len(self.prefill_workers)
        return replace(
            self,
            instances=(count, count),
            prefill=0,
            workers=self.prefill_workers,
            prefill_workers=(),
            is_prefill=True,
            first=self.instances[1],
        )

    def cpus_of(self, index: int) -> tuple[int, ...] | None:
        """The CPUs of one instance; None: all, shared with everybody."""
        index += self.first
        if self.cpus == "shared":
            return None
        if not isinstance(self.cpus, str):
            return self.cpus[index]
        if self.cpus == "numa":
            nodes = numa_cpus()
            return nodes[index % len(nodes)]
        usable, parts = usable_cpus(), self._parts
        if len(usable) < parts:
            raise ConfigError(
                f"{self._here}: {len(usable)} CPUs can't be split among {parts} instances."
            )
        return tuple(usable[len(usable) * index // parts : len(usable) * (index + 1) // parts])


def _is_address(url: str) -> bool:
    try:
        return _URL.fullmatch(url) is not None and urlsplit(url).port != 0
    except ValueError:  # a port beyond what there is
        return False


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """A fleet: the server in front, and the models behind it; the first is the default."""

    models: tuple[ModelConfig, ...]
    server: ServerConfig = field(default_factory=ServerConfig)
    policy: Policy = "prefix"
    ray: str | None = None  # the cluster's HOST:PORT, auto, or local; None: all run here
    ensembles: tuple[Ensemble, ...] = ()
    max_loaded: int | None = None  # models that run here at once; None: all
    start_timeout_s: float = 600.0  # for an instance to be ready
    max_attempts: int = 3  # at a request, on instances that break

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("A fleet needs a model.")
        names = [x.name for x in self.models] + [x.name for x in self.ensembles]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"Two models or ensembles are named {twice!r}.")
        for ensemble in self.ensembles:
            ensemble.check([model.name for model in self.models])
        if self.policy not in POLICIES:
            raise ConfigError(
                f"policy is {self.policy!r}.{nearest(self.policy, POLICIES)} There are: "
                f"{', '.join(POLICIES)}."
            )
        if self.max_attempts < 1:
            raise ConfigError(f"max_attempts is {self.max_attempts}; it must be at least 1.")
        if not math.isfinite(self.start_timeout_s) or self.start_timeout_s <= 0:
            raise ConfigError(
                f"start_timeout_s is {self.start_timeout_s}; it must be a time above 0."
            )
        self._check_loaded()
        self._check_keys()
        self._check_ray()
        for model in self.models:
            if model.model is not None:
                model.cpus_of(0)

    def needs_of(self, model: ModelConfig) -> Needs | None:
        """What Ray is to reserve for an instance of it; None: it doesn't run there."""
        if self.ray is None or model.model is None or model.on == "here":
            return None
        return model.ray or Needs()

    def _check_ray(self) -> None:
        if self.ray is None:
            asking = next((x.name for x in self.models if x.on == "ray" or x.ray), None)
            if asking is not None:
                raise ConfigError(
                    f"The model {asking!r} is to run on Ray, and the fleet has no ray. Give it "
                    'ray = "auto", or --ray.'
                )
            return
        if not _RAY.fullmatch(self.ray):
            raise ConfigError(f"ray is {self.ray!r}; it must be auto, local, or HOST:PORT.")
        there = [model for model in self.models if self.needs_of(model) is not None]
        if not there:
            raise ConfigError(f"ray is {self.ray!r}, and no model is started there.")
        for model in there:
            model.check_ray()

    def _check_loaded(self) -> None:
        if self.max_loaded is None:
            return
        always = [m.name for m in self.models if m.model is not None and m.instances[0] > 0]
        if self.max_loaded < max(1, len(always)):
            raise ConfigError(
                f"max_loaded is {self.max_loaded}, and {len(always)} models always run "
                f"({', '.join(always) or 'none'}); it must be at least {max(1, len(always))}."
            )

    def _check_keys(self) -> None:
        for key in self.server.accounts:
            if key.limits.tokens_per_minute is not None:
                raise ConfigError(
                    f"The API key {key.name!r} has tokens_per_minute, which a fleet doesn't count. "
                    "Give requests_per_minute or max_concurrency."
                )
