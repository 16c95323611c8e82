// System prompts kept in this browser, to be chosen again.
import { button, el } from "./dom.js";

const STORE = "vserve.prompts";
const LONGEST = 40; // characters of a name: the beginning of the prompt

export class Presets {
  /** `area`: the field of the system prompt. */
  constructor(area) {
    this._area = area;
    this._prompts = JSON.parse(localStorage.getItem(STORE) ?? "[]");
    this._choice = el("select", { "aria-label": "Prompts kept here" });
    this._keep = button("Keep", () => this._change([...this._prompts, area.value.trim()]));
    this._forget = button("Forget", () => this._change(this._prompts.filter((prompt) => prompt !== area.value.trim())));
    this.element = el("div", { class: "presets" }, this._choice, this._keep, this._forget);
    this._choice.addEventListener("change", () => {
      area.value = this._prompts[Number(this._choice.value)] ?? "";
      area.dispatchEvent(new Event("input", { bubbles: true }));
    });
    area.addEventListener("input", () => this.show());
    this.show();
  }

  _change(prompts) {
    this._prompts = prompts.filter((prompt) => prompt !== "");
    localStorage.setItem(STORE, JSON.stringify(this._prompts));
    this.show();
  }

  show() {
    const now = this._prompts.indexOf(this._area.value.trim());
    this._choice.replaceChildren(new Option(this._prompts.length ? "kept prompts …" : "none is kept", ""),
      ...this._prompts.map((prompt, index) => new Option(prompt.slice(0, LONGEST), String(index))));
    this._choice.value = now === -1 ? "" : String(now);
    this._keep.hidden = now !== -1 || !this._area.value.trim();
    this._forget.hidden = now === -1;
  }
}
