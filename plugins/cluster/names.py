"""Define which texts Kubernetes and container registries take as names, as regular expressions.

The spec of the values, and so `forge k8s render` and the chart's schema, read these. They use no
lookaround, which Helm's engine and pydantic's do not have. Sources: "Object Names and IDs" and
"Labels and Selectors" of Kubernetes' documentation; the grammar of references of
distribution/reference.
"""

from __future__ import annotations

from cartridge_forge.protocols.spec.base import PATTERN_RULES

_WORD = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_HOST = r"[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?"
_PART = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_SUBDOMAIN = rf"{_WORD}(\.{_WORD})*"
_LABEL_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
# A first part is a registry where it has a dot or a port, or is localhost.
_REGISTRY = rf"({_HOST}(\.{_HOST})+(:[0-9]+)?|{_HOST}:[0-9]+|localhost|\[[0-9a-fA-F:]+\](:[0-9]+)?)"
_REPOSITORY = rf"({_REGISTRY}/)?{_PART}(/{_PART})*"
_TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
_DIGEST = r"sha256:[0-9a-f]{64}"

LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"  # RFC 1123: a namespace, a container
SUBDOMAIN = rf"^{_SUBDOMAIN}$"  # most objects; at most SUBDOMAIN_LENGTH characters
SUBDOMAIN_LENGTH = 253
LABEL_KEY = rf"^({_SUBDOMAIN}/)?{_LABEL_NAME}$"  # of labels, taints, annotations
LABEL_VALUE = rf"^({_LABEL_NAME})?$"
LABEL_LENGTH = 63
REPOSITORY = rf"^{_REPOSITORY}$"
TAG = rf"^{_TAG}$"
DIGEST = rf"^{_DIGEST}$"
EXTENDED_RESOURCE = rf"^{_SUBDOMAIN}/{_LABEL_NAME}$"  # of a device plugin

# What each asks for: (rule, remedy), as errors of a spec say it.
PATTERN_RULES |= {
    LABEL: (
        "must be at most 63 lower-case letters, digits and -, a letter or digit at both ends",
        "rename it",
    ),
    SUBDOMAIN: (
        "must be the name of a Kubernetes object: lower-case letters, digits, - and ., a letter or "
        "digit at both ends",
        "give the object's name as `kubectl get` prints it",
    ),
    LABEL_KEY: (
        "must be a label's key: [prefix/]name of letters, digits, -, _ and .",
        "copy it from the nodes' labels or taints",
    ),
    LABEL_VALUE: (
        "must be a label's value: at most 63 letters, digits, -, _ and ., no spaces",
        "copy it from `kubectl get nodes --show-labels`",
    ),
    REPOSITORY: (
        "must be an image without tag or digest: registry.example.com/team/forge",
        "give those as image.tag and image.digest",
    ),
    TAG: ("must be a tag: letters, digits, _, . and -", "copy it from the registry"),
    DIGEST: ("must be sha256: and 64 hexadecimal digits", "copy it from the registry"),
    EXTENDED_RESOURCE: (
        "must be a resource of a device plugin: domain/name",
        "copy it from `kubectl describe node`",
    ),
}
