// Attention: what a patch, the class token or a register attends to, in any layer and head.

import {byId, choice, clamp, css, el, percent, slider, toggle} from "./dom.js";
import {attentionRows, largest, likeness, meanOf, paint, smallest} from "./heat.js";
import * as seen from "./seen.js";
import {squeezed} from "./stage.js";

export class AttentionTab {
  constructor(app) {
    this.app = app;
    this.query = "patch";
    this.head = "mean";
    this.patch = null;
    this.askers = el("div");
    this.layer = slider("Layer", {min: 0, max: 11, value: 11, step: 1, id: "layer"}, () => this.load());
    this.layer.querySelector("label").htmlFor = "layer";
    this.strip = el("div", {class: "strip", role: "group", "aria-label": "Heads"});
    this.part = el("div", {}, this.layer, el("h3", {text: "Heads"}), this.strip);
    this.facts = el("dl", {class: "facts", id: "attention-facts"});
    this.even = el("b", {title: "What each token would get if all got the same"});
    this.scale = el("div", {class: "scale"}, el("span"), el("i", {}, this.even), el("span"));
    this.same = false;
    this.peaks = new Map();
    this.sameScale = toggle("Same scale in all layers", false, (on) => {
      this.same = on;
      this.load();
    });
    this.part.append(el("div", {class: "switches"}, this.sameScale));
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
      this.layer.input.max = model.depth - 1;
      this.layer.input.value = model.depth - 1;
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
    if (this.wanted) this.follow(this.wanted, model);
    await this.load();
    seen.fetchAhead(photo, model, () => this.isOpen(photo));
  }

  // What a link asks for: #attention?layer=0&head=2&query=5,7 (a row and a column), cls, rollout or like.
  follow({layer, head, query = ""}, model) {
    this.wanted = null;
    if (layer !== undefined) this.layer.input.value = Math.min(layer, model.depth - 1);
    if (head !== undefined) this.head = Math.min(head, model.heads - 1);
    const [row, column] = query.split(",").map(Number);
    if (/^\d{1,4},\d{1,4}$/.test(query)) this.patch = [clamp(row, 0, this.grid[0] - 1), clamp(column, 0, this.grid[1] - 1)];
    if (["rollout", "like"].includes(query)) this.query = query;
    else if (query) this.query = query === "cls" && model.class_token ? 0 : "patch";
    this.askers.firstChild.choose(this.query);
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
      "aria-label": name === "mean" ? "Mean of the heads" : "Head " + name, onclick: () => {
        this.head = name;
        this.draw();
      }}, el("canvas"), el("span", {text: name === "mean" ? "Mean" : String(name)}))));
  }

  layerNumber() {
    return Number(this.layer.input.value);
  }

  // Fetch what is needed for the chosen layer or map, and draw.
  async load() {
    const {current: photo, model, stage} = this.app, query = this.query, layer = this.layerNumber();
    this.layer.say(`${layer} of 0 to ${model.depth - 1}`);
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
    if (this.same && !this.part.hidden) this.all = await Promise.all(Array.from({length: model.depth}, (_, each) => seen.heads(photo, model, each)));
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
      this.tell(values, [["Patch", `row ${row}, column ${column}`]], {cosine: true});
    } else {
      const token = this.query === "patch" ? prefix + place : Number(this.query);
      const all = attentionRows(this.data, token), mean = meanOf(all), peak = this.same ? this.peak(token, prefix) : null;
      for (const button of this.strip.children) {
        const head = button.dataset.head, values = (head === "mean" ? mean : all[Number(head)]).subarray(prefix);
        paint(button.firstChild, values, this.grid, {most: peak ? peak[head === "mean" ? 0 : 1] : largest(values), cold: 1, hot: 1});
        button.setAttribute("aria-pressed", String(head === String(this.head)));
      }
      const row_N = this.head === "mean" ? mean : all[this.head], values = row_N.subarray(prefix);
      const most = peak ? peak[this.head === "mean" ? 0 : 1] : largest(values);
      paint(stage.heat, values, this.grid, {...settings, most});
      const names = seen.prefixTokens(model), registers = row_N.subarray(prefix - model.registers, prefix).reduce((a, b) => a + b, 0);
      this.tell(values, [
        this.query === "patch" ? ["Patch", `row ${row}, column ${column}`] : ["Token", names[token][0].toLowerCase()],
        ["To itself", percent(row_N[token], 1)],
        ...(model.class_token && token !== 0 ? [["To the class token", percent(row_N[0], 1)]] : []),
        ...(model.registers ? [["To registers", percent(registers, 1)]] : []),
        ["To patches", percent(values.reduce((a, b) => a + b, 0), 1)],
      ], {most, even: 1 / model.tokens});
    }
    stage.heat.dataset.query = `${this.query} ${row},${column} ${this.layerNumber()} ${this.head}`;
  }

  // The largest share that any layer gives to a patch, in the mean of its heads and in any of them.
  peak(token, prefix) {
    const {current: photo, model} = this.app, key = [photo.id, model.number, token].join(" ");
    if (!this.peaks.has(key)) {
      if (this.peaks.size > 2000) this.peaks.clear();
      const layers = this.all.map((data) => attentionRows(data, token)), patches = (row) => largest(row.subarray(prefix));
      this.peaks.set(key, [Math.max(...layers.map((rows) => patches(meanOf(rows)))), Math.max(...layers.flatMap((rows) => rows.map(patches)))]);
    }
    return this.peaks.get(key);
  }

  tell(values, facts, {cosine = false, most = largest(values), even = 0} = {}) {
    const {stage, model} = this.app;
    this.scale.children[0].textContent = cosine ? Math.min(0, smallest(values)).toFixed(2) : "0 %";
    this.scale.children[2].textContent = cosine ? "1" : percent(most, most < 0.1 ? 2 : 1);
    this.even.hidden = even === 0;
    this.even.style.left = css(Math.min(even / most, 1));
    this.facts.replaceChildren(...facts.flatMap(([name, value]) => [el("dt", {text: name}), el("dd", {text: value})]));
    const words = cosine ? "Bright: the same features as the framed patch. A cosine, 1 for the same." :
      `Bright: a large share of the attention. The brightest patch has ${percent(largest(values), 2)}, an even share would be ${percent(1 / model.tokens, 2)}.`;
    this.app.say(words + squeezed(model, stage.region, this.grid));
  }
}
