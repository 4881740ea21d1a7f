// Owns the timeline: a line for each worker, a bar for each task from lease to arrival, within it what the worker did,
// and a thin one until it was mixed.

import { draw, empty, safe, short, touch } from "./charts.js";
import { fill, h, shown } from "./elements.js";
import { about, count, duration, number, plain, unit } from "./words.js";

const LINE_PX = 15;
const TOUCH = "Touch a bar for its story.";
const MOUSE = "Point at a bar to read it, click it for its story; drag to zoom in, double-click to zoom out.";
const SPENT = [
  ["train_s", "training"],
  ["download_s", "download"],
  ["upload_s", "upload"],
  ["waiting_s", "waiting"],
  ["queued_s", "in the server's queue"],
];
const narrow = window.matchMedia("(max-width: 640px)");

/** Shows it; `open(task)` is called for the bar that is clicked. */
export function timeline(data, { said, legend, share, place }, open) {
  const { workers, tasks, to_s: to } = data;
  if (!tasks.length) {
    fill(said);
    fill(legend);
    fill(share);
    return empty(place, "No task has been given yet.");
  }
  const bars = barsOf(tasks, workers, to);
  const stalest = Math.max(1, ...tasks.map((task) => task.staleness ?? 0));
  const words = `The latest ${count(tasks.length, "task")} of ${count(workers.length, "worker")}.`;
  fill(said, `${words} ${touch.matches ? TOUCH : MOUSE}`);
  fill(legend, legendOf(stalest, new Set(bars.map((bar) => bar.kind)), bars.some(moved)));
  fill(share, shareOf(data.spent));
  return draw(
    place,
    (inks) => drawing(bars, data, stalest, inks),
    (point) => open(point.customdata),
  );
}

function legendOf(stalest, kinds, links) {
  const key = (kind) => h("span", { class: `key ${kind}`, "aria-hidden": "true" });
  return [
    h("li", {}, "staleness 0 ", key("scale"), ` ${number(stalest)}`),
    h("li", {}, key("task"), "lease to arrival"),
    links && h("li", {}, key("move"), "of that, download and upload"),
    h("li", {}, key("wait"), "waits to be mixed"),
    kinds.has("open") && h("li", {}, key("open"), "no answer"),
    kinds.has("refused") && h("li", {}, key("refused"), "refused"),
  ];
}

/** Where the time of all these tasks went, as one bar and in words. */
function shareOf(spent) {
  const all = Object.values(spent).reduce((sum, seconds) => sum + seconds, 0);
  if (!all) return null;
  const parts = SPENT.filter(([name]) => spent[name] > 0);
  const piece = ([name]) => {
    const part = h("span", { class: `part ${name}` });
    part.style.setProperty("flex-grow", String(spent[name] / all));
    return part;
  };
  const words = ([name, label]) =>
    h(
      "li",
      {},
      h("span", { class: `key ${name}`, "aria-hidden": "true" }),
      `${label} `,
      shown(`timeline.spent.${name}`, spent[name], `${about((100 * spent[name]) / all)} %`),
    );
  return [
    h("h3", {}, "Where the time of these tasks went"),
    h("div", { class: "share", "aria-hidden": "true" }, ...parts.map(piece)),
    h("ul", { class: "legend", "aria-label": "Where the time went" }, ...parts.map(words)),
  ];
}

// --- bars ------------------------------------------------------------------------------------------------------------

/** With their ends: what has not arrived ends where it was released, where the worker got its next task, or now. */
function barsOf(tasks, workers, to) {
  const lines = new Map(workers.map((worker, i) => [worker.worker, { i, name: worker.name }]));
  const next = new Map();
  const bar = (task) => {
    const given = next.get(task.worker);
    next.set(task.worker, task.leased_s);
    const end = task.arrived_s ?? task.released_s ?? given ?? to;
    return { ...task, ...lines.get(task.worker), kind: kindOf(task), end, over: end !== to };
  };
  const known = tasks.filter((task) => lines.has(task.worker));
  return known.sort((a, b) => b.leased_s - a.leased_s).map(bar);
}

function kindOf({ arrived_s: arrived, outcome }) {
  if (arrived === null) return "open";
  return outcome === "applied" || outcome === null ? "task" : "refused";
}

/** Everything about a task, for whoever points at it. */
function told(bar) {
  const { leased_s: leased, arrived_s: arrived, mixed_s: mixed, staleness, outcome, spent } = bar;
  const lines = [`<b>Task ${number(bar.task)}</b>, ${safe(bar.name)}`, `leased at ${duration(leased)}`];
  if (arrived !== null) lines.push(`arrived at ${duration(arrived)}, after ${duration(arrived - leased)}`);
  else lines.push(`${bar.over ? "released without an answer" : "no answer yet"}, after ${duration(bar.end - leased)}`);
  if (spent) lines.push(spentOn(bar));
  if (mixed !== null && arrived !== null) lines.push(`mixed at ${duration(mixed)}, ${duration(mixed - arrived)} later`);
  if (staleness !== null) lines.push(`staleness ${number(staleness)}`);
  if (outcome !== null && arrived !== null) lines.push(safe(plain(outcome)));
  return lines.join("<br>");
}

const moved = ({ spent }) => spent !== null && spent.download_s + spent.upload_s > 0;

function spentOn({ leased_s: leased, arrived_s: arrived, spent }) {
  const { download_s: download, train_s: train, upload_s: upload } = spent;
  const waiting = Math.max(0, arrived - leased - download - train - upload);
  const parts = [
    ["download", download],
    ["training", train],
    ["waiting", waiting],
    ["upload", upload],
  ];
  return parts.map(([name, seconds]) => `${name} ${duration(seconds)}`).join(", ");
}

/** The worker's download at the beginning of its bar, its upload at the end. */
function movesOf(bars) {
  const some = bars.filter(moved);
  return [
    ...some.map((bar) => ({ ...bar, from: bar.leased_s, until: Math.min(bar.end, bar.leased_s + bar.spent.download_s) })),
    ...some.map((bar) => ({ ...bar, from: Math.max(bar.leased_s, bar.end - bar.spent.upload_s), until: bar.end })),
  ];
}

// --- for plotly ------------------------------------------------------------------------------------------------------

function drawing(bars, { from_s: from, to_s: to, workers }, stalest, inks) {
  const time = unit(to);
  const trace = (mine, width, begin, end, marker) => ({
    ...{ type: "bar", orientation: "h", width, marker, hovertemplate: "%{hovertext}<extra></extra>" },
    base: mine.map((bar) => bar[begin] / time.seconds),
    x: mine.map((bar) => (bar[end] - bar[begin]) / time.seconds),
    y: mine.map((bar) => bar.i),
    customdata: mine.map((bar) => bar.task),
    hovertext: mine.map(told),
  });
  const of = (kind) => bars.filter((bar) => bar.kind === kind);
  const waited = bars.filter((bar) => bar.mixed_s !== null && bar.arrived_s !== null && bar.mixed_s > bar.arrived_s);
  return {
    label: `Timeline of ${count(bars.length, "task")} of ${count(workers.length, "worker")}, coloured by staleness`,
    traces: [
      trace(of("task"), 0.74, "leased_s", "end", applied(of("task"), stalest, inks)),
      trace(movesOf(bars), 0.3, "from", "until", { color: inks.move }),
      trace(of("refused"), 0.74, "leased_s", "end", hatched(inks)),
      trace(of("open"), 0.74, "leased_s", "end", { color: inks.soft, line: { color: inks.quiet, width: 1 } }),
      trace(waited, 0.24, "arrived_s", "mixed_s", { color: inks.ink }),
    ],
    layout: {
      ...{ barmode: "overlay", hovermode: "closest", margin: { l: 20, r: 12, t: 4, b: 40 } },
      height: Math.max(140, 70 + LINE_PX * workers.length),
      xaxis: { title: { text: `time (${time.name})` }, range: [from / time.seconds, to / time.seconds] },
      yaxis: {
        ...{ tickfont: { size: 10 }, range: [workers.length - 0.4, -0.6], showgrid: false, fixedrange: true },
        tickvals: workers.map((_, i) => i),
        ticktext: workers.map((worker) => short(worker.name, narrow.matches ? 12 : 20)),
      },
    },
  };
}

function applied(mine, stalest, inks) {
  const line = { color: inks.card, width: 0.5 };
  return { color: mine.map((bar) => bar.staleness), colorscale: inks.scale, cmin: 0, cmax: stalest, line };
}

function hatched({ bad, card }) {
  const pattern = { shape: "/", fgcolor: bad, bgcolor: card, size: 5, solidity: 0.45 };
  return { color: card, pattern, line: { color: bad, width: 1 } };
}
