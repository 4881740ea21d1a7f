// Owns the table of workers: sorted, filtered and paged by the server; an admin can quarantine and readmit.

import { order, withQuery } from "./api.js";
import { fill, h, shown, table } from "./elements.js";
import { filters as filtersOf } from "./filters.js";
import { pager } from "./pager.js";
import { duration, number, refusals, total } from "./words.js";

const COLUMNS = [
  { name: "name", label: "Worker" },
  { name: "state", label: "State" },
  { name: "tasks", label: "Tasks", numeric: true },
  { name: "applied", label: "Mixed", numeric: true },
  { name: "refused", label: "Refused", numeric: true },
  { label: "Why" },
  { name: "mass", label: "Contribution", numeric: true },
  { name: "seconds", label: "A task takes", numeric: true },
  { name: "last_seen_s", label: "Last seen", numeric: true },
  { name: "device", label: "Device", numeric: true },
];
const STATES = ["idle", "working", "silent", "away", "quarantined"];
const ASKED = ["sort", "order", "text", "state", "page", "size"];

export const workers = {
  name: "Workers",
  twin: ({ prefix, query }) => withQuery(`${prefix}/workers.json`, query, ASKED),

  mount(main, page) {
    const state = { name: "state", label: "State", options: STATES };
    const filters = filtersOf(page, { name: "text", label: "Find" }, state, "page");
    const told = h("p", { class: "quiet", data: { name: "total" } });
    const trouble = h("div", { role: "alert" });
    const [head, body, dialog] = [h("thead"), h("tbody"), h("dialog", { "aria-labelledby": "ask" })];
    const pages = h("nav", { class: "pager", "aria-label": "Pages" });
    main.replaceChildren(
      h("div", { class: "head" }, h("h1", { tabindex: "-1" }, "Workers"), told),
      ...[filters.form, trouble, table("Workers", head, body), pages, dialog],
    );

    async function act(worker, what) {
      fill(trouble);
      try {
        await order(`${page.prefix}/workers/${worker.worker}/${what}`, page.session.csrf);
      } catch (error) {
        fill(trouble, h("p", { class: "notice" }, `${worker.name} stays as it is. ${error.message}`));
      }
      page.refresh();
    }
    const asked = (worker, what) => (what === "readmit" ? act(worker, what) : confirm(dialog, worker, act));
    const admin = page.session.role === "admin" && Boolean(page.session.csrf) && !page.ui;

    return {
      show(data) {
        filters.sync(page.query);
        told.dataset.value = data.total;
        told.textContent = data.total === 1 ? "1 worker" : `${number(data.total)} workers`;
        fill(head, headOf(page, admin));
        const row = (worker) => rowOf(worker, data.at_s, page.prefix, admin ? asked : null);
        fill(body, data.workers.length ? data.workers.map(row) : nobody(page.query, admin));
        fill(pages, pager(data, page));
      },
      leave: filters.stop,
    };
  },
};

// --- the table -------------------------------------------------------------------------------------------------------

function headOf(page, admin) {
  const [sorted, ascending] = [page.query.get("sort"), page.query.get("order") !== "desc"];
  const one = ({ name, label, numeric }) => {
    if (!name) return h("th", { scope: "col" }, label);
    const mine = sorted === name;
    const turned = mine ? ascending : numeric;
    const click = () => page.search({ sort: name, order: turned ? "desc" : "asc", page: null });
    const arrow = h("span", { "aria-hidden": "true" }, mine ? (ascending ? " ▲" : " ▼") : "");
    const sort = mine ? (ascending ? "ascending" : "descending") : "none";
    const button = { type: "button", class: "sort", data: { key: `sort ${name}` }, on: { click } };
    return h("th", { scope: "col", class: numeric && "number", "aria-sort": sort }, h("button", button, label, arrow));
  };
  return h("tr", {}, COLUMNS.map(one), admin && h("th", { scope: "col" }, "Do"));
}

function nobody(query, admin) {
  const words = query.get("text") || query.get("state") ? "No worker fits the filter." : "No worker has joined yet.";
  return h("tr", {}, h("td", { colspan: COLUMNS.length + admin, class: "quiet" }, words));
}

function rowOf(worker, now, prefix, act) {
  const { worker: i, name, state, why, refused, last_seen_s: seen } = worker;
  const numeric = (child) => h("td", { class: "number" }, child);
  const value = (of, text) => numeric(shown(of, worker[of], text(worker[of])));
  const ago = (at) => (now === undefined || at === null ? duration(at) : `${duration(Math.max(0, now - at))} ago`);
  const called = name || `worker ${i}`;
  const link = h("a", { href: `${prefix}/updates?worker=${i}`, data: { key: `worker ${i}` } }, called);
  return h(
    "tr",
    { data: { worker: i } },
    h("th", { scope: "row" }, link, !called.endsWith(` ${i}`) && h("small", { class: "beside" }, `#${i}`)),
    h("td", {}, h("span", { class: "badge", data: { state } }, state), why && h("small", {}, why)),
    value("tasks", number),
    value("applied", number),
    numeric(shown("refused", total(refused), number(total(refused)))),
    h("td", { class: "why" }, h("small", {}, refusals(refused))),
    value("mass", number),
    value("seconds", duration),
    numeric(shown("last_seen_s", seen, ago(seen))),
    value("device", number),
    act && h("td", { class: "do" }, buttonOf(worker, act)),
  );
}

// --- what an admin can do --------------------------------------------------------------------------------------------

function buttonOf(worker, act) {
  const what = worker.state === "quarantined" ? "readmit" : "quarantine";
  const label = what === "readmit" ? "Readmit" : "Quarantine";
  const data = { key: `do ${worker.worker}` };
  const on = { click: () => act(worker, what) };
  return h("button", { type: "button", class: "small", "aria-label": `${label} ${worker.name}`, data, on }, label);
}

function confirm(dialog, worker, act) {
  const close = () => dialog.close();
  const quarantine = () => {
    close();
    act(worker, "quarantine");
  };
  fill(
    dialog,
    h("h2", { id: "ask" }, `Quarantine ${worker.name}?`),
    h("p", {}, "It gets no more tasks, and what it pushes is refused, until it is readmitted."),
    h(
      "div",
      { class: "row" },
      h("button", { type: "button", class: "danger", on: { click: quarantine } }, "Quarantine"),
      h("button", { type: "button", on: { click: close } }, "Cancel"),
    ),
  );
  dialog.showModal();
}
