// The engine while it works: numbers, steps, blocks, latencies, requests. Events come some four
// times a second; drawing happens at most once a frame, and nothing while the page is hidden.

import { engineEvents } from "./api.js";
import { STATES, drawBlocks, drawLine, drawSteps, forgetPalette } from "./charts.js";
import { byId, oncePerFrame, write } from "./dom.js";
import { count, digits, percent, percentile, plural, seconds } from "./format.js";
import { showRequests } from "./requests.js";

const KEPT_STEPS = 500;
const LONGEST_WAIT_S = 15;

export class Live {
  #steps = [];
  #latest = null;
  #connection = null;
  #model = "";

  constructor(askKey) {
    this.askKey = askKey;
    this.draw = oncePerFrame(() => this.#latest && !document.hidden && this.#draw(this.#latest));
    const redraw = () => {
      forgetPalette();
      this.draw();
    };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    new MutationObserver(redraw).observe(document.documentElement, { attributeFilter: ["data-theme"] });
    new ResizeObserver(this.draw).observe(byId("engine"));
    document.addEventListener("visibilitychange", () => this.follow());
  }

  /** Follows a model's engine while the page is seen; without a name, as before. */
  follow(model = this.#model) {
    if (model !== this.#model) [this.#steps, this.#latest] = [[], null];
    this.#model = model;
    this.#connection?.abort();
    this.#connection = new AbortController();
    if (!document.hidden && model) this.#read(this.#connection.signal);
  }

  async #read(signal) {
    let wait = 0.5;
    while (!signal.aborted) {
      try {
        for await (const event of engineEvents(this.#model, signal)) {
          if (signal.aborted) return;
          wait = 0.5;
          this.#take(event);
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 404) return this.#say("off", "no live figures from this server");
        if (error.status === 401) {
          this.#say("off", "needs a key");
          if (!(await this.askKey())) return;
          continue;
        }
      }
      this.#say("lost", "connecting again");
      await new Promise((go) => setTimeout(go, wait * (0.75 + Math.random() / 2) * 1e3));
      wait = Math.min(LONGEST_WAIT_S, wait * 2);
    }
  }

  #take(event) {
    this.#latest = event;
    this.#steps = [...this.#steps, ...event.steps].slice(-KEPT_STEPS);
    this.#say("live", `up ${seconds(event.uptime_s)}`);
    this.draw();
  }

  #say(state, text) {
    byId("connection").dataset.state = state;
    write(byId("connection"), text);
  }

  #draw(event) {
    for (const name of ["running", "waiting", "swapped", "done", "failed"]) {
      write(byId(`n-${name}`), count(event.requests[name]));
    }
    this.#drawSpeed(event);
    this.#drawSteps();
    drawCache(event.blocks);
    drawLatency("ttft", event.latency.ttft_s, "Time to first token");
    drawLatency("itl", event.latency.itl_s, "Time between tokens");
    const { queries, hits } = event.prefix;
    write(byId("prefix-share"), queries ? percent(hits / queries) : "–");
    write(byId("prefix-text"), `${count(hits)} of ${plural(queries, "prompt token")} found`);
    fill("prefix-bar", queries ? hits / queries : 0);
    showRequests(byId("requests"), event.running, event.requests.running);
  }

  #drawSpeed({ tokens_per_s: speed, floor_ratio: ratio, bound }) {
    const known = Number.isFinite(ratio);
    const unmeasured = this.#steps.at(-1)?.floor_s === null;
    const share = known ? `${percent(ratio)} of the floor` : unmeasured ? "floor unknown" : "–";
    const why = known && bound ? `${bound}-bound` : unmeasured ? "penstock doctor measures it" : "";
    write(byId("speed"), digits(speed));
    write(byId("floor"), share);
    write(byId("bound"), why);
    write(byId("glance"), `${digits(speed)} tok/s${known ? ` · ${percent(ratio)}` : ""}`);
    byId("gauge").setAttribute("aria-valuenow", known ? Math.round(Math.min(1, ratio) * 100) : 0);
    byId("gauge").setAttribute("aria-valuetext", `${share} ${why}`);
    fill("gauge", known ? ratio : 0);
    const shares = this.#steps.slice(-200).map((step) => (step.floor_s ?? NaN) / step.seconds);
    drawLine(byId("floor-line"), shares, 1);
    label("floor-line", `The last steps: ${share}`);
  }

  #drawSteps() {
    const last = this.#steps.at(-1);
    if (!last) return;
    const floor = last.floor_s === null ? "" : `, floor ${seconds(last.floor_s)}`;
    const tokens = `${count(last.prefill_tokens)} prefill + ${count(last.decode_tokens)} decode`;
    const text = `${tokens}, ${seconds(last.seconds)}${floor}`;
    drawSteps(byId("steps"), this.#steps);
    write(byId("last-step"), text);
    label("steps", `Tokens of each step; the latest, of ${plural(last.sequences, "sequence")}: ${text}`);
  }
}

// What a canvas shows, for those who don't see it.
function label(id, text) {
  byId(id).setAttribute("role", "img");
  byId(id).setAttribute("aria-label", text);
}

function fill(id, share) {
  byId(id).firstElementChild.style.transform = `scaleX(${Math.max(0, Math.min(1, share))})`;
}

function drawCache({ total, size, runs }) {
  const counts = STATES.map(() => 0);
  for (const [state, blocks] of runs) counts[state] += blocks;
  STATES.forEach((state, i) => write(byId(`b-${state}`), count(counts[i])));
  const each = drawBlocks(byId("blocks"), total, runs);
  const cell = each > 1 ? `, ${each} a cell` : "";
  write(byId("blocks-size"), `${count(total)} blocks of ${size} tokens${cell}`);
  write(byId("blocks-use"), `${percent((counts[1] + counts[2] + counts[4]) / total)} in use`);
  const states = STATES.map((state, i) => `${count(counts[i])} ${state}`).join(", ");
  label("blocks", `Map of ${plural(total, "block")}: ${states}`);
}

function drawLatency(name, values, title) {
  const [half, most] = [0.5, 0.99].map((p) => seconds(percentile(values, p)));
  write(byId(`${name}-50`), half);
  write(byId(`${name}-99`), most);
  drawLine(byId(`${name}-line`), values);
  label(`${name}-line`, `${title}: P50 ${half}, P99 ${most}`);
}
