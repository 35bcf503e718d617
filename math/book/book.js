// Search, light and dark, and what belongs together is lit together. Nothing here is fetched: INDEX is search.js.
"use strict";

const root = document.documentElement, box = document.querySelector("#search"), found = document.querySelector("#found");

document.querySelector("#dark").addEventListener("click", () => {
  const dark = (root.style.colorScheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  root.style.colorScheme = dark ? "light" : "dark";
  try { localStorage.setItem("scheme", root.style.colorScheme); } catch { /* a browser may forbid it on disk */ }
});

function search(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const score = ([, title, text]) => words.reduce((sum, word) => {
    const times = text.toLowerCase().split(word).length - 1, named = title.toLowerCase().includes(word);
    return sum && (times || named) ? sum + (named ? 20 : 0) + Math.min(times, 5) : 0;
  }, 1);
  return INDEX.map((entry) => [score(entry), entry]).filter(([s]) => words.length && s > 1).sort((a, b) => b[0] - a[0]).slice(0, 12).map(([, e]) => e);
}

box.addEventListener("input", () => {
  found.replaceChildren(...search(box.value).map(([href, title, text]) => {
    const link = document.createElement("a"), at = Math.max(0, text.toLowerCase().indexOf(box.value.toLowerCase().split(" ")[0]) - 40);
    link.href = href;
    link.append(Object.assign(document.createElement("b"), { textContent: title }), " " + text.slice(at, at + 120));
    return link;
  }));
  found.hidden = !box.value;
});
box.addEventListener("keydown", (event) => {
  if (event.key === "Enter") found.querySelector("a")?.click();
  if (event.key === "Escape") { box.value = ""; found.hidden = true; box.blur(); }
});
document.addEventListener("click", (event) => { if (!event.target.closest("nav, #found a") || event.target.closest("#found a")) found.hidden = true; });
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== box && document.activeElement.tagName !== "SELECT") { event.preventDefault(); box.focus(); }
});

if (innerWidth < 1080) document.querySelectorAll(".tests").forEach((tests) => { tests.open = false; });
for (const panel of document.querySelectorAll(".panel")) {
  const both = [panel, document.getElementById(panel.dataset.eq)];
  for (const one of both) for (const [type, lit] of [["mouseenter", true], ["mouseleave", false]])
    one.addEventListener(type, () => both.forEach((each) => each.classList.toggle("lit", lit)));
}

function reveal() { // a target within something folded
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let fold = target?.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  if (target) target.scrollIntoView();
}
addEventListener("hashchange", reveal);
reveal();
