"""Configure `forge serve`: the typed `meshes/serve.yaml`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator

from cartridge_forge.plugins.replay.spec import open_url
from cartridge_forge.plugins.spec_files.keys import SpecFile
from cartridge_forge.plugins.spec_files.loading import LoadedFile, load_sets
from cartridge_forge.plugins.strategies.spec import ProcessRewardSpec
from cartridge_forge.protocols.files import REPOSITORY, library_folder
from cartridge_forge.protocols.secrets import SecretName
from cartridge_forge.protocols.spec.base import AsTuple, LocalPath, SpecSection, broken
from cartridge_forge.protocols.spec.mesh import RoleSpec
from cartridge_forge.protocols.spec.model import ModelSpec, settled
from cartridge_forge.protocols.spec.sections import GeneratorSpec
from cartridge_forge.protocols.spec.services import LOOPBACK, HealthSpec, host_and_port

Right = Literal["inference", "admin", "metrics"]
RIGHTS: tuple[Right, ...] = get_args(Right)
CallFormatName = Literal["hermes", "llama3_json", "desk"]


class ServeRolesSpec(SpecSection):
    """Configure the roles behind the HTTP server."""

    generator: RoleSpec = Field(
        default=RoleSpec(max_ongoing=64), description="samples, with or without a cartridge"
    )


class ApiKeySpec(SpecSection):
    """Configure one API key: what its holder may do, and how much of it."""

    env: SecretName = Field(description="environment variable, or file:PATH, with the key")
    rights: Annotated[tuple[Right, ...], AsTuple] = Field(
        default=("inference",), min_length=1, description="what the key is for"
    )
    cartridges: Annotated[tuple[str, ...], AsTuple] | None = Field(
        default=None, description="names of the cartridges that the key is for; null: all"
    )
    tokens_per_minute: int | None = Field(
        default=None, ge=1, description="most tokens, read and sampled, of a minute; null: any"
    )
    in_flight: int | None = Field(
        default=None, ge=1, description="most requests at a time; null: any"
    )


class HttpSpec(SpecSection):
    """Configure the HTTP server: address, authentication, and limits of size and time."""

    listen: str = Field(
        default="127.0.0.1:8000", description="host:port of the server; port 0 takes a free one"
    )
    key_env: SecretName | None = Field(
        default=None,
        description="environment variable, or file:PATH, with an API key for everything, which "
        "every request must carry unless `keys` has another",
    )
    keys: dict[str, ApiKeySpec] = Field(
        default={}, description="further API keys by name, each with its own rights and quotas"
    )
    hosts: Annotated[tuple[str, ...], AsTuple] = Field(
        default=(),
        description="names that clients know the server by, beside localhost, the name in `listen` "
        "and any address; * for all",
    )
    origins: Annotated[tuple[str, ...], AsTuple] = Field(
        default=(), description="origins of the web pages that are answered; by default none is"
    )
    audit: LocalPath | None = Field(
        default=None,
        min_length=1,
        description="file that gets a row for each request: who asked which cartridge when",
    )
    audit_text: bool = Field(default=False, description="write messages and prompts there too")
    open_to_all: bool = Field(
        default=False, description="listen beyond loopback without a key all the same"
    )
    max_pending: int = Field(
        default=256, ge=1, description="sequences that wait or run at a time; beyond it, 429"
    )
    max_pending_tokens: int = Field(
        default=2**20,
        ge=1,
        description="tokens that the requests which wait or run may cost together; beyond it, 429",
    )
    max_choices: int = Field(default=64, ge=1, description="most responses of one request")
    deadline_s: float = Field(default=120.0, gt=0, description="most seconds of one request")
    header_s: float = Field(
        default=10.0, gt=0, description="seconds in which a request's line and headers arrive"
    )
    body_s: float = Field(default=30.0, gt=0, description="seconds in which its body arrives")
    idle_s: float = Field(
        default=5.0, gt=0, description="seconds that a connection stays open between requests"
    )
    max_connections: int = Field(
        default=1024, ge=1, description="most connections, fewer where the system opens fewer files"
    )
    max_connections_per_peer: int = Field(
        default=512, ge=1, description="most connections of one address"
    )
    max_body_bytes: int = Field(default=4 * 1024**2, ge=1024, description="most bytes of a body")
    max_upload_bytes: int = Field(
        default=1024**3, ge=1024, description="most bytes of an uploaded cartridge"
    )
    keep_alive_s: float = Field(
        default=5.0, gt=0, description="seconds between the comments that keep a stream open"
    )
    drain_s: float = Field(
        default=10.0, ge=0, description="seconds that requests have to end in, at the end"
    )

    @field_validator("listen")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        return host_and_port(value)

    @field_validator("open_to_all")
    @classmethod
    def _is_guarded(cls, value: bool, info: ValidationInfo) -> bool:
        if not info.data.keys() >= {"listen", "key_env", "keys"}:
            return value  # one of them is invalid and reported on its own
        listen = info.data["listen"]
        guarded = info.data["key_env"] or info.data["keys"]
        if listen.rpartition(":")[0] not in LOOPBACK and not guarded and not value:
            raise broken(
                f"must be true to serve anyone without a key, and http.listen ({listen}) is not "
                "loopback",
                "set http.key_env to an environment variable with a key, or listen on "
                "127.0.0.1:8000",
            )
        return value


class HubSpec(SpecSection):
    """Configure which cartridges of a hub requests may have fetched, `source: huggingface` of
    Tokasaurus' routes. No other repository is asked for, whatever a request names."""

    repositories: dict[str, str] = Field(
        min_length=1, description="OWNER/NAME of the hub -> the cartridge's name in the library"
    )
    endpoint: str | None = Field(
        default=None, description="URL of the hub, or of a mirror; null: $HF_ENDPOINT, or the hub's"
    )
    token_env: SecretName | None = Field(
        default=None, description="environment variable, or file:PATH, with a token; null: none"
    )
    max_bytes: int = Field(default=1024**3, ge=1, description="most bytes of a cartridge's files")
    pickles: bool = Field(
        default=False, description="also read .pt files, by the loader that runs no code"
    )
    timeout_s: float = Field(default=60.0, gt=0, description="seconds that a request waits for it")

    @field_validator("repositories")
    @classmethod
    def _are_named(cls, value: dict[str, str]) -> dict[str, str]:
        for repository, name in value.items():
            if not re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", repository):
                raise broken("must have repositories of the form OWNER/NAME", "rename it")
            if name == "auto" or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
                raise broken(
                    f"must give {repository} a cartridge's name: letters, digits and _ . -, a "
                    "letter or digit first, and not auto",
                    "rename it",
                )
        return value

    @field_validator("endpoint")
    @classmethod
    def _holds_no_secret(cls, value: str | None) -> str | None:
        if value is None:
            return None
        return open_url(value, "https://huggingface.co", "give a token by token_env")


class VerifySpec(SpecSection):
    """Configure how documents verify the answers of their cartridges."""

    mode: Literal[True, False, "after", "auto"] = Field(
        default=False,
        description="for requests that say nothing (forge.verify): after scores the cartridge's "
        "answer by its document; true gives the document's own answer, whose tokens the cartridge "
        "proposes; auto the same, proposed only where that pays",
    )
    below: float = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="after: a token to which the document gives less than this probability is told "
        "as refused",
    )
    max_kv_bytes: int = Field(
        default=1024**3,
        ge=1,
        description="document KV kept by one generator, bytes; the least recently used goes first",
    )


class ServedGeneratorSpec(GeneratorSpec):
    """Configure the engine of a server, which has requests in flight whatever it is."""

    in_flight: Literal["finish", "drain"] = Field(
        default="finish", description=GeneratorSpec.model_fields["in_flight"].description
    )


class ServeSpec(SpecSection):
    """Configure a server with its generators, `meshes/serve.yaml`."""

    name: str = Field(description="names the base model on the wire: letters, digits and . _ / -")
    model: ModelSpec = Field(description="the frozen base model")
    library: LocalPath = Field(
        min_length=1,
        description="directory of versioned cartridges, relative to the file that names it",
    )
    generator: ServedGeneratorSpec = Field(
        default=ServedGeneratorSpec(), description="what runs the generators"
    )
    roles: ServeRolesSpec = Field(
        default=ServeRolesSpec(), description="replicas and threads of every role"
    )
    http: HttpSpec = Field(default=HttpSpec(), description="the door")
    tool_calls: CallFormatName | None = Field(
        default=None,
        description="form in which the model writes calls of tools; null: that of its chat "
        "template, else hermes. desk: the sentences of the clinic desk's clerk",
    )
    hub: HubSpec | None = Field(
        default=None, description="cartridges that requests may have fetched; null: none"
    )
    process_reward: ProcessRewardSpec | None = Field(
        default=None, description="what strategies with the scorer process_reward ask; null: none"
    )
    held_cartridges: int = Field(
        default=16, ge=1, description="cartridge versions that the generators keep in memory"
    )
    verify: VerifySpec = Field(
        default=VerifySpec(), description="how documents verify the answers of their cartridges"
    )
    max_tokens: int = Field(default=1024, ge=1, description="most tokens of one response")
    context_tokens: int | None = Field(
        default=None,
        ge=2,
        description="most tokens of cartridge, prompt and response; null: what the model was made "
        "for",
    )
    spares: int = Field(default=0, ge=0, description="warm processes to take a dead one's place")
    health: HealthSpec = Field(default=HealthSpec(), description="heartbeats of every process")
    spawn_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="most seconds in which a starting process makes no progress: reads nothing, "
        "prepares no cartridge and takes no memory",
    )

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,127}", value):
            raise broken(
                "must be letters, digits and . _ / -, a letter or digit first", "rename it"
            )
        return value

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON or YAML."""
        return self.model_dump(mode="json")


SERVER_FILE = SpecFile(ServeSpec, "a server", "meshes/serve.yaml", "serve it with forge serve {}")


def load_serve(path: str, *, sets: Sequence[str] = ()) -> LoadedFile[ServeSpec]:
    """Read and check `meshes/serve.yaml` with `--set` overrides. The shipped file, as it is, has
    the library of the user's home, from whichever folder. Raises SpecError as `load_spec` does."""
    loaded = load_sets(SERVER_FILE, ServeSpec, path, sets)
    spec, file_folder = loaded.spec, loaded.place("library").directory.resolve()
    if file_folder == REPOSITORY / "meshes" and Path(spec.library) == REPOSITORY / "library":
        spec = spec.model_copy(update={"library": str(library_folder())})
    model = settled(spec.model, gpus=spec.roles.generator.gpus > 0, here=True)
    return LoadedFile(spec.model_copy(update={"model": model}), loaded.places)
