// The `openai` and `ai` packages against a real server; test_node_clients.py runs this. URL: the server's address.

import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const { URL: url } = process.env;
const MODEL = "pagewire-demo";
const QUESTION = "Count from 1 to 5";
const ANSWER = "1, 2, 3, 4, 5";
const WEATHER = "What is the weather in Paris?";
const request = { model: MODEL, messages: [{ role: "user", content: QUESTION }], temperature: 0 };

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const model = createOpenAICompatible({ name: "pagewire", baseURL: `${url}/v1`, includeUsage: true })(MODEL);

test("openai: an answer, its usage and its id", async () => {
  const answer = await client.chat.completions.create(request);
  assert.equal(answer.choices[0].message.content, ANSWER);
  assert.ok(answer.usage.completion_tokens > 10 && answer._request_id);
  assert.deepEqual((await client.models.list()).data.map(({ id }) => id), [MODEL]);
});

test("openai: a stream, raw and through its helper", async () => {
  let text = "";
  for await (const chunk of await client.chat.completions.create({ ...request, stream: true }))
    text += chunk.choices[0].delta.content ?? "";
  assert.equal(text, ANSWER);
  assert.equal(await client.chat.completions.stream(request).finalContent(), ANSWER);
});

test("openai: a stream that is left early is aborted", async () => {
  const stream = await client.chat.completions.create({ ...request, stream: true, ignore_eos: true });
  for await (const _ of stream) break;
  assert.ok(stream.controller.signal.aborted);
});

test("openai: completions", async () => {
  const answer = await client.completions.create({ model: MODEL, prompt: [[40, 50, 60], [7]], max_tokens: 4, temperature: 0 });
  assert.deepEqual(answer.choices.map(({ index }) => index), [0, 1]);
});

test("openai: a tool, run by its helper", async () => {
  const cities = [];
  const weather = {
    type: "function",
    function: {
      name: "get_weather",
      description: "Get the weather of a city",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
      parse: JSON.parse,
      function: ({ city }) => {
        cities.push(city);
        return "sunny";
      },
    },
  };
  const messages = [{ role: "user", content: WEATHER }];
  const options = { maxChatCompletions: 2 };
  await client.chat.completions.runTools({ ...request, messages, tools: [weather], stream: true }, options).done();
  assert.equal(cities[0], "Paris");
});

test("openai: responses", async () => {
  const question = { model: MODEL, input: QUESTION, temperature: 0 };
  const response = await client.responses.create(question);
  assert.equal(response.output_text, ANSWER);
  assert.equal((await client.responses.stream(question).finalResponse()).output_text, ANSWER);
  await client.responses.delete(response.id);
  await assert.rejects(client.responses.retrieve(response.id), OpenAI.NotFoundError);
});

test("openai: errors have its types and name the field", async () => {
  await assert.rejects(client.chat.completions.create({ ...request, temperature: 9 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError && error.param === "temperature");
    return true;
  });
  await assert.rejects(client.chat.completions.create({ ...request, model: "gpt-4" }), { code: "model_not_found" });
});

test("ai: an answer and a stream", async () => {
  const settings = { model, prompt: QUESTION, temperature: 0, maxRetries: 0 };
  const answer = await generateText(settings);
  assert.equal(answer.text, ANSWER);
  assert.equal(answer.finishReason, "stop");
  const stream = streamText(settings);
  const pieces = [];
  for await (const piece of stream.textStream) pieces.push(piece);
  assert.equal(pieces.join(""), ANSWER);
  assert.equal((await stream.usage).outputTokens, answer.usage.outputTokens);
});

test("ai: tools, plain and streamed", async () => {
  const cities = [];
  const get_weather = tool({
    description: "Get the weather of a city",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      cities.push(city);
      return "sunny";
    },
  });
  const settings = { model, prompt: WEATHER, temperature: 0, tools: { get_weather }, stopWhen: stepCountIs(2), maxRetries: 0 };
  await generateText(settings);
  await streamText(settings).consumeStream();
  assert.deepEqual([cities[0], cities.at(-1)], ["Paris", "Paris"]);
});

test("ai: the error message of the server arrives", async () => {
  await assert.rejects(generateText({ model, prompt: "word ".repeat(20000), maxRetries: 0 }), /maximum context length/);
});
