"""What the examples of a deployment promise of the server, held against the server."""

from __future__ import annotations

import json
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.config import EngineConfig
from penstock.fleet.files import read_fleet
from penstock.runtime import load_runtime
from penstock.server import ServerConfig
from tests.server.conftest import serving

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
NAMES = re.compile(r"(?:vllm|penstock):[a-z0-9_]+")


def _dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text())
    return found


def _expressions() -> list[str]:
    return [target["expr"] for panel in _dashboard()["panels"] for target in panel["targets"]]


@pytest.fixture(scope="module")
def series() -> dict[str, set[str]]:
    """The labels of every series that /metrics gives once requests have run."""
    with (
        serving(ServerConfig(), runtime=load_runtime(EngineConfig.of())) as running,
        running.client() as client,
    ):
        ask = {"prompt": "Once", "max_tokens": 3}
        assert client.post("/v1/completions", json=ask).status_code == 200
        assert client.get("/nowhere").status_code == 404
        running.rest()
        text = client.get("/metrics").text
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
        found.setdefault(family.name, set())  # a gauge whose value isn't known yet
    return found


def test_every_metric_of_the_dashboard_is_one_of_the_servers(series: dict[str, set[str]]) -> None:
    text = json.dumps(_dashboard())
    asked = set(NAMES.findall(text))
    assert len(asked) > 15
    assert "penstock:request_rejections_total" in asked
    assert asked - series.keys() == set()


def test_labels_are_those_of_the_series(series: dict[str, set[str]]) -> None:
    for expression in _expressions():
        (by,) = re.findall(r"by \((\w+)\)", expression) or ["model_name"]
        for name in NAMES.findall(expression):
            assert f'{name}{{model_name=~"$model"}}' in expression
            if name != "penstock:floor_ratio":  # which has none until peaks are measured
                assert {by, "model_name"} <= series[name], expression


def test_counters_are_rates_and_quantiles_are_of_buckets() -> None:
    for expression in _expressions():
        for name in NAMES.findall(expression):
            rated = re.search(rf"rate\({name}\{{[^}}]*\}}\[\$__rate_interval\]\)", expression)
            assert bool(rated) == name.endswith(("_total", "_bucket")), expression
        assert ("histogram_quantile" in expression) == ("_bucket" in expression)
        assert expression.count("(") == expression.count(")")


def test_the_dashboard_is_one() -> None:
    dashboard = _dashboard()
    assert dashboard["schemaVersion"] >= 36
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {
        "datasource",
        "model",
    }
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        mine = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not mine & cells, panel["title"]
        cells |= mine
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
        assert panel["type"] == "timeseries"


def _options() -> set[str]:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return {
        name
        for parameter in command.params
        if parameter.param_type_name == "option"
        for name in parameter.opts
    }


def test_the_units_command_is_one() -> None:
    unit = (DEPLOY / "penstock.service").read_text().replace("\\\n", " ")
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    words = shlex.split(command)
    assert words[1] == "serve"
    assert {word for word in words if word.startswith("--")} <= _options()
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(stop) > float(words[words.index("--shutdown-timeout") + 1])
    settings = re.findall(r"^(\w+)=", unit, re.MULTILINE)
    assert len(set(settings)) == len(settings)


def test_the_containers_command_is_one() -> None:
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"python:3.11-slim"}
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    words = json.loads(entry)
    assert words[:2] == ["penstock", "serve"]
    assert {word for word in words if word.startswith("--")} <= _options()
    assert re.search(r"^USER (?!root|0$)\S+$", text, re.MULTILINE)
    (check,) = re.findall(r"CMD (\[.*\])$", text, re.MULTILINE)
    compile(json.loads(check)[2], "healthcheck", "exec")
    project = (DEPLOY.parents[1] / "pyproject.toml").read_text()
    for extra in re.findall(r"'\.\[(.*)\]'", text)[0].split(","):
        assert f"\n{extra} = [" in project


def test_the_containers_context_is_what_git_keeps() -> None:
    """Nothing that git ignores is copied into the build."""
    root = DEPLOY.parents[1]
    ignored = (root / ".dockerignore").read_text().splitlines()
    assert {".git", ".venv"} <= set(ignored)
    for line in (root / ".gitignore").read_text().splitlines():
        name = line.rstrip("/")
        covered = {name, f"**/{name}"} & set(ignored)
        assert covered or any(fnmatch(name, one) for one in ignored), line


def test_the_proxy_keeps_no_events_back() -> None:
    text = (DEPLOY / "nginx.conf").read_text()
    for directive in ("proxy_buffering off;", "proxy_http_version 1.1;", "gzip off;"):
        assert directive in text
    assert "proxy_set_header X-Forwarded-Proto $scheme;" in text
    (size,) = re.findall(r"client_max_body_size (\d+)m;", text)
    assert int(size) << 20 == ServerConfig().max_body_bytes
    assert text.count("{") == text.count("}")


def test_prometheus_asks_what_is_served() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"][0]["targets"] == [f"127.0.0.1:{ServerConfig().port}"]


def test_the_fleets_file_is_read() -> None:
    fleet = read_fleet(DEPLOY / "fleet.toml", ServerConfig())
    default, rare = fleet.models
    assert (default.instances, default.prefill, rare.instances) == ((2, 2), 1, (0, 1))
    options = CliRunner().invoke(app, ["serve", "/nowhere", *default.options])
    assert "No such option" not in options.output
