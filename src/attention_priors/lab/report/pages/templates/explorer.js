"use strict";

// JavaScript version of the library's log-priors, their weights and their reach, for one head.
// Tests compare every family with the library's class.
const explorer = (() => {
  const EPSILON = 1e-5; // as in the library's Generalized Gaussian
  const REACH_LENGTHS = [10, 12, 14, 16, 18, 20].map((power) => 2 ** power);
  const SHARES = [0.5, 0.9, 0.99];
  const TURN = 2 * Math.PI; // GOAT's shortest period, in tokens

  // A slider has name, label, minimum, maximum, step and start; `log` sliders hold the power of two.
  const slider = (name, words, least, most, step, start, log = false) => ({ name, words, least, most, step, start, log });
  const written = (value) => {
    const rounded = Number(value.toPrecision(4));
    return Number.isInteger(rounded) ? `${rounded}.0` : String(rounded);
  };
  const whole = (value) => String(Math.round(value));

  const FAMILIES = {
    uniform: {
      words: "Uniform (no position)",
      sliders: [],
      logPrior: () => () => 0,
      python: () => "Uniform(1)",
    },
    laplace: {
      words: "Laplace (ALiBi)",
      sliders: [slider("slope", "slope m, nats per token", -12, 1, 0.25, -4, true)],
      logPrior: ({ slope }) => (distance) => -slope * Math.abs(distance),
      python: ({ slope }) => `Laplace(1, slopes=[${slope}])`,
    },
    generalized_gaussian: {
      words: "Generalized Gaussian (BAM)",
      sliders: [
        slider("theta_alpha", "θα: ln of the penalty at one token from μ", -6, 4, 0.05, 0),
        slider("beta", "shape β: local if positive, retrieval if negative", -3, 3, 0.05, -0.5),
        slider("mu", "location μ, tokens along j − i", -16, 4, 0.5, 0),
      ],
      logPrior: ({ theta_alpha, beta, mu }) => (distance) =>
        -Math.exp(Math.min(theta_alpha + beta * Math.log(Math.abs(-distance - mu) + EPSILON), 60)),
      python: ({ theta_alpha, beta, mu }) =>
        `GeneralizedGaussian(1, init={"theta_alpha": ${written(theta_alpha)}, "beta": ${written(beta)}, "mu": ${written(mu)}})`,
    },
    kerple: {
      words: "KERPLE, logarithmic",
      sliders: [
        slider("r1", "r1, nats", -6, 4, 0.25, 0, true),
        slider("r2", "r2, per token", -10, 4, 0.25, -2, true),
      ],
      logPrior: ({ r1, r2 }) => (distance) => -r1 * Math.log1p(r2 * Math.abs(distance)),
      python: ({ r1, r2 }) => `Kerple(1, init={"r1": ${r1}, "r2": ${r2}})`,
    },
    fire: {
      words: "FIRE, two hidden units",
      sliders: [
        slider("c", "c, per token", -10, 4, 0.25, -3, true),
        slider("threshold", "threshold L0, tokens", 0, 14, 0.5, 9, true),
        slider("fall", "drop from the query to the first key, nats", -10, 10, 0.1, 4),
        slider("kink", "place of the kink on FIRE's scale of distances, 0 to 1", 0, 1, 0.01, 0.7),
        slider("more", "additional drop beyond the kink, nats per unit of the scale", -30, 30, 0.5, 10),
      ],
      logPrior: ({ c, threshold, fall, kink, more }) => (distance, key) => {
        const x = Math.log1p(c * Math.abs(distance)) / Math.log1p(c * Math.max(threshold, distance + key));
        return -fall * x - more * Math.max(0, x - kink);
      },
      python: ({ c, threshold, fall, kink, more }) =>
        `Fire(1, 2, init={"c": ${c}, "threshold": ${threshold}, "hidden": [[1.0, 1.0], [0.0, ${written(-kink)}]], ` +
        `"outer": [[${written(-fall)}, ${written(-more)}, 0.0]]})`,
    },
    spectral: {
      words: "Spectral (GOAT)",
      sliders: [
        slider("base", "base: ratio of longest to shortest period", 1, 16, 0.5, 8, true),
        slider("shortest", "shortest period, tokens", 2, 12, 0.1, TURN),
        ...[0, 1, 2, 3].flatMap((r) => [
          slider(`alpha${r}`, `α of frequency ${r}, nats`, -3, 3, 0.05, r === 2 ? 1.5 : 0),
          slider(`beta${r}`, `β of frequency ${r}, nats`, -3, 3, 0.05, 0),
        ]),
      ],
      logPrior: (values) => (distance) => {
        let total = 0;
        for (let r = 0; r < 4; r++) {
          const phase = (TURN / values.shortest) * values.base ** (-r / 3) * distance;
          total += values[`alpha${r}`] * Math.cos(phase) + values[`beta${r}`] * Math.sin(phase);
        }
        return total;
      },
      python: (values) => {
        const list = (name) => [0, 1, 2, 3].map((r) => written(values[`${name}${r}`])).join(", ");
        const periods = `base=${values.base}` + (values.shortest === TURN ? "" : `, shortest_period=${written(values.shortest)}`);
        return `Spectral(1, num_frequencies=4, ${periods}, init={"alpha": [${list("alpha")}], "beta": [${list("beta")}]})`;
      },
    },
    key_sink: {
      words: "Key sink (GOAT)",
      sliders: [
        slider("bump", "bump of the first key, nats", -5, 15, 0.1, 6),
        slider("slope", "slope, nats per token", 0, 0.5, 0.005, 0.05),
      ],
      logPrior: ({ bump, slope }) => (distance, key) => slope * key + (key === 0 ? bump : 0),
      python: ({ bump, slope }) => `KeySink(1, train_length=1024, init={"slope": ${written(slope)}, "bump": ${written(bump)}})`,
    },
    relative_buckets: {
      words: "Relative buckets (T5)",
      sliders: [
        slider("buckets", "buckets", 4, 64, 2, 32),
        slider("distance", "distance of the last bucket, tokens", 6, 14, 1, 7, true),
        slider("fall", "drop per bucket, nats", -1, 1, 0.01, 0.2),
      ],
      logPrior: ({ buckets, distance: last, fall }) => {
        const exact = Math.floor(buckets / 2);
        const spread = Math.log(last / exact);
        return (distance) => {
          const away = Math.max(distance, 0);
          // In float32 like T5, because rounding decides the bucket of a distance on a boundary.
          const ratio = Math.fround(Math.log(Math.fround(Math.max(away, 1) / exact))) / spread;
          const spaced = exact + Math.trunc(Math.fround(Math.fround(ratio) * (buckets - exact)));
          return -fall * Math.min(away < exact ? away : spaced, buckets - 1);
        };
      },
      python: ({ buckets, distance, fall }) =>
        `RelativeBuckets(1, num_buckets=${whole(buckets)}, max_distance=${whole(distance)}, ` +
        `init={"bias": [${written(-fall)} * b for b in range(${whole(buckets)})]})`,
    },
    clipped_offsets: {
      words: "Clipped offsets (Shaw)",
      sliders: [
        slider("offset", "largest offset, tokens", 1, 64, 1, 16),
        slider("fall", "drop per offset, nats", -1, 1, 0.01, 0.2),
      ],
      logPrior: ({ offset, fall }) => (distance) => -fall * Math.min(Math.abs(distance), offset),
      python: ({ offset, fall }) =>
        `ClippedOffsets(1, max_offset=${whole(offset)}, ` +
        `init={"bias": [${written(-fall)} * abs(o) for o in range(-${whole(offset)}, ${whole(offset)} + 1)]})`,
    },
    window: {
      words: "Window",
      sliders: [slider("size", "visible keys, including the own key", 0, 14, 1, 7, true)],
      logPrior: ({ size }) => (distance) => (Math.abs(distance) < size ? 0 : -Infinity),
      python: ({ size }) => `Window(1, ${whole(size)})`,
    },
  };

  // Slider values by name, as arguments of the formulas.
  function values(family, positions) {
    const found = {};
    for (const { name, log } of FAMILIES[family].sliders) found[name] = log ? 2 ** positions[name] : Number(positions[name]);
    return found;
  }

  const scale = (s, length) => (s === null ? 1 : s * Math.log(length));

  // Log-prior of the last query of a text for each distance 0 ... length - 1, in nats.
  function logPriors(family, given, length) {
    const at = FAMILIES[family].logPrior(given);
    const found = new Float64Array(length);
    for (let d = 0; d < length; d++) found[d] = at(d, length - 1 - d);
    return found;
  }

  // Softmax of scaled log-priors.
  function weights(logPrior, factor) {
    const found = new Float64Array(logPrior.length);
    let highest = -Infinity;
    for (const value of logPrior) if (value > -Infinity) highest = Math.max(highest, factor * value);
    let total = 0;
    for (let d = 0; d < logPrior.length; d++) {
      found[d] = logPrior[d] === -Infinity ? 0 : Math.exp(factor * logPrior[d] - highest);
      total += found[d];
    }
    for (let d = 0; d < found.length; d++) found[d] /= total;
    return found;
  }

  // Share of a null key with this logit, without content.
  function nothing(logPrior, factor, logit) {
    const highest = factor * logPrior.reduce((one, other) => Math.max(one, other), -Infinity);
    let total = 0;
    for (const value of logPrior) total += Math.exp(factor * value - highest);
    return 1 / (1 + total * Math.exp(highest - logit));
  }

  // Distances that hold shares of the prior, for each length.
  function reach(family, given, s) {
    return REACH_LENGTHS.map((length) => {
      const mass = weights(logPriors(family, given, length), scale(s, length));
      // Sum from the farthest key on, so that small numbers come first.
      let beyond = 0;
      const found = SHARES.map(() => 0);
      const settled = SHARES.map(() => false);
      for (let d = length - 1; d >= 0; d--) {
        beyond += mass[d];
        SHARES.forEach((share, place) => {
          if (!settled[place] && beyond > 1 - share + 1e-12) {
            found[place] = d;
            settled[place] = true;
          }
        });
      }
      return found;
    });
  }

  // Causal attention map: one row of weights per query, null for future keys.
  function map(family, given, s, size) {
    const at = FAMILIES[family].logPrior(given);
    return Array.from({ length: size }, (_, query) => {
      const row = Float64Array.from({ length: query + 1 }, (__, d) => at(d, query - d));
      const mass = weights(row, scale(s, query + 1));
      return Array.from({ length: size }, (__, key) => (key <= query ? mass[query - key] : null));
    });
  }

  function python(family, given, s, logit = null) {
    const made = FAMILIES[family].python(given);
    const names = [made.match(/^\w+/)[0], ...(logit === null ? [] : ["NullKey"]), ...(s === null ? [] : ["SSMax"]), "attend"];
    const lines = [`from attention_priors import ${names.join(", ")}`, `prior = ${made}`];
    if (s !== null) lines.push(`scale = SSMax(1, init=${written(s)})`);
    if (logit !== null) lines.push(`nowhere = NullKey(1, init=${written(logit)})`);
    const options = (s === null ? "" : ", logit_scale=scale") + (logit === null ? "" : ", null_logit=nowhere");
    lines.push(`out = attend(q, k, v, prior${options})`);
    return lines.join("\n");
  }

  return { FAMILIES, REACH_LENGTHS, SHARES, values, scale, logPriors, weights, nothing, reach, map, python };
})();

// ---- page

(() => {
  const MAP = 64;
  const SIDES = ["a", "b"];
  const CUT = 30; // nats below the maximum, where weights are negligible
  const [LEAST_OF_UNIFORM, LEAST] = [1e-4, 1e-12]; // weights
  const START = { a: "generalized_gaussian", b: "laplace" };
  const state = { length: 4096, s: null, logit: null, sides: {} };
  const element = (id) => document.getElementById(id);
  const grouped = (whole) => whole.toLocaleString("en").replaceAll(",", "\u202f");
  const shown = (value) => (Math.abs(value) >= 1000 ? String(Math.round(value)) : String(Number(value.toPrecision(3)))).replace("-", "−");

  function makeSliders(side) {
    const { family } = state.sides[side];
    const place = element(`sliders-${side}`);
    place.replaceChildren();
    for (const { name, words, least, most, step, start, log } of explorer.FAMILIES[family].sliders) {
      const id = `${side}-${name}`;
      const row = document.createElement("div");
      row.className = "slider";
      const label = Object.assign(document.createElement("label"), { htmlFor: id, textContent: words });
      const output = Object.assign(document.createElement("output"), { htmlFor: id });
      const input = Object.assign(document.createElement("input"), { type: "range", id, min: least, max: most, step, value: start });
      const { positions } = state.sides[side];
      const tell = () => {
        const value = log ? 2 ** positions[name] : positions[name];
        output.textContent = shown(value);
        input.setAttribute("aria-valuetext", `${shown(value)}`);
      };
      input.addEventListener("input", () => {
        positions[name] = Number(input.value);
        tell();
        draw();
      });
      positions[name] = start; // exact start, even between two steps of the slider
      tell();
      row.append(label, output, input);
      place.append(row);
    }
    if (!place.childElementCount) {
      place.append(Object.assign(document.createElement("p"), { className: "note", textContent: "No parameters." }));
    }
  }

  function choose(side, family) {
    state.sides[side] = { family, positions: {} };
    makeSliders(side);
  }

  const given = (side) => explorer.values(state.sides[side].family, state.sides[side].positions);
  const styles = getComputedStyle(document.documentElement);
  const ink = () => styles.getPropertyValue("--ink").trim();
  const rule = () => styles.getPropertyValue("--rule").trim();
  const colour = (side) => styles.getPropertyValue(`--${side}`).trim();
  const shades = (side) => [0, 0.5, 1].map((share, place) => [share, styles.getPropertyValue(`--${side}-${place}`).trim()]);

  // Of the distances in one pixel, keep those of the lowest and the highest value, so that oscillations stay visible.
  function sampled(curve, place) {
    const found = [];
    let [low, high] = [0, 0];
    for (let d = 1; d <= curve.length; d++) {
      if (d === curve.length || place(d) !== place(low)) {
        found.push(...new Set([Math.min(low, high), Math.max(low, high)]));
        low = high = d;
      } else if (curve[d] < curve[low]) low = d;
      else if (curve[d] > curve[high]) high = d;
    }
    return found;
  }
  const byOrders = (d) => (d < 64 ? d : Math.floor(48 * Math.log2(d)));
  const evenly = (length) => (d) => Math.floor((700 * d) / length);

  function layout(x, y, more = {}) {
    // No dragging on plots, so that touch scrolls the page.
    const axis = { gridcolor: rule(), zerolinecolor: rule(), linecolor: rule(), automargin: true, fixedrange: true };
    return {
      margin: { l: 56, r: 12, t: 8, b: 44 },
      height: 300,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink(), size: 12 },
      showlegend: false,
      dragmode: false,
      xaxis: { ...axis, title: { text: x } },
      yaxis: { ...axis, title: { text: y } },
      ...more,
    };
  }
  const OPTIONS = { displayModeBar: false, responsive: true };

  function lines(id, x, y, [across, up], of) {
    const traces = SIDES.map((side) => ({
      ...of(side),
      name: side.toUpperCase(),
      mode: "lines",
      line: { color: colour(side), width: 2.2, dash: side === "a" ? "solid" : "dash" },
      hovertemplate: `${side.toUpperCase()}: %{y:.3g} at %{x}<extra></extra>`,
    }));
    const plan = layout(x, y);
    plan.xaxis.type = across;
    plan.yaxis.type = up;
    if (across === "log") plan.xaxis.dtick = Math.log10(4);
    if (up === "log") Object.assign(plan.yaxis, { exponentformat: "power", dtick: 1 });
    Plotly.react(id, traces, plan, OPTIONS);
  }

  let waiting = null;
  function draw() {
    const { length, s, logit } = state;
    const curves = {};
    const shares = [];
    for (const side of SIDES) {
      const { family } = state.sides[side];
      const logPrior = explorer.logPriors(family, given(side), length);
      const factor = explorer.scale(s, length);
      const mass = explorer.weights(logPrior, factor);
      const score = logPrior.map((value) => (value === -Infinity ? value : factor * value));
      curves[side] = { score, mass, highest: score.reduce((one, other) => Math.max(one, other), -Infinity) };
      element(`python-${side}`).textContent = explorer.python(family, given(side), s, logit);
      if (logit !== null) shares.push(`${side.toUpperCase()} ${shown(100 * explorer.nothing(logPrior, factor, logit))} %`);
    }
    element("null-value").textContent = logit === null ? "off" : `${shown(logit)}: ${shares.join(", ")} of the weight`;
    // A logarithmic axis has no 0, so the query's own key is at one half.
    const far = (d) => (d === 0 ? 0.5 : d);
    lines("log-prior", "distance, tokens (own key at ½)", "nats below the maximum", ["log", "linear"], (side) => {
      const { score, highest } = curves[side];
      const at = sampled(score, byOrders);
      return { x: at.map(far), y: at.map((d) => (score[d] > -Infinity ? Math.max(score[d] - highest, -CUT) : null)) };
    });
    const weight = (mass, at, times, bound) => at.map((d) => (mass[d] > 0 ? Math.max(times * mass[d], bound) : null));
    lines("mass-log", "distance, tokens (own key at ½)", "weight, relative to uniform", ["log", "log"], (side) => {
      const at = sampled(curves[side].mass, byOrders);
      return { x: at.map(far), y: weight(curves[side].mass, at, length, LEAST_OF_UNIFORM) };
    });
    lines("mass-linear", "distance, tokens", "weight", ["linear", "log"], (side) => {
      const at = sampled(curves[side].mass, evenly(length));
      return { x: at, y: weight(curves[side].mass, at, 1, LEAST) };
    });
    for (const side of SIDES) {
      const grid = explorer.map(state.sides[side].family, given(side), s, MAP);
      const plan = layout("key", "query");
      plan.xaxis.range = [-0.5, MAP - 0.5];
      plan.xaxis.constrain = "domain";
      plan.yaxis.range = [MAP - 0.5, -0.5];
      plan.yaxis.scaleanchor = "x";
      plan.yaxis.constrain = "domain";
      plan.height = 360;
      const trace = {
        type: "heatmap", z: grid.map((row) => row.map((value) => (value === null ? null : Math.sqrt(value)))), zmin: 0, zmax: 1,
        colorscale: shades(side), showscale: false, hoverongaps: false,
        customdata: grid, hovertemplate: "query %{y}, key %{x}: %{customdata:.3g}<extra></extra>",
      };
      Plotly.react(`map-${side}`, [trace], plan, OPTIONS);
    }
    clearTimeout(waiting);
    waiting = setTimeout(drawReach, 120); // slow: a million keys, twelve times; wait until the slider rests
  }

  function drawReach() {
    for (const side of SIDES) {
      const found = explorer.reach(state.sides[side].family, given(side), state.s);
      found.forEach((row, place) => {
        const cell = element(`reach-${side}-${explorer.REACH_LENGTHS[place]}`);
        cell.textContent = row.map((distance) => (distance < 1e4 ? distance : grouped(distance))).join(" · ");
      });
    }
    document.body.dataset.settled = String(Number(document.body.dataset.settled || 0) + 1);
  }

  function start() {
    for (const side of SIDES) {
      const menu = element(`family-${side}`);
      for (const [name, { words }] of Object.entries(explorer.FAMILIES)) menu.append(new Option(words, name, false, name === START[side]));
      menu.addEventListener("change", () => {
        choose(side, menu.value);
        draw();
      });
      choose(side, START[side]);
      element(`copy-${side}`).addEventListener("click", async () => {
        await navigator.clipboard.writeText(element(`python-${side}`).textContent);
        element(`copy-${side}`).textContent = "Copied";
        setTimeout(() => (element(`copy-${side}`).textContent = "Copy"), 1500);
      });
    }
    const length = element("length");
    const scaled = element("scaled");
    const s = element("s");
    const nulled = element("nulled");
    const logit = element("null");
    const tell = () => {
      state.length = 2 ** Number(length.value);
      state.s = scaled.checked ? Number(s.value) : null;
      s.disabled = !scaled.checked;
      state.logit = nulled.checked ? Number(logit.value) : null;
      logit.disabled = !nulled.checked;
      element("length-value").textContent = String(state.length);
      element("s-value").textContent = scaled.checked ? `${shown(state.s)}: × ${shown(explorer.scale(state.s, state.length))} here` : "off";
    };
    for (const control of [length, scaled, s, nulled, logit]) {
      control.addEventListener("input", () => {
        tell();
        draw();
      });
    }
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    tell();
    draw();
  }
  start();
})();
