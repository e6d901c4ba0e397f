// The `ollama` package against a real server; test_node_clients.py runs this. URL: the server's address.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Ollama } from "ollama";

const client = new Ollama({ host: process.env.URL });
const model = "pagewire-demo";
const options = { temperature: 0 };
const ANSWER = "1, 2, 3, 4, 5";
const messages = [{ role: "user", content: "Count from 1 to 5" }];

test("chat, plain and streamed", async () => {
  const answer = await client.chat({ model, messages, options });
  assert.equal(answer.message.content, ANSWER);
  assert.ok(answer.done && answer.eval_count > 10);
  let text = "";
  let last;
  for await (last of await client.chat({ model, messages, options, stream: true })) text += last.message.content;
  assert.equal(text, ANSWER);
  assert.equal(last.done_reason, "stop");
});

test("generate, and an end by the client", async () => {
  assert.equal((await client.generate({ model, prompt: messages[0].content, options })).response, ANSWER);
  const stream = await client.generate({ model, prompt: "Hello", stream: true });
  for await (const _ of stream) break;
  stream.abort();
});

test("a tool", async () => {
  const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
  const tools = [{ type: "function", function: { name: "get_weather", description: "Get the weather of a city", parameters } }];
  const answer = await client.chat({ model, tools, options, messages: [{ role: "user", content: "What is the weather in Paris?" }] });
  assert.deepEqual(answer.message.tool_calls.map((call) => call.function.arguments), [{ city: "Paris" }]);
});

test("models, vectors and errors", async () => {
  assert.deepEqual((await client.list()).models.map(({ name }) => name), [model]);
  assert.ok((await client.show({ model })).capabilities.includes("tools"));
  assert.equal((await client.embed({ model, input: ["a", "b"] })).embeddings.length, 2);
  await assert.rejects(client.chat({ model: "llama3", messages }), /llama3.*not found/);
});
