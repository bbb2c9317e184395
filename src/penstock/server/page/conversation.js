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

/** A message's content with pictures: they come first, as the templates of models that see have them. */
function parts(text, pictures) {
  const seen = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...seen, { type: "text", text }] : seen;
}

/** Turns in order, a user's and a reply in turns: {role, text, pictures?, lost?, state?, error?, figures?}.
 *  Pictures are too large to be kept: `lost` says how many there were. */
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
    const smaller = ({ pictures = [], lost = 0, ...turn }) => ({ ...turn, lost: lost + pictures.length || undefined });
    if (!keep(this.name, this.turns.slice(first).map(smaller))) keep(this.name, []);
  }

  clear() {
    this.turns = [];
    this.save();
  }

  /** Messages of the chat API; a reply that came to nothing is left out. */
  messages(system) {
    const said = this.turns.filter(({ role, text }) => role === "user" || text);
    const messages = said.map(({ role, text, pictures }) => ({ role, content: pictures ? parts(text, pictures) : text }));
    return system ? [{ role: "system", content: system }, ...messages] : messages;
  }
}
