// What the engine does, from its /live stream, while this part of the page is in sight.

import { call, events } from "./api.js";
import { byId, element } from "./dom.js";

const RATE_SECONDS = 2;
const HISTORY_SECONDS = 60;
const RETRY_MILLISECONDS = 2000;
const OAR = 7;
const MARGIN = 24;

const steps = [];
let history = [];
let rankSeconds = [];
let controller = null;

const count = new Intl.NumberFormat("en");

function milliseconds(seconds) {
  const value = seconds * 1000;
  return `${value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : Math.round(value)} ms`;
}

function rows(number) {
  return number === 1 ? "1 row" : `${count.format(number)} rows`;
}

function show(id, text) {
  const node = byId(id);
  if (node.textContent !== text) node.textContent = text;
}

/** Ready to draw on: a canvas in its own size, cleared, and the page's colours. */
function prepared(id) {
  const canvas = byId(id);
  const { clientWidth: width, clientHeight: height } = canvas;
  const scale = devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const style = getComputedStyle(document.documentElement);
  return { context, width, height, color: (name) => style.getPropertyValue(`--${name}`).trim() };
}

/** Two banks of oars: a step's decode rows above the waterline, its prefill rows below. */
function drawSteps() {
  const { context, width, height, color } = prepared("steps");
  const shown = steps.slice(-Math.floor((width - MARGIN) / OAR));
  const up = Math.max(4, ...shown.map((step) => step.decode_rows + step.padding_rows));
  const down = Math.max(2, ...shown.map((step) => step.prefill_rows));
  const water = Math.round(height * 0.68);
  const bar = (x, from, size, name) => {
    if (!size) return;
    context.fillStyle = color(name);
    context.beginPath();
    context.roundRect(x, Math.min(from, from + size), OAR - 3, Math.abs(size), 2);
    context.fill();
  };
  shown.forEach((step, index) => {
    const x = width - (shown.length - index) * OAR;
    const one = (water - 6) / up;
    bar(x, water - 2, -step.decode_rows * one, "decode");
    bar(x, water - 2 - step.decode_rows * one, -step.padding_rows * one, "padding");
    bar(x, water + 2, (step.prefill_rows * (height - water - 4)) / down, "prefill");
  });
  context.fillStyle = color("line");
  context.fillRect(0, water - 0.5, width, 1);
  context.fillStyle = color("dim");
  context.font = "11px system-ui, sans-serif";
  context.fillText(String(up), 5, 13);
  context.fillText(String(down), 5, height - 5);
}

function drawRates() {
  const { context, width, height, color } = prepared("rates");
  const now = history.at(-1)?.seconds ?? 0;
  const points = history.map((each) => [width - ((now - each.seconds) / HISTORY_SECONDS) * width, each.rate]);
  const top = Math.max(10, ...points.map(([, rate]) => rate));
  const y = (rate) => height - 3 - (rate / top) * (height - 20);
  context.beginPath();
  points.forEach(([x, rate]) => context.lineTo(x, y(rate)));
  context.strokeStyle = color("decode");
  context.lineWidth = 1.75;
  context.lineJoin = "round";
  context.stroke();
  if (points.length) {
    context.lineTo(width, height);
    context.lineTo(points[0][0], height);
    context.globalAlpha = 0.14;
    context.fillStyle = color("decode");
    context.fill();
    context.globalAlpha = 1;
  }
  context.fillStyle = color("dim");
  context.font = "11px system-ui, sans-serif";
  context.fillText(count.format(Math.round(top)), 5, 13);
  show("rate-text", `Now ${count.format(Math.round(history.at(-1)?.rate ?? 0))}, at most ${count.format(Math.round(Math.max(0, ...history.map((each) => each.rate))))}.`);
}

function fill(id, used, total) {
  const meter = byId(id);
  meter.setAttribute("aria-valuenow", used);
  meter.setAttribute("aria-valuemax", total);
  meter.firstElementChild.style.width = `${total ? (100 * used) / total : 0}%`;
  show(`${id}-text`, `${count.format(used)} of ${count.format(total)}`);
}

function showRanks(event) {
  const timed = event.steps.filter((step) => step.seconds.length);
  if (timed.length)
    rankSeconds = timed[0].seconds.map((_, rank) => timed.reduce((sum, step) => sum + (step.seconds[rank] ?? 0), 0) / timed.length);
  const ranks = byId("ranks");
  const wanted = Math.max(event.tp_size, rankSeconds.length);
  while (ranks.children.length < wanted) {
    const rank = ranks.children.length;
    ranks.append(element("div", { className: "meter" },
      element("span", {}, `rank ${rank}`), element("span", {}, "–"), element("div", { "aria-hidden": "true" }, element("i"))));
  }
  const slowest = Math.max(...rankSeconds, 1e-9);
  rankSeconds.forEach((each, rank) => {
    const [, text, bar] = ranks.children[rank].children;
    text.textContent = milliseconds(each);
    bar.firstElementChild.style.width = `${(100 * each) / slowest}%`;
  });
}

function update(event) {
  if (event.num_steps < (history.at(-1)?.num_steps ?? 0)) history = []; // another server by now
  byId("state").dataset.state = event.state;
  show("state", event.state);
  const before = history.findLast((each) => event.seconds - each.seconds >= RATE_SECONDS) ?? history[0];
  const spent = before ? event.seconds - before.seconds : 0;
  const rate = (name) => (spent > 0 ? (event[name] - before[name]) / spent : 0);
  history.push({ ...event, steps: undefined, rate: rate("num_generation_tokens") });
  history = history.filter((each) => event.seconds - each.seconds <= HISTORY_SECONDS);
  show("output-rate", count.format(Math.round(rate("num_generation_tokens"))));
  show("prompt-rate", count.format(Math.round(rate("num_prefill_tokens"))));
  show("running", count.format(event.num_running));
  show("waiting", count.format(event.num_waiting));
  fill("slots", event.num_used_slots, event.num_slots);
  fill("blocks", event.num_used_blocks, event.num_blocks);
  showRanks(event);
  steps.push(...event.steps);
  steps.splice(0, Math.max(0, steps.length - 1024));
  const last = steps.at(-1);
  if (last) {
    const parts = [];
    if (last.decode_rows) parts.push(`${rows(last.decode_rows)} of decode`);
    if (last.padding_rows) parts.push(`${rows(last.padding_rows)} of padding`);
    if (last.prefill_rows) parts.push(`${rows(last.prefill_rows)} of prefill with ${count.format(last.prefill_tokens)} tokens`);
    show("step-text", `Step ${count.format(event.num_steps)}: ${parts.join(", ")}.`);
  }
  show("facts", `Bireme ${event.version} · ${event.dtype} on ${event.device} · tensor parallel ${event.tp_size}` +
    (event.max_model_len ? ` · ${count.format(event.max_model_len)} tokens of context` : ""));
  drawSteps();
  drawRates();
}

async function follow(signal) {
  while (!signal.aborted) {
    try {
      for await (const event of events(await call("live", { signal }))) update(event);
    } catch { /* shown below, and tried again */ }
    if (signal.aborted) return;
    byId("state").dataset.state = "offline";
    show("state", "offline");
    await new Promise((resolve) => setTimeout(resolve, RETRY_MILLISECONDS));
  }
}

/** Watch while the panel can be seen, and only then: call whenever that may have changed. */
export function watchIfSeen() {
  const isSeen = !document.hidden && byId("engine").offsetParent !== null;
  if (isSeen && !controller) {
    controller = new AbortController();
    follow(controller.signal);
  } else if (!isSeen && controller) {
    controller.abort();
    controller = null;
  }
}
