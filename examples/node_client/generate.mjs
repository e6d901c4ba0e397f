// node generate.mjs ADDRESS '[1, 2, 3]' [MAX_TOKENS]: prints the ids of a greedy completion as they come.

import { EngineClient } from "./engine_client.mjs";

const [address, prompt, maxTokens = "16"] = process.argv.slice(2);
const client = await EngineClient.connect(address);
console.error(`connected to ${client.facts.model}, context ${client.facts.maxModelLen}`);
for await (const { ids, finish } of client.generate(JSON.parse(prompt), { sampling: [0], maxTokens: +maxTokens })) {
  console.log(JSON.stringify(ids));
  if (finish) console.error(`ended: ${finish}`);
}
await client.close();
