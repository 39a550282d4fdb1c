"""Specs from files and overrides: every fault with its whole message, and what wins over what."""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cartridge_forge.plugins.spec_files.loading import LoadedSpec, load_resolved, load_spec
from cartridge_forge.plugins.spec_files.yaml_source import dump_yaml, parse_value
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.sections import ComposeSpec

REPOSITORY = Path(__file__).parents[4]

MESH = """\
name: tiny
config: ../configs/tiny.yaml
hosts:
  kind: local
plane: torchstore
roles:
  generator:
    replicas: 2
    threads: 1
"""

CONFIG = """\
model:
  path: ../models/reader
data:
  patients: 8
  facts: 24
  notes: 4
  held_out: 0.5
cartridge:
  tokens: 28
rollout:
  prompts: 32
  max_tokens: 64
  kinds: [recite, question]
train:
  steps: 150
  row_tokens: 256
  lr: 2e-2
"""

M, C = "meshes/tiny.yaml", "configs/tiny.yaml"


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that holds a good mesh, its config and its model's directory."""
    for name, text in ((M, MESH), (C, CONFIG)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    (tmp_path / "models/reader").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def message(*sets: str, overlays: tuple[str, ...] = ()) -> str:
    with pytest.raises(SpecError) as caught:
        load_spec(M, sets=sets, overlays=overlays)
    return str(caught.value)


# (file, what it says, what it says instead, the whole message)
BAD_FILES = [
    (M, "replicas: 2", "replicas: 0",
     f"replicas must be >= 1: got 0 at {M}:8 (roles.generator.replicas); set it to 1 or more"),
    (M, "replicas: 2", "replicas: '2'",
     f"replicas must be a whole number: got '2' at {M}:8 (roles.generator.replicas); "
     "write digits alone, without quotes"),
    (M, "replicas: 2", "replicas: true",
     f"replicas must be a whole number: got true at {M}:8 (roles.generator.replicas); "
     "write digits alone, without quotes"),
    (M, "replicas: 2", "replica: 2",
     f"unknown key replica at {M}:8 (roles.generator.replica); did you mean replicas? "
     "known here: replicas, procs, threads, gpus, router, attempts, max_ongoing, restarts, "
     "autoscale"),
    (M, "  generator:\n", "  generater:\n",
     f"unknown key generater at {M}:7 (roles.generater); did you mean generator? "
     "known here: generator, doc_teacher, sdpo_teacher, environment, reward, teacher_replay, "
     "rsa_aggregator, trainer"),
    (M, "  generator:\n    replicas: 2\n    threads: 1", "  store: 3",  # a part of every mesh
     f"unknown key store at {M}:7 (roles.store); did you mean records.store? "
     "known here: generator, doc_teacher, sdpo_teacher, environment, reward, teacher_replay, "
     "rsa_aggregator, trainer"),
    (M, "  generator:\n    replicas: 2\n    threads: 1", "  trainer: 3",
     f"trainer must be a mapping of keys: got 3 at {M}:7 (roles.trainer); it may hold replicas, "
     "procs, threads, gpus, router, attempts, max_ongoing, restarts, autoscale"),
    (M, "replicas: 2", "replicas: 2\n    autoscale: {min: 3, max: 4}",
     f"autoscale must hold replicas (2) between its min and max: got a mapping at {M}:9 "
     "(roles.generator.autoscale); change one of the three"),
    (M, "plane: torchstore", "plane: sharedmemory",
     f"plane must be one of torchstore, shared_memory, auto: got 'sharedmemory' at {M}:5 (plane); "
     "did you mean shared_memory?"),
    (M, "name: tiny", "name: Tiny-1",
     "name must be lower-case letters, digits and _, a letter first: got 'Tiny-1' "
     f"at {M}:1 (name); rename the mesh"),
    (M, "name: tiny\n", "",
     f"name must be given: missing at {M}:1 (name); add name: (names the run directory: "
     "lower-case letters, digits and _)"),
    (M, "tiny.yaml", "tony.yaml",
     "config must name a learning config (there is no file configs/tony.yaml): "
     f"got '../configs/tony.yaml' at {M}:2 (config); give its path relative to the mesh file"),
    (M, "kind: local", "kind: addresses",
     f"addresses must be given with hosts.kind addresses: got [] at {M}:3 (hosts.addresses); "
     "list tls://host:port"),
    (M, "kind: local", "kind: addresses\n  addresses: [tcp://a:26600, b:70000]",
     "addresses must hold tls://host:port addresses: got [tcp://a:26600, b:70000] "
     f"at {M}:5 (hosts.addresses); write 'b:70000' as tls://host:26600"),
    (M, "kind: local", "addresses: ['tcp://a:1']",
     "addresses is read with hosts.kind addresses alone, and hosts.kind is local: got [tcp://a:1] "
     f"at {M}:4 (hosts.addresses); remove it, or set hosts.kind: addresses"),
    (M, "hosts:\n  kind: local\nplane: torchstore", "hosts: kubernetes\nplane: shared_memory",
     "plane must reach every host of hosts.kind kubernetes; shared memory is one host's: "
     f"got 'shared_memory' at {M}:4 (plane); set plane: torchstore"),
    (M, "roles:\n  generator:\n    replicas: 2\n    threads: 1", "roles: 3",
     f"roles must be a mapping of keys: got 3 at {M}:6 (roles); "
     "it may hold generator, doc_teacher, sdpo_teacher, environment, reward, teacher_replay, "
     "rsa_aggregator, trainer"),
    (M, "plane: torchstore", "plane: torchstore\nlr: 0.1",
     f"unknown key lr at {M}:6 (lr); did you mean train.lr? "
     "known here: name, config, hosts, plane, publish, roles, gpus, spares, health, watchdog, "
     "control, telemetry, records, call_timeout_s, spawn_timeout_s"),
    (M, "plane: torchstore", "plane: torchstore\nname: other",
     f"the text must be valid YAML: key name is given twice, first on line 1 at {M}:6; "
     "remove one"),
    (M, "  kind: local", "\tkind: local",
     f"a tab cannot indent YAML at {M}:4; use spaces"),
    (M, "hosts:\n", "hosts: [\n",
     f"the text must be valid YAML: expected ',' or ']', but got ':' at {M}:5; "
     "check indentation, colons, quotes and brackets"),
    (M, "name: tiny", "name: &n tiny\nplane: *n",
     f"the text must be valid YAML: the alias *n is not read here at {M}:2; write the value out"),
    (M, "name: tiny", "name: !!python/name:os.system ''",
     "the text must be valid YAML: could not determine a constructor for the tag "
     f"'tag:yaml.org,2002:python/name:os.system' at {M}:1; "
     "check indentation, colons, quotes and brackets"),
    (M, "name: tiny", "1: tiny",
     f"the text must be valid YAML: a key is not text at {M}:1; quote it or remove it"),
    (M, MESH, "", f"{M} is empty; write the keys of the spec into it"),
    (M, MESH, "# nothing yet\n", f"{M} is empty; write the keys of the spec into it"),
    (M, MESH, "- name: tiny\n",
     f"the file must be a mapping of keys: got [a mapping] at {M}:1; write `key: value` lines"),
    (M, "name: tiny", "name: ti\x07ny",
     f"the file must be plain text: got character U+0007 at {M}:1; remove it"),
    (C, "lr: 2e-2", "lr: -1",
     f"lr must be > 0: got -1 at {C}:17 (train.lr); set it above 0"),
    (C, "lr: 2e-2", "lr: fast",
     f"lr must be a number: got 'fast' at {C}:17 (train.lr); write it without quotes"),
    (C, "lr: 2e-2", "lr: .nan",
     f"lr must be a finite number: got nan at {C}:17 (train.lr); write a number"),
    (C, "lr: 2e-2", "warmup_steps: 151",
     f"warmup_steps must be <= train.steps (150): got 151 at {C}:17 (train.warmup_steps); "
     "lower it or train longer"),
    (C, "steps: 150", "steps: 1.5",
     f"steps must be a whole number: got 1.5 at {C}:15 (train.steps); "
     "write digits alone, without quotes"),
    (C, "  steps: 150\n", "",
     f"steps must be given: missing at {C}:14 (train.steps); "
     "add steps: (training steps of the run: rollouts, each trained)"),
    (C, "held_out: 0.5", "held_out: 1.5",
     f"held_out must be <= 1: got 1.5 at {C}:7 (data.held_out); set it to 1 or less"),
    (C, "held_out: 0.5", "held_out: 0",
     f"held_out must be > 0: got 0 at {C}:7 (data.held_out); set it above 0"),
    (C, "  facts: 24\n", "",
     f"facts must be given with data.source clinic: got null at {C}:3 (data.facts); "
     "set it to a count of 1 or more"),
    (C, "notes: 4", "notes: 25",
     f"notes must be <= facts (24): got 25 at {C}:6 (data.notes); a note needs a fact: lower it"),
    (C, "facts: 24\n  notes: 4", "source: longhealth\n  facts: 24",
     "facts is read with data.source clinic, desk or handbook alone, and data.source is "
     f"longhealth: got 24 at {C}:6 (data.facts); remove it, or set data.source: clinic"),
    (C, "path: ../models/reader", "path: ''",
     f"path must not be empty: got '' at {C}:2 (model.path); write a value"),
    (C, "path: ../models/reader", "path: 7",
     f"path must be text: got 7 at {C}:2 (model.path); put it in quotes"),
    (C, "tokens: 28", "tokens: 28\n  frozen: 28",
     f"frozen must be < cartridge.tokens (28): got 28 at {C}:10 (cartridge.frozen); "
     "leave tokens to train"),
    (C, "max_tokens: 64", "max_tokens: 256",
     f"max_tokens must be < train.row_tokens (256): got 256 at {C}:12 (rollout.max_tokens); "
     "a sequence holds the prompt too: lower it or raise train.row_tokens"),
    (C, "[recite, question]", "[]",
     f"kinds must hold at least one item: got [] at {C}:13 (rollout.kinds); list one"),
    (C, "[recite, question]", "recite",
     f"kinds must be a list: got 'recite' at {C}:13 (rollout.kinds); write it as [a, b]"),
    (C, "[recite, question]", "\n    - recite\n    - summarize",
     "kinds[1] must be one of recite, recite_note, structure, summarise, question, choice, "
     f"findings: got 'summarize' at {C}:15 (rollout.kinds[1]); did you mean summarise?"),
    (C, "[recite, question]", "[recite, recite]",
     f"kinds must list each item once: got [recite, recite] at {C}:13 (rollout.kinds); "
     "remove the second recite"),
    (C, "train:", "teacher: {top_k: all}\ntrain:",
     f"top_k must be a whole number >= 1 or full: got 'all' at {C}:14 (teacher.top_k); "
     "20 is the usual choice"),
    (C, "train:", "loss: {beta: 0.5}\ntrain:",
     "beta is read with loss.direction jsd alone, and loss.direction is forward: "
     f"got 0.5 at {C}:14 (loss.beta); remove it, or set loss.direction: jsd"),
    (C, "train:", "loss: {direction: jsd}\ntrain:",
     f"beta must be given with loss.direction jsd: got null at {C}:14 (loss.beta); set it to 0.5"),
    (C, "train:", "loss: {direction: jsd, beta: 1}\ntrain:",
     f"beta must be < 1: got 1 at {C}:14 (loss.beta); set it below 1"),
    (C, "train:", "loss: {temperature: 2.0}\ntrain:",
     "temperature must be 1 with a top-k teacher, which sends no whole distribution to divide: "
     f"got 2.0 at {C}:14 (loss.temperature); set it to 1 or teacher.top_k to full"),
    (C, "train:", "loss: {form: pairs}\ntrain:",
     "form belongs to loss.direction cross_entropy alone, for it is no divergence: "
     f"got 'pairs' at {C}:14 (loss.form); use tail, or set loss.direction: cross_entropy"),
    (C, "train:", "evaluate: {arms: [none, offline]}\ntrain:",
     "arms must hold on_policy where it holds offline, which trains on as many tokens: "
     f"got [none, offline] at {C}:14 (evaluate.arms); add on_policy or remove offline"),
    (C, "train:", "evaluate: {arms: [none, routed]}\ntrain:",
     "arms must hold on_policy where it holds routed, which reads the same cartridges: "
     f"got [none, routed] at {C}:14 (evaluate.arms); add on_policy or remove routed"),
    (C, "train:", "evaluate: {sampled: yes}\ntrain:",
     f"sampled must be true or false: got 'yes' at {C}:14 (evaluate.sampled); "
     "write true or false"),
    (C, "train:", "evaluate:\ntrain:",
     f"evaluate must be a mapping of keys: got null at {C}:14 (evaluate); it may hold arms, "
     "retriever, questions, probe_every, probe_questions, max_tokens, sampled, temperature, "
     "contamination, alike"),
    (C, "path: ../models/reader",
     "path: m\n  shape: {layers: 1, hidden: 8, heads: 4, kv_heads: 3, head_dim: 2, "
     "intermediate: 8, vocab: 9}",
     f"kv_heads must divide heads (4): got 3 at {C}:3 (model.shape.kv_heads); "
     "copy both from the model's config.json"),
]  # fmt: skip


def first_words(cases: Sequence[tuple[str, ...]]) -> list[str]:
    return [case[-1].split(": ")[0] for case in cases]


@pytest.mark.parametrize(("file", "old", "new", "expected"), BAD_FILES, ids=first_words(BAD_FILES))
def test_a_bad_file_is_one_clear_line(
    house: Path, file: str, old: str, new: str, expected: str
) -> None:
    text = (house / file).read_text()
    assert old in text
    (house / file).write_text(text.replace(old, new, 1))
    assert message() == expected


BAD_OVERRIDES = [
    ("roles.generator.replicas=0",
     "replicas must be >= 1: got 0 at --set roles.generator.replicas=0 "
     "(roles.generator.replicas); set it to 1 or more"),
    ("train.lr",
     "--set takes key.path=value: got 'train.lr'; write --set train.lr=0.01"),
    ("train..lr=1",
     "--set takes key.path=value: got 'train..lr=1'; write --set train.lr=0.01"),
    ("generator.replicas=3",
     "unknown key replicas at --set generator.replicas=3 (generator.replicas); did you mean "
     "roles.generator.replicas? known here: backend, in_flight, block_tokens, chunk_tokens, "
     "kv_gib, gpu_share, tensor_parallel"),
    ("threads=3",
     "unknown key threads at --set threads=3; did you mean roles.generator.threads? known: name, "
     "config, hosts, plane, publish, roles, gpus, spares, health, watchdog, control, telemetry, "
     "records, call_timeout_s, spawn_timeout_s, model, cartridge, rollout, "
     "generator, teacher, loss, objective, train, evaluate, replay, data, documents, self_study, "
     "episodes, reward, rsa"),
    ("generator.block_tokens=40",
     "block_tokens must be a multiple of 32: got 40 at --set generator.block_tokens=40 "
     "(generator.block_tokens); round it to 32, 64, ..."),
    ("train.stpes=3",
     "unknown key stpes at --set train.stpes=3 (train.stpes); did you mean steps? known here: "
     "steps, lr, lr_scale, warmup_steps, clip, updates_per_rollout, minibatches, staleness, seed, "
     "row_tokens, logit_chunk_mb, recompute_layers, shard_base, tensor_parallel, "
     "checkpoint_every, offline_texts, keep_checkpoints, compose, sampler_gap, warm_start, mix"),
    ("rollout.kinds=[recite",
     "the text must be valid YAML: expected ',' or ']', but got '<stream end>' at "
     "--set rollout.kinds=[recite:1; check indentation, colons, quotes and brackets"),
    ("train.lr.max=1",
     "lr must be a mapping to set a key in it: got 0.02 at --set train.lr.max=1 (train.lr); "
     "set train.lr as a whole"),
    ("evaluate.arms=on_policy",
     "arms must be a list: got 'on_policy' at --set evaluate.arms=on_policy (evaluate.arms); "
     "write it as [a, b]"),
    ("hosts=clouds",
     "kind must be one of local, addresses, kubernetes, slurm: got 'clouds' at --set hosts=clouds "
     "(hosts.kind); pick one of them"),
    ("train.steps=",
     "steps must be a whole number: got null at --set train.steps= (train.steps); "
     "write digits alone, without quotes"),
]  # fmt: skip


@pytest.mark.parametrize(("override", "expected"), BAD_OVERRIDES, ids=first_words(BAD_OVERRIDES))
def test_a_bad_override_names_itself(house: Path, override: str, expected: str) -> None:
    assert message(override) == expected


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (
            ("train.compose=0.5",),
            "compose must be a section, no longer a share: got 0.5 at --set train.compose=0.5 "
            "(train.compose); write compose: {distractors: 1, share: 0.5}",
        ),
        (
            ("train.compose={}", "data.patients=1"),
            "distractors must be less than the run's cartridges (1): got 1 at --set "
            "train.compose={} (train.compose.distractors); lower it, or train more cartridges",
        ),
        (
            ("train.compose.distractors=8",),
            "distractors must be <= 7: got 8 at --set train.compose.distractors=8 "
            "(train.compose.distractors); set it to 7 or less",
        ),
        (
            (
                "rsa={N: 4}",
                "objective={w_doc: 0, w_rl: 1}",
                "evaluate.arms=[none]",
                "train.compose={}",
            ),
            "compose is read with recipe longhealth or documents alone, and recipe is rsa: got a "
            "mapping at --set train.compose={} (train.compose); remove it",
        ),
    ],
)
def test_compositions_that_cannot_be_trained_are_refused(
    house: Path, sets: tuple[str, ...], expected: str
) -> None:
    assert message(*sets).startswith(expected)


def test_compositions_need_no_certain_backend_and_older_specs_have_none(house: Path) -> None:
    sets = ("train.compose.distractors=3", "generator.backend=vllm")
    compose = load_spec(M, sets=sets).spec.learn.train.compose
    assert compose == ComposeSpec(distractors=3, share=0.5)
    assert load_spec(M, sets=("train.compose=0.0",)).spec.learn.train.compose is None


def test_the_arm_routed_needs_questions_that_are_known(house: Path) -> None:
    sets = ("evaluate.arms=[on_policy, routed]", "rsa={N: 4}", "objective.w_rl=1")
    assert "arms must not hold routed with episodes or rsa" in message(*sets)
    assert load_spec(M, sets=sets[:1]).spec.learn.evaluate.arms == ("on_policy", "routed")


def test_every_fault_is_listed_in_the_order_of_places(house: Path) -> None:
    (house / M).write_text(MESH.replace("replicas: 2", "replicas: 0").replace("tiny", "Tiny", 1))
    (house / C).write_text(CONFIG.replace("tokens: 28", "tokens: 1"))
    assert message("train.lr=0") == (
        "4 faults in the spec:\n"
        f"  tokens must be >= 2: got 1 at {C}:9 (cartridge.tokens); set it to 2 or more\n"
        "  name must be lower-case letters, digits and _, a letter first: got 'Tiny' "
        f"at {M}:1 (name); rename the mesh\n"
        f"  replicas must be >= 1: got 0 at {M}:8 (roles.generator.replicas); "
        "set it to 1 or more\n"
        "  lr must be > 0: got 0 at --set train.lr=0 (train.lr); set it above 0"
    )


def test_files_that_cannot_be_read(house: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec("meshes/none.yaml")
    assert str(caught.value) == "there is no file meshes/none.yaml; check the path"
    with pytest.raises(SpecError) as caught:
        load_spec("meshes")
    assert str(caught.value) == "cannot read meshes: Is a directory; give a YAML file"
    assert message(overlays=("o.yaml",)) == "there is no file o.yaml; check the path"
    (house / M).write_bytes(b"name: tiny\nplane: \xff\n")
    assert message() == f"the file must be UTF-8: got byte 0xff at {M}:2; save it as UTF-8"


def test_later_wins_and_mappings_merge(house: Path) -> None:
    (house / "a.yaml").write_text("train: {steps: 7, lr: 0.5}\nteacher: {top_k: full}\n")
    (house / "b.yaml").write_text("train:\n  lr: 0.25\nrollout: {kinds: [structure]}\n")
    loaded = load_spec(
        M,
        overlays=("a.yaml", "b.yaml"),
        sets=("train.seed=3", "train.seed=4", "loss.form=renormalised"),
    )
    learn = loaded.spec.learn
    assert (learn.train.steps, learn.train.lr, learn.train.seed) == (7, 0.25, 4)
    assert learn.train.row_tokens == 256  # not in the overlays
    assert (learn.teacher.top_k, learn.loss.form) == ("full", "renormalised")
    assert learn.rollout.kinds == ("structure",)  # a list is replaced, not extended
    assert str(loaded.place("train.steps")) == "a.yaml:1"
    assert str(loaded.place("train.lr")) == "b.yaml:2"
    assert str(loaded.place("train.row_tokens")) == f"{C}:16"
    assert str(loaded.place("train.clip")) == f"{C}:14"  # a default: where its section starts
    assert str(loaded.place("loss.form")) == "--set loss.form=renormalised"


@pytest.mark.parametrize("override", ["hosts=kubernetes", "hosts.kind=kubernetes"])
@pytest.mark.parametrize("written", ["hosts: local", "hosts: {kind: local}"])
def test_a_bare_word_is_a_kind_of_hosts(house: Path, written: str, override: str) -> None:
    (house / M).write_text(MESH.replace("hosts:\n  kind: local", written))
    loaded = load_spec(M, sets=(override,))
    assert loaded.spec.mesh.hosts.kind == "kubernetes"
    assert str(loaded.place("hosts.kind")) == f"--set {override}"


def test_local_paths_start_where_they_were_written(house: Path) -> None:
    spec = load_spec(M).spec
    assert spec.mesh.config == str(house / C)
    assert spec.learn.model.path == str(house / "models/reader")
    spec = load_spec(M, sets=("data.path=b.json", "model.path=models/reader")).spec
    assert spec.learn.data.path == str(house / "b.json")
    assert spec.learn.model.path == str(house / "models/reader")
    spec = load_spec(M, sets=("data.path=https://x.org/b.json", "model.path=org/model-3B")).spec
    assert spec.learn.data.path == "https://x.org/b.json"
    assert spec.learn.model.path == "org/model-3B"  # no such directory: a hub id


# (file, keys as they are written, the key -> its value in the resolved spec; {} is the test's
# folder, and each file is in a folder of its own below it).
LOCAL_KEYS = [
    (M, ["hosts={kind: kubernetes, tls: pem}"], {"mesh.hosts.tls": "{}/pem"}),
    (M, ["control.tls_ca=a.crt", "control.tls_cert=b.crt", "control.tls_key=~/k"],
     {"mesh.control.tls_ca": "{}/a.crt", "mesh.control.tls_cert": "{}/b.crt",
      "mesh.control.tls_key": "{HOME}/k"}),
    (M, ["telemetry={metrics: '0.0.0.0:9100', tls: ../pem}"], {"mesh.telemetry.tls": "{..}/pem"}),
    (C, ["data={source: documents, path: a, questions: q.json}", "self_study={}"],
     {"learn.data.questions": "{}/q.json"}),
    (C, ["data={source: documents, path: [a, ../b/*.md, /c]}", "self_study={}"],
     {"learn.data.path": "{}/a:{..}/b/*.md:/c", "learn.data.rows.folder": "."}),
    (C, ["data={source: documents, path: a}", "self_study={rows: rows.jsonl}"],
     {"learn.self_study.rows": "{}/rows.jsonl"}),
    (C, ["data={source: jsonl, path: a:b, rows: {documents: d, held_out: h}}"],
     {"learn.data.path": "{}/a:{}/b", "learn.data.rows.documents": "{}/d",
      "learn.data.rows.held_out": "{}/h", "learn.data.rows.folder": "."}),
    (C, ["data={source: parquet, path: a, rows: {held_out: h}}"],
     {"learn.data.rows.held_out": "{}/h"}),
    (C, ["data={source: hub, path: a/b, rows: {documents: d, held_out: test}}"],
     {"learn.data.path": "a/b", "learn.data.rows.documents": "{}/d",
      "learn.data.rows.held_out": "test", "learn.data.rows.folder": "."}),
    (C, ["data={source: python, path: 'p:f', rows: {documents: d, held_out: 'p:g', folder: m}}"],
     {"learn.data.path": "p:f", "learn.data.rows.documents": "{}/d",
      "learn.data.rows.held_out": "p:g", "learn.data.rows.folder": "{}/m"}),
    (C, ["cartridge.init={from: {a: ./x, b: 'run:../r', c: NAME@1}, library: l}"],
     {"learn.cartridge.init.source": {"a": "{}/x", "b": "run:{..}/r", "c": "NAME@1"},
      "learn.cartridge.init.library": "{}/l"}),
    (C, ["data={source: environment}", "objective={w_doc: 0, w_rl: 1}",
         "evaluate.arms=[on_policy]",
         "episodes={tasks: 2, max_context: 99, "
         "environment: {kind: python, factory: 'p:E', folder: e, document: d.md}}"],
     {"learn.episodes.environment.folder": "{}/e", "learn.episodes.environment.document":
      "{}/d.md"}),
    (C, ["data={source: environment, patients: 2}", "objective={w_doc: 0, w_rl: 1}",
         "evaluate.arms=[on_policy]",
         "episodes={tasks: 2, max_context: 99, "
         "environments: [{kind: python, name: a, factory: 'p:E', folder: ../e}, "
         "{kind: openenv, url: 'http://127.0.0.1:8000', document: d.md}]}"],
     {"learn.episodes.environments.0.folder": "{..}/e",
      "learn.episodes.environments.1.folder": None,
      "learn.episodes.environments.1.document": "{}/d.md"}),
    (C, ["data={source: jsonl, path: a}", "objective={w_doc: 0, w_rl: 1}",
         "evaluate.arms=[on_policy]",
         "episodes={tasks: 2, max_context: 99}",
         "reward=[{python: 'p:f', folder: r}, {verifier: exact}]"],
     {"learn.reward.0.folder": "{}/r", "learn.reward.1.folder": "."}),
]  # fmt: skip


@pytest.mark.parametrize(("file", "keys", "resolved"), LOCAL_KEYS, ids=lambda v: str(v)[:60])
def test_every_path_starts_beside_the_file_that_names_it(
    house: Path,
    file: str,
    keys: list[str],
    resolved: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(house / "home"))
    text = parse_value((house / file).read_text(), file)
    if file == C:  # of clinic patients alone
        del text["rollout"]["kinds"]
    if any(key.startswith("episodes") for key in keys):
        del text["rollout"]["prompts"]
    for key in keys:
        name, _, given = key.partition("=")
        *sections, leaf = name.split(".")
        section = text
        for section_name in sections:
            section = section.setdefault(section_name, {})
        section[leaf] = parse_value(given, "")
    (house / file).write_text(dump_yaml(text))
    folder = house / Path(file).parent

    def written(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: written(v) for name, v in value.items()}
        named = {"{}": folder, "{..}": house, "{HOME}": house / "home"}
        for mark, path in named.items():
            value = value and value.replace(mark, str(path))
        return value

    spec = load_spec(M).spec
    for key, expected in resolved.items():
        value: Any = spec
        for part in key.split("."):
            value = value[int(part)] if part.isdigit() else getattr(value, part)
        assert value == written(expected), key


def test_clinic_settings_do_not_stand_in_the_way_of_a_file(house: Path) -> None:
    data = load_spec(M, sets=("data.path=b.json",)).spec.learn.data
    assert (data.source, data.facts, data.patients) == ("clinic", None, 8)


def test_yaml_is_read_as_1_2() -> None:
    texts = ["1e-3", "no", "2024-01-01", "12:30", "1_000", "010", "", "~", "[a, 1]", "'1'", "-.5"]
    values = [0.001, "no", "2024-01-01", "12:30", 1000, "010", None, None, ["a", 1], "1", -0.5]
    assert [parse_value(t, "--set") for t in texts] == values
    assert parse_value(".inf", "--set") == math.inf


def test_every_shipped_mesh_loads() -> None:
    meshes = sorted(
        set((REPOSITORY / "meshes").glob("*.yaml")) - {REPOSITORY / "meshes/serve.yaml"}
    )
    assert {m.stem for m in meshes} >= {"longhealth", "longhealth_3b"}
    for mesh in meshes:
        assert load_spec(str(mesh)).spec.mesh.name == mesh.stem


def test_meshes_load_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("meshes", "configs"):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder)
    monkeypatch.chdir(tmp_path / "configs")
    assert load_spec("../meshes/longhealth.yaml").spec.mesh.config == str(
        tmp_path / "configs/longhealth.yaml"
    )


def test_a_resolved_spec_is_read_back_from_a_run_directory(house: Path) -> None:
    spec = load_spec(M).spec
    (house / "spec.yaml").write_text(dump_yaml(spec.as_dict()))
    assert load_resolved(house / "spec.yaml") == spec
    (house / "spec.yaml").write_text("mesh: {}\n")
    with pytest.raises(
        SpecError, match=r"^3 faults in the spec:\n  name must be given: missing at "
    ):
        load_resolved(house / "spec.yaml")


def test_a_key_of_another_version_is_refused_with_its_place_and_no_advice_on_spelling(
    tmp_path: Path,
) -> None:
    values = load_spec(str(REPOSITORY / "meshes/documents.yaml")).spec.as_dict()
    values["learn"]["self_study"]["kinds"] = ["question"]  # as of 2026-11-22
    path = tmp_path / "spec.yaml"
    path.write_text(dump_yaml(values))
    lines = path.read_text().splitlines()
    line = lines.index("    kinds:", lines.index("  self_study:")) + 1
    with pytest.raises(SpecError) as caught:
        load_resolved(path)
    assert str(caught.value) == (
        f"unknown key kinds at {path}:{line} (learn.self_study.kinds)\n"
        "the run was made by another version: use that one, or start a new run"
    )


def test_place_of_a_key_that_nobody_wrote_is_the_file(house: Path) -> None:
    loaded: LoadedSpec = load_spec(M)
    assert str(loaded.place("evaluate.arms")) == f"{C}:1"


def test_a_former_key_is_refused_with_its_remedy_and_read_in_the_spec_of_an_older_run(
    tmp_path: Path,
) -> None:
    """A resolved spec has every key, those too that were left at their defaults."""
    mesh = str(REPOSITORY / "meshes" / "longhealth.yaml")
    spec = load_spec(mesh).spec
    values = spec.as_dict()
    values["learn"]["objective"]["balance_bound"] = 100.0
    values["learn"]["documents"]["max_tokens"] = None
    (tmp_path / "spec.yaml").write_text(dump_yaml(values))
    assert load_resolved(tmp_path / "spec.yaml") == spec
    sets = ("objective.balance_bound=3", "documents.max_tokens=300")
    with pytest.raises(SpecError) as caught:
        load_spec(mesh, sets=sets)
    assert str(caught.value) == (
        "2 faults in the spec:\n"
        "  max_tokens is no key any more: got 300 at --set documents.max_tokens=300 "
        "(documents.max_tokens); give teacher.context_tokens, its present name\n"
        "  balance_bound is no key any more: got 3 at --set objective.balance_bound=3 "
        "(objective.balance_bound); remove it: a weight changes by a factor of at most 100"
    )
