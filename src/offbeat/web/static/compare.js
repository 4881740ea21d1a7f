// Owns the comparison of runs: their curves over each other, the settings that differ, the results.

import { twin } from "./api.js";
import { chart, draw, empty, forget } from "./charts.js";
import { chosen, drawing, keyOf, metricsOf, switches } from "./curves.js";
import { card, fill, h, table } from "./elements.js";
import { at } from "./root.js";
import { number } from "./words.js";

export const compare = {
  name: "Compare",
  twin: ({ query }) => {
    const runs = query.getAll("run").map((name) => ["run", name]);
    return at(runs.length ? `/compare.json?${new URLSearchParams(runs)}` : "/runs.json");
  },

  mount(main, page) {
    const boxes = h("fieldset", { class: "boxes" });
    const controls = h("div", { class: "controls" });
    const curves = chart("Curves of the runs", 380);
    const legend = h("ul", { class: "legend", "aria-label": "Runs in the chart" });
    const [settings, results] = [h("div"), h("div")];
    const tables = [card("results", "Results", results), card("settings", "Settings that differ", settings)];
    const below = h("div", { class: "stack" }, card("curves", "Curves", controls, legend, curves), ...tables);
    main.replaceChildren(h("div", { class: "head" }, h("h1", { tabindex: "-1" }, "Compare runs")), boxes, below);
    let names = [];
    const choose = (name, on) => {
      const others = page.query.getAll("run").filter((one) => one !== name);
      page.search({ run: on ? [...others, name] : others });
    };
    const offer = () => {
      const runs = page.query.getAll("run");
      fill(
        boxes,
        h("legend", {}, "Runs"),
        names.map((name) => boxOf(name, runs.includes(name), choose)),
      );
    };
    const listed = ({ data }) => {
      names = data.runs.map((run) => run.name);
      offer();
    };
    twin(at("/runs.json")).then(listed, () => {}); // without the list, what the address says is still compared

    return {
      show(data) {
        offer();
        const all = Object.entries(data.curves ?? {});
        below.hidden = !all.length;
        if (!all.length) return;
        const metrics = metricsOf(all.map(([, points]) => points));
        const choice = chosen(page.query, metrics);
        fill(controls, switches(choice, metrics, page.search));
        fill(
          legend,
          all.map(([name], i) => keyOf(linkTo(name), i)),
        );
        if (choice.metric) draw(curves, drawing(all, choice));
        else empty(curves, "Nothing has been evaluated in these runs.");
        const order = all.map(([name]) => name);
        fill(settings, grid("Settings that differ", data.settings, order, String, "The settings are the same."));
        fill(results, grid("Results", data.results, order, number, "There are no results yet."));
      },
      leave: () => forget(main),
    };
  },
};

const linkTo = (name) => h("a", { href: at(`/runs/${encodeURIComponent(name)}/`), data: { key: name } }, name);

function boxOf(name, checked, choose) {
  const on = { change: (event) => choose(name, event.target.checked) };
  const box = h("input", { type: "checkbox", value: name, checked, data: { key: `run ${name}` }, on });
  return h("label", {}, box, ` ${name}`);
}

/** A line for each name, a column for each run; `text` says how numbers are written. */
function grid(caption, rows, runs, text, none) {
  if (!rows?.length) return h("p", { class: "quiet" }, none);
  const column = (run) => h("th", { scope: "col", class: "number" }, run);
  const cell = (row, run) => {
    const value = row.values[run] ?? null;
    return h("td", { class: "number", data: { name: `${row.name} ${run}`, value: value ?? "" } }, said(value, text));
  };
  const line = (row) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, row.name),
      runs.map((run) => cell(row, run)),
    );
  const head = h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Name"), runs.map(column)));
  return table(caption, head, h("tbody", {}, rows.map(line)));
}

function said(value, text) {
  if (typeof value === "number") return text(value);
  if (typeof value === "boolean") return value ? "yes" : "no";
  return value !== null && typeof value === "object" ? JSON.stringify(value) : (value ?? "–");
}
