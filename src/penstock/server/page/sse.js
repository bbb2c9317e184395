// Server-sent events out of a byte stream (WHATWG HTML, "Interpreting an event stream").
// EventSource can't send an Authorization header or a POST; fetch can.

export class EventParser {
  #rest = "";
  #data = [];
  #type = "";

  /** Takes text cut anywhere; returns the events that it completed: [{type, data}]. */
  push(text) {
    // A carriage return at the very end may be half of a CRLF: it waits for the rest.
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    return lines.flatMap((line) => this.#line(line));
  }

  #line(line) {
    if (line === "") {
      const event = { type: this.#type || "message", data: this.#data.join("\n") };
      const events = this.#data.length ? [event] : [];
      this.#data = [];
      this.#type = "";
      return events;
    }
    const [, field, value = ""] = /^([^:]*)(?:: ?(.*))?$/s.exec(line); // a comment has no field
    if (field === "data") this.#data.push(value);
    else if (field === "event") this.#type = value;
    return [];
  }
}

/** The events of a ReadableStream of bytes, one by one; ends with the stream. */
export async function* events(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder(); // which drops a byte order mark
  const parser = new EventParser();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      yield* parser.push(decoder.decode(value, { stream: true }));
    }
  } finally {
    reader.cancel().catch(() => {}); // broken already: whoever reads has been told
  }
}
