// The page's parts, put together: models, the two views of a narrow screen, the chat, the engine.

import { call } from "./api.js";
import { startChat } from "./chat.js";
import { byId, element } from "./dom.js";
import { watchIfSeen } from "./live.js";
import { startParameters } from "./parameters.js";

const TABS = ["chat", "engine"];

function show(name) {
  document.body.dataset.view = name;
  for (const each of TABS) {
    const tab = byId(`${each}-tab`);
    tab.setAttribute("aria-selected", String(each === name));
    tab.tabIndex = each === name ? 0 : -1;
  }
  watchIfSeen();
}

function startTabs() {
  for (const name of TABS) {
    const tab = byId(`${name}-tab`);
    tab.addEventListener("click", () => show(name));
    tab.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = TABS.find((each) => each !== name);
      show(other);
      byId(`${other}-tab`).focus();
    });
  }
  show("chat");
  document.addEventListener("visibilitychange", watchIfSeen);
  addEventListener("resize", watchIfSeen);
}

async function listModels() {
  const { data } = await (await call("v1/models")).json();
  byId("model").replaceChildren(...data.map(({ id }) => element("option", { value: id }, id.split("/").at(-1))));
  document.title = `${byId("model").selectedOptions[0].textContent} · Bireme`;
}

startTabs();
startParameters();
startChat();
listModels().catch((error) => (byId("status").textContent = error.message));
