// Drawing on canvases: a strip of steps, a map of blocks, a line of recent values.

/** Blocks' states as the server numbers them. */
export const STATES = ["free", "used", "shared", "cached", "pinned"];

const COLOURS = [...STATES, "prefill", "decode", "line"];
let colours = null;

// Colours of the style sheet as the browser resolves them in the current theme.
function palette() {
  if (colours) return colours;
  const probe = document.body.appendChild(document.createElement("span"));
  colours = {};
  for (const name of COLOURS) {
    probe.style.color = `var(--${name})`;
    colours[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return colours;
}

/** To be called when the theme has changed. */
export function forgetPalette() {
  colours = null;
}

// A canvas as large as it is shown, cleared; null while it isn't.
function prepare(canvas) {
  const scale = devicePixelRatio || 1;
  const width = Math.round(canvas.clientWidth * scale);
  const height = Math.round(canvas.clientHeight * scale);
  if (!width || !height) return null;
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const context = canvas.getContext("2d");
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
  const bar = pitch - Math.round(scale);
  const shown = steps.slice(-Math.ceil(width / pitch));
  const most = Math.max(1, ...shown.map((step) => step.prefill_tokens + step.decode_tokens));
  shown.forEach(({ prefill_tokens: prefill, decode_tokens: decode }, i) => {
    const x = width - (shown.length - i) * pitch;
    const total = prefill + decode && Math.max(2 * scale, Math.sqrt((prefill + decode) / most) * height);
    const least = prefill && decode ? 2 * scale : 0; // the smaller part is seen too
    const lower = Math.min(total - least, Math.max(least, (decode / (prefill + decode || 1)) * total));
    context.fillStyle = palette().decode;
    context.fillRect(x, height - lower, bar, lower);
    context.fillStyle = palette().prefill;
    context.fillRect(x, height - total, bar, total - lower);
  });
}

/** Recent values as a line from 0 to the largest (or `most`), broken where one is NaN. */
export function drawLine(canvas, values, most = Math.max(0, ...values.filter(Number.isFinite))) {
  const area = prepare(canvas);
  if (!area || !(most > 0)) return;
  const { context, width, height, scale } = area;
  const margin = 1.5 * scale;
  context.beginPath();
  values.forEach((value, i) => {
    if (!Number.isFinite(value)) return;
    const x = margin + (i / Math.max(1, values.length - 1)) * (width - 2 * margin);
    const y = height - margin - Math.min(1, value / most) * (height - 2 * margin);
    if (!Number.isFinite(values[i - 1])) context.moveTo(x, y);
    context.lineTo(x, y);
  });
  Object.assign(context, { strokeStyle: palette().line, lineWidth: margin, lineJoin: "round", lineCap: "round" });
  context.stroke();
}

/** A map of `total` blocks: the pitch of its cells in pixels, columns, rows, blocks in a cell. */
export function layOut(total, width, height, largest) {
  const each = Math.ceil(total / (width * height));
  const cells = Math.ceil(total / each);
  let pitch = Math.max(1, Math.min(largest, Math.floor(Math.sqrt((width * height) / cells))));
  while (pitch > 1 && Math.ceil(cells / Math.floor(width / pitch)) * pitch > height) pitch -= 1;
  const columns = Math.floor(width / pitch);
  return { pitch, columns, rows: Math.ceil(cells / columns), each };
}

/** Every block in the order of its number; runs [[state, count], …]. Returns blocks in a cell. */
export function drawBlocks(canvas, total, runs, tallest = 160) {
  const scale = devicePixelRatio || 1;
  const width = Math.round(canvas.clientWidth * scale);
  if (!width || !total) return 1;
  const layout = layOut(total, width, Math.round(tallest * scale), Math.round(12 * scale));
  const { pitch, columns, rows, each } = layout;
  canvas.style.height = `${Math.ceil((rows * pitch) / scale)}px`;
  const { context } = prepare(canvas);
  // A cell of several blocks shows the state drawn last: the one that weighs most.
  for (const state of [0, 3, 1, 2, 4]) {
    context.fillStyle = palette()[STATES[state]];
    let at = 0;
    for (const [found, count] of runs) {
      if (found === state && count) fillCells(context, layout, Math.floor(at / each), Math.floor((at + count - 1) / each));
      at += count;
    }
  }
  if (pitch < 4) return each;
  for (let column = 1; column <= columns; column += 1) context.clearRect(column * pitch - 1, 0, 1, rows * pitch);
  for (let row = 1; row <= rows; row += 1) context.clearRect(0, row * pitch - 1, width, 1);
  return each;
}

function fillCells(context, { pitch, columns }, first, last) {
  while (first <= last) {
    const column = first % columns;
    const number = Math.min(columns - column, last - first + 1);
    context.fillRect(column * pitch, Math.floor(first / columns) * pitch, number * pitch, pitch);
    first += number;
  }
}
