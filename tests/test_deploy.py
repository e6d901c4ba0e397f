"""deploy/ and docs/operations.md agree with the program: timeouts are long enough, paths and flags exist."""

import importlib
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from deploy_schemas import MANIFESTS, PRODUCTION_STACK

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


AROUND = ("aibrix", "llm-d", "production-stack", "kserve")  # deploy/NAME.yaml: pagewire below these systems


def around(name: str) -> list[dict[str, Any]]:
    yaml: Any = importlib.import_module("yaml")
    return list(yaml.safe_load_all((ROOT / f"deploy/{name}.yaml").read_text()))


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = manifest["spec"]
    return dict(spec["predictor"] if manifest["kind"] == "InferenceService" else spec["template"]["spec"])


@pytest.mark.parametrize("name", AROUND)
def test_the_examples_for_other_systems_follow_their_schemas(name: str) -> None:
    for manifest in around(name):
        jsonschema.validate(manifest, MANIFESTS[manifest["kind"]])
    first = around(name)[0]
    (container,) = pod_of(first)["containers"]
    assert {arg.partition("=")[0] for arg in container["args"] if arg.startswith("--")} <= FLAGS
    settings = dict(arg.removeprefix("--").partition("=")[::2] for arg in container["args"] if arg.startswith("--"))
    assert settings["metrics-prefix"] == "vllm"
    pre_stop_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod_of(first)["terminationGracePeriodSeconds"] > pre_stop_s + float(settings["drain-timeout"]) + 5
    probed = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness")}
    assert probed == {"/health"} and container["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_a_misspelt_field_of_an_example_is_found() -> None:
    manifest = around("kserve")[0]
    manifest["spec"]["predictor"]["minReplica"] = 1
    with pytest.raises(jsonschema.ValidationError, match="minReplica"):
        jsonschema.validate(manifest, MANIFESTS["InferenceService"])


def test_the_labels_and_ports_are_those_that_routers_look_for() -> None:
    """AIBrix finds pods by model.aibrix.ai/*, whose name is the Service's and the model's; llm-d by llm-d.ai/*."""
    deployment, service, policy = around("aibrix")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    name = deployment["metadata"]["name"]
    assert labels == deployment["metadata"]["labels"]
    assert labels == {
        "model.aibrix.ai/name": name, "model.aibrix.ai/port": "8000", "model.aibrix.ai/engine": "vllm",
        "model.aibrix.ai/kv-events-enabled": "true",
    }  # fmt: skip
    assert service["metadata"]["name"] == name and service["spec"]["selector"] == {"model.aibrix.ai/name": name}
    assert f"--served-model-name={name}" in pod_of(deployment)["containers"][0]["args"]
    (llm_d, llm_d_policy) = around("llm-d")
    labels = llm_d["spec"]["template"]["metadata"]["labels"]
    assert labels["llm-d.ai/inference-serving"] == "true" and labels["llm-d.ai/engine-type"] == "vllm"
    assert labels["llm-d.ai/role"] in ("prefill", "decode", "prefill-decode")
    for one, rules in ((deployment, policy), (llm_d, llm_d_policy)):
        (container,) = pod_of(one)["containers"]
        assert {port["containerPort"] for port in container["ports"]} == {8000, 5557, 5558}
        assert {"--kv-events=tcp://*:5557", "--kv-events-replay=tcp://*:5558"} <= set(container["args"])
        assert rules["spec"]["podSelector"]["matchLabels"].items() <= one["metadata"]["labels"].items()
        guarded = [rule for rule in rules["spec"]["ingress"] if {5557, 5558} & {p["port"] for p in rule["ports"]}]
        assert guarded and all("from" in rule for rule in guarded), "whoever connects reads prompts"


def test_production_stacks_router_finds_the_engines() -> None:
    (values,) = around("production-stack-values")
    jsonschema.validate(values, PRODUCTION_STACK)
    (deployment,) = around("production-stack")
    args = values["routerSpec"]["extraArgs"]
    key, _, value = args[args.index("--k8s-label-selector") + 1].partition("=")
    assert deployment["spec"]["template"]["metadata"]["labels"][key] == value
