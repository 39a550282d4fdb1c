"""Name what plug-ins add to the core: roles, loss channels, recipes, hosts, sinks and so on.

    resolve("roles", "environment")      actors.environment.EnvironmentActor, imported now
    known("hosts")                       every name, of shipped and of installed plug-ins

The core imports no plug-in. It asks this table for an object by its name, and the module that has
the object is imported then. The table holds the core's own objects (CORE), those of the plug-ins
that come with Cartridge Forge (SHIPPED), and those of other packages: a package joins by an entry
point of the group `cartridge_forge.plugins` that names a `Plugin`:

    [project.entry-points."cartridge_forge.plugins"]
    my_plugin = "my_package.plugin:PLUGIN"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.packages import install_command

GROUP = "cartridge_forge.plugins"
Kind = Literal[
    "recipes", "roles", "channels", "hosts", "planes", "sinks", "commands", "hooks", "configs",
    "meshes", "files",
]  # fmt: skip
# What an entry of each kind is called in an error.
NOUNS: Mapping[Kind, str] = {
    "recipes": "recipe", "roles": "role", "channels": "loss channel", "hosts": "kind of hosts",
    "planes": "tensor plane", "sinks": "telemetry sink", "commands": "command", "hooks": "hook",
    "configs": "section of a config", "meshes": "section of a mesh", "files": "kind of file",
}  # fmt: skip


class MissingPluginError(SpecError):
    """Report a plug-in of the table whose own modules are not installed here."""


@dataclass(frozen=True)
class Plugin:
    """Hold the names that a plug-in adds, each with the place of its object: "module:attribute".

    recipes   opens a run's recipe: (spec, tokenizer, mesh, directory) -> Recipe
    roles     the actor class of a role
    channels  a `learning.losses.channel.LossChannel`
    hosts     makes the source of a run's workers: (spec) -> HostSource
    planes    starts a tensor plane: (mesh of the store's process, timeout_s) -> OwnedPlane
    sinks     opens a telemetry sink: (spec, directory) -> TelemetrySink
    commands  a `forge_run.cli.Command`
    hooks     an object that the core uses at one place where a spec asks for it
    configs   a subclass of `protocols.spec.learn.LearnSpec` with the keys that it adds
    meshes    a subclass of `protocols.spec.mesh.MeshSpec` with the keys that it adds
    files     a `plugins.spec_files.keys.SpecFile`: another kind of spec file
    """

    name: str
    recipes: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    channels: Mapping[str, str] = field(default_factory=dict)
    hosts: Mapping[str, str] = field(default_factory=dict)
    planes: Mapping[str, str] = field(default_factory=dict)
    sinks: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)
    hooks: Mapping[str, str] = field(default_factory=dict)
    configs: Mapping[str, str] = field(default_factory=dict)
    meshes: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def entries(self) -> Iterator[tuple[Kind, str, str]]:
        """Yield the kind, name and place of every object."""
        for kind in NOUNS:
            for name, target in getattr(self, kind).items():
                yield kind, name, target


def resolve(kind: Kind, name: str) -> Any:
    """Return the object of this kind and name, imported now. Raises SpecError for a name that no
    plug-in adds, and for one whose module or package is not installed."""
    return load(_plugin_with(kind, name), kind, name)


def _plugin_with(kind: Kind, name: str) -> Plugin:
    shipped = next((p for p in (CORE, *SHIPPED) if name in getattr(p, kind)), None)
    plugin = shipped or next((p for p in installed() if name in getattr(p, kind)), None)
    if plugin is not None:
        return plugin
    raise SpecError(
        f"there is no {NOUNS[kind]} {name!r}: expected one of {', '.join(known(kind))}; correct "
        f"the name, or install the package whose plug-in adds it (entry point group {GROUP})"
    )


def optional(kind: Kind, name: str) -> Any | None:
    """Return the object as `resolve` does; None where its plug-in is not installed here."""
    try:
        return resolve(kind, name)
    except MissingPluginError:
        return None


def known(kind: Kind) -> list[str]:
    """Return the names of a kind, in the table's order: the core's first, then by plug-in."""
    plugins = (CORE, *SHIPPED, *installed())
    return [name for plugin in plugins for name in getattr(plugin, kind)]


def module_of(kind: Kind, name: str) -> str:
    """Return the name of the module that has the object, without an import of it. Raises SpecError
    for a name that no plug-in adds."""
    target: str = getattr(_plugin_with(kind, name), kind)[name]
    return target.partition(":")[0]


def load(plugin: Plugin, kind: Kind, name: str) -> Any:
    """Import and return a plug-in's object. Raises SpecError that names what is missing."""
    target: str = getattr(plugin, kind)[name]
    module, _, attribute = target.partition(":")
    what = f"{NOUNS[kind]} {name} of the plug-in {plugin.name}"
    try:
        imported = import_module(module)
    except ImportError as error:
        missing = error.name or module
        if not isinstance(error, ModuleNotFoundError):
            remedy = f"install a version of {plugin.name} that fits this one of Cartridge Forge"
            raise SpecError(f"{what} at {target} does not import ({error}); {remedy}") from error
        if f"{module}.".startswith(f"{missing}."):
            raise MissingPluginError(
                f"{what} is at {target}, which is not installed: install the plug-in "
                f"{plugin.name}, or leave {name} out"
            ) from error
        raise SpecError(
            f"{what} needs the package {missing}, which is not installed here; run "
            f"`{install_command(missing)}`, or leave {name} out"
        ) from error
    if not hasattr(imported, attribute):
        raise SpecError(
            f"{what} is at {target}, and that module has no {attribute}; install a version of "
            f"{plugin.name} that fits this one of Cartridge Forge"
        )
    return getattr(imported, attribute)


@cache
def installed() -> tuple[Plugin, ...]:
    """Return the plug-ins of other packages, by the names of their entry points. Reading the entry
    points takes a tenth of a second, so a name of the core or of SHIPPED does without. Raises
    SpecError for an entry point that is no Plugin, and for a name that is in the table already."""
    owners = {(kind, name): p.name for p in (CORE, *SHIPPED) for kind, name, _ in p.entries()}
    plugins = []
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        plugin = _plugin_of(point)
        for kind, name, _ in plugin.entries():
            if (kind, name) in owners:
                raise SpecError(
                    f"the plug-in {plugin.name} ({point.value}) adds the {NOUNS[kind]} {name}, "
                    f"which {owners[kind, name]} has already; rename one, or remove a package"
                )
            owners[kind, name] = plugin.name
        plugins.append(plugin)
    return tuple(plugins)


def _plugin_of(point: EntryPoint) -> Plugin:
    try:
        plugin = point.load()
    except Exception as error:  # of the foreign module
        raise SpecError(
            f"the plug-in {point.name} ({point.value}) does not load: {error!r}; mend or remove "
            "the package that has it"
        ) from error
    if not isinstance(plugin, Plugin):
        raise SpecError(
            f"the entry point {point.name} of the group {GROUP} must name a "
            f"protocols.plugins.Plugin: {point.value} is a {type(plugin).__name__}"
        )
    return plugin


PLUGINS = "cartridge_forge.plugins"
CORE = Plugin(
    "core",
    roles={
        "generator": "cartridge_forge.actors.generator:GeneratorActor",
        "doc_teacher": "cartridge_forge.actors.doc_teacher:DocTeacherActor",
        "trainer": "cartridge_forge.actors.trainer:TrainerActor",
        "store": "cartridge_forge.actors.heartbeat:StoreActor",
    },
    channels={"doc_kl": "cartridge_forge.learning.losses.doc_kl:DocKL"},
)
SHIPPED = (
    Plugin("clinic", recipes={"longhealth": f"{PLUGINS}.documents.study.longhealth:open_recipe"}),
    Plugin(
        "documents",
        recipes={"documents": f"{PLUGINS}.documents.study.recipe:open_recipe"},
        hooks={
            "routing": f"{PLUGINS}.documents.study.routing:RoutedQuestions",
            "study_prompts": f"{PLUGINS}.documents.study.reference_prompts:study_prompts",
        },
        configs={"documents": f"{PLUGINS}.documents.spec.learn:DocumentsLearn"},
    ),
    Plugin(
        "environments",
        roles={
            "environment": "cartridge_forge.actors.environment:EnvironmentActor",
            "reward": "cartridge_forge.actors.reward:RewardActor",
        },
    ),
    Plugin(
        "episodes",
        recipes={"episodes": f"{PLUGINS}.episodes.recipe:open_recipe"},
        roles={"sdpo_teacher": "cartridge_forge.actors.sdpo_teacher:SDPOTeacherActor"},
        channels={
            "grpo": f"{PLUGINS}.episodes.losses.grpo:GRPO",
            "sdpo": f"{PLUGINS}.episodes.losses.sdpo:SDPO",
        },
        configs={"episodes": f"{PLUGINS}.episodes.spec.learn:EpisodesLearn"},
    ),
    Plugin(
        "replay",
        roles={"teacher_replay": "cartridge_forge.actors.teacher_replay:TeacherReplayActor"},
        channels={"replay_dpo": f"{PLUGINS}.replay.dpo:ReplayDPO"},
        hooks={"local_teachers": f"{PLUGINS}.replay.clinic_teachers:local_teachers"},
        configs={"replay": f"{PLUGINS}.replay.spec:ReplayLearn"},
    ),
    Plugin(
        "strategies",
        recipes={"rsa": f"{PLUGINS}.rsa.recipe:open_recipe"},
        roles={"rsa_aggregator": "cartridge_forge.actors.rsa_aggregator:RSAAggregatorActor"},
        configs={"rsa": f"{PLUGINS}.rsa.spec:RsaLearn"},
    ),
    Plugin(
        "library",
        hooks={
            "inits": f"{PLUGINS}.library.starts.untrained:INITS",
            "pads": f"{PLUGINS}.library.starts.untrained:PADS",
            "other_models": f"{PLUGINS}.library.models.adapter:load_by_transformers",
            "other_frequencies": f"{PLUGINS}.library.models.adapter:frequencies_by_transformers",
            "kept_verdict": f"{PLUGINS}.library.models.verdicts:kept_verdict",
            "keep_verdict": f"{PLUGINS}.library.models.verdicts:keep_verdict",
            "whole_weights": f"{PLUGINS}.library.base_models.kept:whole_weights",
            "model_check": f"{PLUGINS}.library.models.parity:check_model",
            "start": f"{PLUGINS}.library.starts.trained:open_start",
        },
    ),
    Plugin(
        "vllm",
        hooks={
            "engine_share": f"{PLUGINS}.cluster.manifests.devices:engine_share",
            "canary": f"{PLUGINS}.vllm.canary:Canary",
        },
    ),
    Plugin(
        "objectives",
        hooks={
            "updates": f"{PLUGINS}.objectives.updates:run_updates",
            "policy_scores": f"{PLUGINS}.objectives.policy_scores:PolicyScores",
            "balance": f"{PLUGINS}.objectives.balance:GradientBalance",
            "balance_report": f"{PLUGINS}.objectives.balance:report",
            "document_logprobs": f"{PLUGINS}.objectives.policy_scores:document_logprobs",
        },
    ),
    Plugin(
        "host",
        planes={
            "torchstore": f"{PLUGINS}.host.torchstore:open_plane",
            "shared_memory": f"{PLUGINS}.host.plane:open_plane",
        },
        hooks={
            "trainer_files": f"{PLUGINS}.host.stored_files:TrainerFiles",
            "store_variables": f"{PLUGINS}.host.stored_files:VARIABLES",
            "interface": f"{PLUGINS}.host.ranks:interface_to",
            "divide_base": f"{PLUGINS}.host.ranks:divide_base",
            "shard_base": f"{PLUGINS}.host.ranks:shard_base",
            "whole_weight": f"{PLUGINS}.host.ranks:whole_weight",
        },
    ),
    Plugin(
        "decoding",
        hooks={
            "verified_rows": f"{PLUGINS}.decoding.verified.rows:VerifiedRows",
            "grammars": f"{PLUGINS}.decoding.grammar:Grammars",
            "stop_checker": f"{PLUGINS}.decoding.stopping:StopChecker",
        },
    ),
    Plugin(
        "serve",
        roles={"engine_generator": "cartridge_forge.actors.engine_generator:EngineGeneratorActor"},
        files={"server": f"{PLUGINS}.serve.spec:SERVER_FILE"},
    ),
    Plugin(
        "evaluate",
        files={
            "sweep": f"{PLUGINS}.evaluate.spec:SWEEP_FILE",
            "evaluation": f"{PLUGINS}.evaluate.spec:EVAL_FILE",
        },
    ),
    Plugin(
        "cluster",
        hosts={
            "addresses": f"{PLUGINS}.cluster.hosts.addressed:open_hosts",
            "kubernetes": f"{PLUGINS}.cluster.hosts.kubernetes:KubernetesHosts",
            "slurm": f"{PLUGINS}.cluster.hosts.slurm:SlurmHosts",
        },
        hooks={
            "same_files": f"{PLUGINS}.cluster.hosts.same_files:same_files",
            "autoscale": f"{PLUGINS}.cluster.autoscale:decide",
            "relays": f"{PLUGINS}.cluster.relays.host_relays:HostRelays",
            "host_membership": f"{PLUGINS}.cluster.hosts.membership:HostMembership",
            "host_heartbeats": f"{PLUGINS}.cluster.hosts.host_heartbeats:HostHeartbeats",
        },
        meshes={"cluster": f"{PLUGINS}.cluster.spec:ClusterMesh"},
        files={"deployment": f"{PLUGINS}.cluster.spec:DEPLOYMENT_FILE"},
    ),
    Plugin(
        "watch",
        sinks={
            "metrics": f"{PLUGINS}.watch.telemetry.prometheus:open_sink",
            "trace": f"{PLUGINS}.watch.telemetry.trace:open_sink",
            "tensorboard": f"{PLUGINS}.watch.telemetry.tensorboard:open_sink",
            "wandb": f"{PLUGINS}.watch.telemetry.wandb:open_sink",
            "otlp": f"{PLUGINS}.watch.telemetry.otlp:open_sink",
            "trackio": f"{PLUGINS}.watch.telemetry.trackio:open_sink",
        },
        hooks={
            "observer": f"{PLUGINS}.watch.control.observer:ControlledRun",
            "step_warnings": f"{PLUGINS}.watch.notices:step_warnings",
            "token_scores": f"{PLUGINS}.watch.token_scores:TokenScores",
            "preparation_progress": f"{PLUGINS}.watch.notices:PreparationProgress",
        },
    ),
)
