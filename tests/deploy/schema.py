"""JSON schemas of the objects in deploy/kubernetes, with exactly the fields that they use.

They are written down from the types of KubeRay 1.6 and of the API of Kubernetes. A misspelt or misplaced field is an
error, and so is a value of another type. A field that is used for the first time is added here, after a look at its
definition.
"""

from __future__ import annotations

from typing import Any

STRING = {"type": "string"}
TEXTS = {"type": "object", "additionalProperties": STRING}
COUNT = {"type": "integer", "minimum": 0}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
QUANTITY = {"type": "string", "pattern": r"^[0-9]+(m|Ki|Mi|Gi)?$"}
QUANTITIES = {"type": "object", "additionalProperties": QUANTITY}


def record(required: str = "", /, **fields: Any) -> dict[str, Any]:
    """An object with these fields and no others. `required`: names, with spaces between."""
    named = {name.replace("__", ""): schema for name, schema in fields.items()}
    return {"type": "object", "properties": named, "required": required.split(), "additionalProperties": False}


def several(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema, "minItems": 1}


METADATA = record("name", name=STRING, labels=TEXTS)
SELECTOR = record(matchLabels=TEXTS)
PROBE = record(
    "httpGet",
    httpGet=record("path port", path=STRING, port=PORT),
    periodSeconds=COUNT,
    timeoutSeconds=COUNT,
    failureThreshold=COUNT,
)
ENVIRONMENT = record(
    "name",
    name=STRING,
    value=STRING,
    valueFrom=record(secretKeyRef=record("name key", name=STRING, key=STRING, optional={"type": "boolean"})),
)
CONTAINER = record(
    "name image resources securityContext",
    name=STRING,
    image=STRING,
    env=several(ENVIRONMENT),
    securityContext=record(
        allowPrivilegeEscalation={"const": False}, capabilities=record(drop=several({"const": "ALL"}))
    ),
    ports=several(record("containerPort", name=STRING, containerPort=PORT)),
    startupProbe=PROBE,
    readinessProbe=PROBE,
    resources=record("requests limits", requests=QUANTITIES, limits=QUANTITIES),
    volumeMounts=several(
        record("name mountPath", name=STRING, mountPath={"type": "string", "pattern": "^/"}, readOnly={"const": True})
    ),
)
VOLUME = record(
    "name", name=STRING, emptyDir=record(sizeLimit=QUANTITY), secret=record("secretName", secretName=STRING)
)
TOLERATION = record(key=STRING, operator={"enum": ["Exists", "Equal"]}, effect=STRING)
POD = record(
    "containers securityContext",
    automountServiceAccountToken={"type": "boolean"},
    nodeSelector=TEXTS,
    tolerations=several(TOLERATION),
    securityContext=record(
        runAsNonRoot={"const": True}, runAsUser=COUNT, seccompProfile=record("type", type={"const": "RuntimeDefault"})
    ),
    containers=several(CONTAINER),
    volumes=several({**VOLUME, "minProperties": 2, "maxProperties": 2}),
)
TEMPLATE = record("metadata spec", metadata=record(labels=TEXTS), spec=POD)
GROUP = record(
    "groupName minReplicas maxReplicas rayStartParams template",
    groupName={"type": "string", "pattern": "^[a-z0-9-]+$"},
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    rayStartParams=TEXTS,
    resources=TEXTS,
    template=TEMPLATE,
)
UPGRADE_OPTIONS = record(
    "gatewayClassName stepSizePercent intervalSeconds",
    gatewayClassName=STRING,
    maxSurgePercent=COUNT,
    stepSizePercent=COUNT,
    intervalSeconds=COUNT,
)
CLUSTER = record(
    "headGroupSpec rayVersion",
    rayVersion=STRING,
    enableInTreeAutoscaling={"type": "boolean"},
    authOptions=record(mode={"enum": ["token", "disabled"]}, secretName=STRING),
    headGroupSpec=record("rayStartParams template", rayStartParams=TEXTS, template=TEMPLATE),
    workerGroupSpecs=several(GROUP),
)
RAY_SERVICE = record(
    "rayClusterConfig",
    upgradeStrategy=record(
        type={"enum": ["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]},
        clusterUpgradeOptions=UPGRADE_OPTIONS,
    ),
    rayClusterDeletionDelaySeconds=COUNT,
    excludeHeadPodFromServeSvc={"type": "boolean"},
    serveConfigV2=STRING,
    rayClusterConfig=CLUSTER,
)
NETWORK_POLICY = record(
    "podSelector",
    podSelector=SELECTOR,
    policyTypes=several({"enum": ["Ingress", "Egress"]}),
    ingress=several(
        record(
            from__=several(record(podSelector=SELECTOR, namespaceSelector=SELECTOR)),
            ports=several(record(protocol={"enum": ["TCP", "UDP"]}, port=PORT)),
        )
    ),
)
SPECS = {
    ("ray.io/v1", "RayService"): RAY_SERVICE,
    ("policy/v1", "PodDisruptionBudget"): record("selector", minAvailable=COUNT, selector=SELECTOR),
    ("networking.k8s.io/v1", "NetworkPolicy"): NETWORK_POLICY,
}


def schema_of(document: dict[str, Any]) -> dict[str, Any]:
    """The whole schema of an object. Raises KeyError for a kind that is not known."""
    spec = SPECS[document["apiVersion"], document["kind"]]
    return record("apiVersion kind metadata spec", apiVersion=STRING, kind=STRING, metadata=METADATA, spec=spec)
