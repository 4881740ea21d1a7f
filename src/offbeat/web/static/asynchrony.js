// Owns the view of what asynchrony does: how stale, what weight, who worked when, how many at once.

import { chart, draw, empty, forget } from "./charts.js";
import { card, fill, h, shown } from "./elements.js";
import { timeline } from "./timeline.js";
import { about, count, number, unit } from "./words.js";

const TOLD_MAX = 12; // bins that are read out
const CROWD = 40; // bubbles beyond this many are smaller
const HOVER = "%{text}<extra></extra>";

export const asynchrony = {
  name: "Asynchrony",
  twin: ({ prefix }) => `${prefix}/asynchrony.json`,

  mount(main, page) {
    const part = (name, height) => ({ said: h("p", { class: "quiet" }), place: chart(name, height) });
    const staleness = part("Histogram of staleness", 300);
    const weights = part("alpha_t against staleness", 300);
    const tasks = {
      ...part("Timeline of tasks", 320),
      legend: h("ul", { class: "legend", "aria-label": "Legend" }),
      share: h("div", { class: "stack" }),
    };
    const busy = part("Tasks in flight over time", 240);
    const said = h("p", { class: "quiet" }, "How stale updates are, what they weigh, and who works when.");
    main.replaceChildren(
      h("div", { class: "head" }, h("h1", { tabindex: "-1" }, "Asynchrony"), said),
      h(
        "div",
        { class: "halves" },
        card("staleness", "Staleness of mixed updates", staleness.said, staleness.place),
        card("weights", "What an update weighs", weights.said, weights.place),
      ),
      card("timeline", "Tasks of each worker", tasks.said, tasks.legend, tasks.place, tasks.share),
      card("in-flight", "In flight over time", busy.said, busy.place),
    );
    return {
      show(data) {
        showStaleness(data.staleness, staleness);
        showWeights(data.weights, data.function, weights);
        timeline(data.timeline, tasks, (task) => page.go(`${page.prefix}/updates/${task}`));
        showInFlight(data.in_flight, busy);
      },
      leave: () => forget(main),
    };
  },
};

function nothing({ said, place }, words) {
  fill(said);
  empty(place, words);
}

// --- staleness -------------------------------------------------------------------------------------------------------

/** The last whole number of a bin, which goes from `from` up to and without `to`. */
const last = (bin) => Math.max(bin.from, bin.to - 1);

const span = (bin) => (last(bin) === bin.from ? number(bin.from) : `${number(bin.from)} to ${number(last(bin))}`);

function showStaleness(bins, { said, place }) {
  const all = bins.reduce((sum, bin) => sum + bin.count, 0);
  if (!all) return nothing({ said, place }, "No update has been mixed yet.");
  let seen = 0;
  const middle = bins.find((bin) => (seen += bin.count) * 2 >= all);
  const half = `half of them at staleness ${number(last(middle))} or below`;
  fill(said, `${count(all, "update")}; ${half}, the stalest at ${span(bins.findLast((bin) => bin.count))}.`);
  const some = bins.filter((bin) => bin.count).slice(0, TOLD_MAX);
  const words = (bin) => `staleness ${span(bin)}<br>${count(bin.count, "update")}, ${about((100 * bin.count) / all)} %`;
  return draw(place, (inks) => ({
    label: `Histogram of staleness: ${some.map((bin) => `${span(bin)}: ${number(bin.count)}`).join(", ")}`,
    traces: [
      {
        ...{ type: "bar", hovertemplate: HOVER, textposition: "none", marker: { color: inks.accent } },
        x: bins.map((bin) => (bin.from + last(bin)) / 2),
        y: bins.map((bin) => bin.count),
        width: bins.map((bin) => (last(bin) - bin.from + 1) * 0.9),
        text: bins.map(words),
      },
    ],
    layout: {
      xaxis: { title: { text: "staleness" } },
      yaxis: { title: { text: "updates" }, rangemode: "tozero" },
      bargap: 0,
    },
  }));
}

// --- weights ---------------------------------------------------------------------------------------------------------

function showWeights(weights, curve, { said, place }) {
  if (!weights.length && !curve.length) return nothing({ said, place }, "No update has been mixed yet.");
  const most = Math.max(1, ...weights.map((weight) => weight.count));
  const line = curve.length ? "The line is the weight that the rule gives to each staleness. " : "";
  fill(said, `${line}A bubble is all updates of one staleness and alpha_t; a larger one is more updates.`);
  return draw(place, (inks) => ({
    label: `alpha_t against staleness, in ${count(weights.length, "bubble")}${ends(curve)}`,
    traces: [lineOf(curve, inks), bubblesOf(weights, most, inks)],
    layout: {
      xaxis: { title: { text: "staleness" } },
      yaxis: { title: { text: "alpha_t" }, rangemode: "tozero" },
    },
  }));
}

function ends(curve) {
  if (!curve.length) return "";
  const say = ({ staleness, alpha_t: weight }) => `${about(weight)} at ${number(staleness)}`;
  return `; the rule's curve goes from ${say(curve[0])} to ${say(curve.at(-1))}`;
}

function lineOf(curve, { accent }) {
  return {
    ...{ type: "scatter", mode: "lines", hoverinfo: "skip", line: { color: accent, width: 2 } },
    x: curve.map((point) => point.staleness),
    y: curve.map((point) => point.alpha_t),
  };
}

function bubblesOf(weights, most, { warm, card: edge }) {
  const widest = weights.length > CROWD ? 11 : 21;
  const size = weights.map((weight) => 5 + widest * Math.sqrt(weight.count / most));
  const words = ({ staleness, alpha_t: weight, count: n }) =>
    `staleness ${number(staleness)}<br>alpha_t ${number(weight)}<br>${count(n, "update")}`;
  return {
    ...{ type: "scatter", mode: "markers", hovertemplate: HOVER, text: weights.map(words) },
    x: weights.map((weight) => weight.staleness),
    y: weights.map((weight) => weight.alpha_t),
    marker: { size, color: warm, opacity: 0.6, line: { color: edge, width: weights.length > CROWD ? 0 : 1 } },
  };
}

// --- in flight -------------------------------------------------------------------------------------------------------

function showInFlight(points, { said, place }) {
  if (!points.length) return nothing({ said, place }, "No task has been given yet.");
  const [now, peak] = [points.at(-1).in_flight, Math.max(...points.map((point) => point.in_flight))];
  fill(said, "At the end ", shown("in_flight.last", now, number(now)), `, at most ${number(peak)}.`);
  const time = unit(points.at(-1).at_s);
  return draw(place, (inks) => ({
    label: `Tasks in flight over time: at the end ${number(now)}, at most ${number(peak)}`,
    traces: [
      {
        ...{ type: "scatter", mode: "lines", fill: "tozeroy", fillcolor: inks.soft },
        x: points.map((point) => point.at_s / time.seconds),
        y: points.map((point) => point.in_flight),
        line: { color: inks.accent, width: 1.5, shape: "hv" },
        hovertemplate: `%{y} in flight<br>%{x:.4~g} ${time.name}<extra></extra>`,
      },
    ],
    layout: {
      xaxis: { title: { text: `time (${time.name})` } },
      yaxis: { title: { text: "tasks" }, rangemode: "tozero" },
    },
  }));
}
