// Small helpers. Whatever comes from files or from the server is set as text, never as HTML.

export const byId = (id) => document.getElementById(id);

export function el(tag, settings = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(settings)) {
    if (name === "class") made.className = value;
    else if (name === "text") made.textContent = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(made.dataset, value);
    else if (name in made && !name.startsWith("aria")) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export const percent = (share, digits = 0) => (100 * share).toFixed(digits) + " %";
// The confidence is that of the best box; where nothing was found, "2 % sure" would read as its opposite.
export const howSure = (found) => found.decision === "none" ? `best box ${percent(found.confidence)} likely` : percent(found.confidence) + " sure";
export const css = (share) => (100 * share).toFixed(3) + "%";
export const number = (value) => value.toLocaleString("en");

export function short(value) {
  for (const [size, unit] of [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"]]) {
    if (value >= size) return (value / size).toFixed(value / size >= 100 ? 0 : value / size >= 10 ? 1 : 2) + unit;
  }
  return String(Math.round(value));
}

// A name as it can be read: line ends and marks that turn the writing round are spelt out.
const ODD = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/gu;
export const readable = (text) => text.replace(ODD, (odd) => "\\u" + odd.codePointAt(0).toString(16).padStart(4, "0"));

// A file's name whose middle gives way where there is no room, since names mostly differ at their ends.
export function nameOf(name) {
  const text = readable(name), end = Math.max(Math.ceil(text.length / 2), text.length - 12);
  return el("span", {class: "name", title: text}, el("span", {class: "start", text: text.slice(0, end)}), el("span", {class: "end", text: text.slice(end)}));
}

export function clamp(value, low, high) {
  return Math.min(Math.max(value, low), high);
}

// Buttons of which one is pressed.
export function choice(label, options, chosen, change) {
  const group = el("div", {class: "choice", role: "group", "aria-label": label});
  const press = (value, tell) => {
    for (const each of group.children) each.setAttribute("aria-pressed", String(each.dataset.value === String(value)));
    if (tell) change(value);
  };
  for (const [value, text] of options) {
    group.append(el("button", {type: "button", text, data: {value}, onclick: () => press(value, true)}));
  }
  press(chosen, false);
  group.choose = (value) => press(value, false);
  return group;
}

export function toggle(text, on, change) {
  const button = el("button", {type: "button", class: "switch", role: "switch", "aria-checked": String(on)}, el("i"), text);
  button.addEventListener("click", () => {
    const now = button.getAttribute("aria-checked") !== "true";
    button.setAttribute("aria-checked", String(now));
    change(now);
  });
  return button;
}

export function slider(label, settings, change) {
  const id = "s" + Math.random().toString(36).slice(2);
  const input = el("input", {type: "range", id, ...settings});
  const output = el("output", {htmlFor: id});
  input.addEventListener("input", () => change(Number(input.value)));
  const row = el("div", {class: "slider"}, el("label", {htmlFor: id, text: label}), output, input);
  return Object.assign(row, {input, say: (text) => {
    output.textContent = text;
    input.setAttribute("aria-valuetext", text);
  }});
}

export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  const link = el("a", {href: url, download: name});
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
