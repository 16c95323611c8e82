// Conversations kept in this browser, by IndexedDB. Where it keeps none (private windows of some), the tab's memory does.
const DATABASE = "vserve", VERSION = 1;
const HEADS = "heads", BODIES = "conversations"; // what the list shows, and all of it

const finished = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

async function opened() {
  const request = indexedDB.open(DATABASE, VERSION);
  request.onupgradeneeded = () => {
    for (const name of [HEADS, BODIES]) request.result.createObjectStore(name, { keyPath: "id" });
  };
  const database = await finished(request);
  database.onversionchange = () => database.close(); // a page of a newer server, in another tab, waits for that
  return database;
}

const headOf = ({ id, title, updated, model }) => ({ id, title, updated, model });

export class Store {
  constructor() {
    this._memory = new Map(); // id → conversation, where there is no database
    this._database = opened().catch(() => null);
    this._others = new BroadcastChannel("vserve.conversations"); // tabs of this server
  }

  /** Whether they outlive the tab. */
  async lasts() {
    return (await this._database) !== null;
  }

  /** `listener` hears the ids of conversations that another tab wrote or took away. */
  onOthers(listener) {
    this._others.onmessage = ({ data }) => listener(data);
  }

  /** {id, title, updated, model} of each, the latest first. */
  async heads() {
    const database = await this._database;
    const heads = database ? await finished(database.transaction(HEADS).objectStore(HEADS).getAll())
      : [...this._memory.values()].map(headOf);
    return heads.sort((a, b) => b.updated - a.updated);
  }

  /** The conversation as kept() gave it; undefined: there is none. */
  async read(id) {
    const database = await this._database;
    return database ? finished(database.transaction(BODIES).objectStore(BODIES).get(id)) : structuredClone(this._memory.get(id));
  }

  async all() {
    const database = await this._database;
    return database ? finished(database.transaction(BODIES).objectStore(BODIES).getAll()) : structuredClone([...this._memory.values()]);
  }

  write(...conversations) {
    return this._change(conversations.map(({ id }) => id), (heads, bodies) => {
      for (const conversation of conversations) {
        heads.put(headOf(conversation));
        bodies.put(conversation);
      }
    }, () => { for (const conversation of conversations) this._memory.set(conversation.id, structuredClone(conversation)); });
  }

  remove(...ids) {
    return this._change(ids, (heads, bodies) => {
      for (const id of ids) { heads.delete(id); bodies.delete(id); }
    }, () => { for (const id of ids) this._memory.delete(id); });
  }

  /** Both stores in one transaction. Throws where the browser has no room left. */
  async _change(ids, change, inMemory) {
    const database = await this._database;
    if (database) {
      const transaction = database.transaction([HEADS, BODIES], "readwrite");
      const done = new Promise((resolve, reject) => {
        transaction.oncomplete = resolve;
        transaction.onabort = () => reject(transaction.error);
      });
      change(transaction.objectStore(HEADS), transaction.objectStore(BODIES));
      await done;
    } else {
      inMemory();
    }
    this._others.postMessage(ids);
  }

  /** The ids of conversations that have this text in their title or in what was said, whatever its case. */
  async search(text) {
    const wanted = text.toLowerCase(), found = new Set();
    for (const { id, title, turns } of await this.all()) {
      if ([title, ...turns.map(({ content }) => content)].some((said) => said.toLowerCase().includes(wanted))) found.add(id);
    }
    return found;
  }
}
