// Requests to the server that this page came from. Addresses are relative on purpose.

import { events } from "./sse.js";

const KEY = "penstock.key";

export class ApiError extends Error {
  constructor(message, { status = 0, code = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
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

function describe(error) {
  return new ApiError(error?.message ?? "The server gave no reason.", {
    status: Number(error?.code) || 0,
    code: error?.code ?? error?.type ?? null,
  });
}

async function ask(path, { body, signal } = {}) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body ? "POST" : "GET",
      headers,
      body: body && JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server can't be reached. Is it still running?");
  }
  if (response.ok) return response;
  const text = await response.text();
  let error;
  try {
    error = JSON.parse(text).error;
  } catch {
    error = null; // a proxy's page, perhaps
  }
  const message = error?.message ?? `The server answered ${response.status} ${response.statusText}.`;
  throw new ApiError(message, { status: response.status, code: error?.code ?? error?.type ?? null });
}

/** The first model of the server: {id, max_model_len, …}. */
export async function model() {
  const list = await (await ask("v1/models")).json();
  if (!list.data?.length) throw new ApiError("The server has no model.");
  return list.data[0];
}

/**
 * Chunks of a streamed completion, parsed. `path` is "v1/chat/completions" or "v1/completions".
 * Throws ApiError where the server refuses, fails in mid-stream, or breaks off.
 */
export async function* complete(path, body, signal) {
  const request = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await ask(path, { body: request, signal });
  try {
    for await (const { data } of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw describe(chunk.error);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError(`The connection broke: ${error.message}.`);
  }
  throw new ApiError("The connection ended before the reply did.");
}

/** What the engine is doing, some four times a second. */
export async function* engineEvents(signal) {
  const response = await ask("page/events", { signal });
  for await (const { data } of events(response.body)) yield JSON.parse(data);
}
