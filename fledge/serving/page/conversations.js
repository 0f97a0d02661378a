/* Conversations, kept in this browser's storage: at most 50, of at most 2 million characters together; the oldest go first.
 *
 * Each has a key of its own, so that two tabs do not overwrite one another's.
 * A message is {role, content}, and for an answer {runs, note, isThinking, isFailed}: its drafted runs, and the line under it.
 */

const PREFIX = "fledge.conversation.";
const MAX_COUNT = 50;
const MAX_CHARACTERS = 2_000_000;
const MAX_TITLE = 80;

const isText = value => typeof value === "string";

/* What was stored, if it has the right shape; else null. */
function read(text) {
  try {
    const { id, title, updated, messages } = JSON.parse(text);
    if (!isText(id) || !isText(title) || !Number.isFinite(updated) || !Array.isArray(messages)) return null;
    const isMessage = one => ["user", "assistant"].includes(one?.role) && isText(one.content) &&
      (one.runs === undefined || (Array.isArray(one.runs) && one.runs.every(Number.isInteger))) && (one.note === undefined || isText(one.note));
    return messages.every(isMessage) ? { id, title, updated, messages } : null;
  } catch {
    return null;
  }
}

const titleOf = text => text.replace(/\s+/g, " ").trim().slice(0, MAX_TITLE) || "New conversation";

export class Conversations {
  #all = new Map();
  isKept = true; // false: the storage is full or switched off

  constructor(changed) {
    this.changed = changed;
    this.reload();
    addEventListener("storage", event => {
      if (event.key === null || event.key.startsWith(PREFIX)) this.reload();
    });
  }

  /* The newest first. */
  get list() {
    return [...this.#all.values()].sort((one, other) => other.updated - one.updated);
  }

  get(id) {
    return this.#all.get(id);
  }

  /* From the storage, which another tab may have changed. */
  reload() {
    try {
      const kept = new Map();
      for (const key of Object.keys(localStorage)) {
        if (!key.startsWith(PREFIX)) continue;
        const found = read(localStorage.getItem(key));
        if (found && key === PREFIX + found.id) kept.set(found.id, this.#all.has(found.id) ? Object.assign(this.#all.get(found.id), found) : found);
        else localStorage.removeItem(key);
      }
      this.#all = kept;
    } catch {
      this.isKept = false;
    }
    this.changed();
  }

  /* Not in the list until its first message is saved. */
  create() {
    const id = Date.now().toString(36) + "-" + Math.floor(Math.random() * 2 ** 32).toString(36);
    return { id, title: "", updated: Date.now(), messages: [] };
  }

  save(conversation) {
    conversation.updated = Date.now();
    if (!conversation.title) conversation.title = titleOf(conversation.messages[0].content);
    this.#put(conversation);
  }

  rename(conversation, title) {
    conversation.title = titleOf(title);
    this.#put(conversation);
  }

  restore(conversation) {
    this.#put(conversation);
  }

  remove(id) {
    this.#all.delete(id);
    try { localStorage.removeItem(PREFIX + id); } catch { /* nothing was stored */ }
    this.changed();
  }

  #put(conversation) {
    this.#all.set(conversation.id, conversation);
    const sizes = new Map(this.list.map(one => [one.id, JSON.stringify(one).length]));
    let total = [...sizes.values()].reduce((sum, size) => sum + size, 0);
    const dropOldest = () => {
      const oldest = this.list.findLast(one => one.id !== conversation.id);
      if (!oldest) return false;
      total -= sizes.get(oldest.id);
      this.#all.delete(oldest.id);
      localStorage.removeItem(PREFIX + oldest.id);
      return true;
    };
    try {
      while ((this.#all.size > MAX_COUNT || total > MAX_CHARACTERS) && dropOldest());
      this.isKept = total <= MAX_CHARACTERS && this.#write(conversation, dropOldest);
    } catch {
      this.isKept = false;
    }
    this.changed();
  }

  #write(conversation, dropOldest) {
    for (;;) {
      try {
        localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
        return true;
      } catch { // over the browser's quota
        if (!dropOldest()) return false;
      }
    }
  }
}
