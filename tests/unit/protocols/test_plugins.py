"""The table of plug-ins: what is shipped is there, and what other packages add is used."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import pytest
from channel_setup import bank_of, do, scene, trained, whole_kv

from cartridge_forge.actors.base import ModelSource
from cartridge_forge.forge_run.cli import forge
from cartridge_forge.learning.losses.channel import active_channels
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective
from cartridge_forge.plugins.spec_files.loading import load_resolved, load_spec
from cartridge_forge.plugins.spec_files.yaml_source import dump_yaml
from cartridge_forge.protocols import plugins
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.packages import APART, install_command, is_missing
from cartridge_forge.protocols.plugins import CORE, GROUP, SHIPPED, Plugin, known, optional, resolve
from cartridge_forge.protocols.spec.base import joined_class
from cartridge_forge.protocols.spec.mesh import ROLES
from cartridge_forge.services.roles import actor_class, role_arguments
from cartridge_forge.services.run_directory import RunDirectory

if TYPE_CHECKING:
    from twins import Twin


@pytest.mark.parametrize(
    ("plugin", "kind", "name"),
    [
        pytest.param(plugin, kind, name, id=f"{plugin.name}-{kind}-{name}")
        for plugin in (CORE, *SHIPPED)
        for kind, name, _ in plugin.entries()
    ],
)
def test_every_name_of_a_shipped_plug_in_is_there(
    plugin: Plugin, kind: plugins.Kind, name: str
) -> None:
    if name in APART and is_missing(name):  # no `make install` brings it
        with pytest.raises(SpecError, match=f"`{install_command(name)}`"):
            resolve(kind, name)
    else:
        assert resolve(kind, name) is plugins.load(plugin, kind, name)


def test_every_name_is_of_one_plug_in() -> None:
    names = [(kind, name) for p in (CORE, *SHIPPED) for kind, name, _ in p.entries()]
    assert len(names) == len(set(names))


def test_an_unknown_name_is_refused_with_the_known_ones_and_the_remedy() -> None:
    with pytest.raises(SpecError) as caught:
        resolve("planes", "carrier_pigeon")
    assert str(caught.value) == (
        "there is no tensor plane 'carrier_pigeon': expected one of torchstore, shared_memory; "
        "correct the name, or install the package whose plug-in adds it (entry point group "
        "cartridge_forge.plugins)"
    )


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("nowhere.at_all:Thing", "is at nowhere.at_all:Thing, which is not installed: install the "
         "plug-in far, or leave thing out"),
        ("cartridge_forge.services.roles:Thing", "is at cartridge_forge.services.roles:Thing, and "
         "that module has no Thing; install a version of far"),
    ],
)  # fmt: skip
def test_a_place_that_is_not_there_is_refused(
    place: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "SHIPPED", (*SHIPPED, Plugin("far", roles={"thing": place})))
    with pytest.raises(SpecError) as caught:
        resolve("roles", "thing")
    assert f"role thing of the plug-in far {error}" in str(caught.value)


def test_a_missing_package_of_a_plug_in_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "lacking_plugin.py").write_text("import a_package_of_nobody\n")
    monkeypatch.syspath_prepend(tmp_path)
    far = Plugin("far", roles={"thing": "lacking_plugin:Thing"})
    monkeypatch.setattr(plugins, "SHIPPED", (*SHIPPED, far))
    with pytest.raises(SpecError, match=r"run `pip install a_package_of_nobody`, or leave thing"):
        resolve("roles", "thing")
    with pytest.raises(SpecError):  # the plug-in itself is there
        optional("roles", "thing")


def test_what_is_optional_may_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Plugin("far", hooks={"thing": "plugins_of_nobody.far:Thing"})
    monkeypatch.setattr(plugins, "SHIPPED", (absent,))
    assert optional("hooks", "thing") is None
    with pytest.raises(SpecError):
        optional("hooks", "another")


CODE = """
from dataclasses import dataclass
from typing import ClassVar

from cartridge_forge.forge_run.cli import Command
from monarch.actor import Actor, endpoint
from cartridge_forge.protocols.plugins import Plugin
from cartridge_forge.learning.batch import Item
from cartridge_forge.learning.losses.channel import LossChannel, LossTerm, counted


class EchoActor(Actor):
    def __init__(self, times: int) -> None:
        self.times = times

    @endpoint
    async def ready(self) -> int:
        return self.times


@dataclass(frozen=True)
class Likelihood(LossChannel):
    name: ClassVar[str] = "likelihood"
    reads: ClassVar[str] = "doc"
    weight: float

    @classmethod
    def from_spec(cls, objective, loss):
        return cls(objective.channels["likelihood"])

    def samples(self, batch):
        return [(s,) for s in batch.doc]

    def items(self, batch):
        return [(i, range(len(s.response_ids))) for i, s in enumerate(batch.doc)]

    def check(self, batch, version):
        pass

    def denominators(self, batch):
        return counted((s.cartridge, len(s.response_ids)) for s in batch.doc)

    def term(self, logits, micro):
        tokens = micro.tokens[self.name]
        losses = -logits.logprobs(tokens.at, tokens.first)
        return LossTerm(losses, len(losses), len(losses), owners=tokens.owners)


def echo(word: str) -> int:
    print(word * 2)
    return 3


ECHO = Command("say a word twice", echo, [("word", {"help": "which"})])
PLUGIN = Plugin(
    "echo",
    commands={"echo": "echo_plugin:ECHO"},
    roles={"echo": "echo_plugin:EchoActor"},
    channels={"likelihood": "echo_plugin:Likelihood"},
)
"""


def write_package(folder: Path, name: str, code: str) -> None:
    """Write a package as pip installs it: a module, and the entry point of its plug-in."""
    (folder / f"{name}_plugin.py").write_text(code)
    info = folder / f"{name}_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {name}_plugin:PLUGIN\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages."""
    monkeypatch.syspath_prepend(tmp_path)
    for known_once in (plugins.installed, joined_class):
        known_once.cache_clear()
    yield tmp_path
    for known_once in (plugins.installed, joined_class):
        known_once.cache_clear()
    for name in [n for n in sys.modules if n.endswith("_plugin")]:
        del sys.modules[name]


def test_a_foreign_package_adds_a_role_and_a_loss_channel(site: Path) -> None:
    write_package(site, "echo", CODE)
    assert known("roles")[-1] == "echo"
    assert actor_class("echo").__module__ == "echo_plugin"
    (doc, likelihood) = active_channels(EpisodesObjective(channels={"likelihood": 0.5}))
    assert (doc.name, doc.weight) == ("doc_kl", 1.0)
    assert (likelihood.name, likelihood.weight) == ("likelihood", 0.5)


MESH = """
name: tiny
config: tiny.yaml
roles: {ROLE: {replicas: 2, threads: 3}}
"""
CONFIG = """
model: {path: .}
data: {facts: 2, notes: 1}
cartridge: {tokens: 2}
rollout: {prompts: 1, max_tokens: 1}
train: {steps: 1, row_tokens: 9}
"""


def write_mesh(folder: Path, role: str) -> str:
    (folder / "mesh.yaml").write_text(MESH.replace("ROLE", role))
    (folder / "tiny.yaml").write_text(CONFIG)
    return str(folder / "mesh.yaml")


def test_a_mesh_has_a_section_for_a_foreign_role(site: Path) -> None:
    """The pool of its actor is of that size; a resolved spec has it, and is read back."""
    write_package(site, "echo", CODE)
    spec = load_spec(write_mesh(site, "echo"), sets=("roles.echo.gpus=1",)).spec
    assert list(spec.mesh.roles) == [*ROLES, "echo"]
    role = spec.mesh.roles["echo"]
    assert (role.replicas, role.threads, role.gpus, role.procs) == (2, 3, 1, 1)
    (site / "spec.yaml").write_text(dump_yaml(spec.as_dict()))
    assert load_resolved(site / "spec.yaml") == spec


def test_a_role_that_no_plug_in_adds_is_refused(site: Path) -> None:
    write_package(site, "echo", CODE)
    with pytest.raises(SpecError) as caught:
        load_spec(write_mesh(site, "ecko"))
    assert str(caught.value) == (
        f"unknown key ecko at {site}/mesh.yaml:4 (roles.ecko); did you mean echo? known here: "
        f"{', '.join(ROLES)}, echo"
    )
    with pytest.raises(SpecError, match=r"threads must be >= 1: got 0 at --set roles\.echo"):
        load_spec(write_mesh(site, "echo"), sets=("roles.echo.threads=0",))


SECTION = """
from pydantic import Field
from cartridge_forge.protocols.plugins import Plugin
from cartridge_forge.protocols.spec.base import LocalPath, SpecSection
from cartridge_forge.protocols.spec.learn import LearnSpec


class ChoirSpec(SpecSection):
    "Configure a choir."

    voices: int = Field(default=4, ge=1, description="voices")
    sheet: LocalPath | None = Field(default=None, description="its music")


class ChoirLearn(LearnSpec):
    "Add a choir to a learning config."

    choir: ChoirSpec = Field(default=ChoirSpec(), description="who sings")

    @property
    def needed_roles(self):
        return super().needed_roles | {"choir"}

    def role_arguments(self, name, run):
        if name == "choir":
            return (self.choir.voices, run.replicas)
        return super().role_arguments(name, run)

    def rules(self):
        yield from super().rules()
        yield (
            self.choir.voices > self.rollout.prompts + 4,
            "choir.voices must be <= rollout.prompts + 4",
            "lower it",
        )


PLUGIN = Plugin(
    "choir",
    roles={"choir": "choir_plugin:ChoirActor"},
    configs={"choir": "choir_plugin:ChoirLearn"},
)
"""


def test_a_foreign_package_adds_a_section_with_rules_and_a_role_to_a_config(site: Path) -> None:
    """Where a key of it is given; the shipped sections stay, and a resolved spec has it too."""
    write_package(site, "choir", SECTION)
    mesh = write_mesh(site, "choir")
    with (site / "tiny.yaml").open("a") as config:
        config.write("choir: {voices: 5, sheet: mass.pdf}\n")
    spec = load_spec(mesh, sets=("objective.w_rl=0",)).spec
    assert (spec.learn.choir.voices, spec.learn.choir.sheet) == (5, str(site / "mass.pdf"))
    assert (spec.learn.recipe, spec.learn.data.facts) == ("longhealth", 2)
    assert [name for name, _ in spec.roles][-1] == "choir"
    base, directory = ModelSource(".", "float32", 1, {}, {}, 1), RunDirectory(site)
    assert role_arguments("choir", spec, base, frozenset(), directory) == (5, 2)
    (site / "spec.yaml").write_text(dump_yaml(spec.as_dict()))
    assert load_resolved(site / "spec.yaml") == spec
    # As Monarch sends it to an actor.
    assert pickle.loads(pickle.dumps(spec)) == spec  # noqa: S301 - our own bytes
    with pytest.raises(SpecError) as caught:
        load_spec(mesh, sets=("choir.voices=6",))
    assert str(caught.value) == (
        "voices must be <= rollout.prompts + 4: got 6 at --set choir.voices=6 (choir.voices); "
        "lower it"
    )
    with pytest.raises(SpecError, match=r"unknown key voice at --set choir\.voice=6 "):
        load_spec(mesh, sets=("choir.voice=6",))
    (site / "tiny.yaml").write_text(f"chor: {{}}{CONFIG}")
    with pytest.raises(SpecError, match=r"unknown key chor at .*; did you mean choir\?"):
        load_spec(mesh)


def test_keys_of_a_foreign_package_have_their_defaults_where_no_file_has_them(site: Path) -> None:
    write_package(site, "choir", SECTION)
    learn = load_spec(write_mesh(site, "choir")).spec.learn
    assert not hasattr(learn, "choir")
    (choir,) = plugins.installed()
    assert plugins.load(choir, "configs", "choir").of(learn).choir.voices == 4


def test_a_foreign_loss_channel_is_trained(site: Path, llama: Twin) -> None:
    """Its value is the mean of -log p of every response token, as transformers has them."""
    write_package(site, "echo", CODE)
    bank = bank_of(llama)
    batch = scene(llama, bank)
    kv = dict(zip(bank.names, whole_kv(bank, trained(bank)), strict=True))
    losses = [
        -llama.response_logits(s, kv[s.cartridge]).log_softmax(-1)[t, token].item()
        for s in batch.doc
        for t, token in enumerate(s.response_ids)
    ]
    done = do(llama, batch, EpisodesObjective(w_doc=1.0, channels={"likelihood": 0.5}))
    value = done.result.terms["likelihood"]["value"]
    assert value == pytest.approx(fmean(losses), rel=1e-5)
    alone = do(llama, batch, EpisodesObjective(w_doc=1.0))
    assert "likelihood" not in alone.result.terms


def test_a_foreign_package_adds_a_command(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_package(site, "echo", CODE)
    assert forge(["echo", "ab"]) == 3
    assert capsys.readouterr().out == "abab\n"


def test_a_channel_that_no_package_adds_is_refused_as_the_config_is_read() -> None:
    with pytest.raises(ValueError, match="must name loss channels of plug-ins: got likelihood"):
        EpisodesObjective(channels={"likelihood": 0.5})
    with pytest.raises(ValueError, match=r"must not name grpo; set objective\.w_rl"):
        EpisodesObjective(channels={"grpo": 0.5})


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("PLUGIN = 3", "must name a protocols.plugins.Plugin: bad_plugin:PLUGIN is a int"),
        ("raise OSError('no licence')", "does not load: OSError('no licence'); mend or remove"),
        ("from cartridge_forge.protocols.plugins import Plugin\n"
         "PLUGIN = Plugin('bad', roles={'trainer': 'x:y'})",
         "adds the role trainer, which core has already; rename one, or remove a package"),
    ],
)  # fmt: skip
def test_a_foreign_package_that_is_wrong_is_named(site: Path, code: str, error: str) -> None:
    write_package(site, "bad", code)
    with pytest.raises(SpecError) as caught:
        known("roles")
    assert error in str(caught.value)
