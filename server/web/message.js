// One message of the conversation, as it looks.
import { isWhole, requestBody } from "./conversation.js";
import { button, copyFrom, el, icon, iconButton, milliseconds } from "./dom.js";
import { Prose, codeBlock, wholeJson } from "./markdown.js";
import { showImages } from "./pictures.js";
import { asCurl, asPython } from "./snippets.js";

const nameOf = (turn) => (turn.role === "user" ? "You" : turn.role === "tool" ? `Result of ${turn.name}` : turn.asked?.model ?? "Model");

/** Shows a turn and follows it: call update() when it has changed. `actions`: edit, regenerate, continue, remove, show,
 * giveResults. */
export class MessageView {
  constructor(conversation, turn, actions) {
    this.turn = turn;
    this._conversation = conversation;
    this._actions = actions;
    this._prose = null;
    this._name = nameOf(turn);
    this._thoughts = el("pre", {});
    this._summary = el("summary", {});
    this._reasoning = el("details", { class: "reasoning", hidden: true }, this._summary, this._thoughts);
    this._body = el("div", { class: "body" });
    this._calls = el("div", { class: "calls" });
    this._footer = el("footer", {});
    this._versions = el("span", { class: "versions", hidden: true });
    this._tools = el("div", { class: "actions", role: "group", "aria-label": `Actions: ${this._name}` }, this._versions);
    this.element = el("article", { class: `message ${turn.role}`, "aria-label": this._name },
      el("h2", { text: this._name }), this._reasoning, this._body, this._calls, this._footer, this._tools);
    this.update();
  }

  update() {
    const turn = this.turn, streams = turn.state === "streaming";
    this.element.classList.toggle("streaming", streams);
    this.element.setAttribute("aria-busy", String(streams));
    this._showReasoning();
    if (turn.role === "assistant") this._showAnswer();
    else if (!this._body.firstChild) this._showText();
    if (streams) {
      this._footer.textContent = turn.tokens ? `${turn.tokens} tokens` : "";
    } else if (!this._tools.querySelector("button.act")) {
      this._showCalls();
      this._showEnd();
    }
  }

  /** Where it stands in what is shown: which of several it is, with a way to those beside it, and whether results are
   * still asked for. */
  showPlace() {
    if (this._conversation.head !== this.turn.id) this._calls.querySelector(".results")?.remove();
    const all = this._conversation.versions(this.turn), at = all.indexOf(this.turn);
    this._versions.hidden = all.length < 2;
    const step = (name, label, to) =>
      iconButton(name, label, () => this._actions.show(all[to]), { disabled: to < 0 || to >= all.length });
    this._versions.replaceChildren(step("left", "The version before", at - 1), el("span", { text: `${at + 1} / ${all.length}` }),
      step("right", "The version after", at + 1));
  }

  /** Before the answer goes on: what its end showed is taken away. */
  reopen() {
    this._tools.replaceChildren(this._versions);
    this.update();
  }

  _showText() {
    const { role, content, files = [], images = [] } = this.turn;
    const value = role === "tool" ? wholeJson(content) : undefined;
    if (images.length) this._body.append(showImages(images));
    for (const file of files) {
      this._body.append(el("details", { class: "file" }, el("summary", {}, icon("clip"), el("span", { text: file.name })),
        el("pre", { class: "plain", text: file.text })));
    }
    if (value !== undefined) this._body.append(codeBlock(JSON.stringify(value, null, 2), "json"));
    else if (content) this._body.append(el("p", { class: "plain", text: content }));
  }

  _showReasoning() {
    const { reasoning, content, state, thoughtSeconds } = this.turn;
    if (!reasoning) return;
    this._reasoning.hidden = false;
    this._thoughts.textContent = reasoning;
    this._summary.textContent = state === "streaming" && !content ? "Thinking …"
      : thoughtSeconds ? `Thought for ${milliseconds(thoughtSeconds)}` : "Thought";
  }

  _showAnswer() {
    const { content, state } = this.turn;
    const value = state === "streaming" ? undefined : wholeJson(content);
    if (value !== undefined) {
      this._prose = null;
      this._body.replaceChildren(codeBlock(JSON.stringify(value, null, 2), "json"));
      return;
    }
    if (!this._prose) {
      this._prose = new Prose();
      this._body.replaceChildren(this._prose.element);
    }
    this._prose.show(content);
  }

  _showCalls() {
    this._calls.replaceChildren();
    for (const call of this.turn.toolCalls ?? []) {
      const value = wholeJson(call.function.arguments);
      const shown = value === undefined ? call.function.arguments : JSON.stringify(value, null, 2);
      this._calls.append(el("section", { class: "call", "aria-label": `Call of ${call.function.name}` },
        el("h4", {}, el("span", { text: "calls " }), el("code", { text: call.function.name })),
        codeBlock(shown || "{}", "json")));
    }
    const last = this._conversation.head === this.turn.id; // no result has been given
    if (this.turn.toolCalls?.length && isWhole(this.turn) && last) this._calls.append(this._resultForm());
  }

  _resultForm() {
    const fields = this.turn.toolCalls.map((call, index) => {
      const id = `result-${this.turn.id}-${index}`;
      const area = el("textarea", { id, rows: "2", placeholder: "what the tool says; JSON or text" });
      return { area, field: el("div", { class: "field" }, el("label", { for: id, text: `Result of ${call.function.name}` }), area) };
    });
    const form = el("form", { class: "results" }, ...fields.map(({ field }) => field),
      el("button", { type: "submit", class: "primary", text: "Send results" }));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      form.remove();
      this._actions.giveResults(this.turn, fields.map(({ area }) => area.value));
    });
    return form;
  }

  _showEnd() {
    const turn = this.turn, actions = this._actions;
    const act = (name, label, onclick) => this._tools.append(iconButton(name, label, onclick, { class: "quiet icon-button act" }));
    const copies = (name, label, text) => act(name, label, (event) => copyFrom(event.currentTarget, text()));
    this._footer.replaceChildren(...endOf(turn));
    copies("copy", "Copy", () => turn.content);
    if (turn.role === "user") act("edit", "Edit", () => this._edit());
    if (turn.role === "assistant") {
      act("again", "Regenerate", () => actions.regenerate(turn));
      if (turn.asked) {
        if (isCutOff(turn) && this._conversation.head === turn.id) act("go-on", "Continue", () => actions.continue(turn));
        copies("terminal", "Copy as curl", () => asCurl(requestBody(this._conversation, turn)));
        copies("braces", "Copy as Python", () => asPython(requestBody(this._conversation, turn)));
      }
    }
    act("bin", "Delete with what follows", () => actions.remove(turn));
  }

  _edit() {
    const area = el("textarea", { class: "editor", "aria-label": "Edit your message", rows: "3" });
    area.value = this.turn.content;
    const shown = [...this._body.childNodes];
    const end = () => { this._body.replaceChildren(...shown); this._tools.hidden = false; };
    const save = () => { if (area.value.trim()) this._actions.edit(this.turn, area.value.trim()); };
    this._body.replaceChildren(area, el("p", { class: "row" }, button("Cancel", end),
      button("Send again", save, { class: "primary" })));
    this._tools.hidden = true;
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") end();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); save(); }
    });
    area.focus();
  }
}

/** Whether an answer that only lacks its end can go on: thoughts and calls cannot. */
const isCutOff = ({ content, finish, toolCalls }) =>
  Boolean(content) && !toolCalls?.length && (finish === "length" || finish === "aborted");

const FINISH = { length: "cut off: out of tokens", tool_calls: "wants a tool", content_filter: "filtered", aborted: "stopped" };

function endOf({ role, usage, tokens, ttft, rate, finish, error }) {
  if (role !== "assistant") return [];
  const parts = [];
  if (usage || tokens) parts.push(["tokens", `${usage?.completion_tokens ?? tokens} tokens`]);
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(["prompt", `${usage.prompt_tokens} prompt${cached ? `, ${cached} of them cached` : ""}`]);
  }
  if (ttft !== undefined) parts.push(["ttft", `TTFT ${milliseconds(ttft)}`]);
  if (rate !== undefined) parts.push(["rate", `${rate < 10 ? rate.toFixed(1) : Math.round(rate)} tokens/s`]);
  if (FINISH[finish]) parts.push(["finish", FINISH[finish]]);
  const nodes = parts.map(([kind, text]) => el("span", { class: kind, text }));
  if (error) nodes.push(el("p", { class: "error", role: "alert", text: error }));
  return nodes;
}
