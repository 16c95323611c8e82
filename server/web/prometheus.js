// The text of /metrics as numbers.

const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /([A-Za-z_]\w*)="((?:\\.|[^"\\])*)"/g;

/** Samples by name; `prefix` is taken off the names. */
export class Scrape {
  constructor(text, prefix) {
    this.time = performance.now() / 1000;
    this._samples = new Map();
    for (const line of text.split("\n")) {
      if (line === "" || line[0] === "#") continue;
      const match = LINE.exec(line);
      if (!match || !match[1].startsWith(prefix)) continue;
      const name = match[1].slice(prefix.length), labels = {};
      for (const [, key, value] of (match[2] ?? "").matchAll(LABEL)) labels[key] = value;
      if (!this._samples.has(name)) this._samples.set(name, []);
      this._samples.get(name).push({ labels, value: Number(match[3]) });
    }
  }

  has(name) {
    return this._samples.has(name);
  }

  /** The sum over all labels. */
  value(name) {
    return (this._samples.get(name) ?? []).reduce((sum, sample) => sum + sample.value, 0);
  }

  /** Of one engine. */
  of(name, engine) {
    return (this._samples.get(name) ?? []).find(({ labels }) => labels.engine === engine)?.value ?? 0;
  }

  /** [[label's value, sum], …] */
  sums(name, label) {
    const sums = new Map();
    for (const [key, value] of this.by(name, label)) sums.set(key, (sums.get(key) ?? 0) + value);
    return [...sums];
  }

  /** [[label's value, number], …] */
  by(name, label) {
    return (this._samples.get(name) ?? []).map(({ labels, value }) => [labels[label], value]);
  }

  /** [[upper bound, cumulative count], …] of a histogram, ascending. */
  buckets(name) {
    const bounds = this.by(`${name}_bucket`, "le").map(([le, value]) => [le === "+Inf" ? Infinity : Number(le), value]);
    return bounds.sort((a, b) => a[0] - b[0]);
  }
}

/** How much a counter has grown a second between two scrapes; 0 where the server was started anew. */
export function rate(name, before, now) {
  const seconds = now.time - before.time;
  return seconds > 0 ? Math.max(0, now.value(name) - before.value(name)) / seconds : 0;
}

/** The quantiles of what a histogram counted since `before` (null: ever), and how many that was. */
export function quantiles(name, before, now, shares) {
  const old = new Map(before ? before.buckets(name) : []);
  const buckets = now.buckets(name).map(([bound, value]) => [bound, value - (old.get(bound) ?? 0)]);
  const total = buckets.length ? buckets[buckets.length - 1][1] : 0;
  if (total <= 0) return { total: 0, values: shares.map(() => null) };
  return { total, values: shares.map((share) => quantile(buckets, share * total)) };
}

function quantile(buckets, rank) {
  let lower = 0, below = 0;
  for (const [bound, cumulative] of buckets) {
    if (cumulative >= rank && cumulative > below) {
      return bound === Infinity ? lower : lower + ((bound - lower) * (rank - below)) / (cumulative - below);
    }
    [lower, below] = [bound === Infinity ? lower : bound, cumulative];
  }
  return lower;
}
