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
  const by = (name, label) =>
    Object.fromEntries((families.get(name) ?? []).map(({ labels, value }) => [labels[label], value]));
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
    kvShare: sum("kv_cache_usage_perc") / Math.max(1, (families.get("kv_cache_usage_perc") ?? []).length),
    stepAge: Math.max(0, ...(families.get("engine_step_age_seconds") ?? []).map((series) => series.value)),
    promptTokens: sum("prompt_tokens_total"),
    outputTokens: sum("generation_tokens_total"),
    cacheQueries: sum("prefix_cache_queries_total"),
    cacheHits: sum("prefix_cache_hits_total"),
    preemptions: sum("num_preemptions_total"),
    draftTokens: sum("spec_decode_num_draft_tokens_total"),
    acceptedTokens: sum("spec_decode_num_accepted_tokens_total"),
    finished: by("request_success_total", "finished_reason"),
    firstToken: histogram("time_to_first_token_seconds"),
    interToken: histogram("inter_token_latency_seconds"),
    whole: histogram("e2e_request_latency_seconds"),
    step: histogram("step_time_seconds"),
  };
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
