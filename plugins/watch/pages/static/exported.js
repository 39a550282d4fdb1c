// Answers for a page that stands alone, from the data that is kept in it; null where a server
// answers.

const element = document.getElementById("kept");
const kept = element === null ? null : JSON.parse(element.textContent);

export const exported = kept !== null;

const chosen = {
  arm: (row, value) => row.arm === value,
  step: (row, value) => row.step === Number(value),
  document: (row, value) => row.document === value,
  kind: (row, value) => row.kind === value,
  verdict: (row, value) => row.verdict !== null && (row.verdict >= 0.5) === (value === "right"),
  least: (row, value) => row.reward !== null && row.reward >= Number(value),
  most: (row, value) => row.reward !== null && row.reward <= Number(value),
};

function rollouts(query) {
  const of = kept.rollouts[query.source];
  const wanted = Object.keys(chosen).filter((name) => (query[name] ?? "") !== "");
  const rows = of.rows.filter((row) => wanted.every((name) => chosen[name](row, query[name])));
  const skip = Number(query.skip || 0);
  return { ...of, total: rows.length, skip, rows: rows.slice(skip, skip + kept.page) };
}

/** Return what a server would answer. Of rollouts it is a sample of the rows. */
export function answered(name, query) {
  if (name === "rollouts") return rollouts(query);
  if (name === "rollout") return kept.rollout[query.source][query.number];
  return kept.answers[name];
}

export const marks = kept?.marks;
