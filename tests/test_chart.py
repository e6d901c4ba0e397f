"""The Helm chart renders, its objects are valid, and without values they are those of deploy/kubernetes.yaml.

`make test-deploy` installs helm and the schemas of Kubernetes; without them these tests are skipped.
"""

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pagewire.config.config import Config
from pagewire.config.flags import SETTINGS
from pagewire.version import __version__

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy/chart"
HELM = shutil.which("helm", path=str(Path(sys.executable).parent)) or shutil.which("helm")
FLAGS = {setting.flag for setting in SETTINGS.values()}
ALL = [
    "multiNode.enabled=true", "serviceMonitor.enabled=true", "prometheusRule.enabled=true",
    "networkPolicy.enabled=true",
]  # fmt: skip

pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not installed: make test-deploy")

# The fields of these kinds that the chart uses (lws: api/leaderworkerset/v1, prometheus-operator: api monitoring/v1).
_POD = {"type": "object", "required": ["metadata", "spec"]}
OTHERS: dict[str, dict[str, Any]] = {
    "LeaderWorkerSet": {
        "required": ["leaderWorkerTemplate"],
        "additionalProperties": False,
        "properties": {
            "replicas": {"type": "integer"},
            "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
            "rolloutStrategy": {"type": "object"},
            "leaderWorkerTemplate": {
                "required": ["workerTemplate"],
                "additionalProperties": False,
                "properties": {
                    "size": {"type": "integer", "minimum": 1},
                    "restartPolicy": {"enum": ["None", "RecreateGroupOnPodRestart"]},
                    "leaderTemplate": _POD,
                    "workerTemplate": _POD,
                },
            },
        },
    },
    "PrometheusRule": {
        "required": ["groups"],
        "additionalProperties": False,
        "properties": {"groups": {"type": "array", "minItems": 1}},
    },
    "ServiceMonitor": {
        "required": ["selector", "endpoints"],
        "additionalProperties": False,
        "properties": {"selector": {"type": "object"}, "endpoints": {"type": "array", "minItems": 1}},
    },
}


def helm(*args: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run([HELM, *args], capture_output=True, text=True, timeout=60)


def rendered(*values: str) -> list[dict[str, Any]]:
    flags = [part for value in values for part in ("--set", value)]
    run = helm("template", "pagewire", str(CHART), *flags)
    assert not run.returncode, run.stderr
    yaml: Any = importlib.import_module("yaml")
    return [manifest for manifest in yaml.safe_load_all(run.stdout) if manifest]


def without(manifest: dict[str, Any], *paths: str) -> dict[str, Any]:
    """A copy without these fields."""
    found: dict[str, Any] = json.loads(json.dumps(manifest))
    for path in paths:
        *parents, last = path.split(".")
        at = found
        for parent in parents:
            at = at.get(parent, {})
        at.pop(last, None)
    return found


def test_helm_finds_no_fault() -> None:
    run = helm("lint", "--strict", str(CHART))
    assert not run.returncode, run.stdout


def test_without_values_the_objects_are_those_of_the_manifest() -> None:
    yaml: Any = importlib.import_module("yaml")
    written = {m["kind"]: m for m in yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text())}
    chart = {m["kind"]: m for m in rendered("image.tag=latest")}
    assert chart.keys() == written.keys()
    for kind, manifest in chart.items():
        container = manifest["spec"].get("template", {}).get("spec", {}).get("containers", [{}])[0]
        if container:
            assert container.pop("image") == "pagewire:latest" and container.pop("imagePullPolicy") == "IfNotPresent"
            written[kind]["spec"]["template"]["spec"]["containers"][0].pop("image")
        assert without(manifest, "metadata.labels", "spec.type") == without(written[kind], "metadata.labels"), kind


@pytest.mark.parametrize("values", [[], ALL, ["disruptionBudget=null", "models.existingClaim=mine", "env[0].name=A"]])
def test_every_object_is_valid(values: list[str]) -> None:
    validate: Any = importlib.import_module("kubernetes_validate")
    for manifest in rendered(*values):
        if manifest["kind"] in OTHERS:
            jsonschema.validate(manifest["spec"], OTHERS[manifest["kind"]])
            templates = manifest["spec"].get("leaderWorkerTemplate", {})
            for name in ("leaderTemplate", "workerTemplate"):
                if name in templates:
                    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **templates[name]}
                    validate.validate(pod, "1.31", strict=True)
        else:
            validate.validate(manifest, "1.31", strict=True)


def test_the_pods_of_an_engine_find_each_other() -> None:
    (group,) = (m["spec"]["leaderWorkerTemplate"] for m in rendered(*ALL) if m["kind"] == "LeaderWorkerSet")
    lead, follower = (group[name]["spec"]["containers"][0] for name in ("leaderTemplate", "workerTemplate"))
    assert {arg.partition("=")[0] for arg in lead["args"] if arg.startswith("--")} <= FLAGS
    flags = dict(arg.split("=", 1) for arg in (*lead["args"], *follower["args"]) if "=" in arg)
    assert flags["--join-address"].rpartition(":")[2] == flags["--join"].rpartition(":")[2]
    assert int(flags["--nnodes"]) == group["size"] and follower["args"][0] == "launch"
    assert group["restartPolicy"] == "None", "lost ranks are replaced in the pods that are left"
    for container in (lead, follower):
        assert flags["--key-file"].rpartition("/")[0] in [mount["mountPath"] for mount in container["volumeMounts"]]
        given = {each["name"] for each in container["env"]} | {"LWS_LEADER_ADDRESS"}
        assert set(re.findall(r"\$\((\w+)\)", " ".join(container["args"]))) <= given
    # LeaderWorkerSet makes a headless Service of its own name if there is none; $LWS_LEADER_ADDRESS is a name in it.
    names = {manifest["kind"]: manifest["metadata"]["name"] for manifest in rendered(*ALL)}
    assert names["LeaderWorkerSet"] != names["Service"]


def test_a_pod_outlives_its_open_requests() -> None:
    for values in (["drainTimeout=300", "preStop=40"], ["drainTimeout=0", "preStop=0", *ALL]):
        for manifest in rendered(*values):
            spec = manifest["spec"]
            pods = [spec["template"]["spec"]] if manifest["kind"] == "Deployment" else []
            pods += [spec["leaderWorkerTemplate"]["leaderTemplate"]["spec"]] if "leaderWorkerTemplate" in spec else []
            for pod in pods:
                (container,) = pod["containers"]
                pre_stop_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
                (drain_s,) = [float(a.partition("=")[2]) for a in container["args"] if a.startswith("--drain-timeout")]
                assert pod["terminationGracePeriodSeconds"] > pre_stop_s + drain_s + 5
                startup = container["startupProbe"]
                assert startup["periodSeconds"] * startup["failureThreshold"] >= Config().service.start_timeout_s


@pytest.mark.parametrize("value", ["replicas=two", "multiNode.nodes=1", "modell=x", "args[0]=max-model-len"])
def test_wrong_values_are_refused(value: str) -> None:
    run = helm("template", "pagewire", str(CHART), "--set", value)
    assert run.returncode and value.partition("=")[0].partition(".")[0].partition("[")[0] in run.stderr


def test_the_chart_has_the_version_of_the_program() -> None:
    yaml: Any = importlib.import_module("yaml")
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__


def test_the_rules_of_the_operator_are_those_of_the_file() -> None:
    yaml: Any = importlib.import_module("yaml")
    found = rendered("prometheusRule.enabled=true", "prometheusRule.labels.release=stack")
    (rule,) = [manifest for manifest in found if manifest["kind"] == "PrometheusRule"]
    assert rule["spec"] == yaml.safe_load((CHART / "prometheus-rules.yaml").read_text())
    assert rule["metadata"]["labels"]["release"] == "stack"
    assert not [manifest for manifest in rendered() if manifest["kind"] == "PrometheusRule"]
