// The page: two views, the server's state, and the colours.
import { hasKey, request } from "./api.js";
import { showCard } from "./card.js";
import { Chat } from "./chat.js";
import { Conversations } from "./conversations.js";
import { byId } from "./dom.js";
import { EngineView } from "./engine.js";
import { Store } from "./store.js";

const THEMES = ["auto", "light", "dark"];
const PATIENCE = 3000; // milliseconds between two looks at the server's health

const store = new Store();
const chat = new Chat(store, () => conversations.refresh());
const conversations = new Conversations(store, chat);
const engine = new EngineView();
const tabs = [byId("tab-chat"), byId("tab-engine")];

function show(tab, focus = false) {
  for (const other of tabs) {
    const selected = other === tab;
    other.setAttribute("aria-selected", String(selected));
    other.tabIndex = selected ? 0 : -1;
    byId(other.getAttribute("aria-controls")).hidden = !selected;
  }
  document.title = `vserve – ${tab.textContent}`;
  history.replaceState(null, "", tab === tabs[0] ? location.pathname : "#engine");
  if (focus) tab.focus();
  attend();
}

function attend() {
  if (!document.hidden && tabs[1].getAttribute("aria-selected") === "true") engine.start();
  else engine.stop();
}

tabs.forEach((tab, index) => {
  tab.addEventListener("click", () => show(tab));
  tab.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (to !== undefined) { event.preventDefault(); show(tabs[(to + tabs.length) % tabs.length], true); }
  });
});
document.addEventListener("visibilitychange", attend);

const themeButton = byId("theme");
function paint(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("vserve.theme", theme);
  byId("theme-name").textContent = theme;
  themeButton.setAttribute("aria-label", `Theme: ${theme}`);
  engine.repaint();
}
themeButton.addEventListener("click", () => {
  paint(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => engine.repaint());

const toggle = byId("toggle-settings");
toggle.addEventListener("click", () => {
  const open = byId("settings").classList.toggle("open");
  toggle.setAttribute("aria-expanded", String(open));
});

let refused = false;
addEventListener("keywanted", () => state("a key is needed", "wait"));

function state(text, kind) {
  if (byId("served").textContent !== text) byId("served").textContent = text;
  byId("dot").className = `dot ${kind}`;
}

const choice = byId("model");
let cards = []; // the entries of /v1/models
choice.addEventListener("change", () => choose(choice.value));
chat.onModel = (name) => { if ([...choice.options].some(({ value }) => value === name)) choose(name); };
byId("about").addEventListener("click", () => showCard(cards));

function choose(name) {
  const card = cards.find(({ id }) => id === name);
  choice.value = name;
  chat.model = name;
  chat.maxModelLen = card.max_model_len ?? null;
  chat.attachments.vision = card.modalities?.includes("image") ?? false;
  byId("prompt").placeholder = `Message ${name}`;
}

/** The model and its adapters, where there are some; other names of the model are no choice. */
function offer() {
  const [model, ...others] = cards;
  const names = [model.id, ...others.filter(({ parent }) => parent !== null).map(({ id }) => id)];
  choice.replaceChildren(...names.map((name) => new Option(name, name)));
  choice.hidden = names.length === 1;
  byId("about").hidden = false;
  choose(names.includes(chat.shownModel) ? chat.shownModel : model.id);
}

/** Says in the header how the server is; the first time that it serves, learns what. */
async function look() {
  let text, kind = "bad";
  try {
    const response = await fetch("health");
    if (response.ok) {
      if (chat.model === null && (!refused || hasKey())) {
        cards = (await (await request("v1/models")).json()).data;
        offer();
      }
      [text, kind] = chat.model === null ? ["a key is needed", "wait"] : [chat.model, "good"];
    } else {
      const { status, phase, progress } = await response.json();
      const share = progress ? `, ${Math.round(100 * progress)} %` : "";
      [text, kind] = [phase ? `${status}: ${phase}${share}` : status, "wait"];
    }
  } catch (error) {
    refused = error.status === 401; // asked once: from now on only when somebody wants something
    text = refused ? "a key is needed" : "the server does not answer";
  }
  state(text, kind);
  setTimeout(look, kind === "good" || document.hidden ? PATIENCE : PATIENCE / 6);
}

paint(THEMES.includes(document.documentElement.dataset.theme) ? document.documentElement.dataset.theme : "auto");
show(location.hash === "#engine" ? tabs[1] : tabs[0]);
if (matchMedia("(min-width: 60rem)").matches) toggle.click();
if (matchMedia("(min-width: 90rem)").matches) conversations.open(true);
look();
