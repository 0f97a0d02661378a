/* The server's API: the model that is served, and answers as they stream. */

async function refusal(response) {
  const told = await response.json().catch(() => null);
  return new Error(told?.error?.message || "the server answered " + response.status);
}

export async function servedModel() {
  const response = await fetch("v1/models");
  if (!response.ok) throw await refusal(response);
  return (await response.json()).data[0];
}

/* The server's figures by name: value(name) of the first sample, or null. */
export async function readMetrics() {
  const response = await fetch("metrics").catch(() => null);
  const text = response?.ok ? await response.text() : "";
  return name => {
    const line = text.split("\n").find(one => one.startsWith(name + "{"));
    return line === undefined ? null : Number(line.slice(line.lastIndexOf(" ") + 1));
  };
}

/* What a server with --learn did so far, or null. */
export async function learningHistory() {
  const response = await fetch("learning").catch(() => null);
  return response?.ok ? response.json() : null;
}

/* The chunks of a chat completion. */
export async function* chunks(body, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    signal,
    body: JSON.stringify({ ...body, stream: true, include_speculation: true }),
  });
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const events = buffer.split("\n\n");
    buffer = events.pop();
    for (const one of events) {
      const data = one.replace(/^data: /, "");
      if (data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}
