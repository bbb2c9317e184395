// Starts the page: the model's name, the conversation, the engine's figures, key and theme.

import { models, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { keep, kept } from "./conversation.js";
import { byId, h, write } from "./dom.js";
import { Live } from "./live.js";
import { Settings } from "./settings.js";

const MODEL = "penstock.model";
let asking = null;

// Asks for the server's key, once for all who need it; false where it isn't given.
function askKey() {
  asking ??= new Promise((answer) => {
    const [dialog, field] = [byId("key-dialog"), byId("key")];
    const end = (given) => {
      dialog.close();
      asking = null;
      answer(given);
    };
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      setKey(field.value.trim());
      end(true);
    };
    byId("key-cancel").onclick = dialog.oncancel = () => end(false);
    byId("key-note").hidden = !field.value; // a key was tried already
    dialog.showModal();
    field.select();
  });
  return asking;
}

function followTheme() {
  const { dataset } = document.documentElement;
  const select = byId("theme");
  select.value = dataset.theme ?? "auto";
  select.addEventListener("change", () => {
    if (select.value === "auto") delete dataset.theme;
    else dataset.theme = select.value;
    keep("penstock.theme", select.value);
  });
}

async function findModels() {
  for (;;) {
    try {
      return await models();
    } catch (error) {
      write(byId("model"), error.message);
      if (error.status !== 401) await new Promise((go) => setTimeout(go, 3000));
      else if (!(await askKey())) return null; // a message will ask again
    }
  }
}

let starting = null;

// Once; again only where a key was missing.
function start() {
  starting ??= findModels().then((found) => {
    if (!found) {
      starting = null;
      return;
    }
    const before = kept(MODEL, "");
    take(found.find((model) => model.id === before) ?? found[0]);
    if (found.length > 1) offer(found);
  });
}

function take(model) {
  write(byId("model"), model.id);
  document.title = `${model.id} – Penstock`;
  chat.setModel(model);
  live.follow(model.id);
}

// A choice where there is one; a model that isn't loaded is loaded when it is asked something.
function offer(found) {
  const select = byId("models");
  select.replaceChildren(...found.map(({ id }) => h("option", { value: id }, id)));
  select.value = byId("model").textContent;
  select.hidden = false;
  byId("model").hidden = true;
  select.addEventListener("change", async () => {
    keep(MODEL, select.value);
    const { value } = select;
    const known = await models().catch(() => found); // what a model reads is known once it is loaded
    if (select.value === value) take(known.find(({ id }) => id === value) ?? { id: value });
  });
}

async function askAndStart() {
  const given = await askKey();
  if (given) start();
  return given;
}

followTheme();
const chat = new Chat(new Settings(), askAndStart);
const live = new Live(askKey);
start();
