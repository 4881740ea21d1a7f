// Owns the list of runs in a folder, from which some can be compared.

import { fill, h, shown, table } from "./elements.js";
import { at } from "./root.js";
import { count, number, plain } from "./words.js";

const METRICS_MAX = 4;

export const runs = {
  name: "Runs",
  twin: () => at("/runs.json"),

  mount(main, page) {
    const [said, head, body] = [h("p", { class: "quiet" }), h("thead"), h("tbody")];
    const picked = new Set();
    const compare = h("button", { type: "submit", disabled: true }, "Compare");
    const note = h("span", { class: "quiet" }, "Choose two or more.");
    const pick = (name, on) => {
      picked[on ? "add" : "delete"](name);
      compare.disabled = picked.size < 2;
      note.textContent = picked.size < 2 ? "Choose two or more." : `${count(picked.size, "run")} chosen.`;
    };
    const submit = (event) => {
      event.preventDefault();
      page.go(at(`/compare?${new URLSearchParams([...picked].map((name) => ["run", name]))}`));
    };
    const foot = h("div", { class: "row" }, compare, note);
    main.replaceChildren(
      h("div", { class: "head" }, h("h1", { tabindex: "-1" }, "Runs"), said),
      h("form", { class: "stack", on: { submit } }, table("Runs", head, body), foot),
    );
    return {
      show({ runs: all }) {
        said.textContent = all.length
          ? `${count(all.length, "run")} in this folder`
          : "There is no run in this folder yet.";
        foot.hidden = all.length < 2;
        const metrics = [...new Set(all.flatMap((run) => Object.keys(run.metrics ?? {})))].slice(0, METRICS_MAX);
        fill(head, headOf(metrics));
        fill(
          body,
          all.map((run) => rowOf(run, metrics, picked, pick)),
        );
      },
    };
  },
};

function headOf(metrics) {
  const column = (label, numeric) => h("th", { scope: "col", class: numeric && "number" }, label);
  const words = ["Run", "State", "Task", "Rule"].map((label) => column(label));
  const pick = h("th", { scope: "col" }, h("span", { class: "unseen" }, "Compare"));
  return h(
    "tr",
    {},
    pick,
    words,
    column("Epoch", true),
    metrics.map((name) => column(plain(name), true)),
  );
}

function rowOf(run, metrics, picked, pick) {
  const { name, state, metrics: values } = run;
  const box = h("input", {
    ...{ type: "checkbox", value: name, "aria-label": `Compare ${name}`, checked: picked.has(name) },
    data: { key: `pick ${name}` },
    on: { change: (event) => pick(name, event.target.checked) },
  });
  const link = h("a", { href: at(`/runs/${encodeURIComponent(name)}/`), data: { key: `run ${name}` } }, name);
  const value = (of, found) => h("td", { class: "number" }, shown(of, found, number(found)));
  return h(
    "tr",
    { data: { run: name } },
    h("td", { class: "pick" }, box),
    h("th", { scope: "row" }, link),
    h("td", {}, h("span", { class: "badge", data: { state } }, state)),
    h("td", {}, run.task),
    h("td", {}, h("code", {}, run.rule)),
    value("t", run.t),
    metrics.map((of) => value(`metrics.${of}`, values?.[of])),
  );
}
