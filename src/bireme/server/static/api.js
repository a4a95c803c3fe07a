// Calls to the server that this page came from. The key is in sessionStorage and nowhere else.

const KEY = "bireme-api-key";
const dialog = document.getElementById("key-dialog");
dialog.addEventListener("cancel", (event) => event.preventDefault());
let asking = null;

/** Ask for a key, once however many calls need one. */
function askForKey(wasWrong) {
  asking ??= new Promise((resolve) => {
    const input = document.getElementById("key");
    document.getElementById("key-why").textContent = wasWrong
      ? "The server does not know that key."
      : "It is kept in this tab only, until you close it.";
    input.value = "";
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEY, input.value.trim());
      input.value = "";
      asking = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

/** GET `path`, or POST `body` to it as JSON; an error response is thrown as an Error with the server's words. */
export async function call(path, { body, signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = {};
    if (key) headers.authorization = `Bearer ${key}`;
    if (body) headers["content-type"] = "application/json";
    const response = await fetch(path, {
      method: body ? "POST" : "GET",
      headers,
      body: body && JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
    });
    if (response.status === 401) {
      if (sessionStorage.getItem(KEY) === key) await askForKey(key !== null);
      continue;
    }
    if (!response.ok) throw new Error(await words(response));
    return response;
  }
}

async function words(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

/** The values of a stream of server-sent events, up to its [DONE] or its end. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const frames = (text + value).split("\n\n");
      text = frames.pop();
      for (const frame of frames) {
        if (!frame.startsWith("data: ")) continue;
        const data = frame.slice(6);
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
