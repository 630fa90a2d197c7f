// Patches: what their size costs, what their order means, and what the model knows of where they lie.

import * as api from "./api.js";
import {byId, css, el, number, percent, short, slider} from "./dom.js";
import {largest, paint, smallest} from "./heat.js";
import * as seen from "./seen.js";
import {squeezed} from "./stage.js";

const narrow = matchMedia("(max-width: 960px)");

export const SIZES = [8, 14, 16, 32];
const nearest = (list, wanted) => list.reduce((best, value, i) => Math.abs(value - wanted) < Math.abs(list[best] - wanted) ? i : best, 0);
const IMAGES = [64, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512];

export class PatchesTab {
  constructor(app) {
    this.app = app;
    this.patch = slider("Patch size", {min: 0, max: SIZES.length - 1, value: 2, step: 1, id: "patch-size"}, () => this.unshuffle());
    this.image = slider("Image size", {min: 0, max: IMAGES.length - 1, value: 6, step: 1, id: "image-size"}, () => this.unshuffle());
    for (const each of [this.patch, this.image]) each.querySelector("label").htmlFor = each.input.id;
    this.tiles = el("div", {class: "tiles", id: "costs"});
    this.own = el("button", {type: "button", class: "plain", text: "As the model has it", onclick: () => this.restore()});
    this.shuffleButton = el("button", {type: "button", class: "strong", id: "shuffle", text: "Shuffle", onclick: () => this.shuffle()});
    this.order = el("button", {type: "button", class: "plain", text: "Put them back", hidden: true, onclick: () => this.unshuffle()});
    this.said = el("div", {class: "said", id: "shuffled"});
    this.mosaic = el("canvas", {class: "mosaic", id: "positions", tabIndex: 0, role: "application", "aria-label": "Similarity of positions; arrow keys choose a patch"});
    this.single = el("canvas", {class: "single"});
    this.words = el("p", {class: "soft"});
    this.places = el("div", {}, el("h3", {text: "What it knows of places"}), el("p", {class: "soft", text: "For each patch, how alike its position is to every other one. Point at one to enlarge it."}),
      el("div", {class: "places"}, this.mosaic, this.single), this.words);
    this.mosaic.addEventListener("pointermove", (event) => this.point(event));
    this.mosaic.addEventListener("pointerdown", (event) => this.point(event));
    this.mosaic.addEventListener("keydown", (event) => {
      const step = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
      if (!step || !this.similarity) return;
      event.preventDefault();
      const [rows, columns] = this.similarity.shape;
      this.enlarge(Math.min(Math.max(this.at[0] + step[0], 0), rows - 1), Math.min(Math.max(this.at[1] + step[1], 0), columns - 1));
    });
    const cost = el("div", {}, el("h3", {text: "What patches cost"}), this.patch, this.image, this.tiles, this.own);
    const order = el("div", {}, el("h3", {text: "What their order means"}), el("p", {class: "soft", text: "The same patches in another order, told to the model with their new places, and with none."}),
      el("div", {class: "row"}, this.shuffleButton, this.order), this.said);
    // What changes the picture lies beside it; on a phone, where the picture is above, that comes first.
    const arrange = () => byId("panel-patches").replaceChildren(...(narrow.matches ? [order, cost] : [cost, order]), this.places);
    narrow.addEventListener("change", arrange);
    arrange();
    this.seed = 0;
  }

  async open() {
    const {model, stage, current: photo} = this.app;
    stage.point_at_patches(false);
    stage.over.replaceChildren();
    stage.heat.hidden = true;
    if (this.of !== model.number) {
      this.of = model.number;
      this.restore(false);
      this.showPositions(model);
    }
    if (this.photo !== photo.id + model.number) {
      this.photo = photo.id + model.number;
      this.unshuffle();
      this.said.replaceChildren();
    }
    this.region = (await seen.found(photo, model)).heat.region;
    if (this.app.current !== photo || this.app.tab !== this) return;
    stage.setGrid(this.region, model.grid);
    stage.grid.hidden = false;
    stage.pieces.hidden = !this.shuffled;
    if (this.wanted) {
      const {size, image} = this.wanted;
      this.wanted = null;
      if (size) this.patch.input.value = nearest(SIZES, size);
      if (image) this.image.input.value = nearest(IMAGES, image);
      this.unshuffle();
    } else this.resize();
  }

  close() {
    this.app.stage.grid.hidden = this.app.stage.pieces.hidden = true;
  }

  restore(draw = true) {
    const {model} = this.app;
    this.patch.input.value = nearest(SIZES, model.patch_size[0]);
    this.image.input.value = nearest(IMAGES, model.image_size[0]);
    if (draw) this.unshuffle();
  }

  resize() {
    const patch = SIZES[this.patch.input.value], wanted = IMAGES[this.image.input.value], side = patch * Math.max(1, Math.round(wanted / patch));
    const count = side / patch, {model} = this.app;
    this.patch.say(`${patch} × ${patch} pixels`);
    this.image.say(`${side} × ${side} pixels`);
    this.cells = [count, count];
    this.own.hidden = patch === model.patch_size[0] && side === model.image_size[0];
    if (!this.shuffled) this.app.stage.setGrid(this.region, this.cells);
    this.drawGrid();
    this.asked = {model: model.number, patch_size: patch, image_size: side};
    const prefix = model.tokens - model.grid[0] * model.grid[1];
    this.fill({tokens: prefix + count * count});
    this.app.say(`${count} × ${count} patches of ${patch} pixels in an image of ${side} × ${side}: half the patch size, four times the patches, up to sixteen times the attention.${squeezed({patch_size: [patch, patch], image_size: [side, side]}, this.region, this.cells)}`);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.count(), 120);
  }

  drawGrid() {
    this.app.stage.drawGrid(this.shuffled ? this.shuffled.grid : this.cells);
  }

  async count() {
    const asked = this.asked;
    const own = this.ownCosts || (this.ownCosts = {});
    try {
      const costs = await api.get("/costs", asked);
      if (asked === this.asked) this.fill(costs);
      const {model} = this.app;
      own[model.number] = own[model.number] || await api.get("/costs", {model: model.number, patch_size: model.patch_size[0], image_size: model.image_size[0]});
      if (asked === this.asked) this.fill(costs);
      await new Promise((resolve) => setTimeout(resolve, 400));
      if (asked !== this.asked) return;
      const timed = await api.get("/costs", {...asked, timed: true});
      if (asked === this.asked) this.fill({...timed, asked: true});
    } catch (error) {
      this.app.fail(error);
    }
  }

  fill(costs) {
    const own = (this.ownCosts || {})[this.app.model.number];
    const times = (name) => {
      const ratio = own && costs[name] ? costs[name] / own[name] : 1;
      return Math.abs(ratio - 1) < 0.005 ? "" : `${ratio < 10 ? ratio.toPrecision(2) : number(Math.round(ratio))} × the model's own`;
    };
    const latency = costs.latency_ms === undefined ? "…" : costs.latency_ms === null ? (costs.asked ? "too long" : "…") : Math.round(costs.latency_ms) + " ms";
    const tiles = [
      ["Tokens", number(costs.tokens), times("tokens")],
      ["Attention matrix", `${number(costs.tokens)} × ${number(costs.tokens)}`, costs.attention_entries ? short(costs.attention_entries) + " numbers in all" : "…"],
      ["Multiply-adds", costs.macs ? short(costs.macs) : "…", costs.macs ? times("macs") : ""],
      ["One photo takes", latency, "measured on this machine"],
    ];
    this.tiles.replaceChildren(...tiles.map(([name, value, more]) => el("div", {}, el("span", {text: name}), el("strong", {text: value}), el("small", {text: more}))));
  }

  async shuffle() {
    const {current: photo, model, stage} = this.app, {asked} = this;
    this.shuffleButton.disabled = true;
    try {
      const found = await api.get(`/photos/${photo.id}/shuffle`, {seed: ++this.seed, ...(this.own.hidden ? {model: model.number} : this.asked)});
      if (this.app.current !== photo || this.app.tab !== this || asked !== this.asked) return;
      this.shuffled = found;
      stage.setGrid(found.region, found.grid);
      stage.drawPieces(found.order, found.grid);
      stage.pieces.hidden = false;
      this.drawGrid();
      this.order.hidden = false;
      const same = (name, shares, like) => el("div", {}, el("h4", {text: name}), ...(shares.length ? shares.map(bar) : []),
        ...(like === undefined ? [] : [el("p", {class: "soft", text: `likeness to the answer in order: ${like.toFixed(3)}`})]));
      this.said.replaceChildren(
        el("div", {class: "pair"}, same("In order, with places", found.with_positions), same("Shuffled, with places", found.shuffled_with_positions, found.likeness_with_positions)),
        el("div", {class: "pair"}, same("In order, without", found.without_positions), same("Shuffled, without", found.shuffled_without_positions, found.likeness_without_positions)),
        el("p", {class: "soft", text: found.likeness_without_positions > 0.9999 ? "Without positions the patches are a heap: their order changes nothing." :
          "Without positions the order still counts: this model's patches see their neighbours before they become tokens."}),
        ...(this.own.hidden ? [] : [el("p", {class: "soft", text: "The model was taught with other sizes: its patch matrix and positions are resized, and its answers may suffer."})]));
    } catch (error) {
      this.app.fail(error);
    } finally {
      this.shuffleButton.disabled = false;
    }
  }

  unshuffle() {
    this.shuffled = null;
    this.order.hidden = true;
    this.app.stage.pieces.hidden = true;
    if (this.region && this.app.tab === this) this.resize();
  }

  async showPositions(model) {
    this.places.hidden = model.positions === "none";
    if (this.places.hidden) return;
    this.similarity = (await seen.positions(model)).similarity;
    const [rows, columns] = this.similarity.shape, size = rows * columns, gap = 1, values = this.similarity.values;
    this.least = smallest(values);
    this.most = largest(values);
    const tile = document.createElement("canvas");
    Object.assign(this.mosaic, {width: columns * (columns + gap) - gap, height: rows * (rows + gap) - gap});
    const whole = this.mosaic.getContext("2d");
    for (let row = 0; row < rows; row++) {
      for (let column = 0; column < columns; column++) {
        const from = (row * columns + column) * size;
        paint(tile, values.subarray(from, from + size), [rows, columns], {least: this.least, most: this.most, cold: 1, hot: 1});
        whole.drawImage(tile, column * (columns + gap), row * (rows + gap));
      }
    }
    this.enlarge(Math.floor(rows / 2), Math.floor(columns / 2));
  }

  point(event) {
    if (!this.similarity) return;
    const box = this.mosaic.getBoundingClientRect(), [rows, columns] = this.similarity.shape;
    const at = (share, count) => Math.min(Math.max(Math.floor(share * count), 0), count - 1);
    this.enlarge(at((event.clientY - box.top) / box.height, rows), at((event.clientX - box.left) / box.width, columns));
  }

  enlarge(row, column) {
    const [rows, columns] = this.similarity.shape, size = rows * columns, from = (row * columns + column) * size;
    this.at = [row, column];
    paint(this.single, this.similarity.values.subarray(from, from + size), [rows, columns], {least: this.least, most: this.most, cold: 1, hot: 1});
    this.words.textContent = `Row ${row}, column ${column}: bright where a position is like its own.`;
  }
}

export function bar({label, name, probability}) {
  const row = el("div", {class: "share"}, el("span", {text: name, title: label}), el("b", {text: percent(probability, 1)}), el("i"));
  row.lastChild.style.width = css(probability);
  return row;
}
