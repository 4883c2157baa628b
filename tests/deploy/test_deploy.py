"""What lies in `deploy/` fits the program: its options, addresses, figures and times."""

from __future__ import annotations

import configparser
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamdiff.cli import parser as cli_parsers
from streamdiff.config import Config
from streamdiff.config_file import load
from streamdiff.errors import ConfigError
from streamdiff.server.metrics import Metrics
from streamdiff.server.routes import control
from tests.packaging.test_wheel import SOURCES
from tests.rules.source import ROOT

DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "streamdiff.service"
ONE_SERVER, FLEET, SCALER, RING = (
    DEPLOY / "kubernetes" / f"{name}.yaml" for name in ("one-server", "fleet", "autoscaling", "ring")
)
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
    """Of the dashboard, the alerts and the autoscaler."""
    board = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
    variables = [each["query"] for each in board["templating"]["list"] if each["type"] == "query"]
    variables += [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    [alerts] = yaml.safe_load((DEPLOY / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    [scaler] = _documents(SCALER)
    variables += [trigger["metadata"]["query"] for trigger in scaler["spec"]["triggers"]]
    return variables + [rule["expr"] for rule in alerts["rules"]]


def test_every_figure_that_is_asked_for_exists() -> None:
    asked = {name for query in _queries() for name in re.findall(r"streamdiff_\w+", query)}
    assert len(asked) > 20
    assert asked <= _exported(), asked - _exported()


def test_every_figure_that_the_code_moves_is_in_the_table() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "streamdiff" / "server").rglob("*.py")]
    moved = {name for source in sources for name in re.findall(r"\b_?metrics\.(\w+)(?=\.|\))", source)}
    assert len(moved) > 40 and all(hasattr(Metrics(), name) for name in moved), moved - set(vars(Metrics()))


def test_every_label_that_is_asked_for_is_one_of_its_figure() -> None:
    figures = [each for each in vars(Metrics()).values() if hasattr(each, "_labelnames")]
    known = {collector._name: set(collector._labelnames) | {"le"} for collector in figures}
    seen = 0
    for query in _queries():
        for name, selector in re.findall(r"(streamdiff_\w+)\{([^}]*)\}", query):
            by = re.search(r"by \(([^)]*)\)", query)
            labels = set(re.findall(r"(\w+)=~?\"", selector)) | set(re.split(r"[, ]+", by[1]) if by else ())
            figure = re.sub(r"_(total|bucket)$", "", name)
            assert labels - {"job", "instance"} <= known[figure], query
            seen += 1
    assert seen > 20


# ---- systemd ---------------------------------------------------------------------------------------------------------


def _unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text(encoding="utf-8"))
    return parser


def test_the_unit_s_command_is_one_that_we_know() -> None:
    words = _unit()["Service"]["ExecStart"].split()
    assert words[0].endswith("/streamdiff")
    arguments = cli_parsers.parse(words[1:])
    assert arguments.command == "serve" and getattr(arguments, "serve.open_browser") is False
    assert getattr(arguments, "serve.log_format") == "json"
    assert getattr(arguments, "serve.control_token_file").endswith("/control.token")


# ---- Kubernetes ------------------------------------------------------------------------------------------------------


def _documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def _kubernetes() -> dict[str, Any]:
    return {each["kind"]: each for each in _documents(ONE_SERVER) if each["kind"] != "PersistentVolumeClaim"}


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
    claims = {each["metadata"]["name"] for each in _documents(ONE_SERVER) if each["kind"] == "PersistentVolumeClaim"}
    asked = {each["persistentVolumeClaim"]["claimName"] for each in volumes.values() if "persistentVolumeClaim" in each}
    assert asked == claims
    secret = volumes[mounts[folder]]["secret"]["secretName"]
    text = ONE_SERVER.read_text(encoding="utf-8")
    assert f"kubectl create secret generic {secret} --from-literal={name}=" in text


def test_the_pod_s_command_port_and_probes_are_the_program_s() -> None:
    container, config = _container(), _config()
    arguments = cli_parsers.parse(container["args"])
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounts[str(arguments.config.parent)] == "config" and arguments.config.name == "config.yaml"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": config.serve.port}
    known = {getattr(route, "path", "") for route in control.probes.routes}
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {probe["path"] for probe in probes.values()} <= known and {probe["port"] for probe in probes.values()} == {
        "http"
    }
    assert (probes["liveness"]["path"], probes["readiness"]["path"]) == ("/healthz", "/readyz")
    assert probes["startup"]["path"] == "/healthz", "a model may be fetched for hours before /readyz says yes"
    annotations = _kubernetes()["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(config.serve.port) and annotations["prometheus.io/path"] in known


def test_an_engine_that_fails_ends_the_pod_and_no_session_ends_with_it() -> None:
    """They lie on the volume: after an update those handed over, after a crash those kept."""
    serve, container = _config().serve, _container()
    assert serve.max_restarts == 0 and serve.keep_s is not None
    kept = {mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] in ("cache", "state")}
    for folder in (serve.handover, serve.state_dir, next(e["value"] for e in container["env"] if e["name"] == "HOME")):
        assert any(f"{folder}/".startswith(f"{path}/") for path in kept)
    spec = _kubernetes()["Deployment"]["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] >= serve.drain_s + END_S + 60


@pytest.mark.parametrize("path", [ONE_SERVER, FLEET, RING], ids=lambda path: path.stem)
def test_every_pod_is_one_that_pod_security_takes_as_restricted_and_says_what_it_needs(path: Path) -> None:
    """But for the host's network, which media goes over."""
    pods = [each["spec"]["template"]["spec"] for each in _documents(path) if "template" in each.get("spec", {})]
    assert len(pods) == (2 if path == FLEET else 1)
    for pod in pods:
        assert pod["automountServiceAccountToken"] is False and pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            own = container["securityContext"]
            assert own["capabilities"] == {"drop": ["ALL"]} and own["readOnlyRootFilesystem"] is True
            assert own["allowPrivilegeEscalation"] is False
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
            assert "memory" in container["resources"]["limits"]
            assert pod.get("restartPolicy") == "Never" or {"livenessProbe", "readinessProbe"} <= set(container)


# ---- several servers, and a ring over several nodes ------------------------------------------------------------------


def _fleet(kind: str, name: str = "streamdiff") -> dict[str, Any]:
    [found] = [each for each in _documents(FLEET) if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def test_pods_of_a_fleet_are_the_one_server_s_with_a_name_each(tmp_path: Path) -> None:
    fleet, one = _fleet("StatefulSet")["spec"], _kubernetes()["Deployment"]["spec"]
    [container], [alone] = (each["template"]["spec"]["containers"] for each in (fleet, one))
    index, proxies = container["env"][:2]
    assert index["name"] == "POD_INDEX"
    assert index["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['apps.kubernetes.io/pod-index']"
    own_words = ["--server-name", "$(POD_INDEX)", "--trusted-proxy", "$(TRUSTED_PROXIES)"]
    assert container["args"] == [*alone["args"], *own_words]
    assert getattr(cli_parsers.parse([*alone["args"], "--server-name", "3"]), "serve.name") == "3"
    assert container["env"][2:] == alone["env"]
    for part in (container, alone):
        del part["args"], part["env"]
    claims = {each["metadata"]["name"]: each["spec"] for each in fleet["volumeClaimTemplates"]}
    claimed = {each["metadata"]["name"]: each["spec"] for each in _documents(ONE_SERVER) if "Claim" in each["kind"]}
    volumes = one["template"]["spec"]["volumes"]
    alike = [each for each in volumes if "persistentVolumeClaim" not in each]
    assert {f"streamdiff-{name}": spec for name, spec in claims.items()} == claimed
    assert {each["name"] for each in volumes if each not in alike} == set(claims)
    one["template"]["spec"]["volumes"] = alike
    assert fleet["template"] == one["template"]
    assert proxies["valueFrom"]["configMapKeyRef"] == {"name": "streamdiff", "key": "trusted_proxies"}
    path = tmp_path / "config.yaml"
    path.write_text(_fleet("ConfigMap")["data"]["config.yaml"], encoding="utf-8")
    config, single = load(path).serve, _config().serve
    own = {"agent_port", "hosts", "snapshot_key_file", "trusted_proxies"}
    assert config.model_dump(exclude=own) == single.model_dump(exclude=own)
    assert config.agent_port and config.media_ports


@pytest.mark.parametrize("unset", ["as it is", ""])
def test_a_fleet_whose_proxies_nobody_has_named_does_not_start(unset: str) -> None:
    unset = unset and _fleet("ConfigMap")["data"]["trusted_proxies"]
    with pytest.raises(ConfigError):
        load(None, {"serve.trusted_proxies": [unset]}, {"serve.trusted_proxies": "--trusted-proxy"})


def test_the_fleet_s_balancer_is_haproxy_cfg_with_the_pods_as_servers(tmp_path: Path) -> None:
    wanted = (DEPLOY / "haproxy.cfg").read_text(encoding="utf-8")
    given = _fleet("ConfigMap", "streamdiff-balancer")["data"]["haproxy.cfg"]
    pods = _fleet("Service", "streamdiff-pods")
    assert pods["spec"]["clusterIP"] == "None" and pods["spec"]["publishNotReadyAddresses"] is True
    assert _fleet("StatefulSet")["spec"]["serviceName"] == "streamdiff-pods"
    own = ("# A pod that is", "default-server resolvers", "resolvers cluster", "parse-resolv-conf", "hold valid")
    lines = [line.strip() for line in given.splitlines() if line.strip() and not line.strip().startswith(own)]
    named = re.compile(r'server (\d) "streamdiff-\1\.streamdiff-pods\.\$\{NAMESPACE\}\.svc\.cluster\.local:8000"')
    rest = [named.sub(lambda found: f"server {found[1]}", line) for line in lines]
    rest = [line.replace('src "${TRUSTED_PROXIES}"', "src 127.0.0.1") for line in rest]
    plain = [re.sub(r"(server \w) 10\.0\.0\.\d:8000", r"\1", line.strip()) for line in wanted.splitlines()]
    plain = [line for line in plain[plain.index("global") :] if line]
    is_server = re.compile(r"server \w( |$)").match
    assert [line for line in rest if not is_server(line)] == [line for line in plain if not is_server(line)]
    servers = [line for line in rest if is_server(line)]
    ends = [line.removeprefix("server a") for line in plain if line.startswith("server a")]
    most = next(each for each in _documents(SCALER))["spec"]["maxReplicaCount"]
    assert servers == [f"server {number}{end}" for end in ends for number in range(most)], (
        "one for each pod there may be"
    )
    balancer = _fleet("Deployment", "streamdiff-balancer")["spec"]["template"]
    assert _fleet("Service")["spec"]["selector"] == balancer["metadata"]["labels"]
    [container] = balancer["spec"]["containers"]
    assert _fleet("Deployment", "streamdiff-balancer")["spec"]["replicas"] >= 2
    assert _fleet("PodDisruptionBudget", "streamdiff-balancer")["spec"]["maxUnavailable"] == 1
    for probe in (container["readinessProbe"], container["livenessProbe"]):
        assert f"monitor-uri {probe['httpGet']['path']}" in lines
    assert f"bind :{container['ports'][0]['containerPort']}" in lines
    assert [each["name"] for each in container["env"]] == ["NAMESPACE", "TRUSTED_PROXIES"]
    assert container["env"][1] in _fleet("StatefulSet")["spec"]["template"]["spec"]["containers"][0]["env"]


def test_a_ring_over_several_nodes_is_a_command_that_we_know_and_nobody_else_reaches_it() -> None:
    job, service, policy = _documents(RING)
    spec = job["spec"]
    [container] = spec["template"]["spec"]["containers"]
    split = container["args"].index("--module")
    torchrun = dict(word.removeprefix("--").split("=") for word in container["args"][:split])
    assert container["args"][split + 1] == "streamdiff"
    arguments = cli_parsers.parse(container["args"][split + 2 :])
    ranks = int(torchrun["nnodes"]) * int(torchrun["nproc-per-node"])
    assert arguments.command == "generate" and getattr(arguments, "model.stages") == ranks
    assert spec["completions"] == spec["parallelism"] == int(torchrun["nnodes"]) and spec["completionMode"] == "Indexed"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(torchrun["nproc-per-node"])
    first = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert torchrun["master-addr"] == first and spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert torchrun["rdzv-backend"] == "static", "c10d keeps pickles where whoever reaches it can write"
    [rule] = policy["spec"]["ingress"]
    labels = spec["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"] == service["spec"]["selector"] == labels
    assert rule == {"from": [{"podSelector": {"matchLabels": labels}}]}


def test_the_image_is_made_of_a_checkout_and_runs_the_command() -> None:
    """Of what the wheel's own tests build it of, which is what the build is sent."""
    lines = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").splitlines()
    build, image = "\n".join(line for line in lines if not line.startswith("#")).split("\n\n")
    copied = [name for found in re.findall(r"^COPY (.+) \S+$", build, re.M) for name in found.split()]
    assert sorted(copied) == sorted(SOURCES) and re.search(r"^RUN pip wheel .*--no-deps .*/source$", build, re.M)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()[1:]
    assert ignored == ["*", *(f"!{name}" for name in copied), "**/__pycache__"]
    words = dict(line.split(" ", 1) for line in image.strip().splitlines())
    assert words["COPY"] == "--from=build /wheel/ /tmp/wheel/" and words["USER"] == "10001"
    command = json.loads(words["ENTRYPOINT"]) + json.loads(words["CMD"])
    assert command[0] == "streamdiff" and cli_parsers.parse(command[1:]).command == "serve"
    assert build.startswith(f"FROM {words['FROM']} AS build")
    python = re.fullmatch(r"python:(3\.\d+)-slim", words["FROM"])
    assert python is not None and tuple(map(int, python[1].split("."))) >= (3, 11)
