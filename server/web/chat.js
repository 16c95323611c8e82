// The chat: the conversation that is shown, those that are being answered, and the line where the next message is written.
import { receive } from "./answer.js";
import { Attachments } from "./attachments.js";
import { Conversation, requestBody } from "./conversation.js";
import { button, byId, count, el } from "./dom.js";
import { MessageView } from "./message.js";
import { Settings } from "./settings.js";

const OPEN = "vserve.open"; // the id of the conversation that this tab shows
const NEAR = 80; // pixels from the end within which the view follows it
const PERIOD = 3000; // milliseconds between two times that a growing answer is kept
const EXAMPLES = ["Hello! Who are you?", "What is 12 + 30?", "What is the capital of France? Answer in JSON."];

export class Chat {
  /** `store` keeps conversations; `changed` is called when what is kept or shown has changed. */
  constructor(store, changed) {
    this.model = null; // its name, once known
    this.maxModelLen = null; // tokens
    this.onModel = () => {}; // hears the model of a conversation that is opened
    this._store = store;
    this._changed = changed;
    this._shown = new Conversation();
    this._views = [];
    this._running = new Map(); // id of a conversation → {conversation, controller, ended} of the answer that is being given
    this._log = byId("log");
    this._prompt = byId("prompt");
    this._settings = new Settings(byId("settings"));
    this.attachments = new Attachments((problem) => this._say(problem));
    this._actions = {
      edit: (turn, content) => this._branch(turn, [{ ...turn, content }]),
      regenerate: (turn) => this._branch(turn, []),
      continue: (turn) => this._goOn(turn),
      remove: (turn) => this._settled(() => { this._shown.remove(turn); this._draw(); this._keep(this._shown); }),
      show: (turn) => this._settled(() => { this._shown.show(turn); this._draw(); this._keep(this._shown); }),
      giveResults: (turn, results) => this._continue(turn.toolCalls.map((call, index) => (
        { role: "tool", tool_call_id: call.id, name: call.function.name, content: results[index] }))),
    };
    byId("composer").addEventListener("submit", (event) => { event.preventDefault(); this._submit(); });
    byId("stop").addEventListener("click", () => this.stop());
    byId("new-chat").addEventListener("click", () => this.begin());
    this._prompt.addEventListener("input", () => this._fit());
    this._prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this._submit(); }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
      if (event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey)) { event.preventDefault(); this.begin(); }
    });
    store.onOthers((ids) => this._reread(ids));
    this._ready = this._restore();
  }

  get shownId() {
    return this._shown.id;
  }

  /** The model that was asked last in what is shown; null: none yet. */
  get shownModel() {
    return this._shown.model;
  }

  stop() {
    this._running.get(this._shown.id)?.controller.abort();
  }

  /** Shows an empty conversation. */
  begin() {
    this._show(new Conversation());
    this._prompt.focus();
  }

  async open(id) {
    const kept = this._running.get(id)?.conversation ?? (await this._store.read(id));
    if (kept) this._show(kept instanceof Conversation ? kept : new Conversation(kept));
  }

  /** The one of this id goes, and its answer with it. */
  forget(id) {
    this._running.get(id)?.controller.abort();
    this._running.delete(id);
    if (id === this._shown.id) this.begin();
  }

  rename(id, title) {
    for (const one of [this._shown, this._running.get(id)?.conversation]) if (one?.id === id) one.title = title;
  }

  async _restore() {
    try {
      const id = sessionStorage.getItem(OPEN);
      if (id) await this.open(id);
    } finally {
      this._draw();
    }
  }

  /** Another tab has changed these. */
  async _reread(ids) {
    const { id } = this._shown;
    if (ids.includes(id) && !this._running.has(id)) {
      const kept = await this._store.read(id);
      if (kept) this._show(new Conversation(kept));
      else this.begin();
    }
    this._changed();
  }

  _show(conversation) {
    this._shown = conversation;
    sessionStorage.setItem(OPEN, conversation.id);
    this._log.replaceChildren();
    this._views = [];
    if (conversation.model) this.onModel(conversation.model);
    this._draw();
    this._busy();
    this._scroll(true);
    this._changed();
  }

  async _submit() {
    await this._ready;
    const text = this._prompt.value.trim();
    if ((!text && this.attachments.isEmpty) || this._running.has(this._shown.id)) return;
    this._prompt.value = "";
    this._fit();
    if (this._continue([{ role: "user", content: text, ...this.attachments.attached }])) this.attachments.clear();
  }

  /** Runs `change` when no answer to what is shown is being given any more. */
  async _settled(change) {
    const conversation = this._shown;
    this.stop();
    await this._running.get(conversation.id)?.ended;
    if (conversation === this._shown) change(); // else it is another one by now
  }

  /** Turns in place of this one, which stays beside them. */
  _branch(turn, turns) {
    return this._settled(() => {
      const before = this._shown.head;
      this._shown.head = turn.parent;
      if (!this._continue(turns)) this._shown.head = before;
    });
  }

  /** Adds the turns and asks for an answer; false: the settings are wrong, and nothing was changed. */
  _continue(turns) {
    const conversation = this._shown;
    let parameters;
    try {
      parameters = this._settings.body();
    } catch (error) {
      this._showSettings(true);
      if (turns[0]?.role === "user") { this._prompt.value ||= turns[0].content; this._fit(); }
      return false;
    }
    for (const turn of turns) conversation.add(turn);
    const asked = { model: this.model, system: this._settings.system, parameters };
    const turn = { role: "assistant", content: "", reasoning: "", toolCalls: [], tokens: 0, state: "streaming", asked };
    conversation.add(turn);
    conversation.model = this.model;
    sessionStorage.setItem(OPEN, conversation.id);
    this._draw();
    this._scroll(true);
    this._answer(conversation, turn, requestBody(conversation, turn));
    return true;
  }

  /** An answer that was cut off, from where it ends. */
  _goOn(turn) {
    const conversation = this._shown, body = requestBody(conversation, turn);
    body.messages.push({ role: "assistant", content: turn.content });
    Object.assign(turn, { state: "streaming", finish: undefined, usage: undefined, tokens: 0 });
    this._viewOf(turn).reopen();
    this._answer(conversation, turn, { ...body, continue_final_message: true, add_generation_prompt: false });
  }

  /** Follows the answer to its end, whichever conversation is shown meanwhile. */
  _answer(conversation, turn, body) {
    const running = { conversation, controller: new AbortController() };
    this._running.set(conversation.id, running);
    let drawn = 0, kept = performance.now();
    const draw = () => { drawn = 0; this._viewOf(turn)?.update(); if (conversation === this._shown) this._scroll(false); };
    const changed = () => {
      drawn ||= requestAnimationFrame(draw);
      if (performance.now() - kept > PERIOD) { kept = performance.now(); this._keep(conversation); }
    };
    this._busy();
    this._keep(conversation);
    running.ended = receive(turn, body, running.controller.signal, changed).then(async () => {
      cancelAnimationFrame(drawn);
      const forgotten = this._running.get(conversation.id) !== running;
      if (!forgotten) this._running.delete(conversation.id);
      conversation.updated = Date.now();
      draw();
      this._busy();
      this._measure();
      const tokens = turn.usage?.completion_tokens ?? turn.tokens;
      byId("spoken").textContent = turn.error ? "" : `${turn.finish === "aborted" ? "Stopped" : "Answered"}, ${tokens} tokens.`;
      if (!forgotten) await this._keep(conversation);
    });
  }

  _viewOf(turn) {
    return this._views.find((view) => view.turn === turn);
  }

  /** Draws the path that is shown; what stood there already stays as it is. */
  _draw() {
    const path = this._shown.path();
    let same = 0;
    while (same < path.length && this._views[same]?.turn === path[same]) same += 1;
    for (const view of this._views.splice(same)) view.element.remove();
    this._log.querySelector(".welcome")?.remove();
    for (const turn of path.slice(same)) {
      const view = new MessageView(this._shown, turn, this._actions);
      this._views.push(view);
      this._log.append(view.element);
    }
    for (const view of this._views) view.showPlace();
    if (!path.length) this._welcome();
    this._measure();
  }

  async _welcome() {
    const ask = (text) => button(text, () => { this._prompt.value = text; this._submit(); }, { class: "quiet example" });
    const where = el("p", { class: "muted" });
    this._log.append(el("div", { class: "welcome" }, el("h2", { text: "Say something" }), where,
      el("div", { class: "examples" }, ...EXAMPLES.map(ask))));
    where.textContent = (await this._store.lasts()) ? "Conversations are kept in this browser, and nowhere else."
      : "This browser keeps nothing for this page: conversations end with the tab.";
  }

  /** How much of the context the last answer and its prompt take. */
  _measure() {
    const usage = this._shown.path().findLast((turn) => turn.usage)?.usage, meter = byId("meter");
    meter.hidden = !usage || !this.maxModelLen;
    if (meter.hidden) return;
    const used = usage.prompt_tokens + usage.completion_tokens;
    const text = `${count(used)} of ${count(this.maxModelLen)} tokens`;
    meter.querySelector("meter").value = used / this.maxModelLen;
    meter.querySelector("meter").setAttribute("aria-valuetext", text);
    meter.lastElementChild.textContent = text;
  }

  _busy() {
    const busy = this._running.has(this._shown.id);
    byId("send").hidden = busy;
    byId("stop").hidden = !busy;
    if (document.activeElement === document.body || document.activeElement === byId("stop")) this._prompt.focus();
  }

  _showSettings(open) {
    byId("settings").classList.toggle("open", open);
    byId("toggle-settings").setAttribute("aria-expanded", String(open));
  }

  _say(problem) {
    byId("problem").textContent = problem;
    clearTimeout(this._unsaid);
    this._unsaid = setTimeout(() => { byId("problem").textContent = ""; }, 8000);
  }

  _fit() {
    this._prompt.style.height = "auto";
    this._prompt.style.height = `${Math.min(this._prompt.scrollHeight + 2, 240)}px`;
  }

  _scroll(always) {
    const log = this._log;
    if (always || log.scrollHeight - log.scrollTop - log.clientHeight < NEAR + 0.2 * log.clientHeight) log.scrollTop = log.scrollHeight;
  }

  async _keep(conversation) {
    try {
      if (conversation.turns.length) await this._store.write(conversation.kept());
      else await this._store.remove(conversation.id);
    } catch (error) {
      this._say(`This conversation could not be kept: ${error?.message ?? "the browser has no room left"}.`);
    }
    this._changed();
  }
}
