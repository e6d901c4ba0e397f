// The conversation: what was said, how it is shown, and the one request that may be under way.

import { render as renderMarkdown } from "./markdown.js";
import { apiKey, events } from "./server.js";
import { perplexity, render as renderTokens, tokensOf } from "./tokens.js";

const STORED = "pagewire.conversation"; // in sessionStorage: it survives a reload and goes with the tab
const PATH = "v1/chat/completions";
const SHORTEST_MS = 50; // of an answer whose speed is told: less says more of this browser than of the server

export class Chat {
  #messages = []; // {role, content, reasoning?, calls?, tokens?, figures?, error?}
  #abort = null; // of the request under way
  #isDrawing = false;

  /** `view`: the elements scroller, list, welcome, form, prompt, send, template. `model`: () → the name to ask for. */
  constructor(view, { model, parameters }) {
    Object.assign(this, { view, model, parameters });
    view.form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.isBusy) this.stop();
      else this.send(view.prompt.value);
    });
    view.prompt.addEventListener("keydown", (event) => this.#onKey(event));
    view.prompt.addEventListener("input", () => this.#fit());
    view.list.addEventListener("click", (event) => this.#onClick(event));
    view.welcome.addEventListener("click", (event) => {
      if (event.target.closest("button")) this.send(event.target.closest("button").textContent);
    });
    try {
      this.#messages = JSON.parse(sessionStorage.getItem(STORED)) ?? [];
    } catch {
      // nothing that this page has written: start anew
    }
    this.draw();
  }

  get isBusy() {
    return this.#abort !== null;
  }

  /** Asks for an answer to `text`. */
  async send(text) {
    if (this.isBusy || !text.trim() || !this.parameters.check()) return;
    this.#messages.push({ role: "user", content: text.trim() });
    this.view.prompt.value = "";
    this.#fit();
    await this.#answer();
  }

  /** Ends the answer under way; what has come of it stays. */
  stop() {
    this.#abort?.abort();
  }

  /** Forgets everything. */
  clear() {
    this.stop();
    this.#messages = [];
    this.draw();
    this.view.prompt.focus();
  }

  /** The body of the request that would be sent now. */
  body() {
    const { system } = this.parameters;
    const said = this.#messages.filter(({ error, content, calls }) => !error || content || calls);
    return {
      model: this.model(),
      messages: [
        ...(system ? [{ role: "system", content: system }] : []),
        ...said.map(({ role, content }) => ({ role, content })),
      ],
      ...this.parameters.fields(),
      stream: true,
      stream_options: { include_usage: true },
    };
  }

  /** The same request for a terminal. */
  curl() {
    const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
    const address = new URL(PATH, document.baseURI).href;
    const key = apiKey() ? ` \\\n    -H "Authorization: Bearer $PAGEWIRE_API_KEY"` : "";
    const body = JSON.stringify(this.body(), null, 2);
    return `curl -N ${quoted(address)} -H 'Content-Type: application/json'${key} \\\n    -d ${quoted(body)}\n`;
  }

  async #answer() {
    const body = this.body();
    const answer = { role: "assistant", content: "" };
    this.#messages.push(answer);
    this.#abort = new AbortController();
    this.draw();
    this.#toEnd(); // whoever has asked wants to see the answer; later the view follows only while it is at the end
    const sent = performance.now();
    const decoder = new TextDecoder();
    let [first, last, usage, finish] = [null, sent, null, null];
    try {
      for await (const event of events(PATH, body, this.#abort.signal)) {
        usage = event.usage ?? usage;
        for (const { index, delta, logprobs, finish_reason } of event.choices) {
          if (index) continue; // more choices than one may be asked for under "other fields"; the page shows the first
          take(answer, delta);
          if (logprobs?.content) (answer.tokens ??= []).push(...tokensOf(logprobs.content, decoder));
          if (delta.content || delta.tool_calls || delta.reasoning || delta.reasoning_content) {
            last = performance.now();
            first ??= last;
          }
          finish = finish_reason ?? finish;
        }
        this.#drawSoon();
      }
    } catch (error) {
      if (error.name === "AbortError") finish = "stopped";
      else answer.error = error.message;
    }
    const wasAtEnd = this.#isAtEnd();
    this.#abort = null;
    answer.figures = figures({ sent, first, last, usage, finish, tokens: answer.tokens });
    this.draw();
    if (wasAtEnd) this.#toEnd();
  }

  // ── drawing ────────────────────────────────────────────────────────────────────────────────────────────────────────

  /** Shows the conversation as it is. Messages that are shown already keep their elements. */
  draw() {
    const { list, welcome, send, template } = this.view;
    while (list.children.length > this.#messages.length) list.lastChild.remove();
    this.#messages.forEach((message, i) => {
      if (list.children[i]?.message !== message) {
        const item = template.content.firstElementChild.cloneNode(true);
        item.message = message;
        if (list.children[i]) list.children[i].replaceWith(item);
        else list.append(item);
      }
      this.#drawMessage(list.children[i], message, this.isBusy && i === this.#messages.length - 1);
    });
    welcome.hidden = this.#messages.length > 0;
    list.setAttribute("aria-busy", String(this.isBusy));
    send.textContent = this.isBusy ? "Stop" : "Send";
    send.classList.toggle("stop", this.isBusy);
    if (!this.isBusy) this.#keep();
  }

  #drawSoon() {
    if (this.#isDrawing) return;
    this.#isDrawing = true;
    const draw = () => {
      this.#isDrawing = false;
      if (this.isBusy) this.#drawLast(); // otherwise the answer has ended and is drawn already
    };
    if (document.hidden) setTimeout(draw, 200); // frames stand still while the tab is not seen
    else requestAnimationFrame(draw);
  }

  #drawLast() {
    if (!this.#messages.length) return; // forgotten while it was answered
    const wasAtEnd = this.#isAtEnd();
    this.#drawMessage(this.view.list.lastElementChild, this.#messages.at(-1), this.isBusy);
    if (wasAtEnd) this.#toEnd();
  }

  #drawMessage(item, message, isGrowing) {
    const part = (name) => item.querySelector(`.${name}`);
    const write = (name, text) => {
      if (part(name).textContent !== text) part(name).textContent = text; // or what is selected would be lost
    };
    item.dataset.role = message.role;
    item.classList.toggle("growing", isGrowing);
    write("who", message.role === "user" ? "You" : "Model");
    part("reasoning").hidden = !message.reasoning;
    write("thoughts", message.reasoning ?? "");
    const mode = this.#modeOf(message);
    const text = part("text");
    if (text.dataset.mode !== mode) text.replaceChildren();
    text.dataset.mode = mode;
    if (mode === "tokens") renderTokens(text, message.tokens, isGrowing ? null : message.content);
    else if (mode === "formatted") renderMarkdown(text, message.content);
    else write("text", message.content);
    part("calls").hidden = !message.calls;
    write("calls", (message.calls ?? []).map(({ name, json }) => `${name}(${json})`).join("\n"));
    part("error").hidden = !message.error;
    write("error", message.error ?? "");
    write("figures", message.figures ?? "");
    part("edit").hidden = message.role !== "user";
    part("again").hidden = message.role === "user";
  }

  /** How a message's text is shown: "raw" is as it came. */
  #modeOf({ role, tokens }) {
    if (role === "user") return "raw";
    if (tokens && this.parameters.coloured) return "tokens";
    return this.parameters.formatted ? "formatted" : "raw";
  }

  #onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.send(this.view.prompt.value);
    } else if (event.key === "ArrowUp" && !this.view.prompt.value && !this.isBusy) {
      const last = this.#messages.findLastIndex(({ role }) => role === "user");
      if (last < 0) return;
      event.preventDefault();
      this.#edit(last);
    }
  }

  async #onClick(event) {
    const button = event.target.closest("button");
    if (!button) return;
    const index = [...this.view.list.children].indexOf(button.closest(".message"));
    if (button.classList.contains("copy")) {
      await copy(this.#messages[index].content, button);
    } else if (this.isBusy) {
      return;
    } else if (button.classList.contains("edit")) {
      this.#edit(index);
    } else if (button.classList.contains("again") && this.parameters.check()) {
      this.#messages.length = index;
      await this.#answer();
    }
  }

  /** Takes a question back into the box, and away what was answered to it. */
  #edit(index) {
    this.view.prompt.value = this.#messages[index].content;
    this.#messages.length = index;
    this.draw();
    this.#fit();
    this.view.prompt.focus();
  }

  #fit() {
    const { prompt } = this.view;
    prompt.style.height = "auto";
    prompt.style.height = `${prompt.scrollHeight}px`;
  }

  #isAtEnd() {
    const { scrollTop, scrollHeight, clientHeight } = this.view.scroller;
    return scrollHeight - scrollTop - clientHeight < 60;
  }

  #toEnd() {
    this.view.scroller.scrollTop = this.view.scroller.scrollHeight;
  }

  #keep() {
    const texts = this.#messages.map(({ tokens, ...rest }) => rest); // tokens with their candidates are too much
    try {
      sessionStorage.setItem(STORED, JSON.stringify(texts));
    } catch {
      // too long to be kept: the conversation goes on without
    }
  }
}

/** Adds a delta to an answer. Servers send reasoning under two names, some of them under both at once. */
function take(answer, delta) {
  answer.content += delta.content ?? "";
  const thought = delta.reasoning ?? delta.reasoning_content;
  if (thought) answer.reasoning = (answer.reasoning ?? "") + thought;
  for (const { index, function: part } of delta.tool_calls ?? []) {
    const call = ((answer.calls ??= [])[index] ??= { name: "", json: "" });
    call.name += part?.name ?? "";
    call.json += part?.arguments ?? "";
  }
}

/** One line about an answer, as this page has seen it. Times in milliseconds. */
function figures({ sent, first, last, usage, finish, tokens }) {
  const parts = [];
  const number = usage?.completion_tokens;
  if (number) parts.push(`${number} token${number === 1 ? "" : "s"}`);
  if (first !== null) parts.push(`first after ${Math.round(first - sent)} ms`);
  if (number > 1 && last - first >= SHORTEST_MS) parts.push(`${Math.round(((number - 1) * 1000) / (last - first))} tokens/s`);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (usage) parts.push(`prompt ${usage.prompt_tokens}${cached ? ` (${cached} cached)` : ""}`);
  if (tokens?.length) parts.push(`perplexity ${perplexity(tokens).toFixed(2)}`);
  if (finish && finish !== "stop") parts.push({ length: "cut at the limit", tool_calls: "tool call" }[finish] ?? finish);
  return parts.join(" · ");
}

/** Copies, and says so on the button for a moment. */
export async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed"; // only pages on https and on this machine may
  }
  setTimeout(() => {
    button.textContent = label;
  }, 1200);
}
