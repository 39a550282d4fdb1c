// The list of runs.

import { ask, card, duration, guarded, h, interval, main, number, percent, table } from "/static/page.js";


async function show() {
  const runs = await ask("runs");
  const rows = runs.map((one) => [
    h("a", { href: `/run?${new URLSearchParams({ run: one.key })}` }, one.key),
    h("span.badge", { "data-outcome": one.state }, one.state),
    one.step === null ? "-" : String(one.step), number(one.kl), percent(one.accuracy),
    interval(one.ci95) || "-", duration(one.seconds),
  ]);
  main.replaceChildren(card("Runs", runs.length
    ? table(runs.length === 1 ? "one run" : `${runs.length} runs, the last started first`,
      ["run", "state", "step", "KL", "accuracy", "95%", "took"], rows)
    : h("p", {}, "There is no run yet: forge-run longhealth makes one.")));
}

guarded(show);
