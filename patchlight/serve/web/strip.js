// The strip: a photo becomes a line of tokens, and the tokens an answer. All that is drawn are numbers of the served
// model, of one pass over this photo for each way in which its patches may lie.

import * as api from "./api.js";
import {byId, choice, clamp, el, number, percent, slider} from "./dom.js";
import {attentionRows, largest, meanOf, paint} from "./heat.js";
import {bar, SIZES} from "./patches.js";
import {prefixTokens} from "./seen.js";
import {squeezed} from "./stage.js";

const SHOWN = 24; // numbers of a vector, spread evenly over it

// When each step begins and ends, in milliseconds.
const STEPS = [["Photo", 700], ["Patches", 2900], ["Vectors", 4300], ["Class token", 5100], ["Positions", 6200], ["Attention", 7100], ["Class", 7800]];
const START = {fly: 1000, vectors: 3000, prefix: 4400, positions: 5200, arcs: 6300, answer: 7200};
const END = STEPS[STEPS.length - 1][1];
const MOVE = 900; // to another order

const still = matchMedia("(prefers-reduced-motion: reduce)");
const dark = matchMedia("(prefers-color-scheme: dark)");
const ease = (share) => share < 0.5 ? 4 * share ** 3 : 1 - (2 - 2 * share) ** 3 / 2;
const between = (from, to, share) => from + (to - from) * share;
const past = (time, start, long) => clamp((time - start) / long, 0, 1);
const many = (count, name) => `${number(count)} ${name}${count === 1 ? "" : name.endsWith("ch") ? "es" : "s"}`;
const made = (width, height) => Object.assign(document.createElement("canvas"), {width: Math.max(1, Math.round(width)), height: Math.max(1, Math.round(height))});

export class Strip {
  constructor(app) {
    this.app = app;
    this.time = 0;
    this.mix = 1;
    this.told = {};
    this.chosen = this.pointed = null;
    this.canvas = el("canvas", {class: "flight", "aria-hidden": "true"});
    this.photoSlot = el("div", {class: "slot photo-slot"});
    this.line = el("div", {class: "slot line-slot", tabIndex: 0, role: "application", "aria-label": "The tokens in a line. Arrow keys choose one and show what it attends to; Home chooses the first."});
    this.title = el("h2", {id: "strip-title"});
    this.words = el("p", {class: "words", id: "strip-words"});
    this.count = el("p", {class: "count", id: "strip-count"});
    this.note = el("p", {class: "soft", id: "strip-note"});
    this.size = slider("Patch size", {min: 0, max: 1, value: 0, step: 1}, () => this.dice());
    this.size.input.id = "strip-size";
    this.size.querySelector("label").htmlFor = "strip-size";
    this.images = el("div");
    this.playButton = el("button", {type: "button", class: "plain", id: "strip-play", onclick: () => this.toggle()});
    this.away = el("button", {type: "button", class: "plain", id: "strip-positions", onclick: () => this.change({positions: !this.state.positions})});
    this.shuffler = el("button", {type: "button", class: "strong", id: "strip-shuffle", onclick: () => this.change({seed: this.state.seed === null ? ++this.seed : null})});
    this.said = el("div", {class: "said", id: "strip-said"});
    this.verdict = el("p", {class: "verdict-words", id: "strip-verdict", "aria-live": "polite"});
    this.steps = el("div", {class: "steps", role: "group", "aria-label": "Steps"}, ...STEPS.map(([name, end]) =>
      el("button", {type: "button", text: name, onclick: () => this.jump(end)})));
    this.legend = el("p", {class: "soft legend"}, el("i", {class: "below"}), "below 0 ", el("i", {class: "above"}), "above 0, ", el("span"));
    this.element = el("section", {class: "teach", id: "strip", "aria-labelledby": "strip-title"}, this.canvas, this.photoSlot,
      el("div", {class: "say"}, this.title, this.words, this.count),
      el("div", {class: "answer"}, el("h3", {text: "The class at the end"}), this.said, this.verdict),
      el("div", {class: "controls"}, this.size, this.images, this.note), el("div", {class: "row buttons"}, this.away, this.shuffler), this.line, el("div", {class: "foot"}, this.playButton, this.steps, this.legend));
    this.seed = 0;
    this.state = {positions: true, seed: null};
    for (const slot of [this.line, this.photoSlot]) {
      slot.addEventListener("pointermove", (event) => this.point(event, slot, false));
      slot.addEventListener("pointerdown", (event) => this.point(event, slot, true));
      slot.addEventListener("pointerleave", () => this.choose(null, false));
    }
    this.line.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.arrange()).observe(this.element);
    dark.addEventListener("change", () => this.recolour());
    still.addEventListener("change", () => still.matches && this.jump(END));
    this.tell();
  }

  // What is looked at

  // A picture to begin with, while the model is being loaded.
  begin(image) {
    this.image = image;
    this.grid = [16, 16]; // a guess, of which nothing is seen until the model is known
    this.cutView([0, 0, image.naturalWidth, image.naturalHeight], image.naturalWidth, image.naturalHeight);
    this.arrange();
    this.play(0);
  }

  // A photo that the server has; `image` shows it. Where that picture was begun with, it goes on.
  async show(photo, model, image, wanted = {}) {
    this.goesOn = image === this.image && !this.photo;
    this.photo = photo;
    this.model = model;
    this.image = image;
    this.told = {};
    this.seed = wanted.seed ? wanted.seed - 1 : 0;
    this.state = {positions: wanted.positions !== false, seed: wanted.seed ?? null};
    const own = model.patch_size[0], side = model.image_size[0];
    this.layer = wanted.layer < model.depth ? wanted.layer : model.depth - 1;
    this.sizes = [...new Set([...SIZES, own])].sort((a, b) => a - b);
    const nearest = (size) => this.sizes.reduce((best, each, i) => Math.abs(each - size) < Math.abs(this.sizes[best] - size) ? i : best, 0);
    this.size.input.max = this.sizes.length - 1;
    this.size.input.value = nearest(wanted.size || own);
    this.side = clamp(wanted.image || side, 32, 512);
    const sides = [...new Set([side, 224, this.side])].sort((a, b) => a - b);
    this.images.replaceChildren(...(sides.length > 1 ? [choice("Image size", sides.map((each) => [each, `Image of ${each} × ${each}`]), this.side, (each) => {
      this.side = Number(each);
      this.dice();
    })] : []));
    await this.dice(true);
  }

  get patch() {
    return this.sizes[this.size.input.value];
  }

  // Cut anew: at once what can be counted here, then what the model makes of it.
  async dice(first = false) {
    const {patch, model} = this, own = patch === model.patch_size[0] && this.side === model.image_size[0];
    const side = own ? null : patch * Math.max(1, Math.round(this.side / patch));
    const grid = own ? model.grid : [side / patch, side / patch];
    const prefix = prefixTokens(model), tokens = prefix.length + grid[0] * grid[1];
    this.size.say(`${patch} × ${patch} pixels`);
    const names = [many(grid[0] * grid[1], "patch")];
    if (model.class_token) names.push("1 class token");
    if (model.distill_token) names.push("1 distillation token");
    if (model.registers) names.push(many(model.registers, "register"));
    this.count.replaceChildren(el("strong", {text: names.join(", ")}), names.length > 1 ? ` = ${number(tokens)} tokens` : "");
    this.note.textContent = own ? "" : `The model was taught with ${model.patch_size.join(" × ")} in ${model.image_size.join(" × ")} pixels. For others its patch matrix and positions are resized, and its answers may suffer.`;
    const asked = this.asked = own ? {} : {patch_size: patch, image_size: side};
    this.askedFor = JSON.stringify(asked);
    this.grid = grid;
    this.now = this.before = null;
    if (!first) {
      this.state = {positions: true, seed: null};
      this.chosen = this.pointed = null;
      this.tell();
      this.arrange();
      this.draw();
    }
    clearTimeout(this.timer);
    await new Promise((resolve) => this.timer = setTimeout(resolve, first ? 0 : 150));
    if (asked !== this.asked) return;
    try {
      const found = await this.fetch(this.state);
      if (asked !== this.asked || !found) return;
      this.accept(found);
      this.mix = 1;
      if (first && this.goesOn && this.running) this.run();
      else this.play(first ? 0 : STEPS[0][1]);
      const {positions, seed} = this.state;
      if (positions && seed === null) return;
      const others = await Promise.all([this.fetch({positions, seed: null}), this.fetch({positions: true, seed: null})]);
      if (asked === this.asked && found === this.now) this.judge(found, ...others);
    } catch (error) {
      if (asked !== this.asked) return;
      this.app.fail(error);
      if (own) return;
      this.size.input.value = this.sizes.indexOf(model.patch_size[0]);
      this.side = model.image_size[0];
      this.images.firstChild?.choose(this.side);
      await this.dice();
    }
  }

  // One pass for each way in which the patches may lie, asked for once.
  fetch({positions, seed}) {
    const {photo, model} = this, key = [photo.id, model.number, this.askedFor, positions, seed].join(" ");
    const values = {model: model.number, layer: this.layer, ...this.asked, ...(positions ? {} : {positions: false}), ...(seed === null ? {} : {shuffle: seed})};
    const ask = () => api.tensors(`/photos/${photo.id}/tokens`, values);
    this.told[key] = this.told[key] || ask().catch(async (error) => {
      delete this.told[key];
      if (error.reason !== "unknown-photo") throw error;
      photo.id = (await api.send(photo.file)).id; // the server let go of it
      return ask();
    });
    return this.told[key];
  }

  accept(found) {
    this.before = this.now;
    this.now = found;
    found.columns = found.rest = null;
    this.grid = found.about.grid;
    const {photo} = this;
    this.cutView(found.about.region, photo.width, photo.height, found.about.image_size);
    this.rows = {};
    this.arrange();
    this.tell();
  }

  // The photo as the model takes it, squeezed where it is squeezed.
  cutView([left, top, right, bottom], width, height, [down, across] = [1, 1]) {
    const {image} = this, share = image.naturalWidth / width;
    const high = Math.min(512, Math.max(256, down)), view = made(high * across / down, high), context = view.getContext("2d");
    const shareDown = image.naturalHeight / height;
    context.imageSmoothingQuality = "high";
    context.drawImage(image, left * share, top * shareDown, (right - left) * share, (bottom - top) * shareDown, 0, 0, view.width, view.height);
    this.view = view;
    this.ratio = across / down;
  }

  // Whether positions are there, and in which order the patches lie.
  async change(wanted) {
    if (!this.now || this.changing) return;
    const state = {...this.state, ...wanted}, key = this.askedFor, {photo} = this;
    this.changing = true;
    try {
      const [found, ordered, own] = await Promise.all([this.fetch(state), this.fetch({...state, seed: null}), this.fetch({positions: true, seed: null})]);
      if (key !== this.askedFor || photo !== this.photo) return;
      this.state = state;
      this.accept(found);
      this.time = END;
      this.mix = still.matches ? 1 : 0;
      this.judge(found, ordered, own);
      this.run();
    } catch (error) {
      this.app.fail(error);
    } finally {
      this.changing = false;
    }
  }

  // What the change did to the answer, measured.
  judge(found, ordered, own) {
    const {positions, seed} = this.state, apart = farthest(found, ordered), first = (each) => each.about.classes[0];
    const same = apart < 0.001, small = apart === 0 ? "0" : apart < 1e-7 ? "less than 0.0000001" : apart.toFixed(7).replace(/0+$/, "");
    const share = (each) => `${first(each).name}, ${percent(first(each).probability, 1)}`;
    const named = found.about.classes.length > 0, measured = named ? `no probability moved by more than ${small}` : `its features moved by ${small} of their length at most`;
    let text;
    if (this.model.positions === "none") text = same ? `It never had positions: ${measured}.` : "";
    else if (positions && seed === null) text = "Its own answer again. Now take the positions away and shuffle.";
    else if (!positions && seed === null) text = `Without positions no patch knows where it lies${named ? `: ${share(found)}; with them it was ${share(own)}` : ""}. Now shuffle.`;
    else if (!positions) text = same ? `Shuffled, and nothing changes: ${measured}. Without positions the patches are a heap. Now put the positions back.` :
      `Shuffled without positions, it changes by ${small}: this model's patches see their neighbours before they become tokens.`;
    else text = named ? `With positions the order counts: ${share(found)}. In order it is ${share(own)}.` : `With positions the order counts: its features moved by ${apart.toFixed(2)} of their length.`;
    this.verdict.textContent = text;
    this.element.dataset.apart = String(apart);
  }

  // Words

  tell() {
    const {now, model, time} = this, at = Math.max(0, STEPS.findIndex(([, end]) => time < end)), step = time >= END ? STEPS.length - 1 : at;
    if (this.step !== step || this.toldOf !== now) {
      this.step = step;
      this.toldOf = now;
      [...this.steps.children].forEach((each, i) => i === step ? each.setAttribute("aria-current", "step") : each.removeAttribute("aria-current"));
      this.title.textContent = ["A photo", "is cut into patches,", "each becomes a vector,", "a class token joins in front,", "each is told where it lies,", "they look at each other,", "and the answer is read."][step];
      this.element.dataset.step = STEPS[step][0];
      this.element.classList.toggle("answered", step === STEPS.length - 1 && Boolean(now));
      if (now) this.fill();
    }
    const texts = now ? this.texts() : [model ? "Looking at it…" : "The model is being loaded…"];
    const text = texts[Math.min(step, texts.length - 1)];
    if (this.words.textContent !== text) this.words.textContent = text;
    this.away.textContent = this.state.positions ? "Take positions away" : "Put positions back";
    this.shuffler.textContent = this.state.seed === null ? "Shuffle" : "Back in order";
    this.away.hidden = Boolean(model) && model.positions === "none";
    this.away.disabled = this.shuffler.disabled = !now;
    const play = this.running && this.time < END ? "Pause" : this.time >= END ? "Play again" : "Go on";
    if (this.playButton.textContent !== play) this.playButton.textContent = play;
  }

  texts() {
    const {now, model} = this, {grid, image_size: image, patch_size: patch, layer} = now.about, width = now.patches.shape[1];
    const [down, across] = image, prefix = prefixTokens(model), reads = model.class_token ? "the class token" : "the mean of the patches";
    const told = {rope2d: "Its queries and keys are turned by row and column (rotary positions); nothing is added to the vectors.", none: "This model has no positions."}[model.positions] ||
      "It adds a number for each distance to the attention; nothing is added to the vectors.";
    return [
      `${squeezed(model, now.about.region, grid) ? "Squeezed to" : "As"} ${down} × ${across} pixels, which is how the model takes it.`,
      `${grid[0]} × ${grid[1]} of ${patch[0]} × ${patch[1]} pixels, laid in a line, row by row, like the words of a sentence.`,
      `One matrix makes ${number(width)} numbers of the ${number(3 * patch[0] * patch[1])} of each patch. ${Math.min(SHOWN, width)} of them are shown as colours.`,
      prefix.length ? `${model.class_token ? "It is the same for every photo, and will read them all." : "They are the same for every photo."}${model.registers ? ` ${many(model.registers, "register")} behind it ${model.registers === 1 ? "is" : "are"} room for notes.` : ""}` : "This model has none: it reads the mean of the patches.",
      !this.state.positions ? "The positions were taken away." : now.positions ? "A position is added to each vector. Its tint, in the band below: like tints, like positions." : told,
      this.attentionText(layer),
      `It is read from ${reads}, after the last block. ${this.attentionText(layer)}`,
    ];
  }

  attentionText(layer) {
    const {model} = this, token = this.token();
    const block = layer === model.depth - 1 ? `the last of ${model.depth} blocks` : `block ${layer} of 0 to ${model.depth - 1}`;
    return `${this.name(token)}: the arcs show where it attends in ${block}, mean of ${many(model.heads, "head")}. Point at another.`;
  }

  name(token) {
    const prefix = prefixTokens(this.model);
    if (token < prefix.length) return prefix[token][0];
    const place = token - prefix.length, columns = this.grid[1];
    return `Row ${Math.floor(place / columns)}, column ${place % columns}`;
  }

  fill() {
    const {now} = this, {classes} = now.about;
    this.said.replaceChildren(...(classes.length ? classes.map(bar) : [el("p", {class: "soft", text: "This model names no classes; it gives features."})]));
    this.legend.lastChild.textContent = `${Math.min(SHOWN, now.patches.shape[1])} of ${number(now.patches.shape[1])} numbers of each vector`;
  }

  // Time

  play(from = 0) {
    this.time = still.matches && this.now ? END : from;
    this.verdict.textContent = from === 0 && this.state.positions && this.state.seed === null ? "Take the positions away and shuffle. Then put them back." : "";
    this.run();
  }

  run() {
    this.running = true;
    this.last = null;
    if (!this.frame) this.frame = requestAnimationFrame((now) => this.tick(now));
  }

  toggle() {
    if (this.running && this.time < END) {
      this.running = false;
      this.tell();
    } else if (this.time >= END) this.play(0);
    else this.run();
  }

  jump(time) {
    this.time = time;
    this.mix = 1;
    this.running = false;
    this.tell();
    this.draw();
  }

  tick(now) {
    this.frame = 0;
    if (!this.running || this.element.offsetParent === null) return; // what nobody sees costs nothing
    const passed = this.last === null ? 0 : Math.min(now - this.last, 50);
    this.last = now;
    const limit = this.now ? END : this.model ? START.vectors : 450; // what is the model's waits for it
    if (this.time < limit) this.time = Math.min(limit, still.matches ? limit : this.time + passed);
    if (this.mix < 1) this.mix = Math.min(1, this.mix + passed / MOVE);
    this.tell();
    this.draw();
    if (this.time < limit || this.mix < 1) this.frame = requestAnimationFrame((next) => this.tick(next));
    else {
      this.running = this.time < END; // and goes on when the vectors come
      this.tell();
      if (this.now && this.time >= END) this.element.dataset.ended = this.state.positions + " " + this.state.seed;
    }
  }

  // Where everything lies

  arrange() {
    if (!this.grid || !this.element.isConnected) return;
    const wide = this.line.clientWidth;
    if (!wide) return;
    const prefix = this.model ? prefixTokens(this.model).length : 0, patches = this.grid[0] * this.grid[1], gap = prefix ? 8 : 0;
    const head = prefix * 13 + gap, room = wide - head, lines = Math.max(1, Math.ceil(patches * 4.5 / room)), perLine = Math.ceil(patches / lines);
    const pitch = Math.min(room / perLine, 30);
    const size = Math.max(1.5, pitch * 0.86), tall = lines === 1 ? 72 : lines < 4 ? 40 : 24, lift = lines === 1 ? 92 : 64, step = size + tall + 16;
    const places = [];
    const start = Math.max(0, (room - perLine * pitch) / 2);
    for (let token = 0; token < prefix; token++) places.push([start + token * 13, lift, 11]);
    for (let place = 0; place < patches; place++) {
      places.push([start + head + place % perLine * pitch, lift + Math.floor(place / perLine) * step, size]);
    }
    const dense = Math.min(devicePixelRatio || 1, 2), key = [wide, prefix, patches, dense].join(" ");
    if (!this.layout || this.layout.key !== key) this.layout = {key, places, prefix, patches, perLine, pitch, size, tall, lift, step};
    const high = Math.ceil(lift + lines * step) + "px";
    if (this.line.style.height !== high) this.line.style.height = high;
    this.photoSlot.style.aspectRatio = String(this.ratio || 1);
    const box = this.element.getBoundingClientRect();
    const offset = (slot) => {
      const {left, top, width, height} = slot.getBoundingClientRect();
      return {x: left - box.left - this.element.clientLeft, y: top - box.top - this.element.clientTop, width, height};
    };
    this.at = {photo: offset(this.photoSlot), line: offset(this.line)};
    const width = Math.round(this.element.clientWidth * dense), height = Math.round(this.element.clientHeight * dense);
    if (this.canvas.width !== width || this.canvas.height !== height) Object.assign(this.canvas, {width, height});
    this.dense = dense;
    if (!this.running) this.draw();
  }

  recolour() {
    for (const each of [this.now, this.before]) if (each) each.columns = each.rest = null;
    this.colours = null;
    this.draw();
  }

  theme() {
    if (!this.colours) {
      const style = getComputedStyle(document.documentElement), named = (name) => style.getPropertyValue(name).trim();
      this.colours = {accent: named("--accent"), ink: named("--ink"), soft: named("--soft"), line: named("--line"),
        ...Object.fromEntries(["zero", "below", "above"].map((name) => [name, [1, 3, 5].map((at) => parseInt(named("--" + name).slice(at, at + 2), 16))]))};
    }
    return this.colours;
  }

  // Pictures of the vectors, one pixel a number: bare, and with their positions; the prefix tokens first.
  columns(found) {
    if (found.columns) return found.columns;
    const {patches, positions, prefix} = found, [count, width] = patches.shape, rows = Math.min(SHOWN, width), first = prefix.shape[0];
    const picked = Array.from({length: rows}, (_, i) => Math.floor((i + 0.5) * width / rows)), theme = this.theme();
    const bare = new Float32Array((first + count) * rows), placed = new Float32Array(bare.length);
    for (let token = 0; token < first + count; token++) {
      picked.forEach((d, i) => {
        const own = token < first ? prefix.values[token * width + d] : patches.values[(token - first) * width + d];
        bare[i * (first + count) + token] = own;
        placed[i * (first + count) + token] = token < first || !positions ? own : own + positions.values[(token - first) * width + d];
      });
    }
    const sizes = [...placed].map(Math.abs).sort((a, b) => a - b), most = sizes[Math.floor(0.97 * (sizes.length - 1))] || 1;
    const picture = (values) => {
      const canvas = made(first + count, rows), image = new ImageData(first + count, rows);
      values.forEach((value, i) => {
        const share = Math.min(Math.abs(value) / most, 1), end = value < 0 ? theme.below : theme.above;
        for (let c = 0; c < 3; c++) image.data[4 * i + c] = between(theme.zero[c], end[c], share);
        image.data[4 * i + 3] = 255;
      });
      canvas.getContext("2d").putImageData(image, 0, 0);
      return Object.assign(canvas, {values});
    };
    return found.columns = {bare: picture(bare), placed: picture(placed)};
  }

  // Drawing

  draw() {
    if (!this.layout || !this.view) return;
    const {canvas, dense, at, time, layout} = this, context = canvas.getContext("2d"), theme = this.theme();
    context.setTransform(dense, 0, 0, dense, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    this.drawPhoto(context, at.photo);
    context.translate(at.line.x, at.line.y);
    if (time >= START.fly) this.drawPieces(context);
    if (this.now && layout.patches === this.now.patches.shape[0]) {
      if (time >= START.vectors) this.drawVectors(context);
      if (time >= START.arcs) this.drawArcs(context, theme);
    }
  }

  // From where a patch comes and where it goes to: at each place of the order now, the patch that lies there.
  moves() {
    const now = this.now && this.now.about.order, before = this.before && this.before.about.order;
    if (!now) return null;
    const was = new Int32Array(now.length);
    if (before && before.length === now.length) before.forEach((patch, place) => was[patch] = place);
    else now.forEach((patch, place) => was[patch] = place);
    return {now, was};
  }

  drawPhoto(context, {x, y, width, height}) {
    const [rows, columns] = this.grid, cut = ease(past(this.time, 500, 500)), moved = this.moves(), share = ease(this.mix), {view} = this;
    const down = height / rows, across = width / columns, high = view.height / rows, wide = view.width / columns;
    const ordered = !moved || (moved.now.every((patch, place) => patch === place) && this.mix === 1);
    context.imageSmoothingEnabled = true;
    if (ordered) context.drawImage(view, x, y, width, height);
    else {
      moved.now.forEach((patch, place) => {
        const was = moved.was[patch];
        context.drawImage(view, patch % columns * wide, Math.floor(patch / columns) * high, wide, high,
          x + between(was % columns, place % columns, share) * across, y + between(Math.floor(was / columns), Math.floor(place / columns), share) * down, across, down);
      });
    }
    const arcs = past(this.time, START.arcs, 700);
    if (arcs && this.now && this.mix === 1) {
      const heat = this.heat || (this.heat = made(1, 1)), {prefix} = this.layout, values = this.row().subarray(prefix);
      if (heat.of !== this.row()) {
        paint(heat, values, this.grid, {most: largest(values), cold: 0.3, hot: 0.9});
        heat.of = this.row();
      }
      context.globalAlpha = 0.92 * arcs;
      context.imageSmoothingEnabled = false;
      context.drawImage(heat, x, y, width, height);
      context.globalAlpha = 1;
      const place = this.token() - prefix;
      if (place >= 0) {
        context.strokeStyle = "#000";
        context.lineWidth = 3;
        context.strokeRect(x + place % columns * across, y + Math.floor(place / columns) * down, across, down);
        context.strokeStyle = "#fff";
        context.lineWidth = 1.5;
        context.strokeRect(x + place % columns * across, y + Math.floor(place / columns) * down, across, down);
      }
    }
    if (cut > 0 && arcs < 1) {
      context.strokeStyle = "rgb(255 255 255 / .85)";
      context.globalAlpha = cut * (1 - arcs);
      context.lineWidth = Math.min(1, across / 5);
      context.beginPath();
      for (let column = 1; column < columns; column++) context.rect(x + column * across, y, 0, height);
      for (let row = 1; row < rows; row++) context.rect(x, y + row * down, width, 0);
      context.stroke();
      context.globalAlpha = 1;
    }
  }

  // The line as it lies when all has come to rest, in pictures that are drawn once: the pieces; the vectors bare, and
  // with positions; the tints; and what is in front.
  rest(found) {
    if (found.rest && found.rest.layout === this.layout) return found.rest;
    const {layout: {places, prefix, tall, size}, view, dense, grid: [rows, columns], at: {line}} = this, {bare, placed} = this.columns(found), theme = this.theme();
    const sheet = (draw) => {
      const canvas = made(line.width * dense, line.height * dense), context = canvas.getContext("2d");
      context.scale(dense, dense);
      draw(context);
      return canvas;
    };
    const vectors = (picture, from, to) => sheet((context) => {
      context.imageSmoothingEnabled = false;
      for (let token = from; token < to; token++) {
        const [x, y, width] = places[token];
        context.drawImage(picture, token, 0, 1, picture.height, x, y + size + 2, width, tall);
      }
    });
    const high = view.height / rows, wide = view.width / columns, {order} = found.about;
    const front = vectors(placed, 0, prefix), context = front.getContext("2d");
    for (let token = 0; token < prefix; token++) {
      const [x, y, width] = places[token];
      context.fillStyle = token === 0 && this.model.class_token ? theme.accent : theme.soft;
      context.fillRect(x, y, width, Math.max(3, size));
    }
    if (this.model.class_token) {
      context.fillStyle = theme.ink;
      context.font = "600 12px system-ui, sans-serif";
      context.fillText("[CLS]", places[0][0], places[0][1] + size + tall + 16);
    }
    this.canvas.vectors = {bare: bare.values, placed: placed.values};
    return found.rest = {
      layout: this.layout,
      pieces: sheet((each) => order.forEach((patch, place) => {
        const [x, y, width] = places[prefix + place];
        each.drawImage(view, patch % columns * wide, Math.floor(patch / columns) * high, wide, high, x, y, width, width);
      })),
      bare: vectors(bare, prefix, places.length),
      placed: vectors(placed, prefix, places.length),
      front,
      tints: found.tints && sheet((each) => order.forEach((_, place) => {
        const [x, y, width] = places[prefix + place];
        each.fillStyle = this.tint(found.tints.values, place);
        each.fillRect(x, y + size + tall + 3, Math.max(width, 1), 6);
      })),
    };
  }

  // Part of such a picture, as wide and high as is said.
  lay(context, picture, x = 0, y = 0, width = this.at.line.width, height = this.at.line.height) {
    const {dense} = this;
    if (width > 0 && height > 0) context.drawImage(picture, x * dense, y * dense, width * dense, height * dense, x, y, width, height);
  }

  drawPieces(context) {
    const {layout: {places, prefix, patches, perLine, pitch, step, size}, at, view, time, now, grid: [rows, columns]} = this, settled = this.mix === 1 && now;
    const high = view.height / rows, wide = view.width / columns, from = {x: at.photo.x - at.line.x, y: at.photo.y - at.line.y};
    const down = at.photo.height / rows, across = at.photo.width / columns, flight = 1000, spread = 1900 - flight;
    const landed = settled ? Math.floor(clamp((time - START.fly - flight) / spread, 0, 1) * patches) : 0;
    if (landed === patches) return this.lay(context, this.rest(now).pieces);
    const moved = this.moves(), share = ease(this.mix);
    for (let first = 0; first < landed; first += perLine) {
      const [x, y] = places[prefix + first];
      this.lay(context, this.rest(now).pieces, x, y, pitch * Math.min(perLine, landed - first), step);
    }
    context.imageSmoothingEnabled = true;
    for (let place = landed; place < patches; place++) {
      const patch = moved ? moved.now[place] : place, was = moved ? moved.was[patch] : place;
      const row = Math.floor(patch / columns), column = patch % columns, flown = past(time, START.fly + spread * place / patches, flight);
      if (flown === 0) break;
      const [toX, toY] = places[prefix + place], [wasX, wasY] = places[prefix + was], way = ease(flown);
      let x = between(wasX, toX, share), y = between(wasY, toY, share) - Math.sin(Math.PI * this.mix) * Math.min(70, 8 + 90 * Math.abs(toX - wasX) / at.line.width), width = size, height = size;
      if (flown < 1) {
        x = between(from.x + column * across, x, way);
        y = between(from.y + row * down, y, way) - Math.sin(Math.PI * way) * 24;
        width = between(across, size, way);
        height = between(down, size, way);
      }
      context.drawImage(view, column * wide, row * high, wide, high, x, y, width, height);
    }
  }

  drawVectors(context) {
    const {layout: {places, prefix, tall, size}, time, now, before, mix} = this, grown = 500, spread = 1300 - grown, last = places.length - prefix;
    const {bare, placed, front, tints} = this.rest(now), told = ease(past(time, START.positions, 1000)), joined = past(time, START.prefix, 700);
    const faded = (share, picture, ...part) => {
      context.globalAlpha = share;
      if (share > 0) this.lay(context, picture, ...part);
      context.globalAlpha = 1;
    };
    if (mix < 1 && before && before.patches.shape[0] === last) {
      const older = this.rest(before);
      faded(1, older.placed);
      faded(mix, placed);
      if (older.tints) faded(tints ? 1 : 1 - mix, older.tints);
      if (tints) faded(mix, tints);
    } else if (time < START.vectors + spread + grown) {
      for (let place = 0; place < last; place++) {
        const [x, y, width] = places[prefix + place], share = ease(past(time, START.vectors + spread * place / last, grown));
        this.lay(context, bare, x, y + size + 2, width, tall * share);
      }
    } else {
      if (told < 1) faded(1, bare);
      faded(told, placed);
      if (tints) this.lay(context, tints, 0, 0, this.at.line.width * told);
    }
    if (joined < 1) context.translate((1 - ease(joined)) * -40, 0);
    faded(joined, front);
    if (joined < 1) context.translate((1 - ease(joined)) * 40, 0);
  }

  tint(values, place) {
    const [red, green, blue] = values.subarray(3 * place, 3 * place + 3);
    return `rgb(${Math.round(40 + 205 * red)} ${Math.round(40 + 205 * green)} ${Math.round(40 + 205 * blue)})`;
  }

  // Who is asked for: the token that is pointed at, else the one that was clicked, else what the answer is read from.
  token() {
    const {prefix, patches} = this.layout || {prefix: 0, patches: 1};
    return clamp(this.pointed ?? this.chosen ?? (this.model && this.model.class_token ? 0 : prefix + Math.floor(patches / 2)), 0, prefix + patches - 1);
  }

  // What it attends to: the mean over heads of the softmax of its products with all keys.
  row() {
    const token = this.token();
    return this.rows[token] = this.rows[token] || meanOf(attentionRows(this.now, token));
  }

  drawArcs(context, theme) {
    if (this.mix < 1) return;
    const {layout: {places, prefix, size, tall, lift}, time} = this, token = this.token(), row = this.row(), grown = ease(past(time, START.arcs, 700));
    this.element.dataset.token = String(token);
    this.canvas.values = row;
    const others = [...row.keys()].filter((other) => other !== token).sort((a, b) => row[b] - row[a]).slice(0, 40), most = row[others[0]] || 1;
    const middle = (at) => [places[at][0] + places[at][2] / 2, places[at][1] - 2];
    const [x, y] = middle(token);
    context.strokeStyle = theme.accent;
    context.lineCap = "round";
    for (const other of others.reverse()) {
      const share = row[other] / most, [toX, toY] = middle(other);
      const endX = between(x, toX, grown), endY = between(y, toY, grown), high = Math.min(2 * lift - 16, 18 + Math.abs(toX - x) * 0.5);
      context.globalAlpha = 0.12 + 0.78 * share;
      context.lineWidth = 0.7 + 2.1 * share;
      context.beginPath();
      context.moveTo(x, y);
      context.quadraticCurveTo((x + endX) / 2, Math.max(Math.min(y, endY) - high * grown, -lift), endX, endY);
      context.stroke();
    }
    context.globalAlpha = 1;
    const [left, top, width] = places[token];
    context.lineWidth = 1.5;
    context.strokeStyle = theme.ink;
    context.strokeRect(left - 1.5, top - 1.5, width + 3, size + tall + (token < prefix || !this.now.tints ? 4 : 13));
  }

  // Pointing

  point(event, slot, fixed) {
    if (!this.now || !this.layout || this.time < START.arcs) return fixed && this.now ? this.jump(END) : undefined;
    const box = slot.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top, {places, prefix, lift, step} = this.layout;
    if (slot === this.photoSlot) {
      const [rows, columns] = this.grid;
      return this.choose(prefix + clamp(Math.floor(y / box.height * rows), 0, rows - 1) * columns + clamp(Math.floor(x / box.width * columns), 0, columns - 1), fixed);
    }
    const wanted = Math.max(0, Math.floor((y - lift + 8) / step));
    let best = 0, least = Infinity;
    places.forEach(([left, top, width], token) => {
      const apart = Math.abs(left + width / 2 - x) + 10000 * Math.abs(Math.round((top - lift) / step) - wanted);
      if (apart < least) [best, least] = [token, apart];
    });
    this.choose(best, fixed);
  }

  key(event) {
    if (!this.now) return;
    const {prefix, patches} = this.layout, token = this.token(), columns = this.grid[1];
    const next = {ArrowRight: token + 1, ArrowLeft: token - 1, ArrowDown: token < prefix ? prefix : token + columns, ArrowUp: token < prefix + columns ? token : token - columns,
      Home: 0, End: prefix + patches - 1}[event.key];
    if (next === undefined) return;
    event.preventDefault();
    if (this.time < END) this.jump(END);
    this.choose(clamp(next, 0, prefix + patches - 1), true);
  }

  choose(token, fixed) {
    if (fixed) this.chosen = token;
    if (this.pointed === token && !fixed) return;
    this.pointed = fixed ? null : token;
    if (!this.now || this.time < START.arcs) return;
    this.line.setAttribute("aria-valuetext", this.name(this.token()));
    if (!this.running) {
      this.tell();
      this.draw();
    }
  }
}

// How far two answers lie apart: the largest change of a probability, or of a feature as a share of their length.
function farthest(one, other) {
  const said = (each) => each.about.classes.length ? softmax(each.output.values) : scaled(each.output.values), a = said(one), b = said(other);
  return a.reduce((most, value, i) => Math.max(most, Math.abs(value - b[i])), 0);
}

function softmax(values) {
  const most = largest(values), shares = values.map((value) => Math.exp(value - most)), total = shares.reduce((a, b) => a + b, 0);
  return shares.map((share) => share / total);
}

function scaled(values) {
  const length = Math.hypot(...values) || 1;
  return values.map((value) => value / length);
}

// The tab for a photo of one's own; before there is one, the strip lies on the first page.
export class LearnTab {
  constructor(app) {
    this.app = app;
    this.strip = new Strip(app);
  }

  async open() {
    const {current: photo, model, stage} = this.app, {strip} = this;
    byId("panel-learn").append(strip.element);
    if (strip.photo !== photo || strip.model !== model || this.wanted) await strip.show(photo, model, stage.image, this.wanted || {});
    else if (strip.running) strip.run();
    this.wanted = null;
  }

  close() {}
}
