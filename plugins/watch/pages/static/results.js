// The page of results: the server wrote it; the time of a run's next numbers is the reader's to choose.

import { follow, h, main, showOutcome } from "/static/page.js";

let first = null;
follow((marks) => {
  showOutcome(marks.outcome);
  const now = JSON.stringify([marks.metrics, marks.ended]);
  first ??= now;
  if (now === first || document.getElementById("again")) return;
  main.prepend(h("p.card", { id: "again", role: "status" }, "The run went on. ",
    h("button", { type: "button", onclick: () => location.reload() }, "Show its results now")));
});
