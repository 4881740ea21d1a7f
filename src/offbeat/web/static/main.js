// Owns which view an address means, and the way between views.
//
// The address is the state: filters, sorting and axes live in the query, so that every view can be linked to.

import { loginPath, Trouble, twin } from "./api.js";
import { asynchrony } from "./asynchrony.js";
import { compare } from "./compare.js";
import { fill, h } from "./elements.js";
import { Feed } from "./feed.js";
import { Follower } from "./follow.js";
import { fetched, leaving, links, named, titled, twinAt } from "./frame.js";
import { login } from "./login.js";
import { overview } from "./overview.js";
import { at, pathOf, pin } from "./root.js";
import { runs } from "./runs.js";
import { story } from "./story.js";
import { updates } from "./updates.js";
import { workers } from "./workers.js";

const OF_A_RUN = { "/": overview, "/asynchrony": asynchrony, "/workers": workers, "/updates": updates };
const OF_A_FOLDER = { "/": runs, "/compare": compare };

const main = document.getElementById("main");
const follower = new Follower(() => shown?.feed?.want());
let session = { role: null, open: true, csrf: null };
let shown = null; // what is on the page: {path, view, page, mounted, feed, trouble, url, text, data}

// --- addresses -------------------------------------------------------------------------------------------------------

/** {view, prefix, run, kind}: the form, a view of a folder of runs, or one of a run; its paths begin with prefix. */
function routeOf(address) {
  const path = pathOf(address);
  const below = path.match(/^\/runs\/[^/]+/)?.[0] ?? "";
  const [prefix, run] = [at(below), decodeURIComponent(below.slice("/runs/".length))];
  const rest = path.slice(below.length).replace(/(.)\/$/, "$1") || "/";
  if (path === "/login") return { view: login, prefix, run, kind: "form", rest };
  if (session.ui && !below) return { view: OF_A_FOLDER[rest], prefix, run, kind: "folder", rest };
  const task = rest.match(/^\/updates\/([^/]+)$/)?.[1];
  if (task) return { view: story, prefix, run, kind: "run", rest: "/updates", task: decodeURIComponent(task) };
  return { view: OF_A_RUN[rest], prefix, run, kind: "run", rest };
}

/** The address with some of the query changed; null removes, a list repeats. */
function linkTo(changes) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(changes)) {
    query.delete(name);
    const values = Array.isArray(value) ? value : [value];
    for (const one of values.filter((each) => each !== null)) query.append(name, one);
  }
  return location.pathname + (query.size ? `?${query}` : "");
}

function go(address, { replace = false } = {}) {
  history[replace ? "replaceState" : "pushState"](null, "", address);
  arrive();
}

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href]");
  const modified = event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey;
  if (!link || modified || event.defaultPrevented || link.origin !== location.origin || link.hash) return;
  if (link.pathname.startsWith(at("/static/")) || link.pathname.endsWith(".json")) return;
  event.preventDefault();
  go(link.pathname + link.search);
});
window.addEventListener("popstate", () => arrive());

// --- views -----------------------------------------------------------------------------------------------------------

function arrive() {
  if (shown?.path === location.pathname) return ask();
  const first = shown === null;
  leave();
  const route = routeOf(location.pathname);
  if (!session.open && !session.role && route.kind !== "form") return go(loginPath(), { replace: true });
  frame(route);
  if (!route.view) return nothing();
  const trouble = h("div", { class: "trouble", role: "alert" });
  const content = h("div", { class: "view" });
  main.replaceChildren(trouble, content);
  const page = pageOf(route);
  const mine = { path: location.pathname, view: route.view, page, trouble };
  shown = mine;
  mine.mounted = route.view.mount(content, page);
  mine.feed = route.view.twin && new Feed((signal) => load(mine, signal));
  ask();
  learn(route);
  if (first) return;
  window.scrollTo(0, 0);
  content.querySelector("h1")?.focus({ preventScroll: true });
}

function leave() {
  shown?.feed?.stop();
  shown?.mounted?.leave?.();
  shown = null;
}

/** What a view knows of the page, and can ask of it. */
function pageOf({ prefix, task }) {
  return {
    ...{ prefix, task, session, ui: session.ui, query: new URLSearchParams(location.search) },
    ...{ go, link: linkTo, title: titled, tell },
    search: (changes) => go(linkTo(changes), { replace: true }),
    refresh: () => shown?.feed?.now(),
  };
}

/** The address has changed, or the view is new: its twin is wanted. */
function ask() {
  const { page, view } = shown;
  page.query = new URLSearchParams(location.search);
  const url = view.twin ? view.twin(page) : at("/session.json");
  twinAt(url);
  if (!view.twin) return;
  if (shown.url === url && shown.data) return shown.mounted.show(shown.data);
  [shown.url, shown.text] = [url, null];
  shown.feed.now();
}

async function load(mine, signal) {
  try {
    const { text, data } = await twin(mine.url, signal);
    if (mine !== shown || signal.aborted) return;
    fill(mine.trouble);
    fetched(new Date());
    if (mine.text === text) return;
    [mine.text, mine.data] = [text, data];
    mine.mounted.show(data);
  } catch (error) {
    if (error.name === "AbortError" || mine !== shown) return;
    if (error.status === 401) return location.assign(loginPath());
    if (!(error instanceof Trouble)) console.error(error);
    const words =
      error instanceof Trouble ? error.message : `The page cannot show what the server said: ${error.message}.`;
    const again = h("button", { type: "button", class: "small", on: { click: () => mine.feed.now() } }, "Try again");
    fill(mine.trouble, h("p", { class: "notice" }, words, " ", again));
  }
}

function nothing() {
  const start = h("a", { href: at("/") }, "Go to the start");
  main.replaceChildren(h("h1", {}, "Nothing here"), h("p", {}, "There is no page at this address. ", start, "."));
}

// --- the run ---------------------------------------------------------------------------------------------------------

function frame({ view, prefix, run, kind, rest }) {
  const views = { form: {}, folder: OF_A_FOLDER, run: OF_A_RUN }[kind];
  const all = Object.entries(views).map(([path, { name }]) => [prefix + path, name]);
  links(all, prefix + rest, run ? [[at("/"), "All runs"]] : []);
  fetched(null);
  if (run || kind !== "run") named(run);
  titled(view?.name ?? "Nothing here");
  follower.of(kind === "run" && view ? prefix : null);
}

/** What a view has found out about the run. */
function tell(run) {
  named(run.name);
  follower.told(run.state);
}

/** The like, where the view itself does not say. */
async function learn({ prefix, kind, view }) {
  if (kind !== "run" || view === overview || follower.knows) return;
  const found = await twin(`${prefix}/overview.json`).catch(() => null);
  if (!found || shown?.page.prefix !== prefix) return;
  tell(found.data.run);
  if (shown.view === view && view !== story) titled(view.name);
}

// --- start -----------------------------------------------------------------------------------------------------------

async function start() {
  try {
    session = { ...session, ...(await twin(at("/session.json"))).data };
    session.ui ??= /^\/(runs\/|compare$)/.test(pathOf(location.pathname));
  } catch (error) {
    const again = h("button", { type: "button", on: { click: () => location.reload() } }, "Try again");
    return fill(main, h("p", { class: "notice", role: "alert" }, error.message, " ", again));
  }
  leaving(session);
  pin();
  arrive();
}

start();
