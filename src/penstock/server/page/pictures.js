// Pictures of the next message: picked, pasted or dropped, and shown small until they are sent.

import { byId, h, write } from "./dom.js";

const LARGEST = 20 << 20; // bytes of a file; servers take 32 MB of a request, in which it is a third larger

const read = (file) =>
  new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  });

/** Small pictures; `remove` is called with the number of one that is to go. */
export function pictureRow(urls, remove) {
  const shown = urls.map((src, at) => {
    const picture = h("img", { src, alt: `Picture ${at + 1}` });
    if (!remove) return picture;
    const label = `Remove picture ${at + 1}`;
    return h("button", { type: "button", class: "picked", title: label, "aria-label": label, onclick: () => remove(at) }, picture);
  });
  return h("div", { class: "pictures" }, ...shown);
}

export class Tray {
  #allowed = false;
  pictures = []; // data: URLs

  constructor() {
    this.files = byId("files");
    byId("attach").addEventListener("click", () => this.files.click());
    this.files.addEventListener("change", () => {
      this.add(this.files.files);
      this.files.value = ""; // the same one may be picked again
    });
    const composer = byId("composer");
    const over = (event) => this.#allowed && event.dataTransfer?.types.includes("Files") && event.preventDefault();
    composer.addEventListener("dragover", over);
    composer.addEventListener("drop", (event) => {
      over(event);
      this.add(event.dataTransfer.files);
    });
    composer.addEventListener("paste", (event) => this.add(event.clipboardData.files));
  }

  /** Whether the model sees pictures. */
  allow(allowed) {
    this.#allowed = allowed;
    byId("attach").hidden = !allowed;
  }

  async add(files) {
    if (!this.#allowed || document.body.dataset.mode !== "chat") return;
    let wrong = "";
    for (const file of [...files]) { // a list that is emptied while the first is read
      try {
        if (!file.type.startsWith("image/")) wrong = `${file.name} isn't a picture.`;
        else if (file.size > LARGEST) wrong = `${file.name} has more than 20 MB. Make it smaller.`;
        else this.pictures.push(await read(file));
      } catch (error) {
        wrong = `${file.name} can't be read: ${error.message}`;
      }
    }
    this.show(this.pictures, wrong);
  }

  /** Has these pictures from here on. */
  show(pictures, wrong = "") {
    this.pictures = pictures;
    const remove = (at) => this.show(this.pictures.filter((_, i) => i !== at));
    byId("tray").replaceChildren(...(pictures.length ? [pictureRow(pictures, remove)] : []));
    byId("tray-trouble").hidden = !wrong;
    write(byId("tray-trouble"), wrong);
  }
}
