// What a request asks for beside the conversation. Fields left empty are left to the server.
import { el } from "./dom.js";
import { Presets } from "./presets.js";
import { Tools } from "./tools.js";

const STORE = "vserve.settings";

const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.05 }],
  ["top_k", "Top k", { min: -1, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }],
  ["max_tokens", "Most tokens", { min: 1, step: 1 }],
  ["seed", "Seed", { min: 0, step: 1 }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1 }],
  ["repetition_penalty", "Repetition penalty", { min: 0.1, step: 0.05 }],
];

const EFFORTS = ["", "none", "low", "medium", "high"];

export class Settings {
  constructor(root) {
    this._fields = new Map();
    const saved = JSON.parse(localStorage.getItem(STORE) ?? "{}");
    const field = (name, label, input, note) => {
      input.id = `set-${name}`;
      input.value = saved[name] ?? "";
      this._fields.set(name, input);
      return el("div", { class: "field" }, el("label", { for: input.id, text: label }), input,
        note ? el("p", { class: "muted", id: `${input.id}-note`, text: note }) : null);
    };
    const system = field("system", "System prompt", el("textarea", { rows: "3" }));
    system.append(new Presets(this._fields.get("system")).element);
    root.append(el("h2", { text: "Settings" }), system);
    this._tools = new Tools(root);
    root.append(
      el("div", { class: "numbers" }, ...NUMBERS.map(([name, label, limits]) =>
        field(name, label, el("input", { type: "number", inputmode: "decimal", placeholder: "default", ...limits, step: "any" }))),
      field("reasoning_effort", "Reasoning",
        el("select", {}, ...EFFORTS.map((effort) => el("option", { value: effort, text: effort || "default" }))))),
      field("stop", "Stop at", el("input", { type: "text", placeholder: "a text; several on separate | bars" })),
      field("more", "More parameters (JSON)",
        el("textarea", { rows: "4", spellcheck: "false", placeholder: '{"response_format": {"type": "json_object"}}' }),
        "Added to the request as they are: tools, response_format, structured_outputs, logit_bias …"),
      el("p", { class: "error", id: "settings-error", role: "alert" }),
    );
    root.addEventListener("input", () => this._save());
  }

  get system() {
    return this._fields.get("system").value.trim();
  }

  /** The fields of a request body. Throws Error with the field that is wrong. */
  body() {
    const body = {};
    for (const [name, label] of NUMBERS) {
      const input = this._fields.get(name), text = input.value.trim();
      const wrong = !input.checkValidity() || (text !== "" && !Number.isFinite(Number(text)));
      input.setAttribute("aria-invalid", String(wrong));
      if (wrong) throw this._error(`${label}: ${input.validationMessage || "it must be a number."}`, input);
      if (text !== "") body[name] = Number(text);
    }
    const effort = this._fields.get("reasoning_effort").value;
    if (effort) body.reasoning_effort = effort;
    const stops = this._fields.get("stop").value.split("|").filter((stop) => stop !== "");
    if (stops.length) body.stop = stops;
    const more = this._more(), tools = [...this._tools.offered, ...(more.tools ?? [])];
    return { ...body, ...more, ...(tools.length ? { tools } : {}) };
  }

  _more() {
    const input = this._fields.get("more"), text = input.value.trim();
    input.setAttribute("aria-invalid", "false");
    if (text === "") return {};
    try {
      const value = JSON.parse(text);
      if (value === null || typeof value !== "object" || Array.isArray(value)) throw new Error("it must be an object, {…}.");
      if (value.tools && !Array.isArray(value.tools)) throw new Error('"tools" must be a list, […].');
      return value;
    } catch (error) {
      input.setAttribute("aria-invalid", "true");
      throw this._error(`More parameters: ${error.message}`, input);
    }
  }

  /** Says it below the field, wherever the panel was. */
  _error(message, input) {
    const error = document.getElementById("settings-error");
    error.textContent = message;
    input.closest(".field").append(error);
    const toggle = document.getElementById("toggle-settings");
    if (toggle.getAttribute("aria-expanded") !== "true") toggle.click();
    input.focus();
    error.scrollIntoView({ block: "nearest" });
    return new Error(message);
  }

  _save() {
    document.getElementById("settings-error").textContent = "";
    const values = [...this._fields].map(([name, input]) => [name, input.value]).filter(([, value]) => value !== "");
    localStorage.setItem(STORE, JSON.stringify(Object.fromEntries(values)));
  }
}
