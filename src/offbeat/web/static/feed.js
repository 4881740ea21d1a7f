// Owns when the twin of the shown page is fetched: one request at a time, at most once a second, never while the page
// is hidden, and more seldom where an answer takes long, so that an open page costs the server little.

const EVERY_MS = 1000;
const SHARE = 8; // the wait is at least this many times as long as the answer took
const EVERY_MS_MAX = 5000;

export class Feed {
  #load;
  #wanted = false;
  #busy = false;
  #timer = null;
  #again = null;
  #due = 0;
  #stopped = false;

  constructor(load) {
    this.#load = load;
    document.addEventListener("visibilitychange", this.#look);
  }

  /** Something has changed: fetch when it is time. */
  want() {
    this.#wanted = true;
    this.#look();
  }

  /** Somebody waits for it: fetch now, and drop what is under way. */
  now() {
    this.#again?.abort();
    this.#busy = false;
    this.#due = 0;
    this.want();
  }

  stop() {
    this.#stopped = true;
    this.#again?.abort();
    clearTimeout(this.#timer);
    document.removeEventListener("visibilitychange", this.#look);
  }

  #look = () => {
    clearTimeout(this.#timer);
    if (this.#stopped || !this.#wanted || this.#busy || (document.hidden && this.#due > 0)) return;
    const wait = this.#due - performance.now();
    if (wait > 0) this.#timer = setTimeout(this.#look, wait);
    else this.#fetch();
  };

  async #fetch() {
    const started = performance.now();
    const mine = new AbortController();
    [this.#again, this.#busy, this.#wanted] = [mine, true, false];
    try {
      await this.#load(mine.signal);
    } finally {
      if (this.#again === mine) {
        const took = performance.now() - started;
        this.#busy = false;
        this.#due = started + Math.min(Math.max(EVERY_MS, SHARE * took), EVERY_MS_MAX);
        this.#look();
      }
    }
  }
}
