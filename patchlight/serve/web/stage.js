// A photo with whatever lies over it: heat, mask, grid, and the patch that is pointed at.

import {clamp, el} from "./dom.js";

// Why square patches lie on the photo as rectangles, where they do.
export function squeezed({patch_size: [down, across], image_size: size}, [left, top, right, bottom], [rows, columns]) {
  const shape = (bottom - top) / rows / ((right - left) / columns) / (down / across);
  return Math.abs(shape - 1) < 0.02 ? "" : ` The model takes the photo squeezed to ${size[0]} × ${size[1]} pixels; on the photo its ${down === across ? "square " : ""}patches are rectangles of another shape.`;
}

export class Stage {
  // `move(row, column, fixed)` hears of the patch under the pointer, of clicks, and of the arrow keys.
  constructor(label, move) {
    this.move = move;
    this.image = el("img", {alt: "", draggable: false});
    this.heat = el("canvas", {class: "heat"});
    this.mask = el("canvas", {class: "mask", hidden: true});
    this.grid = el("canvas", {class: "grid", hidden: true});
    this.mark = el("div", {class: "mark", hidden: true});
    this.pieces = el("canvas", {class: "pieces", hidden: true});
    this.over = el("div", {class: "over"});
    this.element = el("div", {class: "photo", tabIndex: -1, role: "img", "aria-label": label},
      this.image, this.pieces, this.heat, this.mask, this.grid, this.mark, this.over);
    this.region = null;
    this.cells = null;
    this.pointing = false;
    this.element.addEventListener("pointermove", (event) => this.point(event, false));
    this.element.addEventListener("pointerdown", (event) => this.point(event, true));
    this.element.addEventListener("keydown", (event) => this.key(event));
  }

  show(photo, url) {
    this.photo = photo;
    this.element.style.setProperty("--ratio", String(photo.width / photo.height));
    if (url && this.image.src !== url) this.image.src = url;
  }

  // Whether patches can be pointed at; then the photo takes the keyboard's focus, too.
  point_at_patches(on) {
    this.pointing = on;
    this.element.tabIndex = on ? 0 : -1;
    this.element.classList.toggle("pointing", on);
    this.element.setAttribute("role", on ? "application" : "img");
    if (!on) this.mark.hidden = true;
  }

  // Lays a canvas where the model's patches lie: [left, top, right, bottom] of the photo.
  lay(element, [left, top, right, bottom]) {
    const {width, height} = this.photo;
    Object.assign(element.style, {left: 100 * left / width + "%", top: 100 * top / height + "%",
      width: 100 * (right - left) / width + "%", height: 100 * (bottom - top) / height + "%"});
  }

  setGrid(region, cells) {
    this.region = region;
    this.cells = cells;
    for (const part of [this.heat, this.mask, this.grid, this.pieces]) this.lay(part, region);
  }

  markPatch(row, column) {
    const [left, top, right, bottom] = this.region, [rows, columns] = this.cells;
    const down = (bottom - top) / rows, across = (right - left) / columns;
    this.lay(this.mark, [left + column * across, top + row * down, left + (column + 1) * across, top + (row + 1) * down]);
    this.mark.hidden = false;
    this.at = [row, column];
  }

  patchAt(x, y) {
    const [left, top, right, bottom] = this.region, [rows, columns] = this.cells;
    return [clamp(Math.floor((y - top) / (bottom - top) * rows), 0, rows - 1),
      clamp(Math.floor((x - left) / (right - left) * columns), 0, columns - 1)];
  }

  point(event, fixed) {
    if (!this.pointing || !this.cells) return;
    const box = this.element.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * this.photo.width;
    const y = (event.clientY - box.top) / box.height * this.photo.height;
    this.move(...this.patchAt(x, y), fixed);
  }

  key(event) {
    const step = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
    if (!this.pointing || !this.cells || !step || event.target !== this.element) return;
    event.preventDefault();
    const [row, column] = this.at || this.cells.map((count) => Math.floor(count / 2));
    this.move(clamp(row + step[0], 0, this.cells[0] - 1), clamp(column + step[1], 0, this.cells[1] - 1), true);
  }

  // The lines between patches; a point of the canvas is a point of the screen.
  drawGrid([rows, columns]) {
    const box = this.grid.getBoundingClientRect(), dense = devicePixelRatio || 1;
    const width = Math.max(1, Math.round(box.width * dense)), height = Math.max(1, Math.round(box.height * dense));
    Object.assign(this.grid, {width, height});
    const context = this.grid.getContext("2d");
    for (const [colour, thick] of [["rgb(0 0 0 / .35)", 3 * dense], ["rgb(255 255 255 / .9)", dense]]) {
      context.strokeStyle = colour;
      context.lineWidth = Math.min(thick, Math.max(0.6, width / columns / 4));
      context.beginPath();
      for (let column = 1; column < columns; column++) {
        const x = Math.round(column * width / columns);
        context.moveTo(x, 0);
        context.lineTo(x, height);
      }
      for (let row = 1; row < rows; row++) {
        const y = Math.round(row * height / rows);
        context.moveTo(0, y);
        context.lineTo(width, y);
      }
      context.stroke();
    }
  }

  // The photo's patches in another order.
  drawPieces(order, [rows, columns]) {
    const [left, top, right, bottom] = this.region, share = this.image.naturalWidth / this.photo.width;
    const down = (bottom - top) / rows * share, across = (right - left) / columns * share;
    Object.assign(this.pieces, {width: Math.round(across * columns), height: Math.round(down * rows)});
    const context = this.pieces.getContext("2d");
    order.forEach((from, place) => {
      const source = [Math.floor(from / columns), from % columns], target = [Math.floor(place / columns), place % columns];
      context.drawImage(this.image, left * share + source[1] * across, top * share + source[0] * down, across, down,
        target[1] * across, target[0] * down, across, down);
    });
  }
}
