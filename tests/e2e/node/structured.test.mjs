// Structured output through the `openai` and `ai` packages; test_node_clients.py runs this. URL: the server's address.

import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const { URL: url } = process.env;
const MODEL = "pagewire-demo";
const QUESTION = "What is the capital of France?";
const City = z.object({ name: z.enum(["Paris", "Rome", "Oslo"]), is_capital: z.boolean() });

test("openai: parse", async () => {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  const messages = [{ role: "user", content: QUESTION }];
  const format = zodResponseFormat(City, "city");
  const answer = await client.chat.completions.parse({ model: MODEL, messages, temperature: 0, response_format: format });
  assert.ok(City.safeParse(answer.choices[0].message.parsed).success);
});

const settings = { name: "pagewire", baseURL: `${url}/v1`, supportsStructuredOutputs: true };

test("ai: records", async () => {
  const schema = z.object({ known: z.partialRecord(z.enum(["Paris", "Rome"]), z.boolean()), more: z.record(z.string(), z.literal("yes")) });
  const request = { model: createOpenAICompatible(settings)(MODEL), prompt: QUESTION, temperature: 1, seed: 1, maxRetries: 0, maxOutputTokens: 2000 };
  const { output } = await generateText({ ...request, output: Output.object({ schema }) });
  assert.ok(schema.safeParse(output).success);
});

test("ai: a tool with a record beside a format", async () => {
  const note = tool({ description: "Keep notes", inputSchema: z.object({ notes: z.record(z.string(), z.any()) }) });
  const request = { model: createOpenAICompatible(settings)(MODEL), prompt: QUESTION, temperature: 0, maxRetries: 0, tools: { note } };
  const { content } = await generateText({ ...request, output: Output.object({ schema: City }) });
  assert.ok(content.length > 0);
});

test("ai: an object, plain and streamed", async () => {
  const model = createOpenAICompatible(settings)(MODEL);
  const request = { model, prompt: QUESTION, temperature: 0, maxRetries: 0, output: Output.object({ schema: City }) };
  const { output } = await generateText(request);
  assert.ok(City.safeParse(output).success);
  assert.deepEqual(await streamText(request).output, output);
});
