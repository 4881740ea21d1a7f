// Owns the stream of events: says when the run has moved, and when the connection is lost and back.
//
// A browser reconnects by itself after a broken connection, but gives up after an answer that is not 200: then it is
// opened anew. After every reconnection the page is told that the run may have moved.

const AGAIN_MS = 2000;
const AGAIN_MS_MAX = 30_000;

/** Watches; `told` gets "live" or "lost". Returns the function that ends it. */
export function watch(url, { moved, told }) {
  let source = null;
  let timer = null;
  let wait = AGAIN_MS;
  let lost = false;

  function open() {
    source = new EventSource(url);
    source.addEventListener("open", () => {
      wait = AGAIN_MS;
      told("live");
      if (lost) moved();
      lost = false;
    });
    source.addEventListener("moved", moved);
    source.addEventListener("error", () => {
      lost = true;
      told("lost");
      if (source.readyState === EventSource.CLOSED) timer = setTimeout(again, wait);
    });
  }

  function again() {
    wait = Math.min(wait * 2, AGAIN_MS_MAX);
    moved();
    open();
  }

  open();
  return () => {
    clearTimeout(timer);
    source.close();
  };
}
