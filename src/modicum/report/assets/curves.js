// What is drawn: the page's numbers, what the reader chose to see of them, and lines made of both.

const payload = JSON.parse(document.getElementById("payload").textContent);
const several = payload.runs.length > 1;
// `range`: the stretch that is looked at, in the unit that is chosen; null: all of it.
const state = { unit: "step", smoothing: 0.4, log: false, clip: false, hidden: new Set(), range: null, large: new Set() };

function colour(role) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${role}`).trim();
}

function runRole(place) {
  return `run-${place % 8}`;
}

// The slider's 0 to 1 as a share of the run; squared, since narrow windows need the finer choice.
function windowShare() {
  return 0.5 * state.smoothing * state.smoothing;
}

// The lines of one chart: where they come from, their points, and how they look.
function linesOf(chart) {
  const lines = [];
  payload.runs.forEach((run, place) => {
    if (state.hidden.has(place)) return;
    const trained = run.metrics[chart.name], checked = run.evaluations[chart.name];
    const smoothed = chart.smooth && state.smoothing > 0;
    if (trained) lines.push(line(run, place, trained, trained.value, smoothed ? "raw" : "plain", chart));
    if (trained && smoothed) {
      const base = trained.mean || trained, width = windowShare() * run.steps;
      lines.push(line(run, place, base, smooth(base.step, base.value, width), "smooth", chart));
    }
    if (checked) lines.push(line(run, place, checked, checked.value, "checked", chart));
  });
  return lines;
}

function line(run, place, curve, values, kind, chart) {
  const y = state.log ? values.map((v) => (v > 0 ? v : null)) : values;
  return { run, place, kind, curve, x: curve[state.unit], y, name: lineName(kind, chart, curve), role: lineRole(kind, place) };
}

function lineRole(kind, place) {
  if (several) return runRole(place);
  return { raw: "train-raw", smooth: "train", plain: "train", checked: "validation" }[kind];
}

function lineName(kind, chart, curve) {
  const each = curve.every > 1 ? `least and greatest of ${curve.every.toLocaleString("en")} steps` : "each step";
  const text = { raw: each, smooth: "smoothed", plain: curve.every > 1 ? each : "", checked: "validation" }[kind];
  return chart.name === "loss" && kind !== "checked" ? `training${text ? `, ${text}` : ""}` : text;
}

// The place of the point nearest to `at` in ascending x.
function nearest(x, at) {
  let low = 0, high = x.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < at) low = middle + 1; else high = middle;
  }
  return low > 0 && at - x[low - 1] <= x[low] - at ? low - 1 : low;
}

// From the first to the last point of all runs, in the unit that is chosen. The end is known also
// where a server sent a shorter stretch.
function extent() {
  const ends = payload.runs.map((run) => run.end[state.unit]), starts = payload.runs.map((run) => run.start[state.unit]);
  const low = Math.min(...starts), high = Math.max(...ends);
  return high > low ? [low, high] : [low - 0.5, low + 0.5];
}
