// Requests to the server.

const LONGEST_MS = 60_000; // a response that never arrives would block the page's own requests too

const NOT_ASKED = ["points", "from", "to", "by", "smooth", "q"]; // of an exported page, which has whole curves over steps

/** Returns the response to a request; lists become repeated parameters. */
export async function ask(path, parameters = {}, signal = undefined) {
  if (globalThis.groupaxExport) return exported(path, parameters);
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

/** Returns the address of an image of a run's prompts; in an exported page the image itself. */
export function imageAddress(run, name) {
  if (!globalThis.groupaxExport) return `/api/image?${new URLSearchParams({ run, name })}`;
  return globalThis.groupaxExport.answers[keyOf("image", { run, name })] ?? "data:,";
}

function keyOf(path, asked) {
  const known = Object.entries(asked).filter(([name, value]) => !NOT_ASKED.includes(name) && value !== null && value !== undefined && value !== "");
  return JSON.stringify([path, known.map(([name, value]) => [name, String(value)]).sort()]);
}

/** Returns the answer that an exported page has to a request. */
function exported(path, parameters) {
  const { answers } = globalThis.groupaxExport;
  const answerTo = (asked) => answers[keyOf(path, asked)];
  if (path === "series") {
    const curves = (run) => parameters.name.map((name) => [name, answerTo({ run, name })]).filter(([, curve]) => curve);
    return Object.fromEntries([parameters.run].flat().map((run) => [run, Object.fromEntries(curves(run))]));
  }
  const answer = answerTo(parameters);
  if (answer === undefined) throw new Error("This file does not have it; groupax view shows all of the run.");
  return answer;
}
