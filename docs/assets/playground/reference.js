// Attention as its formula says, in float64: what the graphs are compared with.

/** By name, whether query i may attend key j. */
export const MASKS = {
  none: () => true,
  causal: (i, j) => j <= i,
  window: (i, j) => i - 2 <= j && j <= i,
  band: (i, j) => Math.abs(i - j) <= 2,
  prefix: (i, j) => j <= i || j < 3,
  chunks: (i, j) => j <= i && Math.floor(i / 4) === Math.floor(j / 4),
  future: (i, j) => j > i,
};

/** The output, (heads, length, width), and the weights, (heads, length, length), row after row. */
export function attention({ query, key, value }, { heads, length, mask, scale, softcap }) {
  const width = query.length / heads / length;
  const output = new Float64Array(query.length);
  const weights = new Float64Array(heads * length * length);
  const positions = [...Array(length).keys()];
  for (let head = 0; head < heads; head++) {
    const first = head * length;
    for (const i of positions) {
      const scores = positions.map((j) => {
        if (!MASKS[mask](i, j)) return -Infinity;
        let score = 0;
        for (let e = 0; e < width; e++) score += query[(first + i) * width + e] * key[(first + j) * width + e];
        score *= scale;
        return softcap ? softcap * Math.tanh(score / softcap) : score;
      });
      const highest = Math.max(...scores);
      if (highest === -Infinity) continue; // no key to attend: weights and output stay 0
      const exponentials = scores.map((score) => Math.exp(score - highest));
      const sum = exponentials.reduce((total, term) => total + term, 0);
      for (const j of positions) {
        const weight = exponentials[j] / sum;
        weights[(first + i) * length + j] = weight;
        for (let e = 0; e < width; e++)
          output[(first + i) * width + e] += weight * value[(first + j) * width + e];
      }
    }
  }
  return { output, weights };
}
