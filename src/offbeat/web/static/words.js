// Owns how numbers, times and outcomes are said. What is missing is said with a dash.

const DASH = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const exact = new Intl.NumberFormat("en", { minimumSignificantDigits: 4, maximumSignificantDigits: 4 });
const rough = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const even = new Intl.NumberFormat("en", { minimumSignificantDigits: 3, maximumSignificantDigits: 3 });

const missing = (value) =>
  value === null || value === undefined || (typeof value === "number" && !Number.isFinite(value));

/** 12,345; 0.9130; 1.234e-7. */
export function number(value) {
  if (missing(value)) return DASH;
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return whole.format(value);
  const size = Math.abs(value);
  return size < 1e-4 || size >= 1e7 ? value.toExponential(3) : size >= 1e4 ? whole.format(value) : exact.format(value);
}

/** Three digits are enough: 12.3, 0.145. */
export function about(value) {
  if (missing(value)) return DASH;
  return Math.abs(value) >= 1000 ? whole.format(value) : rough.format(value);
}

/** 850 ms, 12.3 s, 4 min 12 s, 3 h 5 min, 2 d 4 h. */
export function duration(seconds) {
  if (missing(seconds)) return DASH;
  if (seconds < 0) return `-${duration(-seconds)}`;
  if (seconds === 0) return "0 s";
  if (seconds < 0.9995) return `${even.format(seconds * 1000)} ms`;
  if (seconds < 99.95) return `${even.format(seconds)} s`;
  const s = Math.round(seconds);
  if (s < 3600) return two(Math.floor(s / 60), "min", s % 60, "s");
  const minutes = Math.round(s / 60);
  if (minutes < 24 * 60) return two(Math.floor(minutes / 60), "h", minutes % 60, "min");
  const hours = Math.round(s / 3600);
  return two(Math.floor(hours / 24), "d", hours % 24, "h");
}

const two = (large, unit, small, part) =>
  small ? `${whole.format(large)} ${unit} ${small} ${part}` : `${whole.format(large)} ${unit}`;

/** 1 update, 2 updates. */
export const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;

/** too_stale: too stale. */
export const plain = (word) => String(word).replaceAll("_", " ");

/** What the metrics of the averaged model end in. */
export const AVERAGED = "_average";

export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** What an outcome means, for those who see it for the first time. */
export const OUTCOMES = {
  applied: "mixed into the model",
  too_stale: "staler than the run allows",
  not_finite: "held a NaN or an infinity",
  too_large: "its step is larger than norm_max allows, or a value larger than value_max",
  quarantined: "came from a worker in quarantine",
  finished: "came after the run had ended",
  unknown_task: "for a task that was never given",
  not_yours: "for a task that another worker holds",
  busy: "the queue was full; the worker was told to wait",
  bad_update: "could not be read as an update of this model",
};

/** {too_stale: 2}: 2 too stale. */
export const refusals = (refused) =>
  Object.entries(refused ?? {})
    .filter(([, n]) => n)
    .map(([outcome, n]) => `${number(n)} ${plain(outcome)}`)
    .join(", ");

export const total = (counts) => Object.values(counts ?? {}).reduce((sum, n) => sum + n, 0);

/** The unit in which times up to `longest` seconds are drawn. */
export function unit(longest) {
  if (longest < 180) return { name: "s", seconds: 1 };
  if (longest < 3 * 3600) return { name: "min", seconds: 60 };
  return longest < 3 * 86400 ? { name: "h", seconds: 3600 } : { name: "days", seconds: 86400 };
}
