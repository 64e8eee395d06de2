// The files beside this one.

const read = new Map();

/** A file beside this one, read once; `count` is told how many bytes came. */
export async function file(name, count = () => {}) {
  if (!read.has(name)) {
    const content = bytes(new URL(name, import.meta.url), count);
    read.set(name, content);
    content.catch(() => read.delete(name)); // it may be there the next time
  }
  return read.get(name);
}

/** What is at an address. */
export async function bytes(address, count = () => {}) {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error(`${address.pathname.split("/").pop()} could not be read (${answer.status})`);
  const parts = [];
  for (const reader = answer.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) return new Blob(parts).arrayBuffer();
    count(value.length);
    parts.push(value);
  }
}
