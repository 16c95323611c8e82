// Requests to the server that served this page, with the key that it may want.
import { byId } from "./dom.js";

const KEY = "vserve.key";

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The response, when it is fine; asks for a key where one is wanted. Throws ApiError, and AbortError when aborted. */
export async function request(path, { method = "GET", body, signal } = {}) {
  for (;;) {
    const headers = {};
    if (body !== undefined) headers["content-type"] = "application/json";
    const key = sessionStorage.getItem(KEY);
    if (key !== null) headers.authorization = `Bearer ${key}`;
    let response;
    try {
      response = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body), signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server does not answer.", 0);
    }
    if (response.ok) return response;
    const message = await errorMessage(response);
    if (response.status !== 401) throw new ApiError(message, response.status);
    if (sessionStorage.getItem(KEY) !== key) continue; // another request has asked meanwhile
    if (!(await askForKey(key !== null))) throw new ApiError(message, 401);
  }
}

async function errorMessage(response) {
  try {
    const body = await response.json();
    return body.error?.message ?? body.error ?? `${response.status} ${response.statusText}`;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

let asking = null; // one dialog, whoever asks

function askForKey(wasWrong) {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog"), form = byId("key-form"), input = byId("key");
    byId("key-message").textContent = wasWrong
      ? "The key that was given does not fit." : "It is kept in this tab until the tab is closed.";
    input.value = "";
    form.onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, input.value.trim());
      dialog.close("given");
    };
    byId("key-cancel").onclick = () => dialog.close("");
    dialog.onclose = () => {
      asking = null;
      resolve(dialog.returnValue === "given");
    };
    dialog.returnValue = "";
    dialog.showModal();
    dispatchEvent(new Event("keywanted"));
  });
  return asking;
}

/** The server-sent events of a response: {event, data}. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        let event = "message";
        const data = [];
        for (const line of block.split("\n")) {
          if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
          else if (line.startsWith("event:")) event = line.slice(6).trim();
        }
        if (data.length) yield { event, data: data.join("\n") };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
