// Arithmatex wraps formulas in \( \) and \[ \]; KaTeX turns them into HTML with MathML for screen readers.
document.querySelectorAll(".arithmatex").forEach((element) =>
  renderMathInElement(element, {
    delimiters: [
      { left: "\\(", right: "\\)", display: false },
      { left: "\\[", right: "\\]", display: true },
    ],
    throwOnError: true,
  }),
);
