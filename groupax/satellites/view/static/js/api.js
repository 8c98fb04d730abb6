// Requests to the server.

const LONGEST_MS = 60_000; // a response that never arrives would block the page's own requests too

/** Returns the response to a request; lists become repeated parameters. */
export async function ask(path, parameters = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value === null || value === undefined || value === "") continue;
    for (const each of Array.isArray(value) ? value : [value]) query.append(name, each);
  }
  const text = query.toString();
  const signals = [AbortSignal.timeout(LONGEST_MS), ...(signal ? [signal] : [])];
  let answer;
  try {
    answer = await fetch(`/api/${path}${text ? `?${text}` : ""}`, { signal: AbortSignal.any(signals) });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Error("groupax view does not answer; is it still running?");
  }
  const content = (answer.headers.get("content-type") ?? "").startsWith("application/json")
    ? await answer.json()
    : { error: (await answer.text()).slice(0, 500) };
  if (!answer.ok) throw Object.assign(new Error(content.error ?? `status ${answer.status}`), { status: answer.status });
  return content;
}
