// One message of the conversation, as it looks.
import { button, copyFrom, el, milliseconds } from "./dom.js";
import { Prose, codeBlock, wholeJson } from "./markdown.js";
import { asCurl, asPython } from "./snippets.js";

/** Whether the answer came to its end: the calls of another one may be torn. */
export const isWhole = (turn) => !turn.error && turn.finish !== "aborted";

const NAMES = { user: "You", assistant: "Model", tool: "Tool result" };

/** Shows a turn and follows it: call update() when it has changed. `actions`: edit, regenerate, giveResults. */
export class MessageView {
  constructor(turn, actions) {
    this.turn = turn;
    this._actions = actions;
    this._prose = null;
    this._name = turn.role === "tool" ? `Result of ${turn.name}` : NAMES[turn.role];
    this._thoughts = el("pre", {});
    this._summary = el("summary", {});
    this._reasoning = el("details", { class: "reasoning", hidden: true }, this._summary, this._thoughts);
    this._body = el("div", { class: "body" });
    this._calls = el("div", { class: "calls" });
    this._footer = el("footer", {});
    this._tools = el("div", { class: "actions", role: "group", "aria-label": `Actions: ${this._name}` });
    this.element = el("article", { class: `message ${turn.role}`, "aria-label": this._name },
      el("h3", { text: this._name }), this._reasoning, this._body, this._calls, this._footer, this._tools);
    this.update();
  }

  update() {
    const turn = this.turn;
    this.element.classList.toggle("streaming", turn.state === "streaming");
    this.element.setAttribute("aria-busy", String(turn.state === "streaming"));
    this._showReasoning();
    if (turn.role === "assistant") this._showAnswer();
    else if (!this._body.firstChild) this._showText();
    if (turn.state === "streaming") {
      this._footer.textContent = turn.tokens ? `${turn.tokens} tokens` : "";
    } else if (!this._tools.firstChild) {
      this._showCalls();
      this._showEnd();
    }
  }

  _showText() {
    const value = this.turn.role === "tool" ? wholeJson(this.turn.content) : undefined;
    this._body.append(value === undefined ? el("p", { class: "plain", text: this.turn.content })
      : codeBlock(JSON.stringify(value, null, 2), "json"));
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
      this._body.replaceChildren(codeBlock(JSON.stringify(value, null, 2), "json"));
      return;
    }
    if (!this._prose) {
      this._prose = new Prose();
      this._body.append(this._prose.element);
    }
    this._prose.show(content);
  }

  _showCalls() {
    for (const call of this.turn.toolCalls ?? []) {
      const value = wholeJson(call.function.arguments);
      const shown = value === undefined ? call.function.arguments : JSON.stringify(value, null, 2);
      this._calls.append(el("section", { class: "call", "aria-label": `Call of ${call.function.name}` },
        el("h4", {}, el("span", { text: "calls " }), el("code", { text: call.function.name })),
        codeBlock(shown || "{}", "json")));
    }
    if (this.turn.toolCalls?.length && isWhole(this.turn) && this._actions.giveResults) this._calls.append(this._resultForm());
  }

  _resultForm() {
    const fields = this.turn.toolCalls.map((call, index) => {
      const id = `result-${crypto.getRandomValues(new Uint32Array(1))[0]}-${index}`;
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
    const turn = this.turn;
    this._footer.replaceChildren(...endOf(turn));
    const copy = button("Copy", () => copyFrom(copy, turn.content));
    this._tools.append(copy);
    if (turn.role === "user") this._tools.append(button("Edit", () => this._edit()));
    if (turn.role !== "assistant") return;
    this._tools.append(button("Regenerate", () => this._actions.regenerate(turn)));
    if (turn.request) {
      const curl = button("Copy as curl", () => copyFrom(curl, asCurl(turn.request)));
      const python = button("Copy as Python", () => copyFrom(python, asPython(turn.request)));
      this._tools.append(curl, python);
    }
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
