// Called by book.py: reads {formulas, data}, writes KaTeX's HTML of each formula and each figure's first picture.
const katex = require("katex"),
  fs = require("fs"),
  { FIGURES, picture } = require("./figures.js");
const { formulas, data } = JSON.parse(fs.readFileSync(0, "utf8"));

const html = formulas.map(({ tex, display }) =>
  katex.renderToString(tex, { displayMode: display, strict: "ignore" }),
);
const figures = Object.fromEntries(
  Object.keys(FIGURES).flatMap((name) => [
    [name, picture(name, data[name])],
    [`${name}.title`, FIGURES[name].title],
  ]),
);
fs.writeSync(1, JSON.stringify({ formulas: html, figures }));
