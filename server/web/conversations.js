// The list of conversations: found again, renamed, exported, imported, deleted.
import { Conversation } from "./conversation.js";
import { button, byId, el, iconButton } from "./dom.js";
import { readExported, saveAsFile } from "./exchange.js";

const DAY = new Intl.DateTimeFormat(undefined, { dateStyle: "medium" });
const NARROW = matchMedia("(max-width: 56rem)");
const PATIENCE = 150; // milliseconds without a key before a text is searched

export class Conversations {
  /** `chat` shows the one that is chosen. */
  constructor(store, chat) {
    this._store = store;
    this._chat = chat;
    this._panel = byId("conversations");
    this._toggle = byId("toggle-conversations");
    this._list = el("ul", { class: "list" });
    this._search = el("input", { type: "search", id: "search", placeholder: "Search", "aria-label": "Search conversations" });
    this._none = el("p", { class: "muted", role: "status" });
    const picker = el("input", { type: "file", accept: "application/json,.json", hidden: true, "aria-label": "File of conversations" });
    picker.addEventListener("change", async () => { await this._import(picker.files[0]); picker.value = ""; });
    this._panel.append(
      el("h2", { text: "Conversations" }), this._search, this._none, this._list,
      el("p", { class: "row" }, button("Import", () => picker.click()),
        button("Export all", async () => saveAsFile(await this._store.all(), "conversations")),
        button("Delete all", () => this._deleteAll())), picker);
    this._toggle.addEventListener("click", () => this.open(!this.isOpen));
    this._search.addEventListener("input", () => {
      clearTimeout(this._typing);
      this._typing = setTimeout(() => this.refresh(), PATIENCE);
    });
    this._panel.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && NARROW.matches) { this.open(false); this._toggle.focus(); }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); this.open(true); this._search.focus(); }
    });
    byId("view-chat").addEventListener("pointerdown", (event) => { // beside it, where it lies over the chat
      if (NARROW.matches && this.isOpen && !this._panel.contains(event.target) && !this._toggle.contains(event.target)) this.open(false);
    });
  }

  get isOpen() {
    return this._panel.classList.contains("open");
  }

  open(isOpen) {
    this._panel.classList.toggle("open", isOpen);
    this._toggle.setAttribute("aria-expanded", String(isOpen));
    if (isOpen) this.refresh();
  }

  async refresh() {
    if (!this.isOpen) return;
    const wanted = this._search.value.trim();
    const [heads, found] = await Promise.all([this._store.heads(), wanted ? this._store.search(wanted) : null]);
    const shown = found ? heads.filter(({ id }) => found.has(id)) : heads;
    if (this._list.querySelector("input")) return; // one is being renamed
    this._none.textContent = shown.length ? "" : wanted ? "Nothing was found." : "None yet.";
    this._list.replaceChildren(...shown.map((head) => this._item(head)));
  }

  _item(head) {
    const title = head.title || "Untitled", current = head.id === this._chat.shownId;
    const choose = () => { this._chat.open(head.id); if (NARROW.matches) this.open(false); };
    const item = el("li", { class: current ? "current" : null },
      el("button", { type: "button", class: "choose", "aria-current": current ? "true" : null, on: { click: choose } },
        el("span", { class: "title", text: title }), el("span", { class: "muted", text: DAY.format(head.updated) })),
      el("span", { class: "acts" },
        iconButton("edit", `Rename ${title}`, () => this._rename(item, head)),
        iconButton("download", `Export ${title}`, async () => saveAsFile([await this._store.read(head.id)], title)),
        iconButton("bin", `Delete ${title}`, () => this._delete([head.id], `“${title}” is deleted from this browser.`))));
    return item;
  }

  _rename(item, { id, title }) {
    const field = el("input", { type: "text", maxlength: "200", "aria-label": "Title" });
    field.value = title;
    let ended = false;
    const end = async (taken) => {
      if (ended) return;
      ended = true;
      field.remove();
      const kept = taken && field.value.trim() ? await this._store.read(id) : undefined;
      if (kept) {
        this._chat.rename(id, field.value.trim());
        await this._store.write({ ...kept, title: field.value.trim() });
      }
      this.refresh();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") { event.stopPropagation(); end(false); }
    });
    field.addEventListener("blur", () => end(true));
    item.replaceChildren(field);
    field.select();
  }

  async _deleteAll() {
    const heads = await this._store.heads();
    if (heads.length) this._delete(heads.map(({ id }) => id), `All ${heads.length} conversations are deleted from this browser.`);
  }

  async _delete(ids, message) {
    if (!(await confirmed(message))) return;
    for (const id of ids) this._chat.forget(id);
    await this._store.remove(...ids);
    this.refresh();
  }

  async _import(file) {
    try {
      const read = readExported(await file.text()).map((one) => new Conversation(one).kept());
      await this._store.write(...read);
      if (read.length === 1) await this._chat.open(read[0].id);
      await this.refresh();
      this._none.textContent = `${read.length} imported.`;
    } catch (error) {
      this._none.textContent = error.message;
    }
  }
}

/** Whether the person wants what the message says. */
function confirmed(message) {
  const dialog = byId("confirm");
  byId("confirm-message").textContent = message;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => { dialog.onclose = () => resolve(dialog.returnValue === "yes"); });
}
