// What the reader does: the bar above the charts, the pointer, the keys.

function look(range) {
  const [low, high] = extent();
  if (range) range = [Math.max(range[0], low), Math.min(range[1], high)];
  if (range && !(range[1] > range[0])) return;
  state.range = range && (range[0] > low || range[1] < high) ? range : null;
  drawnCharts.forEach(({ plot }) => plot.setScale("x", { min: null, max: null }));
  document.getElementById("all").disabled = !state.range;
  looked();
}

function zoom(factor, at) {
  const [low, high] = state.range || extent(), centre = at ?? (low + high) / 2;
  look([centre - (centre - low) * factor, centre + (high - centre) * factor]);
}

function selected(plot) {
  const { left, width } = plot.select;
  if (width > 4) look([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
  plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
}

// The pointer moved, here or in another chart: only the one that is pointed at has a box of values.
function moved(drawn) {
  const { plot, tip, holder } = drawn;
  const here = holder.matches(":hover") || holder === document.activeElement;
  if (!here || !(plot.cursor.left >= 0)) { tip.hidden = true; return; }
  const said = read(drawn, plot.posToVal(plot.cursor.left, "x"));
  if (holder === document.activeElement) document.getElementById("spoken").textContent = said;
}

function listen(drawn) {
  drawn.holder.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !pressed(drawn, event)) return;
    event.preventDefault();
  });
  drawn.holder.addEventListener("blur", () => { drawn.tip.hidden = true; });
}

function pressed(drawn, { key, shiftKey }) {
  const by = shiftKey ? 10 : 1;
  if (key === "ArrowLeft" || key === "ArrowRight") step(drawn, key === "ArrowLeft" ? -by : by);
  else if (key === "Home" || key === "End") step(drawn, key === "Home" ? -Infinity : Infinity);
  else if (key === "+" || key === "=") zoom(0.5, drawn.at);
  else if (key === "-") zoom(2, drawn.at);
  else if (key === "0") look(null);
  else if (key === "l" || key === "L") document.getElementById("log").click();
  else if (key === "f" || key === "F") resize(drawn);
  else if (key === "Escape") drawn.holder.blur();
  else return false;
  return true;
}

function sizeButton(chart) {
  const made = Object.assign(element("button", "⤢", "size"), { type: "button", title: "Larger, or as it was" });
  made.setAttribute("aria-label", `${chart.title}, larger`);
  made.addEventListener("click", () => resize(drawnCharts.find((drawn) => drawn.chart.name === chart.name)));
  return made;
}

function resize(drawn) {
  const { name } = drawn.chart;
  if (name === payload.charts[0].name) return;
  if (!state.large.delete(name)) state.large.add(name);
  sized(drawn);
  drawn.plot.setSize(sizeOf(drawn));
}

function sized({ chart, figure }) {
  const large = state.large.has(chart.name);
  figure.classList.toggle("large", large);
  figure.querySelector(".size")?.setAttribute("aria-pressed", String(large));
}

// The reading by so many points to the right, within what is looked at.
function step(drawn, by) {
  const found = drawn.lines.find(({ kind }) => kind !== "checked") || drawn.lines[0];
  if (!found) return;
  const [low, high] = state.range || extent(), { plot } = drawn, { x } = found;
  const inside = [x.findIndex((v) => v >= low), x.findLastIndex((v) => v <= high)];
  const known = drawn.at !== undefined && drawn.at >= low && drawn.at <= high;
  const now = known ? nearest(x, drawn.at) : by > 0 ? inside[0] - 1 : inside[1] + 1;
  drawn.at = x[Math.max(inside[0], Math.min(inside[1], now + by))];
  plot.setCursor({ left: plot.valToPos(drawn.at, "x"), top: plot.over.clientHeight / 2 });
  document.getElementById("spoken").textContent = read(drawn, drawn.at);
}

function legend({ chart, figure }) {
  const room = figure.querySelector(".keys > span");
  const key = (role, text, dashed) => {
    const made = element("span", undefined, "key"), mark = element("i", undefined, dashed ? "dash" : "swatch");
    mark.style.setProperty("--c", `var(--${role})`);
    made.append(mark, text);
    return made;
  };
  const keys = several ? [] : linesOf(chart).filter((found) => found.name).map((found) => key(found.role, found.name));
  const seen = levelsOf(chart).slice(0, 1).map((level) => key(several ? "ink" : level.role, level.text, true));
  if (several && payload.runs.some((run) => run.evaluations[chart.name])) seen.push(key("ink", "validation", true));
  room.replaceChildren(...keys, ...seen, ...(chart.note ? [element("span", chart.note)] : []));
}

function bar() {
  const room = document.getElementById("controls");
  const labelled = (text, input) => { const made = element("label"); made.append(text, input); return made; };
  const units = element("fieldset", undefined, "segment");
  units.setAttribute("aria-label", "What the charts run along");
  for (const unit of Object.keys(ALONG)) units.append(choice(unit));
  const slider = Object.assign(element("input"), { type: "range", id: "smoothing", min: 0, max: 1, step: 0.01, value: state.smoothing });
  slider.addEventListener("input", () => { state.smoothing = Number(slider.value); redraw(); });
  const check = (id, name) => {
    const box = Object.assign(element("input"), { type: "checkbox", id });
    box.addEventListener("change", () => { state[name] = box.checked; redraw(); });
    return box;
  };
  const button = (id, text, name, act) => {
    const made = Object.assign(element("button", text), { id, type: "button", title: name });
    made.setAttribute("aria-label", name);
    made.addEventListener("click", act);
    return made;
  };
  const zooms = element("fieldset");
  zooms.style.gap = "4px";
  zooms.append(button("closer", "+", "Zoom in", () => zoom(0.5)), button("farther", "−", "Zoom out", () => zoom(2)), button("all", "all", "See all of the run", () => look(null)));
  room.append(units, labelled("smoothing", slider), labelled("logarithmic", check("log", "log")), labelled("ignore outliers", check("clip", "clip")), zooms);
  if (several) {
    const runs = Object.assign(element("div"), { id: "runs" });
    runs.append(...payload.runs.map(runButton));
    room.append(runs);
  }
  document.getElementById("all").disabled = true;
}

function choice(unit) {
  const made = element("label"), input = Object.assign(element("input"), { type: "radio", name: "unit", value: unit, checked: unit === state.unit });
  input.addEventListener("change", () => { state.unit = unit; state.range = null; redraw(); look(null); });
  made.append(input, element("span", ALONG[unit].title));
  return made;
}

function runButton(run, place) {
  const made = Object.assign(element("button", undefined, "toggle"), { type: "button" });
  made.append(swatch(runRole(place)), run.name);
  made.setAttribute("aria-pressed", "true");
  made.addEventListener("click", () => {
    if (!state.hidden.delete(place)) state.hidden.add(place);
    made.setAttribute("aria-pressed", String(!state.hidden.has(place)));
    redraw();
  });
  return made;
}

// Samples over the run: a slider chooses which of the later ones is shown.
function sliders() {
  document.querySelectorAll(".sample .later").forEach((room) => {
    const pieces = [...room.querySelectorAll(".piece")];
    if (pieces.length < 2 || room.querySelector("input")) return;
    const slider = Object.assign(element("input"), { type: "range", min: 0, max: pieces.length - 1, value: pieces.length - 1 });
    slider.setAttribute("aria-label", "Which sample is shown");
    slider.addEventListener("input", () => pieces.forEach((piece, i) => { piece.hidden = i !== Number(slider.value); }));
    const made = element("div", undefined, "bar");
    made.append(slider);
    room.prepend(made);
  });
}
