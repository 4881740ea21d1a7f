// Owns how the page hears of a run's moves, and says so in the status line.
//
// A run in a folder is listened to once it is known that it has not finished: it may still move.

import { status } from "./frame.js";
import { watch } from "./live.js";
import { ROOT } from "./root.js";

const SAID = {
  live: { finished: "finished", interrupted: "interrupted" },
  lost: { finished: "gone" },
};

export class Follower {
  #moved;
  #key = null;
  #end = null;
  #connection = null;
  #state = null;

  constructor(moved) {
    this.#moved = moved;
  }

  /** Of the run at this prefix, or of none (null); whatever was followed before is no more. */
  of(prefix) {
    if (this.#key === prefix && prefix !== null) return;
    this.#end?.();
    [this.#key, this.#end, this.#state] = [prefix, null, null];
    const served = prefix === ROOT;
    this.#connection = served || prefix === null ? null : "stored";
    if (served) this.#listen();
    this.#say();
  }

  /** The run is running, interrupted or finished. */
  told(state) {
    this.#state = state;
    if (state !== "finished" && this.#key !== null) this.#listen();
    this.#say();
  }

  get knows() {
    return this.#state !== null;
  }

  #listen() {
    if (this.#end) return;
    this.#connection = "connecting";
    const told = (connection) => {
      this.#connection = connection;
      this.#say();
    };
    this.#end = watch(`${this.#key}/events`, { moved: this.#moved, told });
  }

  #say() {
    status(SAID[this.#connection]?.[this.#state] ?? this.#connection);
  }
}
