"""What the manifests in deploy/ may say: JSON schemas of the fields that they use, so that a misspelt or misplaced
field is found without a cluster.

Read in the sources: Kubernetes' API of apps/v1, v1 and networking.k8s.io/v1; kserve/kserve of 2026-08-21 (aaac4e2,
`config/crd/full/serving.kserve.io_inferenceservices.yaml`); vllm-project/production-stack of 2026-08-05 (a6c01db,
`helm/values.schema.json`). In our words, and only what is used.
"""

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
NUMBER: Schema = {"type": "integer", "minimum": 0}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
NAMED_PORT: Schema = {"anyOf": [PORT, NAME]}
LABELS: Schema = {
    "type": "object",
    "propertyNames": {"pattern": r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"},
    "additionalProperties": {"type": "string", "pattern": r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"},
}


def only(required: str = "", **fields: Schema) -> Schema:
    """An object with these fields and no others."""
    return {"type": "object", "properties": fields, "required": required.split(), "additionalProperties": False}


def many(item: Schema) -> Schema:
    return {"type": "array", "items": item, "minItems": 1}


META = only("name", name=NAME, labels=LABELS, annotations={"type": "object", "additionalProperties": TEXT})
SELECTOR = only("matchLabels", matchLabels=LABELS)
PROBE = only(
    "httpGet",
    httpGet=only("path port", path={"type": "string", "pattern": "^/"}, port=NAMED_PORT),
    periodSeconds=NUMBER,
    timeoutSeconds=NUMBER,
    failureThreshold=NUMBER,
)
QUANTITIES: Schema = {
    "type": "object",
    "propertyNames": {"enum": ["cpu", "memory", "nvidia.com/gpu"]},
    "additionalProperties": {"type": "string", "pattern": r"^\d+(\.\d+)?(m|Ki|Mi|Gi|Ti)?$"},
}
CONTAINER = only(
    "name image args",
    name=NAME,
    image=TEXT,
    args=many(TEXT),
    env=many({"type": "object"}),
    ports=many(only("containerPort", name={**NAME, "maxLength": 15}, containerPort=PORT)),
    startupProbe=PROBE,
    readinessProbe=PROBE,
    livenessProbe=PROBE,
    lifecycle=only("preStop", preStop=only("exec", exec=only("command", command=many(TEXT)))),
    resources=only("requests limits", requests=QUANTITIES, limits=QUANTITIES),
)
POD_FIELDS: dict[str, Schema] = {
    "containers": many(CONTAINER),
    "terminationGracePeriodSeconds": NUMBER,
    "automountServiceAccountToken": {"type": "boolean"},
}
TEMPLATE = only(
    "metadata spec", metadata=only("labels", labels=LABELS, annotations=LABELS), spec=only("containers", **POD_FIELDS)
)


def kind(version: str, name: str, spec: Schema) -> Schema:
    return only(
        "apiVersion kind metadata spec", apiVersion={"const": version}, kind={"const": name}, metadata=META, spec=spec
    )


MANIFESTS: dict[str, Schema] = {
    "Deployment": kind(
        "apps/v1",
        "Deployment",
        only("replicas selector template", replicas=NUMBER, selector=SELECTOR, template=TEMPLATE),
    ),
    "Service": kind(
        "v1",
        "Service",
        only("selector ports", selector=LABELS, ports=many(only("port", name=NAME, port=PORT, targetPort=NAMED_PORT))),
    ),
    "NetworkPolicy": kind(
        "networking.k8s.io/v1",
        "NetworkPolicy",
        only(
            "podSelector policyTypes ingress",
            podSelector=SELECTOR,
            policyTypes={"const": ["Ingress"]},
            ingress=many(
                {
                    "type": "object",
                    "properties": {
                        "ports": many(only("protocol port", protocol={"enum": ["TCP", "UDP", "SCTP"]}, port=PORT)),
                        "from": many(only("namespaceSelector", namespaceSelector=SELECTOR)),
                    },
                    "required": ["ports"],
                    "additionalProperties": False,
                }
            ),
        ),
    ),
    "InferenceService": kind(
        "serving.kserve.io/v1beta1",
        "InferenceService",
        only(
            "predictor",
            predictor=only(
                "containers", **POD_FIELDS, minReplicas=NUMBER, maxReplicas=NUMBER, timeout=NUMBER, labels=LABELS
            ),
        ),
    ),
}
ROUTING = [
    "roundrobin",
    "session",
    "prefixaware",
    "kvaware",
    "disaggregated_prefill",
    "disaggregated_prefill_orchestrated",
]
PRODUCTION_STACK = only(
    "servingEngineSpec routerSpec",
    servingEngineSpec=only("enableEngine", enableEngine={"type": "boolean"}),
    routerSpec=only(
        "enableRouter serviceDiscovery routingLogic",
        enableRouter={"type": "boolean"},
        serviceDiscovery={"enum": ["k8s", "static"]},
        k8sServiceDiscoveryType={"enum": ["pod-ip", "service-name"]},
        routingLogic={"enum": ROUTING},
        engineScrapeInterval=NUMBER,
        requestStatsWindow=NUMBER,
        extraArgs=many(TEXT),
    ),
)
