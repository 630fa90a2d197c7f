// Two looks at one photo, side by side: two models, or two ways of reading one.

import {byId, el, howSure, percent} from "./dom.js";
import {attentionRows, largest, likeness, meanOf, paint, smallest} from "./heat.js";
import * as seen from "./seen.js";
import {Stage} from "./stage.js";

const KINDS = [
  ["subject", "Subject", (model) => model.taught], ["cls", "Class token's attention", (model) => model.class_token], ["patch", "Attention of the patch", () => true],
  ["like", "Features like the patch", () => true], ["rollout", "Rollout", () => true], ["tokencut", "TokenCut", () => true], ["lost", "LOST", () => true],
];

class Side {
  constructor(tab, name, kind) {
    this.tab = tab;
    this.kind = kind;
    this.model = null;
    this.stage = new Stage(name + " look at the photo", (row, column) => tab.pointed(this, row, column));
    this.models = el("select", {"aria-label": name + ": model", onchange: () => {
      this.model = tab.app.models.find((model) => model.number === Number(this.models.value));
      this.fill();
      this.load();
    }});
    this.kinds = el("select", {"aria-label": name + ": what to show", onchange: () => {
      this.kind = this.kinds.value;
      this.load();
    }});
    this.words = el("p", {class: "soft"});
    this.element = el("div", {class: "side"}, el("div", {class: "row"}, el("div", {class: "field"}, this.models), el("div", {class: "field"}, this.kinds)), this.stage.element, this.words);
  }

  fill() {
    const {models} = this.tab.app;
    this.models.replaceChildren(...models.map((model) => el("option", {value: model.number, text: model.name, selected: model === this.model})));
    const possible = KINDS.filter(([, , fits]) => fits(this.model));
    if (!possible.some(([kind]) => kind === this.kind)) this.kind = possible[0][0];
    this.kinds.replaceChildren(...possible.map(([kind, text]) => el("option", {value: kind, text, selected: kind === this.kind})));
  }

  async load() {
    const {current: photo} = this.tab.app, {kind, model, stage} = this;
    stage.show(photo, this.tab.app.stage.image.src);
    const found = await seen.found(photo, model, ["subject", "tokencut", "lost"].includes(kind) ? kind : "auto");
    const data = await {subject: () => found, tokencut: () => found, lost: () => found, cls: () => seen.heads(photo, model, model.depth - 1),
      patch: () => seen.heads(photo, model, model.depth - 1), like: () => seen.features(photo, model), rollout: () => seen.rollout(photo, model)}[kind]();
    if (photo !== this.tab.app.current || kind !== this.kind || model !== this.model) return;
    Object.assign(this, {data, grid: found.heat.grid});
    stage.setGrid(found.heat.region, found.heat.grid);
    stage.point_at_patches(kind === "patch" || kind === "like");
    stage.element.classList.toggle("dim", !["subject"].includes(kind));
    this.draw();
  }

  // The patch that is pointed at is a place on the photo, whatever the grid.
  draw() {
    const {stage, kind, model, data, grid} = this;
    if (!data) return;
    const [row, column] = stage.patchAt(...this.tab.place()), place = row * grid[1] + column, prefix = model.tokens - model.grid[0] * model.grid[1];
    let values, least = 0, most = null, words = "";
    if (kind === "subject" || kind === "tokencut" || kind === "lost") {
      values = Float32Array.from(data.heat.values);
      most = 1;
      words = `${{subject: "Subject", several: "Several", unsure: "Unsure", none: "None"}[data.decision]}, ${howSure(data)}`;
    } else if (kind === "rollout") {
      values = Float32Array.from(data.values);
    } else if (kind === "like") {
      values = likeness(data.patches, place);
      least = Math.min(0, smallest(values));
      most = 1;
    } else {
      const mean = meanOf(attentionRows(data, kind === "cls" ? 0 : prefix + place));
      values = mean.subarray(prefix);
      words = `Last layer, mean of ${model.heads} heads; ${percent(1 - values.reduce((a, b) => a + b, 0), 1)} goes to ${model.registers ? "class token and registers" : "tokens before the patches"}`;
    }
    stage.heat.classList.toggle("smooth", kind === "subject");
    paint(stage.heat, values, grid, {least, most: most ?? largest(values), cold: kind === "subject" ? 0.28 : 0.42, hot: kind === "subject" ? 0.5 : 0.9});
    if (stage.pointing) stage.markPatch(row, column);
    this.words.textContent = words || `Brightest patch: ${percent(largest(values), 1)}`;
  }
}

export class CompareTab {
  constructor(app) {
    this.app = app;
    this.sides = [new Side(this, "Left", "cls"), new Side(this, "Right", "rollout")];
    this.hint = el("p", {class: "soft"});
    byId("panel-compare").append(el("div", {class: "sides"}, ...this.sides.map((side) => side.element)), this.hint);
  }

  place() {
    return this.at || [this.app.current.width / 2, this.app.current.height / 2];
  }

  async open() {
    const {models, model} = this.app;
    this.at = null;
    this.sides[0].model = model;
    this.sides[1].model = models.find((each) => each !== model) || model;
    if (models.length > 1) this.sides[1].kind = this.sides[0].kind;
    this.hint.textContent = models.length > 1 ? "Let both sides show the attention of the patch, and point at one: they follow each other." :
      "One model is served. Start with two to compare them: patchlight serve --model default --model dino-vits16";
    for (const side of this.sides) side.fill();
    await Promise.all(this.sides.map((side) => side.load()));
  }

  pointed(side, row, column) {
    const [left, top, right, bottom] = side.stage.region, [rows, columns] = side.grid;
    this.at = [left + (column + 0.5) * (right - left) / columns, top + (row + 0.5) * (bottom - top) / rows];
    for (const each of this.sides) each.draw();
  }

  close() {}
}
