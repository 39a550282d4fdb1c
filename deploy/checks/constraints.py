"""Add to Kubernetes' schemas what its API server checks beyond them: quantities, names, ports,
enumerations.

Each constraint is a JSON schema that a property of a definition must meet as well, with the remedy
that a finding gives.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from protocols.kubernetes_names import (
    IMAGE,
    LABEL,
    LABEL_KEY,
    LABEL_LENGTH,
    LABEL_VALUE,
    SUBDOMAIN,
    SUBDOMAIN_LENGTH,
)

Schema = dict[str, Any]

REMEDY = "x-remedy"
QUANTITY = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"
SERVICE = r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"  # RFC 1035
PORT_NAME = r"^(?=.{1,15}$)(?=.*[a-z])(?!.*--)[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
VARIABLE = r"^[-._a-zA-Z][-._a-zA-Z0-9]*$"
CIDR = r"^([0-9]{1,3}(\.[0-9]{1,3}){3}/[0-9]{1,2}|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*/[0-9]{1,3})$"
PATH_NAME = r"^(?!\.{1,2}$)[^/%]+$"

_LABEL_REMEDY = "use at most 63 lower-case letters, digits and -, a letter or digit at both ends"


def _matches(pattern: str, remedy: str) -> Schema:
    return {"pattern": pattern, REMEDY: remedy}


def _one_of(*words: str) -> Schema:
    return {"enum": [*words, None], REMEDY: f"write one of {', '.join(filter(None, words))}"}


def _between(least: int, most: int | None = None) -> Schema:
    said = f"{least} or more" if most is None else f"a number from {least} to {most}"
    return {"minimum": least, **({} if most is None else {"maximum": most}), REMEDY: f"give {said}"}


_PORT = _between(1, 65535)
# A port given by number or by name.
_ANY_PORT = {**_PORT, "pattern": PORT_NAME, REMEDY: "give 1 to 65535, or the name of a port"}
_NAME = _matches(LABEL, _LABEL_REMEDY)
_SUBDOMAIN_REMEDY = "use at most 253 lower-case letters, digits, - and ., none but these"
_KEY = _matches(LABEL_KEY, "write the key as [prefix/]name")
_VALUE = _matches(LABEL_VALUE, "use at most 63 letters, digits, -, _ and .")
_IMAGE = _matches(IMAGE, "write it as registry.example.com/team/name:tag or name@sha256:...")


def _object_name(optional: bool = False, longest: int = SUBDOMAIN_LENGTH) -> Schema:
    """Return the schema of the name of an object; with `optional` an empty text is none."""
    remedy = _SUBDOMAIN_REMEDY.replace("253", str(longest))
    pattern = rf"^$|{SUBDOMAIN}" if optional else SUBDOMAIN
    return {**_matches(pattern, remedy), "maxLength": longest}


_OBJECT = _object_name()
_OPTIONAL = _object_name(optional=True)
_DATA_KEY = {**_matches(r"^[-._a-zA-Z0-9]+$", "use letters, digits, -, _ and ."), "maxLength": 253}
_PROTOCOL = _one_of("TCP", "UDP", "SCTP")
_PULL = _one_of("Always", "Never", "IfNotPresent")
_COUNT = _between(0)
_OPERATOR = _one_of("In", "NotIn", "Exists", "DoesNotExist")
_NODE_OPERATOR = _one_of("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt")
_ACCESS = _one_of("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")

# By definition, without "io.k8s.api." and by property; "[]" is an item of a list, "{}" a value of
# a mapping, "{key}" its keys.
_PROPERTIES: Mapping[str, Mapping[str, Schema]] = {
    "core.v1.Container": {"name": _NAME, "image": _IMAGE, "imagePullPolicy": _PULL},
    "core.v1.ContainerPort": {
        "containerPort": _PORT,
        "hostPort": _PORT,
        "name": _matches(PORT_NAME, "use at most 15 lower-case letters, digits and -"),
        "protocol": _PROTOCOL,
    },
    "core.v1.EnvVar": {"name": _matches(VARIABLE, "use letters, digits, _, . and -")},
    "core.v1.Volume": {"name": _NAME},
    "core.v1.VolumeMount": {
        "mountPath": _matches(r"^[^:]+$", "give an absolute path without a colon"),
        "mountPropagation": _one_of("None", "HostToContainer", "Bidirectional"),
    },
    "core.v1.EmptyDirVolumeSource": {"medium": {"pattern": r"^(|Memory|HugePages(-.+)?)$",
                                                REMEDY: "write Memory, or leave it out"}},
    "core.v1.HTTPGetAction": {"port": _ANY_PORT, "scheme": _one_of("HTTP", "HTTPS")},
    "core.v1.TCPSocketAction": {"port": _ANY_PORT},
    "core.v1.GRPCAction": {"port": _PORT},
    "core.v1.Probe": {
        "periodSeconds": _between(1), "timeoutSeconds": _between(1),
        "failureThreshold": _between(1), "successThreshold": _between(1),
        "initialDelaySeconds": _COUNT,
    },
    "core.v1.PodSpec": {
        "restartPolicy": _one_of("Always", "OnFailure", "Never"),
        "dnsPolicy": _one_of("ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"),
        "preemptionPolicy": _one_of("Never", "PreemptLowerPriority"),
        "terminationGracePeriodSeconds": _COUNT,
        "serviceAccountName": _OPTIONAL, "priorityClassName": _OPTIONAL,
        "runtimeClassName": _OBJECT, "nodeSelector{key}": _KEY, "nodeSelector{}": _VALUE,
    },
    "core.v1.LocalObjectReference": {"name": _OPTIONAL},
    "core.v1.ConfigMapEnvSource": {"name": _OPTIONAL},
    "core.v1.SecretEnvSource": {"name": _OPTIONAL},
    "core.v1.ConfigMapKeySelector": {"name": _OPTIONAL, "key": _DATA_KEY},
    "core.v1.SecretKeySelector": {"name": _OPTIONAL, "key": _DATA_KEY},
    "core.v1.ConfigMapVolumeSource": {"name": _OPTIONAL},
    "core.v1.SecretVolumeSource": {"secretName": _OPTIONAL},
    "core.v1.ConfigMapProjection": {"name": _OPTIONAL},
    "core.v1.SecretProjection": {"name": _OPTIONAL},
    "core.v1.PersistentVolumeClaimVolumeSource": {"claimName": _OBJECT},
    "core.v1.SeccompProfile": {"type": _one_of("Localhost", "RuntimeDefault", "Unconfined")},
    "core.v1.Toleration": {
        "key": {**_KEY, "pattern": rf"^$|{LABEL_KEY}"},
        "operator": _one_of("Exists", "Equal"),
        "value": _VALUE,
        "effect": _one_of("", "NoSchedule", "PreferNoSchedule", "NoExecute"),
    },
    "core.v1.TopologySpreadConstraint": {
        "whenUnsatisfiable": _one_of("DoNotSchedule", "ScheduleAnyway"), "maxSkew": _between(1),
    },
    "core.v1.NodeSelectorRequirement": {
        "key": _KEY, "operator": _NODE_OPERATOR, "values[]": _VALUE,
    },
    "core.v1.ServicePort": {
        "port": _PORT, "nodePort": _between(0, 65535), "targetPort": _ANY_PORT,
        "protocol": _PROTOCOL, "name": _NAME,
    },
    "core.v1.ServiceSpec": {
        "type": _one_of("ClusterIP", "NodePort", "LoadBalancer", "ExternalName"),
        "sessionAffinity": _one_of("None", "ClientIP"),
        "externalTrafficPolicy": _one_of("Cluster", "Local"),
        "internalTrafficPolicy": _one_of("Cluster", "Local"),
        "ipFamilyPolicy": _one_of("SingleStack", "PreferDualStack", "RequireDualStack"),
    },
    "core.v1.PersistentVolumeClaimSpec": {
        "accessModes[]": _ACCESS, "volumeMode": _one_of("Filesystem", "Block"),
        "storageClassName": _OPTIONAL,
    },
    "core.v1.PersistentVolumeSpec": {
        "accessModes[]": _ACCESS, "storageClassName": _OPTIONAL,
        "persistentVolumeReclaimPolicy": _one_of("Retain", "Delete", "Recycle"),
    },
    "apps.v1.DeploymentSpec": {"replicas": _COUNT, "revisionHistoryLimit": _COUNT},
    "apps.v1.StatefulSetSpec": {
        "replicas": _COUNT, "podManagementPolicy": _one_of("OrderedReady", "Parallel"),
    },
    "apps.v1.ReplicaSetSpec": {"replicas": _COUNT},
    "apps.v1.DeploymentStrategy": {"type": _one_of("Recreate", "RollingUpdate")},
    "apps.v1.StatefulSetUpdateStrategy": {"type": _one_of("RollingUpdate", "OnDelete")},
    "apps.v1.DaemonSetUpdateStrategy": {"type": _one_of("RollingUpdate", "OnDelete")},
    "batch.v1.CronJobSpec": {
        "concurrencyPolicy": _one_of("Allow", "Forbid", "Replace"),
        "schedule": _matches(
            r"^(@(yearly|annually|monthly|weekly|daily|midnight|hourly)|@every .+|"
            r"((CRON_)?TZ=\S+ )?[^\s@]+( [^\s]+){4})$",
            "give five fields: minute, hour, day, month, weekday",
        ),
    },
    "batch.v1.JobSpec": {
        "backoffLimit": _COUNT, "completions": _COUNT, "parallelism": _COUNT,
        "completionMode": _one_of("NonIndexed", "Indexed"),
        "podReplacementPolicy": _one_of("TerminatingOrFailed", "Failed"),
    },
    "batch.v1.PodFailurePolicyRule": {"action": _one_of("FailIndex", "FailJob", "Ignore", "Count")},
    "batch.v1.PodFailurePolicyOnExitCodesRequirement": {"operator": _one_of("In", "NotIn")},
    "networking.v1.NetworkPolicySpec": {"policyTypes[]": _one_of("Ingress", "Egress")},
    "networking.v1.NetworkPolicyPort": {
        "port": _ANY_PORT, "endPort": _PORT, "protocol": _PROTOCOL,
    },
    "networking.v1.IPBlock": {
        "cidr": _matches(CIDR, "write a block such as 10.0.0.0/8"),
        "except[]": _matches(CIDR, "write a block such as 10.0.0.0/8"),
    },
    "networking.v1.HTTPIngressPath": {
        "pathType": _one_of("Exact", "Prefix", "ImplementationSpecific"),
    },
    "autoscaling.v2.HorizontalPodAutoscalerSpec": {
        "minReplicas": _COUNT, "maxReplicas": _between(1),
    },
    "autoscaling.v2.MetricSpec": {
        "type": _one_of("ContainerResource", "External", "Object", "Pods", "Resource"),
    },
    "autoscaling.v2.MetricTarget": {
        "type": _one_of("Utilization", "Value", "AverageValue"), "averageUtilization": _between(1),
    },
    "rbac.v1.RoleRef": {"kind": _one_of("Role", "ClusterRole")},
    "rbac.v1.Subject": {"kind": _one_of("User", "Group", "ServiceAccount")},
    "storage.v1.StorageClass": {
        "volumeBindingMode": _one_of("Immediate", "WaitForFirstConsumer"),
    },
    "policy.v1.PodDisruptionBudgetSpec": {
        "unhealthyPodEvictionPolicy": _one_of("AlwaysAllow", "IfHealthyBudget"),
    },
}  # fmt: skip
_META: Mapping[str, Mapping[str, Schema]] = {
    "LabelSelectorRequirement": {"key": _KEY, "operator": _OPERATOR, "values[]": _VALUE},
    "LabelSelector": {"matchLabels{key}": _KEY, "matchLabels{}": _VALUE},
    "ObjectMeta": {
        "labels{key}": _KEY,
        "labels{}": _VALUE,
        "annotations{key}": _matches(
            LABEL_KEY.replace("[a-z0-9]", "[A-Za-z0-9]"), "write its key as [prefix/]name"
        ),
        "namespace": _matches(LABEL, _LABEL_REMEDY),
    },
}  # fmt: skip
# By kind, as its objects may be named; any other: SUBDOMAIN.
_NAMES: Mapping[str, Schema] = {
    "Namespace": _NAME,
    "Service": _matches(SERVICE, "begin with a lower-case letter; then letters, digits and -"),
    "Job": _object_name(longest=LABEL_LENGTH),
    "CronJob": _object_name(longest=52),
    **dict.fromkeys(
        ("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"),
        _matches(PATH_NAME, "leave out / and %"),
    ),
}


def constrained(definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return Kubernetes' schema definitions (`$defs`) with the constraints added."""
    found = copy.deepcopy(dict(definitions))
    found["io.k8s.apimachinery.pkg.api.resource.Quantity"] = {
        "type": ["string", "number", "null"],
        **_matches(QUANTITY, "write a quantity such as 500m, 2, 512Mi or 20Gi"),
    }
    for prefix, table in (
        ("io.k8s.api.", _PROPERTIES),
        ("io.k8s.apimachinery.pkg.apis.meta.v1.", _META),
    ):
        for name, properties in table.items():
            held = found[prefix + name]["properties"]
            for path, schema in properties.items():
                _constrain(held, path, schema)
    return found


def _constrain(properties: dict[str, Any], path: str, schema: Schema) -> None:
    name = path.removesuffix("[]").removesuffix("{}").removesuffix("{key}")
    if path.endswith("[]"):
        properties[name]["items"] = _both(properties[name]["items"], schema)
    elif path.endswith("{}"):
        properties[name]["additionalProperties"] = _both(
            properties[name]["additionalProperties"], schema
        )
    elif path.endswith("{key}"):
        properties[name]["propertyNames"] = schema
    else:
        properties[name] = _both(properties[name], schema)


def _both(first: Schema, second: Schema) -> Schema:
    return {"allOf": [first, second]}


def named(kind: str) -> Schema:
    """Return the schema of `metadata.name` of a built-in kind's objects."""
    return _NAMES.get(kind, _OBJECT)


def remedy_of(schema: Mapping[str, Any], keyword: str, expected: Sequence[Any] | Any) -> str:
    """Return how to mend a value that breaks `keyword` of a schema."""
    if REMEDY in schema:
        return str(schema[REMEDY])
    if keyword in ("additionalProperties", "unevaluatedProperties"):
        return "correct its name, or remove it"
    if keyword == "required":
        return "add it"
    if keyword == "type":
        kinds = [expected] if isinstance(expected, str) else [e for e in expected if e != "null"]
        return f"give {_ARTICLES.get(kinds[0], kinds[0])}" if kinds else "correct its type"
    return "correct it"


_ARTICLES = {
    "string": "a text, in quotes where YAML would read a number", "integer": "a whole number",
    "number": "a number", "boolean": "true or false", "array": "a list", "object": "a mapping",
}  # fmt: skip
