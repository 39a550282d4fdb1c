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

const likely = (top) => top.map(([text, p]) => `${JSON.stringify(text)} ${percent(p)}`).join(", ");

/** Colour tokens by the teacher's KL where it was recorded, else by how unlikely the sampler held them. */
export function tokens(pieces, { kl = null, teacher = null, logprobs = [], versions = [], taught = [] }) {
  let before = versions[0];
  return h("p.tokens", {}, ...pieces.map((piece, i) => {
    const surprise = logprobs[i] === undefined ? null : -logprobs[i];
    const value = kl ? kl[i] : surprise;
    const heat = value === null ? 0 : HEAT.filter((bound) => value >= bound).length;
    const told = [`token ${i + 1}`, kl ? `KL ${number(kl[i])} nats` : null, surprise === null ? null : `sampled at -log p ${number(surprise)}`,
      versions[i] === undefined ? null : versions[i] < 0 ? "by the teacher" : `version ${versions[i]}`,
      taught.includes(i) ? "drawn by the teacher in place of a refused token" : null,
      teacher?.[i] ? `the teacher held likeliest ${likely(teacher[i])}` : null].filter(Boolean).join(", ");
    const change = versions[i] !== before ? ".version-change" : "";
    before = versions[i];
    return h(`span.token${heat ? `.heat${heat}` : ""}${change}`, { title: told }, piece);
  }));
}

/** What the teacher, who reads the document, would have said at each place of the student's text. */
function teachers(row) {
  if (!row.teacher) return [];
  const differs = row.teacher.filter((top, i) => top && top[0][0] !== row.pieces[i]).length;
  return [h("h3", {}, "Teacher, at each of these places"),
    h("p.tokens", {}, ...row.pieces.map((piece, i) => {
      const top = row.teacher[i];
      if (!top) return h("span.token.soft", { title: `token ${i + 1}: not scored` }, piece);
      return h(top[0][0] === piece ? "span.token" : "span.token.differs", { title: `token ${i + 1}: ${likely(top)}` }, top[0][0]);
    })),
    h("p.soft", {}, `Its likeliest token after the student's words so far; ${differs ? `underlined in ${differs} places where it is another than the student's` : "the same everywhere"}.`)];
}

function legend(kl) {
  return h("p.soft", {}, `Colour: ${kl ? "the teacher's KL at each token" : "-log p of each token when it was sampled"}, from `,
    ...HEAT.flatMap((bound, i) => [h(`span.token.heat${i + 1}`, {}, ` ${bound} `), " "]), "nats; a bar marks a new version.");
}

function values(row) {
  return h("details", {}, h("summary", {}, "Every token's numbers"), h("div.scroll", { tabindex: "0", role: "group", "aria-label": "Tokens" },
    h("table", {}, h("thead", {}, h("tr", {}, ...["token", "-log p", "KL", "version", ...(row.teacher ? ["the teacher's likeliest"] : [])].map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, ...row.pieces.map((piece, i) => h("tr", {}, h("th", { scope: "row" }, JSON.stringify(piece)), h("td", {}, number(row.logprobs[i] === undefined ? null : -row.logprobs[i])),
        h("td", {}, number(row.kl?.[i])), h("td", {}, row.versions[i] < 0 || row.taught?.includes(i) ? "teacher" : String(row.versions[i] ?? "-")),
        row.teacher ? h("td", {}, row.teacher[i] ? likely(row.teacher[i]) : "-") : null))))));
}

function response(row) {
  return [h("p", {}, ...heading({ ...row, versions: row.versions.length ? [Math.min(...row.versions), Math.max(...row.versions)] : [] })),
    h("h3", {}, "Prompt"), h("p.talk", {}, row.prompt ?? `${row.prompt_tokens} tokens; the model's tokenizer is not on this machine`),
    h("h3", {}, row.versions[0] < 0 ? "Answer, written by the teacher" : "Student"), tokens(row.pieces, row), legend(row.kl), ...teachers(row), values(row),
    facts([["id", row.id], ["ended by", row.finish_reason], ["trains", row.cartridge], ["teacher reads", (row.contexts ?? []).join(", ")],
      ["composed with", (row.composed ?? []).join(", ")], ["sampling", Object.entries(row.sampling ?? {}).map(([k, v]) => `${k} ${v}`).join(", ")]])];
}

function answer(row) {
  return [h("p", {}, ...heading({ ...row, kind: row.sampled ? "sampled" : "greedy" })),
    h("h3", {}, "Question"), h("p.talk", {}, row.fact),
    h("h3", {}, "Right answer"), h("p.talk", {}, row.expected ?? "not known"),
    h("div.tiles", {}, h("section", {}, h("h3", {}, `Answer of ${row.arm.replace("_", " ")}`), h("p.talk.student", {}, row.text ?? "-")),
      row.teacher ? h("section", {}, h("h3", {}, "Answer with the whole document"), h("p.talk", {}, row.teacher.text ?? "-")) : null),
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
      ...voted(turn.verdict), ...(turn.hint ? [h("p.soft", {}, "hint"), h("p.talk.hint", {}, turn.hint), turn.no_hint ? h("p.soft", {}, `not used: ${turn.no_hint}`) : null] : []),
      ...turn.messages.flatMap(said)]),
    legend(row.turns.some((turn) => turn.kl))];
}

/** What other teachers would have done at a turn, and what came of it. */
function voted(verdict) {
  if (!verdict) return [];
  return [h("p.soft", {}, `votes: ${verdict.reason.replaceAll("_", " ")}, asked because of ${verdict.asked_because.replaceAll("_", " ")}`),
    h("ul.talk.votes", {}, ...verdict.votes.map((vote) => h("li", {}, h("b", {}, vote.teacher), " ", vote.said || `abstains: ${vote.error}`,
      vote.said && vote.said === verdict.chosen ? h("span.right", {}, " chosen") : null)))];
}
