// The subject: a box to be corrected, and its crop.

import * as api from "./api.js";
import {byId, choice, clamp, css, el, howSure, number, percent, save, slider, toggle} from "./dom.js";
import {paint} from "./heat.js";

const WORDS = {
  subject: ["Subject found", "The model is sure of this box."],
  several: ["Several subjects", "There seems to be more than one; the box holds the clearest."],
  unsure: ["Not sure", "Look closely: the box may be wrong. Drag it to where it belongs."],
  none: ["Nothing stands out", "The box is no more than a guess. Drag it to what you want."],
};
const SIDES = {n: [0, -1], s: [0, 1], w: [-1, 0], e: [1, 0], nw: [-1, -1], ne: [1, -1], sw: [-1, 1], se: [1, 1]};

export class SubjectTab {
  constructor(app) {
    this.app = app;
    this.shown = {heat: true, mask: false, box: true};
    this.box = el("div", {class: "box", tabIndex: 0, role: "group", "aria-label": "The subject's box. Arrow keys move it, with Shift they resize it."});
    for (const [name, pull] of Object.entries(SIDES)) {
      this.box.append(el("i", {class: "handle " + name, data: {name}, onpointerdown: (event) => this.drag(event, pull)}));
    }
    this.box.addEventListener("pointerdown", (event) => this.drag(event, [0, 0]));
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.cut = el("div", {class: "cut"});
    this.others = el("div");
    this.verdict = el("div", {class: "verdict", id: "verdict"});
    this.margin = slider("Margin", {min: 0, max: 50, value: 3, step: 1}, () => this.changed());
    this.aspect = choice("Aspect", ["free", "1:1", "4:3", "3:2", "16:9", "3:4", "2:3"].map((name) => [name, name === "free" ? "Free" : name]),
      "free", (value) => {
        this.app.current.aspect = value;
        this.changed();
      });
    this.many = choice("Subjects", [[1, "The subject"], [0, "All subjects"]], 1, (value) => {
      this.subjects = value;
      this.app.current.found = null;
      this.open();
    });
    this.subjects = 1;
    this.facts = el("p", {class: "facts", id: "crop-size"});
    this.download = el("button", {type: "button", class: "strong", id: "download", text: "Download crop", onclick: () => this.take()});
    this.reset = el("button", {type: "button", class: "plain", text: "Undo changes", hidden: true, onclick: () => {
      const photo = this.app.current;
      photo.box = [...photo.found.subjects[photo.chosen].box];
      photo.touched = false;
      this.changed();
    }});
    byId("panel-subject").append(this.verdict,
      el("div", {class: "switches"}, toggle("Heat map", true, (on) => this.switch("heat", on)), toggle("Mask", false, (on) => this.switch("mask", on)),
        toggle("Box", true, (on) => this.switch("box", on))),
      el("h3", {text: "Look for"}), this.many, el("h3", {text: "The crop"}), this.margin, this.aspect, this.facts, el("div", {class: "row"}, this.download, this.reset));
  }

  switch(part, on) {
    this.shown[part] = on;
    this.draw();
  }

  // Find the subject where that was not done yet, with the model that is chosen.
  static async find(photo, model, subjects = 1) {
    const wanted = `${model} ${subjects}`;
    if (photo.found && photo.found.wanted === wanted) return;
    if (!photo.finding || photo.finding.wanted !== wanted) {
      photo.finding = Object.assign(api.get(`/photos/${photo.id}/localize`, {model, subjects}), {wanted});
    }
    const found = await photo.finding;
    if (photo.found && photo.found.wanted === wanted) return;
    photo.found = {...found, wanted};
    photo.chosen = 0;
    photo.touched = false;
    photo.box = found.subjects.length ? [...found.subjects[0].box] : [0.25, 0.25, 0.75, 0.75].map((share, i) => share * (i % 2 ? photo.height : photo.width));
    photo.region = null;
  }

  async open() {
    const {current: photo, model, stage} = this.app;
    stage.point_at_patches(false);
    stage.over.replaceChildren(this.cut, this.others, this.box);
    this.aspect.choose(photo.aspect);
    this.margin.input.value = Math.round(100 * photo.margin);
    await SubjectTab.find(photo, model.number, this.subjects);
    if (this.app.current !== photo || this.app.tab !== this) return;
    this.draw();
    this.changed(true);
  }

  close() {
    this.app.stage.over.replaceChildren();
    for (const part of [this.app.stage.heat, this.app.stage.mask]) part.hidden = true;
  }

  draw() {
    const {current: photo, stage} = this.app, found = photo.found, {grid, region, values} = found.heat;
    stage.setGrid(region, grid);
    stage.heat.classList.add("smooth");
    paint(stage.heat, Float32Array.from(values), grid, {cold: 0.28, hot: 0.5});
    paint(stage.mask, Float32Array.from(found.mask), grid, {cold: 0.7, hot: 0});
    stage.mask.classList.add("masking");
    stage.heat.hidden = !this.shown.heat;
    stage.mask.hidden = !this.shown.mask;
    this.box.hidden = this.cut.hidden = this.others.hidden = !this.shown.box;
    const [title, words] = WORDS[found.decision];
    this.verdict.className = "verdict " + found.decision;
    this.verdict.replaceChildren(el("p", {}, el("i", {class: "dot"}), el("strong", {text: title}), el("span", {class: "sure", text: howSure(found)})),
      el("div", {class: "meter"}, el("i")), el("p", {class: "soft", text: words}));
    this.verdict.querySelector(".meter i").style.width = css(found.confidence);
    this.others.replaceChildren(...found.subjects.map((subject, place) => {
      const other = el("button", {type: "button", class: "other", "aria-label": "Subject " + (place + 1), hidden: place === photo.chosen, onclick: () => {
        Object.assign(photo, {chosen: place, box: [...subject.box]});
        this.draw();
        this.changed();
      }});
      stage.lay(other, subject.box);
      return other;
    }));
    this.app.say(`${readableSize(photo)} pixels. What is warm is what ${this.app.model.taught ? "the model takes for the subject" : "its features set apart"}.`);
  }

  // After every change: the box as it is now, and what a crop of it would show.
  async changed(first = false) {
    const {current: photo, stage} = this.app;
    photo.margin = Number(this.margin.input.value) / 100;
    this.margin.say(percent(photo.margin));
    stage.lay(this.box, photo.box);
    this.box.dataset.box = photo.box.map((end) => Math.round(end)).join(" ");
    const own = photo.found.subjects[photo.chosen];
    this.reset.hidden = !own || photo.box.every((end, i) => Math.abs(end - own.box[i]) < 0.01);
    if (this.asking && !first) {
      this.again = true;
      return;
    }
    this.asking = true;
    try {
      const shown = await api.get(`/photos/${photo.id}/region`, this.order(photo));
      if (photo === this.app.current) {
        photo.region = shown;
        stage.lay(this.cut, shown.region);
        this.facts.textContent = `${number(shown.width)} × ${number(shown.height)} pixels of the original`;
        this.app.gallery.draw(photo);
      }
    } finally {
      this.asking = false;
    }
    if (this.again) {
      this.again = false;
      this.changed();
    }
  }

  order(photo) {
    const [left, top, right, bottom] = photo.box;
    return {left, top, right, bottom, margin: photo.margin, aspect: photo.aspect};
  }

  async take() {
    const photo = this.app.current;
    this.download.disabled = true;
    try {
      const made = await api.blob(`/photos/${photo.id}/crop`, this.order(photo));
      const ending = {"image/png": ".png", "image/webp": ".webp", "image/tiff": ".tif"}[made.type] || ".jpg";
      save(made, photo.name.replace(/\.[A-Za-z0-9]{1,5}$/, "") + "-crop" + ending);
    } finally {
      this.download.disabled = false;
    }
  }

  drag(event, pull) {
    if (event.button) return;
    event.preventDefault();
    event.stopPropagation();
    this.box.focus({preventScroll: true});
    const photo = this.app.current, frame = this.app.stage.element.getBoundingClientRect();
    const scale = photo.width / frame.width, start = [...photo.box], from = [event.clientX, event.clientY], target = event.currentTarget;
    target.setPointerCapture(event.pointerId);
    const move = (now) => this.shift(photo, start, pull, (now.clientX - from[0]) * scale, (now.clientY - from[1]) * scale);
    const stop = () => {
      target.removeEventListener("pointermove", move);
      target.removeEventListener("pointerup", stop);
      target.removeEventListener("pointercancel", stop);
    };
    target.addEventListener("pointermove", move);
    target.addEventListener("pointerup", stop);
    target.addEventListener("pointercancel", stop);
  }

  shift(photo, [left, top, right, bottom], [across, down], dx, dy) {
    photo.touched = true;
    const {width, height} = photo, least = Math.max(2, Math.min(width, height) / 100);
    if (!across && !down) {
      dx = clamp(dx, -left, width - right);
      dy = clamp(dy, -top, height - bottom);
      photo.box = [left + dx, top + dy, right + dx, bottom + dy];
    } else {
      photo.box = [
        across < 0 ? clamp(left + dx, 0, right - least) : left, down < 0 ? clamp(top + dy, 0, bottom - least) : top,
        across > 0 ? clamp(right + dx, left + least, width) : right, down > 0 ? clamp(bottom + dy, top + least, height) : bottom];
    }
    this.changed();
  }

  key(event) {
    const step = {ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0]}[event.key];
    if (!step) return;
    event.preventDefault();
    const photo = this.app.current, size = Math.max(1, Math.max(photo.width, photo.height) / 100);
    this.shift(photo, photo.box, event.shiftKey ? [step[0] ? 1 : 0, step[1] ? 1 : 0] : [0, 0], step[0] * size, step[1] * size);
  }
}

export const readableSize = (photo) => `${number(photo.width)} × ${number(photo.height)}`;
