// The figures that move. A control snaps to what was computed (data.js); nothing is interpolated, no formula stands here.
// `picture` is called by node when the book is built, so that each figure stands without JavaScript too.
"use strict";
const COLOURS = ["c0", "c1", "c2", "c3"];
const show = (x) =>
  x === null
    ? ""
    : (Math.abs(x) >= 1e5 || (Math.abs(x) < 0.01 && x) ? x.toExponential(1) : x.toFixed(2)).replace("-", "−");

function plot({
  title,
  x,
  y,
  logX,
  logY,
  xTicks,
  yTicks,
  xLabel,
  yLabel,
  lines,
  bands = [],
  at,
  dots,
  right = 12,
  ends = [],
}) {
  const [W, H, L, R, T, B] = [380, 230, 44, right, 26, 34];
  const place = (v, [lo, hi], log, from, to) => {
    const f = log ? Math.log : Number,
      clipped = Math.min(Math.max(v, lo), hi);
    return (from + ((f(clipped) - f(lo)) / (f(hi) - f(lo))) * (to - from)).toFixed(1);
  };
  const X = (v) => place(v, x, logX, L, W - R),
    Y = (v) => place(v, y, logY, H - B, T);
  let below = T - 40; // of the last label at a line's end: none covers another
  const text = (at, words, kind = "") => `<text x="${at[0]}" y="${at[1]}" class="${kind}">${words}</text>`;
  const line = (points) =>
    points
      .map(([a, b], i) => (b === null ? "" : `${i && points[i - 1][1] !== null ? "L" : "M"}${X(a)} ${Y(b)}`))
      .join("");
  return (
    `<svg viewBox="0 0 ${W} ${H}" role="img" aria-label="${title}">` +
    text([L, 15], title, "title") +
    bands
      .map(
        ([a, b, c, d, kind]) =>
          `<rect x="${X(a)}" y="${Y(d)}" width="${X(b) - X(a)}" height="${Y(c) - Y(d)}" class="band ${kind}"/>`,
      )
      .join("") +
    yTicks
      .map((v) => `<path d="M${L} ${Y(v)}H${W - R}" class="grid"/>` + text([L - 6, +Y(v) + 4], v, "end"))
      .join("") +
    xTicks.map((v) => text([X(v), H - B + 15], v, "middle")).join("") +
    text([(W - R + L) / 2, H - 4], xLabel, "middle") +
    (yLabel ? text([L, H - 4], yLabel, "") : "") +
    (at === undefined ? "" : `<path d="M${X(at)} ${T}V${H - B}" class="at"/>`) +
    lines
      .map(
        ({ points, kind }) =>
          `<path d="${line(points)}" class="line ${kind}"/>` +
          points
            .filter(([a, b]) => b !== null && (dots || a === at))
            .map(([a, b]) => `<circle cx="${X(a)}" cy="${Y(b)}" r="${a === at ? 4 : 2}" class="${kind}"/>`)
            .join(""),
      )
      .join("") +
    ends
      .sort((a, b) => b.y - a.y)
      .map(({ y, words, kind }) =>
        text(
          [W - R + 6, (below = Math.max(below + 27, +Y(y)))],
          words.replace(/ (?=\S+$)/, `</text><text x="${W - R + 6}" y="${below + 13}" class="${kind} value">`),
          kind,
        ),
      )
      .join("") +
    "</svg>"
  );
}

const LABELS = {
  level: "level of the weight",
  mu: "μ",
  noise: "Δ",
  ratio: "ρ",
  n: "|y|",
  k3: "k3 a token",
  bypass: "save a forward pass (bypass)",
}; // of a control whose key in the address is plain
const nearest = (values, v) => values.reduce((best, w) => (Math.abs(w - v) < Math.abs(best - v) ? w : best));
const legend = (rows) =>
  `<table class="legend">${rows.map(([kind, name, value]) => `<tr><td><svg viewBox="0 0 26 8"><path d="M0 4H26" class="line ${kind}"/></svg></td><th>${name}</th><td class="value">${value}</td></tr>`).join("")}</table>`;

const cap = {
  title: "Bias against deviation: the cap, the mismatch and the limit",
  controls: (d) => ({ C: d.C, noise: d.noise, T: d.T }),
  start: { C: 2, noise: 0.5, T: 4 },
  draw(d, s) {
    const names = Object.keys(d.values),
      i = d.noise.indexOf(s.noise);
    const point = (name, T, C) => {
      const row = d.values[name][i][d.T.indexOf(T)];
      return row[row.length > 1 ? d.C.indexOf(C) : 0];
    };
    const panel = (what, which, axis) => {
      const values = axis === "C" ? d.C : d.T,
        all = names.flatMap((n) => d.values[n][i].flat().map((p) => p[which]));
      const top = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50].find((v) => v >= Math.max(...all));
      return plot({
        title: `${what} against ${axis === "C" ? `the cap C (T = ${s.T})` : `the limit T (C = ${s.C})`}`,
        x: [values[0], values.at(-1)],
        y: [0, top],
        logX: true,
        xTicks: values.filter((v) => v !== 1.25),
        yTicks: [0, top / 2, top],
        xLabel: axis,
        at: s[axis],
        dots: true,
        lines: names.map((n, k) => ({
          kind: COLOURS[k],
          points: values.map((v) => [v, (axis === "C" ? point(n, s.T, v) : point(n, v, s.C))[which]]),
        })),
      });
    };
    return (
      `<div class="plots two">${panel("bias / |∇J|", 0, "C")}${panel("bias / |∇J|", 0, "T")}${panel("deviation / |∇J|", 2, "C")}${panel("deviation / |∇J|", 2, "T")}</div>` +
      legend(names.map((n, k) => [COLOURS[k], n, point(n, s.T, s.C)[3]])) +
      `<figcaption>Of the gradient from one response: bias ± its standard error / standard deviation, in units of |∇J|, over ${d.policies} random policies; T is the limit of a response and Δ the standard deviation of the noise on the logits of μ. Exact: each response is enumerated.</figcaption>`
    );
  },
};

const trap = {
  title: "The length trap",
  controls: (d) => ({ ratio: d.ratio, n: d.lengths }),
  start: { ratio: 1.1, n: 8 },
  draw(d, s) {
    const rows = d.values[d.ratio.indexOf(s.ratio)],
      now = rows[d.lengths.indexOf(s.n)],
      words = (kept) => (kept ? "keeps it" : "rejects it");
    const bands = d.bounds.map(([, [lo, hi]], k) => [d.lengths[0], d.lengths.at(-1), lo, hi, COLOURS[k]]);
    return (
      `<div class="plots">` +
      plot({
        title: `every token has ρ = ${s.ratio}`,
        x: [1, d.lengths.at(-1)],
        y: [1e-3, 1e3],
        logX: true,
        logY: true,
        at: s.n,
        xTicks: [1, 8, 64, 512, 4096],
        yTicks: [0.001, 0.1, 1, 10, 1000],
        right: 18,
        xLabel: "|y|, tokens in the response",
        bands,
        lines: [0, 1].map((k) => ({
          kind: COLOURS[k],
          points: rows.map((row, i) => [d.lengths[i], row[k] < 1e-3 || row[k] > 1e3 ? null : row[k]]),
        })),
      }) +
      "</div>" +
      legend(
        [0, 1].map((k) => [
          COLOURS[k],
          ["product", "geometric mean"][k],
          `${show(now[k])}: ${d.bounds[k][0]} in [${d.bounds[k][1]}] ${words(now[2 + k])}`,
        ]),
      ) +
      "<figcaption>A bound on the product is a bound on length; the geometric mean is the same at every length. The bounds are those of two presets, decoupled_seq_is_rs and decoupled_geo_rs.</figcaption>"
    );
  },
};

const curves = {
  title: "What a token's gradient is multiplied by, over the ratio",
  controls: (d) => ({ r: d.r.filter((r, i) => i % 5 === 4) }),
  start: { r: 1.5 },
  draw(d, s) {
    const zero = (values, low, high, kind) => {
      const runs = [];
      values.forEach((v, i) => {
        if (v === 0) (values[i - 1] === 0 && runs.length ? runs.at(-1) : runs[runs.push([d.r[i]]) - 1])[1] = d.r[i];
      });
      return runs.filter(([a, b]) => b > a).map(([a, b]) => [a, b, low, high, kind]);
    };
    const broken = (values) => values.map((v, i) => [d.r[i], i && Math.abs(v - values[i - 1]) > 0.3 ? null : v]);
    const i = d.r.indexOf(s.r);
    const one = (l) => `<div>${plot({
      title: l.name,
      x: [0, 4],
      y: [-4, 4],
      xTicks: [0, 1, 2, 3, 4],
      yTicks: [-4, -2, 0, 2, 4],
      xLabel: "r",
      at: s.r,
      bands: [...zero(l.plus, -4, 0, "c0"), ...zero(l.minus, 0, 4, "c1")],
      lines: [
        { kind: "c0", points: broken(l.plus) },
        { kind: "c1", points: broken(l.minus) },
      ],
    })}
      <p class="value"><a class="eq" href="${l.page}#${l.label}">(${l.label})</a> A = 1: <b>${show(l.plus[i])}</b> · A = −1: <b>${show(l.minus[i])}</b></p></div>`;
    return (
      `<div class="plots three">${d.values.map(one).join("")}</div>` +
      "<figcaption>The coefficient of ∇log π_θ in ∇L, as in the text, blue for A = 1 and orange for A = −1, by autograd through losses.py; shaded where the gradient is zero. A step of descent goes the other way: below 0 it makes the token likelier. GSPO: one token of four has the ratio r, the other three have 1, and the interval is the paper's, [1 − 3·10⁻⁴, 1 + 4·10⁻⁴]: seen from here it switches at r = 1.</figcaption>"
    );
  },
};

const STEPS = [
  ["log μ", "what the sampler said of each token it drew", (d) => d.rollout],
  ["log π_old", "what the trainer says of the same tokens before the update", (d) => d.old],
  ["ρ = π_old/μ", "the mismatch: above 1 the sampler drew it too seldom, below 1 too often", (d) => d.rho],
  ["w", "the weight of each token, as the preset has it", (d, p) => p.weights],
  ["κ", "the mask: what is left after rejection", (d, p) => p.kept],
  ["r = π_θ/π_old", "the update so far", (d) => d.r],
  ["w·κ·(−∂L/∂log π_θ)", "how hard each token is pushed, and which way", (d, p) => p.gradient],
];
const batch = {
  title: "One batch, step by step: log-probs → ρ → weights → mask → loss",
  controls: (d) => ({ step: STEPS.map((_, i) => i + 1), preset: Object.keys(d.presets) }),
  start: { step: 4, preset: "decoupled_token_is" },
  draw(d, s) {
    const [name, words, of] = STEPS[s.step - 1],
      preset = d.presets[s.preset],
      values = of(d, preset);
    const tint = (v) => (s.step === 7 ? v : s.step < 3 ? v / 5 : Math.log(Math.max(v, 0.05)));
    const cell = (v, i, t) =>
      v === null
        ? "<td></td>"
        : `<td class="${tint(v) > 0 ? "up" : "down"}${preset.kept[i][t] || s.step < 5 ? "" : " out"}" style="--a:${Math.min(Math.abs(tint(v)), 1).toFixed(2)}"><b>${d.tokens[i][t].replace("<", "&lt;")}</b>${show(v)}</td>`;
    return (
      `<div class="scroll"><table class="batch"><caption><b>${s.step}. ${name}</b>: ${words}</caption>` +
      values
        .map(
          (row, i) =>
            `<tr><th>${d.prompts[i]}</th>${row.map((v, t) => cell(v, i, t)).join("")}<td class="side">A = ${show(d.advantages[i])}</td></tr>`,
        )
        .join("") +
      `</table></div><p class="value">loss of these six, ${s.preset}: <b>${preset.loss}</b></p><figcaption>Six responses of a real run (<code>${d.how}</code>), through correct and policy_loss.</figcaption>`
    );
  },
};

const NAMED = {
  matched: ["equal weights", "ink"],
  naive: ["no correction", "c1"],
  decoupled_seq_is: ["sequence weights", "c0"],
  bypass_ppo_clip: ["bypass", "c5"],
};
const sampler = {
  title: "The same policy in the engine and in the trainer: k3 says how far they are apart",
  controls: (d) => ({ k3: Object.keys(d.sizes), bypass: [false, true] }),
  start: { k3: "0.013", bypass: false },
  draw(d, s) {
    const w = d.sizes[s.k3],
      two = (v) =>
        v
          .toFixed(2)
          .replace(/^-0\.00$/, "0.00")
          .replace("-", "−");
    const tile = (token, i) =>
      `<span class="tile ${w.rho[i] < 1 ? "less" : "more"}" style="--a:${Math.min(Math.abs(Math.log(w.rho[i])), 1).toFixed(2)}" title="ρ = ${w.rho[i]}"><b>${token}</b><i>${two(w.rollout[i])}</i><i>${two(w.old[i])}</i></span>`;
    const arms = Object.entries(w.arms).filter(([name]) => s.bypass || name !== "bypass_ppo_clip"),
      points = (y) => y.map((v, i) => [5 * i, v]);
    const missing =
      s.bypass && !w.arms.bypass_ppo_clip
        ? `<p class="note">Bypass was not run at this size: try k3 ${Object.keys(d.sizes).filter((v) => d.sizes[v].arms.bypass_ppo_clip)}.</p>`
        : "";
    return (
      `<div><p class="head">SmolLM2-135M ${w.engine}: ${w.tokens.length} tokens of a response</p>
      <p class="note">A token, its log μ (engine), its log π_old (trainer). ρ = π_old/μ: <span class="tile more">drawn too seldom</span> <span class="tile less">too often</span></p>
      <div class="tiles" role="img" aria-label="${w.tokens.length} tokens, ρ from ${Math.min(...w.rho)} to ${Math.max(...w.rho)}">${w.tokens.map(tile).join("")}</div><p class="value">ρ of these tokens, the product: <b>${w.weight}</b></p></div>
      <div><p class="head">Training on such responses: held-out accuracy</p><div class="plots">` +
      plot({
        title: `small models at this k3`,
        x: [0, 40],
        y: [0, 1],
        xTicks: [0, 10, 20, 30, 40],
        yTicks: [0, 0.5, 1],
        xLabel: "training step",
        right: 120,
        lines: arms.flatMap(([name, a]) =>
          [...a.seeds.map((y) => [y, " thin"]), [a.mean, ""]].map(([y, thin]) => ({
            kind: NAMED[name][1] + thin,
            points: points(y),
          })),
        ),
        ends: arms.map(([name, a]) => ({
          y: a.mean.at(-1),
          words: `${NAMED[name][0]} ${two(a.area)}`,
          kind: NAMED[name][1],
        })),
      }) +
      `</div>${missing}<p class="note">Thin: one of ${arms[0][1].seeds.length} seeds. Thick: their mean. The number: its average over steps 5 to 40.</p></div>
      <figcaption>Tiles: <code>${d.how}</code>, row <code>${w.row}</code>; of its ${w.of} responses the one whose Σ (log ρ)² is the median. Curves: regime <code>${w.regime}</code> of <a href="11-evidence.html">chapter 11</a>, arms ${arms.map(([name]) => `<code>${name}</code>`).join(", ")}, with nearly the same k3; all have one learning rate.</figcaption>`
    );
  },
};
const FIGURES = {
  sampler,
  cap,
  trap,
  curves,
  batch,
  ...(typeof EXACT === "undefined" ? require("./exact.js") : EXACT)({ plot, show }),
};
const picture = (name, data, state) =>
  `<p class="fig" id="fig-${name}">${FIGURES[name].title}</p><div class="controls"></div><div class="picture">${FIGURES[name].draw(data, state ?? FIGURES[name].still ?? FIGURES[name].start)}</div>`;

function boot(box) {
  const name = box.dataset.widget,
    figure = FIGURES[name],
    data = DATA[name],
    state = { ...figure.start },
    inputs = {};
  const draw = () => {
    box.querySelector(".picture").innerHTML = figure.draw(data, state);
  };
  const set = (key, value, values) => {
    state[key] =
      typeof values[0] === "number"
        ? nearest(values, Number.isNaN(+value) ? state[key] : +value)
        : (values.find((v) => String(v) === String(value)) ?? state[key]);
    for (const input of inputs[key].querySelectorAll("input, select"))
      if (/radio|checkbox/.test(input.type)) input.checked = state[key] === true || input.value === state[key];
      else input.value = typeof values[0] === "number" ? values.indexOf(state[key]) : state[key];
    (inputs[key].querySelector("output") ?? {}).value = state[key];
    (inputs[key].querySelector("[type=range]") ?? {}).ariaValueText = `${state[key]}`;
  };
  for (const [key, values] of Object.entries(figure.controls(data))) {
    const numbers = typeof values[0] === "number",
      few = values.length < 5 && typeof values[0] === "string";
    const label = (inputs[key] = document.createElement(few ? "fieldset" : "label"));
    label.innerHTML =
      values[0] === false
        ? `<input type="checkbox" name="${key}"> ${LABELS[key]}`
        : few
          ? `<legend>${LABELS[key]}</legend>${values.map((v) => `<label><input type="radio" name="${key}" value="${v}">${v}</label>`).join("")}`
          : (LABELS[key] ?? key) +
            (numbers
              ? `<input type="range" min="0" max="${values.length - 1}" name="${key}"><output></output>`
              : `<select name="${key}">${values.map((v) => `<option>${v}</option>`).join("")}</select>`);
    box.querySelector(".controls").append(label);
    set(key, state[key], values);
    label.addEventListener("input", (event) => {
      set(
        key,
        numbers
          ? values[event.target.value]
          : event.target.type === "checkbox"
            ? event.target.checked
            : event.target.value,
        values,
      );
      const others = [...new URLSearchParams(location.hash.slice(1))].filter(([k, v]) => v && !Object.hasOwn(state, k)); // of the page's other figures
      history.replaceState(
        null,
        "",
        "#" + new URLSearchParams([...others, ...Object.entries(state).filter(([k]) => Object.hasOwn(inputs, k))]),
      );
      draw();
    });
  }
  const follow = () => {
    // the address's last key is of the figure that is meant
    const linked = [...new URLSearchParams(location.hash.slice(1))],
      wanted = linked.filter(([key]) => Object.hasOwn(inputs, key));
    wanted.forEach(([key, value]) => set(key, value, figure.controls(data)[key]));
    if (wanted.length) draw();
    if (wanted.length && Object.hasOwn(state, linked.at(-1)[0])) box.scrollIntoView();
  };
  figure.live?.(box, data, state, { set, draw });
  if (figure.still) {
    draw();
    addEventListener("beforeprint", () => {
      box.querySelector(".picture").innerHTML = figure.draw(data, figure.still);
    });
    addEventListener("afterprint", draw);
  }
  addEventListener("hashchange", follow);
  follow();
}

if (typeof module === "undefined") document.querySelectorAll(".widget").forEach(boot);
else module.exports = { FIGURES, picture };
