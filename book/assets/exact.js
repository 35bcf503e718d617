// The figures that explain: their numbers are of book/moving_exact.py. figures.js, loaded next, gives them its `plot` and `show`.
"use strict";
const EXACT = ({ plot, show }) => {
  const signed = (x) => (x < 0 ? "−" : "+") + Math.abs(x).toFixed(2);
  const text = (x, y, words, kind = "") => `<text x="${x}" y="${y}" class="${kind}">${words}</text>`;
  const svg = (W, H, title, inside, kind = "") =>
    `<svg viewBox="0 0 ${W} ${H}" role="img" aria-label="${title}" class="${kind}">${text(4, 15, title, "title")}${inside}</svg>`;
  const arrow = (x, y, X, Y, kind) =>
    Math.hypot(X - x, Y - y) < 1
      ? `<circle cx="${X}" cy="${Y}" r="3" class="${kind}"/>`
      : `<path d="M${x} ${y}L${X} ${Y}" class="line arrow ${kind}"/><path d="M0 0L-9 -4.5V4.5Z" transform="translate(${X} ${Y}) rotate(${(Math.atan2(Y - y, X - x) * 180) / Math.PI})" class="head ${kind}"/>`;
  const key = (kind, words) => `<span class="key ${kind}">${words}</span>`;

  const tree = {
    title: "The tree that weighs itself",
    controls: (d) => ({ level: Object.keys(d.levels), C: d.C }),
    start: { level: "token", C: "∞" },
    draw(d, s) {
      const found = d.levels[s.level][d.C.indexOf(s.C)],
        [along, across, error, variance] = found.numbers,
        order = d.y.map((_, i) => i).sort((i, j) => (String(d.y[i]) < String(d.y[j]) ? -1 : 1));
      const at = {},
        X = (p) => (128 + 480 * p).toFixed(1),
        name = (y) => (Array.isArray(y) ? y.join("") : y);
      order.forEach((i, k) => {
        at[name(d.y[i])] = 50 + 21 * k;
      });
      for (const length of [2, 1, 0])
        for (const p of new Set(
          d.y
            .map(name)
            .filter((y) => y.length > length)
            .map((y) => y.slice(0, length)),
        ))
          at[p] = (at[`${p}0`] + at[`${p}1`] + at[`${p}2`]) / 3;
      const nodes = Object.keys(at)
        .filter((n) => n)
        .map(
          (n) =>
            `<path d="M${32 * n.length - 26} ${at[n.slice(0, -1)]}L${32 * n.length - 4} ${at[n]}" class="grid"/>` +
            text(32 * n.length, at[n] + 4, n.at(-1), "middle"),
        )
        .join("");
      const bars = order
        .map((i) => {
          const y = at[name(d.y[i])],
            high = 9 / d.y[i].length;
          return (
            `<rect x="${X(0)}" y="${y - 8}" width="${(480 * d.mu[i]).toFixed(1)}" height="6" class="bar c0"/>` +
            found.bars[i]
              .map(
                (v, t) =>
                  `<rect x="${X(0)}" y="${(y - 1 + t * high).toFixed(1)}" width="${(480 * v).toFixed(1)}" height="${(high - 0.4).toFixed(1)}" class="bar c1"/>`,
              )
              .join("") +
            `<path d="M${X(d.pi[i])} ${y - 9}V${y + 9}" class="line ink"/>`
          );
        })
        .join("");
      const x = (v) => 30 + 240 * v,
        y = (v) => 250 - 240 * v;
      return (
        `<div class="plots two">${svg(380, 362, "fifteen responses, token by token", text(X(0), 33, "probability, by response") + nodes + bars)}<div>` +
        svg(
          380,
          300,
          "expected gradient",
          `<path d="M${x(0)} ${y(0)}H372M${x(0)} ${y(0)}V40" class="grid"/>` +
            text(372, y(0) + 30, "along ∇J, in units of |∇J|", "end") +
            text(x(0) + 6, 44, "across ∇J") +
            text(x(1), y(0) + 16, "∇J", "middle ink") +
            arrow(x(0), y(0), x(1), y(0), "ink") +
            arrow(x(0), y(0), x(along), y(across), "c1") +
            `<path d="M${x(1)} ${y(0)}L${x(along)} ${y(across)}" class="at"/>`,
        ) +
        `<p class="value">error: <b>${error.toFixed(3)}</b> of |∇J| · variance of one response's gradient: <b>${variance.toFixed(3)}</b></p></div></div>
        <p>${key("c0", "μ, the sampler")} ${key("c1", "μ·w, a strip for each token")} ${key("ink", "π_θ, wanted")}</p>
        <figcaption>The fifteen responses of this chapter's policies, enumerated; a 0 ends a response. A weight w corrects the sampler where the orange strips reach the upright line. C is the cap on w. Right: ∇J and, orange, the expected gradient, by its parts along and across ∇J; dashed is the error.</figcaption>`
      );
    },
  };

  const CASES = ["wrong bracket", "right, and the rest right", "right, but the rest wrong"];
  const push = {
    title: "The clip that takes the damage's side",
    controls: (d) => ({ m: d.m, clip: Object.keys(d.clips) }),
    start: { m: 0.05, clip: "bypass_ppo_clip" },
    draw(d, s) {
      const i = d.m.indexOf(s.m),
        sum = (terms) => terms.reduce((a, b) => a + b, 0),
        now = d.clips[s.clip][i],
        whole = d.clips.bypass_open[i],
        X = (v) => 128 + 150 * v,
        total = sum(now);
      const rows = CASES.map((words, k) => {
        const from = X(sum(now.slice(0, k))),
          y = 62 + 40 * k;
        return (
          text(4, y - 13, now[k] || !whole[k] ? words : `${words}: dropped by the clip`, now[k] ? "" : "c1") +
          (now[k]
            ? arrow(from, y, from + 150 * now[k], y, "c0")
            : `<path d="M${from} ${y}h${150 * whole[k]}" class="line ghost"/>`) +
          `<path d="M${from + 150 * now[k]} ${y}v40" class="at"/>`
        );
      }).join("");
      return (
        `<div class="plots two">${svg(380, 230, "one update of the right bracket's log-odds", [0, 1].map((v) => `<path d="M${X(v)} 30V204" class="grid"/>` + text(X(v), 220, ["0", "1: the true update"][v], "middle")).join("") + rows + `<g class="needle">${arrow(X(0), 184, X(total), 184, total < 0 ? "c1" : "ink")}</g>` + text(4, 169, "their sum: the expected update"))}` +
        plot({
          title: `${s.clip}: the sum`,
          x: [0, 0.3],
          y: [-0.6, 1.2],
          xTicks: [0, 0.1, 0.2, 0.3],
          yTicks: [-0.5, 0, 0.5, 1],
          xLabel: "m: probability with which μ errs here",
          at: s.m,
          bands: [[0, 0.3, -0.6, 0, "c1"]],
          lines: [{ kind: "c0", points: d.m.map((m, k) => [m, sum(d.clips[s.clip][k])]) }],
        }) +
        `</div><p class="value">π errs with ${d.p}, μ with ${s.m}: expected update / true update = <b>${signed(total)}</b>, the right bracket becomes ${total > 0 ? "likelier" : "rarer"}</p>
        <figcaption>The three terms of the sum above, head to tail, in units of the true update; q = 0.5. Dotted: what the clip dropped. In the shaded half the right bracket becomes rarer.</figcaption>`
      );
    },
  };

  const KINDS = ["c2", "c3", "c0", "c1", "c4", "c5", "ink"],
    [L, T, S] = [34, 26, 330];
  const X = (v) => (L + S * v).toFixed(1),
    Y = (v) => (T + S * (1 - v)).toFixed(1),
    point = (p) => p.map((v) => v.toFixed(2)).join(", ");
  const line = (points) => points.map(([a, b], i) => `${i ? "L" : "M"}${X(a)} ${Y(b)}`).join("");
  const square = {
    title: "The square, alive: where does each correction end?",
    controls: (d) => ({ preset: Object.keys(d.presets), mu: ["fixed", "lagging"], step: d.steps }),
    start: { preset: "decoupled_token_is", mu: "fixed", step: 0, guesses: {} },
    still: { step: 400 },
    draw(d, s) {
      const names = Object.keys(d.presets),
        kind = (name) => KINDS[names.indexOf(name)],
        ended = (name, mu) => !s.guesses || `${name}/${mu}` in s.guesses;
      const one = (mu) =>
        svg(
          380,
          384,
          `μ ${mu === "fixed" ? "fixed: recorded data" : "lagging: eight steps old"}`,
          `<rect x="${L}" y="${T}" width="${S}" height="${S}" class="frame"/>` +
            d.levels
              .map(
                ([level, points]) =>
                  `<path d="${line(points)}" class="line level"/>` +
                  text(
                    X(points[points.length >> 1][0]),
                    +Y(points[points.length >> 1][1]) + 4,
                    String(level).replace("-", "−"),
                    "middle level",
                  ),
              )
              .join("") +
            names
              .map((name) => {
                const { path } = d.presets[name][mu],
                  shown = name === s.preset || !s.guesses ? path.slice(0, d.steps.indexOf(s.step) + 1) : [],
                  last = ended(name, mu) ? path.at(-1) : shown.at(-1);
                return shown.length || ended(name, mu)
                  ? `<path d="${line(shown)}" class="line ${kind(name)}"/><circle cx="${X(last[0])}" cy="${Y(last[1])}" r="5" class="${kind(name)}"/>`
                  : "";
              })
              .join("") +
            (s.guesses?.[`${s.preset}/${mu}`]
              ? text(
                  X(s.guesses[`${s.preset}/${mu}`][0]),
                  +Y(s.guesses[`${s.preset}/${mu}`][1]) + 6,
                  "×",
                  "middle guessed",
                )
              : "") +
            text(X(d.star[0]), +Y(d.star[1]) + 7, "☆", "middle star") +
            text(L, 374, "0") +
            text(L + S / 2, 374, "P(go on)", "middle") +
            text(L + S, 374, "1", "end") +
            `<text transform="translate(24 ${T + S / 2}) rotate(-90)" class="middle">P(good ending)</text>`,
          "square",
        );
      const guess = s.guesses && s.guesses[`${s.preset}/${s.mu}`],
        rows = names.map((name) => {
          const cell = (mu) => {
            const { path, gain } = d.presets[name][mu],
              mine = s.guesses?.[`${name}/${mu}`];
            return ended(name, mu)
              ? `${point(path.at(-1))}: level ${gain.toFixed(2).replace("-", "−")}${mine ? ` <i>(you: ${point(mine)})</i>` : ""}`
              : "?";
          };
          return `<tr><th>${key(kind(name), name)}</th><td class="value">${cell("fixed")}</td><td class="value">${cell("lagging")}</td></tr>`;
        });
      const ask = !s.guesses
        ? ""
        : guess === undefined
          ? `Where will <b>${s.preset}</b> end? Click in the square, or play.`
          : guess
            ? `You were <b>${Math.hypot(guess[0] - d.presets[s.preset][s.mu].path.at(-1)[0], guess[1] - d.presets[s.preset][s.mu].path.at(-1)[1]).toFixed(2)}</b> off.`
            : "";
      return `${s.guesses ? `<p class="ask">${ask}</p>` : ""}<div class="beside-square">${s.guesses ? one(s.mu) : one("fixed") + one("lagging")}
        <div class="scroll"><table><thead><tr><th>preset</th><th>end, fixed μ</th><th>end, lagging μ</th></tr></thead>${rows.join("")}</table></div></div>
        <figcaption>Each path is 400 steps along a preset's exact expected gradient. Grey: levels of J_β, as a share of the possible gain; ☆: the optimum. The table has P(go on), P(good ending) at the end, and the level there.</figcaption>`;
    },
    live(box, d, s, { set, draw }) {
      const name = () => `${s.preset}/${s.mu}`,
        button = `<button class="play">Play ${d.steps.at(-1)} steps</button>`; // not drawn anew: it keeps the focus
      box.querySelector(".controls").insertAdjacentHTML("beforeend", button);
      let timer;
      const play = (guess) => {
        clearInterval(timer);
        const quick = matchMedia("(prefers-reduced-motion: reduce)").matches,
          last = d.steps.at(-1);
        const to = (step) => {
          set("step", step, d.steps);
          if (step === last) {
            clearInterval(timer);
            s.guesses[name()] ??= guess;
          }
          draw();
        };
        if (guess) s.guesses[name()] = guess;
        to(quick ? last : 0);
        if (!quick) timer = setInterval(() => to(d.steps[d.steps.indexOf(s.step) + 1]), 30);
      };
      box.addEventListener("click", (event) => {
        const square = event.target.closest(".square"),
          frame = square?.getBoundingClientRect();
        if (event.target.closest(".play")) play(s.guesses[name()] ?? null);
        else if (square && !(name() in s.guesses)) {
          const scale = 380 / frame.width,
            at = [((event.clientX - frame.left) * scale - L) / S, 1 - ((event.clientY - frame.top) * scale - T) / S];
          if (at.every((v) => v >= 0 && v <= 1)) play(at);
        }
      });
      box.addEventListener("input", (event) => {
        clearInterval(timer);
        if (event.target.name !== "step") {
          set("step", 0, d.steps);
          draw();
        } else if (s.step === d.steps.at(-1)) {
          s.guesses[name()] ??= null;
          draw();
        }
      });
    },
  };

  const quiz = {
    title: "Which cause is it?",
    controls: (d) => ({ dump: d.dumps.map((_, i) => i + 1) }),
    start: { dump: 1 },
    draw(d, s) {
      const x = d.dumps[s.dump - 1],
        N = 200,
        dots = ([a, b]) => `<path d="${a.map((v, i) => `M${v + 4} ${N + 24 - b[i]}h0`).join("")}" class="dots"/>`;
      const panel = (title, inside, low, high) =>
        svg(
          208,
          246,
          title,
          `<rect x="4" y="24" width="${N}" height="${N}" class="frame"/>${inside}${text(4, 240, low.replace("-", "−"))}${text(204, 240, high.replace("-", "−"), "end")}`,
        );
      const cloud = (title, { ends, dots: points }) =>
        panel(title, `<path d="M4 224L204 24" class="at"/>${dots(points)}`, ends[0], ends[1]);
      const [mean, low, high] = x.running.lines,
        place = (v, i) => `${(4 + (N * i) / (mean.length - 1)).toFixed(1)} ${N + 24 - v}`;
      const cells = [..."abcdefgh"]
        .map(
          (c, k) =>
            `<path d="${x.grid.map((row, r) => [...row].map((v, t) => (v === c ? `M${4 + 5 * t} ${28 + 8.3 * r}h5` : "")).join("")).join("")}" class="cells ${k < 4 ? "c1" : "c0"}" style="opacity:${Math.abs(k < 4 ? 4 - k : k - 3) / 4}"/>`,
        )
        .join("");
      return (
        `<div class="plots five">${cloud("logit π over logit μ", x.clouds[0])}${panel("gap, by token", `<path d="M4 124H204" class="at"/>${dots(x.gaps.dots)}`, `± ${x.gaps.ends} logits`, "token →")}${panel("gap: response × token", cells, "", "token →")}${cloud("Δ log π over Δ log μ", x.clouds[1])}` +
        panel(
          "running E[ρ] − 1",
          `<path d="M${low.map(place).join("L")}L${[...high].map(place).reverse().join("L")}Z" class="band c0"/><path d="M4 124H204" class="at"/><path d="M${mean.map(place).join("L")}" class="line c0"/>`,
          `± ${x.running.ends}`,
          "tokens →",
        ) +
        "</div>" +
        `<div class="guess"><span>What is wrong with dump ${s.dump}?</span> ${d.causes.map((cause) => `<button data-right="${+(cause === x.cause)}">${cause}</button>`).join("")}</div>
        <details><summary>The doctor's answer</summary><p class="value"><b>${x.cause}</b>: ${x.what}. The doctor: ${x.said}.</p></details>
        <figcaption>Ten dumps of one model, each with one planted cause or none. The panels are those of the picture at the top of the chapter; in the third, orange is π below μ. The model is another one, chosen because the doctor is right about all ten of its dumps.</figcaption>`
      );
    },
  };
  return { tree, push, square, quiz };
};
if (typeof module !== "undefined") module.exports = EXACT;
