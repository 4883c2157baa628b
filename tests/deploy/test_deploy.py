"""What lies in `deploy/` fits the program: its options, addresses, figures and times."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamdiff.cli import parser as cli_parsers
from streamdiff.config import Config, ServeConfig
from streamdiff.config_file import load
from streamdiff.server import auth
from streamdiff.server.metrics import Metrics
from streamdiff.server.routes import health
from tests.rules.source import ROOT

DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "streamdiff.service"
END_S = 20
"""How long the server may take to end once its viewers have left: ranks have 10 s, and some for the rest."""


# ---- Grafana ---------------------------------------------------------------------------------------------------------


def _exported() -> set[str]:
    """Every name that a query can ask /metrics for."""
    names = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", Metrics().text().decode(), re.MULTILINE):
        endings = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        names |= {name + ending for ending in endings}
    return names


def _queries() -> list[str]:
    board = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
    variables = [each["query"] for each in board["templating"]["list"] if each["type"] == "query"]
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]] + variables


def test_every_figure_of_the_dashboard_exists() -> None:
    asked = {name for query in _queries() for name in re.findall(r"streamdiff_\w+", query)}
    assert len(asked) > 20
    assert asked <= _exported(), asked - _exported()


def test_every_label_of_the_dashboard_is_one_of_its_figure() -> None:
    known = {
        collector._name: set(collector._labelnames) | {"le"}
        for collector in vars(Metrics()).values()
        if hasattr(collector, "_labelnames")
    }
    seen = 0
    for query in _queries():
        for name, selector in re.findall(r"(streamdiff_\w+)\{([^}]*)\}", query):
            by = re.search(r"by \(([^)]*)\)", query)
            labels = set(re.findall(r"(\w+)=~?\"", selector)) | set(re.split(r"[, ]+", by[1]) if by else ())
            figure = re.sub(r"_(total|bucket)$", "", name)
            assert labels - {"job", "instance"} <= known[figure], query
            seen += 1
    assert seen > 20


def test_the_panels_lie_side_by_side() -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        cells = {(x, y) for x in columns for y in rows}
        assert not cells & taken and max(columns) < 24, panel["title"]
        assert panel["description"], panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


# ---- systemd ---------------------------------------------------------------------------------------------------------


def _unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text(encoding="utf-8"))
    return parser


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """As it is, but for the program, which is not where the unit has it; without systemd its keys are read."""
    program = _unit()["Service"]["ExecStart"].split()[0]
    if shutil.which("systemd-analyze") is None:
        assert _unit().sections() == ["Unit", "Service", "Install"]
        return
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text(encoding="utf-8").replace(program, "/bin/true"), encoding="utf-8")
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


def test_the_unit_s_command_is_one_that_we_know() -> None:
    words = _unit()["Service"]["ExecStart"].split()
    assert words[0].endswith("/streamdiff")
    arguments = cli_parsers.parse(words[1:])
    assert arguments.command == "serve" and arguments.no_browser
    assert getattr(arguments, "serve.log_format") == "json"
    assert getattr(arguments, "serve.control_token_file").endswith("/control.token")


def test_the_unit_lets_viewers_finish_and_is_hardened() -> None:
    service = _unit()["Service"]
    kubernetes_drain_s = _config().serve.drain_s
    assert int(service["TimeoutStopSec"]) >= kubernetes_drain_s + END_S, "the same drain time fits both"
    assert int(service["TimeoutStopSec"]) >= Config().serve.drain_s + END_S
    assert service["KillMode"] == "mixed", "SIGTERM to the server alone: it ends its ranks in order"
    for key, value in {"NoNewPrivileges": "yes", "ProtectSystem": "strict", "DynamicUser": "yes"}.items():
        assert service[key] == value
    assert {"AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"} == set(service["RestrictAddressFamilies"].split())


# ---- Kubernetes ------------------------------------------------------------------------------------------------------


def _kubernetes() -> dict[str, Any]:
    text = (DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def _config(folder: Path | None = None) -> Config:
    """The configuration in the ConfigMap, read as the program reads it."""
    tree = yaml.safe_load(_kubernetes()["ConfigMap"]["data"]["config.yaml"])
    return Config.model_validate(tree)


def _container() -> dict[str, Any]:
    [container] = _kubernetes()["Deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(container)


def test_the_config_map_is_a_configuration_and_nothing_is_open_by_accident(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(_kubernetes()["ConfigMap"]["data"]["config.yaml"], encoding="utf-8")
    config = load(path)
    assert config.serve.host == "0.0.0.0" and not config.serve.insecure
    assert config.serve.control_token_file is not None
    folder, _, name = config.serve.control_token_file.rpartition("/")
    spec = _kubernetes()["Deployment"]["spec"]["template"]["spec"]
    mounts = {mount["mountPath"]: mount["name"] for mount in _container()["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert set(mounts.values()) == set(volumes)
    secret = volumes[mounts[folder]]["secret"]["secretName"]
    text = (DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")
    assert f"kubectl create secret generic {secret} --from-literal={name}=" in text


def test_what_the_example_makes_the_token_with_is_a_token(tmp_path: Path) -> None:
    text = (DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")
    [command] = re.findall(r'--from-literal=control\.token="\$\((.+)\)"', text)
    made = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
    (tmp_path / "token").write_text(made, encoding="ascii")
    tokens = auth.read_tokens(ServeConfig(control_token_file=str(tmp_path / "token")))
    assert tokens.control == made.strip()


def test_the_pod_s_command_port_and_probes_are_the_program_s() -> None:
    container, config = _container(), _config()
    arguments = cli_parsers.parse(container["args"])
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounts[str(arguments.config.parent)] == "config" and arguments.config.name == "config.yaml"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": config.serve.port}
    known = {getattr(route, "path", "") for route in health.router().routes}
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {probe["path"] for probe in probes.values()} <= known and {probe["port"] for probe in probes.values()} == {
        "http"
    }
    assert (probes["liveness"]["path"], probes["readiness"]["path"]) == ("/healthz", "/readyz")
    assert probes["startup"]["path"] == "/healthz", "a model may be fetched for hours before /readyz says yes"
    annotations = _kubernetes()["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(config.serve.port) and annotations["prometheus.io/path"] in known


def test_the_pod_is_given_the_time_that_viewers_are() -> None:
    spec = _kubernetes()["Deployment"]["spec"]["template"]["spec"]
    assert _config().serve.drain_s > 0
    assert spec["terminationGracePeriodSeconds"] >= _config().serve.drain_s + END_S


def test_the_service_finds_the_pod() -> None:
    parts = _kubernetes()
    template = parts["Deployment"]["spec"]["template"]
    assert parts["Service"]["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert parts["Deployment"]["spec"]["selector"]["matchLabels"] == parts["Service"]["spec"]["selector"]
    [port] = parts["Service"]["spec"]["ports"]
    assert port["targetPort"] in {each["name"] for each in _container()["ports"]}


@pytest.mark.parametrize("name", sorted(path.name for path in DEPLOY.iterdir()))
def test_each_file_is_explained(name: str) -> None:
    assert f"deploy/{name}" in (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
