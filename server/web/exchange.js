// Conversations as files: what is exported can be imported, here or in another browser.
import { newId } from "./conversation.js";
import { el } from "./dom.js";

const FORMAT = "vserve.conversations";
const ROLES = new Set(["user", "assistant", "tool"]);

/** Has the browser save the conversations as a file of JSON. */
export function saveAsFile(conversations, name) {
  const text = JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  el("a", { href: address, download: `${name.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60) || "conversation"}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

/** The conversations in the text of a file that was exported, under new ids. Throws Error for another file. */
export function readExported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("The file is no JSON: choose one that was exported here.");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) {
    throw new Error(`The file is not one of conversations: its "format" must be "${FORMAT}".`);
  }
  return file.conversations.map(checked);
}

function checked(one, index) {
  const wrong = (what) => new Error(`Conversation ${index + 1} of the file: ${what}.`);
  if (typeof one?.title !== "string" || !Array.isArray(one.turns)) throw wrong("it has no title or no turns");
  const known = new Set([null]);
  for (const turn of one.turns) {
    if (!ROLES.has(turn?.role) || typeof turn.content !== "string") throw wrong("a turn has no role or no content");
    if (typeof turn.id !== "string" || known.has(turn.id) || !known.has(turn.parent)) throw wrong("a turn follows none before it");
    if (!isShowable(turn)) throw wrong("a turn has calls, files or pictures of another shape");
    known.add(turn.id);
  }
  return {
    id: newId(), title: one.title, updated: Number(one.updated) || Date.now(), model: one.model ?? null,
    turns: one.turns, head: known.has(one.head) ? one.head : one.turns.at(-1)?.id ?? null,
  };
}

const isText = (value) => typeof value === "string";

function isShowable({ toolCalls = [], files = [], images = [] }) {
  const every = (list, isRight) => Array.isArray(list) && list.every(isRight);
  return every(toolCalls, (call) => isText(call?.function?.name) && isText(call.function.arguments))
    && every(files, (file) => isText(file?.name) && isText(file.text))
    && every(images, (image) => isText(image?.name) && isText(image.url) && image.url.startsWith("data:image/"));
}
