// Called by book.py: reads {formulas, data}, writes KaTeX's HTML of each formula and each figure's first picture.
const katex = require("katex"), fs = require("fs"), { FIGURES, picture } = require("./figures.js");
const { formulas, data } = JSON.parse(fs.readFileSync(0, "utf8"));

const html = formulas.map(({ tex, display }) => {
  try {
    return katex.renderToString(tex, { displayMode: display, strict: "ignore" });
  } catch (error) {
    console.error(`${tex}: ${error.message}`);
    process.exit(1);
  }
});
const names = Object.keys(FIGURES), of = (make) => Object.fromEntries(names.map((name) => [name, make(name)]));
fs.writeSync(1, JSON.stringify({ formulas: html, figures: of((n) => picture(n, data[n])), titles: of((n) => FIGURES[n].title) }));
