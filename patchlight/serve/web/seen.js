// What one forward pass showed, fetched once: moving over the patches asks the server nothing.

import * as api from "./api.js";

const ROOM = 96 * 2 ** 20;
const kept = new Map();

function size(value) {
  return Object.values(value).reduce((sum, part) => sum + (part && part.values ? 4 * part.values.length : 0), 1000);
}

async function once(key, make) {
  if (kept.has(key)) {
    const found = kept.get(key);
    kept.delete(key);
    kept.set(key, found);
    return found.value;
  }
  const entry = {value: make(), bytes: 0};
  kept.set(key, entry);
  try {
    entry.now = await entry.value;
    entry.bytes = size(entry.now);
  } catch (error) {
    kept.delete(key);
    throw error;
  }
  let total = [...kept.values()].reduce((sum, each) => sum + each.bytes, 0);
  for (const [old, each] of kept) {
    if (total <= ROOM || old === key) break;
    total -= each.bytes;
    kept.delete(old);
  }
  return entry.now;
}

const key = (...parts) => parts.join(" ");

// Where the grid lies on the photo comes with the subject's heat.
export const found = (photo, model, method = "auto") =>
  once(key("found", photo.id, model.number, method), () => api.get(`/photos/${photo.id}/localize`, {model: model.number, method}));
export const heads = (photo, model, layer) =>
  once(key("heads", photo.id, model.number, layer), () => api.tensors(`/photos/${photo.id}/heads`, {model: model.number, layer}));
export const features = (photo, model) =>
  once(key("features", photo.id, model.number), () => api.tensors(`/photos/${photo.id}/features`, {model: model.number}));
export const rollout = (photo, model) =>
  once(key("rollout", photo.id, model.number), () => api.get(`/photos/${photo.id}/rollout`, {model: model.number}));
export const positions = (model) =>
  once(key("positions", model.number), () => api.tensors(`/models/${model.number}/positions`));

// What is there already, without waiting.
export function headsNow(photo, model, layer) {
  const entry = kept.get(key("heads", photo.id, model.number, layer));
  return entry && entry.now;
}

// The other layers too, while nothing else is to be done, so that the slider does not wait.
export async function fetchAhead(photo, model, still) {
  const bytes = 8 * model.tokens * model.depth * 64 * model.heads;
  if (bytes > ROOM / 2) return;
  for (let layer = model.depth - 1; layer >= 0 && still(); layer--) await heads(photo, model, layer);
}

// Prefix tokens by name, in their order.
export function prefixTokens(model) {
  const names = [];
  if (model.class_token) names.push(["Class token", "class token"]);
  if (model.distill_token) names.push(["Distillation", "distillation token"]);
  for (let i = 1; i <= model.registers; i++) names.push(["Register " + i, "register " + i]);
  return names;
}
