// An Offbeat worker in plain JavaScript: logistic regression on the rows of a CSV file (features, and the label last).
// docs/protocol.md explains every call. The server's side is examples/logistic.py.
//   node worker.mjs SERVER DATA.csv DEVICE                 NAME and TOKEN may stand in the environment
//   NODE_EXTRA_CA_CERTS=ca.pem node worker.mjs https://... for a server of `offbeat init`
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { hostname } from "node:os";
import { setImmediate as breathe, setTimeout as sleep } from "node:timers/promises";

const [server, file, device = "0"] = process.argv.slice(2);
const rows = readFileSync(file, "utf8").trim().split("\n").slice(1).map((line) => line.split(",").map(Number));
const name = process.env.NAME ?? `${hostname()}-${device}`;
const known = process.env.TOKEN ? { Authorization: `Bearer ${process.env.TOKEN}` } : {};
const ours = { gamma: 0.2, rho: 0.01, batch_size: 20, local_passes: 1 }; // as examples/logistic.py has them
let session = {};
class Refused extends Error {
  constructor(status, said) {
    super(`${status} ${said.error ?? ""}: ${said.message ?? "no reason given"}. ${said.do ?? ""}`);
    Object.assign(this, { status, error: said.error, retryAfterS: said.retry_after_s });
    this.temporary = [408, 425, 429].includes(status) || status >= 500
      || ["digest", "quarantined"].includes(said.error);
  }
}

// One request; the bytes of the answer, or what went wrong.
async function once(method, path, headers = {}, body = undefined) {
  const signal = AbortSignal.timeout(60_000); // longer than the server lets a worker wait for a task
  const head = { "Offbeat-Protocol": "1", ...known, ...session, ...headers };
  const answer = await fetch(server + path, { method, headers: head, body, signal });
  const bytes = Buffer.from(await answer.arrayBuffer());
  if (answer.ok) return bytes;
  let said = {};
  try { said = JSON.parse(bytes); } catch { /* not the server's own words: a proxy's */ }
  throw new Refused(answer.status, { retry_after_s: Number(answer.headers.get("Retry-After")) || undefined, ...said });
}

// Likewise, until the server answers: waits as long as it asks for, else longer every time, never all at once.
async function call(...request) {
  for (let ceilingS = 0.5; ; ceilingS = Math.min(60, 2 * ceilingS)) {
    try {
      return await once(...request);
    } catch (error) {
      if (error instanceof Refused && !error.temporary) throw error;
      const waitS = (error.retryAfterS ?? 0) + ceilingS * Math.random();
      console.error(`${error.cause?.message ?? error.message} (trying again in ${waitS.toFixed(1)} s)`);
      await sleep(1000 * waitS);
    }
  }
}

const json = async (path, body) =>
  JSON.parse(await call("POST", path, body && { "Content-Type": "application/json" }, body && JSON.stringify(body)));

// The arrays of a safetensors file, as views of its bytes: what is written to them is in the file.
function arraysOf(model) {
  const body = 8 + Number(model.readBigUInt64LE(0));
  const entries = Object.entries(JSON.parse(model.toString("utf8", 8, body))).filter(([key]) => key !== "__metadata__");
  return Object.fromEntries(entries.map(([key, { data_offsets: [from, to] }]) =>
    [key, new Float32Array(model.buffer, model.byteOffset + body + from, (to - from) / 4)]));
}

// Numbers of [0, 1) that depend on seed, device and number alone: the same lease again is trained to the same bits.
function randomOf(...key) {
  let state = createHash("sha256").update(key.join()).digest().readUInt32LE(0);
  return () => (state = (Math.imul(state, 1664525) + 1013904223) >>> 0) / 2 ** 32;
}

// Stochastic gradient descent on the loss of the device plus rho/2 |x - x_tau|^2, in the place of x_tau.
async function train({ weights, bias }, { gamma, rho, batchSize, iterations }, random, isRevoked) {
  const tau = { weights: weights.slice(), bias: bias[0] };
  for (let done = 0, order = []; done < iterations && !isRevoked(); done++) {
    if (!order.length) order = rows.map((row) => [random(), row]).sort(([a], [b]) => a - b).map(([, row]) => row);
    const batch = order.splice(0, batchSize), errors = batch.map((row) =>
      1 / (1 + Math.exp(-weights.reduce((sum, w, j) => sum + w * row[j], bias[0]))) - row.at(-1));
    const mean = (numberOf) => errors.reduce((sum, error, i) => sum + error * numberOf(batch[i]), 0) / batch.length;
    weights.forEach((w, j) => { weights[j] -= gamma * (mean((row) => row[j]) + rho * (w - tau.weights[j])); });
    bias[0] -= gamma * (mean(() => 1) + rho * (bias[0] - tau.bias));
    if (done % 100 === 99) await breathe(); // let heartbeats go out
  }
}

async function work(lease, joined) {
  const path = `/v1/tasks/${lease.task}`, random = randomOf(lease.seed, lease.device, lease.number);
  const chosen = (setting) => lease[setting] ?? joined.settings[setting] ?? ours[setting]; // the lease wins
  const [gamma, rho, batchSize] = ["gamma", "rho", "batch_size"].map(chosen);
  const iterations = chosen("local_iterations") ?? chosen("local_passes") * Math.ceil(rows.length / batchSize);
  let revoked = false;
  const beat = () => once("POST", `${path}/heartbeat`).catch((error) => { revoked ||= error.error === "revoked"; });
  const heart = setInterval(beat, 1000 * joined.heartbeat_s);
  try {
    const model = await call("GET", lease.model);
    await train(arraysOf(model), { gamma, rho, batchSize, iterations }, random, () => revoked);
    if (revoked) return;
    const answer = JSON.parse(await call("PUT", `${path}/update`, {
      "Content-Type": "application/octet-stream", "Offbeat-Digest": createHash("sha256").update(model).digest("hex"),
      "Offbeat-Samples": rows.length, "Offbeat-Gradients": iterations,
    }, model));
    console.log(`task ${lease.task}: mixed as epoch ${answer.t}, staleness ${answer.staleness}`);
  } catch (error) {
    if (![403, 404, 409, 410, 422].includes(error.status)) throw error;
    console.error(`task ${lease.task} is dropped: ${error.message}`);
    await call("DELETE", path); // else the same task would be leased again
  } finally {
    clearInterval(heart);
  }
}

async function member() {
  const joined = await json("/v1/workers", { name, protocol: 1, device: Number(device), samples: rows.length });
  session = { "Offbeat-Session": joined.session };
  while (true) {
    const { state, lease, reason } = await json(`/v1/workers/${joined.worker}/ask`);
    if (state === "working") await work(lease, joined);
    if (state === "finished") return console.log(`the run is finished: ${reason}`);
  }
}

const again = (error) => { if (error.error === "unknown_session") return member().catch(again); throw error; };
await member().catch(again).catch((error) => { console.error(error.message); process.exitCode = 1; });
