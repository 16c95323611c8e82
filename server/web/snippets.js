// The request behind an answer, for a terminal and for the OpenAI SDK. A key is named, never copied.
import { hasKey } from "./api.js";

const OPENAI = new Set(["model", "messages", "temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "stop", "n",
  "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "response_format", "tools",
  "tool_choice", "parallel_tool_calls", "reasoning_effort", "user"]);

const base = () => new URL("v1", document.baseURI).href;

export function asCurl(body) {
  const quoted = JSON.stringify({ ...body, stream: true }, null, 2).replaceAll("'", "'\\''");
  const key = hasKey() ? `  -H "authorization: Bearer $VSERVE_API_KEY" \\\n` : "";
  return `curl -N ${base()}/chat/completions \\\n  -H 'content-type: application/json' \\\n${key}  -d '${quoted}'\n`;
}

export function asPython(body) {
  const own = Object.entries(body).filter(([name]) => OPENAI.has(name));
  const extra = Object.entries(body).filter(([name]) => !OPENAI.has(name));
  const lines = own.map(([name, value]) => `    ${name}=${literal(value, 4)},`);
  if (extra.length) lines.push(`    extra_body=${literal(Object.fromEntries(extra), 4)},`);
  const key = hasKey() ? 'os.environ["VSERVE_API_KEY"]' : '"none"';
  return [
    ...(hasKey() ? ["import os", ""] : []),
    "from openai import OpenAI", "",
    `client = OpenAI(base_url=${literal(base())}, api_key=${key})`,
    "stream = client.chat.completions.create(", ...lines, "    stream=True,", ")",
    "for chunk in stream:",
    "    if chunk.choices:",
    '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
    "print()", "",
  ].join("\n");
}

/** A JSON value in Python's words. */
function literal(value, indent = 0) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const list = Array.isArray(value);
  const items = list ? value.map((item) => literal(item, indent + 4))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${literal(item, indent + 4)}`);
  const [open, close] = list ? "[]" : "{}";
  const flat = open + items.join(", ") + close;
  if (flat.length <= 88 && !flat.includes("\n")) return flat;
  const inner = " ".repeat(indent + 4);
  return `${open}\n${items.map((item) => `${inner}${item},\n`).join("")}${" ".repeat(indent)}${close}`;
}
