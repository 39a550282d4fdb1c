"""Hold what the checks read, objects with their files, and what they find."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cartridge_forge.plugins.cluster.manifests.objects import DOMAIN, PART_OF, Object

INIT = ("tini", "--")
OUR_COMMANDS = ("forge", "forge-run")
WORKER_MODULE = "cartridge_forge.plugins.cluster.hosts.worker"


@dataclass(frozen=True)
class ManifestFault:
    """Describe one fault. `path` is the field in the object, such as `.spec.replicas`; `rule` the
    check that found it."""

    rule: str
    object: str
    path: str
    what: str
    remedy: str
    file: str = ""

    def __str__(self) -> str:
        where = ": ".join(part for part in (self.file, self.object, self.path) if part)
        return f"{where}: {self.what}; {self.remedy} [{self.rule}]"


@dataclass(frozen=True, eq=False)
class Manifest:
    """Hold one object of the API and the file that it was read from."""

    value: Object
    file: str = ""

    @property
    def kind(self) -> str:
        return str(self.value["kind"])

    @property
    def group(self) -> str:
        """Return the API group: `"apps"` of apps/v1, `""` of v1."""
        group, slash, _ = str(self.value["apiVersion"]).partition("/")
        return group if slash else ""

    @property
    def name(self) -> str:
        metadata = self.value["metadata"]
        return str(metadata.get("name") or f"{metadata.get('generateName', '')}*")

    @property
    def namespace(self) -> str:
        return str(self.value["metadata"].get("namespace") or "")

    @property
    def label(self) -> str:
        """Return the name that findings use: `Job/controller`."""
        return f"{self.kind}/{self.name}"

    @property
    def spec(self) -> Any:
        return self.value.get("spec") or {}

    def finding(self, rule: str, path: str, what: str, remedy: str) -> ManifestFault:
        return ManifestFault(rule, self.label, path, what, remedy, self.file)


@dataclass(frozen=True, eq=False)
class PodTemplate:
    """Hold the template of the pods that an object makes; `path` is its place in the object."""

    owner: Manifest
    path: str
    value: Object

    @property
    def spec(self) -> Any:
        return self.value.get("spec") or {}

    @property
    def labels(self) -> dict[str, str]:
        return dict((self.value.get("metadata") or {}).get("labels") or {})

    @property
    def count(self) -> int:
        """Return how many such pods there may be at a time."""
        replicas = self.owner.spec.get("replicas")
        return replicas if isinstance(replicas, int) and not isinstance(replicas, bool) else 1

    def containers(self) -> Iterator[Container]:
        """Yield the containers, those of the start first."""
        for field_ in ("initContainers", "containers"):
            for index, value in enumerate(self.spec.get(field_) or ()):
                yield Container(self, f"{self.path}.spec.{field_}[{index}]", value)

    def is_ours(self) -> bool:
        """Return whether a container runs a command of Cartridge Forge."""
        return any(container.words for container in self.containers())

    def finding(self, rule: str, path: str, what: str, remedy: str) -> ManifestFault:
        return self.owner.finding(rule, f"{self.path}{path}", what, remedy)


@dataclass(frozen=True, eq=False)
class Container:
    """Hold one container of a pod template; `path` is its place in the object."""

    pod: PodTemplate
    path: str
    value: Object
    words: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", _our_words(self.value))

    def get(self, key: str) -> Any:
        """Return a list of the container, empty where it has none."""
        return self.value.get(key) or ()

    def ports(self) -> dict[int, str]:
        """Return the names of its ports by number; "" for one without a name."""
        ports = (p for p in self.get("ports") if isinstance(p.get("containerPort"), int))
        return {p["containerPort"]: p.get("name") or "" for p in ports}

    def port(self, named: Any) -> int | None:
        """Return the number of a port given by number or name; None where there is none such."""
        if isinstance(named, int):
            return named
        return next((n for n, name in self.ports().items() if name == named), None)

    def finding(self, rule: str, path: str, what: str, remedy: str) -> ManifestFault:
        return self.pod.owner.finding(rule, f"{self.path}{path}", what, remedy)


def _our_words(container: Object) -> tuple[str, ...]:
    """Return the words of our command that a container runs, without tini; none for another's."""
    image = str(container.get("image") or "")
    words = [str(word) for word in container.get("command") or ()]
    if not words and f"/{image}".rpartition("/")[2].partition(":")[0] != PART_OF:
        return ()
    words += [str(word) for word in container.get("args") or ()]
    if tuple(words[:2]) == INIT:
        words = words[2:]
    if not words:  # the image's own
        return ("forge", "worker")
    if WORKER_MODULE in words[:4]:
        return ("forge", "worker", *words[words.index(WORKER_MODULE) + 1 :])
    program = words[0].rpartition("/")[2]
    return (program, *words[1:]) if program in OUR_COMMANDS else ()


def pod_templates(manifests: Sequence[Manifest]) -> Iterator[PodTemplate]:
    """Yield the template of every pod that would be made."""
    for manifest in manifests:
        spec, path = manifest.spec, ".spec"
        if not isinstance(spec, dict):
            continue
        if manifest.kind == "Pod":
            yield PodTemplate(manifest, "", manifest.value)
            continue
        if isinstance(inner := spec.get("jobTemplate"), dict):  # of a CronJob
            spec, path = inner.get("spec") or {}, ".spec.jobTemplate.spec"
        for key in ("podTemplate", "template"):
            template = spec.get(key)
            if isinstance(template, dict) and isinstance(template.get("spec"), dict):
                yield PodTemplate(manifest, f"{path}.{key}", template)


def ours(manifests: Sequence[Manifest]) -> list[Manifest]:
    """Return the objects of Cartridge Forge: all in a namespace where a pod runs a command of it or
    a MonarchMesh is, the namespace itself, and whatever has its label."""
    spaces = {t.owner.namespace for t in pod_templates(manifests) if t.is_ours()}
    spaces |= {m.namespace for m in manifests if m.kind == "MonarchMesh"}

    def belongs(manifest: Manifest) -> bool:
        space = manifest.name if manifest.kind == "Namespace" else manifest.namespace
        return space in spaces or labels_of(manifest).get(f"{DOMAIN}/part-of") == PART_OF

    return [manifest for manifest in manifests if belongs(manifest)]


def labels_of(manifest: Manifest) -> dict[str, str]:
    return dict(manifest.value["metadata"].get("labels") or {})
