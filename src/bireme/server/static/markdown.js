// The part of Markdown that models write, as elements: nothing in it is ever taken for markup.

import { element } from "./dom.js";

const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|__(.+?)__|\*([^\s*](?:[^*]*[^\s*])?)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/s;
const ITEM = /^(\s*)([-*+]|\d+[.)])\s+(.*)$/;

function inline(text) {
  const nodes = [];
  for (let match; (match = INLINE.exec(text)); text = text.slice(match.index + match[0].length)) {
    const [, , code, bold, strong, slanted, label, url] = match;
    if (match.index) nodes.push(text.slice(0, match.index));
    if (code !== undefined) nodes.push(element("code", {}, code));
    else if (label !== undefined)
      nodes.push(element("a", { href: url, target: "_blank", rel: "noopener noreferrer" }, label));
    else if (slanted !== undefined) nodes.push(element("em", {}, ...inline(slanted)));
    else nodes.push(element("strong", {}, ...inline(bold ?? strong)));
  }
  if (text) nodes.push(text);
  return nodes;
}

function codeBlock(lines, language) {
  const text = lines.join("\n");
  const copy = element("button", { type: "button", className: "copy" }, "Copy");
  copy.onclick = () => copyText(text, copy);
  const bar = element("div", { className: "bar" }, element("span", {}, language || "text"), copy);
  return element("div", { className: "code" }, bar, element("pre", { tabIndex: 0 }, element("code", {}, text)));
}

function table(lines) {
  const cells = (line) => line.replace(/^\s*\||\|\s*$/g, "").split("|").map((cell) => inline(cell.trim()));
  const row = (tag, line) => element("tr", {}, ...cells(line).map((cell) => element(tag, {}, ...cell)));
  const head = element("thead", {}, row("th", lines[0]));
  const body = element("tbody", {}, ...lines.slice(2).map((line) => row("td", line)));
  return element("div", { className: "table" }, element("table", {}, head, body));
}

function list(lines) {
  const indents = [];
  const lists = [];
  for (const line of lines) {
    const [, space, mark, text] = ITEM.exec(line);
    while (indents.length > 1 && space.length < indents.at(-1)) {
      indents.pop();
      lists.pop();
    }
    if (!indents.length || space.length > indents.at(-1) + 1) {
      const made = /\d/.test(mark) ? element("ol", { start: parseInt(mark) }) : element("ul");
      if (lists.length) lists.at(-1).lastChild.append(made);
      indents.push(space.length);
      lists.push(made);
    }
    lists.at(-1).append(element("li", {}, ...inline(text)));
  }
  return lists[0];
}

/** The blocks of `text`, as elements. An unfinished block is shown as far as it goes. */
export function blocks(text) {
  const lines = text.split("\n");
  const found = [];
  let at = 0;
  const take = (test) => {
    const from = at;
    while (at < lines.length && test(lines[at], at - from)) at++;
    return lines.slice(from, at);
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = /^\s*```(\S*)/.exec(line);
    const heading = /^(#{1,6})\s+(.*)$/.exec(line);
    if (!line.trim()) at++;
    else if (fence) {
      at++;
      found.push(codeBlock(take((each) => !/^\s*```\s*$/.test(each)), fence[1]));
      at++;
    } else if (heading) {
      at++;
      found.push(element(`h${Math.min(6, heading[1].length + 2)}`, {}, ...inline(heading[2])));
    } else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) {
      at++;
      found.push(element("hr"));
    } else if (line.includes("|") && /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)+\|?\s*$/.test(lines[at + 1] ?? "")) {
      found.push(table(take((each) => each.includes("|"))));
    } else if (ITEM.test(line)) found.push(list(take((each) => ITEM.test(each))));
    else if (line.startsWith(">"))
      found.push(element("blockquote", {}, ...blocks(take((each) => each.startsWith(">")).map((each) => each.replace(/^>\s?/, "")).join("\n"))));
    else {
      const words = take((each, index) => !index || (each.trim() && !/^\s*```|^#{1,6}\s/.test(each) && !ITEM.test(each)));
      found.push(element("p", {}, ...inline(words.join("\n"))));
    }
  }
  return found;
}

/** Put `text` on the clipboard and say so on `button`. */
export async function copyText(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => (button.textContent = before), 1500);
}
