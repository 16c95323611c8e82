// The conversation: what was said, what is being said, and what can be done about it.
import { events, request } from "./api.js";
import { button, byId, el } from "./dom.js";
import { MessageView, isWhole } from "./message.js";
import { Settings } from "./settings.js";

const STORE = "vserve.conversation";
const NEAR = 80; // pixels from the end within which the view follows it
const EXAMPLES = ["Hello! Who are you?", "What is 12 + 30?", "What is the capital of France? Answer in JSON."];

export class Chat {
  constructor() {
    this.model = null; // its name, once known
    this._turns = [];
    this._views = [];
    this._running = null; // the AbortController of the answer that is being given
    this._log = byId("log");
    this._prompt = byId("prompt");
    this._settings = new Settings(byId("settings"));
    this._actions = {
      edit: (turn, text) => this._restart(this._turns.indexOf(turn), [{ role: "user", content: text }]),
      regenerate: (turn) => this._restart(this._turns.indexOf(turn), []),
      giveResults: (turn, results) => this._continue(turn.toolCalls.map((call, index) => (
        { role: "tool", tool_call_id: call.id, name: call.function.name, content: results[index] }))),
    };
    byId("composer").addEventListener("submit", (event) => { event.preventDefault(); this._submit(); });
    byId("stop").addEventListener("click", () => this.stop());
    byId("new-chat").addEventListener("click", () => this._clear());
    this._prompt.addEventListener("input", () => this._fit());
    this._prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this._submit(); }
    });
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") this.stop(); });
    for (const turn of JSON.parse(sessionStorage.getItem(STORE) ?? "[]")) this._add(turn);
    this._welcome();
  }

  stop() {
    this._running?.abort();
  }

  _submit() {
    const text = this._prompt.value.trim();
    if (!text || this._running) return;
    this._prompt.value = "";
    this._fit();
    this._continue([{ role: "user", content: text }]);
  }

  /** Everything from turn `index` on is replaced. */
  async _restart(index, turns) {
    this.stop();
    await this._ended;
    this._turns.splice(index);
    for (const view of this._views.splice(index)) view.element.remove();
    this._continue(turns);
  }

  _continue(turns) {
    let parameters;
    try {
      parameters = this._settings.body();
    } catch (error) {
      this._showSettings(true);
      if (turns[0]?.role === "user") { this._prompt.value = turns[0].content; this._fit(); }
      return;
    }
    for (const turn of turns) this._add(turn);
    const body = { model: this.model, messages: this._messages(), ...parameters };
    const turn = { role: "assistant", content: "", reasoning: "", toolCalls: [], tokens: 0, state: "streaming", request: body };
    const view = this._add(turn);
    this._scroll(true);
    this._ended = this._answer(turn, view);
  }

  _messages() {
    const system = this._settings.system;
    return [...(system ? [{ role: "system", content: system }] : []), ...history(this._turns)];
  }

  /** Runs to the end of the answer; whatever goes wrong is shown with it. */
  async _answer(turn, view) {
    const controller = this._running = new AbortController();
    this._busy(true);
    const started = performance.now();
    const clock = { first: null, last: null, spoke: null };
    let drawn = 0;
    const draw = () => { drawn = 0; view.update(); this._scroll(false); };
    try {
      const body = { ...turn.request, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
      const response = await request("v1/chat/completions", { method: "POST", body, signal: controller.signal });
      for await (const { data } of events(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message ?? String(chunk.error));
        take(turn, chunk, clock);
        drawn ||= requestAnimationFrame(draw);
      }
    } catch (error) {
      if (error.name === "AbortError") turn.finish = "aborted";
      else turn.error = error.message;
    }
    cancelAnimationFrame(drawn);
    if (clock.first !== null) turn.ttft = (clock.first - started) / 1000;
    const tokens = turn.usage?.completion_tokens ?? turn.tokens;
    if (tokens > 1 && clock.last > clock.first) turn.rate = (1000 * (tokens - 1)) / (clock.last - clock.first);
    if (turn.reasoning && clock.first !== null) turn.thoughtSeconds = ((clock.spoke ?? clock.last) - clock.first) / 1000;
    turn.state = "done";
    this._running = null;
    draw();
    this._busy(false);
    byId("spoken").textContent = turn.error ? "" : `${turn.finish === "aborted" ? "Stopped" : "Answered"}, ${tokens} tokens.`;
    this._save();
  }

  _add(turn) {
    this._log.querySelector(".welcome")?.remove();
    const view = new MessageView(turn, this._actions);
    this._turns.push(turn);
    this._views.push(view);
    this._log.append(view.element);
    return view;
  }

  _clear() {
    this.stop();
    this._turns = [];
    this._views = [];
    this._log.replaceChildren();
    sessionStorage.removeItem(STORE);
    this._welcome();
    this._prompt.focus();
  }

  _welcome() {
    if (this._turns.length) return;
    const ask = (text) => button(text, () => { this._prompt.value = text; this._submit(); }, { class: "quiet example" });
    this._log.append(el("div", { class: "welcome" }, el("h2", { text: "Say something" }),
      el("p", { class: "muted", text: "The conversation stays in this tab." }),
      el("div", { class: "examples" }, ...EXAMPLES.map(ask))));
  }

  _busy(busy) {
    byId("send").hidden = busy;
    byId("stop").hidden = !busy;
    if (document.activeElement === document.body || document.activeElement === byId("stop")) this._prompt.focus();
  }

  _showSettings(open) {
    byId("settings").classList.toggle("open", open);
    byId("toggle-settings").setAttribute("aria-expanded", String(open));
  }

  _fit() {
    this._prompt.style.height = "auto";
    this._prompt.style.height = `${Math.min(this._prompt.scrollHeight + 2, 240)}px`;
  }

  _scroll(always) {
    const log = this._log;
    if (always || log.scrollHeight - log.scrollTop - log.clientHeight < NEAR + 0.2 * log.clientHeight) log.scrollTop = log.scrollHeight;
  }

  _save() {
    try {
      sessionStorage.setItem(STORE, JSON.stringify(this._turns));
    } catch { // full: the conversation is then lost with the page, no more
    }
  }
}

/** What a chunk adds to the turn. */
function take(turn, chunk, clock) {
  if (chunk.usage) {
    turn.usage = chunk.usage;
    turn.tokens = chunk.usage.completion_tokens;
  }
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const { delta, finish_reason: finish } = choice;
  const thought = delta?.reasoning ?? delta?.reasoning_content ?? "";
  const text = delta?.content ?? "", calls = delta?.tool_calls ?? [];
  if (finish) turn.finish = finish;
  if (!thought && !text && !calls.length) return;
  clock.last = performance.now();
  clock.first ??= clock.last;
  if (!thought) clock.spoke ??= clock.last;
  if (!chunk.usage) turn.tokens += 1;
  turn.reasoning += thought;
  turn.content += text;
  for (const call of calls) {
    const known = (turn.toolCalls[call.index ?? 0] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    known.id ||= call.id ?? "";
    known.function.name += call.function?.name ?? "";
    known.function.arguments += call.function?.arguments ?? "";
  }
}

/** What the model is told of the conversation. An answer that never came is left out with its question: an empty one
 * would be read as the model's own, and many templates want questions and answers in turn. */
function history(turns) {
  const messages = [];
  for (const turn of turns) {
    const message = asMessage(turn);
    if (turn.role !== "assistant" || message.content || message.tool_calls) messages.push(message);
    else if (messages.at(-1)?.role === "user") messages.pop();
  }
  return messages;
}

function asMessage(turn) {
  if (turn.role === "tool") return { role: "tool", tool_call_id: turn.tool_call_id, content: turn.content };
  const message = { role: turn.role, content: turn.content };
  if (turn.toolCalls?.length && isWhole(turn)) {
    message.tool_calls = turn.toolCalls;
    if (turn.reasoning) message.reasoning = turn.reasoning; // a model goes on thinking when the tools have answered
  }
  return message;
}
