"""Plan a run for `--dry-run`: its work, memory, spending and least time. Nothing is started.

The plan is plain data; `plugins.statistics.formatting` renders it. Of the model only config.json is
read; facts without a source are marked unknown."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cartridge_forge.forge_run.plan import channels, datasets, documents, inputs, roofline, sizing
from cartridge_forge.forge_run.plan.inputs import at_hand, tokenizer_at
from cartridge_forge.forge_run.plan.roofline import (
    A100,
    H200,
    MFU,
    DevicePeaks,
    PhaseCost,
    Workload,
    divided,
)
from cartridge_forge.forge_run.preflight import (
    plane_reason,
    publish_reason,
    resolved_place,
    slow_products,
    unmet,
)
from cartridge_forge.learning.decoder_config import decoder_config
from cartridge_forge.plugins.cluster.manifests.sizing import (
    TRAINER_BYTES,
    ModelSize,
    checkpoint_bytes,
    known_size,
    model_shape,
    model_size,
    published_bytes,
    tensor_parallel,
    touched_bytes,
    trainable_numbers,
)
from cartridge_forge.plugins.documents.spec.rows import ROW_SOURCES
from cartridge_forge.plugins.rsa.spec import RsaLearn
from cartridge_forge.plugins.spec_files.yaml_source import SourceLocation
from cartridge_forge.plugins.statistics.formatting import (
    TableSection,
    bytes_text,
    count_text,
    facts,
    lines,
    seconds_text,
)
from cartridge_forge.protocols.layout import CartridgeLayout, length_warning
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.protocols.spec.model import VALUE_BYTES, ShapeSpec, matmul_parameters

AT_RUN_TIME = "measured at run time"


def plan(
    spec: RunSpec,
    place: Callable[[str], SourceLocation] = resolved_place,
    start: Sequence[str] = (),
    host: DevicePeaks | None = None,
    refused: str = "",
) -> tuple[TableSection, ...]:
    """Return every section of the plan, in reading order; `start` says where trained cartridges
    come from. With `host`, the ceilings of the machine that computes, the times are its own, else
    those of two GPUs. `refused` says why the model is not computed. Raises SpecError for a damaged
    config.json, and DataError for data that the run would refuse."""
    size = known_size(spec.learn.model)
    learn, on_rows = datasets.sections(RsaLearn.of(spec.learn))
    learn, on_documents = documents.studied(learn)
    spec = spec.model_copy(update={"learn": learn})
    sections = [
        _run_section(spec),
        *on_rows,
        *on_documents,
        *inputs.sections(learn),
        *layout_sections(learn, size),
        *([lines("start", start)] if start else []),
        _roles_section(spec),
        _memory_section(spec, size),
        *([] if size is None else [sizing.summary(spec, size), *sizing.devices(spec, size)]),
        *channels.sections(learn),
        _budget_section(learn),
        _roofline_section(spec, host),
    ]
    mean = learn.data.document_tokens
    if mean and learn.self_study is None and learn.cartridge.per == "document":
        warning = length_warning(learn.cartridge.tokens, {"a document": mean})
        sections += [] if warning is None else [lines("warning", [warning])]
    if slow := slow_products(spec):
        sections.append(lines("warning", slow))
    if faults := [*(fault.text for fault in unmet(spec, place)), *([refused] if refused else [])]:
        sections.append(lines("cannot run here yet", faults))
    return tuple(sections)


def size_plan(spec: RunSpec) -> tuple[TableSection, ...]:
    """Return each role's needs, item by item. Raises SpecError for a model of unknown shape."""
    size = model_size(spec.learn.model)
    return (sizing.summary(spec, size), *sizing.details(spec, size))


def _run_section(spec: RunSpec) -> TableSection:
    mesh = spec.mesh
    return facts(
        f"plan of {mesh.name}",
        (
            ("config", mesh.config),
            ("model", f"{spec.learn.model.path}, {spec.learn.model.dtype}"),
            ("data", _data_text(RsaLearn.of(spec.learn))),
            ("run directory", f"{spec.default_run_root}/<run>"),
            ("tensor plane", f"{mesh.carrier}: {plane_reason(mesh)}"),
            *([] if mesh.hosts.kind == "local" else [("publish", publish_reason(mesh))]),
            (
                "time-outs",
                f"{mesh.call_timeout_s:g} s a call, {mesh.spawn_timeout_s:g} s of a start without "
                "progress",
            ),
        ),
    )


def _data_text(learn: RsaLearn) -> str:
    data = learn.data
    if data.source in ROW_SOURCES:
        return f"{data.source}: {data.path}"
    if data.source in ("desk", "environment", "handbook", "primer"):
        return channels.data_text(learn)
    if data.source == "documents":
        return f"{data.path or 'no documents yet'}; questions: {data.questions or 'self-study'}"
    source = data.path or (
        f"clinic, seed {data.seed}: {data.facts} facts in {data.notes} notes a patient"
        if data.source == "clinic"
        else "longhealth, not at hand"
    )
    return f"{data.patients} patients; {source}"


def _roles_section(spec: RunSpec) -> TableSection:
    mesh = spec.mesh
    where = {
        "local": f"this host ({os.cpu_count()} cores)",
        "addresses": ", ".join(mesh.hosts.addresses),
        "kubernetes": "pods",
        "slurm": "nodes of a job",
    }[mesh.hosts.kind]
    rows = tuple(
        (name, str(role.replicas), str(role.procs), str(role.threads), str(role.gpus), where)
        for name, role in spec.roles
    )
    columns = ("role", "replicas", "processes each", "threads each", "GPUs each", "placement")
    return TableSection("roles", columns, rows)


def _memory_section(spec: RunSpec, size: ModelSize | None) -> TableSection:
    learn = RsaLearn.of(spec.learn)
    tokens, documents = learn.cartridge.tokens, learn.data.patients
    frozen = learn.cartridge.frozen_tokens
    held = f"for each of {documents}"
    if learn.cartridge.per != "document":
        held = f"{learn.cartridges} for {documents} documents"
    rows = [("cartridge", f"{tokens} tokens, {frozen} of them frozen, {held}")]
    if size is None:
        unknown = "unknown: no config.json at model.path and no model.shape"
        rows += [("KV per token", unknown), ("all cartridges", unknown), ("document KV", unknown)]
        return facts("memory", rows)
    shape, per_token, trainable = size.shape, size.kv_token, trainable_numbers(learn, size)
    weights = count_text(matmul_parameters(shape))
    rows += [
        ("model", f"{weights} weights in matrix products, {bytes_text(size.weights)}"),
        ("decoder", _decoder_text(learn)),
        *_divided_rows(learn, size),
        (
            "KV per token",
            f"{per_token:,} B = {shape.layers} layers x 2 x {shape.kv_heads} heads x "
            f"{shape.head_dim} x {size.value_bytes} B",
        ),
        ("one cartridge", bytes_text(tokens * per_token)),
        ("all cartridges", f"{bytes_text(published_bytes(learn, size))}, published as they change"),
        (
            "trainable",
            f"{count_text(trainable)} numbers, {bytes_text(trainable * TRAINER_BYTES)} "
            "with gradient and Adam in float32",
        ),
    ]
    rows += _document_rows(learn, per_token, spilling=bool(spec.mesh.roles["doc_teacher"].gpus))
    return facts("memory", rows)


def _divided_rows(learn: RsaLearn, size: ModelSize) -> list[tuple[str, str]]:
    """Return a row on what ranks divide of a layer, where they do."""
    found = {
        role: parts
        for role in ("generator", "doc_teacher", "trainer")
        if (parts := tensor_parallel(learn, role)) > 1
    }
    if not found:
        return []
    shape = size.shape
    of = ", ".join(f"{role} by {parts}" for role, parts in found.items())
    whole = [role for role, parts in found.items() if shape.vocab % parts]
    vocabulary = f"; the vocabulary is whole for {', '.join(whole)}" if whole else ""
    return [
        ("divided", f"{of}: {shape.heads} heads, {shape.kv_heads} of keys and values, "
         f"{shape.intermediate:,} inner values{vocabulary}")
    ]  # fmt: skip


def _decoder_text(learn: RsaLearn) -> str:
    """Return what runs the model."""
    path = Path(learn.model.path) / "config.json"
    if not path.is_file():
        return "known at run time: there is no config.json at model.path"
    known = decoder_config(json.loads(path.read_bytes()))
    return "our own" if known else "transformers: our own does not know this architecture"


def _document_rows(learn: RsaLearn, per_token: int, *, spilling: bool) -> list[tuple[str, str]]:
    budget, tokens = learn.teacher.max_kv_bytes, learn.data.document_tokens
    beside = learn.teacher.host_kv_bytes if spilling else 0
    if tokens is None:
        also = f", and {bytes_text(beside)} in host memory" if beside else ""
        return [("document KV", f"{AT_RUN_TIME}; a teacher keeps {bytes_text(budget)}{also}")]
    each, documents = tokens * per_token, learn.data.patients
    parts = learn.teacher.tensor_parallel  # each process has its heads of a document
    held = min(documents, budget * parts // each)
    spilled = min(documents - held, beside * parts // each)
    verdict = "all fit"
    if held < documents:
        verdict = f"{held} of {documents} fit"
        verdict += f", {spilled} in host memory" if spilled else ""
        verdict += ", the others are read again" if held + spilled < documents else ""
    return [
        (
            "document",
            f"about {tokens:,} tokens, {tokens / learn.cartridge.tokens:.1f}x a cartridge",
        ),
        ("document KV", f"{bytes_text(each)} each, {bytes_text(each * documents)} in all"),
        ("teacher's cache", f"{bytes_text(budget * parts)} a replica: {verdict}"),
    ]


def _budget_section(learn: RsaLearn) -> TableSection:
    """Return the upper bounds of what is sampled."""
    steps, evaluate, staleness = learn.train.steps, learn.evaluate, learn.train.staleness
    answers = len(evaluate.arms) * evaluate.questions * (2 if evaluate.sampled else 1)
    probes = steps // evaluate.probe_every if evaluate.probe_every else 0
    prompts, gradients = learn.rollout.prompts, []
    sampled = prompts * learn.rollout.max_tokens
    asked = [("prompts", f"{prompts} a step, {prompts * steps:,} in all")]
    probe, measured = "questions", f"at most {answers:,} answers"
    if learn.episodes is not None:
        sampled, asked = channels.sampled_episodes(learn, learn.episodes)
        probe, measured = "cases", f"at most {answers:,} episodes"
        gradients = [("gradients", channels.gradients_text(learn.objective))]
    elif learn.rsa is not None:
        sampled, asked = channels.sampled_runs(learn, learn.rsa)
        candidates = len(evaluate.arms) * evaluate.questions * learn.rsa.candidates
        probe, measured = "runs", f"{candidates:,} candidates"
    behind = f"at most {staleness} behind" if staleness else "on policy"
    rows = [
        ("steps", f"{steps}, {behind}{_warm_text(learn)}"),
        *_update_rows(learn),
        *asked,
        ("response tokens", f"at most {sampled:,} a step, {sampled * steps:,} in all"),
        ("a sequence", f"at most {learn.train.row_tokens} tokens of prompt and response"),
        *gradients,
        ("probes", f"{probes} of {evaluate.probe_questions} {probe}"),
        ("evaluation", f"{measured}: {', '.join(evaluate.arms)}"),
    ]
    return facts("budget", rows)


def _update_rows(learn: RsaLearn) -> list[tuple[str, str]]:
    """Return a row on the optimiser updates of a step, where there are several."""
    passes, parts = learn.train.updates_per_rollout, learn.train.minibatches
    if passes * parts == 1:
        return []
    return [
        ("updates", f"{passes} passes x {parts} minibatches = {passes * parts} a step, one version")
    ]


def _warm_text(learn: RsaLearn) -> str:
    warm = learn.train.warm_start
    if warm is None:
        return ""
    sooner = f", sooner on a plateau of {warm.plateau}" if warm.plateau else ""
    return f", after {min(warm.steps, learn.train.steps)} of them on the teacher's text{sooner}"


def _roofline_section(spec: RunSpec, host: DevicePeaks | None) -> TableSection:
    phases = step_workload(spec if host is None else _undivided(spec))
    if not phases:
        return lines("roofline of a step", [_not_estimated(RsaLearn.of(spec.learn))])
    devices = (A100, H200) if host is None else (host,)
    rows = [(low.name, *_phase_cells(low, high, devices)) for low, high in phases]
    counted = phases[:-1]  # without the document re-read
    least = [sum(low.seconds(d) for low, _ in counted) for d in devices]
    most = [sum(high.seconds(d) for _, high in counted) for d in devices]
    totals = (_range(low, high) for low, high in zip(least, most, strict=True))
    rows.append(("step, phases in turn", "", "", *totals))
    peaks = f"bf16 peaks at {MFU:.0%} MFU, one device a replica"
    if host is not None:
        steps = spec.learn.train.steps
        rows.append((f"{steps} steps", "", "", _range(steps * least[0], steps * most[0])))
        peaks = (
            f"least times at this machine's measured {host.flops / 1e9:,.0f} GFLOP/s and "
            f"{host.bandwidth / 1e9:,.0f} GB/s"
        )
    prompt = _workload(RsaLearn.of(spec.learn)).prompt
    return TableSection(
        f"roofline of a step: {peaks}, prompts of {prompt} tokens, all of one document .. each of "
        "its own",
        ("phase", "FLOP", "bytes", *(device.name for device in devices)),
        tuple(rows),
    )


def _undivided(spec: RunSpec) -> RunSpec:
    """Return the spec with one process a role: on one machine, more of them share its ceilings."""
    alone = {
        name: role.model_copy(update={"replicas": 1, "procs": 1, "autoscale": None})
        for name, role in spec.roles
    }
    roles = spec.mesh.roles | alone
    return spec.model_copy(update={"mesh": spec.mesh.model_copy(update={"roles": roles})})


def _not_estimated(learn: RsaLearn) -> str:
    """Return the reason why a step has no roofline."""
    if learn.rsa is not None:
        return "not estimated for rsa, whose prompts hold what was said before"
    if learn.episodes is not None:
        return "not estimated for episodes, which end when they like"
    if model_shape(learn.model) is None:
        return "unknown: needs the model's shape"
    return "unknown: needs data.document_tokens"


def has_roofline(spec: RunSpec) -> bool:
    """Return whether the plan of a spec has the roofline of a step: it is known already, or once a
    user's documents are read."""
    learn = RsaLearn.of(spec.learn)
    is_counted = learn.self_study is not None and learn.data.path is not None
    return bool(step_workload(spec)) or (is_counted and not (learn.rsa or learn.episodes))


def step_workload(spec: RunSpec) -> tuple[tuple[PhaseCost, PhaseCost], ...]:
    """Return `step_phases` of the spec's own step; empty where the plan has no roofline for it."""
    learn, shape = RsaLearn.of(spec.learn), model_shape(spec.learn.model)
    if learn.rsa or learn.episodes or shape is None or not learn.data.document_tokens:
        return ()
    return step_phases(spec, shape, _workload(learn))


def _workload(learn: RsaLearn) -> Workload:
    assert learn.data.document_tokens is not None
    prompt = learn.data.prompt_tokens or learn.train.row_tokens - learn.rollout.max_tokens
    return Workload(
        samples=learn.rollout.prompts,
        prompt=prompt,
        response=learn.rollout.max_tokens,
        document=learn.data.document_tokens,
        cartridge=learn.cartridge.tokens,
        distinct=1,
        value_bytes=VALUE_BYTES[learn.model.dtype],
    )


def step_phases(
    spec: RunSpec, shape: ShapeSpec, base: Workload
) -> tuple[tuple[PhaseCost, PhaseCost], ...]:
    """Return (least, most) of each phase on one device: all prompts of one document, or of many.
    The samples of a phase are shared by the replicas of its role, the trainer's by its copies of
    the base. Ranks that divide a base share its work; what they exchange is not counted. The
    document re-read is for comparison; a step does not contain it."""
    roles, learn = spec.mesh.roles, RsaLearn.of(spec.learn)

    def pair(
        phase: Callable[[ShapeSpec, Workload], PhaseCost], role: str, copies: int
    ) -> tuple[PhaseCost, PhaseCost]:
        samples = -(-base.samples // copies)
        low = replace(base, samples=samples)
        high = replace(low, distinct=min(samples, learn.data.patients))
        parts = tensor_parallel(learn, role)
        return divided(phase(shape, low), parts), divided(phase(shape, high), parts)

    ranks = spec.trainer.procs // tensor_parallel(learn, "trainer")
    moved = tuple(moved_phases(spec, ModelSize(shape, base.value_bytes)))
    return (
        pair(roofline.rollout, "generator", roles["generator"].replicas),
        pair(roofline.teacher_cached, "doc_teacher", roles["doc_teacher"].replicas),
        pair(roofline.student, "trainer", max(1, ranks)),
        *((one, one) for one in moved),
        pair(roofline.teacher_reading, "doc_teacher", roles["doc_teacher"].replicas),
    )


def moved_phases(spec: RunSpec, size: ModelSize) -> tuple[PhaseCost, PhaseCost]:
    """Return what a step moves over one process's host link, of the cartridges that it changes at
    most: the version, out of the trainer and into a reader, and the trainer's last state. The disk
    that takes the state is not counted."""
    learn = RsaLearn.of(spec.learn)
    version = touched_bytes(learn, published_bytes(learn, size))
    state = touched_bytes(learn, checkpoint_bytes(learn, size))
    return (
        PhaseCost("publish", 0.0, float(2 * version), over_link=True),
        PhaseCost("last state", 0.0, float(state), over_link=True),
    )


def _phase_cells(
    low: PhaseCost, high: PhaseCost, devices: Sequence[DevicePeaks]
) -> tuple[str, ...]:
    times = (_range(low.seconds(d), high.seconds(d)) for d in devices)
    moved = bytes_text(low.bytes), bytes_text(high.bytes)
    shown = moved[0] if moved[0] == moved[1] else " .. ".join(moved)
    return (count_text(low.flops) if low.flops else "", shown, *times)


def _range(low: float, high: float) -> str:
    least, most = seconds_text(low), seconds_text(high)
    return least if least == most else f"{least} .. {most}"


LAYOUT_HEADS = ("cartridge", "learns from", "contexts", "their tokens", "their KV", "ratio")
MOST_NAMES = 6  # of a cartridge's documents


def layout_sections(learn: RsaLearn, size: ModelSize | None) -> list[TableSection]:
    """Return a row for each cartridge; nothing where every document has its own, uncut, or where
    the documents or the model's tokenizer are not at hand."""
    if learn.cartridge.per == "document" and learn.teacher.context_tokens is None:
        return []
    found = _contexts(learn)
    if found is None:
        return []
    layout, tokens = found
    rows = []
    for name, parts in layout.cartridges.items():
        contexts = [tokens[c] for c in layout.contexts[name]]
        named = ", ".join(parts[:MOST_NAMES])
        more = f" and {len(parts) - MOST_NAMES} more" if len(parts) > MOST_NAMES else ""
        kv = "unknown" if size is None else bytes_text(sum(contexts) * size.kv_token)
        sizes = f"{sum(contexts):,} ({min(contexts):,} to {max(contexts):,} each)"
        ratio = f"{sum(contexts) / learn.cartridge.tokens:.1f}x"
        rows.append((name, named + more, str(len(contexts)), sizes, kv, ratio))
    title = f"{len(tokens)} contexts of the teacher, {len(rows)} cartridges"
    return [TableSection(title, LAYOUT_HEADS, tuple(rows))]


def _contexts(learn: RsaLearn) -> tuple[CartridgeLayout, Mapping[str, int]] | None:
    """Return the layout and the tokens of every context, as the teacher reads it."""
    data = learn.data
    if data.source == "longhealth" and not at_hand(learn):
        return None
    tokenizer = tokenizer_at(learn.model.path)
    if tokenizer is None or (data.source == "documents" and data.path is None):
        return None
    if learn.self_study is not None:
        from cartridge_forge.plugins.documents.study.material import read_material

        parts, _ = read_material(learn, tokenizer)
        return parts.layout, {name: len(part.tokens) for name, part in parts.parts.items()}
    from cartridge_forge.plugins.documents.study.longhealth import open_prompts

    prompts = open_prompts(learn, tokenizer)
    return prompts.layout, {name: len(prompts.documents[name]) for name in prompts.texts}
