// OpenAI's client for Node, unmodified: node openai.cjs BASE_URL API_KEY MODEL; what it found, as JSON, on standard output.
// Errors appear under the name of the client's class for them.
const OpenAI = require("openai");

const [baseURL, apiKey, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "Name three colours." }];
const greedy = { model, temperature: 0, max_tokens: 12 };

async function failure(call) {
  try {
    await call();
    return null;
  } catch (error) {
    return { kind: error.constructor.name, status: error.status, code: error.code, param: error.param };
  }
}

async function main() {
  const found = {};
  found.models = (await client.models.list()).data.map((each) => each.id);

  const whole = await client.chat.completions.create({ messages, ...greedy });
  found.whole = whole.choices[0];
  found.usage = whole.usage;

  found.chunks = [];
  const options = { stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await client.chat.completions.create({ messages, ...greedy, ...options })) found.chunks.push(chunk);

  const runner = client.chat.completions.stream({ messages, ...greedy, n: 2, logprobs: true, top_logprobs: 2 });
  found.accumulated = await runner.finalChatCompletion();

  found.completion = await client.completions.create({ prompt: "The capital of France is", logprobs: 2, ...greedy });

  const aborted = await client.chat.completions.create({ messages, model, stream: true });
  for await (const _ of aborted) break; // leaving the loop aborts the request

  const schema = { type: "object", properties: { red: { type: "boolean" } }, required: ["red"], additionalProperties: false };
  const format = { type: "json_schema", json_schema: { name: "paint", schema, strict: true } };
  const parsed = await client.chat.completions.parse({ model, messages, temperature: 0, response_format: format });
  found.parsed = JSON.parse(parsed.choices[0].message.content);

  const tools = [{ type: "function", function: { name: "paint", parameters: schema, strict: true } }];
  const asked = { model, messages, temperature: 0, tools, tool_choice: "required", parallel_tool_calls: false };
  found.call = (await client.chat.completions.create(asked)).choices[0];
  found.streamedCall = (await client.chat.completions.stream(asked).finalChatCompletion()).choices[0];

  found.embedding = (await client.embeddings.create({ model, input: "a page table" })).data[0].embedding;
  found.response = (await client.responses.create({ model, input: messages[0].content, temperature: 0, max_output_tokens: 16 })).output_text;
  const stream = client.responses.stream({ model, input: messages[0].content, temperature: 0, max_output_tokens: 16 });
  found.streamedResponse = (await stream.finalResponse()).output_text;

  const file = await client.files.create({ file: await OpenAI.toFile(Buffer.from("{}\n"), "x.jsonl"), purpose: "batch" });
  found.content = await (await client.files.content(file.id)).text();
  found.deleted = (await client.files.delete(file.id)).deleted;

  found.unauthorized = await failure(() => new OpenAI({ baseURL, apiKey: "sk-wrong", maxRetries: 0 }).models.list());
  found.missing = await failure(() => client.chat.completions.create({ messages, ...greedy, model: "gpt-4" }));
  found.invalid = await failure(() => client.chat.completions.create({ messages, ...greedy, temperature: -1 }));
  console.log(JSON.stringify(found));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
