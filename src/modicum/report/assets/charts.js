// The charts, drawn by uPlot: one for each column, all with the same stretch and the same pointer.

const drawnCharts = [];

function build() {
  const room = document.getElementById("charts");
  drawnCharts.splice(0).forEach((drawn) => drawn.plot.destroy());
  room.replaceChildren();
  payload.charts.forEach((chart) => {
    const figure = element("figure", undefined, "chart"), keys = element("div", undefined, "keys");
    const heading = element("h3", chart.title), holder = element("div", undefined, "plot");
    keys.append(heading, element("span"));
    if (chart.name !== payload.charts[0].name) heading.after(sizeButton(chart));
    holder.tabIndex = 0;
    holder.setAttribute("role", "img");
    holder.setAttribute("aria-label", `${chart.title}, a chart; arrow keys read its values`);
    figure.dataset.chart = chart.name;
    figure.append(keys, holder);
    room.append(figure);
    const drawn = { chart, figure, holder, lines: [], tip: element("div", undefined, "tip") };
    drawn.tip.hidden = true;
    drawnCharts.push(drawn);
    draw(drawn);
    new ResizeObserver(() => drawn.plot.setSize(sizeOf(drawn))).observe(holder);
    listen(drawn);
    sized(drawn);
  });
}

// The first chart is wide, and those that the reader made so.
function wide({ name }) {
  return name === payload.charts[0].name || state.large.has(name);
}

function sizeOf({ chart, holder }) {
  const width = Math.max(holder.clientWidth, 200);
  return { width, height: wide(chart) ? (width < 560 ? 260 : 340) : 210 };
}

// A chart anew: with other lines, another unit or scale.
function draw(drawn) {
  drawn.lines = linesOf(drawn.chart);
  const tables = drawn.lines.map(({ x, y }) => [x, y]);
  const data = tables.length ? uPlot.join(tables) : [[0, 1], [null, null]];
  const series = tables.length ? drawn.lines.map(seriesOf) : [{}];
  if (drawn.plot) drawn.plot.destroy();
  drawn.plot = new uPlot({ ...sizeOf(drawn), ...optionsOf(drawn), series: [{}, ...series] }, data, drawn.holder);
  drawn.holder.append(drawn.tip);
  drawn.tip.hidden = true;
  legend(drawn);
}

function redraw() {
  drawnCharts.forEach(draw);
}

function seriesOf({ kind, role }) {
  const raw = kind === "raw", checked = kind === "checked";
  const stroke = () => colour(role) + (raw && several ? "4d" : "");
  return {
    stroke, width: raw ? 1 : 1.8, spanGaps: true, alpha: raw && !several ? 0.85 : 1,
    dash: checked && several ? [6, 4] : undefined,
    points: { show: checked, size: 6, stroke, fill: stroke },
  };
}

function optionsOf(drawn) {
  const { chart } = drawn, font = "12px system-ui, sans-serif", along = ALONG[state.unit];
  const axis = { stroke: () => colour("ink"), font, ticks: { show: false } };
  const grid = { stroke: () => colour("grid"), width: 1 };
  return {
    legend: { show: false },
    padding: [10, 16, 0, 0],
    scales: {
      x: { time: false, range: () => state.range || extent() },
      y: { distr: state.log ? 3 : 1, range: (plot, low, high) => heights(drawn, low, high) },
    },
    axes: [
      { ...axis, grid: { show: false }, space: 70, values: (plot, ticks) => ticks.map((v) => (v === null ? "" : along.tick(v))),
        size: 26, gap: 4, incrs: state.unit === "step" ? wholeSteps : undefined },
      { ...axis, grid, space: 38, gap: 6, values: (plot, ticks) => ticksText(ticks, chart.unit),
        size: (plot, texts) => 14 + 6.6 * Math.max(3, ...(texts || []).map((text) => text.length)) },
    ],
    cursor: {
      y: false, drag: { x: true, y: false, setScale: false },
      sync: { key: "runs", setSeries: false, scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
      bind: { dblclick: () => () => { look(null); return null; } },
      dataIdx: (plot, place, index, at) => place === 0 || !drawn.lines[place - 1] ? index : indexIn(plot, drawn.lines[place - 1], at),
      points: { size: 8, width: 2, stroke: (plot, place) => colour("page"), fill: (plot, place) => seriesColour(drawn, place) },
    },
    hooks: {
      setSelect: [(plot) => selected(plot)],
      setCursor: [(plot) => moved(drawn)],
      draw: [(plot) => decorate(drawn, plot)],
    },
  };
}

const wholeSteps = [1, 2, 5].flatMap((part) => Array.from({ length: 13 }, (_, power) => part * 10 ** power)).sort((a, b) => a - b);

function seriesColour(drawn, place) {
  const found = drawn.lines[place - 1];
  return found ? colour(found.role) : "transparent";
}

// Where in the joined table the point of a line is that is nearest to x.
function indexIn(plot, found, at) {
  return nearest(plot.data[0], found.x[nearest(found.x, at)]);
}

// The ends of the upright axis, with what is to be seen between them.
function heights({ chart, lines }, low, high) {
  if (state.clip) [low, high] = inliers(lines, low, high);
  if (low === null || low === undefined) return state.log ? [0.1, 1] : [0, 1];
  const levels = levelsOf(chart).map((level) => level.value);
  if (state.log) return [low / 1.15, high * 1.15];
  if (chart.zero) high = Math.max(high, ...levels);
  if (chart.zero && low >= 0) return [0, high > 0 ? 1.08 * high : 1];
  const room = low === high ? Math.abs(low) || 1 : high - low;
  return [low - 0.06 * room, high + 0.06 * room];
}

// The middle 98 in 100 of the values that are looked at.
function inliers(lines, low, high) {
  const [from, to] = state.range || extent();
  const values = lines.flatMap(({ x, y }) => y.filter((v, i) => v !== null && x[i] >= from && x[i] <= to)).sort((a, b) => a - b);
  if (values.length < 20) return [low, high];
  return [values[Math.floor(0.01 * values.length)], values[Math.ceil(0.99 * values.length) - 1]];
}

// Each level once, though several runs have it.
function levelsOf(chart) {
  const found = new Map();
  payload.runs.forEach((run, place) => {
    const level = run.levels[chart.name];
    if (level && !state.hidden.has(place)) found.set(`${level.role} ${level.value}`, { ...level, place });
  });
  return [...found.values()];
}

function decorate({ chart }, plot) {
  const { ctx } = plot, { left, top, width, height } = plot.bbox, scale = devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, top - 8 * scale, width, height + 8 * scale);
  ctx.clip();
  for (const level of levelsOf(chart)) {
    const y = plot.valToPos(level.value, "y", true);
    stroke(ctx, several ? runRole(level.place) : level.role, [6 * scale, 4 * scale], 1.5 * scale, left, y, left + width, y);
  }
  ctx.restore();
  if (wide(chart)) payload.runs.forEach((run, place) => { if (!state.hidden.has(place)) marks(run, place, plot, scale); });
}

function stroke(ctx, role, dash, width, x0, y0, x1, y1) {
  ctx.strokeStyle = colour(role);
  ctx.setLineDash(dash);
  ctx.lineWidth = width;
  ctx.beginPath();
  ctx.moveTo(x0, y0);
  ctx.lineTo(x1, y1);
  ctx.stroke();
}

// A triangle above the chart at each event.
function marks(run, place, plot, scale) {
  const { ctx } = plot, top = plot.bbox.top, size = 4.5 * scale;
  ctx.fillStyle = colour(several ? runRole(place) : "ink");
  for (const event of run.events) {
    const x = plot.valToPos(event[state.unit], "x", true);
    if (x < plot.bbox.left - 1 || x > plot.bbox.left + plot.bbox.width + 1) continue;
    ctx.beginPath();
    ctx.moveTo(x - size, top - size);
    ctx.lineTo(x + size, top - size);
    ctx.lineTo(x, top + size * 0.8);
    ctx.fill();
  }
}
