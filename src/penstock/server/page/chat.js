// The conversation: sends, streams, stops, tries again. Chat and completion are two
// conversations, each with its own memory; a model without a chat template has only the second.

import { ApiError, complete } from "./api.js";
import { Conversation, keep, kept } from "./conversation.js";
import { byId, h, oncePerFrame, write } from "./dom.js";
import { Tray } from "./pictures.js";
import { copyCode } from "./prose.js";
import { Clock, ReplyView, userTurn } from "./turn.js";

const MODE = "penstock.mode";
const NEAR_END = 80; // pixels: a reader this close to the end is taken along

export class Chat {
  #conversations = { chat: new Conversation("penstock.chat"), complete: new Conversation("penstock.complete") };
  #model = null;
  #running = null; // the AbortController of the reply that is being written
  #editing = false;
  #latest = null; // the view of the last reply

  constructor(settings, askKey) {
    this.settings = settings;
    this.askKey = askKey;
    this.log = byId("log");
    this.input = byId("input");
    this.tray = new Tray();
    this.#listen();
    this.#setMode(kept(MODE, "chat"));
  }

  get conversation() {
    return this.#conversations[this.mode];
  }

  setModel(model) {
    this.#model = model;
    this.tray.allow(model.input_modalities?.includes("image") ?? false);
    this.#greet();
  }

  #listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#running) this.#running.abort();
      else this.#submit();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.#running) this.#submit();
    });
    this.input.addEventListener("input", () => this.#fit());
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || byId("key-dialog").open) return;
      if (this.#running) this.#running.abort();
      else if (this.#editing) this.#compose("");
    });
    for (const radio of document.querySelectorAll("input[name=mode]")) {
      radio.addEventListener("change", () => this.#setMode(radio.value));
    }
    byId("new").addEventListener("click", () => {
      this.#running?.abort();
      this.conversation.clear();
      this.#compose("");
      this.#render();
      this.input.focus();
    });
    addEventListener("pagehide", () => this.conversation.save());
    copyCode(this.log);
  }

  #setMode(mode) {
    this.#running?.abort();
    this.mode = mode === "complete" ? mode : "chat";
    keep(MODE, this.mode);
    byId(`mode-${this.mode}`).checked = true;
    document.body.dataset.mode = this.mode;
    this.input.placeholder = this.mode === "chat" ? "Message" : "Begin a text; the model goes on";
    this.input.setAttribute("aria-label", this.mode === "chat" ? "Message" : "Text to complete");
    this.#compose("");
    this.#render();
  }

  // Puts a text into the field, and its pictures beside it; an edit ends thereby, or begins.
  #compose(text, editing = false, pictures = []) {
    this.#editing = editing;
    byId("editing").hidden = !editing;
    this.input.value = text;
    this.tray.show([...pictures]);
    this.#fit();
  }

  #fit() {
    this.input.style.height = "auto";
    this.input.style.height = `${this.input.scrollHeight}px`;
  }

  #submit() {
    const text = this.mode === "chat" ? this.input.value.trim() : this.input.value;
    const { pictures } = this.tray;
    if ((!text.trim() && !pictures.length) || !this.settings.valid()) return;
    if (this.#editing) this.conversation.turns.splice(-2);
    this.conversation.turns.push({ role: "user", text, ...(pictures.length && { pictures }) });
    this.#compose("");
    this.#reply();
  }

  #edit() {
    if (this.#running) return;
    const { text, pictures } = this.conversation.turns.at(-2);
    this.#compose(text, true, pictures);
    this.input.focus();
  }

  // Writes a reply to the last message, anew if there is one.
  #reply() {
    if (this.#running || !this.settings.valid()) return;
    const { turns } = this.conversation;
    if (turns.at(-1).role === "assistant") turns.pop();
    turns.push({ role: "assistant", text: "" });
    this.#render();
    this.#generate(this.#latest);
  }

  // Lets a completion go on where it ended.
  #goOn() {
    if (this.#running || !this.settings.valid()) return;
    this.#latest.actions.replaceChildren();
    this.#generate(this.#latest);
  }

  #request(turn) {
    const request = { model: this.#model?.id, ...this.settings.request(this.mode) };
    if (this.mode === "chat") {
      const messages = this.conversation.messages(this.settings.system.value.trim());
      return ["v1/chat/completions", { ...request, messages }];
    }
    return ["v1/completions", { ...request, prompt: this.conversation.turns.at(-2).text + turn.text }];
  }

  async #generate(view) {
    const { turn } = view;
    const { conversation } = this;
    const [path, request] = this.#request(turn);
    const { signal } = (this.#running = new AbortController());
    this.#setBusy(true);
    Object.assign(turn, { state: "running", error: undefined, status: undefined, figures: undefined });
    conversation.save();
    view.grow();
    try {
      turn.state = await this.#stream(view, path, request, signal);
    } catch (error) {
      if (signal.aborted) turn.state = "stopped";
      else {
        const broke = error instanceof ApiError ? "" : "The connection broke: ";
        Object.assign(turn, { state: "failed", error: broke + error.message, status: error.status });
      }
    }
    this.#running = null;
    this.#setBusy(false);
    conversation.save();
    if (this.#latest !== view) return; // put aside meanwhile
    this.#finish(view);
    const said = { stopped: "Stopped.", failed: `The reply failed: ${turn.error}` }[turn.state] ?? "Reply:";
    write(byId("announce"), `${said} ${turn.text}`);
    if (turn.status === 401 && (await this.askKey())) this.#reply();
  }

  async #stream(view, path, request, signal) {
    const { turn } = view;
    const clock = new Clock();
    let [state, usage, own] = ["done", null, null];
    const draw = oncePerFrame(() => turn.state === "running" && this.#following(() => view.grow()));
    try {
      for await (const chunk of complete(path, request, signal)) {
        const choice = chunk.choices?.[0];
        const piece = choice?.delta?.content ?? choice?.text;
        if (piece) {
          clock.piece();
          turn.text += piece;
          draw();
        }
        if (choice?.finish_reason === "length") state = "length";
        usage = chunk.usage ?? usage;
        own = chunk.penstock ?? own;
      }
      return state;
    } finally {
      turn.figures = clock.figures(usage, own);
    }
  }

  #finish(view) {
    const { turn } = view;
    const actions = [["Regenerate", "Write this reply anew", () => this.#reply()]];
    if (this.mode === "complete") {
      actions.push(["Continue", "Let the model go on", () => this.#goOn()]);
      actions.push(["Edit", "Change the prompt and complete it again", () => this.#edit()]);
    }
    this.#following(() => view.finish(this.conversation.turns.at(-1) === turn ? actions : []));
    if (this.mode === "chat" && turn.status === 400 && /chat.?template/i.test(turn.error)) {
      view.offer("Complete text instead", () => this.#completeInstead());
    }
  }

  #completeInstead() {
    const [user] = this.conversation.turns.splice(-2);
    this.conversation.save();
    this.#setMode("complete");
    this.#compose(user.text);
    this.input.focus();
  }

  #render() {
    const { turns } = this.conversation;
    this.log.replaceChildren();
    this.#latest = null;
    turns.forEach((turn, at) => {
      if (turn.role === "user") {
        const edit = at >= turns.length - 2 ? () => this.#edit() : null;
        if (this.mode === "chat") this.log.append(userTurn(turn, edit));
        return;
      }
      if (turn.state === "running") turn.state = "stopped"; // the page was left meanwhile
      this.#latest = new ReplyView(turn, this.mode === "complete" ? turns[at - 1].text : undefined);
      this.#finish(this.#latest);
      this.log.append(this.#latest.element);
    });
    this.#greet();
    this.log.scrollTop = this.log.scrollHeight;
  }

  #greet() {
    if (this.conversation.turns.length) return;
    const length = this.#model?.max_model_len?.toLocaleString("en");
    const context = length ? `The model reads ${length} tokens. ` : "";
    const title = h("h2", {}, this.mode === "chat" ? "Ask something." : "Begin a text.");
    const note = h("p", { class: "dim" }, `${context}What you write is kept in this browser.`);
    this.log.replaceChildren(h("div", { class: "greeting" }, title, note));
  }

  #setBusy(busy) {
    this.log.setAttribute("aria-busy", String(busy));
    document.body.classList.toggle("busy", busy);
    write(byId("send"), busy ? "Stop" : "Send");
  }

  // Changes the log; a reader at its end stays there.
  #following(change) {
    const { log } = this;
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
    change();
    if (atEnd) log.scrollTop = log.scrollHeight;
  }
}
