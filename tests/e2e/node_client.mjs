// The Node client's part of test_engine_client.py. Arguments: the folder of the client, the engine's address, and a
// JSON array of prompts. Prints one line of JSON.

import { pathToFileURL } from "node:url";

const [folder, address, prompts] = process.argv.slice(2);
const { EngineClient } = await import(pathToFileURL(`${folder}/engine_client.mjs`));
const client = await EngineClient.connect(address, { name: "node-test" });
const found = { facts: client.facts, outputs: [], errors: [] };

const options = { sampling: [0], maxTokens: 24 };
found.outputs = await Promise.all(JSON.parse(prompts).map((prompt) => client.generate(prompt, options).ids()));

const prompt = JSON.parse(prompts)[0];
found.resumed = await client.generate(prompt, { ...options, resumeIds: found.outputs[0].slice(0, 5) }).ids();

for (const [ids, sampling] of [[[client.facts.vocabSize], [0]], [[], [0]], [[1], [NaN]]])
  await client.generate(ids, { sampling }).ids().catch((error) => found.errors.push(error.kind));

const long = client.generate(prompt, { ignoreEos: true });
found.cancelled = { num: 0 };
for await (const { ids, finish } of long) {
  found.cancelled.num += ids.length;
  found.cancelled.finish = finish;
  if (found.cancelled.num > 20) long.cancel();
}
found.snapshot = await client.snapshot();
await client.close();
console.log(JSON.stringify(found));
