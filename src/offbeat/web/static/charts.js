// Owns drawing: plotly is fetched when the first chart is to be drawn, and charts follow the theme.
//
// Names from outside go through `safe`: plotly reads some markup in texts.

import { h } from "./elements.js";
import { at } from "./root.js";

const LIBRARY = at("/static/plotly.min.js");
export const touch = window.matchMedia("(pointer: coarse)");
const CONFIG = { displayModeBar: false, responsive: true, doubleClick: "reset", showTips: false };
const INKS = ["ink", "quiet", "line", "card", "accent", "soft", "bad", "warm", "move"];
const LOADING = "The chart is being loaded.";
const FAILED = "The chart could not be loaded; its numbers are in the JSON, which the foot of the page links to.";
const drawn = new Map();
let library = null;

/** A place for a chart. */
export function chart(name, height = 320) {
  const place = h("div", { class: "chart", role: "img", "aria-label": name }, h("p", { class: "quiet" }, LOADING));
  place.style.setProperty("--height", `${height}px`);
  return place;
}

/** Draws into it: `make(colours)` answers {label, traces, layout}; the newest call wins. */
export async function draw(place, make, clicked = null) {
  drawn.set(place, { make, clicked });
  let plotly;
  try {
    plotly = await loaded();
  } catch {
    return place.replaceChildren(h("p", { class: "notice" }, FAILED));
  }
  if (drawn.get(place)?.make === make) render(plotly, place);
}

/** Says in words that there is nothing to draw. */
export function empty(place, text) {
  clear(place);
  place.classList.add("none");
  place.setAttribute("aria-label", text);
  place.replaceChildren(h("p", { class: "quiet" }, text));
}

/** Ends the charts within an element. */
export function forget(root) {
  for (const place of [...drawn.keys()]) if (root.contains(place)) clear(place);
}

function clear(place) {
  drawn.delete(place);
  if (place.classList.contains("js-plotly-plot")) window.Plotly.purge(place);
}

function loaded() {
  library ??= new Promise((resolve, reject) => {
    const script = h("script", { src: LIBRARY, async: true });
    script.addEventListener("load", () => resolve(window.Plotly));
    script.addEventListener("error", () => {
      library = null;
      script.remove();
      reject(new Error("plotly could not be loaded"));
    });
    document.head.append(script);
  });
  return library;
}

function render(plotly, place) {
  const { make, clicked } = drawn.get(place);
  const inks = colours();
  const { label, traces, layout } = make(inks);
  place.classList.remove("none");
  place.setAttribute("aria-label", label);
  if (!place.classList.contains("js-plotly-plot")) place.replaceChildren();
  const first = place.childElementCount === 0;
  if (layout.height) place.style.setProperty("--height", `${layout.height}px`);
  plotly.react(place, traces, dressed(layout, inks), CONFIG);
  if (first && clicked) place.on("plotly_click", (event) => drawn.get(place)?.clicked?.(event.points[0]));
}

document.addEventListener("offbeat:theme", () => {
  if (!window.Plotly) return;
  for (const place of drawn.keys()) render(window.Plotly, place);
});

/** The theme's colours, as the style sheet says them. */
function colours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  const scale = ["stale-0", "stale-1", "stale-2", "stale-3"].map(of);
  return {
    ...Object.fromEntries(INKS.map((name) => [name, of(name)])),
    series: [1, 2, 3, 4, 5, 6, 7, 8].map((i) => of(`series-${i}`)),
    scale: scale.map((colour, i) => [i / (scale.length - 1), colour]),
  };
}

function dressed(layout, inks) {
  const { line, quiet, card, ink } = inks;
  const font = { family: getComputedStyle(document.body).fontFamily, size: 12, color: quiet };
  const axis = (own) => ({
    ...{ gridcolor: line, linecolor: line, tickcolor: line, zeroline: false },
    ...{ automargin: true, fixedrange: touch.matches, ...own },
    title: { standoff: 10, font: { size: 12, color: quiet }, ...own.title },
  });
  return {
    ...{ paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font, margin: { l: 48, r: 12, t: 8, b: 40 } },
    ...{ showlegend: false, uirevision: "kept", dragmode: touch.matches ? false : "zoom" },
    hoverlabel: { bgcolor: card, bordercolor: line, align: "left", font: { ...font, color: ink } },
    ...layout,
    xaxis: axis(layout.xaxis),
    yaxis: axis(layout.yaxis),
  };
}

/** Text for plotly: no markup of others'. */
export const safe = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

/** The like, cut to a length. */
export const short = (text, length) => safe(text.length > length ? `${text.slice(0, length - 1)}…` : text);
