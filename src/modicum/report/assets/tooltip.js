// The reading: the values at one place of a chart, next to the pointer and for screen readers.

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function swatch(role) {
  const made = element("i", undefined, "swatch");
  made.style.setProperty("--c", `var(--${role})`);
  return made;
}

// The lines' values at x, of each run once: what was measured, then the smoothed value.
function readings(lines, at) {
  const found = new Map();
  for (const { run, place, kind, curve, x, y, name, role } of lines) {
    const index = nearest(x, at), value = y[index];
    if (value === null || value === undefined) continue;
    const key = `${place} ${kind === "checked"}`;
    const seen = found.get(key);
    if (kind === "smooth" && seen) seen.smoothed = value;
    else found.set(key, { run, place, kind, name, role: kind === "raw" ? lineRole("smooth", place) : role, value, point: pointOf(curve, index) });
  }
  return [...found.values()];
}

function pointOf(curve, index) {
  return { step: curve.step[index], tokens: curve.tokens[index], seconds: curve.seconds[index] };
}

function readingText(reading, chart) {
  const smoothed = reading.smoothed === undefined ? "" : ` (smoothed ${exact(reading.smoothed, chart.unit)})`;
  return exact(reading.value, chart.unit) + smoothed;
}

function label(reading, chart) {
  const kind = reading.kind === "checked" ? "validation" : chart.name === "loss" ? "training" : "";
  return several ? [reading.run.name, kind === "training" ? "" : kind].filter(Boolean).join(", ") : kind;
}

// Fill the box of a chart with what is at x, and say the same in words.
function read(drawn, at) {
  const { chart, lines, tip, plot } = drawn, found = readings(lines, at);
  if (!found.length) { tip.hidden = true; return ""; }
  const first = found.find((reading) => reading.kind !== "checked") || found[0];
  const rows = found.map((reading) => row(reading, chart, first));
  const table = element("table");
  table.append(...rows);
  const events = eventsAt(drawn, at).map((event) => element("p", `step ${event.step}: ${event.text}`, "event"));
  tip.replaceChildren(element("p", whereText(first.point)), table, ...events);
  tip.hidden = false;
  place(tip, plot, at);
  const said = found.map((reading) => `${label(reading, chart) || chart.title} ${readingText(reading, chart)}`);
  return `${whereText(first.point)}: ${said.join("; ")}`;
}

function row(reading, chart, first) {
  const made = element("tr"), name = element("td"), value = element("td", exact(reading.value, chart.unit), "number");
  const elsewhere = reading.point.step === first.point.step ? "" : ` at ${ALONG.step.write(reading.point.step)}`;
  name.append(swatch(reading.role), label(reading, chart) + elsewhere);
  made.append(name, value);
  if (reading.smoothed !== undefined) made.append(element("td", exact(reading.smoothed, chart.unit), "number faint"));
  return made;
}

function eventsAt({ plot, chart }, at) {
  if (!wide(chart)) return [];
  const here = plot.valToPos(at, "x");
  const all = payload.runs.flatMap((run, index) => (state.hidden.has(index) ? [] : run.events));
  return all.filter((event) => Math.abs(plot.valToPos(event[state.unit], "x") - here) < 5).slice(0, 4);
}

// To the side of the line where there is more room.
function place(tip, plot, at) {
  const over = plot.over, left = plot.valToPos(at, "x"), width = over.clientWidth;
  const right = left > width / 2;
  tip.style.left = right ? "" : `${over.offsetLeft + left + 14}px`;
  tip.style.right = right ? `${plot.root.clientWidth - over.offsetLeft - left + 14}px` : "";
}
