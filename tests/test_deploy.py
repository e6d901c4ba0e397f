"""deploy/ and docs/operations.md agree with the program: timeouts are long enough, paths and flags exist."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from pagewire.config.config import Config
from pagewire.config.flags import SETTINGS

ROOT = Path(__file__).parents[1]
FLAGS = {setting.flag for setting in SETTINGS.values()} | {"--config"}


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    """The manifests, by kind."""
    yaml: Any = importlib.import_module("yaml")  # has no type stubs
    found = yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text())
    return {manifest["kind"]: manifest for manifest in found}


def test_kubernetes_waits_for_the_drain(manifests: dict[str, Any]) -> None:
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (drain_s,) = [float(a.partition("=")[2]) for a in container["args"] if a.startswith("--drain-timeout=")]
    pre_stop_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pre_stop_s + drain_s + 5
    assert all(arg.partition("=")[0] in FLAGS for arg in container["args"] if arg.startswith("--"))


def test_kubernetes_probes_have_the_right_paths_and_limits(manifests: dict[str, Any]) -> None:
    (container,) = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/health", "readiness": "/ready", "liveness": "/health"}
    probes = {kind: container[f"{kind}Probe"] for kind in paths}
    limits = {kind: probe["periodSeconds"] * probe["failureThreshold"] for kind, probe in probes.items()}
    start_timeout_s = Config().service.start_timeout_s
    assert limits["startup"] >= limits["liveness"] >= start_timeout_s, "a restarted worker needs time to load its model"
    assert container["ports"][0]["containerPort"] == Config().listen.port


def test_kubernetes_labels_volumes_and_claims_match(manifests: dict[str, Any]) -> None:
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert manifests["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert manifests["Service"]["spec"]["selector"] == labels
    assert manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    assert {v["name"] for v in pod["volumes"]} == {m["name"] for m in pod["containers"][0]["volumeMounts"]}
    claims = [v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v]
    assert claims == [manifests["PersistentVolumeClaim"]["metadata"]["name"]]


def test_systemd_waits_for_the_drain() -> None:
    lines = (ROOT / "deploy/pagewire.service").read_text().splitlines()
    settings = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    assert float(settings["TimeoutStopSec"]) >= Config().service.drain_timeout + 10
    assert settings["KillMode"] == "mixed", "only the supervisor gets SIGTERM, and it stops the others in order"
    assert set(re.findall(r"--[a-z-]+", settings["ExecStart"])) <= FLAGS


def test_the_settings_in_the_operations_document_exist() -> None:
    table = (ROOT / "docs/operations.md").read_text().partition("## Settings")[2]
    flags = set(re.findall(r"`(--[a-z-]+)`", table))
    assert len(flags) > 12 and flags <= FLAGS
