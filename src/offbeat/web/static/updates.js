// Owns the ledger of updates, newest first.

import { withQuery } from "./api.js";
import { fill, h, shown, table } from "./elements.js";
import { filters as filtersOf } from "./filters.js";
import { duration, number, OUTCOMES, plain } from "./words.js";

const WORDS = ["Task", "Worker", "Outcome"];
const NUMBERS = [
  ...["Staleness", "alpha_t", "tau", "t", "Leased at", "Arrived after", "Mixed after"],
  ...["Device", "Samples", "Gradients"],
];
const ASKED = ["worker", "outcome", "before", "size"];

export const updates = {
  name: "Updates",
  twin: ({ prefix, query }) => withQuery(`${prefix}/updates.json`, query, ASKED),

  mount(main, page) {
    const outcome = { name: "outcome", label: "Outcome", options: Object.keys(OUTCOMES) };
    const filters = filtersOf(page, { name: "worker", label: "Worker" }, outcome, "before");
    const body = h("tbody");
    const pages = h("nav", { class: "pager", "aria-label": "Pages" });
    const said = h("p", { class: "quiet" }, "Newest first; each task has its story.");
    main.replaceChildren(
      h("div", { class: "head" }, h("h1", { tabindex: "-1" }, "Updates"), said),
      filters.form,
      table("Updates, newest first", headOf(), body),
      pages,
    );
    return {
      show(data) {
        filters.sync(page.query);
        fill(body, data.updates.length ? data.updates.map((update) => rowOf(update, page)) : noneOf(page.query));
        fill(pages, pagesOf(data, page));
      },
      leave: filters.stop,
    };
  },
};

function headOf() {
  const words = WORDS.map((label) => h("th", { scope: "col" }, label));
  return h(
    "thead",
    {},
    h(
      "tr",
      {},
      words,
      NUMBERS.map((label) => h("th", { scope: "col", class: "number" }, label)),
    ),
  );
}

function noneOf(query) {
  const filtered = ["worker", "outcome", "before"].some((name) => query.get(name));
  const words = filtered ? "No update fits the filter." : "No update has arrived yet.";
  return h("tr", {}, h("td", { colspan: WORDS.length + NUMBERS.length, class: "quiet" }, words));
}

function pagesOf({ next_before: before }, page) {
  return [
    page.query.get("before") && h("a", { href: page.link({ before: null }), data: { key: "newest" } }, "Newest"),
    before !== null && h("a", { href: page.link({ before }), data: { key: "older" } }, "Older"),
  ];
}

const between = (from, to) => (from === null || to === null ? null : to - from);

function rowOf(update, page) {
  const { task, worker, outcome, leased_s: leased, arrived_s: arrived, mixed_s: mixed } = update;
  const numeric = (child) => h("td", { class: "number" }, child);
  const value = (name, text = number) => numeric(shown(name, update[name], text(update[name])));
  const data = { key: `task ${task}`, name: "task", value: task };
  const story = h("a", { href: `${page.prefix}/updates/${task}`, data }, number(task));
  const others = page.link({ worker, before: null });
  const who = h(
    "a",
    { class: "calm", href: others, data: { key: `worker of ${task}` } },
    update.name || `worker ${worker}`,
  );
  const badge = { class: "badge", data: { outcome: outcome === "applied" ? "applied" : "refused" } };
  return h(
    "tr",
    { data: { sequence: update.sequence } },
    h("th", { scope: "row" }, story),
    h("td", {}, who),
    h("td", {}, h("span", badge, plain(outcome ?? "not decided"))),
    ["staleness", "alpha_t", "tau", "t"].map((name) => value(name)),
    value("leased_s", duration),
    numeric(duration(between(leased, arrived))),
    numeric(duration(between(arrived, mixed))),
    ["device", "samples", "gradients"].map((name) => value(name)),
  );
}
