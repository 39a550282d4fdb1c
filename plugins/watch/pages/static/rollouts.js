// The page of rollouts: filters, pages of rows, and one row token by token.

import { ask, card, count, exported, follow, guarded, h, main, number, oneAtATime, percent, remember, run, showOutcome } from "/static/page.js";
import { heading, shown } from "/static/rollout.js";

const PAGE = 25;
const OWN = "on_policy";  // the arm that a page opens on
const FILTERS = ["source", "arm", "step", "document", "kind", "verdict", "least", "most", "skip"];
const SOURCES = { rollouts: "training responses", episodes: "episodes", answers: "held-out answers" };

const query = Object.fromEntries(FILTERS.map((name) => [name, new URLSearchParams(location.search).get(name) ?? ""]));

const filters = h("form.filters", { onsubmit: (event) => event.preventDefault(), role: "search", "aria-label": "Filters" });
const rows = h("ol.rows"), pager = h("div.pager"), summary = h("p.soft", { role: "status" });
const detail = h("div.page", { tabindex: "-1", "aria-live": "polite" });

function choose(name, title, values, names = {}) {
  const select = h("select", { onchange: () => set({ [name]: select.value }) },
    ...(name === "source" ? [] : [h("option", { value: "" }, "any")]),
    ...values.map((value) => h("option", { value, selected: value === query[name] }, names[value] ?? value)));
  return h("label", {}, title, select);
}

function enter(name, title, hint) {
  const input = h("input", { type: "number", step: name === "step" ? "1" : "any", value: query[name] || null, placeholder: hint,
    onchange: () => set({ [name]: input.value }) });
  return h("label", {}, title, input);
}

function set(changed) {
  Object.assign(query, { skip: "" }, changed);
  if ("source" in changed) for (const name of FILTERS.slice(1)) query[name] = "";
  const kept = Object.entries(query).filter(([, value]) => value !== "");
  remember([["run", run], ...kept]);
  drawn = "";
  guarded(list);
}

let drawn = "";  // of which choices the filters are

function drawFilters(choices) {
  const now = JSON.stringify([query.source, choices]);
  if (now === drawn || filters.contains(document.activeElement) && drawn) return;
  drawn = now;
  filters.replaceChildren(
    choose("source", "rows", Object.keys(SOURCES), SOURCES),
    choose("arm", "arm", choices.arm), enter("step", "step", `${choices.steps[0]} to ${choices.steps[1]}`),
    choose("document", "document", choices.document), choose("kind", "kind", choices.kind),
    ...(choices.verdict ? [choose("verdict", "verdict", ["right", "wrong"])] : []),
    ...(choices.reward ? [enter("least", "reward from", "any"), enter("most", "to", "any")] : []));
}

let chosen = { arm: [] };

const list = oneAtATime(async () => {
  const found = await ask("rollouts", { run, ...query });
  chosen = found.choices;
  drawFilters(found.choices);
  summary.textContent = `${count(found.total)} ${SOURCES[query.source]} match; ${count(found.tokens)} sampled tokens in all${exported ? `; of ${count(found.all)} rows a sample is kept in this file` : ""}`;
  rows.replaceChildren(...found.rows.map((row) => h("li", {}, entry(row))));
  const skip = found.skip, button = (text, to, off) => h("button", { type: "button", disabled: off, onclick: () => set({ skip: String(to) }) }, text);
  pager.replaceChildren(button("Newer", Math.max(0, skip - PAGE), skip === 0), button("Older", skip + PAGE, skip + PAGE >= found.total),
    h("span.soft", {}, found.total ? `${skip + 1} to ${Math.min(skip + PAGE, found.total)} of ${count(found.total)}` : "none"));
});

function entry(row) {
  const side = [];
  if (row.right !== undefined && row.right !== null) side.push(h("p", { class: row.right >= 0.5 ? "right" : "wrong" }, row.right === 1 ? "right" : row.right === 0 ? "wrong" : percent(row.right)));
  if (row.reward !== undefined && row.reward !== null) side.push(h("p", {}, `reward ${number(row.reward, 2)}`));
  if (row.kl !== undefined && row.kl !== null) side.push(h("p", {}, `${number(row.kl)} nats`));
  side.push(h("p.soft", {}, `${row.tokens} tokens${row.turns ? `, ${row.turns} turns` : ""}`));
  return h("button.row", { type: "button", onclick: () => guarded(() => open(row.number)) },
    h("span", {}, ...heading(row)),
    h("span", {}, h("p.soft", {}, row.prompt ?? ""), h("p.said", {}, row.text ?? ""), row.gold ? h("p.soft", {}, `right answer: ${row.gold}`) : null),
    h("span.side", {}, ...side));
}

async function open(number_) {
  const found = await ask("rollout", { run, source: query.source, number: number_ });
  const others = found.same.filter((row) => row.number !== number_);
  detail.replaceChildren(
    card(`Row ${number_}`, ...shown(query.source, found.row)),
    card(`The same question: ${found.same_total} rows`, others.length
      ? h("ol.rows", {}, ...others.map((row) => h("li", {}, entry(row)))) : h("p.soft", {}, "It was sampled once.")));
  detail.focus();
  detail.scrollIntoView({ block: "start" });
}

let sizes = "";
main.replaceChildren(card("Rollouts", filters, summary, rows, pager), detail);
follow(async (marks) => {
  showOutcome(marks.outcome);
  const now = String([marks.rollouts, marks.answers, marks.episodes]);
  // The first that has rows: a run on episodes alone samples no other responses.
  query.source ||= Object.keys(SOURCES).find((name) => marks[name]) ?? "rollouts";
  if (now !== sizes) {
    const opens = !sizes;
    sizes = now;
    await list();
    // Other arms are trained and measured after it, so that the newest rows are theirs.
    if (opens && !query.arm && chosen.arm.length > 1 && chosen.arm.includes(OWN)) set({ arm: OWN });
  }
});
