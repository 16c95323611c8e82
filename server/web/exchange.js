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
    if (!isShowable(turn)) throw wrong("a turn has calls, files, pictures or numbers of another shape");
    known.add(turn.id);
  }
  const updated = Number(one.updated), now = Date.now(); // others have no date that could be shown
  return {
    id: newId(), title: one.title, updated: updated > 0 && updated < now ? updated : now, model: one.model ?? null,
    turns: one.turns, head: known.has(one.head) ? one.head : one.turns.at(-1)?.id ?? null,
  };
}

const isText = (value) => typeof value === "string";
const isNumber = (value) => Number.isFinite(value);
const isObject = (value) => typeof value === "object";
const listOf = (isRight) => (value) => Array.isArray(value) && value.every(isRight);

const FIELDS = { // of a turn, beside its role, content and place
  reasoning: isText, error: isText, finish: isText, name: isText, tool_call_id: isText,
  tokens: isNumber, ttft: isNumber, rate: isNumber, thoughtSeconds: isNumber, asked: isObject,
  usage: (usage) => isNumber(usage.prompt_tokens) && isNumber(usage.completion_tokens),
  toolCalls: listOf((call) => isText(call?.function?.name) && isText(call.function.arguments)),
  files: listOf((file) => isText(file?.name) && isText(file.text)),
  images: listOf((image) => isText(image?.name) && isText(image.url) && image.url.startsWith("data:image/")),
};

const isShowable = (turn) =>
  Object.entries(FIELDS).every(([name, isRight]) => turn[name] === undefined || (turn[name] !== null && isRight(turn[name])));
