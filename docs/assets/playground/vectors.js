// Tokens as vectors: numbers drawn from a hash of the text, and a sinusoidal encoding of the position.

export const WIDTH = 32;
const PARTS = { common: 0.6, own: 0.6, position: 0.7 };

/** Query, key and value of each token, as float32 of (heads, tokens, WIDTH / heads). */
export function vectors(tokens, heads) {
  const width = WIDTH / heads;
  const drawn = {};
  for (const role of ["query", "key", "value"]) {
    drawn[role] = new Float32Array(tokens.length * WIDTH);
    tokens.forEach((token, position) => {
      const common = normals(token);
      const own = normals(`${role} of ${token}`);
      for (let channel = 0; channel < WIDTH; channel++) {
        const [head, place] = [Math.floor(channel / width), channel % width];
        drawn[role][(head * tokens.length + position) * width + place] =
          PARTS.common * common[channel] +
          PARTS.own * own[channel] +
          PARTS.position * encoding(position, channel);
      }
    });
  }
  return drawn;
}

/** Sines and cosines, slower from channel to channel: the first head sees near places best. */
function encoding(position, channel) {
  const angle = position / 100 ** ((channel - (channel % 2)) / WIDTH);
  return channel % 2 ? Math.cos(angle) : Math.sin(angle);
}

/** WIDTH standard normal numbers, the same for the same text (Box and Muller). */
function normals(text) {
  const uniform = generator(hash(text));
  return Array.from(
    { length: WIDTH },
    () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform()),
  );
}

/** FNV-1a, 32 bits. */
function hash(text) {
  let state = 0x811c9dc5;
  for (const byte of new TextEncoder().encode(text)) state = Math.imul(state ^ byte, 0x01000193);
  return state >>> 0;
}

/** Uniform numbers from 0 to below 1 (mulberry32). */
function generator(seed) {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}
