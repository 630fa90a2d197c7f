// All photos of this visit, and their crops in one archive.

import * as api from "./api.js";
import {byId, css, el, howSure, nameOf, number, readable, save} from "./dom.js";

const LABELS = {subject: "Subject", several: "Several", unsure: "Unsure", none: "Nothing"};

export class Gallery {
  constructor(app) {
    this.app = app;
    byId("zip").addEventListener("click", () => this.zip());
  }

  add(photo) {
    photo.card = el("div", {class: "card", role: "listitem"},
      el("button", {type: "button", class: "open", onclick: () => this.app.choose(photo)},
        el("span", {class: "thumb"}), nameOf(photo.name), el("span", {class: "state", text: "Waiting…"})),
      el("button", {type: "button", class: "away", "aria-label": "Remove " + readable(photo.name), text: "×", onclick: () => this.app.remove(photo)}));
    byId("cards").append(photo.card);
    this.count();
  }

  count() {
    const {photos} = this.app, crops = this.orders().length;
    byId("count").textContent = photos.length === 1 ? "1 photo" : `${number(photos.length)} photos`;
    byId("zip").disabled = crops === 0;
    byId("zip").textContent = crops > 1 ? `Download ${number(crops)} crops (zip)` : "Download crops (zip)";
  }

  draw(photo) {
    const state = photo.card.querySelector(".state"), thumb = photo.card.querySelector(".thumb");
    photo.card.classList.toggle("bad", Boolean(photo.error));
    photo.card.classList.toggle("now", photo === this.app.current);
    photo.card.querySelector(".open").setAttribute("aria-current", String(photo === this.app.current));
    if (photo.error) {
      state.textContent = photo.error;
    } else if (photo.found) {
      state.replaceChildren(el("i", {class: "dot " + photo.found.decision}), `${LABELS[photo.found.decision]} · ${howSure(photo.found)}`);
    }
    if (photo.thumb && !thumb.firstChild) thumb.append(el("span", {class: "small"}, el("img", {src: photo.thumb, alt: ""}), el("i", {class: "line", hidden: true})));
    const line = thumb.querySelector(".line");
    if (line && photo.box) {
      const [left, top, right, bottom] = photo.box, {width, height} = photo;
      line.hidden = false;
      Object.assign(line.style, {left: css(left / width), top: css(top / height), width: css((right - left) / width), height: css((bottom - top) / height)});
    }
    this.count();
  }

  // The boxes as they are now, of all subjects where all are looked for; nothing of a photo on which nothing stands out,
  // unless somebody has drawn there what to cut.
  orders() {
    return this.app.photos.filter((photo) => photo.found && (photo.found.decision !== "none" || photo.touched)).flatMap((photo) => {
      const {id, box, margin, aspect, found, chosen} = photo;
      const others = found.subjects.filter((_, place) => place !== chosen);
      const further = [...others].sort((one, other) => other.confidence - one.confidence).slice(0, Math.max(0, found.count - 1));
      return [box, ...others.filter((each) => further.includes(each)).map((each) => each.box)].map((each) => ({photo: id, box: each, margin, aspect}));
    });
  }

  async zip() {
    const button = byId("zip"), crops = this.orders();
    button.disabled = true;
    try {
      for (let start = 0, part = 1; start < crops.length; start += 100, part++) {
        const made = await (await api.post("/crops", {crops: crops.slice(start, start + 100)})).blob();
        save(made, crops.length > 100 ? `patchlight-crops-${part}.zip` : "patchlight-crops.zip");
      }
    } catch (error) {
      this.app.fail(error);
    } finally {
      this.count();
    }
  }
}
