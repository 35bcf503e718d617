// Search, light and dark, cards of the references; what belongs together is lit together. Nothing here is fetched: INDEX is search.js.
"use strict";

const root = document.documentElement,
  box = document.querySelector("#search"),
  found = document.querySelector("#found");

document.querySelector("#dark").addEventListener("click", () => {
  const dark =
    (root.style.colorScheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  root.style.colorScheme = dark ? "light" : "dark";
  try {
    localStorage.setItem("scheme", root.style.colorScheme);
  } catch {
    /* a browser may forbid it on disk */
  }
});

const ENTRIES = INDEX.flatMap(([page, name, parts]) =>
  parts.map(([place, title, text]) => {
    const whole = page.includes(".py.html") ? `${title} (${name})` : title ? `${name} · ${title}` : name;
    return [`${page}#${place}`, whole, text];
  }),
);

function search(query) {
  const words = query.toLowerCase().replaceAll("rollout_corr/", "").split(/\s+/).filter(Boolean);
  const score = ([, title, text]) =>
    words.reduce((sum, word) => {
      const times = text.toLowerCase().split(word).length - 1,
        named = title.toLowerCase().includes(word);
      return sum && (times || named) ? sum + (named ? 20 : 0) + Math.min(times, 5) : 0;
    }, 1);
  const kind = ([href]) => (href.startsWith("tests-") ? 2 : href.includes(".py.html") ? 1 : 0); // the text, then code, then tests
  const hits = ENTRIES.map((entry) => [score(entry), entry])
    .filter(([s]) => words.length && s > 1)
    .sort((a, b) => b[0] - a[0])
    .map(([, e]) => e);
  return [7, 4, 3].flatMap((most, k) => hits.filter((entry) => kind(entry) === k).slice(0, most));
}

box.addEventListener("input", () => {
  found.replaceChildren(
    ...search(box.value).map(([href, title, text]) => {
      const link = document.createElement("a"),
        at = text.toLowerCase().indexOf(box.value.toLowerCase().split(" ")[0]);
      const from = at < 40 ? 0 : text.indexOf(" ", at - 40) + 1;
      link.href = href;
      link.append(
        Object.assign(document.createElement("b"), { textContent: title }),
        (from ? "… " : "") + text.slice(from, from + 130).replace(/ \S*$/, from + 130 < text.length ? " …" : "$&"),
      );
      return link;
    }),
  );
  found.hidden = !box.value;
});
document.querySelector(".bar").addEventListener("keydown", (event) => {
  const stops = [box, ...found.children],
    at = stops.indexOf(document.activeElement),
    way = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (at >= 0 && way && !found.hidden) {
    event.preventDefault();
    stops[Math.min(Math.max(at + way, 0), stops.length - 1)].focus();
  }
  if (event.key === "Enter" && at === 0) found.querySelector("a")?.click();
  if (event.key === "Escape" && at >= 0) {
    box.value = "";
    found.hidden = true;
    document.activeElement.blur();
  }
});
document.addEventListener("click", (event) => {
  if (!event.target.closest(".bar, #found a") || event.target.closest("#found a")) found.hidden = true;
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== box && document.activeElement.tagName !== "SELECT") {
    event.preventDefault();
    box.focus();
  }
});

if (innerWidth < 1080)
  document.querySelectorAll(".tests").forEach((tests) => {
    tests.open = false;
  });
for (const panel of document.querySelectorAll(".panel")) {
  const both = [panel, document.getElementById(panel.dataset.eq)];
  for (const one of both)
    for (const [type, lit] of [
      ["mouseenter", true],
      ["mouseleave", false],
    ])
      one.addEventListener(type, () => both.forEach((each) => each.classList.toggle("lit", lit)));
}

// What a link's title says stands on a card beside it: by a pointer or the keyboard; without one, by a first tap.
const bubble = document.querySelector("#card"),
  cards = new Map([...document.querySelectorAll("a[title]")].map((link) => [link, link.title]));
for (const [link, words] of cards) {
  link.removeAttribute("title");
  link.ariaDescription = words;
}
let tapped;
function about(event) {
  const link = [event.target.closest("a"), event.type === "mouseover" && document.activeElement].find((each) =>
    cards.has(each),
  );
  if (event.type === "click" && link && link !== tapped && matchMedia("(hover: none)").matches) {
    event.preventDefault();
    tapped = link;
  }
  bubble.hidden = !link || /focusout|keydown/.test(event.type);
  if (bubble.hidden) return;
  bubble.textContent = cards.get(link);
  const { left, top, bottom } = link.getClientRects()[0],
    below = bottom + bubble.offsetHeight + 8 < innerHeight;
  bubble.style.left = Math.max(8, Math.min(left, innerWidth - bubble.offsetWidth - 24)) + "px";
  bubble.style.top = (below ? bottom + 4 : top - bubble.offsetHeight - 4) + "px";
}
for (const type of ["mouseover", "focusin", "focusout", "click"]) document.body.addEventListener(type, about);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") about(event);
});

const sections = [...document.querySelectorAll("main h2")]; // the one that is read is marked in the contents
addEventListener(
  "scroll",
  () => {
    const now = sections.findLast((section) => section.getBoundingClientRect().top < 120)?.id;
    document.querySelectorAll(".toc a").forEach((link) => {
      link.ariaCurrent = link.hash === "#" + now ? "true" : null;
    });
  },
  { passive: true },
);

// In an appendix a click on a column's head sorts by it: by the first number of a cell, else by its text; again: the other way.
for (const head of document.title.startsWith("Appendix") ? document.querySelectorAll("thead th") : []) {
  head.classList.add("sorts");
  head.addEventListener("click", () => {
    const body = head.closest("table").tBodies[0],
      at = head.cellIndex,
      down = head.classList.toggle("down") ? 1 : -1;
    const text = (row) => row.cells[at].textContent;
    const key = (row) => parseFloat(text(row).replace("−", "-").match(/-?\d+(\.\d+)?(e[-+]?\d+)?/)?.[0]);
    body.append(...[...body.rows].sort((a, b) => down * (key(b) - key(a) || text(b).localeCompare(text(a)))));
  });
}

document.addEventListener("click", ({ target }) => {
  // a guess, of a bug's size or of a dump's cause, opens the answer
  const taken = target.closest(".guess button");
  if (!taken) return;
  for (const button of taken.parentElement.children) {
    button.disabled = true;
    button.classList.toggle("hit", button.dataset.right === "1");
  }
  taken.classList.add("taken");
  taken.closest(".card, .widget").querySelector("details").open = true;
});

for (const choice of document.querySelectorAll(".choice"))
  // one path is open, and the address says which
  choice.addEventListener("toggle", () => {
    const within = choice.querySelectorAll(".choice[open]");
    if (!choice.open)
      within.forEach((each) => {
        each.open = false;
      });
    else if (!within.length) history.replaceState(null, "", "#" + choice.id);
  });

function reveal() {
  // a target within something folded
  const target = document.querySelector(":target");
  for (let fold = target?.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  if (target) target.scrollIntoView();
}
for (const type of ["hashchange", "load"]) addEventListener(type, reveal);
