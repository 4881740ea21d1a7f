// Owns the overview: what is trained, how it goes, how far it is; an admin can pause and resume the run.

import { order } from "./api.js";
import { chart, draw, empty, forget } from "./charts.js";
import { chosen, drawing, keyOf, metricsOf, switches, withAverage } from "./curves.js";
import { card, fill, h, shown } from "./elements.js";
import { AVERAGED, about, count, duration, number, OUTCOMES, plain, total } from "./words.js";

const LEVELS = { good: "OK", warning: "Warning", bad: "Problem" };

export const overview = {
  name: "Overview",
  twin: ({ prefix }) => `${prefix}/overview.json`,

  mount(main, page) {
    const heading = h("h1", { tabindex: "-1" }, "Overview");
    const [facts, health] = [h("div", { class: "facts" }), h("p", { class: "health" }, "Loading.")];
    const [tiles, more] = [h("dl", { class: "tiles" }), h("dl", { class: "pairs" })];
    const [controls, refused] = [h("div", { class: "controls" }), h("div", { class: "stack" })];
    const curve = chart("Metric curve", 340);
    const legend = h("ul", { class: "legend", "aria-label": "Models in the chart" });
    const trouble = h("div", { role: "alert" });
    const aside = [card("so-far", "So far", more), card("refused", "Refused updates", refused)];
    main.replaceChildren(
      h("div", { class: "head" }, heading, facts),
      ...[trouble, health, tiles],
      h("div", { class: "columns" }, card("curve", "Curve", controls, legend, curve), h("div", { class: "stack" }, ...aside)),
    );
    let before = "";
    const admin = page.session.role === "admin" && Boolean(page.session.csrf) && !page.ui;

    async function act(what) {
      fill(trouble);
      try {
        await order(`${page.prefix}/${what}`, page.session.csrf);
      } catch (error) {
        fill(trouble, h("p", { class: "notice" }, `The run goes on as before. ${error.message}`));
      }
      page.refresh();
    }

    return {
      show(data) {
        page.tell(data.run);
        page.title(`Epoch ${number(data.t)}${data.epochs === null ? "" : ` of ${number(data.epochs)}`}`);
        const all = metricsOf([[...data.curve, { metrics: data.metrics }]]);
        const metrics = all.filter((name) => !isOfAverage(name, all));
        const choice = chosen(page.query, metrics);
        heading.textContent = data.run.task ?? data.run.name;
        fill(facts, [...described(data.run, data.paused), admin && buttonOf(data, act)]);
        fill(health, healthOf(data.health));
        fill(tiles, tilesOf(data, choice.metric));
        fill(more, pairsOf(data, choice.metric));
        fill(refused, refusedOf(data.rejected));
        const now = JSON.stringify([choice, metrics]);
        if (now !== before) fill(controls, choice.metric && switches(choice, metrics, page.search));
        before = now;
        const curves = withAverage(data.run.name, data.curve, choice.metric);
        fill(legend, curves.length > 1 && curves.map(([name], i) => keyOf(name, i)));
        if (choice.metric && data.curve.length) draw(curve, drawing(curves, choice));
        else empty(curve, "Nothing has been evaluated yet.");
      },
      leave: () => forget(main),
    };
  },
};

function described(run, paused) {
  return [
    h("span", { class: "badge", data: { state: run.state } }, run.state),
    paused && h("span", { class: "badge", data: { state: "paused" } }, "paused"),
    run.rule && h("code", {}, run.rule),
    h("span", { class: "quiet" }, run.served ? "served to workers" : "simulated"),
  ];
}

function buttonOf({ run, paused }, act) {
  if (!run.served || run.state !== "running") return null;
  const [what, label] = paused ? ["resume", "Resume"] : ["pause", "Pause"];
  const on = { click: () => act(what) };
  return h("button", { type: "button", class: "small", data: { key: "pause" }, on }, label);
}

function healthOf({ level, sentence }) {
  const dot = h("span", { class: "dot", data: { level }, "aria-hidden": "true" });
  return [dot, h("strong", { data: { level } }, LEVELS[level] ?? plain(level)), `: ${sentence}`];
}

// --- the numbers -----------------------------------------------------------------------------------------------------

function tilesOf(data, metric) {
  const {
    t,
    epochs,
    metrics,
    metrics_t: at,
    updates_per_minute: rate,
    in_flight: busy,
    queued,
    workers,
    silent,
    eta_s: eta,
  } = data;
  const value = metric === null ? null : metrics[metric];
  const named =
    metric === null ? shown("metric", null, number(null)) : shown(`metrics.${metric}`, value, number(value));
  const evaluated = at === null ? "not evaluated yet" : ["at epoch ", shown("metrics_t", at, number(at))];
  const end = data.run.state === "finished" ? "done" : duration(eta);
  return [
    tile("Epoch", [shown("t", t, number(t)), ofEpochs(epochs)], epochs === null ? "no end is set" : bar(t, epochs)),
    tile(metric === null ? "Metric" : plain(metric), named, evaluated),
    tile("Updates per minute", shown("updates_per_minute", rate, about(rate)), "mixed into the model"),
    tile("In flight", shown("in_flight", busy, number(busy)), [
      "tasks; ",
      shown("workers", workers, number(workers)),
      " workers",
      silent ? [", ", shown("silent", silent, number(silent)), " silent"] : null,
    ]),
    tile("Queued", shown("queued", queued, number(queued)), "updates to be mixed"),
    tile("Time to the end", shown("eta_s", eta, end), ending(data)),
  ];
}

function tile(label, value, note) {
  return h("div", { class: "tile" }, h("dt", {}, label), h("dd", {}, value, h("small", {}, note)));
}

const bar = (t, epochs) => h("progress", { max: epochs || 1, value: t, "aria-label": "Epochs done" });

const ofEpochs = (n) => n !== null && h("small", { class: "of" }, " of ", shown("epochs", n, number(n)));

function ending({ run, eta_s: eta, at_s: at }) {
  const taken = shown("at_s", at, duration(at));
  if (run.state === "finished") return ["took ", taken];
  return [eta === null ? "not known; so far " : "at this rate; so far ", taken];
}

const isOfAverage = (name, names) => name.endsWith(AVERAGED) && names.includes(name.slice(0, -AVERAGED.length));

function pairsOf(data, metric) {
  const pair = (label, name, value, text) =>
    h("div", {}, h("dt", {}, label), h("dd", {}, shown(name, value, text(value))));
  const names = Object.keys(data.metrics);
  const label = (name) =>
    isOfAverage(name, names) ? `${plain(name.slice(0, -AVERAGED.length))}, averaged model` : plain(name);
  const others = Object.entries(data.metrics).filter(([name]) => name !== metric);
  return [
    ...others.map(([name, value]) => pair(label(name), `metrics.${name}`, value, number)),
    pair("updates mixed", "applied", data.applied, number),
    pair("gradients", "gradients", data.gradients, number),
    pair("staleness, mean", "staleness_mean", data.staleness_mean, about),
    pair("staleness, largest", "staleness_largest", data.staleness_largest, number),
    pair("pushed again", "duplicates", data.duplicates, number),
  ];
}

function refusedOf(rejected) {
  const all = Object.entries(rejected).filter(([, n]) => n);
  all.sort((a, b) => b[1] - a[1]);
  if (!all.length) return h("p", { class: "quiet" }, "No update was refused.");
  const row = ([outcome, n]) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, plain(outcome), h("small", {}, OUTCOMES[outcome] ?? "")),
      h("td", { class: "number" }, shown(`rejected.${outcome}`, n, number(n))),
    );
  const names = h(
    "tr",
    {},
    h("th", { scope: "col" }, "outcome"),
    h("th", { scope: "col", class: "number" }, "updates"),
  );
  const caption = h("caption", { class: "unseen" }, `Refused updates by outcome, ${count(total(rejected), "update")}`);
  return h("table", { class: "slim" }, caption, h("thead", {}, names), h("tbody", {}, all.map(row)));
}
