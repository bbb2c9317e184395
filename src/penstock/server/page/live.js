// The engine while it works: numbers, steps, blocks, latencies, requests. Events come some four
// times a second; drawing happens at most once a frame, and nothing while the page is hidden.

import { ApiError, engineEvents } from "./api.js";
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

  /** Follows the engine while the page is seen. */
  follow() {
    this.#connection?.abort();
    this.#connection = null;
    if (document.hidden) return;
    this.#connection = new AbortController();
    this.#read(this.#connection.signal);
  }

  async #read(signal) {
    let wait = 0.5;
    while (!signal.aborted) {
      try {
        for await (const event of engineEvents(signal)) {
          if (signal.aborted) return;
          wait = 0.5;
          this.#take(event);
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof ApiError && error.status === 401) {
          this.#say("off", "needs a key");
          if (!(await this.askKey())) return;
          continue;
        }
        if (error instanceof ApiError && error.status === 404) {
          this.#say("off", "this server has no live figures");
          return;
        }
      }
      this.#say("lost", "connecting again");
      await new Promise((go) => setTimeout(go, wait * (0.75 + Math.random() / 2) * 1e3));
      wait = Math.min(LONGEST_WAIT_S, wait * 2);
    }
  }

  #take(event) {
    this.#latest = event;
    this.#steps.push(...event.steps);
    this.#steps.splice(0, this.#steps.length - KEPT_STEPS);
    this.draw();
  }

  #say(state, text) {
    byId("connection").dataset.state = state;
    write(byId("connection"), text);
  }

  #draw(event) {
    this.#say("live", `up ${seconds(event.uptime_s)}`);
    for (const name of ["running", "waiting", "swapped", "done", "failed"]) {
      write(byId(`n-${name}`), count(event.requests[name]));
    }
    this.#drawSpeed(event);
    this.#drawSteps();
    this.#drawBlocks(event.blocks);
    this.#drawLatency("ttft", event.latency.ttft_s, "Time to first token");
    this.#drawLatency("itl", event.latency.itl_s, "Time between tokens");
    this.#drawPrefix(event.prefix);
    showRequests(byId("requests"), event.running, event.requests.running);
  }

  #drawSpeed({ tokens_per_s: speed, floor_ratio: ratio, bound }) {
    write(byId("speed"), digits(speed));
    const known = Number.isFinite(ratio);
    const text = known ? `${percent(ratio)} of the floor` : "floor unknown";
    write(byId("floor"), text);
    write(byId("bound"), known ? (bound ? `${bound}-bound` : "") : "run penstock doctor once to measure this machine");
    write(byId("glance"), known ? `${digits(speed)} tok/s · ${percent(ratio)}` : `${digits(speed)} tok/s`);
    const gauge = byId("gauge");
    gauge.setAttribute("aria-valuenow", known ? Math.round(Math.min(1, ratio) * 100) : 0);
    gauge.setAttribute("aria-valuetext", bound && known ? `${text}, ${bound}-bound` : text);
    gauge.firstElementChild.style.transform = `scaleX(${known ? Math.max(0, Math.min(1, ratio)) : 0})`;
    const shares = this.#steps.slice(-200).map((step) => (step.floor_s === null ? NaN : step.floor_s / step.seconds));
    drawLine(byId("floor-line"), shares, 1);
    byId("floor-line").setAttribute("aria-label", `Share of the floor in the last ${plural(shares.length, "step")}: ${text}`);
  }

  #drawSteps() {
    drawSteps(byId("steps"), this.#steps);
    const last = this.#steps.at(-1);
    if (!last) return;
    const floor = last.floor_s === null ? "" : `, floor ${seconds(last.floor_s)}`;
    const tokens = `${count(last.prefill_tokens)} + ${plural(last.decode_tokens, "token")}`;
    const text = `${tokens}, ${plural(last.sequences, "sequence")}, ${seconds(last.seconds)}${floor}`;
    write(byId("last-step"), text);
    byId("steps").setAttribute("aria-label", `Tokens of each step. Latest: ${text}`);
  }

  #drawBlocks({ total, size, runs }) {
    const counts = [0, 0, 0, 0, 0];
    for (const [state, blocks] of runs) counts[state] += blocks;
    const each = drawBlocks(byId("blocks"), total, runs);
    STATES.forEach((state, i) => write(byId(`b-${state}`), count(counts[i])));
    const inUse = counts[1] + counts[2] + counts[4];
    const cell = each > 1 ? `, ${count(each)} a cell` : "";
    write(byId("blocks-size"), `${count(total)} blocks of ${size} tokens${cell}`);
    write(byId("blocks-use"), `${percent(total ? inUse / total : 0)} in use`);
    const states = STATES.map((state, i) => `${count(counts[i])} ${state}`).join(", ");
    byId("blocks").setAttribute("aria-label", `Map of ${plural(total, "block")}: ${states}`);
  }

  #drawLatency(name, values, title) {
    const half = seconds(percentile(values, 0.5));
    const most = seconds(percentile(values, 0.99));
    write(byId(`${name}-50`), half);
    write(byId(`${name}-99`), most);
    drawLine(byId(`${name}-line`), values);
    const text = `${title}, last ${plural(values.length, "value")}: P50 ${half}, P99 ${most}`;
    byId(`${name}-line`).setAttribute("aria-label", text);
  }

  #drawPrefix({ queries, hits }) {
    const share = queries ? hits / queries : 0;
    write(byId("prefix-share"), queries ? percent(share) : "–");
    write(byId("prefix-text"), `${count(hits)} of ${plural(queries, "prompt token")} found`);
    byId("prefix-bar").firstElementChild.style.transform = `scaleX(${share})`;
  }
}
