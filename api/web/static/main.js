// Puts the page together: models, key, views, keyboard.

import { Chat, copy } from "./chat.js";
import { startEngine } from "./engine.js";
import { startParameters } from "./parameters.js";
import { askForKeysWith, request } from "./server.js";
import { showAlternatives } from "./tokens.js";

const element = (id) => document.getElementById(id);

// ── views: on a small screen one at a time, on a wide one all ───────────────────────────────────────────────────────

function showView(name) {
  document.body.dataset.view = name;
  for (const button of document.querySelectorAll("nav button")) {
    button.setAttribute("aria-pressed", String(button.dataset.view === name));
  }
}

document.querySelector("nav").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button) showView(button.dataset.view);
});

// ── the key ──────────────────────────────────────────────────────────────────────────────────────────────────────────

askForKeysWith(
  (wasRefused) =>
    new Promise((resolve) => {
      const dialog = element("key-dialog");
      const form = dialog.querySelector("form");
      const input = element("key");
      element("key-refused").hidden = !wasRefused;
      input.value = "";
      let key = null;
      form.onsubmit = (event) => {
        event.preventDefault();
        key = input.value.trim();
        dialog.close();
      };
      dialog.onclose = () => resolve(key);
      dialog.showModal();
    }),
);

// ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────

const parameters = startParameters(element("parameters-form"));
const chat = new Chat(
  {
    scroller: element("conversation"),
    list: element("messages"),
    welcome: element("welcome"),
    form: element("composer"),
    prompt: element("prompt"),
    send: element("send"),
    template: element("message-template"),
  },
  { model: () => element("model").value, parameters },
);
element("parameters-form").addEventListener("parameters", () => chat.draw());
element("parameters-form").addEventListener("wrong", () => showView("parameters"));
element("new").addEventListener("click", () => chat.clear());
element("curl").addEventListener("click", (event) => {
  if (parameters.check()) copy(chat.curl(), event.currentTarget);
});
element("help-button").addEventListener("click", () => element("help").showModal());
showAlternatives(element("conversation"), element("alternatives"));

let cards = []; // of the models

async function loadModels() {
  const response = await request("v1/models");
  cards = (await response.json()).data;
  const select = element("model");
  if (cards.length !== select.length || cards.some(({ id }, i) => id !== select.options[i].value)) {
    const chosen = select.value;
    select.replaceChildren(...cards.map(({ id }) => new Option(id, id, false, id === chosen)));
  }
  // One of several models has a state. The list may be open, so its entries stay.
  cards.forEach(({ id, state, progress }, i) => {
    const share = progress === undefined ? "" : ` ${Math.floor(100 * progress)} %`;
    select.options[i].text = state ? `${id} · ${state}${share}` : id;
  });
  showContext();
}

async function loadVersion() {
  const about = await request("version");
  element("version").textContent = (await about.json()).version;
}

function showContext() {
  const card = cards.find(({ id }) => id === element("model").value);
  const length = card?.max_model_len;
  element("context").textContent = length ? `${length.toLocaleString("en")} tokens of context` : "";
  document.title = card ? `${card.id} · pagewire` : "pagewire";
}

element("model").addEventListener("change", showContext);

let isLoading = false;
let hadTrouble = false;
startEngine(element("engine"), (trouble) => {
  element("status").dataset.state = trouble ? "trouble" : "well";
  const text = trouble ?? "Ready";
  if (element("status-text").textContent !== text) element("status-text").textContent = text;
  const mayChange = hadTrouble || !cards.length || cards.some(({ state }) => state); // it may serve another model by now
  if (!trouble && mayChange && !isLoading) load();
  hadTrouble = trouble !== null;
});

async function load() {
  isLoading = true;
  await Promise.all([loadModels(), loadVersion()]).catch(() => {}); // the status says what is wrong; the next look at the engine tries again
  isLoading = false;
}

load();

// ── keyboard ─────────────────────────────────────────────────────────────────────────────────────────────────────────

const VIEWS = { 1: "chat", 2: "parameters", 3: "engine" };

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    chat.stop();
    return;
  }
  const isTyping = event.target.closest("textarea, select, input:not([type=checkbox], [type=range])");
  if (isTyping) return;
  const actions = {
    "/": () => {
      showView("chat");
      element("prompt").focus();
    },
    n: () => {
      showView("chat");
      chat.clear();
    },
    c: () => parameters.toggleColours(),
    t: () => element("theme").click(),
    "?": () => element("help").showModal(),
  };
  const action = VIEWS[event.key] ? () => showView(VIEWS[event.key]) : actions[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});

showView("chat");
if (matchMedia("(hover: hover)").matches) element("prompt").focus(); // on a phone this would open the keyboard
