// The page of a run: stages, held-out accuracy, KL, channels, seconds by phase, events, and buttons.

import { ask, card, clock, count, duration, follow, guarded, h, interval, main, notice, number, oneAtATime, percent, run, send, showOutcome, table, times } from "/static/page.js";
import { Chart, trailing } from "/static/chart.js";

const STACKED = ["publish", "train", "score", "rollout"];
const HUES = ["hue1", "hue2", "hue3", "hue4", "hue5", "hue6"];
const SMOOTH = 9;

const held = { curves: { generation: 0, next: 0, rows: [] }, steps: { generation: 0, next: 0, rows: [] } };
const stagesPlace = h("div"), tilesPlace = h("div.tiles"), armsPlace = h("div"), documentsPlace = h("div"), eventsPlace = h("div");
const channelsPlace = h("div.grid");
const seen = {};  // marks of what is shown
const named = {};  // title -> its names and its chart
let marks = null;

const kl = new Chart("KL to the teacher that holds the document", `Nats a token; the line is the mean of ${SMOOTH} steps.`, [
  { label: "each step", colour: "faint", width: 1 }, { label: "on policy", colour: "on_policy" },
  { label: "offline", colour: "offline", dash: [6, 4] },
]);
const accuracy = new Chart("Held-out accuracy, with 95% interval", "Validations while training; Wilson's interval.", [
  { label: "low", colour: "faint", width: 0, hidden: true }, { label: "high", colour: "faint", width: 0, hidden: true },
  { label: "on policy", colour: "on_policy", points: true }, { label: "whole document", colour: "document", dash: [6, 4] },
  { label: "no document", colour: "none", dash: [2, 3] },
], { bands: [[2, 1]], format: (v) => percent(v, 0), range: () => [0, 1.02] });
// The last phase first: what is drawn later lies on top.
const phases = new Chart("Seconds of a step, by phase", "Stacked; orchestration is the part of them in which neither a model nor an environment worked.", [
  ...STACKED.map((phase) => ({ label: phase, colour: phase, fill: true, width: 1 })),
  { label: "orchestration", colour: "orchestration" },
], { format: (v) => number(v, 2) });
const speed = new Chart("Tokens a second", "Trained tokens, over the whole step.", [
  { label: "each step", colour: "faint", width: 1 }, { label: `mean of ${SMOOTH}`, colour: "hue1" },
], { format: (v) => number(v, 0) });
const reward = new Chart("Reward of episodes", `The line is the mean of ${SMOOTH} steps.`, [
  { label: "each step", colour: "faint", width: 1 }, { label: `mean of ${SMOOTH}`, colour: "hue3" },
]);

function stages(found) {
  const shown = found.stages.map((stage) => {
    const answers = stage.state === "now" && /answers$/.test(found.status?.phase ?? "") ? `, ${found.status.phase}` : "";
    const steps = stage.steps ? ` ${stage.done}/${stage.steps}` : answers;
    const took = stage.state === "done" ? duration(stage.seconds) : stage.left === null ? "not known yet" : `${duration(stage.left)} left`;
    const element = h("li.stage", { "data-state": stage.state, title: `${stage.name}${steps}: ${stage.state}, ${took}` },
      h("span", {}, `${stage.name}${steps}`), h("small", {}, `${stage.state}, ${took}`));
    element.style.flexGrow = String(Math.max(1, Math.min(60, stage.seconds ?? 1)));
    return element;
  });
  let where = "Stages";
  if (found.outcome === "running") {
    const parts = [];
    if (found.usable_in) parts.push(`about ${duration(found.usable_in)} to a usable cartridge`);
    if (found.seconds_left !== null) parts.push(`${duration(found.seconds_left)} to the end`);
    where = `Where it is${parts.length ? ": " + parts.join(", ") : ""}`;
  } else if (found.wall_seconds) where = `Stages of ${duration(found.wall_seconds)}`;
  stagesPlace.replaceChildren(card(where, h("ol.stages", {}, ...shown),
    found.error ? h("p.error", {}, Object.entries(found.error).map(([k, v]) => `${k}: ${v}`).join(", ")) : null));
}

function tile(title, value, ...below) {
  return h("section.card.tile", {}, h("h2", {}, title), h("p.big", {}, value), ...below.filter(Boolean).map((text) => h("p.soft", {}, text)));
}

/** What the arms' shares are: agreement with the teacher where no answers are known. */
function measure(found) {
  return Object.values(found.arms).some((arm) => arm.agreement && arm.f1 === undefined) ? "agreement" : found.status?.measure ?? "accuracy";
}

function tiles(found) {
  const rows = held.curves.rows, mine = rows.filter((row) => row.arm === "on_policy");
  const validated = mine.filter((row) => row.accuracy !== null).at(-1);
  const first = mine[0], last = mine.at(-1), arms = found.arms;
  const final = arms.on_policy, shown = final ?? validated;
  const tokens = rows.reduce((sum, row) => sum + row.tokens, 0), stale = rows.reduce((sum, row) => sum + row.stale_tokens, 0);
  const pools = found.status?.pools ?? [];
  const size = found.compression ?? {};
  tilesPlace.replaceChildren(
    tile(final ? `Held-out ${measure(found)} (${final.n} questions)` : `Held-out ${measure(found)} (validation${validated ? `, step ${validated.step}` : ""})`,
      percent(shown?.accuracy), interval(shown?.ci95),
      ["document", "none"].filter((a) => arms[a]).map((a) => `${a === "none" ? "no" : "whole"} document ${percent(arms[a].accuracy)}`).join(", ")),
    tile("KL to the teacher, nats a token", number(last?.kl), first && first.kl !== null ? `started at ${number(first.kl)}` : null),
    ...(last?.accepted != null ? [tile("Accepted by the teacher", percent(last.accepted), `of the student's tokens; ${percent(first.accepted)} at first`)] : []),
    tile("Compression", size.ratio ? times(size.ratio) : `${size.cartridge_tokens ?? "-"} tokens`,
      size.ratio ? `${Math.round(size.document_tokens)} document tokens to ${size.cartridge_tokens}` : "of each cartridge"),
    tile("Trained tokens", count(tokens), held.curves.stride > 1 ? `of every ${held.curves.stride}th step` : `${count(stale)} of an older version`,
      pools.length ? `${pools.reduce((n, pool) => n + pool.replicas.length, 0)} replicas` : null),
  );
}

function arms(found) {
  const rows = Object.entries(found.arms).map(([name, one]) => [name, percent(one.accuracy), interval(one.ci95), String(one.n),
    found.gold?.arms?.[name] ? number(found.gold.arms[name].nll) : "-"]);
  armsPlace.replaceChildren(...(rows.length
    ? [card("Arms", table(`Held-out questions: ${measure(found)}${measure(found) === "agreement" ? " with the teacher" : ""}`, ["arm", measure(found), "95%", "questions", "NLL of the right answer"], rows))] : []));
}

function documents(found) {
  const names = Object.keys(found.arms).filter((arm) => found.documents.some((one) => one.arms[arm]));
  const cell = (of) => (of ? `${percent(of[1], 0)} of ${of[0]}` : "-");
  documentsPlace.replaceChildren(...(found.documents.length > 1
    ? [card("Documents", table("Right answers on held-out questions, by document", ["document", ...names], found.documents.map((one) => [one.document, ...names.map((arm) => cell(one.arms[arm]))])))] : []));
}

function draw(found) {
  const { rows } = held.curves;
  const byStep = new Map();
  for (const row of rows) byStep.set(row.step, { ...byStep.get(row.step), [row.arm]: row });
  const at = [...byStep.keys()].sort((a, b) => a - b);
  const of = (name, value) => at.map((step) => { const row = byStep.get(step)[name]; return row ? value(row) ?? null : null; });
  const raw = of("on_policy", (row) => row.kl);
  kl.update(raw.some((v) => v !== null) ? [at, raw, trailing(raw, SMOOTH), trailing(of("offline", (row) => row.kl), SMOOTH)] : [[], [], [], []]);
  const probes = rows.filter((row) => row.arm === "on_policy" && row.accuracy !== null);
  const level = (name) => probes.map(() => found.arms[name]?.accuracy ?? null);
  accuracy.update([probes.map((row) => row.step), probes.map((row) => row.ci95?.[0] ?? null), probes.map((row) => row.ci95?.[1] ?? null),
    probes.map((row) => row.accuracy), level("document"), level("none")]);
  const rewards = of("on_policy", (row) => row.reward);
  reward.update(rewards.some((v) => v !== null) ? [at, rewards, trailing(rewards, SMOOTH)] : [[], [], []]);
  drawSteps();
  drawChannels(rows.filter((row) => row.arm === "on_policy"));
}

function drawSteps() {
  const rows = held.steps.rows.filter((row) => row.arm === "on_policy");
  const at = rows.map((row) => row.step);
  const below = (phase) => STACKED.slice(STACKED.indexOf(phase));
  const stacked = STACKED.map((phase) => rows.map((row) => below(phase).reduce((sum, one) => sum + (row.seconds[one] ?? 0), 0)));
  phases.update([at, ...stacked, rows.map((row) => row.seconds.orchestration ?? null)]);
  const tokens = rows.map((row) => row.tokens_per_second ?? null);
  speed.update([at, tokens, trailing(tokens, SMOOTH)]);
}

/** Draws what only some runs have: a line for each name that `valuesOf` has in any of the rows. */
function drawNamed(title, note, rows, valuesOf, options = {}) {
  const measured = rows.filter((row) => Object.keys(valuesOf(row) ?? {}).length);
  const names = [...new Set(measured.flatMap((row) => Object.keys(valuesOf(row))))];
  if (!names.length) return;
  if (named[title]?.names.length !== names.length) {
    named[title]?.chart.element.remove();
    const series = names.map((label, i) => ({ label, colour: HUES[i % HUES.length], points: measured.length < rows.length }));
    named[title] = { names, chart: new Chart(title, note, series, options) };
    channelsPlace.append(named[title].chart.element);
  }
  named[title].chart.update([measured.map((row) => row.step), ...names.map((name) => measured.map((row) => valuesOf(row)[name] ?? null))]);
}

function drawChannels(rows) {
  const facts = (key) => (row) => Object.fromEntries(Object.entries(row.channels).filter(([, one]) => one[key] != null).map(([name, one]) => [name, one[key]]));
  const shares = { format: (v) => percent(v, 0), range: () => [0, 1.02] };
  drawNamed("Value of each channel", "The channel's own term, before its weight.", rows, facts("value"));
  drawNamed("Share of the gradient", "In the steps that measured it.", rows, facts("share"), shares);
  drawNamed("Cosines between the channels' gradients", "Below 0 two channels pull against each other.", rows, (row) => row.cosines, { range: () => [-1.05, 1.05] });
  drawNamed("Accuracy of each population", "Problems that are trained on.", rows, (row) => row.populations, shares);
}

async function more(name) {
  const has = held[name];
  const came = await ask(name, { run, generation: has.generation, after: has.next });
  has.rows = came.fresh ? came.rows : [...has.rows, ...came.rows];
  has.generation = came.generation;
  has.next = came.next;
  if (came.fresh) has.stride = came.stride;
}

function shortText(value) {
  const short = (one) => (typeof one === "number" && !Number.isInteger(one) ? Number(one.toPrecision(4)) : one);
  return value !== null && typeof value === "object" ? JSON.stringify(value, (_, one) => short(one)) : String(short(value));
}

async function events() {
  const rows = await ask("events", { run });
  eventsPlace.replaceChildren(card("Events", h("div.scroll.events", { tabindex: "0", role: "group", "aria-label": "Events, the newest first" },
    h("ol", {}, ...rows.map((row) => {
      const { time, event, ...facts } = row;
      const text = Object.entries(facts).map(([name, value]) => `${name} ${shortText(value)}`).join(", ");
      return h("li", { "data-event": event }, clock(time), " ", h("b", {}, event), " ", h("span.soft", {}, text));
    })))));
}

function buttons(found) {
  const place = document.getElementById("actions");
  if (found.outcome !== "running") { place.replaceChildren(); return; }
  const paused = found.status.paused;
  if (place.childElementCount && place.dataset.paused === String(paused)) return;
  place.dataset.paused = String(paused);
  const act = (action, more = {}) => guarded(async () => notice((await send("steer", { run, action, ...more })).told));
  const button = (text, does) => h("button", { type: "button", onclick: does }, text);
  const scale = () => (document.getElementById("scale") ?? scaling(act, found.status.pools)).showModal();
  place.replaceChildren(paused ? button("Resume", () => act("resume")) : button("Pause", () => act("pause")),
    button("Checkpoint", () => act("checkpoint")), button("Scale…", scale),
    button("Stop", () => stopping(act).showModal()));
}

function dialog(id, label, parts, submit) {
  const element = h("dialog", { id, "aria-label": label }, h("form", { method: "dialog", onsubmit: submit }, ...parts,
    h("button", { type: "button", onclick: () => element.close() }, "Cancel")));
  document.body.append(element);
  return element;
}

function stopping(act) {
  return document.getElementById("stop") ?? dialog("stop", "End the run", [
    h("p", {}, "The run ends after the step in progress, with a checkpoint."), h("button.main", {}, "End the run")], () => { act("stop"); });
}

function scaling(act, pools) {
  const role = h("select", { id: "scale-role" }, ...pools.map((pool) => h("option", { value: pool.role }, `${pool.role} (${pool.target} now)`)));
  const replicas = h("input", { id: "scale-replicas", type: "number", min: "1", value: "2", required: true });
  return dialog("scale", "Scale a role", [h("label", { for: "scale-role" }, "role ", role), h("label", { for: "scale-replicas" }, "replicas ", replicas),
    h("button.main", {}, "Scale")], () => { act("scale", { role: role.value, replicas: Number(replicas.value) }); });
}

const refresh = oneAtATime(async () => {
  const jobs = [ask("overview", { run })];
  const metrics = String(marks.metrics), happened = String(marks.events);
  if (metrics !== seen.metrics) jobs.push(more("curves"));
  if (happened !== seen.events) jobs.push(more("steps"), events());
  const [found] = await Promise.all(jobs);
  Object.assign(seen, { metrics, events: happened });
  showOutcome(found.outcome, found.status?.stage);
  stages(found);
  tiles(found);
  arms(found);
  documents(found);
  draw(found);
  buttons(found);
});

main.replaceChildren(stagesPlace, tilesPlace, h("div.grid", {}, kl.element, accuracy.element, phases.element, speed.element, reward.element),
  channelsPlace, armsPlace, documentsPlace, eventsPlace);
follow(async (found) => {
  marks = found;
  await refresh();
});
// The time left runs on between two changes; an ended run has none.
setInterval(() => { if (marks?.running && !document.hidden) guarded(refresh); }, 3000);
