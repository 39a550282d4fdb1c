// The page of cartridges: sizes, norms by layer, and how far two versions are apart.

import { ask, bytes, card, count, elapsed, exported, follow, guarded, h, main, number, run, showOutcome, table, times } from "/static/page.js";

const shownPlace = h("div.page"), recallPlace = h("div.page"), diffPlace = h("div.page");
let checkpoint = "";

function pick(label, values, chosen, changed) {
  const select = h("select", { onchange: () => changed(select.value) }, ...values.map((value) => h("option", { value, selected: value === chosen }, value)));
  return [h("label", {}, label, select), select];
}

async function show() {
  const found = await ask("cartridges", { run, checkpoint });
  if (!found.checkpoints.length) {
    shownPlace.replaceChildren(card("Cartridges", h("p", {}, "The run has written no checkpoint yet.")));
    return;
  }
  const [choice] = pick("checkpoint", found.checkpoints, found.shown, (value) => { checkpoint = value; guarded(show); });
  const saved = found.document_tokens;
  const rows = found.cartridges.map((one) => {
    const ratio = saved ? saved / one.tokens : null;
    return [one.name, one.shape.join(" x "), `${one.tokens}, ${one.frozen} frozen`, bytes(one.bytes),
      ratio ? bytes(one.bytes * ratio) : "-", ratio ? times(ratio) : "-",
      ratio ? `${count(Math.round(saved - one.tokens))} tokens, ${bytes(one.bytes * (ratio - 1))}` : "-"];
  });
  shownPlace.replaceChildren(
    card("Cartridges", h("form.filters", { onsubmit: (event) => event.preventDefault() }, choice),
      table(`${found.cartridges.length} cartridges of ${found.shown}`,
        ["cartridge", "layers x 2 x heads x tokens x size", "tokens", "size", "document's KV", "compression", "saved in each request"], rows),
      h("p.soft", {}, saved ? `Of documents of ${number(saved, 1)} tokens on average; sizes in the model's dtype.` : "Compression is known once the run has results; sizes in the model's dtype.")),
    ...found.cartridges.map(norms));
  if (!exported) { recall(found); difference(found); }
}

function norms(one) {
  const most = Math.max(...one.layers.flatMap((layer) => [layer.keys, layer.values]), 1e-12);
  const bar = (value) => h("meter", { min: "0", max: String(most), value: String(value), "aria-label": number(value, 4) });
  return card(`${one.name}: root mean square by layer`, table(
    `Of ${one.name}: version ${one.source.version}, ${one.source.arm}, step ${one.source.step}`,
    ["layer", "keys", "", "largest key", "values", "", "largest value"],
    one.layers.map((layer, i) => [String(i), number(layer.keys, 4), bar(layer.keys), number(layer.largest_key, 3), number(layer.values, 4), bar(layer.values), number(layer.largest_value, 3)])));
}

const SHADES = 5;

/** A document's passages, coloured by the share of right answers about each. */
function passages(found) {
  const shade = (one) => `.recall${Math.round((one.right / one.asked) * SHADES)}`;
  const told = (one) => `${number(one.right, one.right % 1 ? 2 : 0)} of ${one.asked} right`;
  const lines = Map.groupBy(found.passages, (one) => one.line);
  return [h("div.document.scroll", { tabindex: "0", role: "group", "aria-label": "The document" }, ...[...lines.values()].map((line) => h("p", {},
    ...line.flatMap((one) => [one.asked ? h(`mark.recall${shade(one)}`, { title: told(one) }, one.text, h("small", {}, ` ${told(one)}`)) : h("span.soft", {}, one.text), " "])))),
  h("p.soft", {}, "Marked: the passages that held-out questions ask about, ",
    ...Array.from({ length: SHADES + 1 }, (_, i) => [h(`mark.recall.recall${i}`, {}, `${(100 * i) / SHADES}%`), " "]).flat(),
    " right with the cartridge. A question is about the passage with its right answer and most of its words.",
    found.cut ? " The document is longer than what is shown." : "")];
}

function recall(found) {
  const out = h("div", { "aria-live": "polite" });
  const [label, name] = pick("cartridge", found.cartridges.map((one) => one.name), found.cartridges[0].name, () => {});
  const submit = (event) => {
    event.preventDefault();
    out.replaceChildren(elapsed("The document is read as the run read it."));
    return guarded(async () => {
      const told = await ask("recall", { run, name: name.value });
      const size = told.tokens ? [h("p", {}, `${count(told.tokens)} tokens of text, for which ${count(found.cartridges.find((one) => one.name === name.value).tokens)} stand.`)] : [];
      out.replaceChildren(...(told.why_not ? [h("p", {}, told.why_not)] : []), ...(told.passages.length ? [...size, ...passages(told)] : []));
    });
  };
  recallPlace.replaceChildren(card("What it recalls", h("form.filters", { onsubmit: submit }, label, h("button", {}, "Read its document")), out));
}

function difference(found) {
  const out = h("div", { "aria-live": "polite" });
  const names = found.cartridges.map((one) => one.name);
  // The run's own last version: of the arm on policy, behind which those of other arms may come.
  const last = Math.max(0, found.checkpoints.indexOf(found.own));
  const [nameLabel, name] = pick("cartridge", names, names[0], () => {});
  const [fromLabel, from] = pick("from", found.checkpoints, found.checkpoints[Math.max(0, last - 1)], () => {});
  const [toLabel, to] = pick("to", found.checkpoints, found.checkpoints[last], () => {});
  const submit = async (event) => {
    event.preventDefault();
    await guarded(async () => {
      const far = await ask("diff", { run, name: name.value, a: from.value, b: to.value });
      out.replaceChildren(table(`${far.name}: from ${far.a} to ${far.b}`, ["layer", "keys changed by", "cosine", "values changed by", "cosine"],
        far.layers.map((layer, i) => [String(i), number(layer.keys, 4), number(layer.keys_cosine, 5), number(layer.values, 4), number(layer.values_cosine, 5)])),
      h("p.soft", {}, "Changed by: the norm of the difference over the norm before."));
    });
  };
  diffPlace.replaceChildren(card("Two versions", h("form.filters", { onsubmit: submit }, nameLabel, fromLabel, toLabel, h("button", {}, "Compare")), out));
}

let before = "";
main.replaceChildren(shownPlace, recallPlace, diffPlace);
follow(async (marks) => {
  showOutcome(marks.outcome);
  const now = String([marks.checkpoints, marks.ended]);
  if (now !== before) { before = now; await show(); }
});
