// Owns how elements are made. Text is always text and never markup: what a worker calls itself cannot become code.

/** An element: h("p", {class: "quiet", data: {name: "t"}, on: {click: f}}, "text", child, ...). */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) set(element, name, value);
  element.append(...present(children));
  return element;
}

function set(element, name, value) {
  if (value === null || value === undefined || value === false) return;
  if (name === "on") for (const [kind, heard] of Object.entries(value)) element.addEventListener(kind, heard);
  else if (name === "data") Object.assign(element.dataset, value);
  else element.setAttribute(name, value === true ? "" : value);
}

const present = (children) =>
  children.flat(2).filter((child) => child !== null && child !== undefined && child !== false);

/** Puts other children into an element; whoever had the focus there keeps it, known by data-key. */
export function fill(element, ...children) {
  const active = document.activeElement;
  const key = element.contains(active) ? active?.dataset?.key : undefined;
  element.replaceChildren(...present(children));
  if (key !== undefined) element.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
}

/** A number as the page shows it, with its name in the JSON and its raw value beside it. */
export function shown(name, value, text, tag = "span") {
  return h(tag, { data: { name, value: raw(value) } }, text);
}

const raw = (value) => (value === null || value === undefined ? "" : String(value));

/** A choice of one among a few, as radio buttons in a row. */
export function segments(legend, name, options, chosen, choose) {
  const one = ([value, label]) =>
    h(
      "label",
      {},
      h("input", {
        type: "radio",
        name,
        value,
        checked: value === chosen,
        data: { key: `${name} ${value}` },
        on: { change: () => choose(value) },
      }),
      h("span", {}, label),
    );
  return h("fieldset", { class: "segments" }, h("legend", {}, legend), ...options.map(one));
}

/** A card with a heading; `id` names the heading. */
export function card(id, heading, ...children) {
  return h("section", { class: "card", "aria-labelledby": id }, h("h2", { id }, heading), ...children);
}

/** A table that scrolls sideways in its own frame where the screen is narrow. */
export function table(caption, head, body) {
  const frame = { class: "frame", role: "region", tabindex: "0", "aria-label": caption };
  return h("div", frame, h("table", {}, h("caption", { class: "unseen" }, caption), head, body));
}
