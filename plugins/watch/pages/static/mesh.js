// The page of the mesh: roles, replicas, restarts, hosts and stacks.

import { ask, bytes, card, clock, count, duration, follow, guarded, h, main, oneAtATime, run, showOutcome, table } from "/static/page.js";

const rolesPlace = h("div"), replicasPlace = h("div"), changesPlace = h("div"), stacksPlace = h("div");

function replicas(pools) {
  if (!pools.length) {
    return card("Replicas", h("p", {}, "The run has ended: processes and memory are known while it goes on."));
  }
  return card("Replicas", table("Every replica now", ["replica", "state", "host", "process", "requests", "version", "memory"],
    pools.flatMap((pool) => pool.replicas.map((one) => [one.name, h("span", { class: one.state === "healthy" ? "right" : "wrong" }, one.state),
      one.host, String(one.pid || "-"), String(one.ongoing), one.version < 0 ? "-" : `v${one.version}`, bytes(one.memory_bytes)]))),
  table("Pools", ["pool", "wanted", "waiting", "served", "failed", "tried again", "restarts"],
    pools.map((pool) => [pool.role, ...[pool.target, pool.waiting, pool.requests, pool.failures, pool.retries, pool.restarts].map(count)])));
}

async function open(name, place) {
  const found = await ask("stacks", { run, name });
  place.replaceChildren(h("pre.scroll", { tabindex: "0" }, found.text));
}

const show = oneAtATime(async () => {
  const found = await ask("mesh", { run });
  rolesPlace.replaceChildren(card("Roles", table(`Tensors over ${found.plane ?? "-"}, hosts ${found.hosts ?? "-"}`,
    ["role", "replicas", "processes each", "threads", "GPUs", "ready after", "process ids", "lost"],
    found.roles.map((role) => [role.role, count(role.replicas), count(role.procs), count(role.threads), count(role.gpus),
      duration(role.seconds), role.pids.join(", ") || "-", h("span", { class: role.lost ? "wrong" : "" }, count(role.lost))]))));
  replicasPlace.replaceChildren(replicas(found.pools));
  changesPlace.replaceChildren(card("What happened", h("div.scroll.events", { tabindex: "0", role: "group", "aria-label": "Changes of the mesh, the newest first" },
    h("ol", {}, ...found.changes.map(({ time, event, ...facts }) => h("li", { "data-event": event }, clock(time), " ", h("b", {}, event), " ",
      h("span.soft", {}, Object.entries(facts).map(([key, value]) => `${key} ${value}`).join(", "))))))));
  if (stacksPlace.childElementCount !== Math.min(1, found.stacks.length)) {
    const text = h("div");
    stacksPlace.replaceChildren(card("Stacks, written when nothing moved", h("div.filters", {},
      ...found.stacks.map((name) => h("button", { type: "button", onclick: () => guarded(() => open(name, text)) }, name))), text));
  }
});

let running = false;
main.replaceChildren(rolesPlace, replicasPlace, stacksPlace, changesPlace);
follow(async (marks) => {
  running = marks.running;
  showOutcome(marks.outcome);
  await show();
});
setInterval(() => { if (running && !document.hidden) guarded(show); }, 3000);
