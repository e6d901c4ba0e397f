// All that the page asks of the server: one place that knows of the API key, of errors and of server-sent events.
// Addresses are relative, so the page also works behind a prefix.

const KEY = "pagewire.api-key"; // in sessionStorage: it goes with the tab

/** What the server, or the way to it, had to say. `status` is 0 when there was no answer. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

let keyDialog = null; // async (wasRefused) → key, or null when the reader closed it
let question = null; // the dialog that is open, if one is: everyone waits for the same answer

export function askForKeysWith(dialog) {
  keyDialog = dialog;
}

/** The key to send, or null. */
export function apiKey() {
  return sessionStorage.getItem(KEY);
}

async function newKey(refused) {
  if (apiKey() !== refused) return; // someone has entered another one meanwhile
  question ??= keyDialog(refused !== null).finally(() => {
    question = null;
  });
  const key = await question;
  if (!key) throw new ServerError("This server needs an API key.", 401);
  sessionStorage.setItem(KEY, key);
}

/** A response with status 200. Asks for a key when one is needed, unless `ask` is false. Throws ServerError. */
export async function request(path, { ask = true, headers = {}, ...options } = {}) {
  for (;;) {
    const key = apiKey();
    let response;
    try {
      response = await fetch(path, {
        cache: "no-store",
        ...options,
        headers: key ? { ...headers, Authorization: `Bearer ${key}` } : headers,
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The server does not answer.");
    }
    if (response.ok) return response;
    if (response.status === 401 && ask) {
      await newKey(key);
      continue;
    }
    const said = await response.json().catch(() => null);
    throw new ServerError(said?.error?.message ?? `The server answered ${response.status}.`, response.status);
  }
}

/** The events of a streamed answer. Throws ServerError when it fails or ends too early. */
export async function* events(path, body, signal) {
  const response = await request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let isWhole = false;
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        throw new ServerError("The connection broke off.");
      });
      if (done && isWhole) return;
      if (done) throw new ServerError("The connection closed before the answer ended.");
      rest += value;
      const blocks = rest.split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const line of blocks.flatMap((block) => block.split(/\r?\n/))) {
        if (!line.startsWith("data:")) continue; // a comment that keeps the connection alive
        const data = line.slice(5).trimStart();
        if (data === "[DONE]") {
          isWhole = true;
          continue; // to the end of the body, so that the connection can be used again
        }
        const event = JSON.parse(data);
        if (event.error) throw new ServerError(event.error.message);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
