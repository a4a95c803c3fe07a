// The conversation: questions, streamed answers with folded thoughts, tool calls and their results.

import { call, events } from "./api.js";
import { byId, element } from "./dom.js";
import { blocks, copyText } from "./markdown.js";
import { parameters, setThinking } from "./parameters.js";

/** Questions to begin with, and whether they are worth a thought. */
const IDEAS = [
  ["What is 345 + 678?", true],
  ["What is the capital of France?", false],
  ['How many times does the letter "r" appear in "strawberry"?', true],
  ["Sort these numbers from smallest to largest: 41, 7, 88, 23", true],
];

const scroll = byId("scroll");
const list = byId("messages");
const question = byId("question");

/** What the model is sent: OpenAI's messages. */
let conversation = [];
let running = null;

function say(text) {
  byId("status").textContent = text;
}

function setBusy(controller) {
  const [gone, come] = controller ? ["send", "stop"] : ["stop", "send"];
  const hadFocus = document.activeElement === byId(gone);
  running = controller;
  byId(gone).hidden = true;
  byId(come).hidden = false;
  if (hadFocus) byId(come).focus();
  document.body.classList.toggle("busy", controller !== null);
}

/** Keep the end in sight, unless the reader has scrolled away from it. */
function following(change) {
  const isAtEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 48;
  change();
  if (isAtEnd) scroll.scrollTop = scroll.scrollHeight;
}

function add(node) {
  byId("welcome").hidden = true;
  list.append(node);
  scroll.scrollTop = scroll.scrollHeight;
}

/** One answer on the page, drawn at most once a frame, and less often when it is long. */
class Answer {
  constructor() {
    this.thought = "";
    this.text = "";
    this.calls = [];
    this.reason = null;
    this.usage = null;
    this.tokensAtFirst = 0;
    this.asked = performance.now();
    this.first = null;
    this.thoughtUntil = null;
    this.thoughtBody = element("div", { className: "thought-body" });
    this.thoughtTitle = element("summary", {}, "Thinking…");
    this.thoughtBox = element("details", { className: "thought", hidden: true }, this.thoughtTitle, this.thoughtBody);
    this.body = element("div", { className: "body" });
    this.toolBox = element("div", { className: "tools" });
    this.foot = element("footer", {});
    this.waiting = element("span", { className: "waiting", "aria-label": "Waiting for the first token" });
    this.node = element("li", { className: "answer" },
      element("h3", { className: "hidden" }, "Answer"), this.waiting, this.thoughtBox, this.body, this.toolBox, this.foot);
    this.isDue = false;
    this.pause = 0;
  }

  /** Take in one chunk of the stream. */
  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { reasoning_content: thought, content, tool_calls: calls } = choice.delta;
    if ((thought || content || calls) && this.first === null) {
      this.first = performance.now();
      this.tokensAtFirst = this.usage?.completion_tokens ?? 1;
    }
    if (thought) this.thought += thought;
    if ((content || calls) && this.thought) this.thoughtUntil ??= performance.now();
    if (content) this.text += content;
    for (const part of calls ?? []) {
      const known = (this.calls[part.index] ??= { id: part.id, name: "", arguments: "" });
      known.id ??= part.id;
      known.name += part.function?.name ?? "";
      known.arguments += part.function?.arguments ?? "";
    }
    if (choice.finish_reason) this.reason = choice.finish_reason;
    this.draw();
  }

  draw() {
    if (this.isDue) return;
    this.isDue = true;
    setTimeout(() => requestAnimationFrame(() => {
      this.isDue = false;
      if (this.isOver) return;
      const started = performance.now();
      following(() => this.show());
      this.pause = Math.min(500, 8 * (performance.now() - started));
    }), this.pause);
  }

  show() {
    this.waiting.hidden = this.first !== null || this.isOver;
    this.thoughtBox.hidden = !this.thought.trim();
    if (!this.thoughtBox.hidden) {
      this.thoughtBody.textContent = this.thought.trim();
      const until = this.thoughtUntil ?? (this.isOver ? performance.now() : null);
      this.thoughtTitle.textContent = until === null ? "Thinking…" : `Thought for ${seconds(until - this.first)}`;
    }
    this.body.replaceChildren(...blocks(this.text));
    this.toolBox.replaceChildren(...this.calls.map((each) => this.card(each)));
  }

  /** A tool call, with a place for its result once the answer is over. */
  card(toolCall) {
    let shown = toolCall.arguments;
    try {
      shown = JSON.stringify(JSON.parse(shown), null, 2);
    } catch { /* not complete yet */ }
    const card = element("section", { className: "tool", "aria-label": `Call of ${toolCall.name}` },
      element("h4", {}, "calls ", element("code", {}, toolCall.name)), element("pre", { tabIndex: 0 }, shown));
    if (this.isOver) {
      toolCall.result ??= element("textarea", { rows: 1, placeholder: "Its result", "aria-label": `Result of ${toolCall.name}` });
      card.append(toolCall.result);
    }
    return card;
  }

  /** The answer has ended: `how` says why when it is not the model's doing. */
  end(how) {
    this.isOver = true;
    this.thoughtUntil ??= performance.now();
    this.calls = this.calls.filter(Boolean);
    following(() => {
      this.show();
      const copy = element("button", { type: "button" }, "Copy");
      copy.onclick = () => copyText(this.text, copy);
      const again = element("button", { type: "button", className: "again" }, "Try again");
      again.onclick = tryAgain;
      this.foot.replaceChildren(element("span", {}, this.figures(how)), copy, again);
      if (this.calls.length && !how) {
        const go = element("button", { type: "button", className: "results" }, "Send results");
        go.onclick = () => sendResults(this);
        this.toolBox.append(go);
      }
    });
  }

  figures(how) {
    const count = this.usage?.completion_tokens;
    const parts = [];
    if (count) parts.push(count === 1 ? "1 token" : `${count} tokens`);
    const spent = (performance.now() - this.first) / 1000;
    if (count > this.tokensAtFirst) parts.push(`${Math.round((count - this.tokensAtFirst) / spent)} tokens/s`);
    if (this.first !== null) parts.push(`first after ${seconds(this.first - this.asked)}`);
    if (how) parts.push(how);
    else if (this.reason === "length") parts.push("cut off at max tokens");
    return parts.join(" · ");
  }

  /** What the model will be told that it said. */
  message() {
    const message = { role: "assistant", content: this.text };
    if (this.calls.length)
      message.tool_calls = this.calls.map(({ id, name, arguments: text }) => ({
        id, type: "function", function: { name, arguments: text },
      }));
    return message;
  }
}

function seconds(milliseconds) {
  return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;
}

/** What the reader has set, once it can be sent; else null, and the reader is told what is wrong. */
function readParameters() {
  document.querySelectorAll(".failure").forEach((each) => each.remove());
  try {
    return parameters();
  } catch (error) {
    add(element("li", { className: "failure", role: "alert" }, error.message));
    return null;
  }
}

/** Ask for an answer to the conversation as it is. */
async function answer({ system, ...body }) {
  const messages = system ? [{ role: "system", content: system }, ...conversation] : conversation;
  const controller = new AbortController();
  const shown = new Answer();
  document.querySelectorAll(".again, .results").forEach((button) => button.remove());
  add(shown.node);
  setBusy(controller);
  // The button that was pressed may be gone; whoever goes on by keyboard goes on from here.
  if (document.activeElement === document.body || !document.activeElement.checkVisibility()) scroll.focus({ preventScroll: true });
  say("The model answers.");
  let how = "";
  try {
    const response = await call("v1/chat/completions", {
      body: { model: byId("model").value || undefined, messages, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true }, ...body },
      signal: controller.signal,
    });
    for await (const chunk of events(response)) shown.take(chunk);
    if (!shown.reason) how = "the stream broke off";
  } catch (error) {
    how = controller.signal.aborted ? "stopped" : error.message;
  }
  if (running === controller) setBusy(null);
  if (!shown.node.isConnected) return;
  shown.end(how);
  if (how && how !== "stopped") shown.foot.classList.add("error");
  conversation.push(shown.message());
  say(how === "stopped" ? "Stopped." : how ? `It failed: ${how}` : "The answer is complete.");
}

/** Ask a question; false if what is set beside it cannot be sent. */
function send(text) {
  const extra = readParameters();
  if (!extra) return false;
  conversation.push({ role: "user", content: text });
  add(element("li", { className: "question" }, element("h3", { className: "hidden" }, "Question"), element("div", {}, text)));
  answer(extra);
  return true;
}

/** Drop the last answer and ask for another. */
function tryAgain() {
  const extra = readParameters();
  if (running || !extra) return;
  conversation.pop();
  list.lastElementChild.remove();
  answer(extra);
}

function sendResults(shown) {
  const extra = readParameters();
  if (running || !extra) return;
  for (const each of shown.calls) {
    conversation.push({ role: "tool", tool_call_id: each.id, content: each.result.value });
    each.result.readOnly = true;
  }
  answer(extra);
}

function stop() {
  running?.abort();
}

function fit() {
  question.style.height = "auto";
  question.style.height = `${Math.min(question.scrollHeight, innerHeight * 0.4)}px`;
}

/** Set the chat going. */
export function startChat() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = question.value.trim();
    if (!text || running || !send(text)) return;
    question.value = "";
    fit();
  });
  question.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("composer").requestSubmit();
    }
  });
  question.addEventListener("input", fit);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running) stop();
  });
  byId("stop").addEventListener("click", () => {
    stop();
    question.focus();
  });
  byId("new-chat").addEventListener("click", () => {
    stop();
    conversation = [];
    list.replaceChildren();
    byId("welcome").hidden = false;
    say("A new conversation.");
    question.focus();
  });
  for (const [idea, isHard] of IDEAS) {
    const button = element("button", { type: "button" }, idea);
    button.onclick = () => {
      setThinking(isHard);
      send(idea);
    };
    byId("ideas").append(button);
  }
  byId("address").textContent = new URL("v1", location.href).href;
}
