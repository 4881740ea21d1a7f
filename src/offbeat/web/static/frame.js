// Owns what is around a view: the links to the others, the run's name, the status line, the title.

import { order } from "./api.js";
import { fill, h } from "./elements.js";
import { at } from "./root.js";

const STATUS = {
  connecting: "Connecting",
  live: "Live",
  lost: "Connection lost, trying again",
  interrupted: "Interrupted",
  finished: "Finished",
  gone: "Finished; the server has gone",
  stored: "Stored run",
};

const place = (id) => document.getElementById(id);

/** The links; `current` is the address of the view that is shown. */
export function links(views, current, before = []) {
  const link = ([path, name]) => {
    const here = path === current && "page";
    return h("a", { href: path, "aria-current": here, data: { key: `view ${path}` } }, name);
  };
  fill(place("views"), [...before, ...views].map(link));
  place("views").hidden = !views.length;
}

/** Whose numbers these are. */
export function named(run) {
  place("run").textContent = run;
}

export function titled(text) {
  document.title = [text, place("run").textContent || "Offbeat"].filter(Boolean).join(" · ");
}

/** Where the same numbers are as JSON. */
export function twinAt(url) {
  place("twin").href = url;
}

/** How the page hears of the run: a key of STATUS, or none. It is read out, so it changes only when its words do. */
export function status(state) {
  const element = place("status");
  element.hidden = !state;
  element.dataset.state = state ?? "";
  const words = STATUS[state] ?? "";
  if (element.textContent !== words) element.textContent = words;
}

/** When the numbers came; not read out. */
export function fetched(at) {
  place("updated").textContent = at?.toLocaleTimeString("en-GB") ?? "";
}

/** A button for those who have logged in. */
export function leaving({ open, role, csrf }) {
  const button = place("logout");
  button.hidden = open || !role;
  button.addEventListener("click", async () => {
    await order(at("/logout"), csrf).catch(() => {}); // whether or not it was heard, the form is next
    location.assign(at("/login"));
  });
}
