"""deploy/alerts.yaml and the autoscaler's queries, as Prometheus evaluates them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.rules.source import ROOT

pytestmark = [pytest.mark.interop, pytest.mark.promtool]
ALERTS = ROOT / "deploy" / "alerts.yaml"
MINUTES = 40
SICK: dict[str, dict[str, str]] = {
    "ServerDown": {"up": "0"},
    "EngineDown": {"streamdiff_engine_up": "0"},
    "EngineRestarts": {"streamdiff_engine_restarts_total": "0+1x{}"},
    "NotReady": {"streamdiff_ready": "0"},
    "FramesDropped": {'streamdiff_frames_dropped_total{session="s"}': "0+240x{}"},
    "EncoderBehind": {'streamdiff_encoder_dropped_total{codec="h264"}': "0+240x{}"},
    "SessionsRefused": {'streamdiff_sessions_refused_total{reason="memory"}': "0+1x{}"},
    "ViewersRefused": {'streamdiff_viewers_refused_total{reason="viewers"}': "0+1x{}"},
    "JobsQueueFull": {"streamdiff_jobs_waiting": "60"},
    "DiskFull": {'streamdiff_disk_free_ratio{folder="state_dir"}': "0.05"},
    "OutputDown": {'streamdiff_output_up{output="whip+https://sfu"}': "0"},
}
"""The figures of a server for which an alert is to fire, in place of those of a healthy one."""
HEALTHY = {
    "up": "1",
    "streamdiff_engine_up": "1",
    "streamdiff_ready": "1",
    "streamdiff_engine_restarts_total": "0",
    'streamdiff_frames_made_total{session="s"}': "0+2400x{}",
    'streamdiff_frames_shown_total{session="s"}': "0+2400x{}",
    'streamdiff_frames_dropped_total{session="s"}': "0+10x{}",
    'streamdiff_encoder_dropped_total{codec="h264"}': "0+10x{}",
    'streamdiff_sessions_refused_total{reason="memory"}': "0",
    'streamdiff_sessions_refused_total{reason="draining"}': "0+1x{}",
    'streamdiff_viewers_refused_total{reason="viewers"}': "0",
    'streamdiff_viewers_refused_total{reason="draining"}': "0+1x{}",
    "streamdiff_jobs_waiting": "4",
    "streamdiff_jobs_running": "1",
    "streamdiff_jobs_limit": "64",
    'streamdiff_disk_free_ratio{folder="state_dir"}': "0.6",
    'streamdiff_output_up{output="whip+https://sfu"}': "1",
}


def series(values: dict[str, str], **labels: str) -> list[dict[str, str]]:
    """Input of a test of promtool: a figure each minute; `{}` is for how often a counter grows."""
    found = []
    for figure, value in values.items():
        name, _, own = figure.rstrip("}").partition("{")
        every = ",".join(filter(None, [own, *(f'{key}="{text}"' for key, text in labels.items())]))
        values_of = value.format(MINUTES) if "{}" in value else f"{value}+0x{MINUTES}"
        found.append({"series": f"{name}{{{every}}}", "values": values_of})
    return found


def promtool(*words: str) -> None:
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("server", ["healthy", *SICK])
def test_each_alert_fires_for_what_it_names_and_for_nothing_else(server: str, tmp_path: Path) -> None:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text("utf-8"))["groups"] for rule in group["rules"]]
    assert {rule["alert"] for rule in rules} == set(SICK)
    firing = labels_of(server)
    tests: list[dict[str, Any]] = [
        {
            "eval_time": f"{MINUTES}m",
            "alertname": rule["alert"],
            "exp_alerts": [{"exp_labels": firing | rule["labels"]}] if rule["alert"] == server else [],
        }
        for rule in rules
    ]
    # What an alert says has figures in it: it is not compared.
    plain = [{**rule, "annotations": {}} for rule in rules]
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump({"groups": [{"name": "plain", "rules": plain}]}), "utf-8")
    one = {"interval": "1m", "alert_rule_test": tests}
    one["input_series"] = series(HEALTHY | SICK.get(server, {}), job="streamdiff", instance="a:8000")
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["alerts.yaml"], "tests": [one]}), "utf-8")
    promtool("check", "rules", str(ALERTS))
    promtool("test", "rules", str(tmp_path / "test.yaml"))


def labels_of(server: str) -> dict[str, str]:
    """The labels that an alert has of the figure that it fires for, a server's and, but for sums, its own."""
    own: dict[str, str] = {}
    if server in ("DiskFull", "OutputDown"):
        (figure,) = SICK[server]
        own = dict(re.findall(r'(\w+)="([^"]+)"', figure))
    return {"job": "streamdiff", "instance": "a:8000", **own}


@pytest.mark.parametrize(
    ("servers", "pods"),
    [
        # one is full, one starts, one has no engine
        ([{"sessions_watched": "4"}, {"sessions_limit": "NaN"}, {"sessions_limit": "0"}], (1, 0, 0)),
        # open sessions that nobody watches are no load
        ([{"sessions": "50", "sessions_limit": "4"}], (0, 0, 0)),
        # a large model, of which one session fits each
        ([{"sessions_watched": "1", "sessions_limit": "1"}] * 3, (3, 0, 0)),
        ([{"viewers": "24"}, {"viewers": "8"}], (0, 1, 0)),
        ([{"jobs_waiting": "62", "jobs_running": "2", "jobs_limit": "32"}], (0, 0, 2)),
    ],
)  # fmt: skip
def test_the_autoscaler_counts_pods_full_of_what_is_asked_of_them(
    servers: list[dict[str, str]], pods: tuple[int, int, int], tmp_path: Path
) -> None:
    idle = {"sessions_watched": "0", "sessions_limit": "4", "viewers": "0", "viewers_limit": "32"}
    idle |= {"jobs_waiting": "0", "jobs_running": "0", "jobs_limit": "0"}
    inputs = [
        each
        for number, server in enumerate(servers)
        for each in series(
            {f"streamdiff_{name}": value for name, value in (idle | server).items()}, instance=f"{number}"
        )
    ]
    scaler = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "autoscaling.yaml").read_text("utf-8"))
    queries = [trigger["metadata"]["query"] for trigger in scaler["spec"]["triggers"]]
    tests = [
        {"expr": query, "eval_time": "5m", "exp_samples": [{"value": float(count), "labels": "{}"}]}
        for query, count in zip(queries, pods, strict=True)
    ]
    one = {"interval": "1m", "input_series": inputs, "promql_expr_test": tests}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"tests": [one]}), "utf-8")
    promtool("test", "rules", str(tmp_path / "test.yaml"))
