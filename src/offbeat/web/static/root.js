// Owns where the page is: a proxy may have put all of it below a prefix, of which only the browser knows.
//
// Every address of the server's is made here, from the path that the server itself knows.

/** The prefix; nothing where the page is at the root of its host. */
export const ROOT = new URL("..", import.meta.url).pathname.replace(/\/$/, "");

/** A path of the server's, as the browser must ask for it. */
export const at = (path) => ROOT + path;

/** What the server would call a path of the browser's. */
export const pathOf = (path) => (path.startsWith(`${ROOT}/`) ? path.slice(ROOT.length) : "/");

/** The links in the page's own HTML are relative to the address that it was loaded from, which will change. */
export function pin() {
  const links = document.querySelectorAll('link[rel="icon"], a[href]:not([href^="#"])');
  for (const link of links) link.setAttribute("href", link.href);
}
