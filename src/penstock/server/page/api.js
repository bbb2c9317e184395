// Requests to the server that this page came from. Addresses are relative on purpose.

import { events } from "./sse.js";

const KEY = "penstock.key";

/** The server refused or failed; `status` is HTTP's, 0 where there was no answer. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

let key = "";
try {
  key = sessionStorage.getItem(KEY) ?? "";
} catch {
  // Storage is blocked: the key lives as long as this page.
}

export function setKey(value) {
  key = value;
  try {
    sessionStorage.setItem(KEY, value);
  } catch {
    // As above.
  }
}

async function ask(path, body, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const options = { headers, signal, cache: "no-store" };
  if (body) {
    headers["Content-Type"] = "application/json";
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  }
  const response = await fetch(path, options).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server can't be reached. Is it still running?");
  });
  if (response.ok) return response;
  const answer = await response.json().catch(() => null); // a proxy's page isn't JSON
  const message = answer?.error?.message ?? `The server answered ${response.status}.`;
  throw new ApiError(message, response.status);
}

/** The server's models, at least one: {id, max_model_len, …}. */
export async function models() {
  const list = await (await ask("v1/models")).json();
  if (!list.data?.length) throw new ApiError("The server has no model.");
  return list.data;
}

/** Chunks of a streamed completion. Throws where the server refuses, fails, or breaks off. */
export async function* complete(path, body, signal) {
  const request = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await ask(path, request, signal);
  for await (const { data } of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message);
    yield chunk;
  }
  throw new ApiError("The connection ended before the reply did.");
}

/** What a model's engine is doing, some four times a second. */
export async function* engineEvents(model, signal) {
  const response = await ask(`page/events?model=${encodeURIComponent(model)}`, null, signal);
  for await (const { data } of events(response.body)) yield JSON.parse(data);
}
