"""Sizes worked by hand for Llama-3.2-3B, and held against torch's tensors on the tiny reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from channel_setup import progress_of, trained

from cartridge_forge.forge_run.cli import forge
from cartridge_forge.forge_run.commands.k8s import model_size
from cartridge_forge.forge_run.plan.sizing import step_bytes
from cartridge_forge.learning import attention as kernels
from cartridge_forge.learning.batch import pack, response_logits
from cartridge_forge.learning.cartridge import first_tokens
from cartridge_forge.learning.checkpoint import write_checkpoint
from cartridge_forge.learning.decoder import SMALLEST
from cartridge_forge.learning.model.loading import load_model
from cartridge_forge.learning.teacher import document_kv, top_k
from cartridge_forge.learning.trainer_state import TrainerState
from cartridge_forge.plugins.cluster.manifests.objects import Resources
from cartridge_forge.plugins.cluster.manifests.sizing import (
    SCORE_BYTES,
    FlatShape,
    ModelSize,
    activation_bytes,
    checkpoint_bytes,
    document_bytes,
    pod_resources,
    published_bytes,
    role_needs,
    samples_of,
    score_bytes,
    scores_bytes,
    step_tokens,
    touched_cartridges,
    trainable_numbers,
    trained_tokens,
)
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.spec.mesh import HINTED_TEACHER
from cartridge_forge.protocols.spec.model import ShapeSpec
from cartridge_forge.protocols.step import Sample

ALL_AT_ONCE = ("objective.micro_tokens=null", "train.recompute_layers=false",
               "teacher.max_kv_bytes=1000")  # fmt: skip
REPOSITORY = Path(__file__).parents[5]
READER = str(REPOSITORY / "models" / "clinic-reader")
LLAMA_3B = ModelSize(
    ShapeSpec(
        layers=28, hidden=3072, heads=24, kv_heads=8, head_dim=128, intermediate=8192, vocab=128256
    ),
    2,
)


def test_a_generator_on_a_cpu_holds_small_weights_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the reader, every one that multiplies by oneDNN; not those of 3B. The reader's own
    are too small for oneDNN, of which the need, an upper bound, does not know."""
    monkeypatch.setitem(SMALLEST, torch.float32, 0)
    spec = load_spec(str(REPOSITORY / "meshes/longhealth.yaml")).spec
    needs = dict(role_needs(spec, "generator", model_size(spec.learn.model)).items)
    model = load_model(READER)
    model.pack()
    kept = [model.packed_head, *(w for x in model.base_model.layers for w in x.packed.values())]
    assert needs["packed weights"] == sum(4 * w.numel() for w in kept if w is not None)
    assert needs["packed weights"] == needs["weights"]
    assert "packed weights" not in dict(role_needs(spec, "generator", LLAMA_3B).items)


def test_cartridges_that_read_hints_are_one_more_set() -> None:
    """One desk of 28 tokens, 27 of them trained, 4 layers x 2 x 2 heads x 32 = 512 numbers each."""
    needs = {}
    for teacher in ("live", "ema"):
        sets = (f"objective.sdpo.teacher={teacher}", "evaluate.arms=[on_policy]")
        spec = load_spec(str(REPOSITORY / "meshes/three_channels.yaml"), sets=sets).spec
        size = model_size(spec.learn.model)
        rows = {
            role: dict(role_needs(spec, role, size).items) for role in ("trainer", HINTED_TEACHER)
        }
        needs[teacher] = (rows, checkpoint_bytes(spec.learn, size), step_bytes(spec, size))
    (live, before, plain), (ema, after, told) = needs["live"], needs["ema"]
    assert after - before == 27 * 512 * 4
    assert ema["trainer"]["cartridges that read hints"] == 27 * 512 * 4
    assert "cartridges that read hints" not in live["trainer"]
    assert live["trainer"]["snapshots"] * 2 == ema["trainer"]["snapshots"] == 2 * 28 * 512 * 4
    versions = [one[HINTED_TEACHER]["cartridge versions"] for one in (live, ema)]
    assert versions == [2 * 28 * 512 * 4, 4 * 28 * 512 * 4]
    assert dict(told).keys() - dict(plain).keys() == {"published for hints"}


def test_the_published_setting_by_hand() -> None:
    spec = load_spec(str(REPOSITORY / "meshes/longhealth_3b.yaml")).spec
    learn = spec.learn
    assert (LLAMA_3B.weights, LLAMA_3B.kv_token) == (6_425_149_440, 114_688)
    assert published_bytes(learn, LLAMA_3B) == 20 * 2048 * 114_688
    assert trainable_numbers(learn, LLAMA_3B) == 20 * 2047 * 57_344
    # master and two moments, and one frozen token each
    assert checkpoint_bytes(learn, LLAMA_3B) == 20 * 57_344 * (2047 * 12 + 4)
    # 8 prompts of 200 + 512 tokens about 8 documents, three at a time
    assert trained_tokens(learn) == FlatShape(3, 712, 3 * 512, 3)
    whole = load_spec(str(REPOSITORY / "meshes/longhealth_3b.yaml"), sets=ALL_AT_ONCE).spec
    assert step_tokens(learn) == trained_tokens(whole.learn) == FlatShape(8, 712, 8 * 512, 8)
    assert scores_bytes(learn, LLAMA_3B, step_tokens(learn)) == 4096 * 20 * 8
    needs = dict(role_needs(whole, "trainer", LLAMA_3B).items)
    assert needs["cartridges, gradient, Adam"] == 20 * 2047 * 57_344 * 16
    assert needs["untrained cartridges"] == 20 * 2047 * 57_344 * 4
    assert needs["prefixes of a forward"] == 8 * 2048 * 57_344 * (4 + 2)  # the master and bfloat16
    assert needs["logits"] == 3 * 256 * 2**20  # a chunk at a time: 4096 x 128,256 x 4 are 2.1 GB
    # 24 heads: 712 tokens over a prefix of 2048 form 140 MB, 8 x 712 over their own 389 MB: a chunk
    assert needs["attention scores"] == 4 * SCORE_BYTES
    assert score_bytes(LLAMA_3B, FlatShape(1, 712, 512, 1), 2048) == 24 * 712 * 2048 * 4
    assert SCORE_BYTES == kernels.SCORE_BYTES
    # gate, its activation, up; queries and what they read, keys, values; both norms in float32
    token = (3 * 8192 + 2 * 3072 + 2 * 1024) * 2 + 4 * 3072 * 4
    assert needs["activations"] == 28 * 8 * 712 * token
    three = dict(role_needs(spec, "trainer", LLAMA_3B).items)  # inputs of layers, and one layer
    assert three["activations"] == 3 * 712 * (28 * 3072 * 2 + token)
    teacher = dict(role_needs(spec, "doc_teacher", LLAMA_3B).items)
    assert teacher["document KV"] == 11_274_289_152  # the cache's bound
    together = dict(role_needs(whole, "doc_teacher", LLAMA_3B).items)
    assert together["document KV"] == 8 * 12_000 * 114_688  # a bound below what a step reads
    generator = dict(role_needs(spec, "generator", LLAMA_3B).items)
    assert generator["paged KV"] == 8 * 1024**3
    assert role_needs(spec, "environment", LLAMA_3B).held == 0


@pytest.mark.parametrize(
    ("mesh", "sets", "cartridges"),
    [
        ("longhealth_3b", (), 8),  # 8 prompts
        ("longhealth_3b", ("data.patients=5",), 5),
        ("longhealth_3b", ("rollout.prompts=2",), 2),
        ("three_channels", ("data.patients=40",), 8),  # 8 tasks of 8 episodes each
        ("rsagent", ("data.patients=40", "rsa.examples=3"), 3),  # 3 problems
    ],
)
def test_the_cartridges_that_a_step_changes(
    mesh: str, sets: tuple[str, ...], cartridges: int
) -> None:
    learn = load_spec(str(REPOSITORY / f"meshes/{mesh}.yaml"), sets=sets).spec.learn
    assert touched_cartridges(learn) == cartridges


def test_versions_share_what_a_step_leaves() -> None:
    """Two of twenty change: a reader of staleness 1 keeps three versions, the trainer two."""
    spec = load_spec(
        str(REPOSITORY / "meshes/longhealth_3b.yaml"),
        sets=("rollout.prompts=2", "train.staleness=1"),
    ).spec
    one = 2048 * 114_688
    generator = dict(role_needs(spec, "generator", LLAMA_3B).items)
    assert generator["cartridge versions"] == (20 + 2 + 2) * one
    assert dict(role_needs(spec, "trainer", LLAMA_3B).items)["snapshots"] == (20 + 2) * one
    step = dict(step_bytes(spec, LLAMA_3B))
    assert step["published"].startswith("470 MB put once")  # a tenth of 4.7 GB
    assert step["last state, to disk"].startswith("2.82 GB written")


def test_tokens_of_a_step_by_hand() -> None:
    mesh = str(REPOSITORY / "meshes/longhealth_3b.yaml")

    def tokens(*sets: str) -> FlatShape:
        return trained_tokens(load_spec(mesh, sets=(*ALL_AT_ONCE, *sets)).spec.learn)

    assert tokens("data.patients=1") == FlatShape(8, 712, 4096, 1)
    assert tokens("objective.micro_tokens=2048") == FlatShape(2, 712, 1024, 2)
    assert tokens("data.prompt_tokens=null") == FlatShape(8, 2048, 4096, 8)
    episodes = load_spec(str(REPOSITORY / "meshes/three_channels.yaml")).spec.learn
    assert samples_of(episodes) == 64
    runs = load_spec(str(REPOSITORY / "meshes/rsagent.yaml")).spec.learn
    assert runs.rsa is not None
    assert samples_of(runs) == (
        runs.rsa.examples * runs.rsa.rollouts_per_example * runs.rsa.candidates
    )


def test_a_trainer_of_two_ranks_by_hand() -> None:
    """Each has half of the step's samples, and of a sharded base; one pod has both."""
    mesh = str(REPOSITORY / "meshes/longhealth_3b.yaml")

    def of(*sets: str) -> tuple[dict[str, int], Resources]:
        spec = load_spec(mesh, sets=(*ALL_AT_ONCE, *sets)).spec
        needs = dict(role_needs(spec, "trainer", LLAMA_3B).items)
        return needs, pod_resources(spec, "trainer", dict(spec.roles)["trainer"], LLAMA_3B)

    one, pod = of()
    two, pair = of("roles.trainer.procs=2")
    assert two["activations"] * 2 == one["activations"]
    for whole in ("weights", "cartridges, gradient, Adam", "untrained cartridges"):
        assert two[whole] == one[whole]
    assert (pair.cpu, pair.gpus) == (2 * pod.cpu, 2 * pod.gpus)
    assert pod.memory < pair.memory < 2 * pod.memory
    # 3072 x (128 x (48 + 16) + 3 x 8192) numbers a layer, 3072 x 128256 of the head
    gathered = 2 * (3072 * (128 * 64 + 3 * 8192) + 3072 * 128_256)
    sharded, _ = of("roles.trainer.procs=2", "train.shard_base=true")
    assert sharded["weights"] == 6_425_149_440 // 2 + gathered
    assert sharded["activations"] == two["activations"]
    assert of("train.shard_base=true") == (one, pod)
    # Of 20 cartridges each of eight trainers has at most three; one of them may have all samples.
    apart, eight = of("roles.trainer.replicas=8")
    assert apart["activations"] == one["activations"]
    for part in ("cartridges, gradient, Adam", "untrained cartridges", "snapshots"):
        assert apart[part] == one[part] // 20 * 3, part
    assert (eight.cpu, eight.gpus) == (8 * pod.cpu, 8 * pod.gpus)


@pytest.fixture(scope="module")
def reader() -> Any:
    return load_model(READER, "float32")


def size_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def test_kv_cartridges_optimizer_and_scores_are_as_large_as_they_are_said_to_be(
    reader: Any, tmp_path: Path
) -> None:
    sets = ("data.patients=2", "cartridge.tokens=16", "data.document_tokens=40")
    learn = load_spec(str(REPOSITORY / "meshes/longhealth.yaml"), sets=sets).spec.learn
    size = model_size(learn.model)
    documents = {name: document_kv(reader, tuple(range(3, 43))) for name in ("a", "b")}
    assert sum(map(size_of, documents.values())) == document_bytes(learn, size)
    bank = first_tokens(documents, 16, learn.cartridge.frozen)
    assert sum(map(size_of, bank.kv())) == published_bytes(learn, size)
    assert trained(bank).numel() == trainable_numbers(learn, size)
    held: list[torch.Tensor] = []
    progress = progress_of(bank)
    for own in progress.values():
        own.parameter.grad = torch.zeros_like(own.parameter)
        own.update(clip=1.0)
        moments = [v for v in own.moments.values() if v.ndim]
        held += [own.parameter, own.parameter.grad, *moments]
    assert sum(map(size_of, held)) == 16 * trainable_numbers(learn, size)
    state = TrainerState(bank, progress, None, None, "")
    path = write_checkpoint(tmp_path, "version-000000", state.checkpoint({}), 1)
    written = sum(file.stat().st_size for file in path.glob("cartridge-*"))
    assert written == pytest.approx(checkpoint_bytes(learn, size), rel=0.01)
    indices, logprobs = top_k(torch.zeros(7, 100), learn.teacher.top_k)
    assert size_of(indices) + size_of(logprobs) == scores_bytes(learn, size, FlatShape(1, 7, 7, 1))
    tied = sum(p.numel() for p in reader.parameters() if p.ndim > 1) * 4
    assert size.weights == tied


@pytest.mark.parametrize(("rows", "width", "prefix"), [(1, 64, 32), (4, 64, 32), (1, 256, 256)])
def test_what_a_forward_keeps_is_as_the_formula_says(
    reader: Any, rows: int, width: int, prefix: int
) -> None:
    size = ModelSize(model_size(load_spec(str(REPOSITORY / "meshes/longhealth.yaml")).spec.learn
                                .model).shape, 4)  # fmt: skip
    half = width // 2
    texts = [tuple(range(5 + i, 5 + i + width)) for i in range(rows)]  # equal ones share a place
    samples = [
        Sample(str(i), "d", ids[:half], ids[half:], (0.0,) * half, (0,) * half)
        for i, ids in enumerate(texts)
    ]
    bank = first_tokens({"d": document_kv(reader, tuple(range(3, 4 + prefix)))}, prefix, 1)
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        packed = pack(samples, {"d": prefix}, width)
        response_logits(reader, packed, bank.kv(packed.names)).log_softmax(-1).mean()
    for parameter in reader.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    measured = sum(t.untyped_storage().nbytes() for t in kept.values())
    shaped = FlatShape(rows, width, rows * half, 1)
    # A CPU keeps no scores, and half of the last layer's tokens predict none.
    formula = activation_bytes(size, shaped) + shaped.responses * size.shape.vocab * 4
    assert measured == pytest.approx(formula, rel=0.2)


def test_the_plan_says_it_in_tables_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = str(REPOSITORY / "meshes/longhealth_3b.yaml")
    assert forge(["plan", mesh, "--sizing", "--json"]) == 0
    sections = {s["title"]: s["rows"] for s in json.loads(capsys.readouterr().out)}
    roles = {row[0]: row[1:] for row in sections["sizing, by the model's shape"]}
    assert roles["trainer"][:3] == ["1", "62.2 GB", "cartridges, gradient, Adam, 37.6 GB"]
    step = dict(sections["bytes of a step"])
    assert step["cartridges changed"] == "at most 8 of 20 cartridges"
    # 8 x 2048 x 114,688 B; 8 x 57,344 x (2047 x 12 + 4) B of 20 times as much
    assert step["published"] == "1.88 GB put once, got by 1 readers: 3.76 GB"
    assert step["last state, to disk"] == "11.3 GB written, 28.2 GB kept"
    assert forge(["plan", mesh, "--sizing"]) == 0
    assert "memory of a trainer process" in capsys.readouterr().out
    assert forge(["plan", mesh, "--sizing", "--set", "model.shape=null"]) == 2
    assert "give model.shape" in capsys.readouterr().err
