// One row: a response token by token, an answer, or an episode turn by turn.

import { h, number, percent } from "/static/page.js";

const HEAT = [0.02, 0.1, 0.3, 1, 3];  // nats from which a token has the next shade

export function heading(row) {
  const versions = row.versions?.length ? (row.versions[1] < 0 ? "by the teacher" : row.versions[0] === row.versions[1] ? `v${row.versions[0]}` : `v${row.versions.join(" to v")}`) : "";
  return [h("b", {}, row.document), " ", h("span.soft", {}, [row.kind, row.arm, row.step ? `step ${row.step}` : "", versions].filter(Boolean).join(", "))];
}

export function shown(source, row) {
  return { rollouts: response, answers: answer, episodes: episode }[source](row);
}

function facts(pairs) {
  return h("dl.facts", {}, ...pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
    .flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))]));
}

/** Colour tokens by the teacher's KL where it was recorded, else by how unlikely the sampler held them. */
export function tokens(pieces, { kl = null, logprobs = [], versions = [] }) {
  let before = versions[0];
  return h("p.tokens", {}, ...pieces.map((piece, i) => {
    const surprise = logprobs[i] === undefined ? null : -logprobs[i];
    const value = kl ? kl[i] : surprise;
    const heat = value === null ? 0 : HEAT.filter((bound) => value >= bound).length;
    const told = [`token ${i + 1}`, kl ? `KL ${number(kl[i])} nats` : null, surprise === null ? null : `sampled at -log p ${number(surprise)}`,
      versions[i] === undefined ? null : versions[i] < 0 ? "by the teacher" : `version ${versions[i]}`].filter(Boolean).join(", ");
    const change = versions[i] !== before ? ".version-change" : "";
    before = versions[i];
    return h(`span.token${heat ? `.heat${heat}` : ""}${change}`, { title: told }, piece);
  }));
}

function legend(kl) {
  return h("p.soft", {}, `Colour: ${kl ? "the teacher's KL at each token" : "-log p of each token when it was sampled"}, from `,
    ...HEAT.flatMap((bound, i) => [h(`span.token.heat${i + 1}`, {}, ` ${bound} `), " "]), "nats; a bar marks a new version.");
}

function values(row) {
  return h("details", {}, h("summary", {}, "Every token's numbers"), h("div.scroll", { tabindex: "0", role: "group", "aria-label": "Tokens" },
    h("table", {}, h("thead", {}, h("tr", {}, ...["token", "-log p", "KL", "version"].map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, ...row.pieces.map((piece, i) => h("tr", {}, h("th", { scope: "row" }, JSON.stringify(piece)), h("td", {}, number(row.logprobs[i] === undefined ? null : -row.logprobs[i])),
        h("td", {}, number(row.kl?.[i])), h("td", {}, String(row.versions[i] ?? "-"))))))));
}

function response(row) {
  return [h("p", {}, ...heading({ ...row, versions: row.versions.length ? [Math.min(...row.versions), Math.max(...row.versions)] : [] })),
    h("h3", {}, "Prompt"), h("p.talk", {}, row.prompt ?? `${row.prompt_tokens} tokens; the model's tokenizer is not on this machine`),
    h("h3", {}, "Student"), tokens(row.pieces, row), legend(row.kl), values(row),
    facts([["id", row.id], ["ended by", row.finish_reason], ["trains", row.cartridge], ["teacher reads", (row.contexts ?? []).join(", ")],
      ["composed with", (row.composed ?? []).join(", ")], ["sampling", Object.entries(row.sampling ?? {}).map(([k, v]) => `${k} ${v}`).join(", ")]])];
}

function answer(row) {
  return [h("p", {}, ...heading({ ...row, kind: row.sampled ? "sampled" : "greedy" })),
    h("h3", {}, "Question"), h("p.talk", {}, row.fact),
    h("h3", {}, "Right answer"), h("p.talk", {}, row.expected ?? "not known"),
    h("h3", {}, `Answer of ${row.arm.replace("_", " ")}`), h("p.talk.student", {}, row.text ?? "-"),
    facts([["read from it", row.answer], ["verdict", row.right === null ? "not judged" : row.right === 1 ? "right" : row.right === 0 ? "wrong" : percent(row.right)],
      ["reward", row.reward], ["NLL of the right answer", row.nll === null ? null : number(row.nll)], ["tokens", row.tokens], ["question", row.id]])];
}

function episode(row) {
  const said = (message) => [h("p.soft", {}, message.role), h("p.talk", {}, message.content ?? "")];
  return [h("p", {}, ...heading(row)),
    facts([["reward", row.reward], ["ended by", row.error_kind || "its end"], ["flags", row.flags.join(", ")], ["task", row.id]]),
    ...row.opening.flatMap(said),
    ...row.turns.flatMap((turn, i) => [
      h("p.soft", {}, `student, turn ${i + 1}${turn.error_kind ? `: ${turn.error_kind}` : ""}`), tokens(turn.pieces, turn),
      ...(turn.hint ? [h("p.soft", {}, "hint"), h("p.talk.hint", {}, turn.hint), turn.no_hint ? h("p.soft", {}, `not used: ${turn.no_hint}`) : null] : []),
      ...turn.messages.flatMap(said)]),
    legend(null)];
}
