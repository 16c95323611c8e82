// Tools that the model may call, described by a form and kept in this browser. The page runs none: their results are asked for.
import { button, el, iconButton } from "./dom.js";

const STORE = "vserve.tools";
const TYPES = ["string", "number", "integer", "boolean", "array", "object"];

export class Tools {
  constructor(root) {
    this._tools = JSON.parse(localStorage.getItem(STORE) ?? "[]"); // {function, offered}
    this._list = el("ul", { class: "list" });
    this._dialog = el("dialog", { class: "wide-dialog", "aria-labelledby": "tool-title" });
    root.append(el("div", { class: "field", role: "group", "aria-label": "Tools" }, el("p", { class: "label", text: "Tools" }), this._list,
      button("Add a tool", () => this._edit(null))));
    document.body.append(this._dialog);
    this._show();
  }

  /** Those that are offered to the model, as a request has them. */
  get offered() {
    return this._tools.filter(({ offered }) => offered).map((tool) => ({ type: "function", function: tool.function }));
  }

  _show() {
    this._list.replaceChildren(...this._tools.map((tool) => {
      const { name } = tool.function, box = el("input", { type: "checkbox" });
      box.checked = tool.offered;
      box.addEventListener("change", () => { tool.offered = box.checked; this._save(); });
      return el("li", {}, el("label", { class: "check" }, box, el("code", { text: name })), el("span", { class: "acts" },
        iconButton("edit", `Edit ${name}`, () => this._edit(tool)),
        iconButton("bin", `Delete ${name}`, () => { this._tools.splice(this._tools.indexOf(tool), 1); this._save(); })));
    }));
  }

  _save() {
    localStorage.setItem(STORE, JSON.stringify(this._tools));
    this._show();
  }

  _edit(tool) {
    const { name = "", description = "", parameters = {} } = tool?.function ?? {};
    const field = (id, label, input) => el("div", { class: "field" }, el("label", { for: id, text: label }), input);
    const nameInput = el("input", { id: "tool-name", required: true, pattern: "[A-Za-z0-9_\\-]{1,64}", title: "letters, digits, _ and -", value: name });
    const about = el("textarea", { id: "tool-description", rows: "2" });
    about.value = description;
    const rows = el("div", { class: "parameters" });
    for (const [key, schema] of Object.entries(parameters.properties ?? {})) {
      rows.append(parameterRow(key, schema, parameters.required?.includes(key)));
    }
    const form = el("form", {}, el("h2", { id: "tool-title", text: tool ? `Tool ${name}` : "A new tool" }),
      field("tool-name", "Name", nameInput), field("tool-description", "What it does, for the model", about),
      el("p", { class: "label", text: "Parameters" }), rows,
      button("Add a parameter", () => { rows.append(parameterRow("", {}, true)); rows.lastElementChild.querySelector("input").focus(); }),
      el("p", { class: "row" }, button("Cancel", () => this._dialog.close()), el("button", { class: "primary", type: "submit", text: "Keep it" })));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const made = { name: nameInput.value, description: about.value.trim(), parameters: schemaOf([...rows.children]) };
      const twin = this._tools.find((other) => other !== tool && other.function.name === made.name);
      nameInput.setCustomValidity(twin ? "There is a tool of this name." : "");
      if (!form.reportValidity()) return;
      if (tool) tool.function = made;
      else this._tools.push({ function: made, offered: true });
      this._save();
      this._dialog.close();
    });
    nameInput.addEventListener("input", () => nameInput.setCustomValidity(""));
    this._dialog.replaceChildren(form);
    this._dialog.showModal();
  }
}

/** A row of the form. What a schema has beyond it, such as an enum, stays. */
function parameterRow(name, schema, required) {
  const type = el("select", { "aria-label": "Type", name: "type" }, ...TYPES.map((one) => new Option(one, one)));
  type.value = TYPES.includes(schema.type) ? schema.type : "string";
  const must = el("input", { type: "checkbox", name: "required" });
  must.checked = required;
  const row = el("div", { class: "parameter" },
    el("input", { "aria-label": "Parameter", name: "name", placeholder: "name", required: true, value: name }), type,
    el("label", { class: "check" }, must, "required"),
    iconButton("bin", "Delete this parameter", () => row.remove()),
    el("input", { "aria-label": "Description", name: "description", placeholder: "what it is", value: schema.description ?? "" }));
  row.schema = schema;
  return row;
}

function schemaOf(rows) {
  const properties = {}, required = [];
  for (const row of rows) {
    const of = (name) => row.querySelector(`[name=${name}]`);
    const name = of("name").value.trim(), schema = { ...row.schema };
    delete schema.description;
    const description = of("description").value.trim();
    properties[name] = { ...schema, type: of("type").value, ...(description ? { description } : {}) };
    if (of("required").checked) required.push(name);
  }
  return { type: "object", properties, required };
}
