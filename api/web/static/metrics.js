// Prometheus' text → what the live view shows. Pure functions; nothing here touches the page.

const SERIES = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const PREFIX = /^(?:pagewire|vllm):/; // see --metrics-prefix

/** Name without prefix → its series, as {labels, value}. */
export function parse(text) {
  const families = new Map();
  for (const line of text.split("\n")) {
    const found = PREFIX.test(line) && SERIES.exec(line.replace(PREFIX, ""));
    if (!found) continue;
    const [, name, labels = "", value] = found;
    if (!families.has(name)) families.set(name, []);
    families.get(name).push({
      labels: Object.fromEntries([...labels.matchAll(LABEL)].map(([, key, text]) => [key, text])),
      value: Number(value.replace("Inf", "Infinity")),
    });
  }
  return families;
}

/** One look at the engine; `time` in seconds. */
export function sample(text, time) {
  const families = parse(text);
  const sum = (name) => (families.get(name) ?? []).reduce((total, series) => total + series.value, 0);
  const mean = (name) => sum(name) / Math.max(1, (families.get(name) ?? []).length); // of several engines
  const by = (name, label) =>
    Object.fromEntries((families.get(name) ?? []).map(({ labels, value }) => [labels[label], value]));
  const sumBy = (name, label) => {
    const sums = {}; // of several engines and ranks
    for (const { labels, value } of families.get(name) ?? []) sums[labels[label]] = (sums[labels[label]] ?? 0) + value;
    return sums;
  };
  const histogram = (name) => {
    const counts = new Map(); // bound → how many were at or under it
    for (const { labels, value } of families.get(`${name}_bucket`) ?? []) {
      const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
      counts.set(bound, (counts.get(bound) ?? 0) + value);
    }
    return [...counts].sort(([a], [b]) => a - b);
  };
  return {
    time,
    running: sum("num_requests_running"),
    waiting: sum("num_requests_waiting"),
    kvShare: mean("kv_cache_usage_perc"),
    stepAge: Math.max(0, ...(families.get("engine_step_age_seconds") ?? []).map((series) => series.value)),
    promptTokens: sum("prompt_tokens_total"),
    outputTokens: sum("generation_tokens_total"),
    cacheQueries: sum("prefix_cache_queries_total"),
    cacheHits: sum("prefix_cache_hits_total"),
    preemptions: sum("num_preemptions_total"),
    draftTokens: sum("spec_decode_num_draft_tokens_total"),
    acceptedTokens: sum("spec_decode_num_accepted_tokens_total"),
    bubbles: mean("pipeline_bubble_ratio"),
    memory: sumBy("worker_memory_bytes", "kind"),
    cpuSeconds: sumBy("process_cpu_seconds_total", "process"),
    roof: families.get("memory_roof_ratio")?.length ? mean("memory_roof_ratio") : null,
    bandwidth: mean("memory_bandwidth_bytes_per_second"),
    gpus: byRank([...families].filter(([name]) => name.startsWith("gpu_"))),
    observed: sumBy("slo_observations_total", "latency_class"),
    attained: sumBy("slo_attained_total", "latency_class"),
    stages: byStage(families.get("stage_seconds_total") ?? []),
    finished: by("request_success_total", "finished_reason"),
    firstToken: histogram("time_to_first_token_seconds"),
    interToken: histogram("inter_token_latency_seconds"),
    whole: histogram("e2e_request_latency_seconds"),
    step: histogram("step_time_seconds"),
  };
}

/** Stage of a pipeline → state → seconds; of several engines engine/stage. */
function byStage(series) {
  const stages = {};
  for (const { labels, value } of series) {
    const states = (stages[labels.engine === undefined ? labels.stage : `${labels.engine}/${labels.stage}`] ??= {});
    states[labels.state] = (states[labels.state] ?? 0) + value;
  }
  return stages;
}

/** Rank with a GPU → metric → value; of several engines engine/rank. */
function byRank(families) {
  const ranks = {};
  for (const [name, series] of families) {
    for (const { labels, value } of series) {
      if (labels.rank === undefined) continue; // vLLM's old names begin alike
      const rank = labels.engine === undefined ? labels.rank : `${labels.engine}/${labels.rank}`;
      (ranks[rank] ??= {})[name] = value;
    }
  }
  return ranks;
}

/** Process → the CPUs that it used between two samples; none that the first one lacks. */
export function cpusUsed(before, after) {
  const seconds = after.time - before.time;
  if (seconds <= 0) return {};
  const known = Object.entries(after.cpuSeconds).filter(([process]) => process in before.cpuSeconds);
  return Object.fromEntries(
    known.map(([process, value]) => [process, Math.max(0, value - before.cpuSeconds[process]) / seconds]),
  );
}

/** Latency class → the share of its first tokens and gaps between two samples that met their target; null: none came. */
export function attainment(before, after) {
  return Object.fromEntries(
    Object.entries(after.observed).map(([name, total]) => {
      const num = total - (before.observed[name] ?? 0);
      return [name, num > 0 ? ((after.attained[name] ?? 0) - (before.attained[name] ?? 0)) / num : null];
    }),
  );
}

/** Stage → state → share of the time with plans in flight between two samples; empty if there was none. */
export function stageShares(before, after) {
  const shares = {};
  for (const [stage, states] of Object.entries(after.stages)) {
    const grown = Object.entries(states).map(([state, seconds]) => [
      state,
      Math.max(0, seconds - (before.stages[stage]?.[state] ?? 0)),
    ]);
    const total = grown.reduce((sum, [, seconds]) => sum + seconds, 0);
    shares[stage] = total ? Object.fromEntries(grown.map(([state, seconds]) => [state, seconds / total])) : {};
  }
  return shares;
}

/** How fast a counter grew between two samples, a second. */
export function rate(before, after, name) {
  const seconds = after.time - before.time;
  return seconds > 0 ? Math.max(0, after[name] - before[name]) / seconds : 0;
}

/** The value under which the share `q` of what was observed between two histograms lies, in seconds; null: nothing
 * was. As in Prometheus it is interpolated inside a bucket, and no more than the last finite bound. */
export function quantile(before, after, q) {
  const earlier = new Map(before);
  const grown = after.map(([bound, count]) => [bound, count - (earlier.get(bound) ?? 0)]);
  const total = grown.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  let [lower, below] = [0, 0];
  for (const [bound, count] of grown) {
    if (count >= q * total) {
      return bound === Infinity ? lower : lower + (bound - lower) * ((q * total - below) / (count - below || 1));
    }
    [lower, below] = [bound, count];
  }
  return lower;
}
