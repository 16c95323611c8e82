// Formulas in Markdown: $…$, $$…$$, \(…\) and \[…\] are no emphasis and no escapes, and are drawn as MathML by Temml.
import { el } from "./dom.js";

const PAIRS = [["$$", "$$"], ["\\(", "\\)"], ["\\[", "\\]"], ["$", "$"]];

export function mathematics(reader) {
  reader.inline.ruler.before("escape", "math", (state, silent) => {
    const end = formulaEnd(state.src, state.pos, state.posMax);
    if (end === -1) return false;
    if (!silent) state.push("math", "", 0).content = state.src.slice(state.pos, end);
    state.pos = end;
    return true;
  });
  // A formula of several lines is one block, whatever its lines begin with.
  reader.block.ruler.before("fence", "math_block", (state, first, last, silent) => {
    const start = state.bMarks[first] + state.tShift[first];
    const pair = PAIRS.find(([open]) => open !== "$" && open !== "\\(" && state.src.startsWith(open, start));
    if (!pair || state.sCount[first] - state.blkIndent >= 4) return false;
    for (let line = first; line < last; line++) {
      const from = line === first ? start + 2 : state.bMarks[line];
      const text = state.src.slice(from, state.eMarks[line]).trimEnd();
      if (!text.endsWith(pair[1])) {
        if (text.includes(pair[1])) return false; // more follows it in its line
        continue;
      }
      if (text.indexOf(pair[1]) !== text.length - 2) return false;
      if (silent) return true;
      const token = state.push("math_block", "", 0);
      token.content = state.getLines(first, line + 1, state.blkIndent, false).trim();
      token.map = [first, line + 1];
      state.line = line + 1;
      return true;
    }
    return false; // it may still be growing
  }, { alt: ["paragraph", "reference", "blockquote", "list"] });
}

function formulaEnd(text, at, limit) {
  const pair = PAIRS.find(([open]) => text.startsWith(open, at));
  if (!pair) return -1;
  const [open, close] = pair, from = at + open.length;
  for (let end = text.indexOf(close, from); end !== -1 && end + close.length <= limit; end = text.indexOf(close, end + 1)) {
    if (end === from) return -1;
    if (close.startsWith("$") && text[end - 1] === "\\") continue;
    // Prices are no formulas: $5 and $6.
    if (open === "$" && (/\s/.test(text[from]) || /\s/.test(text[end - 1]) || /[\d$]/.test(text[end + 1] ?? ""))) return -1;
    return end + close.length;
  }
  return -1;
}

const LONGEST = 5000; // characters of a formula that is drawn
let temml = null, loading = null; // 168 kB, which nobody needs before the first formula

/** A formula with its delimiters, drawn; its source where it cannot be, or is not yet. */
export function formula(source, asBlock) {
  const element = el(asBlock ? "p" : "span", { class: "math", text: source });
  if (temml) draw(element, source);
  else {
    loading ??= import("./vendor/temml.js").then((module) => { temml = module.default; }, () => {});
    loading.then(() => { if (temml) draw(element, source); });
  }
  return element;
}

function draw(element, source) {
  if (source.length > LONGEST) return;
  const [open, close] = PAIRS.find((pair) => source.startsWith(pair[0]));
  const made = document.createElement("span");
  try {
    temml.render(source.slice(open.length, -close.length), made, {
      displayMode: open === "$$" || open === "\\[", annotate: true, throwOnError: true, trust: false, maxExpand: 200,
      maxSize: [40, 400], // em, and points of other units: a formula does not push the rest away
    });
  } catch { // not TeX, or more than Temml knows
    return;
  }
  element.replaceChildren(...made.childNodes);
  element.classList.add("drawn");
}
