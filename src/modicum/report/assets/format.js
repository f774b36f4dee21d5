// Numbers as people read them: as the page's tables have them.

const PREFIXES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

function digits(value, count) {
  return String(Number(value.toPrecision(count)));
}

function short(value) {
  const size = Math.abs(value);
  for (const [factor, prefix] of PREFIXES) {
    if (size >= 0.9995 * factor && size < 1e15) return `${digits(value / factor, 3)} ${prefix}`;
  }
  return size < 1e15 ? digits(value, 3) : value.toExponential(2);
}

function inBytes(value) {
  const text = short(value);
  return /[kMGT]$/.test(text) ? `${text}B` : `${text} B`;
}

function duration(seconds) {
  if (seconds < 60) return `${digits(seconds, 3)} s`;
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  if (hours < 1) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

// A value to its last digit that means something: the reading under the pointer.
function exact(value, unit) {
  if (unit === "bytes") return inBytes(value);
  if (unit === "tokens/s") return `${value.toLocaleString("en", { maximumFractionDigits: 0 })} tokens/s`;
  return unit === "nats" && Math.abs(value) < 100 ? value.toFixed(4) : digits(value, 5);
}

// The ticks of an axis, with as many decimals as the finest of them needs.
function ticksText(ticks, unit) {
  if (unit === "bytes" || unit === "tokens/s") return ticks.map((v) => (v === null ? "" : unit === "bytes" ? inBytes(v) : short(v)));
  const shown = ticks.filter((v) => v !== null);
  if (shown.some((v) => Math.abs(v) >= 1e6 || (v !== 0 && Math.abs(v) < 1e-4))) return ticks.map((v) => (v === null ? "" : v === 0 ? "0" : v.toExponential()));
  if (state.log) return ticks.map((v) => (v === null ? "" : digits(v, 3)));
  const decimals = Math.max(0, ...shown.map((v) => (String(Number(v.toPrecision(9))).split(".")[1] || "").length));
  return ticks.map((v) => (v === null ? "" : v.toFixed(decimals)));
}

// What `tokens` counts: of other tasks images, texts, sequences.
function counted() {
  const units = new Set(payload.runs.map((run) => run.unit));
  return units.size === 1 ? [...units][0] : "trained";
}

const ALONG = {
  step: { title: "step", write: (v) => v.toLocaleString("en"), tick: (v) => (v >= 1e5 ? short(v) : v.toLocaleString("en")) },
  tokens: { get title() { return counted(); }, write: (v) => `${short(v)} ${counted()}`, tick: short },
  seconds: { title: "time in steps", write: duration, tick: duration },
};

function whereText(point) {
  return `step ${ALONG.step.write(point.step)} · ${ALONG.tokens.write(point.tokens)} · ${duration(point.seconds)}`;
}
