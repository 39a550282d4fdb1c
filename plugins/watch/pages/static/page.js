// What every page uses: elements, requests, the stream of changes, and texts of numbers.

import { answered, exported, marks } from "/static/exported.js";

export const run = document.body.dataset.run;
export const main = document.getElementById("main");
export { exported };

/** Make an element: h("p.soft", {title: "x"}, "text", child). Texts are never read as markup. */
export function h(kind, attributes = {}, ...children) {
  const [tag, ...classes] = kind.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function card(title, ...children) {
  return h("section.card", {}, h("h2", {}, title), ...children);
}

export function table(caption, heads, rows) {
  const cells = (row) => row.map((cell, i) => h(i ? "td" : "th", i ? {} : { scope: "row" }, cell));
  return h("div.scroll", { tabindex: "0", role: "group", "aria-label": caption },
    h("table", {}, h("caption", {}, caption),
      h("thead", {}, h("tr", {}, ...heads.map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, ...rows.map((row) => h("tr", {}, ...cells(row))))));
}

/** Ask for data. `query` is an object, or pairs where a name stands more than once. */
export async function ask(name, query = {}) {
  if (exported) return answered(name, query);
  const pairs = Array.isArray(query) ? query : Object.entries(query);
  const given = pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const reply = await fetch(`/api/${name}?${new URLSearchParams(given)}`);
  return read(reply);
}

export async function send(name, body) {
  const reply = await fetch(`/api/${name}`, {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body),
  });
  return read(reply);
}

async function read(reply) {
  const text = await reply.text();
  if (reply.ok) return JSON.parse(text);
  let why = text.trim();
  try { why = JSON.parse(text).error; } catch { /* a plain text */ }
  throw new Error(why || `the server answered ${reply.status}`);
}

/** Show in the address what a page is asked for, so that it can be loaded again. */
export function remember(query) {
  if (!exported) history.replaceState(null, "", `?${new URLSearchParams(query)}`);
}

export function notice(text) {
  const place = document.getElementById("notice");
  place.textContent = text;
  place.hidden = !text;
}

/** A line on work that takes long, with the seconds so far, until it leaves the page. */
export function elapsed(what) {
  const begun = Date.now(), so_far = h("span", { "aria-hidden": "true" });
  const line = h("p", { role: "status" }, `${what} `, so_far);
  const tick = () => { so_far.textContent = `${Math.round((Date.now() - begun) / 1000)} s so far`; };
  tick();
  const timer = setInterval(() => (line.isConnected ? tick() : clearInterval(timer)), 1000);
  return line;
}

/** Run a page's work, and show what it fails by. */
export async function guarded(work) {
  try {
    return await work();
  } catch (error) {
    notice(error.message);
    return undefined;
  }
}

/** Call `changed(marks)` now and whenever a file of the run changed. A hidden page asks nothing. */
export function follow(changed) {
  if (exported) { guarded(() => changed(marks)); return; }
  let stream = null;
  const open = () => {
    if (stream || document.hidden) return;
    stream = new EventSource(`/api/changes?${new URLSearchParams({ run })}`);
    stream.addEventListener("changed", (event) => {
      notice("");
      guarded(() => changed(JSON.parse(event.data)));
    });
    stream.onerror = () => notice("forge ui does not answer; what is shown may be old");
  };
  const shut = () => { stream?.close(); stream = null; };
  document.addEventListener("visibilitychange", () => (document.hidden ? shut() : open()));
  window.addEventListener("pagehide", shut);
  open();
}

/** Let only one call of `work` run at a time; a call meanwhile makes it run once more. */
export function oneAtATime(work) {
  let running = false, again = false;
  return async () => {
    if (running) { again = true; return; }
    running = true;
    try {
      do { again = false; await work(); } while (again);
    } finally { running = false; }
  };
}

export const percent = (share, digits = 1) =>
  share === null || share === undefined ? "-" : `${(100 * share).toFixed(digits)}%`;

export const number = (value, digits = 3) =>
  value === null || value === undefined || Number.isNaN(value) ? "-"
    : Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : value.toFixed(digits);

/** A compression as Python's format has it elsewhere: 8.25 is 8.2x, a tie to the even digit. */
export function times(ratio) {
  const tenths = Math.round(ratio * 10);
  return `${((ratio * 10) % 1 === 0.5 && tenths % 2 ? tenths - 1 : tenths) / 10}x`.replace(/^(\d+)x$/, "$1.0x");
}

export const count = (value) => (value === null || value === undefined ? "-" : value.toLocaleString("en"));

export const interval = (ci95) => (ci95 ? `${percent(ci95[0])} to ${percent(ci95[1])}` : "");

export function bytes(value) {
  if (value === null || value === undefined) return "-";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 1000 || unit === "GB") return `${unit === "B" ? value : value.toFixed(1)} ${unit}`;
    value /= 1000;
  }
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

export function clock(time) {
  return h("time", { datetime: time, title: time }, new Date(time).toLocaleTimeString());
}

export function showOutcome(outcome, stage) {
  const badge = document.getElementById("outcome");
  if (!badge) return;
  badge.textContent = outcome === "running" && stage ? stage : outcome;
  badge.dataset.outcome = outcome;
}
