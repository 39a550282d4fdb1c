"""A pod's container as a process: in a network namespace with the pod's address, in a root file
system that is read-only, with the volumes, variables, user and probes that the pod asks for.

The image is this machine: its files, with the repository at /app. So what is not in the pod's
volumes cannot be written, as in the image.
"""

from __future__ import annotations

import base64
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import namespaces
from namespaces import CLIENT, hold, run
from small_run import ROOT

Object = dict[str, Any]
Read = Callable[[str, str], Object]  # an object by its kind's plural and its name

PROBE_S = 10.0
# As process 1 tini hands signals on; here the command itself gets them.
TINI = '#!/bin/sh\nshift\nexec "$@"\n'
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


class PodNamespace:
    """A network namespace with an address on the bridge, held by its guard until `end`."""

    def __init__(self, ip: str) -> None:
        self.ip, self.link = ip, f"p{ip.rpartition('.')[2]}"
        guard = [sys.executable, "-I", str(Path(namespaces.__file__))]
        self._guard = hold(["unshare", "--net", *guard])
        here = Path("/proc/self/ns/net").readlink()
        while Path(f"/proc/{self._guard.pid}/ns/net").readlink() == here:
            time.sleep(0.01)
        inside = " ".join(self.inside)
        run(f"ip link add {self.link} type veth peer name eth0 netns {self._guard.pid}")
        run(f"ip link set {self.link} master bridge up")
        run(f"{inside} ip link set lo up")
        run(f"{inside} ip addr add {ip}/24 dev eth0")
        run(f"{inside} ip link set eth0 up")
        run(f"{inside} ip route add default via {CLIENT}")

    @property
    def inside(self) -> list[str]:
        """What starts a program there, as `kubectl port-forward` connects."""
        return ["nsenter", f"--target={self._guard.pid}", "--net"]

    def cut(self) -> None:
        run(f"ip link set {self.link} down")

    def end(self) -> None:
        """End every process there, at once."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait(60)


class PodContainer:
    """The one container of a pod. `read` asks the API server; claims are folders of `claims`."""

    def __init__(self, raw: Object, net: PodNamespace, home: Path, claims: Path, read: Read,
                 server: str) -> None:  # fmt: skip
        self._raw, self._net, self._home, self._claims, self._read = raw, net, home, claims, read
        (self._spec,) = raw["spec"]["containers"]
        self._user = raw["spec"]["securityContext"]
        host, _, port = server.rpartition("//")[2].partition(":")
        self._server = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        self.log = home / "log"
        self.restarts = -1
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        """Start it, or start it again after it has ended: logs are kept."""
        self.restarts += 1
        env = self._env()
        words = [
            re.sub(r"\$\((\w+)\)", lambda m: env[m[1]], word) for word in self._spec["command"]
        ]
        script = self._home / "start.sh"
        script.write_text(self._script([*self._as_user(env), *words]), encoding="utf-8")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._net.inside, "unshare", "--mount", "--uts", "sh", "-e", str(script)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def passes(self, probe: Object) -> bool:
        """Whether a probe of any of the three kinds passes now."""
        if "exec" in probe:
            return self._executes(probe["exec"]["command"])
        way = probe.get("httpGet") or probe["tcpSocket"]
        ports = {p["name"]: p["containerPort"] for p in self._spec["ports"]}
        port = ports.get(way["port"], way["port"])
        if "tcpSocket" in probe:
            return not subprocess.run(
                ["bash", "-c", f"exec 3<>/dev/tcp/{self._net.ip}/{port}"], timeout=PROBE_S
            ).returncode
        url = f"http://{self._net.ip}:{port}{way['path']}"
        try:
            with urllib.request.urlopen(url, timeout=probe.get("timeoutSeconds", 1)) as reply:
                return bool(reply.status < 400)
        except HTTPError as error:
            error.close()
        except OSError:
            pass
        return False

    def probe(self, kind: str) -> Object | None:
        found: Object | None = self._spec.get(kind)
        return found

    def _executes(self, words: list[str]) -> bool:
        inside = ["nsenter", f"--target={self.process.pid}", "--net", "--mount", "--uts",
                  "--root"]  # fmt: skip
        with suppress(subprocess.TimeoutExpired):
            return not subprocess.run(
                [*inside, *self._as_user(self._env()), *words],
                stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_S,
            ).returncode  # fmt: skip
        return False

    def _env(self) -> dict[str, str]:
        metadata = self._raw["metadata"]
        fields = {
            "status.podIP": self._net.ip,
            **{f"metadata.{key}": metadata[key] for key in ("name", "uid", "namespace")},
        }
        image = {
            "PATH": f"{Path(sys.prefix).resolve()}/bin:/usr/bin:/bin", "PYTHONPATH": "/app",
            "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        given = {}
        for one in self._spec["env"]:
            source = one.get("valueFrom", {})
            if "fieldRef" in source:
                given[one["name"]] = fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                ref = source["secretKeyRef"]
                value = self._read("secrets", ref["name"])["data"][ref["key"]]
                given[one["name"]] = base64.b64decode(value).decode()
            else:
                given[one["name"]] = one["value"]
        return {**image, **self._server, **given}

    def _as_user(self, env: dict[str, str]) -> list[str]:
        """What starts a program as the pod's user, without capabilities, with these variables."""
        user, group = self._user["runAsUser"], self._user["runAsGroup"]
        cage = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups",
                "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]  # fmt: skip
        return [*cage, "env", "-i", "-C", "/app", *(f"{k}={v}" for k, v in env.items())]

    def _script(self, words: list[str]) -> str:
        """Mount what the container sees, and become its command."""
        own = [str(Path(p).resolve()) for p in (sys.prefix, sys.base_prefix)]
        name = self._raw["metadata"]["name"]
        binds = [*((path, path) for path in own), (str(ROOT), "/app")]
        mounts = []
        for mount in self._spec["volumeMounts"]:
            volume = next(v for v in self._raw["spec"]["volumes"] if v["name"] == mount["name"])
            at = mount["mountPath"].replace("/var/run/", "/run/")
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                size = volume["emptyDir"]["sizeLimit"].removesuffix("i").lower()
                mounts.append(f"mount -t tmpfs -o size={size},mode=1777 tmpfs root{at}")
            else:
                binds.append((str(self._volume(volume) / mount.get("subPath", "")), at))
        folders = " ".join(f"image{at}" for _, at in binds if not at.startswith("/app/"))
        return "\n".join([
            f"hostname {name}",
            "mount --make-rprivate /",
            f"mount -t tmpfs -o mode=755 tmpfs {self._home}/top",
            f"cd {self._home}/top",
            f"mkdir -p root image/usr/bin image/etc {folders}",
            f"printf %s {shlex.quote(TINI)} >image/usr/bin/tini",
            "chmod 755 image/usr/bin/tini",
            f"printf '127.0.0.1 localhost\\n{self._net.ip} {name}\\n' >image/etc/hosts",
            # Two lower layers and no upper one: a root file system that nobody can write.
            "mount -t overlay overlay -o lowerdir=image:/ root",
            *(f"mount --rbind /{one} root/{one}" for one in ("proc", "dev", "sys")),
            *(f"mount --bind {source} root{at}" for source, at in binds),
            *mounts,
            f"cd / && exec chroot {self._home}/top/root {shlex.join(words)}",
        ])  # fmt: skip

    def _volume(self, volume: Object) -> Path:
        """The folder of a volume, filled."""
        if "persistentVolumeClaim" in volume:
            return self._owned(self._claims / volume["persistentVolumeClaim"]["claimName"])
        folder = self._owned(self._home / "volumes" / volume["name"])
        for source in volume.get("projected", {}).get("sources", [volume]):
            for path, content in self._files(source).items():
                (folder / path).write_bytes(content)
        return folder

    def _files(self, source: Object) -> dict[str, bytes]:
        metadata = self._raw["metadata"]
        if "serviceAccountToken" in source:
            account = f"{self._raw['spec']['serviceAccountName']}/token"
            token = self._read("serviceaccounts", account)["status"]["token"]
            return {source["serviceAccountToken"]["path"]: token.encode()}
        if "downwardAPI" in source:
            return {one["path"]: metadata["namespace"].encode()
                    for one in source["downwardAPI"]["items"]}  # fmt: skip
        if found := source.get("secret"):
            data = self._read("secrets", found.get("secretName") or found["name"])["data"]
            files = {key: base64.b64decode(value) for key, value in data.items()}
        elif found := source.get("configMap"):
            data = self._read("configmaps", found["name"])["data"]
            files = {key: value.encode() for key, value in data.items()}
        else:
            return {}
        items = found.get("items") or [{"key": key, "path": key} for key in files]
        return {one["path"]: files[one["key"]] for one in items}

    def _owned(self, folder: Path) -> Path:
        """The folder, given to the pod's group."""
        folder.mkdir(parents=True, exist_ok=True)
        run(f"chown {self._user['runAsUser']}:{self._user['fsGroup']} {folder}")
        return folder
