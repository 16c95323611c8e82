// The view of the engine: /metrics once a second, and the steps as they happen.
import { events, request } from "./api.js";
import { blockMap, columns, sparkline } from "./charts.js";
import { byId, bytes, count, el, milliseconds } from "./dom.js";
import { Engines } from "./engines.js";
import { Scrape, quantiles, rate } from "./prometheus.js";
import { Timeline, readStep } from "./timeline.js";

const PERIOD = 1000; // milliseconds between two looks at /metrics
const SAMPLES = 60; // of a sparkline
const WINDOW = 60; // seconds that percentiles are over, where anything happened in them
const LATENCIES = [
  ["Time to first token", "time_to_first_token_seconds"],
  ["Between tokens", "inter_token_latency_seconds"],
  ["In the queue", "request_queue_time_seconds"],
  ["Whole answer", "e2e_request_latency_seconds"],
];
const SHARES = [0.5, 0.9, 0.99];
const wholeNumber = (value) => `${Math.round(value)}`;
const percent = (value) => `${(100 * value).toFixed(value > 0 && value < 0.0995 ? 1 : 0)} %`;
const TILES = [
  ["running", "Running", "decode", wholeNumber],
  ["waiting", "Waiting", "prefill", wholeNumber],
  ["output", "Output tokens/s", "decode", count],
  ["prompt", "Prompt tokens/s", "prefill", count],
  ["steps", "Steps/s", "decode", wholeNumber],
  ["cache", "Cache in use", "decode", percent],
  ["hits", "Prefix hit rate", "cached", percent],
  ["preemptions", "Preemptions", "prefill", wholeNumber],
];

export class EngineView {
  constructor() {
    this._hello = null;
    this._scrapes = [];
    this._blocks = { used: [], cached: [], perCell: 1, numBlocks: 0 };
    this._experts = []; // tokens of each, where the model is a mixture
    this._tiles = new Map(TILES.map((tile) => [tile[0], new Tile(byId("tiles"), ...tile.slice(1))]));
    this._rows = LATENCIES.map(([label]) => {
      const cells = SHARES.map(() => el("td", { text: "–" }));
      byId("latency").append(el("tr", {}, el("th", { scope: "row", text: label }), ...cells));
      return cells;
    });
    this._timeline = new Timeline(byId("timeline"), byId("cursor"), byId("step"), byId("pause"));
    this._engines = new Engines(byId("engines"), (engine) => this._lookAt(engine));
    this._running = null; // an AbortController
    this._drawn = 0;
    byId("pause").addEventListener("click", (event) => {
      this._timeline.freeze(!this._timeline.frozen);
      event.target.setAttribute("aria-pressed", String(this._timeline.frozen));
      this._timeline.draw();
    });
    addEventListener("resize", () => this.repaint());
  }

  start() {
    if (this._running) return;
    this._running = new AbortController();
    this._scrapes = [];
    this._follow(this._running.signal);
    this.repaint();
  }

  /** At another engine's steps and blocks. */
  _lookAt(engine) {
    this._engines.shown = engine;
    this._timeline.clear();
    this._blocks = { used: [], cached: [], perCell: 1, numBlocks: 0 };
    this.stop();
    this.start();
  }

  stop() {
    this._running?.abort();
    this._running = null;
  }

  repaint() {
    if (!this._running || this._drawn) return;
    this._drawn = requestAnimationFrame(() => {
      this._drawn = 0;
      this._timeline.draw();
      blockMap(byId("blocks"), this._blocks);
      if (this._experts.length) columns(byId("experts"), this._experts, "decode");
      for (const tile of this._tiles.values()) tile.draw();
    });
  }

  /** Both sources, again and again, until the signal. */
  async _follow(signal) {
    while (!signal.aborted) {
      let polling = 0;
      try {
        const { shown } = this._engines;
        const stream = await request(shown === null ? "ui/events" : `ui/events?engine=${shown}`, { signal });
        for await (const { event, data } of events(stream)) {
          if (event === "hello") {
            this._hello = JSON.parse(data);
            this._engines.shown = this._hello.engine;
            this._notice(null);
            clearInterval(polling);
            polling = setInterval(() => this._poll(signal), PERIOD);
            this._poll(signal);
          } else {
            this._take(JSON.parse(data));
          }
        }
        if (!signal.aborted) this._notice("The server ended the stream: it is shutting down, or its engine is gone.");
      } catch (error) {
        if (!signal.aborted) this._notice(error.message);
      }
      clearInterval(polling);
      if (!signal.aborted) await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }

  _notice(text) {
    const notice = byId("engine-notice");
    notice.hidden = text === null;
    notice.textContent = text ?? "";
  }

  _take([steps, [numCells, perCell, start, used, cached]]) {
    const last = this._timeline.steps.at(-1);
    if (last && steps.length && steps[0][0][0] < last.step) this._timeline.clear(); // another engine
    this._timeline.add(steps.map(readStep));
    if (this._blocks.used.length !== numCells) {
      const empty = () => new Array(numCells).fill(0);
      this._blocks = { used: empty(), cached: empty(), perCell, numBlocks: this._hello.num_blocks };
    }
    this._blocks.used.splice(start, used.length, ...used);
    this._blocks.cached.splice(start, cached.length, ...cached);
    this._showSplit();
    this.repaint();
  }

  async _poll(signal) {
    let scrape;
    try {
      scrape = new Scrape(await (await request("metrics", { signal })).text(), this._hello.metrics_prefix);
    } catch {
      return; // the stream of events says what is wrong
    }
    this._scrapes = this._scrapes.filter(({ time }) => time >= scrape.time - WINDOW - 2);
    const before = this._scrapes.at(-1);
    if (before && scrape.value("engine_steps_total") < before.value("engine_steps_total")) this._scrapes = [];
    this._scrapes.push(scrape);
    this._showTiles(scrape, before ?? scrape);
    this._showLatency(scrape);
    this._showMemory(scrape);
    this._showExperts(scrape);
    this._showDrafts(scrape);
    this._engines.show(scrape, before ?? scrape);
    this.repaint();
  }

  _showTiles(now, before) {
    const { max_num_seqs: most, enable_prefix_caching: caching } = this._hello;
    const set = (name, value, note) => this._tiles.get(name).set(value, note);
    const total = (name) => now.value(`${name}_total`);
    set("running", now.value("num_requests_running"), `of ${most}`);
    set("waiting", now.value("num_requests_waiting"), "in the queue");
    set("output", rate("generation_tokens_total", before, now), `${count(total("generation_tokens"))} in all`);
    set("prompt", rate("prompt_tokens_total", before, now), `${count(total("prompt_tokens"))} in all`);
    set("steps", rate("engine_steps_total", before, now), `${count(total("engine_steps"))} in all`);
    const blocks = now.value("kv_blocks"), free = now.value("kv_blocks_free");
    set("cache", blocks ? (blocks - free) / blocks : 0, `${blocks - free} of ${blocks} blocks`);
    const old = this._scrapes[0];
    const asked = total("prefix_cache_queries"), found = total("prefix_cache_hits");
    const askedLately = asked - old.value("prefix_cache_queries_total");
    const foundLately = found - old.value("prefix_cache_hits_total");
    set("hits", askedLately > 0 ? foundLately / askedLately : asked ? found / asked : 0,
      !caching ? "caching is off" : askedLately > 0 ? `last ${WINDOW} s` : "since the start");
    set("preemptions", total("num_preemptions"), total("num_preemptions") ? "the cache is short" : "since the start");
    byId("cache-figures").textContent =
      `${blocks} blocks of ${this._hello.block_size} tokens; ${count(found)} of ${count(asked)} prompt tokens looked up were cached.`;
    const kept = this._blocks.cached.reduce((sum, cell) => sum + cell, 0);
    byId("blocks").setAttribute("aria-label", `Blocks of the cache: ${blocks - free} in use, ${kept} free with a cached prefix, ${Math.max(0, free - kept)} empty`);
  }

  _showLatency(now) {
    const old = this._scrapes[0];
    const lately = quantiles(LATENCIES[0][1], old, now, SHARES).total > 0;
    const before = lately ? old : null;
    byId("latency-window").textContent = lately ? `last ${Math.max(1, Math.min(WINDOW, Math.round(now.time - old.time)))} s` : "since the start";
    const none = quantiles(LATENCIES[0][1], null, now, SHARES).total === 0;
    byId("no-latency").hidden = !none;
    byId("latency").parentElement.hidden = none;
    byId("latency-window").hidden = none;
    LATENCIES.forEach(([, name], row) => {
      quantiles(name, before, now, SHARES).values.forEach((value, column) => {
        this._rows[row][column].textContent = value === null ? "–" : milliseconds(value);
      });
    });
  }

  _showSplit() {
    const steps = this._timeline.steps.slice(-200);
    if (!steps.length) return;
    const mean = (key) => steps.reduce((sum, step) => sum + step[key], 0) / steps.length / 1e6;
    const host = mean("host"), device = mean("device"), most = Math.max(host, device);
    const name = this._hello.device.startsWith("cuda") ? "GPU" : "Model (CPU)";
    bars(byId("split"), [
      [name, device / most, milliseconds(device), "decode"], ["Host", host / most, milliseconds(host), "prefill"],
    ]);
    byId("split-window").textContent = `mean of ${steps.length}`;
    const slowest = Math.max(...steps.map((step) => step.device)) / 1e6;
    byId("split-figures").textContent = `The slowest of them took ${milliseconds(slowest)}. ${
      name === "GPU" ? "The host prepares the next step while the GPU computes." : ""}`;
  }

  _showExperts(now) {
    const tokens = (scrape) => scrape.sums("expert_tokens_total", "expert").map(([, value]) => value);
    const all = tokens(now), old = tokens(this._scrapes[0]);
    byId("experts-card").hidden = !all.length;
    if (!all.length) return void (this._experts = all);
    const lately = all.map((value, expert) => value - (old[expert] ?? 0)), some = lately.some((value) => value > 0);
    this._experts = some && old.length ? lately : all;
    byId("experts-window").textContent = some && old.length ? `last ${WINDOW} s` : "since the start";
    const mean = this._experts.reduce((sum, value) => sum + value, 0) / this._experts.length;
    const most = Math.max(...this._experts), busiest = this._experts.indexOf(most);
    const imbalance = now.by("expert_imbalance", "engine").map(([, value]) => value).filter((value) => value > 0);
    byId("experts-figures").textContent = `Over all layers expert ${busiest} got the most tokens: ${(most / mean).toFixed(2)} of the mean.${
      imbalance.length ? ` Within a layer the busiest expert had ${Math.max(...imbalance).toFixed(2)} of the mean.` : ""}`;
    byId("experts").setAttribute("aria-label", `Tokens of each of ${all.length} experts; the busiest is ${busiest}`);
  }

  /** Of each position in what was drafted, how often that draft and all before it held. */
  _showDrafts(now) {
    const read = (scrape) => ["num_drafts", "num_draft_tokens"].map((name) => scrape.value(`spec_decode_${name}_total`))
      .concat(scrape.sums("spec_decode_num_accepted_tokens_per_pos_total", "position").map(([, value]) => value));
    const all = read(now), old = read(this._scrapes[0]), lately = all[0] > old[0];
    byId("drafts-card").hidden = !now.has("spec_decode_num_drafts_total");
    byId("drafts-window").textContent = !all[0] ? "" : lately ? `last ${WINDOW} s` : "since the start";
    const [drafts, tokens, ...held] = lately ? all.map((value, index) => value - (old[index] ?? 0)) : all;
    bars(byId("drafts"), drafts ? held.map((value, place) =>
      [`Draft ${place + 1}`, value / drafts, percent(value / drafts), "decode"]) : []);
    const sum = held.reduce((total, value) => total + value, 0);
    byId("drafts-figures").textContent = !drafts ? "Nothing has been drafted yet."
      : `${count(sum)} of ${count(tokens)} drafted tokens held: ${(1 + sum / drafts).toFixed(2)} tokens a step for who has drafts.`;
  }

  _showMemory(now) {
    const purposes = now.sums("memory_bytes", "purpose").filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1]);
    const total = purposes.reduce((sum, [, value]) => sum + value, 0), most = purposes[0]?.[1] ?? 1;
    byId("memory-total").textContent = total ? bytes(total) : "not reported";
    bars(byId("memory"), purposes.map(([name, value]) => [name.replaceAll("_", " "), value / most, bytes(value), "decode"]));
  }
}

class Tile {
  constructor(root, label, colour, format) {
    this._values = [];
    this._colour = colour;
    this._format = format;
    this._value = el("p", { class: "value", text: "–" });
    this._note = el("p", { class: "muted" });
    this._canvas = el("canvas", { "aria-hidden": "true" });
    root.append(el("section", { class: "tile", "aria-label": label }, el("h2", { text: label }), this._value, this._note, this._canvas));
  }

  set(value, note) {
    this._values = [...this._values, value].slice(-SAMPLES);
    this._value.textContent = this._format(value);
    this._note.textContent = note;
  }

  draw() {
    sparkline(this._canvas, this._values, SAMPLES, this._colour);
  }
}

/** [[name, share of the width, text, colour], …] */
function bars(list, entries) {
  while (list.children.length > entries.length) list.lastElementChild.remove();
  entries.forEach(([name, share, text, colour], index) => {
    const row = list.children[index] ?? list.appendChild(
      el("div", {}, el("dt"), el("dd", {}, el("span", { class: "bar" }), el("span", { class: "figure" }))));
    const [term, detail] = row.children, [bar, figure] = detail.children;
    term.textContent = name;
    bar.className = `bar ${colour}`;
    bar.style.width = `${Math.max(0.5, 60 * share)}%`;
    figure.textContent = text;
  });
}
