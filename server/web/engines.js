// The engines of a server that has several: a row for each, and which of them the view looks at.
import { button, el } from "./dom.js";

export class Engines {
  /** `card`: the section, hidden where there is one engine; `choose` hears the number of the one to look at. */
  constructor(card, choose) {
    this._card = card;
    this._body = card.querySelector("tbody");
    this._choose = choose;
    this.shown = null; // the number of the one that is looked at
  }

  show(now, before) {
    const engines = now.by("engine_healthy", "engine");
    this._card.hidden = engines.length < 2;
    while (this._body.children.length > engines.length) this._body.lastElementChild.remove();
    engines.forEach(([engine, healthy], index) => {
      const row = this._body.children[index] ?? this._body.appendChild(this._row(engine));
      const of = (scrape, name) => scrape.of(name, engine);
      const blocks = of(now, "kv_blocks"), free = of(now, "kv_blocks_free"), seconds = now.time - before.time;
      const steps = seconds > 0 ? Math.max(0, of(now, "engine_steps_total") - of(before, "engine_steps_total")) / seconds : 0;
      const texts = [
        healthy ? "serves" : "away", of(now, "num_requests_running"), of(now, "num_requests_waiting"),
        blocks ? `${Math.round((100 * (blocks - free)) / blocks)} %` : "–", Math.round(steps), of(now, "engine_restarts_total"),
      ];
      texts.forEach((text, column) => { row.children[column + 1].textContent = String(text); });
      row.querySelector("button").setAttribute("aria-pressed", String(engine === String(this.shown)));
    });
  }

  _row(engine) {
    const cells = Array.from({ length: 6 }, () => el("td"));
    return el("tr", {}, el("th", { scope: "row" }, button(`Engine ${engine}`, () => this._choose(Number(engine)))), ...cells);
  }
}
