// Markdown as elements. markdown-it reads it; what it finds is built node by node, so that no string becomes markup.
import MarkdownIt from "./vendor/markdown-it.js";
import { button, copyFrom, el } from "./dom.js";
import { highlight } from "./highlight.js";
import { formula, mathematics } from "./mathematics.js";

const reader = new MarkdownIt({ html: false, linkify: false, breaks: true });
mathematics(reader);
reader.core.ruler.after("inline", "tasks", tasks);
const TAGS = new Set(["p", "ul", "ol", "li", "blockquote", "table", "thead", "tbody", "tr", "th", "td", "em", "strong", "s"]);

/** Items of a list that begin with [ ] or [x] are tasks: a box that says whether they are done. */
function tasks({ tokens, Token }) {
  tokens.forEach((token, index) => {
    if (token.type !== "inline" || tokens[index - 2]?.type !== "list_item_open") return;
    const first = token.children[0], mark = first?.type === "text" && /^\[([ xX])\]\s/.exec(first.content);
    if (!mark) return;
    first.content = first.content.slice(mark[0].length);
    const box = new Token("task", "", 0);
    box.meta = { done: mark[1] !== " " };
    token.children.unshift(box);
    tokens[index - 2].meta = { task: true };
  });
}

/** Shows growing text: only the blocks that have changed are built again, so a selection in the others survives. */
export class Prose {
  constructor() {
    this.element = el("div", { class: "prose" });
    this._shown = []; // sources of the blocks
  }

  show(text) {
    const blocks = split(text);
    const kept = this.element.children;
    blocks.forEach(({ source, tokens }, index) => {
      if (this._shown[index] === source && kept[index]) return;
      const holder = document.createElement("div");
      build(tokens, holder);
      const node = holder.childElementCount === 1 ? holder.firstElementChild : holder;
      if (kept[index]) kept[index].replaceWith(node);
      else this.element.append(node);
    });
    while (kept.length > blocks.length) kept[kept.length - 1].remove();
    this._shown = blocks.map((block) => block.source);
  }
}

function split(text) {
  const lines = text.split("\n"), blocks = [];
  let tokens = [], depth = 0;
  for (const token of reader.parse(text, {})) {
    tokens.push(token);
    depth += token.nesting;
    if (depth === 0) {
      const [start, end] = tokens[0].map ?? [0, lines.length];
      blocks.push({ source: `${tokens[0].type}\n${lines.slice(start, end).join("\n")}`, tokens });
      tokens = [];
    }
  }
  return blocks;
}

function build(tokens, root) {
  const parents = [root];
  for (const token of tokens) {
    const parent = parents[parents.length - 1];
    if (token.nesting === 1) {
      const element = token.hidden ? parent : open(token);
      if (element !== parent) parent.append(token.tag === "table" ? el("div", { class: "wide", tabindex: "0" }, element) : element);
      parents.push(element);
    } else if (token.nesting === -1) {
      parents.pop();
    } else if (token.type === "inline") {
      build(token.children, parent);
    } else {
      parent.append(leaf(token));
    }
  }
}

function open(token) {
  if (token.tag === "a") return link(token.attrGet("href"));
  if (/^h[1-6]$/.test(token.tag)) return el(`h${Math.min(6, Number(token.tag[1]) + 2)}`); // the page has the first two
  const element = el(TAGS.has(token.tag) ? token.tag : "span", { class: token.meta?.task ? "task" : null });
  if (token.tag === "ol" && token.attrGet("start")) element.setAttribute("start", token.attrGet("start"));
  const align = /text-align:(left|center|right)/.exec(token.attrGet("style") ?? "");
  if (align) element.style.textAlign = align[1];
  return element;
}

function leaf(token) {
  switch (token.type) {
    case "math": return formula(token.content, false);
    case "math_block": return formula(token.content, true);
    case "task": return el("input", { type: "checkbox", disabled: true, checked: token.meta.done, "aria-label": token.meta.done ? "done" : "to do" });
    case "code_inline": return el("code", { text: token.content });
    case "fence": return codeBlock(token.content, token.info.trim().split(/\s+/)[0] ?? "");
    case "code_block": return codeBlock(token.content, "");
    case "softbreak": case "hardbreak": return el("br");
    case "hr": return el("hr");
    case "image": { // is not loaded: an address may carry what was said here to somebody else
      const shown = link(token.attrGet("src"));
      shown.textContent = `🖼 ${token.content || "image"}`;
      return shown;
    }
    default: return document.createTextNode(token.content);
  }
}

function link(address) {
  if (!/^(https?:|mailto:)/i.test(address ?? "")) return el("span");
  return el("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" });
}

export function codeBlock(code, language) {
  const copy = button("Copy", () => copyFrom(copy, code), { "aria-label": "Copy this code" });
  const text = code.replace(/\n$/, "");
  return el("figure", { class: "code" },
    el("figcaption", {}, el("span", { text: language || "text" }), copy),
    el("pre", { tabindex: "0" }, el("code", {}, ...highlight(text, language))));
}

/** The value that a text is as a whole, where it is a JSON object or list; undefined otherwise. */
export function wholeJson(text) {
  if (!/^\s*[[{]/.test(text)) return undefined;
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}
