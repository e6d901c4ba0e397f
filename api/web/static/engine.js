// The live view: looks at /metrics once a second and keeps two minutes of it.

import { attainment, cpusUsed, quantile, rate, sample, stageShares } from "./metrics.js";
import { request } from "./server.js";

const INTERVAL_MS = 1000;
const KEPT_S = 120; // what the charts show
const LATENCY_S = 60; // the window of the latencies
const KINDS = {
  weights: "Weights",
  kv_used: "KV in use",
  kv_cached: "KV kept for others",
  kv_free: "KV free",
  draft_states: "States of draft tokens",
  workspace: "Workspace",
  graphs: "Graphs",
  host_tier: "KV in host memory",
}; // of memory
const LEAST_CPUS = 0.01; // of a process that is shown
const STATES = ["busy", "input", "ids", "output", "plan"]; // of a pipeline's stage
const [WIDTH, HEIGHT] = [240, 56]; // of a chart, in its own units

/** Starts looking. `onState(trouble)`: null while the server answers, otherwise what is wrong in a few words. */
export function startEngine(root, onState) {
  const element = (id) => root.querySelector(`#${id}`);
  const charts = {
    speed: new Chart(element("speed-chart"), ["output", "prompt"], 4, whole),
    load: new Chart(element("load-chart"), ["running", "waiting"], 4, whole),
    kv: new Chart(element("kv-chart"), ["kv"], 0.01, share),
  };
  let samples = [];

  const look = async () => {
    if (!document.hidden) {
      try {
        const response = await request("metrics", { ask: false, signal: AbortSignal.timeout(5000) });
        const now = sample(await response.text(), performance.now() / 1000);
        const before = samples.at(-1);
        if (before && now.outputTokens < before.outputTokens) samples = []; // the server was started anew
        samples = [...samples.filter(({ time }) => now.time - time <= KEPT_S), now];
        draw(element, charts, samples);
        root.classList.remove("stale");
        onState(null);
      } catch (error) {
        root.classList.add("stale");
        const needsKey = error.status === 401;
        onState(needsKey ? "An API key is needed" : error.name === "TimeoutError" ? "Slow to answer" : error.message);
      }
    }
    setTimeout(look, INTERVAL_MS);
  };
  look();
}

function draw(element, charts, samples) {
  const now = samples.at(-1);
  const before = samples.at(-2) ?? now;
  const earliest = samples.find(({ time }) => now.time - time <= LATENCY_S);
  const show = (id, text) => {
    const node = element(id);
    if (node.textContent !== text) node.textContent = text;
  };
  // Three looks together: the engine reports twice a second, so that two alone would jump.
  const recent = samples.at(-4) ?? samples[0];
  show("speed", whole(rate(recent, now, "outputTokens")));
  show("prompt-speed", whole(rate(recent, now, "promptTokens")));
  show("running", whole(now.running));
  show("waiting", whole(now.waiting));
  show("kv", share(now.kvShare));
  element("kv-meter").value = now.kvShare;
  for (const [row, name] of [["first", "firstToken"], ["inter", "interToken"], ["whole", "whole"], ["step", "step"]]) {
    for (const q of [50, 95, 99]) show(`${row}-p${q}`, duration(quantile(earliest[name], now[name], q / 100)));
  }
  const ended = Object.entries(now.finished).filter(([, count]) => count);
  show("finished", ended.map(([reason, count]) => `${whole(count)} ${reason}`).join(", ") || "none");
  show("tokens-out", whole(now.outputTokens));
  show("tokens-in", whole(now.promptTokens));
  show("cache-hits", now.cacheQueries ? share(now.cacheHits / now.cacheQueries) : "–");
  show("preemptions", whole(now.preemptions));
  show("step-age", now.stepAge ? duration(now.stepAge) : "idle");
  element("guesses-row").hidden = !now.draftTokens;
  show("guesses", now.draftTokens ? share(now.acceptedTokens / now.draftTokens) : "–");

  drawStages(element("stages"), stageShares(recent, now), now.bubbles);
  drawMemory(element("memory"), now.memory, show);
  drawMachine(element, cpusUsed(recent, now), now, show);
  const classes = element("classes");
  const shares = Object.entries(attainment(earliest, now));
  classes.hidden = !shares.length;
  drawRows(classes.querySelector("dl"), shares.map(([name, met]) => [name, met === null ? "idle" : share(met)]));

  charts.speed.add(now.time, [rate(before, now, "outputTokens"), rate(before, now, "promptTokens")], samples.length);
  charts.load.add(now.time, [now.running, now.waiting], samples.length);
  charts.kv.add(now.time, [now.kvShare], samples.length);
}

/** What holds the workers' memory; hidden until they say it. */
function drawMemory(card, memory, show) {
  const kinds = Object.keys(KINDS).filter((kind) => memory[kind]);
  card.hidden = !kinds.length;
  if (card.hidden) return;
  const all = kinds.reduce((sum, kind) => sum + memory[kind], 0);
  show("memory-all", bytes(all));
  const bar = card.querySelector(".parts");
  while (bar.children.length > kinds.length) bar.lastElementChild.remove();
  kinds.forEach((kind, i) => {
    const part = bar.children[i] ?? bar.appendChild(document.createElement("i"));
    part.className = kind;
    part.style.width = `${(100 * memory[kind]) / all}%`;
  });
  const list = card.querySelector("dl");
  drawRows(list, kinds.map((kind) => [KINDS[kind], bytes(memory[kind])]));
  kinds.forEach((kind, i) => (list.children[i].className = kind));
}

/** CPUs, the roof, and GPUs if there are any; hidden until the processes say what they take. */
function drawMachine(element, cpus, now, show) {
  const processes = Object.entries(cpus).sort(([, a], [, b]) => b - a);
  element("machine").hidden = !processes.length;
  show("cpus", processes.reduce((sum, [, used]) => sum + used, 0).toFixed(2));
  const busy = processes.filter(([, used]) => used >= LEAST_CPUS);
  show("cpus-by-process", busy.map(([process, used]) => `${process}\u00a0${used.toFixed(2)}`).join(" · "));
  element("roof-row").hidden = element("roof-meter").hidden = now.roof === null;
  show("roof", `${share(now.roof ?? 0)} of ${(now.bandwidth / 1e9).toFixed(now.bandwidth < 1e11 ? 1 : 0)} GB/s`);
  element("roof-meter").value = now.roof ?? 0;
  const gpus = Object.entries(now.gpus).map(([rank, values]) => [`GPU ${rank}`, gpuLine(values)]);
  drawRows(element("gpus"), gpus);
}

/** What a GPU says of itself, as far as it does. */
function gpuLine(values) {
  const number = (name, factor, unit) =>
    values[name] === undefined ? [] : [`${(values[name] * factor).toFixed(0)} ${unit}`];
  const errors = (values.gpu_ecc_uncorrected_errors_total ?? 0) + (values.gpu_xid_errors_total ?? 0);
  return [
    ...number("gpu_utilization_ratio", 100, "%"),
    ...number("gpu_power_watts", 1, "W"),
    ...number("gpu_temperature_celsius", 1, "°C"),
    ...(values.gpu_memory_used_bytes === undefined ? [] : [bytes(values.gpu_memory_used_bytes)]),
    ...number("gpu_sm_clock_hertz", 1e-6, "MHz"),
    ...(values.gpu_is_slowed ? ["slowed"] : []),
    ...(errors ? [`${errors} errors`] : []),
  ].join(" · ");
}

/** Rows of names and values; those that are there are kept. */
function drawRows(list, rows) {
  while (list.children.length > rows.length) list.lastElementChild.remove();
  rows.forEach(([name, value], i) => {
    if (!list.children[i]) {
      const row = list.appendChild(document.createElement("div"));
      row.append(document.createElement("dt"), document.createElement("dd"));
    }
    const [term, text] = list.children[i].children;
    if (term.textContent !== name) term.textContent = name;
    if (text.textContent !== value) text.textContent = value;
  });
}

/** A bar for each stage of a pipeline; hidden without stages. */
function drawStages(card, shares, bubbles) {
  const stages = Object.entries(shares);
  card.hidden = !stages.length;
  if (card.hidden) return;
  card.querySelector("#bubbles").textContent = share(bubbles);
  const list = card.querySelector("dl");
  while (list.children.length > stages.length) list.lastElementChild.remove();
  stages.forEach(([stage, states], i) => {
    const row = list.children[i] ?? list.appendChild(stageRow());
    row.querySelector("dt").textContent = `Stage ${stage}`;
    const busy = states.busy === undefined ? "idle" : share(states.busy);
    row.querySelector("dd").textContent = busy;
    for (const part of row.querySelectorAll(".stage i")) part.style.width = `${100 * (states[part.className] ?? 0)}%`;
  });
}

function stageRow() {
  const row = document.createElement("div");
  row.append(document.createElement("dt"), document.createElement("dd"));
  const bar = document.createElement("span");
  bar.className = "stage";
  bar.setAttribute("aria-hidden", "true"); // the number says how busy it is
  for (const state of STATES) bar.appendChild(document.createElement("i")).className = state;
  row.append(bar);
  return row;
}

function whole(value) {
  return Math.round(value).toLocaleString("en");
}

function share(value) {
  return `${(value * 100).toFixed(value > 0 && value < 0.0995 ? 1 : 0)} %`;
}

/** Powers of 1024. */
function bytes(value) {
  let power = 0;
  while (value >= 1024 && power < 4) [value, power] = [value / 1024, power + 1];
  return `${value.toFixed(value < 10 && power ? 1 : 0)} ${["bytes", "kB", "MB", "GB", "TB"][power]}`;
}

function duration(seconds) {
  if (seconds === null) return "–";
  if (seconds >= 10) return `${seconds.toFixed(0)} s`;
  if (seconds >= 1) return `${seconds.toFixed(1)} s`;
  return `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
}

/** Lines over the last two minutes; the newest value stands at the right edge. The pointer asks for older ones. */
class Chart {
  #points = []; // [time, values]
  #pointer = null; // share of the width where the pointer is

  /** `names`: a class for each line. `least`: the upper edge's value at least. `format`: value → text. */
  constructor(svg, names, least, format) {
    Object.assign(this, { least, format, scale: svg.parentElement.querySelector(".scale") });
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    svg.setAttribute("preserveAspectRatio", "none");
    this.paths = names.map((name) => {
      const [area, line] = ["area", "line"].map((kind) => {
        const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
        path.setAttribute("class", `${kind} ${name}`);
        return path;
      });
      svg.append(area, line);
      return { area, line };
    });
    svg.addEventListener("pointermove", (event) => {
      this.#pointer = event.offsetX / svg.clientWidth;
      this.#label();
    });
    svg.addEventListener("pointerleave", () => {
      this.#pointer = null;
      this.#label();
    });
  }

  /** `length`: how many of the newest points to keep. */
  add(time, values, length) {
    this.#points = [...this.#points, [time, values]].slice(-length);
    this.top = niceTop(Math.max(this.least, ...this.#points.flatMap(([, each]) => each)));
    const x = (at) => (WIDTH - ((time - at) / KEPT_S) * WIDTH).toFixed(1);
    const y = (value) => (HEIGHT - 2 - (value / this.top) * (HEIGHT - 4)).toFixed(1);
    this.paths.forEach(({ area, line }, i) => {
      const course = this.#points.map(([at, each]) => `${x(at)},${y(each[i])}`).join("L");
      line.setAttribute("d", `M${course}`);
      area.setAttribute("d", `M${x(this.#points[0][0])},${HEIGHT}L${course}L${WIDTH},${HEIGHT}Z`);
    });
    this.#label();
  }

  /** The upper edge's value, or the values under the pointer. */
  #label() {
    if (!this.#points.length) return;
    let text = this.format(this.top);
    if (this.#pointer !== null) {
      const [now] = this.#points.at(-1);
      const asked = now - (1 - this.#pointer) * KEPT_S;
      const distance = ([at]) => Math.abs(at - asked);
      const [at, values] = this.#points.reduce((best, point) => (distance(point) < distance(best) ? point : best));
      text = `${Math.round(now - at)} s ago: ${values.map(this.format).join(" · ")}`;
    }
    this.scale.textContent = text;
  }
}

/** 1, 2, 4 or 5 times a power of ten: the least that reaches `value`. */
function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 10].map((factor) => factor * power).find((top) => top >= value * 0.9999);
}
