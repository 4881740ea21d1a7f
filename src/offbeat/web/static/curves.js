// Owns curves of metrics: what they are drawn against, and how. Used by the overview and by comparisons.

import { safe } from "./charts.js";
import { h, segments } from "./elements.js";
import { AVERAGED, count, duration, number, plain, unit } from "./words.js";

const AXES = {
  epochs: { label: "Epochs", of: (point) => point.t, say: (point) => `epoch ${number(point.t)}` },
  gradients: { label: "Gradients", of: (point) => point.gradients, say: (point) => count(point.gradients, "gradient") },
  time: { label: "Time", of: (point) => point.at_s, say: (point) => duration(point.at_s) },
};
const MARKED_MAX = 30; // with fewer points than this, each is marked
const SERIES = 8; // colours; further curves are dashed
const ONCE = { name: "", seconds: 1 };

/** Which axis and metric the address asks for. */
export function chosen(query, metrics) {
  const axis = Object.hasOwn(AXES, query.get("x")) ? query.get("x") : "epochs";
  return { axis, metric: metrics.includes(query.get("metric")) ? query.get("metric") : (metrics[0] ?? null) };
}

/** The names of the metrics in curves; accuracy first, because people look for it. */
export function metricsOf(curves) {
  const ends = curves.flatMap((points) => [points[0], points.at(-1)]).filter(Boolean);
  const names = [...new Set(ends.flatMap((point) => Object.keys(point.metrics)))];
  return names.sort((a, b) => b.includes("accuracy") - a.includes("accuracy"));
}

/** The switches of axis and metric. */
export function switches({ axis, metric }, metrics, search) {
  const axes = Object.entries(AXES).map(([name, { label }]) => [name, label]);
  const named = metrics.map((name) => [name, plain(name)]);
  return [
    metrics.length > 1 && segments("Metric", "metric", named, metric, (name) => search({ metric: name })),
    segments("Against", "x", axes, axis, (name) => search({ x: name === "epochs" ? null : name })),
  ];
}

/** A run's curve of a metric and, where there is one, that of its averaged model. */
export function withAverage(name, points, metric) {
  const mean = `${metric}${AVERAGED}`;
  if (!points.some((point) => mean in point.metrics)) return [[name, points]];
  const averaged = points.map((point) => ({ ...point, metrics: { [metric]: point.metrics[mean] } }));
  return [
    ["newest version", points],
    ["averaged model", averaged],
  ];
}

/** A line of a legend; `said` is the curve's name, or a link. */
export function keyOf(said, i) {
  const line = { class: "key line", "aria-hidden": "true", data: { series: (i % SERIES) + 1, again: i >= SERIES } };
  return h("li", {}, h("span", line), said);
}

/** What is to be drawn: `curves` is [[name, points], ...]. */
export function drawing(curves, { axis, metric }) {
  const longest = Math.max(0, ...curves.map(([, points]) => points.at(-1)?.at_s ?? 0));
  const time = axis === "time" ? unit(longest) : ONCE;
  const titles = { epochs: "epoch t", gradients: "gradients", time: `time (${time.name})` };
  return (inks) => ({
    label: curves.map(([name, points]) => summary(name, points, metric, AXES[axis])).join("; "),
    traces: curves.map(([name, points], i) => ({
      ...{ type: "scatter", mode: points.length < MARKED_MAX ? "lines+markers" : "lines", marker: { size: 5 } },
      x: points.map((point) => AXES[axis].of(point) / time.seconds),
      y: points.map((point) => point.metrics[metric] ?? null),
      text: points.map((point) => told(curves.length > 1 ? name : "", point, metric, AXES[axis])),
      hovertemplate: "%{text}<extra></extra>",
      line: { color: inks.series[i % inks.series.length], width: 2, dash: i < inks.series.length ? "solid" : "dash" },
    })),
    layout: {
      ...{ uirevision: `${axis} ${metric}`, hovermode: "closest" },
      xaxis: { title: { text: titles[axis] }, rangemode: "tozero" },
      yaxis: { title: { text: safe(plain(metric)) } },
    },
  });
}

function told(name, point, metric, { say }) {
  const lines = [`${safe(plain(metric))} ${number(point.metrics[metric])}`, say(point)];
  return (name ? [`<b>${safe(name)}</b>`, ...lines] : lines).join("<br>");
}

/** For those who do not see it. */
function summary(name, points, metric, { label, say }) {
  const measured = points.filter((point) => Number.isFinite(point.metrics[metric]));
  if (!measured.length) return `${name}: no ${plain(metric)} yet`;
  const at = (point) => `${number(point.metrics[metric])} at ${say(point)}`;
  return `${name}: ${plain(metric)} against ${label.toLowerCase()}, from ${at(measured[0])} to ${at(measured.at(-1))}`;
}
