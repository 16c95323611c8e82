// A little colour in code: comments, strings, numbers and the words that most languages share.

const WORDS = new Set(`abstract and as assert async await bool break case catch class const continue def default del do
double elif else end enum except export extends extern false False final finally float fn for from func function global
go if impl implements import in int interface is lambda let loop match mod mut namespace new nil None not null of or
override package pass private protected pub public raise return self static struct super switch template this throw
trait true True try type typedef typeof union unsigned use using val var virtual void where while with yield
select SELECT from FROM where WHERE insert INSERT update UPDATE create CREATE table TABLE join JOIN group GROUP by BY
order ORDER limit LIMIT echo export fi then done local`.split(/\s+/));
const HASH = new Set(["python", "py", "bash", "sh", "shell", "zsh", "yaml", "yml", "toml", "ruby", "rb", "r", "perl"]);
const SLASHES = new Set(["js", "javascript", "ts", "typescript", "jsx", "tsx", "c", "cpp", "c++", "h", "rust", "rs", "go",
  "java", "kotlin", "swift", "cs", "csharp", "php", "scala", "dart", "cuda", "css"]);
const DASHES = new Set(["sql", "lua", "haskell", "hs"]);
const PLAIN = new Set(["json", "jsonc"]);
const LIMIT = 60_000; // characters; beyond, colour costs more than it gives

const STRING = String.raw`"""[\s\S]*?(?:"""|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?|` + "`(?:\\\\.|[^`\\\\])*`?";
const NUMBER = String.raw`\b(?:0x[\da-fA-F]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\b`;

function comments(language) {
  if (HASH.has(language)) return "#[^\\n]*";
  if (SLASHES.has(language)) return String.raw`\/\/[^\n]*|\/\*[\s\S]*?(?:\*\/|$)`;
  if (DASHES.has(language)) return "--[^\\n]*";
  return PLAIN.has(language) ? "(?!)" : null;
}

/** Nodes for the code: text, and spans of the classes c (comment), s (string), k (key), n (number), w (word). */
export function highlight(code, language) {
  const comment = comments(language.toLowerCase());
  if (comment === null || code.length > LIMIT) return [document.createTextNode(code)];
  const pattern = new RegExp(`(${comment})|(${STRING})(\\s*:)?|(${NUMBER})|([A-Za-z_]\\w*)`, "g");
  const nodes = [];
  let end = 0;
  const span = (kind, text) => {
    const node = document.createElement("span");
    node.className = `t-${kind}`;
    node.textContent = text;
    nodes.push(node);
  };
  for (const match of code.matchAll(pattern)) {
    const [all, note, string, colon, number, word] = match;
    if (word !== undefined && !WORDS.has(word)) continue;
    if (match.index > end) nodes.push(document.createTextNode(code.slice(end, match.index)));
    end = match.index + all.length;
    if (note !== undefined) span("c", note);
    else if (string !== undefined) {
      span(colon && PLAIN.has(language) ? "k" : "s", string);
      if (colon) nodes.push(document.createTextNode(colon));
    } else span(number !== undefined ? "n" : "w", all);
  }
  nodes.push(document.createTextNode(code.slice(end)));
  return nodes;
}
