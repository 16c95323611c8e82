// What is attached to the next message: text files for any model, pictures for one that sees.
import { byId, el, icon, iconButton } from "./dom.js";
import { readPicture } from "./pictures.js";

const LARGEST = 1 << 20; // bytes of a text file

export class Attachments {
  /** `report` hears why a file was not taken. */
  constructor(report) {
    this.vision = false; // whether the model takes pictures
    this._report = report;
    this._row = byId("attached");
    this.clear();
    const picker = byId("files"), box = byId("composer");
    byId("attach").addEventListener("click", () => picker.click());
    picker.addEventListener("change", async () => { await this.take(picker.files); picker.value = ""; });
    box.addEventListener("paste", (event) => this._from(event, event.clipboardData));
    const target = byId("view-chat");
    target.addEventListener("dragover", (event) => { if (event.dataTransfer.types.includes("Files")) event.preventDefault(); });
    target.addEventListener("drop", (event) => this._from(event, event.dataTransfer));
  }

  get isEmpty() {
    return !this._files.length && !this._images.length;
  }

  /** {files, images} */
  get attached() {
    return { files: this._files, images: this._images };
  }

  clear() {
    this._files = []; // {name, text}
    this._images = []; // {name, url}
    this._show();
  }

  _from(event, transfer) {
    if (!transfer?.files.length) return;
    event.preventDefault();
    this.take(transfer.files);
  }

  async take(files) {
    for (const file of [...files]) {
      try {
        if (file.type.startsWith("image/") && file.type !== "image/svg+xml") {
          if (!this.vision) throw new Error(`${file.name}: this model reads no pictures.`);
          this._images.push(await readPicture(file));
        } else {
          this._files.push({ name: file.name, text: await textOf(file) });
        }
      } catch (error) {
        this._report(error.message);
      }
    }
    this._show();
  }

  _show() {
    const chip = (list, item) => el("span", { class: "chip" }, icon("clip"), el("span", { text: item.name }),
      iconButton("close", `Take ${item.name} away`, () => { list.splice(list.indexOf(item), 1); this._show(); }));
    this._row.hidden = this.isEmpty;
    this._row.replaceChildren(...[this._files, this._images].flatMap((list) => list.map((item) => chip(list, item))));
  }
}

async function textOf(file) {
  if (file.size > LARGEST) throw new Error(`${file.name} has ${file.size} bytes; at most ${LARGEST} are read.`);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    text = "\0";
  }
  if (text.includes("\0")) throw new Error(`${file.name} is no text file in UTF-8.`);
  return text;
}
