// Formulas stand between \( \) and \[ \] in the pages; KaTeX, which comes with them, sets them.
document.addEventListener("DOMContentLoaded", () => {
  for (const formula of document.querySelectorAll(".arithmatex")) {
    const source = formula.textContent.trim().slice(2, -2);
    katex.render(source, formula, { displayMode: formula.tagName === "DIV", throwOnError: false });
  }
});
