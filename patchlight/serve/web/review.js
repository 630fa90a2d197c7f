// Corrections: one photo at a time, by keys and by dragging its boxes; each change is saved at once.

import * as api from "./api.js";
import {byId, clamp, el, number, percent, readable} from "./dom.js";

const DECISIONS = ["subject", "several", "none", "unsure"];
const SIDES = {n: [0, -1], s: [0, 1], w: [-1, 0], e: [1, 0], nw: [-1, -1], ne: [1, -1], sw: [-1, 1], se: [1, 1]};
const LEAST = 4;  // pixels of the screen that a new box has at least

const photos = [], undone = [];
let order = [], place = 0, current = null, chosen = 0, saving = Promise.resolve(), pending = 0;

const state = (photo) => ({decision: photo.decision, boxes: photo.boxes.map((box) => [...box]), group: photo.group, label: photo.label});

function fail(error) {
  byId("said").hidden = false;
  byId("said").textContent = `Not saved: ${error.message}`;
}

// Changes go out one after the other, so that the last one is the last on the disk, too.
function send(photo, correction) {
  pending++;
  byId("ready").classList.remove("ok");
  saving = saving.then(() => api.put(`/review/photos/${photo.number}`, correction)).then((said) => {
    byId("said").hidden = true;
    if (correction.undone) Object.assign(photo, said);
  }).catch(fail).finally(() => { pending--; if (photo === current) draw(); tell(); });
}

function change(changes, photo = current) {
  undone.push({photo, before: photo.corrected ? state(photo) : {undone: true}, was: state(photo), corrected: photo.corrected});
  Object.assign(photo, changes, {corrected: true, confidence: 1});
  send(photo, state(photo));
  draw();
}

function undo() {
  const last = undone.pop();
  if (!last) return;
  Object.assign(last.photo, last.was, {corrected: last.corrected});
  send(last.photo, last.before);
  if (last.photo !== current) {
    const at = order.indexOf(last.photo);
    if (at < 0) order.splice(place, 0, last.photo);
    show(at < 0 ? place : at);
  }
  draw();
}

function decide(decision) {
  const boxes = decision === "none" ? [] : current.boxes.length ? current.boxes : [[0.25, 0.25, 0.75, 0.75].map((share, end) => Math.round(share * (end % 2 ? current.height : current.width)))];
  const drawn = decision !== "none" && !current.boxes.length;
  change({decision, boxes});
  if (!drawn) step(1);  // a box that is a guess is to be dragged first
}

// Which photos there are, the least certain first.

function choose() {
  const what = byId("show").value;
  const fits = (photo) => what === "all" || (what === "open" ? !photo.corrected : what === "corrected" ? photo.corrected : photo.decision === what);
  order = photos.filter(fits).sort((one, other) => one.confidence - other.confidence || one.number - other.number);
  show(0);
}

function step(by) {
  if (place + by >= 0 && place + by < order.length) show(place + by);
  else draw();
}

function show(at) {
  place = at;
  current = order[at] || null;
  chosen = 0;
  byId("review").hidden = !current;
  byId("nothing").hidden = Boolean(current);
  if (!current) return;
  const url = `/api/v1/review/photos/${current.number}/image`;
  if (byId("image").getAttribute("src") !== url) byId("image").src = url;
  const ahead = order[at + 1];
  if (ahead) new Image().src = `/api/v1/review/photos/${ahead.number}/image`;
  draw();
}

function draw() {
  if (!current) return;
  byId("at").textContent = `${number(place + 1)} of ${number(order.length)}`;
  byId("name").textContent = readable(current.path);
  byId("verdict").className = "verdict " + current.decision;
  byId("verdict").replaceChildren(el("p", {}, el("i", {class: "dot"}), el("strong", {text: current.decision}),
    el("span", {class: "sure", text: current.corrected ? "corrected" : percent(current.confidence)})));
  for (const button of byId("decisions").children) button.setAttribute("aria-pressed", String(button.dataset.value === current.decision));
  for (const name of ["label", "group"]) if (document.activeElement !== byId(name)) byId(name).value = current[name] || "";
  byId("undo").disabled = !undone.length;
  byId("reset").disabled = !current.corrected;
  byId("facts").textContent = `${number(current.width)} × ${number(current.height)} pixels, ${current.boxes.length === 1 ? "1 box" : current.boxes.length + " boxes"}`;
  byId("over").replaceChildren(...current.boxes.map((box, index) => frame(box, index)));
}

function frame(box, index) {
  const made = el("div", {class: "box" + (index === chosen ? "" : " away"), tabIndex: 0, role: "group", "aria-label": `Box ${index + 1}`, data: {box: box.map(Math.round).join(" ")},
    onpointerdown: (event) => drag(event, index, [0, 0]), onfocus: () => { if (chosen !== index) { chosen = index; mark(); } }});
  for (const [name, pull] of Object.entries(SIDES)) made.append(el("i", {class: "handle " + name, data: {name}, onpointerdown: (event) => drag(event, index, pull)}));
  lay(made, box);
  return made;
}

const mark = () => [...byId("over").children].forEach((one, index) => one.classList.toggle("away", index !== chosen));

function lay(made, [left, top, right, bottom]) {
  const {width, height} = current;
  Object.assign(made.style, {left: 100 * left / width + "%", top: 100 * top / height + "%", width: 100 * (right - left) / width + "%", height: 100 * (bottom - top) / height + "%"});
}

// Dragging: what was pulled is saved when it is let go.

function drag(event, index, [across, down]) {
  if (event.button) return;
  event.preventDefault();
  event.stopPropagation();
  chosen = index;
  mark();
  const made = byId("over").children[index], [left, top, right, bottom] = current.boxes[index];
  made.focus({preventScroll: true});
  follow(event, (dx, dy) => {
    const {width, height} = current, least = Math.max(1, Math.min(width, height) / 200);
    if (!across && !down) {
      dx = clamp(dx, -left, width - right);
      dy = clamp(dy, -top, height - bottom);
      return [left + dx, top + dy, right + dx, bottom + dy];
    }
    return [across < 0 ? clamp(left + dx, 0, right - least) : left, down < 0 ? clamp(top + dy, 0, bottom - least) : top,
      across > 0 ? clamp(right + dx, left + least, width) : right, down > 0 ? clamp(bottom + dy, top + least, height) : bottom];
  }, made, (box) => replaced(index, box));
}

function replaced(index, box) {
  const boxes = current.boxes.map((each, at) => at === index ? box : each);
  change({boxes, decision: current.decision === "unsure" ? "subject" : current.decision});
}

// `where(dx, dy)` is the box after so many pixels of the photo; `done(box)` hears of it where the pointer has moved.
function follow(event, where, made, done) {
  const photo = current, scale = photo.width / byId("photo").getBoundingClientRect().width, from = [event.clientX, event.clientY];
  const target = made || byId("photo");
  let box = null;
  target.setPointerCapture(event.pointerId);
  const move = (now) => {
    const dx = now.clientX - from[0], dy = now.clientY - from[1];
    if (!box && Math.hypot(dx, dy) < LEAST) return;
    box = where(dx * scale, dy * scale).map((end) => Math.round(10 * end) / 10);
    if (made) lay(made, box);
  };
  const stop = () => {
    target.removeEventListener("pointermove", move);
    target.removeEventListener("pointerup", stop);
    target.removeEventListener("pointercancel", stop);
    if (box && photo === current) done(box);
  };
  target.addEventListener("pointermove", move);
  target.addEventListener("pointerup", stop);
  target.addEventListener("pointercancel", stop);
}

byId("photo").addEventListener("pointerdown", (event) => {
  if (event.button || !current) return;
  event.preventDefault();
  document.activeElement.blur();
  const frameOf = byId("photo").getBoundingClientRect(), scale = current.width / frameOf.width;
  const x = clamp((event.clientX - frameOf.left) * scale, 0, current.width), y = clamp((event.clientY - frameOf.top) * scale, 0, current.height);
  const made = el("div", {class: "box"});
  byId("over").append(made);
  lay(made, [x, y, x, y]);
  const between = (at, by, most) => [clamp(Math.min(at, at + by), 0, most), clamp(Math.max(at, at + by), 0, most)];
  follow(event, (dx, dy) => {
    const [left, right] = between(x, dx, current.width), [top, bottom] = between(y, dy, current.height);
    return [left, top, right, bottom];
  }, made, (box) => {
    if (box[2] - box[0] < 1 || box[3] - box[1] < 1) { draw(); return; }
    const boxes = [...current.boxes, box];
    chosen = boxes.length - 1;
    change({boxes, decision: boxes.length > 1 ? "several" : "subject"});
  });
  addEventListener("pointerup", () => { if (!made.dataset.box) draw(); }, {once: true});
});

// Keys

document.addEventListener("keydown", (event) => {
  if (!current || event.altKey) return;
  const field = event.target.matches("input, select"), key = event.key.toLowerCase();
  if (!field && (key === "u" || (key === "z" && (event.ctrlKey || event.metaKey)))) { event.preventDefault(); undo(); return; }
  if (event.ctrlKey || event.metaKey) return;
  if (event.target.id === "label" || event.target.id === "group") {
    if (key === "enter") { event.preventDefault(); event.target.blur(); step(1); }
    if (key === "escape") { event.target.value = current[event.target.id] || ""; event.target.blur(); }
    return;
  }
  if (field) return;
  const decision = DECISIONS[Number(key) - 1];
  if (decision) decide(decision);
  else if (key === "arrowright") step(1);
  else if (key === "arrowleft") step(-1);
  else if (key === "enter" && !event.target.matches("button")) { change({}); step(1); }
  else if (key === "l") byId("label").focus();
  else if (key === "g") byId("group").focus();
  else if ((key === "delete" || key === "backspace") && current.boxes.length) {
    const boxes = current.boxes.filter((_, index) => index !== chosen);
    chosen = 0;
    change({boxes, decision: boxes.length ? (boxes.length === 1 ? "subject" : current.decision) : "none"});
  } else return;
  event.preventDefault();
});
for (const name of ["label", "group"]) {
  byId(name).addEventListener("focus", (event) => event.target.select());
  // The photo that was written about, though another may be shown by then.
  byId(name).addEventListener("change", (event) => {
    const value = event.target.value.trim() || null;
    if (value !== current[name]) change({[name]: value});
    if (value && ![...byId(name + "s").children].some((each) => each.value === value)) byId(name + "s").append(el("option", {value}));
  });
}
byId("back").addEventListener("click", () => step(-1));
byId("next").addEventListener("click", () => step(1));
byId("undo").addEventListener("click", undo);
byId("reset").addEventListener("click", () => {
  undone.push({photo: current, before: state(current), was: state(current), corrected: true});
  current.corrected = false;
  send(current, {undone: true});
  draw();
});
byId("show").addEventListener("change", (event) => { event.target.blur(); choose(); });
byId("decisions").append(...DECISIONS.map((name, index) => el("button", {type: "button", text: `${index + 1} ${name}`, data: {value: name}, onclick: (event) => { event.currentTarget.blur(); decide(name); }})));

// What was saved, and what crops and tables say already.

async function tell() {
  const ready = byId("ready"), words = ready.lastElementChild;
  try {
    const {behind, trouble} = await api.get("/review/state");
    const open = photos.filter((photo) => !photo.corrected).length;
    ready.classList.toggle("ok", !behind && !pending && !trouble);
    words.textContent = trouble ? `Saved; crops wait: ${trouble}` : pending ? "Saving…" : behind ? "Saved; crops and tables follow…" : `Saved, all files follow. ${number(open)} of ${number(photos.length)} not corrected`;
    clearTimeout(tell.again);
    if (behind || trouble) tell.again = setTimeout(tell, 700);
  } catch (error) {
    words.textContent = "The server has ended; what was saved is safe.";
    ready.classList.remove("ok");
  }
}

const everything = await api.get("/review");
photos.push(...everything.photos);
document.title = everything.folder.split("/").pop() + " · review";
for (const name of ["labels", "groups"]) byId(name).append(...everything[name].map((value) => el("option", {value})));
if (!photos.some((photo) => !photo.corrected)) byId("show").value = "all";
choose();
tell();
document.documentElement.classList.add("alive");
