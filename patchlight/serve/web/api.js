// The API, and nothing else, is what the page knows of the server.

import {byId} from "./dom.js";

export class ApiError extends Error {
  constructor(status, reason, message) {
    super(message);
    Object.assign(this, {status, reason});
  }
}

const given = document.querySelector("meta[name=patchlight-token]").content;
let token = given;

// Where the server lets other machines in, the page is told the token behind # in its address, or by whoever opens it.
function findToken() {
  const told = /^#token=([!-~]+)$/.exec(location.hash);
  if (told) {
    sessionStorage.setItem("patchlight-token", told[1]);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem("patchlight-token") || "";
}
if (!token) token = findToken();

function askToken() {
  const dialog = byId("ask");
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => {
    token = byId("token").value.trim();
    sessionStorage.setItem("patchlight-token", token);
    resolve();
  }, {once: true}));
}

const wait = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

// Past its queue the server says when to come again, and so we do.
async function ask(path, settings = {}, tries = 20) {
  const answer = await fetch(path, {...settings, headers: {...settings.headers, "x-patchlight-token": token}, cache: "no-store"});
  if (answer.ok) return answer;
  if (answer.status === 503 && tries > 0) {
    await wait(Number(answer.headers.get("retry-after") || 1) * (0.5 + Math.random()));
    return ask(path, settings, tries - 1);
  }
  if (answer.status === 401 && given) throw new ApiError(401, "token", "The server was started anew. Reload the page.");
  if (answer.status === 401 && tries > 0) {
    await askToken();
    return ask(path, settings, 0);
  }
  let problem = {reason: "unknown", message: "the server answered " + answer.status};
  try {
    problem = (await answer.json()).error || problem;
  } catch { /* not one of its own answers */ }
  throw new ApiError(answer.status, problem.reason, problem.message);
}

function address(path, values = {}) {
  const text = new URLSearchParams(values).toString();
  return "/api/v1" + path + (text ? "?" + text : "");
}

export const get = async (path, values) => (await ask(address(path, values))).json();
export const blob = async (path, values) => (await ask(address(path, values))).blob();
export const tensors = async (path, values) => parse(await (await ask(address(path, values))).arrayBuffer());

export async function post(path, body) {
  return ask(address(path), {method: "POST", body: JSON.stringify(body), headers: {"content-type": "application/json"}});
}

export async function put(path, body) {
  return (await ask(address(path), {method: "PUT", body: JSON.stringify(body), headers: {"content-type": "application/json"}})).json();
}

export async function send(file) {
  const form = new FormData();
  form.append("photo", file, file.name || "photo");
  return (await ask(address("/photos"), {method: "POST", body: form})).json();
}

export const remove = (id) => ask(address("/photos/" + id), {method: "DELETE"});

export async function ready() {
  for (;;) {
    try {
      if ((await fetch("/readyz", {cache: "no-store"})).ok) return;
    } catch { /* not listening yet, or no longer */ }
    await wait(0.4);
  }
}

// safetensors: eight bytes with the length of a JSON header, the header, the numbers.
function parse(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const {__metadata__: said, ...tensors} = header, found = said?.about ? {about: JSON.parse(said.about)} : {};
  for (const [name, {shape, data_offsets: [start, end]}] of Object.entries(tensors)) {
    found[name] = {shape, values: new Float32Array(buffer.slice(8 + length + start, 8 + length + end))};
  }
  return found;
}
