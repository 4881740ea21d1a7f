// Owns the form that exchanges a token for a cookie. The token is never kept by the page.

import { login as exchange } from "./api.js";
import { fill, h } from "./elements.js";
import { at } from "./root.js";

export const login = {
  name: "Log in",
  twin: null,

  mount(main, page) {
    const trouble = h("div", { id: "trouble", role: "alert" });
    const token = h("input", {
      ...{ type: "password", id: "token", name: "token", required: true },
      ...{ autocomplete: "current-password", spellcheck: "false", "aria-describedby": "hint trouble" },
    });
    const button = h("button", { type: "submit" }, "Log in");
    const submit = async (event) => {
      event.preventDefault();
      button.disabled = true;
      try {
        await exchange(token.value.trim());
        location.assign(way(page.query.get("next")));
      } catch (error) {
        fill(trouble, h("p", { class: "notice" }, error.message));
        token.select();
      } finally {
        button.disabled = false;
      }
    };
    const hint = { class: "quiet", id: "hint" };
    const words = ". With a viewer's you can look; with an admin's you can also quarantine and readmit.";
    main.replaceChildren(
      h(
        "form",
        { class: "card login", method: "post", action: at("/login"), on: { submit } },
        h("h1", { tabindex: "-1" }, "Log in"),
        ...[h("label", { for: "token" }, "Token"), token],
        h("p", hint, "A token comes from ", h("code", {}, "offbeat token add"), words),
        ...[trouble, button],
      ),
    );
    token.focus();
    return { show() {} };
  },
};

/** The way back, given from the page's root: only ever to this page, and never to the form again. */
function way(next) {
  const url = URL.canParse(next ?? "/", location.origin) && new URL(next ?? "/", location.origin);
  const ours = url && url.origin === location.origin && url.pathname !== "/login";
  return location.origin + at(ours ? url.pathname + url.search : "/"); // whole: //HOST would be a host
}
