// What the reader sets beside the question.

import { byId } from "./dom.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];

/** The fields of a request that are set, and `system`; throws an Error in words for what cannot be sent. */
export function parameters() {
  const found = {};
  for (const name of NUMBERS) {
    const input = byId(name);
    if (!input.validity.valid) {
      input.closest("details").open = true;
      input.focus();
      throw new Error(`${input.parentElement.firstChild.textContent.trim()}: ${input.validationMessage}`);
    }
    if (input.value !== "") found[name] = input.valueAsNumber;
  }
  const thinking = byId("thinking").value;
  if (thinking) found.chat_template_kwargs = { enable_thinking: thinking === "on" };
  const system = byId("system").value.trim();
  if (system) found.system = system;
  const tools = byId("tools").value.trim();
  if (tools) {
    try {
      found.tools = JSON.parse(tools);
    } catch (error) {
      throw new Error(`Tools: ${error.message}`);
    }
  }
  return found;
}

/** Say beside the folded parameters how many are set. */
function tellCount() {
  const fields = byId("parameters").querySelectorAll("input, select, textarea");
  const count = [...fields].filter((each) => each.value !== "").length;
  byId("parameters-set").textContent = count ? `${count} set` : "";
}

export function setThinking(isOn) {
  byId("thinking").value = isOn ? "on" : "off";
  tellCount();
}

export function startParameters() {
  byId("parameters").addEventListener("input", tellCount);
}
