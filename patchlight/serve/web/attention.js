// Attention: what a patch, the class token or a register attends to, in any layer and head.

import {byId, choice, el, percent, slider} from "./dom.js";
import {attentionRows, largest, likeness, meanOf, paint, smallest} from "./heat.js";
import * as seen from "./seen.js";

export class AttentionTab {
  constructor(app) {
    this.app = app;
    this.query = "patch";
    this.head = "mean";
    this.patch = null;
    this.askers = el("div");
    this.layer = slider("Layer", {min: 1, max: 12, value: 12, step: 1, id: "layer"}, () => this.load());
    this.layer.querySelector("label").htmlFor = "layer";
    this.strip = el("div", {class: "strip", role: "group", "aria-label": "Heads"});
    this.part = el("div", {}, this.layer, el("h3", {text: "Heads"}), this.strip);
    this.facts = el("dl", {class: "facts", id: "attention-facts"});
    this.scale = el("div", {class: "scale"}, el("span"), el("i"), el("span"));
    this.hint = el("p", {class: "soft"});
    byId("panel-attention").append(el("h3", {text: "Who asks"}), this.askers, this.hint, this.part, this.scale, this.facts);
  }

  async open() {
    const {model, stage, current: photo} = this.app;
    stage.heat.classList.remove("smooth");
    stage.over.replaceChildren();
    stage.element.classList.add("dim");
    if (this.depth !== model.depth || this.of !== model.number) {
      this.depth = model.depth;
      this.of = model.number;
      this.layer.input.max = model.depth;
      this.layer.input.value = model.depth;
      this.head = "mean";
      const names = seen.prefixTokens(model);
      if (this.query !== "patch" && !["rollout", "like"].includes(this.query)) this.query = "patch";
      this.askers.replaceChildren(choice("Who asks", [["patch", "A patch"], ...names.map(([name], i) => [i, name]), ["rollout", "Rollout"], ["like", "Similar features"]],
        this.query, (value) => {
          this.query = value;
          this.load();
        }));
      this.makeStrip(model.heads);
    }
    const {heat: {grid, region}} = await seen.found(photo, model);
    if (!this.isOpen(photo)) return;
    stage.setGrid(region, grid);
    this.grid = grid;
    if (!this.patch || this.patch[0] >= grid[0] || this.patch[1] >= grid[1]) {
      const found = await seen.found(photo, model), best = found.heat.values.indexOf(largest(found.heat.values));
      this.patch = [Math.floor(best / grid[1]), best % grid[1]];
    }
    await this.load();
    seen.fetchAhead(photo, model, () => this.isOpen(photo));
  }

  isOpen(photo) {
    return this.app.current === photo && this.app.tab === this;
  }

  close() {
    const {stage} = this.app;
    stage.point_at_patches(false);
    stage.element.classList.remove("dim");
    stage.heat.hidden = true;
  }

  makeStrip(heads) {
    const names = ["mean", ...Array(heads).keys()];
    this.strip.replaceChildren(...names.map((name) => el("button", {type: "button", data: {head: name}, "aria-pressed": String(name === this.head),
      "aria-label": name === "mean" ? "Mean of the heads" : "Head " + (name + 1), onclick: () => {
        this.head = name;
        this.draw();
      }}, el("canvas"), el("span", {text: name === "mean" ? "Mean" : String(name + 1)}))));
  }

  layerNumber() {
    return Number(this.layer.input.value) - 1;
  }

  // Fetch what is needed for the chosen layer or map, and draw.
  async load() {
    const {current: photo, model, stage} = this.app, query = this.query, layer = this.layerNumber();
    this.layer.say(`${layer + 1} of ${model.depth}`);
    this.part.hidden = query === "rollout" || query === "like";
    stage.point_at_patches(query === "patch" || query === "like");
    this.hint.textContent = {
      patch: "Point at a patch, or use the arrow keys on the photo.",
      like: "Point at a patch: what has similar features in the last layer?",
      rollout: "Attention followed through all layers, down to what the answer is read from.",
    }[query] || "It is in front of the patches and reads them all.";
    if (query === "rollout") this.data = await seen.rollout(photo, model);
    else if (query === "like") this.data = await seen.features(photo, model);
    else this.data = seen.headsNow(photo, model, layer) || await seen.heads(photo, model, layer);
    if (this.isOpen(photo) && query === this.query && layer === this.layerNumber()) this.draw();
  }

  pointed(row, column) {
    this.patch = [row, column];
    this.draw();
  }

  draw() {
    const {model, stage} = this.app, [rows, columns] = this.grid, [row, column] = this.patch, place = row * columns + column;
    const prefix = model.tokens - model.grid[0] * model.grid[1];
    stage.heat.hidden = false;
    if (this.query === "patch" || this.query === "like") stage.markPatch(row, column);
    const settings = {cold: 0.42, hot: 0.9};
    if (this.query === "rollout") {
      const values = Float32Array.from(this.data.values);
      paint(stage.heat, values, this.grid, {...settings, most: largest(values)});
      this.tell(values, [["Shown", "what reaches the answer"]]);
    } else if (this.query === "like") {
      const values = likeness(this.data.patches, place);
      paint(stage.heat, values, this.grid, {...settings, least: Math.min(0, smallest(values)), most: 1});
      this.tell(values, [["Patch", `row ${row + 1}, column ${column + 1}`]], true);
    } else {
      const token = this.query === "patch" ? prefix + place : Number(this.query);
      const all = attentionRows(this.data, token), mean = meanOf(all);
      for (const button of this.strip.children) {
        const head = button.dataset.head, values = (head === "mean" ? mean : all[Number(head)]).subarray(prefix);
        paint(button.firstChild, values, this.grid, {most: largest(values), cold: 1, hot: 1});
        button.setAttribute("aria-pressed", String(head === String(this.head)));
      }
      const row_N = this.head === "mean" ? mean : all[this.head], values = row_N.subarray(prefix);
      paint(stage.heat, values, this.grid, {...settings, most: largest(values)});
      const names = seen.prefixTokens(model), registers = row_N.subarray(prefix - model.registers, prefix).reduce((a, b) => a + b, 0);
      this.tell(values, [
        this.query === "patch" ? ["Patch", `row ${row + 1}, column ${column + 1}`] : ["Token", names[token][0].toLowerCase()],
        ["To itself", percent(row_N[token], 1)],
        ...(model.class_token && token !== 0 ? [["To the class token", percent(row_N[0], 1)]] : []),
        ...(model.registers ? [["To registers", percent(registers, 1)]] : []),
        ["To patches", percent(values.reduce((a, b) => a + b, 0), 1)],
      ]);
    }
    stage.heat.dataset.query = `${this.query} ${row},${column} ${this.layerNumber()} ${this.head}`;
  }

  tell(values, facts, cosine = false) {
    const most = largest(values);
    this.scale.children[0].textContent = cosine ? Math.min(0, smallest(values)).toFixed(2) : "0 %";
    this.scale.children[2].textContent = cosine ? "1" : percent(most, most < 0.1 ? 2 : 1);
    this.facts.replaceChildren(...facts.flatMap(([name, value]) => [el("dt", {text: name}), el("dd", {text: value})]));
    const even = 1 / this.app.model.tokens;
    this.app.say(cosine ? "Bright: the same features as the framed patch. A cosine, 1 for the same." :
      `Bright: a large share of the attention. The brightest patch has ${percent(most, 2)}, an even share would be ${percent(even, 2)}.`);
  }
}
