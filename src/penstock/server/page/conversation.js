// What was said, kept in the browser within a bound.

const LIMIT = 400_000; // characters; browsers give an origin some five million

/** Values under localStorage, or for this page's life where storage is blocked. */
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

/** Turns in order: {role: "user" | "assistant", text, figures?, state?, error?}. */
export class Conversation {
  constructor(name, limit = LIMIT) {
    this.name = name;
    this.limit = limit;
    const turns = kept(name, []);
    this.turns = Array.isArray(turns) ? turns.filter((turn) => typeof turn?.text === "string") : [];
  }

  /** Keeps the latest turns that fit; the page still has all. */
  save() {
    let first = 0;
    let size = this.turns.reduce((sum, turn) => sum + turn.text.length, 0);
    while (size > this.limit && first < this.turns.length) {
      size -= this.turns[first].text.length;
      first += 1;
    }
    while (first < this.turns.length && this.turns[first].role !== "user") first += 1;
    if (!keep(this.name, this.turns.slice(first))) keep(this.name, []);
  }

  clear() {
    this.turns = [];
    this.save();
  }

  get last() {
    return this.turns.at(-1);
  }

  /** Messages of the chat API: replies that came to nothing are left out. */
  messages(system) {
    const said = this.turns.filter((turn) => turn.role === "user" || turn.text);
    const messages = said.map((turn) => ({ role: turn.role, content: turn.text }));
    return system ? [{ role: "system", content: system }, ...messages] : messages;
  }
}
