// The page that compares runs: curves overlaid, settings that differ, paired differences.

import { ask, card, elapsed, guarded, h, main, number, percent, remember, run, table } from "/static/page.js";
import { Chart, trailing } from "/static/chart.js";

const HUES = ["hue1", "hue3", "hue2", "hue5", "hue4", "hue6", "ink", "soft"];
const DASHES = [undefined, [8, 4], [2, 3], [12, 4, 2, 4]];
const WINDOW = 9;
const place = h("div.page", { "aria-live": "polite" });

const chosen = new Set(new URLSearchParams(location.search).getAll("run"));

function series(runs) {
  return runs.map((one, i) => ({ label: one.key, colour: HUES[i], dash: DASHES[Math.floor(i / 2) % DASHES.length], points: false }));
}

function overlaid(title, note, runs, value, format, points) {
  const of = runs.map((one) => new Map(one.rows.filter((row) => row.arm === "on_policy" && value(row) !== null && value(row) !== undefined).map((row) => [row.step, value(row)])));
  const steps = [...new Set(of.flatMap((one) => [...one.keys()]))].sort((a, b) => a - b);
  const lines = of.map((one) => { const raw = steps.map((step) => one.get(step) ?? null); return points ? raw : trailing(raw, WINDOW); });
  const chart = new Chart(title, note, series(runs).map((one) => ({ ...one, points })), { format });
  return [chart, [steps, ...lines]];
}

function differences(found) {
  if (found.why_not) return card("Paired differences", h("p", {}, found.why_not));
  const scaled = (one, value, sign = "") => { const text = one.metric === "right" ? (100 * value).toFixed(1) : value.toFixed(3); return sign && value >= 0 ? `+${text}` : text; };
  return card("Paired differences", table(`By ${found.resamples.toLocaleString("en")} resamples of documents and their facts, as forge compare`,
    ["arm", "over", "metric", "questions", "", "over", "difference", "95%", "p (Holm)"],
    found.comparisons.map((one) => [one.b, one.a, one.metric, String(one.n), scaled(one, one.mean_b), scaled(one, one.mean_a), scaled(one, one.difference, "+"),
      `${scaled(one, one.ci95[0], "+")} to ${scaled(one, one.ci95[1], "+")}`, one.p_holm.toPrecision(2)])),
  ...found.notes.map((note) => h("p.soft", {}, note)), h("p.soft", {}, "right in percentage points, nll in nats a token (less is better)"));
}

async function show() {
  const keys = [...chosen];
  remember(keys.map((key) => ["run", key]));
  if (!keys.length) { place.replaceChildren(card("Compare", h("p", {}, "Choose runs above."))); return; }
  const wanted = keys.map((key) => ["run", key]);
  const found = await ask("compare", wanted);
  const waiting = card("Paired differences", elapsed("The questions are resampled."));
  const [kl, klColumns] = overlaid("KL to the teacher", `Nats a token, on policy, means of ${WINDOW} steps.`, found.runs, (row) => row.kl, (v) => number(v), false);
  const [right, rightColumns] = overlaid("Held-out accuracy while training", "Validations of the arm on policy.", found.runs, (row) => row.accuracy, (v) => percent(v, 0), true);
  place.replaceChildren(h("div.grid", {}, kl.element, right.element), waiting,
    card("Settings that differ", found.settings.length ? table("The others are equal", ["key", ...keys],
      found.settings.map((row) => [row.key, ...row.values.map((value) => (typeof value === "string" ? value : JSON.stringify(value)))])) : h("p", {}, keys.length > 1 ? "None." : "One run is chosen.")));
  kl.update(klColumns);
  right.update(rightColumns);
  waiting.replaceWith(differences(await ask("paired", wanted)));
}

async function choices() {
  const runs = await ask("runs");
  const box = (one) => {
    const input = h("input", { type: "checkbox", checked: chosen.has(one.key), onchange: () => {
      if (input.checked) chosen.add(one.key); else chosen.delete(one.key);
      guarded(show);
    } });
    return h("li", {}, h("label", {}, input, ` ${one.key} `, h("span.soft", {}, [one.state, one.step === null ? "" : `step ${one.step}`, one.accuracy === null ? "" : percent(one.accuracy)].filter(Boolean).join(", "))));
  };
  main.replaceChildren(card("Runs", h("div.scroll.events", { tabindex: "0", role: "group", "aria-label": "Runs to compare" }, h("ol", {}, ...runs.map(box)))), place);
  await show();
}

if (run) guarded(choices);
