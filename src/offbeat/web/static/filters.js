// Owns the filters above a table: a text that is looked for as one types, and a choice. They live in the address.

import { h } from "./elements.js";
import { plain } from "./words.js";

const TYPING_MS = 250;

/** `text` and `choice` are {name, label}, `choice` with `options`; a change goes back to the page that `first` says. */
export function filters(page, text, choice, first) {
  let timer = null;
  const ask = () => page.search({ [text.name]: input.value.trim() || null, [first]: null });
  const later = () => {
    clearTimeout(timer);
    timer = setTimeout(ask, TYPING_MS);
  };
  const submit = (event) => {
    event.preventDefault();
    clearTimeout(timer);
    ask();
  };
  const input = h("input", {
    ...{ type: "search", id: text.name, autocomplete: "off", spellcheck: "false", placeholder: "name or number" },
    on: { input: later },
  });
  const select = h(
    "select",
    { id: choice.name, on: { change: () => page.search({ [choice.name]: select.value || null, [first]: null }) } },
    h("option", { value: "" }, `any ${choice.name}`),
    choice.options.map((value) => h("option", { value }, plain(value))),
  );
  const label = ({ name, label: words }) => h("label", { for: name }, words);
  const form = h(
    "form",
    { class: "filters", role: "search", on: { submit } },
    label(text),
    input,
    label(choice),
    select,
  );
  const sync = (query) => {
    if (document.activeElement !== input) input.value = query.get(text.name) ?? "";
    select.value = query.get(choice.name) ?? "";
  };
  return { form, sync, stop: () => clearTimeout(timer) };
}
