"""Read what a container runs: its command by the command line's own parser, and the spec that its
ConfigMaps and overrides make."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from posixpath import join, normpath
from typing import Any, NamedTuple

from cartridge_forge.plugins.cluster.checks.findings import (
    Container,
    Manifest,
    ManifestFault,
    PodTemplate,
    pod_templates,
)
from cartridge_forge.plugins.cluster.manifests.objects import HOME
from cartridge_forge.plugins.cluster.manifests.sizing import ModelSize, known_size
from cartridge_forge.plugins.serve.spec import ServeSpec, load_serve
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.files import REPOSITORY
from cartridge_forge.protocols.spec.mesh import RunSpec

RULE = "command"
WORKER, SERVE = "run:worker", "serve:command"
RUN_HANDLERS = ("run:run",)
IMAGE_FOLDERS = ("meshes", "configs")  # of mesh files and configs that the image has

Parse = Callable[[Sequence[str]], Mapping[str, Any]]
"""Return the options of a command by name, with `handler`. Raises SpecError for a wrong one."""


@dataclass(frozen=True, eq=False)
class OurContainer:
    """Hold a container that runs a command of Cartridge Forge, with the command's options and the
    spec that it reads. `run`, `serve` and the model's `size` are None where there is none, or it is
    not known."""

    container: Container
    options: Mapping[str, Any]
    run: RunSpec | None = None
    serve: ServeSpec | None = None
    size: ModelSize | None = None

    @property
    def pod(self) -> PodTemplate:
        return self.container.pod

    @property
    def handler(self) -> str:
        return str(self.options["handler"])


def our_containers(
    manifests: Sequence[Manifest], parse: Parse
) -> tuple[list[OurContainer], list[ManifestFault]]:
    """Return the containers that run our commands, and the faults of commands and specs."""
    containers: list[OurContainer] = []
    faults: list[ManifestFault] = []
    for template in pod_templates(manifests):
        for container in template.containers():
            if not container.words:
                continue
            faults += _unset(container)
            try:
                options = parse(container.words)
            except SpecError as error:
                command = " ".join(container.words[:3])
                faults.append(
                    container.finding(
                        RULE, ".command", f"{command}: {error}", "correct it (forge --help)"
                    )
                )
                continue
            try:
                containers.append(_with_spec(container, options, manifests))
            except SpecError as error:
                faults += [
                    container.finding(
                        "spec", ".command", line, "correct it in the ConfigMap, or --set"
                    )
                    for line in str(error).splitlines()
                    if line.strip()
                ]
                containers.append(OurContainer(container, options))
    return containers, faults


def _unset(container: Container) -> Iterator[ManifestFault]:
    """Yield variables that the command names and that stay as they are written."""
    have = {v.get("name") for v in container.get("env")}
    words = " ".join(map(str, [*container.get("command"), *container.get("args")]))
    for name in sorted(set(re.findall(r"(?<!\$)\$\(([^)]+)\)", words)) - have):
        if not container.get("envFrom"):
            yield container.finding(
                "env", ".command", f"uses $({name}), which no variable sets", "add it to env"
            )


def _with_spec(
    container: Container, options: Mapping[str, Any], manifests: Sequence[Manifest]
) -> OurContainer:
    mesh = options.get("mesh")
    handler = options["handler"]
    if mesh is None or not (handler in (*RUN_HANDLERS, SERVE) or handler.startswith("cartridges:")):
        return OurContainer(container, options)
    folder = str(container.value.get("workingDir") or HOME)
    path = normpath(join(folder, str(mesh)))
    overlays = tuple(normpath(join(folder, one)) for one in options.get("overlays") or ())
    laid = {normpath(at): text for at, text in _mounted(container, manifests).items()}
    read = _load(handler, path, overlays, tuple(options.get("sets") or ()), tuple(laid.items()))
    if read is None:
        if _is_unknown(container, path):
            return OurContainer(container, options)
        raise SpecError(
            f"reads {mesh}, which is neither in the image nor in a ConfigMap that it mounts"
        )
    return OurContainer(container, options, read.run, read.serve, read.size)


class ReadSpec(NamedTuple):
    """Hold what a command reads, as `OurContainer` does."""

    run: RunSpec | None = None
    serve: ServeSpec | None = None
    size: ModelSize | None = None


@lru_cache(maxsize=64)  # containers of one tree mostly read the same
def _load(
    handler: str,
    mesh: str,
    overlays: Sequence[str],
    sets: Sequence[str],
    laid: Sequence[tuple[str, str]],
) -> ReadSpec | None:
    """Return what a command reads of the image's files with `laid` over them; None without `mesh`.
    Raises SpecError where it is wrong."""
    with _files(laid) as root:
        path = root / mesh.lstrip("/")
        if not path.is_file():
            return None
        try:
            if handler in RUN_HANDLERS:
                overlay_paths = [str(root / one.lstrip("/")) for one in overlays]
                loaded = load_spec(str(path), overlays=overlay_paths, sets=sets).spec
                size = known_size(loaded.learn.model)
                text = loaded.model_dump_json().replace(f"{root}/", "/")
                return ReadSpec(run=RunSpec.model_validate_json(text), size=size)
            serve = load_serve(str(path), sets=sets).spec
            text = serve.model_dump_json().replace(f"{root}/", "/")
            return ReadSpec(serve=ServeSpec.model_validate_json(text))
        except SpecError as error:
            raise SpecError(str(error).replace(f"{root}/", "/")) from None


@contextmanager
def _files(laid: Sequence[tuple[str, str]]) -> Iterator[Path]:
    """Lay out the image's mesh files and configs, and the texts of ConfigMaps over them."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        home = root / HOME.lstrip("/")
        for name in IMAGE_FOLDERS:
            shutil.copytree(REPOSITORY / name, home / name)
        (home / "models").symlink_to(REPOSITORY / "models")
        for path, text in laid:
            target = root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        yield root


def _mounted(container: Container, manifests: Sequence[Manifest]) -> dict[str, str]:
    """Return the texts of the ConfigMaps that a container mounts, by their path in it."""
    data = {
        (m.namespace, m.name): m.value.get("data") or {} for m in manifests if m.kind == "ConfigMap"
    }
    space = container.pod.owner.namespace
    volumes = {v["name"]: v.get("configMap") for v in container.pod.spec.get("volumes") or ()}
    texts = {}
    for mount in container.get("volumeMounts"):
        source = volumes.get(mount["name"])
        contents = data.get((space, source.get("name")), {}) if source else {}
        items = (source or {}).get("items")
        files = {i["path"]: contents.get(i["key"]) for i in items} if items else dict(contents)
        if "subPath" in mount:
            files = {"": files.get(mount["subPath"])}
        for name, text in files.items():
            if text is not None:
                texts[join(mount["mountPath"], name) if name else mount["mountPath"]] = str(text)
    return texts


def _is_unknown(container: Container, path: str) -> bool:
    """Return whether a volume of unknown contents covers the path, or the image is not ours."""
    maps = {v["name"] for v in container.pod.spec.get("volumes") or () if "configMap" in v}
    covers = (m for m in container.get("volumeMounts") if m["name"] not in maps)
    return any(path.startswith(f"{m['mountPath'].rstrip('/')}/") for m in covers)
