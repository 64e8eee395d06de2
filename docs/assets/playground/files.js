// The files beside this one.

const read = new Map();

/** A file beside this one, read once. */
export async function file(name) {
  if (!read.has(name)) {
    const answer = await fetch(new URL(name, import.meta.url));
    if (!answer.ok) throw new Error(`${name} could not be read (${answer.status})`);
    read.set(name, await answer.arrayBuffer());
  }
  return read.get(name);
}
