// A conversation. Its turns are a tree of which one path is shown: another answer to a question is a branch beside the first.
const TITLE = 60; // characters

/** A random name: `crypto.randomUUID` is missing where the page comes over plain HTTP from another machine. */
export const newId = () =>
  [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

/** Whether the answer came to its end: the calls of another one may be torn. */
export const isWhole = (turn) => !turn.error && turn.finish !== "aborted";

export class Conversation {
  /** `kept`: what kept() gave. */
  constructor({ id = newId(), title = "", updated = Date.now(), model = null, turns = [], head = null } = {}) {
    Object.assign(this, { id, title, updated, model, turns, head }); // turns: parents before children; head: the id of the last shown
    for (const turn of turns) {
      if (turn.state === "streaming") Object.assign(turn, { state: "done", finish: "aborted" }); // the page went away
    }
  }

  kept() {
    const { id, title, updated, model, turns, head } = this;
    return { id, title, updated, model, turns, head };
  }

  /** The turns that are shown, or those up to the one of this id. */
  path(last = this.head) {
    const byId = new Map(this.turns.map((turn) => [turn.id, turn])), path = [];
    for (let turn = byId.get(last); turn; turn = byId.get(turn.parent)) path.push(turn);
    return path.reverse();
  }

  /** Puts a turn behind those that are shown. */
  add(turn) {
    Object.assign(turn, { id: newId(), parent: this.head });
    this.turns.push(turn);
    this.head = turn.id;
    this.updated = Date.now();
    if (!this.title && turn.role === "user") {
      this.title = (turn.content.trim() || turn.files?.[0]?.name || turn.images?.[0]?.name || "").split("\n")[0].slice(0, TITLE);
    }
  }

  /** The turns that stand in this one's place, in their order. */
  versions({ parent }) {
    return this.turns.filter((turn) => turn.parent === parent);
  }

  /** Shows this turn with the latest that follows it. */
  show(turn) {
    while (turn) {
      const { id } = turn;
      this.head = id;
      turn = this.turns.findLast(({ parent }) => parent === id);
    }
  }

  /** Takes a turn away with all that follows it. */
  remove(turn) {
    const gone = new Set([turn.id]);
    for (const { id, parent } of this.turns) if (gone.has(parent)) gone.add(id);
    this.turns = this.turns.filter(({ id }) => !gone.has(id));
    const beside = this.versions(turn).at(-1);
    this.head = turn.parent;
    if (beside) this.show(beside);
  }
}

/** The body of the request that `turn` answers, `asked` being what was settled when it was made. */
export function requestBody(conversation, turn) {
  const { model, system, parameters } = turn.asked;
  const messages = history(conversation.path(turn.parent));
  return { model, messages: system ? [{ role: "system", content: system }, ...messages] : messages, ...parameters };
}

/** What the model is told of the conversation. An answer that never came is left out with its question: an empty one
 * would be read as the model's own, and many templates want questions and answers in turn. */
function history(turns) {
  const messages = [];
  for (const turn of turns) {
    const message = asMessage(turn);
    if (turn.role !== "assistant" || message.content || message.tool_calls) messages.push(message);
    else if (messages.at(-1)?.role === "user") messages.pop();
  }
  return messages;
}

function asMessage(turn) {
  if (turn.role === "tool") return { role: "tool", tool_call_id: turn.tool_call_id, content: turn.content };
  if (turn.role === "user") return { role: "user", content: withAttachments(turn) };
  const message = { role: turn.role, content: turn.content };
  if (turn.toolCalls?.length && isWhole(turn)) {
    message.tool_calls = turn.toolCalls;
    if (turn.reasoning) message.reasoning = turn.reasoning; // a model goes on thinking when the tools have answered
  }
  return message;
}

/** Files stand as text before what was typed; pictures are parts of their own. */
function withAttachments({ content, files = [], images = [] }) {
  const text = [...files.map((file) => `${file.name}:\n${fenced(file.text)}`), content].filter(Boolean).join("\n\n");
  if (!images.length) return text;
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

/** Text as a block of code, in a fence longer than any in it. */
export function fenced(text) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}
