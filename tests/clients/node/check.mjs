// What the official JavaScript client and the Vercel AI SDK make of our answers, as one JSON object.
import OpenAI from "openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, streamText, tool } from "ai";

const client = new OpenAI({ maxRetries: 0 });
const seen = {};
const hi = [{ role: "user", content: "Hi" }];
const ask = [{ role: "user", content: "How is the weather?" }];
const parameters = { type: "object", properties: { city: { type: "string" } } };
const tools = [{ type: "function", function: { name: "weather", parameters } }];

const whole = await client.chat.completions.create({ model: "toy", messages: hi });
seen.whole = whole.choices[0].message.content;

const stream = client.chat.completions.stream({
  model: "toy", messages: hi, n: 2, stream_options: { include_usage: true },
});
const final = await stream.finalChatCompletion();
seen.streamed = final.choices.map((choice) => choice.message.content);
seen.usage = final.usage.completion_tokens;

const called = await client.chat.completions.stream({ model: "toy", messages: ask, tools }).finalChatCompletion();
seen.calls = called.choices[0].message.tool_calls.map((call) => [call.function.name, call.function.arguments]);
seen.finish = called.choices[0].finish_reason;

try {
  await client.chat.completions.create({ model: "other", messages: hi });
} catch (error) {
  seen.error = [error.status, error.code, error.param];
}
try {
  const broken = await client.chat.completions.create({
    model: "toy", messages: [{ role: "user", content: "break now" }], stream: true,
  });
  for await (const _ of broken);
} catch (error) {
  seen.broken = error.message;
}
const response = await client.responses.create({ model: "toy", input: "Hi" });
seen.response = response.output_text;

const provider = createOpenAICompatible({
  name: "breakeven", baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY, includeUsage: true,
});
const model = provider("toy");
const aiTools = { weather: tool({ description: "Weather", inputSchema: jsonSchema(parameters) }) };
seen.aiWhole = (await generateText({ model, prompt: "Hi", maxRetries: 0 })).text;
const aiStream = streamText({ model, prompt: "Hi", maxRetries: 0 });
seen.aiStreamed = "";
for await (const part of aiStream.textStream) seen.aiStreamed += part;
seen.aiUsage = (await aiStream.usage).outputTokens;
const aiCalled = streamText({ model, prompt: "How is the weather?", tools: aiTools, maxRetries: 0 });
await aiCalled.consumeStream();
seen.aiCalls = (await aiCalled.toolCalls).map((call) => [call.toolName, call.input.city]);
seen.aiFinish = await aiCalled.finishReason;
try {
  await generateText({ model: provider("other"), prompt: "Hi", maxRetries: 0 });
} catch (error) {
  seen.aiError = [error.statusCode, error.message.slice(0, 40)];
}
console.log(JSON.stringify(seen));
