// Colours for heat, and the attention itself: softmax(q . k), computed here from the queries and keys of one pass; tests
// compare it with `pl.attention` and with the API.

// Even steps in lightness, dark to light, so that warmer is brighter to every eye.
const STOPS = ["160047", "43015f", "750269", "a90363", "d8254c", "fa5521", "ff9237", "ffc46d", "ffefb3"].map((hex) =>
  [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));

export const COLOURS = new Uint8ClampedArray(256 * 3);
for (let level = 0; level < 256; level++) {
  const place = level / 255 * (STOPS.length - 1), low = Math.min(Math.floor(place), STOPS.length - 2), share = place - low;
  for (let c = 0; c < 3; c++) COLOURS[3 * level + c] = STOPS[low][c] * (1 - share) + STOPS[low + 1][c] * share;
}

// One pixel a patch, from `least` (dark, see-through) to `most` (bright). The values stay with the canvas.
export function paint(canvas, values, [rows, columns], {least = 0, most = 1, cold = 0.5, hot = 0.85} = {}) {
  if (canvas.width !== columns || canvas.height !== rows) Object.assign(canvas, {width: columns, height: rows});
  const image = new ImageData(columns, rows), span = most - least || 1;
  for (let i = 0; i < values.length; i++) {
    const level = Math.round(255 * Math.min(Math.max((values[i] - least) / span, 0), 1));
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = COLOURS[3 * level + c];
    image.data[4 * i + 3] = 255 * (cold + (hot - cold) * level / 255);
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  canvas.values = values;
}

export const largest = (values) => values.reduce((most, value) => Math.max(most, value), -Infinity);
export const smallest = (values) => values.reduce((least, value) => Math.min(least, value), Infinity);

// What token `query` attends to: a Float32Array of N shares for each head.
export function attentionRows({q, k, bias}, query) {
  const [heads, tokens, width] = q.shape, scale = 1 / Math.sqrt(width), rows = [];
  for (let head = 0; head < heads; head++) {
    const row = new Float32Array(tokens), from = (head * tokens + query) * width;
    const asked = q.values.subarray(from, from + width), keys = k.values, start = head * tokens * width;
    let most = -Infinity;
    for (let token = 0; token < tokens; token++) {
      let score = 0;
      for (let e = 0, at = start + token * width; e < width; e++, at++) score += asked[e] * keys[at];
      score *= scale;
      if (bias) score += bias.values[(head * tokens + query) * tokens + token];
      row[token] = score;
      if (score > most) most = score;
    }
    let total = 0;
    for (let token = 0; token < tokens; token++) total += row[token] = Math.exp(row[token] - most);
    for (let token = 0; token < tokens; token++) row[token] /= total;
    rows.push(row);
  }
  return rows;
}

export function meanOf(rows) {
  const mean = new Float32Array(rows[0].length);
  for (const row of rows) for (let i = 0; i < mean.length; i++) mean[i] += row[i] / rows.length;
  return mean;
}

// The cosines of one patch's feature and all others'.
export function likeness({shape: [patches, width], values}, patch) {
  const found = new Float32Array(patches);
  for (let other = 0; other < patches; other++) {
    let sum = 0;
    for (let d = 0; d < width; d++) sum += values[patch * width + d] * values[other * width + d];
    found[other] = sum;
  }
  return found;
}
