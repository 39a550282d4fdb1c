"""The image of deploy/Dockerfile built by buildah, where no registry and no daemon can be reached,
and its containers: as Kubernetes runs them, on a root file system that nobody can write.

The base is Debian's own Python 3.11 under the name that FROM asks for. The stage that installs
packages gets this machine's settings of pip by mounts, and the one that is kept gets nothing.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from small_run import ROOT

DOCKERFILE = ROOT / "deploy/Dockerfile"
TOOLS = ("buildah", "debootstrap", "unshare", "ip")
BUILD_S = 5400.0  # 30 to 40 minutes on two busy cores
PYPI = "https://pypi.org/simple"
APART = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child")


def cannot_build() -> str:
    """Why no image can be built here; "" where one can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not here (Debian: apt-get install buildah debootstrap)"
    if os.geteuid():
        return "the image is built and mounted as root"
    done = subprocess.run([*APART, "true"], capture_output=True, text=True, timeout=60)
    return f"namespaces cannot be made here: {done.stderr.strip()}" if done.returncode else ""


def skip_or_fail(reason: str) -> None:
    """Skip the test, unless FORGE_REQUIRE_IMAGE is set."""
    if os.environ.get("FORGE_REQUIRE_IMAGE"):
        pytest.fail(f"FORGE_REQUIRE_IMAGE is set: {reason}", pytrace=False)
    pytest.skip(f"no image is built: {reason}")


@dataclass(frozen=True)
class Image:
    """An image that is built and mounted."""

    root: Path
    config: Mapping[str, Any]  # as in `docker image inspect`
    sbom: Mapping[str, Any]
    said: str  # by deploy/build_image.sh
    settings: Path  # what the build was given of this machine

    def start(self, words: list[str], home: Path) -> subprocess.Popen[str]:
        """Start a command as the image's user in namespaces of its own, without a network or a
        capability. /tmp and /runs are folders of `home`, all else is read-only."""
        script = home / "start.sh"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(self._script(words, home), encoding="utf-8")
        return subprocess.Popen(
            [*APART, "sh", "-e", str(script)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, words: list[str], home: Path, seconds: float = 120.0) -> tuple[int, str]:
        """The exit code of a command and what it printed."""
        with self.start(words, home) as process:
            try:
                said, _ = process.communicate(timeout=seconds)
            finally:
                process.kill()
        return process.returncode, said

    def _script(self, words: list[str], home: Path) -> str:
        user, _, group = self.config["User"].partition(":")
        lines = ["ip link set lo up", f"root={shlex.quote(str(self.root))}",
                 'mount --bind "$root" "$root"', 'mount -o remount,bind,ro "$root"',
                 'mount -t proc proc "$root/proc"', 'mount -t sysfs -o ro sysfs "$root/sys"',
                 'mount --rbind /dev "$root/dev"',
                 'mount -t tmpfs -o size=1g,mode=1777 tmpfs "$root/dev/shm"']  # fmt: skip
        for name in ("tmp", "runs"):
            folder = home / name
            folder.mkdir(exist_ok=True)
            os.chown(folder, int(user), int(group))
            lines.append(f'mount --bind {shlex.quote(str(folder))} "$root/{name}"')
        caged = [
            "setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups",
            "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs",
            "env", "-i", "-C", self.config["WorkingDir"], *self.config["Env"],
            *self.config["Entrypoint"], *words,
        ]  # fmt: skip
        return "\n".join([*lines, f'cd / && exec chroot "$root" {shlex.join(caged)}'])


@contextmanager
def built(target: str, home: Path) -> Iterator[Image]:
    """Build and mount a target. The storage is that of CONTAINERS_STORAGE_CONF, whose layers the
    next build takes; without it one under `home`, removed afterwards."""
    env = {**os.environ, "BUILDER": "buildah", "BUILDAH_ISOLATION": "chroot",
           "BUILDAH_FORMAT": "docker", "BUILDAH_LAYERS": "true"}  # fmt: skip
    own = "CONTAINERS_STORAGE_CONF" not in env
    if own:
        env["CONTAINERS_STORAGE_CONF"] = str(_storage(home))

    def buildah(*words: str | Path, seconds: float = 600.0) -> str:
        return _said(["buildah", *map(str, words)], env, seconds)

    base = _base()
    if subprocess.run(["buildah", "inspect", base], env=env, capture_output=True).returncode:
        _said([str(ROOT / "tests/clusters/debian_base.sh"), base], env, 1800.0)
    settings, options, arguments = _of_pip(home)
    buildah("build", "-f", DOCKERFILE, "--target", f"build-{target}", *options, *arguments, ROOT,
            seconds=BUILD_S)  # fmt: skip
    said = _said([str(ROOT / "deploy/build_image.sh"), target, *arguments], env, 1800.0)
    image = said[said.rindex("cartridge-forge:") :].split(": ")[0]
    sbom = json.loads((ROOT / f"sbom-{target}.json").read_text(encoding="utf-8"))
    config = json.loads(buildah("inspect", "--type", "image", image))["Docker"]["config"]
    container = buildah("from", image).strip()
    try:
        root = Path(buildah("mount", container).strip())
        yield Image(root, config, sbom, said, settings)
    finally:
        buildah("rm", container)
        if own:
            buildah("rmi", "--all", "--force")
            shutil.rmtree(home, ignore_errors=True)


def _said(words: list[str], env: Mapping[str, str], seconds: float) -> str:
    done = subprocess.run(
        words, env=dict(env), cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=seconds,
    )  # fmt: skip
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def _storage(home: Path) -> Path:
    path = home / "storage.conf"
    path.write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{home}/images"\nrunroot = "{home}/state"\n',
        encoding="utf-8",
    )
    return path


def _base() -> str:
    """The base that the Dockerfile names, in full."""
    found = re.search(r"^FROM (python:\S+)", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return f"docker.io/library/{found[1]}"


def _of_pip(home: Path) -> tuple[Path, list[str], list[str]]:
    """This machine's settings of pip as a file, options that mount it with all it names, and the
    build arguments: where pip has been given sources of its own, torch comes from there too."""
    listed = _said([sys.executable, "-m", "pip", "config", "list"], os.environ, 120.0)
    sections: dict[str, dict[str, str]] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        sections.setdefault(section.replace(":env:", "global"), {})[key] = value[1:-1]
    folder = home / "settings"
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "pip.conf"
    text = [f"[{section}]\n" + "".join(f"{k} = {v}\n" for k, v in keys.items())
            for section, keys in sections.items()]  # fmt: skip
    settings.write_text("\n".join(text), encoding="utf-8")
    mounted = {str(settings): "/etc/pip.conf"}
    for word in " ".join(v for keys in sections.values() for v in keys.values()).split():
        # The files of an index on disk lie beside it.
        path = Path(urllib.parse.urlsplit(word).path).parent if word[:5] == "file:" else Path(word)
        if path.is_absolute():
            mounted[str(path)] = str(path)
    options = [word for at, there in mounted.items() for word in ("-v", f"{at}:{there}:ro")]
    given = sections.get("global", {})
    own = "find-links" in given or "index-url" in given
    index = given.get("index-url", PYPI)
    return settings, options, ["--build-arg", f"TORCH_INDEX={index}"] if own else []
