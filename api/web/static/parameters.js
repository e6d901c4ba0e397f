// The form beside the chat: what is sent with every request. A field left empty is not sent, so the server's or the
// model's own default holds.

const STORED = "pagewire.parameters"; // in localStorage

const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05, slider: 1, hint: "0 always takes the likeliest token." }],
  ["top_p", "Top-p", { min: 0.01, max: 1, step: 0.01, slider: 1, hint: "Draw from the likeliest tokens that make up this share." }],
  ["max_completion_tokens", "Max tokens", { min: 1, step: 1, hint: "Of the answer. Empty: what the context leaves." }],
  ["seed", "Seed", { step: 1, hint: "The same seed gives the same answer." }],
];
const MORE_NUMBERS = [
  ["top_k", "Top-k", { min: 0, step: 1, hint: "Draw from so many of the likeliest tokens. 0: all." }],
  ["min_p", "Min-p", { min: 0, max: 1, step: 0.01, hint: "Leave out what is less likely than this share of the likeliest." }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1, hint: "Against tokens that were there already." }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1, hint: "Against tokens, for each time they were there." }],
  ["repetition_penalty", "Repetition penalty", { min: 0.01, max: 100, step: 0.01, hint: "1: none." }],
];

/** Fills `form` with the fields. Returns the object through which the chat reads them. */
export function startParameters(form) {
  const element = (id) => form.querySelector(`#${id}`);
  const remembered = recall();
  element("numbers").append(...NUMBERS.map(numberRow));
  element("more-numbers").append(...MORE_NUMBERS.map(numberRow));

  const inputs = [...form.querySelectorAll("[name]")];
  for (const input of inputs) {
    const value = remembered[input.name];
    if (input.type === "checkbox") input.checked = value ?? input.defaultChecked;
    else if (typeof value === "string") input.value = value;
    follow(input);
  }

  const changed = () => {
    checkExtra(form.elements.extra);
    const values = inputs.map((input) => [input.name, input.type === "checkbox" ? input.checked : input.value]);
    localStorage.setItem(STORED, JSON.stringify(Object.fromEntries(values)));
    const isSet = ([name]) => form.elements[name].value !== "";
    element("more-count").textContent = MORE_NUMBERS.filter(isSet).length || "";
    form.dispatchEvent(new CustomEvent("parameters"));
  };
  form.addEventListener("input", changed);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () =>
    queueMicrotask(() => {
      inputs.forEach(follow);
      changed();
    }),
  );
  changed();

  return {
    /** Whether all fields can be sent; otherwise the reader is shown the first that cannot. */
    check() {
      const wrong = inputs.find((input) => !input.checkValidity());
      if (!wrong) return true;
      wrong.closest("details")?.setAttribute("open", "");
      form.dispatchEvent(new CustomEvent("wrong"));
      wrong.reportValidity();
      return false;
    },
    /** The fields of a chat request besides model and messages. */
    fields() {
      const fields = {};
      for (const [name] of [...NUMBERS, ...MORE_NUMBERS]) {
        if (form.elements[name].value !== "") fields[name] = Number(form.elements[name].value);
      }
      const stop = form.elements.stop.value.split("\n").filter(Boolean);
      if (stop.length) fields.stop = stop.map((text) => text.replaceAll("\\n", "\n"));
      if (form.elements.logprobs.checked) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
      return { ...fields, ...JSON.parse(form.elements.extra.value.trim() || "{}") };
    },
    get system() {
      return form.elements.system.value.trim();
    },
    get formatted() {
      return form.elements.formatted.checked;
    },
    get coloured() {
      return form.elements.logprobs.checked;
    },
    toggleColours() {
      form.elements.logprobs.click();
    },
  };
}

function recall() {
  try {
    const values = JSON.parse(localStorage.getItem(STORED));
    return values && typeof values === "object" ? values : {};
  } catch {
    return {}; // written by another version of this page, or by hand
  }
}

function checkExtra(input) {
  let complaint = "";
  try {
    const value = JSON.parse(input.value.trim() || "{}");
    if (typeof value !== "object" || value === null || Array.isArray(value)) complaint = "This must be a JSON object.";
  } catch (error) {
    complaint = `This is no JSON: ${error.message}`;
  }
  input.setCustomValidity(complaint);
  input.setAttribute("aria-invalid", String(Boolean(complaint)));
}

/** Label, number and, for `slider`, a range that stands at `slider` while nothing is set. */
function numberRow([name, label, { slider, hint, ...limits }]) {
  const row = document.createElement("div");
  row.className = "row";
  const caption = document.createElement("label");
  caption.textContent = label;
  caption.htmlFor = `field-${name}`;
  const help = document.createElement("small");
  help.textContent = hint;
  help.id = `hint-${name}`;
  const number = document.createElement("input");
  Object.assign(number, { type: "number", name, id: `field-${name}`, placeholder: "default", ...limits });
  number.step = limits.step === 1 ? 1 : "any";
  number.setAttribute("aria-describedby", help.id);
  row.append(caption, number);
  if (slider !== undefined) {
    const range = document.createElement("input");
    Object.assign(range, { type: "range", ...limits, defaultValue: slider });
    range.setAttribute("aria-label", `${label}, as a slider`);
    range.addEventListener("input", () => {
      number.value = range.value;
      follow(number);
    });
    number.addEventListener("input", () => follow(number));
    row.append(range);
  }
  row.append(help);
  return row;
}

/** Puts a number's slider, if it has one, where the number is. */
function follow(input) {
  const range = input.parentElement.querySelector("input[type=range]");
  if (!range || input.type !== "number") return;
  range.value = input.value === "" ? range.defaultValue : input.value;
  range.classList.toggle("unset", input.value === "");
}
