// The page to ask a cartridge: without it, with it and with the document, side by side.

import { ask, card, count, elapsed, follow, guarded, h, main, run, send, showOutcome } from "/static/page.js";

const NAMES = { none: "without the document", cartridge: "with the cartridge", document: "with the whole document" };
const answers = h("div.page", { "aria-live": "polite" }), sharing = h("span");

// The parts of an answer: tokens that the document refuses, or where another is likelier, have a title.
function marked(one) {
  const choice = one.verify?.choices?.[0];
  if (!choice) return [one.answer.trim() || "(nothing)"];
  const parts = [];
  let at = 0;
  for (const token of choice.changed) {
    if (!one.answer.startsWith(token.token, token.offset)) continue; // an end token
    const why = `the document gives it ${(100 * token.probability).toFixed(1)}%, and ${(100 * token.document_probability).toFixed(1)}% to "${token.document_token.trim() || "the end"}"`;
    parts.push(one.answer.slice(at, token.offset), h(token.refused ? "span.token.heat4" : "span.token.differs", { title: why, tabindex: "0" }, token.token));
    at = token.offset + token.token.length;
  }
  return [...parts, one.answer.slice(at)];
}

function verdict({ choices: [choice], below }) {
  if (!choice.tokens) return "";
  const percent = (share) => `${Math.round(100 * share)}%`;
  return `The document accepts ${percent(choice.accepted)} of the tokens (probability ${below} or more); ${percent(choice.agreed)} are its own likeliest. Marked: refused; underlined: another is likelier.`;
}

function answered(found) {
  return card(found.question, h("div.tiles", {}, ...found.answers.map((one) => h("section", {}, h("h3", {}, NAMES[one.arm] ?? one.arm),
    h("p.talk.student", {}, ...marked(one)),
    one.verify ? h("p.soft", {}, verdict(one.verify)) : null,
    h("p.soft", {}, [one.prefix_tokens === null ? "" : `${count(one.prefix_tokens)} tokens before the question`, `${one.tokens} written`,
      one.seconds === null ? "" : `${one.seconds.toFixed(2)} s`].filter(Boolean).join(", "))))),
  found.note ? h("p.soft", {}, `Without the document: ${found.note}`) : null);
}

async function form() {
  const found = await ask("cartridges", { run });
  if (!found.cartridges.length) {
    main.replaceChildren(card("Ask", h("p", {}, "The run has written no checkpoint yet.")));
    return;
  }
  const names = found.cartridges.map((one) => one.name);
  const which = h("select", {}, ...(names.length > 1 ? [...names, "auto"] : names).map((name) => h("option", { value: name }, name === "auto" ? "auto: by the question's words" : name)));
  const question = h("input", { type: "text", required: true, maxlength: "4000", autocomplete: "off" });
  const most = h("input", { type: "number", min: "1", max: "512", value: "64", required: true });
  const button = h("button.main", {}, "Ask");
  const submit = (event) => {
    event.preventDefault();
    button.disabled = true;
    const waiting = card(question.value, elapsed("The model starts in a process of its own and reads the document: half a minute for a small model, 3 minutes at most."));
    answers.prepend(waiting);
    guarded(async () => {
      try {
        waiting.replaceWith(answered(await send("ask", { run, cartridge: which.value, question: question.value, max_tokens: Number(most.value) })));
      } finally { waiting.remove(); button.disabled = false; }
    });
  };
  main.replaceChildren(card("Ask", h("form.filters", { onsubmit: submit }, h("label", {}, "cartridge", which), h("label.wide", {}, "question", question), h("label", {}, "most tokens", most), button),
    h("p.soft", {}, `Of ${found.shown}, greedily.`, sharing)), answers);
}

follow((marks) => {
  showOutcome(marks.outcome);
  sharing.textContent = marks.outcome === "running" ? " It shares this machine's processors with the run." : "";
});
guarded(form);
