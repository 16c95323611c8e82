// Elements without markup: text is only ever text.

/** An element. `attributes`: class, text, on (listeners by event), and anything that setAttribute takes. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const byId = (id) => document.getElementById(id);

export function button(text, onclick, attributes = {}) {
  return el("button", { type: "button", class: "quiet", text, on: { click: onclick }, ...attributes });
}

/** One of the pictures in icons.svg; its name stands in page.css. */
export const icon = (name) => el("span", { class: `icon icon-${name}`, "aria-hidden": "true" });

/** A button that shows a picture and says `label` to whoever points at it or hears it. */
export function iconButton(name, label, onclick, attributes = {}) {
  const made = button("", onclick, { class: "quiet icon-button", "aria-label": label, title: label, ...attributes });
  made.append(icon(name));
  return made;
}

/** Copies text, and says so on the button for a moment. */
export async function copyFrom(source, text) {
  const shown = source.dataset.copied ? [] : [...source.childNodes];
  let copied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // not a secure context: plain HTTP from another machine
    const area = el("textarea", { class: "hidden-label", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    copied = document.execCommand("copy");
    area.remove();
    source.focus();
  }
  if (!shown.length) return; // it still says so
  source.dataset.copied = "yes";
  source.textContent = copied ? "Copied" : "Not copied";
  setTimeout(() => { source.replaceChildren(...shown); delete source.dataset.copied; }, 1200);
}

export const milliseconds = (seconds) =>
  seconds === null || Number.isNaN(seconds) ? "–"
    : seconds < 0.0995 ? `${(1000 * seconds).toFixed(seconds < 0.00995 ? 1 : 0)} ms`
    : seconds < 0.9995 ? `${(1000 * seconds).toFixed(0)} ms`
    : `${seconds.toFixed(seconds < 9.95 ? 2 : 1)} s`;

export const count = (number) =>
  number < 1e4 ? `${Math.round(number)}` : number < 1e6 ? `${(number / 1e3).toFixed(1)}k` : `${(number / 1e6).toFixed(2)}M`;

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) { number /= 1024; unit += 1; }
  return `${number.toFixed(number < 10 && unit ? 1 : 0)} ${units[unit]}`;
}
