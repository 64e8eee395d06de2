// What scrolls in a box of its own does so by keys too: the box can be reached while something overflows it.
const observer = new ResizeObserver((entries) =>
  entries.forEach(({ target }) => {
    if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }),
);
// By then the theme has put tables in their boxes.
addEventListener("load", () =>
  document
    .querySelectorAll(".katex-display, .figure, .md-typeset__scrollwrap")
    .forEach((element) => observer.observe(element)),
);
