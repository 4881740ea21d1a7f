// Owns the story of one task: everything the ledger says about it, in order.

import { fill, h, shown } from "./elements.js";
import { capital, duration, number, plain } from "./words.js";

const KINDS = {
  leased: "Leased to a worker",
  pulled: "Model pulled",
  heartbeat: "Heartbeat",
  arrived: "Update arrived",
  decided: "Decided",
  queued: "Queued",
  mixed: "Mixed into the model",
  published: "Published as an epoch",
  released: "Lease released",
  heard_again: "Its worker, which was silent, was heard of again",
  returned: "Handed back by the worker",
  repeated: "Pushed again; answered as before",
  busy: "Told to come back: the queue was full",
  bad_update: "Not an update of this model",
  lost: "Lost",
  unknown: "Pushed for a task that is not known",
  not_yours: "Pushed by a worker that does not hold it",
};
const MOMENTS = ["granted_at", "deadline", "asked_at"];

export const story = {
  name: "Update",
  twin: ({ prefix, task }) => `${prefix}/updates/${encodeURIComponent(task)}.json`,

  mount(main, page) {
    const list = h("ol", { class: "story card" });
    const said = h("p", { class: "quiet" });
    main.replaceChildren(
      h("p", { class: "back" }, h("a", { href: `${page.prefix}/updates` }, "All updates")),
      h("div", { class: "head" }, h("h1", { tabindex: "-1" }, `Task ${page.task}`), said),
      list,
    );
    return {
      show(data) {
        page.title(`Task ${data.task}`);
        said.textContent = inShort(data.story);
        fill(list, linesOf(data.story));
        list.hidden = !data.story.length;
      },
    };
  },
};

/** Applied after 2.43 s: staleness 3, alpha_t 0.3000, in epoch 11. */
function inShort(lines) {
  if (!lines.length) return "The ledger has nothing about it.";
  const facts = Object.assign({}, ...lines.map((line) => line.facts ?? {}));
  const decided = lines.find((line) => line.facts?.outcome);
  if (!decided) return "Not decided on yet.";
  const parts = [["staleness", "staleness"], ["alpha_t", "alpha_t"], ["t", "epoch"]]; // prettier-ignore
  const known = parts
    .filter(([name]) => typeof facts[name] === "number")
    .map(([name, word]) => `${word} ${number(facts[name])}`);
  const when = `${capital(plain(decided.facts.outcome))} after ${duration(decided.at_s - lines[0].at_s)}`;
  return `${[when, known.join(", ")].filter(Boolean).join(": ")}.`;
}

/** What a line says is not said again in those below it, unless that is all they say. */
function linesOf(lines) {
  const before = {};
  return lines.map(({ at_s: at, kind, facts }) => {
    const known = Object.entries(facts).filter(([, value]) => value !== null && value !== "");
    const fresh = known.filter(([name, value]) => before[name] !== value);
    Object.assign(before, facts);
    return lineOf(at, kind, fresh.length ? fresh : known, lines[0].at_s);
  });
}

function lineOf(at, kind, known, since) {
  const pair = ([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, said(name, value)));
  const when = h("div", { class: "when" }, shown("at_s", at, duration(at)));
  if (at > since) when.append(h("small", {}, `after ${duration(at - since)}`));
  const what = h("div", {}, h("strong", {}, KINDS[kind] ?? capital(plain(kind))));
  if (known.length) what.append(h("dl", { class: "facts" }, known.map(pair)));
  return h("li", { data: { kind } }, when, what);
}

function said(name, value) {
  const moment = name.endsWith("_s") || MOMENTS.includes(name);
  if (typeof value === "number") return shown(name, value, moment ? duration(value) : number(value));
  if (typeof value === "boolean") return value ? "yes" : "no";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
