// The page at docs: what openapi.json says, to read and to try. It knows the part of OpenAPI that api/openapi.py writes.

import { ServerError, apiKey, askForKeysWith, request } from "./server.js";

askForKeysWith(async (wasRefused) => prompt(wasRefused ? "That key was refused. API key:" : "This server needs an API key:"));

const main = document.getElementById("operations");
const trouble = document.getElementById("trouble");
let schemas = {};

/** An element with attributes and children; texts are texts, never HTML. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "data") Object.assign(element.dataset, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

// ── schemas ──────────────────────────────────────────────────────────────────────────────────────────────────────────

function nameOf(reference) {
  return reference.split("/").pop();
}

/** The other possibilities when null is one of them: absent and null are the same here. */
function withoutNull(schema) {
  return (schema.anyOf ?? [schema]).filter((one) => one.type !== "null");
}

/** What a value may be, in a few words. */
function kind(schema) {
  const possible = withoutNull(schema);
  if (possible.length > 1) return possible.map(kind).join(" or ");
  if (possible.length === 0) return "null";
  const [one] = possible;
  if (one.$ref) return nameOf(one.$ref);
  if (one.enum) return one.enum.map((value) => JSON.stringify(value)).join(" or ");
  const type = [one.type].flat().filter((name) => name !== "null")[0];
  if (type === "array") return `list of ${one.items ? kind(one.items) : "anything"}${bounds(one)}`;
  if (type === "object" && one.additionalProperties) return `object of ${kind(one.additionalProperties)}${bounds(one)}`;
  return `${type ?? "anything"}${bounds(one)}`;
}

function bounds(schema) {
  const said = [];
  const { minimum, maximum, exclusiveMinimum } = schema;
  const isWide = (number) => Math.abs(number) >= 2 ** 31 - 1; // a machine's bound, not a rule to know
  if (exclusiveMinimum !== undefined) said.push(`over ${exclusiveMinimum}`);
  if (minimum !== undefined && !isWide(minimum)) said.push(`from ${minimum}`);
  if (maximum !== undefined && !isWide(maximum)) said.push(`to ${maximum}`);
  if (schema.maxItems !== undefined) said.push(`at most ${schema.maxItems}`);
  if (schema.maxProperties !== undefined) said.push(`at most ${schema.maxProperties}`);
  if (schema.maxLength !== undefined) said.push(`at most ${schema.maxLength} characters`);
  return said.length ? ` (${said.join(" ")})` : "";
}

/** The structs that a schema leads to. */
function references(schema) {
  if (!schema) return [];
  if (schema.$ref) return [nameOf(schema.$ref)];
  return [...(schema.anyOf ?? []), schema.items, schema.additionalProperties].flatMap(references);
}

/** The fields of a struct; those that are structs themselves open. */
function fields(struct) {
  const { properties = {}, required = [], description } = schemas[struct];
  const list = make("ul", { className: "fields" }, description ? make("p", {}, description) : null);
  for (const [name, schema] of Object.entries(properties)) {
    const line = [make("b", {}, name), " ", make("span", { className: "kind" }, kind(schema))];
    if (required.includes(name)) line.push(make("span", { className: "required" }, " required"));
    const inner = references(schema);
    list.append(make("li", {}, ...(inner.length ? [opening(line, () => inner.map(fields))] : line)));
  }
  return list;
}

/** Something that is made when it is first opened: structs may hold themselves. */
function opening(line, content) {
  const details = make("details", {}, make("summary", {}, ...line));
  details.addEventListener("toggle", () => details.append(...content()), { once: true });
  return details;
}

function shape(schema) {
  const inner = references(schema);
  return inner.length && schema.$ref ? fields(inner[0]) : make("p", {}, make("code", {}, kind(schema)));
}

// ── operations ───────────────────────────────────────────────────────────────────────────────────────────────────────

function described(content, title) {
  return Object.entries(content).flatMap(([type, { schema }]) => [
    make("h3", {}, `${title} `, make("small", {}, type)),
    shape(schema.properties?.data?.contentSchema ?? schema), // of an event, what its data are
  ]);
}

/** A form that sends the request, and what comes back as it comes. */
function attempt(method, path, operation) {
  const inPath = (operation.parameters ?? []).filter((parameter) => parameter.in === "path");
  const places = inPath.map(({ name }) => [name, make("input", { name, required: true })]);
  const body = operation.requestBody?.content["application/json"];
  const sent = body && make("textarea", { className: "sent", spellcheck: false, ariaLabel: "Body" });
  if (body) {
    sent.value = JSON.stringify(body.example ?? {}, null, 2);
    sent.rows = sent.value.split("\n").length;
  }
  const received = make("pre", { className: "received", tabIndex: 0 });
  const button = make("button", { className: "primary", type: "submit" }, "Send");
  const curl = make("button", { type: "button" }, "Copy as curl");
  const form = make(
    "form",
    { className: "try" },
    ...places.map(([name, input]) => make("label", {}, make("code", {}, name), input)),
    sent ?? null,
    make("div", { className: "actions" }, button, curl),
    received,
  );
  const address = () => places.reduce((at, [name, input]) => at.replace(`{${name}}`, encodeURIComponent(input.value)), path.slice(1));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    received.dataset.state = "";
    received.textContent = "";
    try {
      const options = sent ? { body: sent.value, headers: { "Content-Type": "application/json" } } : {};
      await show(await request(address(), { method: method.toUpperCase(), ...options }), received);
    } catch (error) {
      received.dataset.state = "trouble";
      received.textContent = error instanceof ServerError ? `${error.status || ""} ${error.message}`.trim() : String(error);
    } finally {
      button.disabled = false;
    }
  });
  curl.addEventListener("click", () => {
    const parts = [`curl -X ${method.toUpperCase()} ${new URL(address(), document.baseURI)}`];
    if (apiKey()) parts.push(`-H "Authorization: Bearer $PAGEWIRE_API_KEY"`);
    if (sent) parts.push(`-H 'Content-Type: application/json'`, `-d '${sent.value.replaceAll("'", "'\\''")}'`);
    navigator.clipboard.writeText(parts.join(" \\\n  "));
  });
  return form;
}

async function show(response, received) {
  if (response.headers.get("content-type").startsWith("application/json")) {
    received.textContent = JSON.stringify(await response.json(), null, 2);
    return;
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    received.append(value);
  }
}

function card(path, method, operation) {
  const success = operation.responses["200"];
  const content = () => [
    make(
      "div",
      {},
      ...(operation.requestBody && !operation.requestBody.content["application/json"]
        ? [] // a form with a file: for curl
        : [make("h3", {}, "Try it"), attempt(method, path, operation)]),
      ...(operation.requestBody ? described(operation.requestBody.content, "Body") : []),
      ...described(success.content, "Answer"),
      make("p", {}, make("small", {}, success.description)),
    ),
  ];
  const line = [
    make("span", { className: "method", data: { method } }, method.toUpperCase()),
    make("code", {}, path),
    make("small", {}, operation.summary),
  ];
  const details = opening(line, content);
  details.className = "operation";
  details.id = operation.operationId;
  details.addEventListener("toggle", () => details.open && history.replaceState(null, "", `#${details.id}`));
  return details;
}

try {
  const description = await (await request("openapi.json")).json();
  schemas = description.components.schemas;
  document.getElementById("version").textContent = description.info.version;
  for (const { name } of description.tags) {
    const section = make("section", {}, make("h2", {}, name));
    for (const [path, methods] of Object.entries(description.paths))
      for (const [method, operation] of Object.entries(methods))
        if (operation.tags.includes(name)) section.append(card(path, method, operation));
    main.append(section);
  }
  trouble.remove();
  const wanted = document.getElementById(location.hash.slice(1));
  if (wanted?.matches("details")) wanted.open = true;
  wanted?.scrollIntoView();
} catch (error) {
  trouble.textContent = error.message;
}
