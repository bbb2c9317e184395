// Starts the page: the model's name, the conversation, the engine's figures, key and theme.

import { model, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { keep } from "./conversation.js";
import { byId, write } from "./dom.js";
import { Live } from "./live.js";
import { Settings } from "./settings.js";

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

async function findModel() {
  for (;;) {
    try {
      return await model();
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
  starting ??= findModel().then((found) => {
    if (!found) {
      starting = null;
      return;
    }
    write(byId("model"), found.id);
    document.title = `${found.id} – Penstock`;
    chat.setModel(found);
    live.follow();
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
