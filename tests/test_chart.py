"""The Helm chart renders, its objects are valid, without values they are those of deploy/kubernetes.yaml, and the lines
of docs/operations.md say what they promise.

`make test-deploy` installs helm and the schemas of Kubernetes; without them these tests are skipped.
"""

import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pagewire.config.config import Config, EngineOptions, ServiceOptions
from pagewire.config.flags import SETTINGS
from pagewire.config.resolve import check_machines
from pagewire.ipc.zmq_channel import read_keys
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
    run = helm("template", "pagewire", str(CHART), *set_all(values))
    assert not run.returncode, run.stderr
    yaml: Any = importlib.import_module("yaml")
    return [manifest for manifest in yaml.safe_load_all(run.stdout) if manifest]


def set_all(values: Iterable[str]) -> list[str]:
    return [part for value in values for part in ("--set", value)]


def group_of(*values: str) -> dict[str, Any]:
    """The pods of an engine on several nodes."""
    manifests = rendered("multiNode.enabled=true", *values)
    (group,) = (m["spec"]["leaderWorkerTemplate"] for m in manifests if m["kind"] == "LeaderWorkerSet")
    assert isinstance(group, dict)
    return group


def container_of(group: dict[str, Any], template: str) -> dict[str, Any]:
    (container,) = group[template]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def flags_of(container: dict[str, Any]) -> dict[str, str]:
    return dict(arg.split("=", 1) for arg in container["args"] if "=" in arg)


def documented() -> list[str]:
    """The shell commands of docs/operations.md about Kubernetes, each in one line."""
    section = (ROOT / "docs/operations.md").read_text().partition("## Kubernetes\n")[2].partition("\n### ")[0]
    blocks = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    return [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]


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


@pytest.mark.parametrize(
    "values",
    [
        [],
        ALL,
        ["disruptionBudget=null", "models.existingClaim=mine", "env[0].name=A"],
        ["apiKeySecret=null", "serviceMonitor.enabled=true"],
    ],
)
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
    group = group_of(*ALL)
    lead, follower = (container_of(group, name) for name in ("leaderTemplate", "workerTemplate"))
    assert {arg.partition("=")[0] for arg in lead["args"] if arg.startswith("--")} <= FLAGS
    flags = flags_of(lead) | flags_of(follower)
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


@pytest.mark.parametrize(
    ("stages", "ranks", "nodes", "of_pod"), [(2, 1, 2, 1), (2, 4, 2, 4), (4, 2, 2, 4), (1, 8, 2, 4), (3, 1, 3, 1)]
)
def test_each_pod_has_whole_stages_or_its_share_of_one(stages: int, ranks: int, nodes: int, of_pod: int) -> None:
    sizes = [
        f"multiNode.pipelineParallelSize={stages}", f"multiNode.tensorParallelSize={ranks}", f"multiNode.nodes={nodes}"
    ]  # fmt: skip
    group = group_of(*sizes, rf"resources.limits.nvidia\.com/gpu={of_pod}")
    flags = flags_of(container_of(group, "leaderTemplate"))
    flags.update(flags_of(container_of(group, "workerTemplate")))
    options = EngineOptions(pipeline_parallel_size=stages, tensor_parallel_size=ranks)
    assert (
        check_machines(Config(engine=options, service=ServiceOptions(nnodes=nodes)))
        == nodes
        == group["size"]
        == int(flags["--nnodes"])
    )
    assert (int(flags["--pipeline-parallel-size"]), int(flags["--tensor-parallel-size"])) == (stages, ranks)
    for template in ("leaderTemplate", "workerTemplate"):
        mounts = {mount["name"] for mount in container_of(group, template)["volumeMounts"]}
        assert mounts == {volume["name"] for volume in group[template]["spec"]["volumes"]} - {"key-secret"}
        assert ("shm" in mounts) == (of_pod > 1), "NCCL needs memory that the GPUs of a pod share"


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


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (["nodes=3"], "3 pods cannot share 2 stages (pipelineParallelSize), because each has as many whole ones."),
        (
            ["pipelineParallelSize=1", "tensorParallelSize=3"],
            "2 pods cannot share the ranks of one stage (tensorParallelSize 3), because each has as many.",
        ),
        (["tensorParallelSize=0"], "Must be greater than or equal to 1"),
    ],
)
def test_sizes_that_pods_cannot_share_are_refused(values: list[str], why: str) -> None:
    sizes = [f"multiNode.{value}" for value in values]
    run = helm("template", "pagewire", str(CHART), *set_all(["multiNode.enabled=true", *sizes]))
    assert run.returncode and why in run.stderr
    assert not helm("template", "pagewire", str(CHART), *set_all(sizes[:-1])).returncode, "they are of several nodes"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (r"resources.limits.nvidia\.com/gpu=2", "a pod needs as many nvidia.com/gpu as it has ranks, 1, not 2."),
        ("args[0]=--tensor-parallel-size=2", "leave --tensor-parallel-size=2 out, multiNode says it."),
    ],
)
def test_what_contradicts_the_sizes_is_refused(value: str, why: str) -> None:
    run = helm("template", "pagewire", str(CHART), *set_all(["multiNode.enabled=true", value]))
    assert run.returncode and why in run.stderr
    assert not helm("template", "pagewire", str(CHART), "--set", value).returncode, "on one node it may"


def test_the_lines_of_the_operations_document_work(tmp_path: Path) -> None:
    """Each `helm install` and `helm upgrade`, by `helm template`; the key file; the secrets' names."""
    kinds: list[set[str]] = []
    secrets: dict[str, str] = {}
    values: list[str] = []
    for line in documented():
        words = shlex.split(line)
        match words:
            case ["helm", "install" | "upgrade", name, chart, *flags]:
                values = [*values, *flags] if "--reuse-values" in flags else flags
                given = [flag for flag in values if flag != "--reuse-values"]
                run = helm("template", name, str(ROOT / chart), *given)
                assert not run.returncode, run.stderr
                kinds.append(set(re.findall(r"^kind: (\w+)$", run.stdout, re.MULTILINE)))
            case ["kubectl", "create", "secret", "generic", name, source, *_]:
                secrets[name] = source.partition("=")[2].partition("=")[0]
            case _:
                here = line.replace("python ", f"{shlex.quote(sys.executable)} ")
                subprocess.run(["sh", "-c", here], cwd=tmp_path, check=True, timeout=60)
    assert len(kinds) == 4
    assert ["LeaderWorkerSet" in found for found in kinds] == [False, False, True, True]
    assert kinds[3] - kinds[2] == {"PrometheusRule", "ServiceMonitor"}
    assert len(read_keys(tmp_path / "engine.key").public) == 40
    yaml: Any = importlib.import_module("yaml")
    chart = yaml.safe_load((CHART / "values.yaml").read_text())
    assert secrets == {
        chart["apiKeySecret"]["name"]: chart["apiKeySecret"]["key"],
        chart["multiNode"]["keySecret"]: "engine.key",
    }


@pytest.mark.parametrize(
    "values",
    [[], ["multiNode.enabled=true"], ["apiKeySecret.name="], ["apiKeySecret=null"], ["apiKeySecret.key=a.b"]],
)
def test_the_notes_say_how_to_ask(values: list[str], tmp_path: Path) -> None:
    """`helm template` leaves notes out, so a copy of the chart has them as an object."""
    shutil.copytree(CHART, tmp_path / "chart")
    (tmp_path / "chart/templates/NOTES.txt").rename(tmp_path / "chart/notes.txt")
    (tmp_path / "chart/templates/notes.yaml").write_text('notes: {{ tpl (.Files.Get "notes.txt") . | toJson }}\n')
    flags = ("--namespace", "models", "--show-only", "templates/notes.yaml", *set_all(values))
    run = helm("template", "pagewire", str(tmp_path / "chart"), *flags)
    assert not run.returncode, run.stderr
    yaml: Any = importlib.import_module("yaml")
    notes = yaml.safe_load(run.stdout)["notes"]
    commands = [line.strip() for line in notes.splitlines() if line.startswith("    ")]
    assert all(command.startswith(("kubectl --namespace models ", "KEY=$(kubectl ", "curl ")) for command in commands)
    wait = (
        "wait pod --selector app=pagewire,pagewire/part=lead"
        if "multiNode.enabled=true" in values
        else "rollout status"
    )
    assert wait in commands[0] and "port-forward service/pagewire 8000:80 " in commands[1]
    has_key = not {"apiKeySecret.name=", "apiKeySecret=null"} & {*values}
    assert (len(commands), "Bearer $KEY" in commands[-1], "No key is set" in notes) == (
        3 + has_key,
        has_key,
        not has_key,
    )
    if "apiKeySecret.key=a.b" in values:
        assert r"jsonpath='{.data.a\.b}'" in commands[2]


@pytest.mark.parametrize(
    "value", ["replicas=two", "multiNode.nodes=1", "serviceMonitor.labels.a=1", "modell=x", "args[0]=max-model-len"]
)
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
