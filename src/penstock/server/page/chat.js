// The conversation: sends, streams, stops, tries again. Chat and completion are two
// conversations, each with its own memory; a model without a chat template has only the second.

import { complete } from "./api.js";
import { Conversation, keep, kept } from "./conversation.js";
import { byId, h, oncePerFrame, write } from "./dom.js";
import { copyCode } from "./prose.js";
import { Clock, ReplyView, userTurn } from "./turn.js";

const MODE = "penstock.mode";
const NEAR_END = 80; // pixels: a reader this close to the end is taken along

export class Chat {
  constructor(settings, askKey) {
    this.settings = settings;
    this.askKey = askKey;
    this.log = byId("log");
    this.input = byId("input");
    this.send = byId("send");
    this.conversations = { chat: new Conversation("penstock.chat"), complete: new Conversation("penstock.complete") };
    this.model = null;
    this.running = null; // the AbortController of the reply that is being written
    this.editing = false;
    this.#listen();
    this.setMode(kept(MODE, "chat") === "complete" ? "complete" : "chat");
  }

  get conversation() {
    return this.conversations[this.mode];
  }

  #listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.stop();
      else this.submit();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.running) this.submit();
    });
    this.input.addEventListener("input", () => this.#fit());
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || event.defaultPrevented || document.querySelector("dialog[open]")) return;
      if (this.running) this.stop();
      else if (this.editing) this.#endEditing("");
    });
    for (const radio of document.querySelectorAll("input[name=mode]")) {
      radio.addEventListener("change", () => this.setMode(radio.value));
    }
    byId("new").addEventListener("click", () => this.clear());
    byId("to-end").addEventListener("click", () => this.#toEnd());
    this.log.addEventListener("scroll", () => this.#showWayToEnd(), { passive: true });
    window.addEventListener("pagehide", () => this.conversation.save());
    copyCode(this.log);
  }

  setModel(model) {
    this.model = model;
    this.#greet();
  }

  setMode(mode) {
    this.stop();
    this.#endEditing("");
    this.mode = mode;
    keep(MODE, mode);
    byId(`mode-${mode}`).checked = true;
    document.body.dataset.mode = mode;
    this.input.placeholder = mode === "chat" ? "Message" : "Begin a text; the model goes on";
    this.input.setAttribute("aria-label", mode === "chat" ? "Message" : "Text to complete");
    this.render();
  }

  clear() {
    this.stop();
    this.conversation.clear();
    this.#endEditing("");
    this.render();
    this.input.focus();
  }

  submit() {
    const text = this.mode === "chat" ? this.input.value.trim() : this.input.value;
    if (!text.trim() || !this.settings.valid()) return;
    if (this.editing) this.conversation.turns.splice(-2);
    this.conversation.turns.push({ role: "user", text });
    this.#endEditing("");
    this.reply();
  }

  stop() {
    this.running?.abort();
  }

  /** Writes a reply to the last message, anew if there is one. */
  reply() {
    const { turns } = this.conversation;
    if (this.running || !turns.length || !this.settings.valid()) return;
    if (this.conversation.last.role === "assistant") turns.pop();
    turns.push({ role: "assistant", text: "" });
    this.render();
    this.#toEnd();
    this.#generate(this.lastView);
  }

  /** Lets a completion go on where it ended. */
  goOn() {
    if (this.running || !this.settings.valid()) return;
    this.lastView.actions.replaceChildren();
    this.#generate(this.lastView);
  }

  edit() {
    const user = this.conversation.turns.at(-2);
    if (this.running || user?.role !== "user") return;
    this.editing = true;
    byId("editing").hidden = false;
    this.input.value = user.text;
    this.#fit();
    this.input.focus();
  }

  #endEditing(text) {
    this.editing = false;
    byId("editing").hidden = true;
    this.input.value = text;
    this.#fit();
  }

  #request(turn) {
    const request = { model: this.model?.id, ...this.settings.request(this.mode) };
    if (this.mode === "complete") {
      request.prompt = this.conversation.turns.at(-2).text + turn.text;
      return ["v1/completions", request];
    }
    request.messages = this.conversation.messages(this.settings.system.value.trim());
    return ["v1/chat/completions", request];
  }

  async #generate(view) {
    const { turn } = view;
    const { conversation } = this;
    const [path, request] = this.#request(turn);
    this.running = new AbortController();
    const { signal } = this.running;
    this.#setBusy(true);
    Object.assign(turn, { state: "running", error: undefined, figures: undefined });
    conversation.save();
    view.grow();
    try {
      await this.#stream(view, path, request, signal);
    } catch (error) {
      if (signal.aborted) turn.state = "stopped";
      else Object.assign(turn, { state: "failed", error: error.message, status: error.status });
    }
    this.running = null;
    this.#setBusy(false);
    conversation.save();
    if (conversation !== this.conversation || conversation.last !== turn) return; // put aside meanwhile
    this.#finish(view);
    this.#announce(turn);
    if (turn.status === 401 && (await this.askKey())) this.reply();
  }

  async #stream(view, path, request, signal) {
    const { turn } = view;
    const clock = new Clock();
    let usage = null;
    let own = null;
    const draw = oncePerFrame(() => {
      if (turn.state !== "running") return;
      const follow = this.#atEnd();
      view.grow();
      if (follow) this.#toEnd();
    });
    try {
      for await (const chunk of complete(path, request, signal)) {
        const choice = chunk.choices?.[0];
        const piece = choice?.delta?.content ?? choice?.text;
        if (piece) {
          clock.piece();
          turn.text += piece;
          draw();
        }
        if (choice?.finish_reason === "length") turn.cut = true;
        usage = chunk.usage ?? usage;
        own = chunk.penstock ?? own;
      }
      turn.state = turn.cut ? "length" : "done";
      delete turn.cut;
    } finally {
      turn.figures = clock.figures(usage, own);
    }
  }

  #finish(view) {
    const follow = this.#atEnd();
    const { turn } = view;
    const actions = [["Regenerate", "Write this reply anew", () => this.reply()]];
    if (this.mode === "complete") {
      if (turn.text) actions.push(["Continue", "Let the model go on", () => this.goOn()]);
      actions.push(["Edit", "Change the prompt and complete it again", () => this.edit()]);
    }
    view.finish(this.conversation.last === turn ? actions : []);
    if (this.mode === "chat" && turn.status === 400 && /chat.?template/i.test(turn.error ?? "")) {
      view.offer("Complete text instead", () => this.#completeInstead());
    }
    if (follow) this.#toEnd();
  }

  #completeInstead() {
    const [user] = this.conversation.turns.splice(-2);
    this.conversation.save();
    this.setMode("complete");
    this.#endEditing(user.text);
    this.input.focus();
  }

  render() {
    const { turns } = this.conversation;
    const views = [];
    turns.forEach((turn, at) => {
      if (turn.role === "assistant") {
        const prompt = this.mode === "complete" ? (turns[at - 1]?.text ?? "") : undefined;
        this.lastView = new ReplyView(turn, prompt);
        if (turn.state === "running") turn.state = "stopped"; // the page was left meanwhile
        this.#finish(this.lastView);
        views.push(this.lastView.element);
      } else if (this.mode === "chat") {
        const latest = at >= turns.length - 2;
        views.push(userTurn(turn, latest ? () => this.edit() : null));
      }
    });
    this.log.replaceChildren(...views);
    this.#greet();
    this.#toEnd();
  }

  #greet() {
    if (this.conversation.turns.length) return;
    const model = this.model;
    const context = model?.max_model_len ? `Context of ${model.max_model_len.toLocaleString("en")} tokens. ` : "";
    const kept = "What is written here stays in this browser.";
    const title = this.mode === "chat" ? "Ask something." : "Begin a text.";
    this.log.replaceChildren(h("div", { class: "greeting" }, h("h2", {}, title), h("p", {}, context + kept)));
  }

  #setBusy(busy) {
    this.log.setAttribute("aria-busy", String(busy));
    document.body.classList.toggle("busy", busy);
    write(this.send, busy ? "Stop" : "Send");
  }

  #announce(turn) {
    const said = { stopped: "Stopped.", failed: `The reply failed: ${turn.error}` }[turn.state] ?? "Reply:";
    write(byId("announce"), `${said} ${turn.text}`);
  }

  #fit() {
    this.input.style.height = "auto";
    this.input.style.height = `${this.input.scrollHeight}px`;
  }

  #atEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR_END;
  }

  #toEnd() {
    this.log.scrollTop = this.log.scrollHeight;
  }

  #showWayToEnd() {
    byId("to-end").hidden = this.#atEnd();
  }
}
