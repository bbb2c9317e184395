// Starts the page: the model's name, the conversation, the engine's figures, key and theme.

import { model, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { keep } from "./conversation.js";
import { byId, write } from "./dom.js";
import { Live } from "./live.js";
import { Settings } from "./settings.js";

let asking = null;

/** Asks for the server's key, once for all who need it; false where it is refused. */
function askKey() {
  asking ??= new Promise((answer) => {
    const dialog = byId("key-dialog");
    const field = byId("key");
    const end = (given) => {
      if (dialog.open) dialog.close();
      asking = null;
      answer(given);
    };
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      setKey(field.value.trim());
      end(true);
    };
    byId("key-cancel").onclick = () => end(false);
    dialog.oncancel = () => end(false);
    byId("key-note").hidden = !field.value; // a key was tried already
    dialog.showModal();
    field.select();
  });
  return asking;
}

function followTheme() {
  const root = document.documentElement;
  const select = byId("theme");
  select.value = root.dataset.theme ?? "auto";
  select.addEventListener("change", () => {
    if (select.value === "auto") delete root.dataset.theme;
    else root.dataset.theme = select.value;
    keep("penstock.theme", select.value);
  });
}

async function findModel(chat) {
  for (;;) {
    try {
      const found = await model();
      write(byId("model"), found.id);
      document.title = `${found.id} – Penstock`;
      chat.setModel(found);
      return;
    } catch (error) {
      write(byId("model"), error.message);
      if (error.status === 401) {
        if (!(await askKey())) return;
      } else await new Promise((go) => setTimeout(go, 3000));
    }
  }
}

followTheme();
const chat = new Chat(new Settings(), askKey);
const live = new Live(askKey);
await findModel(chat);
live.follow();
