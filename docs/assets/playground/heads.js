// All heads as small maps, one of which is chosen.

const INK = [8, 48, 107]; // navy; the style sheet turns it for dark pages

/** Draw the maps of all heads beside the radio buttons that choose one; none for a single head. */
export function thumbnails(group, { heads, head, length }, weights) {
  const labels = group.querySelectorAll("label");
  if (labels.length !== heads) {
    labels.forEach((label) => label.remove());
    for (let place = 0; place < heads; place++) group.append(thumbnail(place));
  }
  group.hidden = heads === 1;
  group.querySelectorAll("input").forEach((input) => (input.checked = Number(input.value) === head));
  group.querySelectorAll("canvas").forEach((canvas, place) => {
    const size = length * length;
    draw(canvas, length, weights.subarray(place * size, (place + 1) * size));
  });
}

function thumbnail(place) {
  const label = document.createElement("label");
  const input = Object.assign(document.createElement("input"), { type: "radio", name: "head", value: place });
  const canvas = document.createElement("canvas");
  canvas.ariaHidden = "true";
  const name = Object.assign(document.createElement("span"), { textContent: place });
  label.append(input, canvas, name);
  return label;
}

/** A pixel a pair; the more weight, the less transparent. */
function draw(canvas, length, weights) {
  canvas.width = canvas.height = length;
  const context = canvas.getContext("2d");
  const image = context.createImageData(length, length);
  weights.forEach((weight, pair) => image.data.set([...INK, Math.round(255 * weight)], 4 * pair));
  context.putImageData(image, 0, 0);
}
