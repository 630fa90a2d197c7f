// What the model would call the photo.

import * as api from "./api.js";
import {byId, el, number, percent} from "./dom.js";
import {bar} from "./patches.js";

export class ClassesTab {
  constructor(app) {
    this.app = app;
    this.list = el("div", {class: "said", id: "classes"});
    this.group = el("p", {id: "group"});
    this.words = el("p", {class: "soft"});
    byId("panel-classes").append(el("h3", {text: "What it would call this"}), this.group, this.list, this.words);
  }

  async open() {
    const {current: photo, model, stage} = this.app;
    stage.point_at_patches(false);
    stage.over.replaceChildren();
    stage.heat.hidden = true;
    this.list.replaceChildren();
    this.group.textContent = "";
    this.app.say("");
    if (!model.classes) {
      this.words.textContent = "This model has no head, so it names no classes. Start the server with one that has: patchlight serve --model NAME.";
      return;
    }
    this.words.textContent = `Of the ${number(model.classes)} classes that it was taught. It has to choose among these, whatever the photo shows.`;
    const said = await api.get(`/photos/${photo.id}/classify`, {model: model.number, top: 10});
    if (this.app.current !== photo || this.app.tab !== this) return;
    this.list.replaceChildren(...said.classes.map(bar));
    if (!said.group) return;
    const sure = [[said.group, said.group_confidence], [said.label, said.label_confidence]].filter(([name]) => name);
    this.group.textContent = sure.map(([name, share]) => (share === null ? name : `${name} ${percent(share, 1)}`)).join(", ");
  }

  close() {}
}
