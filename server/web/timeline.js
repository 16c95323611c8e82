// The last steps: above, the tokens of each; below, a lane for each request, which shows what the step gave it.
import { colours, surface } from "./charts.js";

const KEEP = 600; // steps
const COLUMN = 7; // pixels a step
const HEAD = 16; // pixels, above the bars
const BARS = 64;
const LANE = 9;
const [FEW_LANES, LANES] = [4, 24];

export class Timeline {
  constructor(canvas, cursor, text, pause) {
    this.steps = [];
    this.frozen = false;
    this._lanes = new Lanes();
    this._canvas = canvas;
    this._cursor = cursor;
    this._text = text;
    this._follows = true; // the cursor stays on the newest step
    cursor.addEventListener("input", () => { this._follows = cursor.value === cursor.max; this.draw(); });
    canvas.addEventListener("pointermove", (event) => this._point(event));
    canvas.addEventListener("pointerdown", (event) => { this._point(event); this.freeze(true); pause.setAttribute("aria-pressed", "true"); });
  }

  add(steps) {
    if (this.frozen) return;
    for (const step of steps) this.steps.push({ ...step, lanes: this._lanes.assign(step) });
    this.steps.splice(0, this.steps.length - KEEP);
  }

  freeze(frozen) {
    this.frozen = frozen;
    this._follows = !frozen;
  }

  clear() {
    this.steps = [];
    this._lanes = new Lanes();
  }

  draw() {
    const shown = this.steps.slice(-Math.max(1, Math.floor((this._canvas.clientWidth - 2) / COLUMN)));
    const bottom = HEAD + BARS, end = bottom + 8 + this._lanes.height * LANE;
    const { context, width } = surface(this._canvas, end + 2);
    this._shown = shown;
    const cursor = this._place(shown);
    if (!shown.length || width === 0) return;
    const [prefill, decode, line, text] = colours("prefill", "decode", "line", "muted");
    const most = Math.max(...shown.map((step) => step.tokens));
    const left = width - 1 - shown.length * COLUMN;
    const height = (tokens) => BARS * Math.sqrt(tokens / most); // a prompt must not hide the decodes beside it
    context.fillStyle = line;
    context.fillRect(0, bottom, width, 1);
    shown.forEach((step, index) => {
      const x = left + index * COLUMN, total = height(step.tokens);
      const decodes = (total * step.decodeTokens) / step.tokens;
      context.fillStyle = prefill;
      context.fillRect(x, bottom - total, COLUMN - 1, total - decodes);
      context.fillStyle = decode;
      context.fillRect(x, bottom - decodes, COLUMN - 1, decodes);
    });
    shown.forEach((step, index) => {
      step.rows.forEach(([, tokens, isPrefill], row) => {
        const lane = step.lanes[row];
        if (lane === undefined) return;
        context.fillStyle = isPrefill ? prefill : decode;
        context.globalAlpha = isPrefill ? Math.min(1, 0.45 + tokens / 64) : 0.85;
        context.fillRect(left + index * COLUMN, bottom + 6 + lane * LANE, COLUMN - 1, LANE - 2);
      });
    });
    context.globalAlpha = 1;
    context.strokeStyle = text;
    context.strokeRect(left + cursor * COLUMN - 0.5, HEAD - 2.5, COLUMN, end - HEAD + 3);
    context.fillStyle = text;
    context.font = "11px system-ui, sans-serif";
    context.fillText(`up to ${most} ${most === 1 ? "token" : "tokens"} a step`, 1, 10);
  }

  /** Puts the cursor on a step, and says what that step did. Returns its place among `shown`. */
  _place(shown) {
    const cursor = this._cursor, last = Math.max(0, shown.length - 1);
    cursor.max = String(last);
    if (this._follows) cursor.value = String(last);
    const place = Math.min(Number(cursor.value), last), step = shown[place];
    const text = step ? describe(step) : "No step yet: it is shown when somebody asks something.";
    cursor.setAttribute("aria-valuetext", text);
    if (this._text.textContent !== text) this._text.textContent = text;
    this._canvas.setAttribute("aria-label", step ? `Tokens of the last ${shown.length} steps; use the slider to read them one by one` : text);
    return place;
  }

  _point(event) {
    if (!this._shown?.length || (event.type === "pointermove" && !this.frozen)) return;
    const { left, width } = this._canvas.getBoundingClientRect();
    const place = Math.floor((event.clientX - left - (width - 1 - this._shown.length * COLUMN)) / COLUMN);
    this._cursor.value = String(Math.max(0, Math.min(this._shown.length - 1, place)));
    this._follows = false;
    this.draw();
  }
}

/** [step, time, host µs, device µs, requests, tokens, decodes, rows] as an object. */
export function readStep([[step, time, requests, tokens, decodes, hostSeconds, deviceSeconds], rows]) {
  const named = rows.reduce((sum, row) => sum + (row[2] ? 0 : row[1]), 0);
  // All requests are named where they are few; of many, those that computed one token are decodes but for a handful.
  const decodeTokens = rows.length === requests ? named : Math.max(named, decodes);
  const [host, device] = [1e6 * hostSeconds, 1e6 * deviceSeconds];
  return { step, time, host, device, requests, tokens, decodeTokens: Math.min(decodeTokens, tokens), rows };
}

/** A request has a lane while it runs; the next one may have it when it has left. */
class Lanes {
  constructor() {
    this.height = FEW_LANES; // grows, but never jumps back
    this._owners = [];
    this._lastUse = []; // step
    this._of = new Map(); // request id → lane
  }

  /** The lane of each row of a step; undefined where there are too many. */
  assign({ step, rows }) {
    return rows.map(([id]) => {
      let lane = this._of.get(id);
      if (lane === undefined) {
        lane = this._lastUse.findIndex((last) => last < step - 2);
        if (lane < 0 && this._lastUse.length < LANES) lane = this._lastUse.length;
        if (lane < 0) return undefined;
        this._of.delete(this._owners[lane]);
        this._of.set(id, lane);
        this._owners[lane] = id;
        this.height = Math.max(this.height, lane + 1);
      }
      this._lastUse[lane] = step;
      return lane;
    });
  }
}

function describe({ step, host, device, requests, rows, tokens }) {
  const names = rows.slice(0, 12).map(([id, number, isPrefill]) => `#${id} ${isPrefill ? "prefill" : "decode"} ${number}`);
  const others = requests - names.length;
  const list = names.join(", ") + (others > 0 ? `, and ${others} more` : "");
  return `Step ${step}: ${tokens} tokens for ${requests} ${requests === 1 ? "request" : "requests"}, `
    + `device ${(device / 1000).toFixed(2)} ms, host ${(host / 1000).toFixed(2)} ms. ${list}`;
}
