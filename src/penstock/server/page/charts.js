// Drawing on canvases: a strip of steps, a map of blocks, a line of recent values.

const COLOURS = ["free", "used", "shared", "cached", "pinned", "prefill", "decode", "line"];

/** Blocks' states as the server numbers them. */
export const STATES = COLOURS.slice(0, 5);

let colours = null;

/** Colours of style.css as the browser resolves them in the current theme. */
export function palette() {
  if (colours) return colours;
  const probe = document.createElement("span");
  document.body.append(probe);
  colours = {};
  for (const name of COLOURS) {
    probe.style.color = `var(--${name})`;
    colours[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return colours;
}

export function forgetPalette() {
  colours = null;
}

// A canvas as large as it is shown, cleared; null while it isn't.
function prepare(canvas) {
  const scale = window.devicePixelRatio || 1;
  const width = Math.round(canvas.clientWidth * scale);
  const height = Math.round(canvas.clientHeight * scale);
  if (!width || !height) return null;
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const context = canvas.getContext("2d");
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height, scale };
}

/** One bar a step, the latest at the right: its height is the square root of its tokens, so that
 *  steps of one token and of thousands are both seen; it is divided as the tokens are. */
export function drawSteps(canvas, steps) {
  const area = prepare(canvas);
  if (!area) return;
  const { context, width, height, scale } = area;
  const pitch = Math.round(4 * scale);
  const bar = Math.max(1, pitch - Math.round(scale));
  const shown = steps.slice(-Math.ceil(width / pitch));
  const most = Math.max(1, ...shown.map((step) => step.prefill_tokens + step.decode_tokens));
  shown.forEach((step, i) => {
    const x = width - (shown.length - i) * pitch;
    const tokens = step.prefill_tokens + step.decode_tokens;
    if (!tokens) return;
    const total = Math.max(2 * scale, Math.sqrt(tokens / most) * height);
    const least = step.prefill_tokens && step.decode_tokens ? 2 * scale : 0;
    const decode = Math.min(total - least, Math.max(least, (step.decode_tokens / tokens) * total));
    context.fillStyle = palette().decode;
    context.fillRect(x, height - decode, bar, decode);
    context.fillStyle = palette().prefill;
    context.fillRect(x, height - total, bar, total - decode);
  });
}

/** Recent values as a line from 0 to the largest (or `most`); broken where there is none. */
export function drawLine(canvas, values, { most, colour = "line" } = {}) {
  const area = prepare(canvas);
  if (!area) return;
  const { context, width, height, scale } = area;
  const top = most ?? Math.max(...values.filter(Number.isFinite), 0);
  if (!(top > 0) || !values.length) return;
  const margin = 1.5 * scale;
  const x = (i) => (values.length < 2 ? width : (i / (values.length - 1)) * (width - 2 * margin) + margin);
  const y = (value) => height - margin - Math.min(1, value / top) * (height - 2 * margin);
  context.beginPath();
  let drawing = false;
  values.forEach((value, i) => {
    if (!Number.isFinite(value)) drawing = false;
    else if (drawing) context.lineTo(x(i), y(value));
    else {
      context.moveTo(x(i), y(value));
      context.lineTo(x(i) + 0.1, y(value)); // a value alone is a dot
      drawing = true;
    }
  });
  Object.assign(context, { strokeStyle: palette()[colour], lineWidth: 1.5 * scale, lineJoin: "round", lineCap: "round" });
  context.stroke();
}

/** Cells of a map of `total` blocks: their pitch in pixels, columns, rows, blocks in each. */
export function layOut(total, width, height, largest) {
  const each = Math.max(1, Math.ceil(total / (width * height)));
  const cells = Math.ceil(total / each);
  let pitch = Math.max(1, Math.min(largest, Math.floor(Math.sqrt((width * height) / Math.max(1, cells)))));
  while (pitch > 1 && Math.ceil(cells / Math.floor(width / pitch)) * pitch > height) pitch -= 1;
  const columns = Math.max(1, Math.floor(width / pitch));
  return { pitch, columns, rows: Math.ceil(cells / columns), each };
}

const pixels = document.createElement("canvas"); // one pixel a cell, to be enlarged

/** Every block in the order of its number. runs [[state, count], …]; returns blocks in a cell. */
export function drawBlocks(canvas, total, runs, tallest = 160) {
  const scale = window.devicePixelRatio || 1;
  const width = Math.round(canvas.clientWidth * scale);
  if (!width || !total) return 1;
  const { pitch, columns, rows, each } = layOut(total, width, Math.round(tallest * scale), Math.round(12 * scale));
  canvas.style.height = `${Math.ceil((rows * pitch) / scale)}px`;
  const { context } = prepare(canvas);
  Object.assign(pixels, { width: columns, height: rows }); // which also clears it
  const image = new ImageData(columns, rows);
  fillCells(new Uint32Array(image.data.buffer), runs, each, STATES.map((state) => word(palette()[state])));
  const small = pixels.getContext("2d");
  small.putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(pixels, 0, 0, columns * pitch, rows * pitch);
  if (pitch < 4) return each;
  for (let column = 1; column <= columns; column += 1) context.clearRect(column * pitch - 1, 0, 1, rows * pitch);
  for (let row = 1; row <= rows; row += 1) context.clearRect(0, row * pitch - 1, columns * pitch, 1);
  return each;
}

// A cell of several blocks takes the state that weighs most: pinned, then shared, used, cached.
const WEIGHT = [0, 2, 3, 1, 4];

function fillCells(cells, runs, each, words) {
  let at = 0;
  let heaviest = -1;
  for (const [state, count] of runs) {
    if (each === 1) cells.fill(words[state], at, at + count);
    for (let block = at; each > 1 && block < at + count; block += 1) {
      if (block % each === 0) heaviest = -1;
      if (WEIGHT[state] > heaviest) {
        heaviest = WEIGHT[state];
        cells[Math.floor(block / each)] = words[state];
      }
    }
    at += count;
  }
}

// "rgb(1, 2, 3)" as a pixel's bytes.
function word(colour) {
  const [red, green, blue] = colour.match(/[\d.]+/g).map(Number);
  return new Uint32Array(new Uint8ClampedArray([red, green, blue, 255]).buffer)[0];
}
