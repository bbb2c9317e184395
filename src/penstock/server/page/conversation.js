// What was said, kept in the browser within a bound.

const LIMIT = 400_000; // characters; browsers give an origin some five million

/** Keeps a value under localStorage; false where it is blocked or full. */
export function keep(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export function kept(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** Turns in order, a user's and a reply in turns: {role, text, state?, error?, figures?}. */
export class Conversation {
  constructor(name, limit = LIMIT) {
    const turns = kept(name, []);
    Object.assign(this, { name, limit, turns: Array.isArray(turns) ? turns : [] });
  }

  /** Keeps the latest turns that fit; the page still has all. */
  save() {
    let size = this.turns.reduce((sum, turn) => sum + turn.text.length, 0);
    let first = 0;
    for (; size > this.limit; first += 2) {
      size -= this.turns.slice(first, first + 2).reduce((sum, turn) => sum + turn.text.length, 0);
    }
    if (!keep(this.name, this.turns.slice(first))) keep(this.name, []);
  }

  clear() {
    this.turns = [];
    this.save();
  }

  /** Messages of the chat API; a reply that came to nothing is left out. */
  messages(system) {
    const said = this.turns.filter(({ role, text }) => role === "user" || text);
    const messages = said.map(({ role, text }) => ({ role, content: text }));
    return system ? [{ role: "system", content: system }, ...messages] : messages;
  }
}
