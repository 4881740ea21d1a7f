// Owns the talk with the server: JSON in, plain errors out. Whoever is not logged in is led to the form.

import { at, pathOf } from "./root.js";

/** Something went wrong, in words that are fit to be shown. */
export class Trouble extends Error {
  constructor(message, { status = 0 } = {}) {
    super(message);
    this.status = status;
  }
}

/** The JSON at a URL, and its text: equal texts need not be shown again. */
export async function twin(url, signal) {
  const answer = await ask(url, { signal, cache: "no-cache", headers: { Accept: "application/json" } });
  const text = await answer.text();
  try {
    return { text, data: JSON.parse(text) };
  } catch {
    throw new Trouble(`The server's answer to ${url} is not JSON.`, { status: answer.status });
  }
}

/** Asks the server to do something; needs the session's CSRF token. */
export async function order(url, csrf) {
  await ask(url, { method: "POST", headers: { "X-CSRF-Token": csrf ?? "", Accept: "application/json" } });
}

/** Exchanges a token for a cookie. */
export async function login(token) {
  const body = new URLSearchParams({ token });
  await ask(at("/login"), { method: "POST", body, headers: { Accept: "application/json" } });
}

async function ask(url, options) {
  let answer;
  try {
    answer = await fetch(url, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Trouble("The server does not answer.");
  }
  if (!answer.ok) throw new Trouble(await words(answer), { status: answer.status });
  return answer;
}

async function words(answer) {
  const text = await answer.text().catch(() => "");
  try {
    const { message, do: next } = JSON.parse(text);
    if (message) return [message, next].filter(Boolean).map(sentence).join(" ");
  } catch {
    // Not the server's own words.
  }
  const known = { 401: "Log in first.", 403: "Your token does not allow this.", 404: "There is no such thing here." };
  return known[answer.status] ?? `The server answered ${answer.status} ${answer.statusText}.`;
}

const sentence = (text) => (/[.!?]$/.test(text) ? text : `${text}.`);

/** The form's address, with the way back. */
export const loginPath = () => at(`/login?next=${encodeURIComponent(pathOf(location.pathname) + location.search)}`);

/** A URL with those parts of a query that it understands. */
export function withQuery(url, query, names) {
  const some = new URLSearchParams(names.filter((name) => query.get(name)).map((name) => [name, query.get(name)]));
  return some.size ? `${url}?${some}` : url;
}
