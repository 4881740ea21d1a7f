// Owns the links to the other pages of a table.

import { h } from "./elements.js";
import { number } from "./words.js";

/** First, previous, where one is, next, last; nothing where there is one page. */
export function pager({ total, page: here, size }, page) {
  const pages = Math.max(1, Math.ceil(total / size));
  if (pages === 1 && here === 1) return [];
  const to = (other, label) => {
    if (other < 1 || other > pages || other === here) return h("span", { class: "quiet" }, label);
    return h("a", { href: page.link({ page: other === 1 ? null : other }), data: { key: label } }, label);
  };
  const where = h("span", {}, `Page ${number(here)} of ${number(pages)}`);
  const back = Math.min(here - 1, pages);
  return [to(1, "First"), to(back, "Previous"), where, to(here + 1, "Next"), to(pages, "Last")];
}
