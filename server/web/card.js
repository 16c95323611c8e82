// The model's card: what is served here, as far as a client may know it.
import { request } from "./api.js";
import { byId, el } from "./dom.js";

/** Opens the dialog. `cards`: the entries of /v1/models; the first is the model that generates. */
export async function showCard(cards) {
  const [model, ...others] = cards;
  const adapters = others.filter(({ parent }) => parent !== null).map(({ id }) => id);
  const also = others.filter((card) => card.parent === null && card.root === model.root).map(({ id }) => id);
  const more = others.filter((card) => card.parent === null && card.root !== model.root).map(({ id }) => id);
  let version = "";
  try {
    ({ version } = await (await request("version")).json());
  } catch { // it is only left out
  }
  const facts = [
    ["Name", [model.id, ...also].join(", ")], ["Weights", model.root],
    ["Context", model.max_model_len ? `${model.max_model_len.toLocaleString()} tokens` : ""],
    ["Does", (model.tasks ?? []).join(", ")], ["Reads", (model.modalities ?? ["text"]).join(", ")],
    ["Adapters", adapters.join(", ")], ["Beside it", more.join(", ")],
    ["Serves since", new Date(1000 * model.created).toLocaleString()], ["vserve", version],
  ];
  byId("card-facts").replaceChildren(...facts.filter(([, text]) => text).flatMap(([name, text]) =>
    [el("dt", { text: name }), el("dd", { text })]));
  byId("card").showModal();
}
