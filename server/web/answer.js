// One answer: from its request to its last token.
import { events, request } from "./api.js";

/** Fills the turn with what the server says to `body`, and calls `changed` after each piece. Whatever goes wrong, the
 * turn says it. */
export async function receive(turn, body, signal, changed) {
  const started = performance.now();
  const clock = { first: null, last: null, spoke: null };
  try {
    const streamed = { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    const response = await request("v1/chat/completions", { method: "POST", body: streamed, signal });
    for await (const { data } of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message ?? String(chunk.error));
      take(turn, chunk, clock);
      changed();
    }
  } catch (error) {
    if (error.name === "AbortError") turn.finish = "aborted";
    else turn.error = error.message;
  }
  if (clock.first !== null) turn.ttft = (clock.first - started) / 1000;
  const tokens = turn.usage?.completion_tokens ?? turn.tokens;
  if (tokens > 1 && clock.last > clock.first) turn.rate = (1000 * (tokens - 1)) / (clock.last - clock.first);
  if (turn.reasoning && clock.first !== null) turn.thoughtSeconds = ((clock.spoke ?? clock.last) - clock.first) / 1000;
  turn.state = "done";
}

/** What a chunk adds to the turn. */
function take(turn, chunk, clock) {
  if (chunk.usage) {
    turn.usage = chunk.usage;
    turn.tokens = chunk.usage.completion_tokens;
  }
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const { delta, finish_reason: finish } = choice;
  const thought = delta?.reasoning ?? delta?.reasoning_content ?? "";
  const text = delta?.content ?? "", calls = delta?.tool_calls ?? [];
  if (finish) turn.finish = finish;
  if (!thought && !text && !calls.length) return;
  clock.last = performance.now();
  clock.first ??= clock.last;
  if (!thought) clock.spoke ??= clock.last;
  if (!chunk.usage) turn.tokens += 1;
  turn.reasoning += thought;
  turn.content += text;
  for (const call of calls) {
    const known = (turn.toolCalls[call.index ?? 0] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    known.id ||= call.id ?? "";
    known.function.name += call.function?.name ?? "";
    known.function.arguments += call.function?.arguments ?? "";
  }
}
