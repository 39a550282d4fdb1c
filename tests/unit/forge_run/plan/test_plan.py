"""The plan's numbers, worked by hand for Llama-3.2-3B, and what it says when it does not know."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cartridge_forge.forge_run.plan import roofline
from cartridge_forge.forge_run.plan.documents import require_documents
from cartridge_forge.forge_run.plan.plan import plan, step_phases
from cartridge_forge.forge_run.plan.roofline import (
    A100,
    EXPLICIT,
    H200,
    DevicePeaks,
    PhaseCost,
    Workload,
)
from cartridge_forge.forge_run.preflight import require_runnable
from cartridge_forge.plugins.clinic.patients import generate_clinic
from cartridge_forge.plugins.cluster.manifests.sizing import model_shape
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.plugins.statistics.formatting import (
    TableSection,
    bytes_text,
    count_text,
    render,
    seconds_text,
)
from cartridge_forge.protocols.errors import DataError, SpecError
from cartridge_forge.protocols.spec.model import (
    ModelSpec,
    ShapeSpec,
    kv_values_per_token,
    matmul_parameters,
)

REPOSITORY = Path(__file__).parents[4]
ARTICLES = REPOSITORY / "tests" / "data" / "articles"
LLAMA_3B = ShapeSpec(
    layers=28, hidden=3072, heads=24, kv_heads=8, head_dim=128, intermediate=8192, vocab=128256
)
# Batch 8, prompt 200, response 512, a document of 12,000 tokens, a cartridge of 2,048, bfloat16.
STEP = Workload(8, 200, 512, 12_000, 2048, 1, 2)


def test_sizes_by_hand() -> None:
    # 28 x (3072 x 128 x (48 + 16) + 3 x 3072 x 8192) + 3072 x 128256
    assert matmul_parameters(LLAMA_3B) == 3_212_574_720
    assert kv_values_per_token(LLAMA_3B) == 28 * 2 * 8 * 128 == 57_344
    assert 57_344 * 2 == 114_688  # bytes a token in bfloat16
    assert 2048 * 57_344 == 117_440_512  # parameters of a cartridge


def test_flops_by_hand() -> None:
    tiny = ShapeSpec(layers=1, hidden=4, heads=2, kv_heads=1, head_dim=2, intermediate=8, vocab=10)
    # attention 4 x 2 x (4 + 2) = 48, MLP 3 x 4 x 8 = 96, head 4 x 10 = 40
    assert matmul_parameters(tiny) == 184
    # two of three tokens have logits
    assert roofline.linear_flops(tiny, 3, 2) == 2 * (144 * 3 + 40 * 2)
    # 4 x 1 layer x 2 heads x 2 dims x 3 tokens x (5 before + 1.5 of its own on average)
    assert roofline.attention_flops(tiny, 3, 5) == 312.0
    work = Workload(2, 1, 2, 7, 5, 2, 4)  # 2 samples of 1 + 2 tokens
    assert roofline.student(tiny, work).flops == 2 * (2 * 1024 + 3.5 * 312)
    assert roofline.teacher_cached(tiny, work).flops == 2 * (1024 + 16 * 3 * 8.5)
    assert roofline.teacher_reading(tiny, work).flops == 2 * (2 * 184 * 10 + 16 * 10 * 5)
    # explicit scores: every token sees all three of its own, and the backward costs two forwards
    assert roofline.attention_flops(tiny, 3, 5, EXPLICIT) == 384.0
    assert roofline.student(tiny, work, EXPLICIT).flops == 2 * (2 * 1024 + 3.5 * 384)
    # a prompt of 1 behind 5, then 1 of 2 tokens behind 6; logits of both
    attention = 16 * (1 * 5.5 + 1 * 6.5)
    assert roofline.rollout(tiny, work).flops == 2 * (2 * (144 * 2 + 40 * 2) + attention)
    reading = roofline.reading(tiny, 7, 4)
    assert (reading.flops, reading.bytes) == (2 * 144 * 7 + 16 * 7 * 3.5, 4 * (144 + 7 * 4))
    # a token: 184 weights + 2 cartridges x 5 tokens x 4 values + 2 samples x (1 + 1) x 4, 4 B each
    assert roofline.rollout(tiny, work).bytes == 2 * 4 * (184 + 40 + 16)
    assert roofline.publish(tiny, 3, 5, 4).bytes == 3 * 5 * 4 * 4


def test_a_phase_takes_the_longer_of_compute_and_traffic() -> None:
    device = DevicePeaks("toy", flops=100.0, bandwidth=10.0, link=2.0)
    assert PhaseCost("compute", 1000.0, 10.0).seconds(device) == 20.0  # at half of peak
    measured = DevicePeaks("measured", flops=100.0, bandwidth=10.0, mfu=1.0)
    assert PhaseCost("compute", 1000.0, 10.0).seconds(measured) == 10.0
    assert PhaseCost("memory", 10.0, 1000.0).seconds(device) == 100.0
    assert PhaseCost("link", 0.0, 10.0, over_link=True).seconds(device) == 5.0


@pytest.mark.parametrize(
    ("phase", "a100", "h200"),
    [  # seconds, from an independent estimate of the same step
        (roofline.teacher_reading(LLAMA_3B, STEP), 5.6, 1.8),
        (roofline.teacher_cached(LLAMA_3B, STEP), 0.38, 0.12),
        (roofline.student(LLAMA_3B, STEP), 0.56, 0.18),
        (roofline.rollout(LLAMA_3B, STEP), 1.8, 0.76),
        (roofline.publish(LLAMA_3B, 1, 2048, 2), 0.0094, 0.0094),
    ],
    ids=lambda value: value.name if isinstance(value, PhaseCost) else "",
)
def test_the_roofline_of_the_published_setting(phase: PhaseCost, a100: float, h200: float) -> None:
    assert phase.seconds(A100) == pytest.approx(a100, rel=0.04)
    assert phase.seconds(H200) == pytest.approx(h200, rel=0.04)


def test_a_step_of_the_published_setting() -> None:
    cached = [roofline.rollout, roofline.teacher_cached, roofline.student]
    naive = [roofline.teacher_reading, roofline.student]
    apart = Workload(8, 200, 512, 12_000, 2048, 8, 2)  # a cartridge read for every sample
    for device, least, most in ((A100, 2.7, 8.4), (H200, 1.05, 2.9)):
        assert sum(f(LLAMA_3B, STEP).seconds(device) for f in cached) == pytest.approx(
            least, rel=0.03
        )
        total = sum(f(LLAMA_3B, STEP).seconds(device) for f in naive)
        total += roofline.rollout(LLAMA_3B, apart).seconds(device)
        assert total == pytest.approx(most, rel=0.03)


def planned(mesh: str, *sets: str) -> tuple[TableSection, ...]:
    loaded = load_spec(str(REPOSITORY / "meshes" / mesh), sets=sets)
    return plan(loaded.spec, loaded.place)


def rows(sections: tuple[TableSection, ...], title: str) -> dict[str, tuple[str, ...]]:
    (section,) = [s for s in sections if s.title.startswith(title)]
    return {row[0]: row[1:] for row in section.rows}


FIVE = "{structuring: 1, summarization: 1, question: 1, use_case: 1, creative: 1}"
GOLDEN = (
    ("longhealth_3b.yaml",),
    ("three_channels.yaml", "episodes.tasks=3", "episodes.group=4", "train.steps=100",
     "train.warmup_steps=0", "evaluate.arms=[none, on_policy]", "evaluate.questions=30",
     "evaluate.probe_every=30", "objective.compare_every=0", "data.patients=2",
     "objective.alpha_warmup_steps=4", "objective.w_doc=0", "objective.dpo.states=12",
     "replay.teachers=[{name: one, provider: openai, model: m, cap: 0.5, concurrency: 3, "
     "requests_per_minute: 60, prices: {input: 1.25, cached: 0.125, output: 10}}, "
     "{name: two, provider: anthropic, model: n, prices: {input: 5, output: 25}}]",
     "replay.cap=2", "replay.local={right: 0.8, server_error: 0.1}"),
    ("rsagent.yaml", "rsa.M=4", "rsa.N=2", "rsa.K=2", "rsa.T=6", "rsa.advantage=rollout",
     "rsa.examples=2", "rsa.rollouts_per_example=3", "train.steps=10", "train.warmup_steps=0",
     "rollout.max_tokens=24", "evaluate.arms=[untrained, on_policy]", "evaluate.questions=5",
     "evaluate.probe_every=3"),
    ("documents.yaml", f"self_study.mix={FIVE}", "train.steps=60",
     "rollout.prompts=16", "rollout.max_tokens=128",
     f"data.path={ARTICLES}", "self_study.questions=10",
     "self_study.min_chunk=100", "self_study.max_chunk=100", "self_study.answer_tokens=200",
     "self_study.api={provider: openai, model: m, prices: {input: 1.0, output: 4.0}}",
     'train.warm_start={"steps": 7, "plateau": 3}'),
)  # fmt: skip


def test_whole_plans_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """plans.txt by hand: longhealth_3b trains 20 x (2048 - 1) x 57,344 numbers of 16 bytes; a step
    of three_channels has 3 x 4 = 12 episodes of 5 turns of 16 tokens: 960; one of rsagent 2
    problems x 3 runs x 6 populations x 4 x 2 = 288 candidates of 24 tokens: 6,912; documents costs
    (5,700 + 6,840) * $1 + (3,840 + 6,000) * $4 a million: $0.05."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    sections = [s for case in GOLDEN for s in planned(*case) if s.title != "cannot run here yet"]
    twice = ("roles", "memory", "sizing", "roofline")  # shown of the first alone
    shown = [s for i, s in enumerate(sections) if i < 7 or not s.title.startswith(twice)]
    found = render(shown, terminal=False)
    golden = Path(__file__).with_name("plans.txt").read_text(encoding="utf-8")
    assert found.replace(f"{REPOSITORY}/", "") == golden


def test_replicas_share_a_phase_and_documents_are_no_more_than_there_are() -> None:
    sets = ("roles.generator.replicas=4", "data.patients=1")
    spec = load_spec(str(REPOSITORY / "meshes/longhealth_3b.yaml"), sets=sets).spec
    phases = {low.name: (low, high) for low, high in step_phases(spec, LLAMA_3B, STEP)}
    quarter = roofline.rollout(LLAMA_3B, Workload(2, 200, 512, 12_000, 2048, 1, 2))
    assert phases["rollout"] == (quarter, quarter)
    assert phases["student"][0] == roofline.student(LLAMA_3B, STEP)


def test_a_step_of_the_one_gpu_mesh_takes_at_most_its_two_seconds_by_count() -> None:
    """With what it moves over the host's link: eight cartridges of 235 MB out of the trainer and
    into the sampler, and their 1.41 GB of state each. The disk is not counted."""
    spec = load_spec(str(REPOSITORY / "meshes/longhealth_3b_1gpu.yaml")).spec
    phases = {low.name: high for low, high in step_phases(spec, LLAMA_3B, STEP)}
    cartridge = 2048 * 57_344
    assert phases["publish"].bytes == 8 * 2 * cartridge * 2
    assert phases["last state"].bytes == 8 * (2047 * 57_344 * 12 + 57_344 * 4)
    del phases["teacher, document re-read"]
    assert sum(phase.seconds(roofline.H200) for phase in phases.values()) <= 2.1


def test_ranks_that_divide_a_base_share_its_work() -> None:
    mesh = str(REPOSITORY / "meshes/llama70b_2x8.yaml")
    spec = load_spec(mesh).spec
    shape = spec.learn.model.shape
    assert shape is not None
    phases = {low.name: low for low, _ in step_phases(spec, shape, STEP)}
    for name, alone, parts in (
        ("rollout", roofline.rollout, 4),
        ("teacher", roofline.teacher_cached, 4),
        ("student", roofline.student, 8),
    ):
        whole = alone(shape, STEP)
        assert (phases[name].flops, phases[name].bytes) == (
            whole.flops / parts,
            whole.bytes / parts,
        )
    told = rows(planned("llama70b_2x8.yaml"), "memory")["divided"]
    assert told == (
        "generator by 4, doc_teacher by 4, trainer by 8: 64 heads, 8 of keys and values, 28,672 "
        "inner values",
    )


def test_a_cache_too_small_for_all_documents_says_how_many_fit() -> None:
    small = "teacher.max_kv_bytes=4000000000"  # 2 x 1.376 GB fit, 3 do not
    for host, gpus, verdict in [
        (8_000_000_000, 1, "2 of 20 fit, 5 in host memory, the others are read again"),
        (24_900_000_000, 1, "2 of 20 fit, 18 in host memory"),
        (0, 1, "2 of 20 fit, the others are read again"),
        (8_000_000_000, 0, "2 of 20 fit, the others are read again"),  # a CPU has one memory
    ]:
        sets = (small, f"teacher.host_kv_bytes={host}", f"roles.doc_teacher.gpus={gpus}")
        told = rows(planned("longhealth_3b.yaml", *sets), "memory")["teacher's cache"]
        assert told == (f"4 GB a replica: {verdict}",)


def test_what_is_not_at_hand_is_said_to_be_unknown(tmp_path: Path) -> None:
    sections = planned("longhealth_3b.yaml", "model.shape=")
    assert rows(sections, "memory")["document KV"] == (
        "unknown: no config.json at model.path and no model.shape",
    )
    assert list(rows(sections, "roofline")) == ["unknown: needs the model's shape"]
    sections = planned("longhealth_3b.yaml", "data.document_tokens=")
    assert rows(sections, "memory")["document KV"] == (
        "measured at run time; a teacher keeps 11.3 GB, and 34.4 GB in host memory",
    )
    assert list(rows(sections, "roofline")) == ["unknown: needs data.document_tokens"]
    (tmp_path / "a.txt").write_text("word " * 80)
    without = planned("documents.yaml", f"data.path={tmp_path}/a.txt", f"model={tmp_path}")
    told = rows(without, "1 documents")["tokens"][0]
    assert told.startswith("about 100: the model's tokenizer is not")
    (why,) = rows(planned("documents.yaml"), "cannot run here yet")
    assert "there are no documents" in why
    assert "add --set data.path=FOLDER" in why


@pytest.mark.parametrize(
    ("gate", "asked"),
    [
        ("{everywhere: true}", "in every state"),
        ("{error_turns: false}", "where the student was less sure than 0.5"),
        ("{error_turns: false, confidence_below: 0}", "never"),
    ],
)
def test_when_teachers_are_asked(gate: str, asked: str) -> None:
    sections = planned("three_channels.yaml", f"replay.gate={gate}")
    assert rows(sections, "votes")["asked"] == (asked,)


def test_real_teachers_need_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "a-secret-that-is-not-shown")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    sections = planned("three_channels.yaml", "replay.local=")
    votes = rows(sections, "votes")
    assert votes["key of opus"] == ("ANTHROPIC_API_KEY, set; for https://api.anthropic.com",)
    assert votes["key of gpt"] == ("OPENAI_API_KEY, not set; for https://api.openai.com/v1",)
    assert "a-secret-that-is-not-shown" not in str(sections)
    (why,) = rows(sections, "cannot run here yet")
    assert why.startswith("replay.teachers: OPENAI_API_KEY is not in the environment")
    mesh = str(REPOSITORY / "meshes/three_channels.yaml")
    loaded = load_spec(mesh, sets=("replay.local=",))
    with pytest.raises(SpecError, match=r"OPENAI_API_KEY .*three_channels\.yaml:\d+; export it"):
        require_runnable(loaded.spec, loaded.place)
    require_runnable(load_spec(mesh).spec)  # its own provider needs none


def test_problems_about_no_document_have_a_page() -> None:
    found = planned(
        "rsagent.yaml", 'data={"source": "primer", "patients": 1, "held_out": 1.0}', "rsa.task=rg",
        'rsa.problems={"kind": "reasoning_gym", "name": "chain_sum"}', "objective.w_doc=0.5",
        "rsa.advantage=population",
    )  # fmt: skip
    page = "a page on solving problems, for reasoning_gym: chain_sum"
    assert rows(found, "plan of rsagent")["data"] == (page,)
    channels = rows(found, "channels")
    assert channels["doc_kl"][0] == "0.5"
    assert channels["grpo"][1].startswith("each candidate's own score")


def test_what_is_odd_of_documents_is_said_before_a_run_starts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text((ARTICLES / "salt.txt").read_text())
    (tmp_path / "empty.txt").write_text("")
    mesh = str(REPOSITORY / "meshes/documents.yaml")
    spec = load_spec(mesh, sets=[f"data.path={tmp_path}"]).spec.learn
    assert require_documents(spec) == ["left out: empty.txt is empty"]
    asked = load_spec(mesh, sets=[f"data.path={tmp_path}", "data.questions=none.json"]).spec.learn
    with pytest.raises(DataError, match=r"there is no file .*none.json; check data.questions"):
        require_documents(asked)


def test_questions_about_other_texts_are_said_before_a_run_starts(tmp_path: Path) -> None:
    text = (ARTICLES / "salt.txt").read_text()
    (tmp_path / "salt.txt").write_text(text)
    paragraphs = [
        {
            "context": " ".join(text.split()[:20]),
            "qas": [{"question": "1?", "answers": [{"text": "x"}]}],
        }
    ]
    other = {
        "title": "zebra",
        "paragraphs": [{**paragraphs[0], "context": "Zebras live in herds."}],
    }
    file = tmp_path / "q.json"
    file.write_text(json.dumps({"data": [{"title": "Salt", "paragraphs": paragraphs}, other]}))
    sets = (f"data.path={tmp_path / 'salt.txt'}", f"data.questions={file}")
    told = (
        f"note: {file} 1 of 2 questions are left out: their context stands in no document, and "
        "their title names none (zebra)"
    )
    spec = load_spec(str(REPOSITORY / "meshes/documents.yaml"), sets=list(sets)).spec.learn
    assert require_documents(spec) == [told]
    assert (told,) in next(
        section.rows
        for section in planned("documents.yaml", *sets)
        if section.title.startswith("left out")
    )


def longhealth(correct: str) -> dict[str, Any]:
    """Return two patients whose questions have such a right option."""
    options = {f"answer_{c}": f"{i} mg/dl" for i, c in enumerate("abcde")}
    asked = [
        {"No": k, "question": f"Creatinine on day {k}?", **options, "correct": correct}
        for k in range(4)
    ]
    chart = {"text_0": "Creatinine 2 mg/dl on day 0. " * 40}
    one = {"name": "Ida", "birthday": "1961", "diagnosis": "x", "texts": chart, "questions": asked}
    return {"patient_01": one, "patient_02": one}


@pytest.mark.parametrize(
    ("content", "patients", "message"),
    [
        (longhealth("C"), 2, "patient_01: question 0: correct is 'C', which is none of its five"),
        (longhealth("2 mg/dl"), 3, "data.patients is 3 and .* holds 2"),
        ([], 2, "expected an object of patients, got list"),
        ({"patient_01": {}}, 1, "patient_01 has no 'texts'"),
        (None, 1, "is not JSON"),
    ],
)
def test_a_longhealth_file_is_read_by_the_plan(
    tmp_path: Path, content: Any, patients: int, message: str
) -> None:
    file = tmp_path / "file.json"
    file.write_text("{" if content is None else json.dumps(content))
    with pytest.raises(DataError, match=message):
        planned("longhealth.yaml", f"data.path={file}", f"data.patients={patients}")


def test_a_sound_longhealth_file_is_planned(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(json.dumps(longhealth("2 mg/dl")))
    assert planned("longhealth.yaml", f"data.path={tmp_path / 'file.json'}", "data.patients=2")
    sets = (f"data.path={tmp_path / 'file.json'}", "data.patients=2", "data.held_out=0.000001")
    with pytest.raises(DataError, match="no held-out question: raise"):
        planned("longhealth.yaml", *sets)


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    reader = REPOSITORY / "models" / "clinic-reader"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((reader / name).read_bytes())
    with pytest.raises(DataError, match="has no chat template"):
        planned("documents.yaml", f"data.path={ARTICLES}", f"model={tmp_path}")


def test_the_shape_comes_from_config_json_first(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 4, "hidden_size": 192, "num_attention_heads": 6,
        "num_key_value_heads": 3, "intermediate_size": 512, "vocab_size": 300,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ModelSpec(path=str(tmp_path), shape=LLAMA_3B)
    assert model_shape(model) == ShapeSpec(
        layers=4, hidden=192, heads=6, kv_heads=3, head_dim=32, intermediate=512, vocab=300
    )
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 64}))
    found = model_shape(model)
    assert found is not None
    assert found.head_dim == 64
    assert model_shape(ModelSpec(path="org/model", shape=LLAMA_3B)) == LLAMA_3B
    assert model_shape(ModelSpec(path="org/model")) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}", "KeyError: 'num_attention_heads'"),
        ("[]", "TypeError: list indices must be integers or slices, not str"),
        ("{", "JSONDecodeError: Expecting property name enclosed in double quotes"),
    ],
)
def test_a_damaged_config_is_one_message(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SpecError) as caught:
        model_shape(ModelSpec(path=str(tmp_path)))
    start = f"{tmp_path / 'config.json'} is not the config of a Llama-like model ({why}"
    assert str(caught.value).startswith(start)


def test_plain_lines_and_terminal_tables_hold_the_same() -> None:
    sections = (TableSection("roles", ("role", "n"), (("generator", "2"), ("kinds[1]", "10"))),)
    assert render(sections, terminal=False) == (
        "roles\n  role       n\n  generator  2\n  kinds[1]   10\n"
    )
    table = render(sections, terminal=True)
    for word in ("roles", "role", "generator", "kinds[1]", "10"):
        assert word in table


def test_numbers_as_people_read_them() -> None:
    assert [bytes_text(n) for n in (0, 999, 1000, 234_881_024, 27.5e9)] == [
        "0 B", "999 B", "1 kB", "235 MB", "27.5 GB",
    ]  # fmt: skip
    assert [count_text(n) for n in (7, 999_600, 117_383_168)] == ["7", "1 M", "117 M"]
    assert [seconds_text(s) for s in (5.61, 0.9999, 0.7553, 0.0094, 2e-5, 120)] == [
        "5.6 s", "1 s", "755 ms", "9.4 ms", "20 us", "120 s",
    ]  # fmt: skip


def test_several_updates_of_a_step_are_in_the_plan() -> None:
    mesh = str(REPOSITORY / "meshes" / "three_channels.yaml")

    def budget(*sets: str) -> dict[str, str]:
        sections = plan(load_spec(mesh, sets=sets).spec)
        (found,) = [section for section in sections if section.title == "budget"]
        return {str(row[0]): str(row[1]) for row in found.rows}

    assert "updates" not in budget()
    told = budget("train.updates_per_rollout=2", "train.minibatches=4")
    assert told["updates"] == "2 passes x 4 minibatches = 8 a step, one version"


def test_refills_bound_what_a_step_samples() -> None:
    mesh = str(REPOSITORY / "meshes" / "three_channels.yaml")

    def budget(*sets: str) -> dict[str, str]:
        sections = plan(load_spec(mesh, sets=sets).spec)
        (found,) = [section for section in sections if section.title == "budget"]
        return {str(row[0]): str(row[1]) for row in found.rows}

    plain, refilled = budget(), budget("objective.grpo.refill=2")
    assert plain["response tokens"].startswith("at most 5,120 a step")  # 64 x 5 turns x 16
    assert refilled["response tokens"].startswith("at most 15,360 a step")
    assert refilled["episodes"] == (
        plain["episodes"] + ", and up to 2 times as many for groups without variance"
    )


STUDY = "{questions: 7, min_chunk: 40, max_chunk: 40, question_tokens: 10, answer_tokens: 30"


def test_self_study_of_longhealth_is_planned_by_kind_and_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two charts x 7 conversations of passages of about 40 tokens, of 5 kinds in turn: two of each
    but the last three, with one. Three rounds: A writes 14 x 3 x 10 tokens, and reads each passage
    and seed (90) three times, with 0, 1 and 2 earlier rounds of 40 tokens."""
    # A hub that does not answer is asked five times.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    path = tmp_path / "benchmark.json"
    path.write_text(json.dumps(generate_clinic(3, 2, 12, 3)))
    sets = ("data.source=longhealth", f"data.path={path}", "data.patients=2", "data.facts=null",
            "data.notes=null", "evaluate.sampled=false")  # fmt: skip
    sections = planned("longhealth.yaml", *sets, f"self_study={STUDY}, rounds: 3}}")
    (study,) = [s for s in sections if s.title == "self-study"]
    told = [(name, text) for name, text in study.rows]
    kinds = "structuring 4, summarization 4, question 2, use_case 2, creative 2"
    assert told[:2] == [
        ("conversations", f"7 a document, 14 in all: {kinds}"),
        ("rounds", "3; the answer to the last is trained on"),
    ]
    assert told[3] == ("never asked", "LongHealth's own questions, which measure the accuracy")
    passages = float(told[2][1].split(", ")[1].split()[0]) * 14
    reads, writes = numbers_in(told[4])
    assert writes == 420
    assert reads == pytest.approx(3 * (passages + 14 * 90) + 14 * 3 * 40, abs=3 * 14)
    early, written = numbers_in(told[5])  # B, before the student's answer: two rounds
    assert written == 14 * 2 * 30
    assert early == pytest.approx(2 * passages + 14 * 40 + 14 * 2 * 10, abs=2 * 14)
    assert numbers_in(told[6])[1] == 14 * 3 * 30
    (table,) = [s for s in sections if s.title.startswith("2 documents")]
    assert [row[1] for row in table.rows] == [f"{path}#patient_01", f"{path}#patient_02"]
    absent = planned("longhealth.yaml", *sets, f"self_study={STUDY}}}", "model.path=absent/model")
    assert [s.title for s in absent[1:3]] == ["2 documents", "self-study"]


def numbers_in(row: tuple[str, str]) -> tuple[int, int]:
    reads, writes = re.findall(r"[\d,]+(?= tokens)|(?<=at most )[\d,]+", row[1])
    return int(reads.replace(",", "")), int(writes.replace(",", ""))


def test_a_file_of_charts_that_a_run_refuses_is_refused_by_the_plan(tmp_path: Path) -> None:
    def patient(correct: str) -> dict[str, object]:
        options = {f"answer_{letter}": f"{i} mg/dl" for i, letter in enumerate("abcde")}
        asked = [
            {"No": k, "question": f"Creatinine on day {k}?", **options, "correct": correct}
            for k in range(8)
        ]
        note = "Creatinine 2 mg/dl on day 0. " * 40
        return {
            "name": "Ida Quell", "birthday": "1961-04-03", "diagnosis": "x",
            "texts": {"text_0": note}, "questions": asked,
        }  # fmt: skip

    file = tmp_path / "charts.json"
    sets = (f"data.path={file}", "data.patients=2")
    file.write_text(json.dumps({f"patient_0{n}": patient("2 mg/dl") for n in (1, 2)}))
    told = rows(planned("longhealth.yaml", *sets), f"charts of {file}")
    assert told["patients"] == ("2, 2 notes",)
    assert told["questions"][0].startswith("16, ")
    file.write_text(json.dumps({f"patient_0{n}": patient("C") for n in (1, 2)}))
    with pytest.raises(DataError, match="correct is 'C', which is none of its five options"):
        planned("longhealth.yaml", *sets)
    file.write_text(json.dumps({f"patient_0{n}": patient("2 mg/dl") for n in (1, 2)}))
    with pytest.raises(DataError, match=r"data.patients is 3 and .* holds 2; lower it"):
        planned("longhealth.yaml", sets[0], "data.patients=3")
    file.unlink()  # the plan is made, and says what is missing
    assert any(s.title == "cannot run here yet" for s in planned("longhealth.yaml", *sets))


def test_missing_questions_and_rows_are_said_before_the_model_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    for key in ("data.questions", "self_study.rows"):
        with pytest.raises(DataError, match=rf"there is no file .*none.json; check {key}"):
            planned(
                "documents.yaml", f"data.path={tmp_path / 'a.txt'}", "model.path=no/such",
                f"{key}=none.json",
            )  # fmt: skip


def test_kinds_of_self_study_that_a_document_lacks_are_said(tmp_path: Path) -> None:
    signs = "".join(chr(0x1F300 + i) + " " for i in range(400))
    (tmp_path / "signs.txt").write_text(signs)
    mesh = str(REPOSITORY / "meshes/documents.yaml")
    spec = load_spec(mesh, sets=[f"data.path={tmp_path}", "self_study.questions=6"]).spec.learn
    told = [line for line in require_documents(spec) if "turns" in line]
    assert told == [
        "warning: signs: none of 2 turns of continue (no_words 2)",
        "warning: signs: none of 2 turns of cloze (no_words 2)",
    ]
