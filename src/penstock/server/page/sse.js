// Server-sent events out of a byte stream (WHATWG HTML, "Interpreting an event stream").
// EventSource can't send an Authorization header or a POST; fetch can.

export class EventParser {
  #buffer = "";
  #data = [];
  #type = "";
  #start = true;

  /** Takes text cut anywhere; returns the events that it completed: [{type, data}]. */
  push(text) {
    this.#buffer += text;
    if (this.#start && this.#buffer) {
      this.#buffer = this.#buffer.replace(/^\uFEFF/, "");
      this.#start = false;
    }
    const events = [];
    let from = 0;
    for (;;) {
      const end = this.#buffer.slice(from).search(/[\r\n]/);
      if (end < 0) break;
      const at = from + end;
      // A carriage return at the very end may be half of a CRLF: wait for the rest.
      if (this.#buffer[at] === "\r" && at + 1 === this.#buffer.length) break;
      this.#line(this.#buffer.slice(from, at), events);
      from = at + (this.#buffer.startsWith("\r\n", at) ? 2 : 1);
    }
    this.#buffer = this.#buffer.slice(from);
    return events;
  }

  #line(line, events) {
    if (line === "") {
      if (this.#data.length) events.push({ type: this.#type || "message", data: this.#data.join("\n") });
      this.#data = [];
      this.#type = "";
      return;
    }
    const colon = line.indexOf(":");
    if (colon === 0) return; // a comment, sent to keep the connection open
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "data") this.#data.push(value);
    else if (field === "event") this.#type = value;
  }
}

/** The events of a ReadableStream of bytes, one by one; ends with the stream. */
export async function* events(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  const parser = new EventParser();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      yield* parser.push(decoder.decode(value, { stream: true }));
    }
  } finally {
    reader.cancel().catch(() => {}); // already broken: whoever reads has been told
  }
}
