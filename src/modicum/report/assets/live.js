// A page that a server stands behind asks it for what is new; every page begins here.

const POLL = 1000; // milliseconds
let version = payload.live?.version, shownParts = payload.live?.parts, asked = 0;

function looked() {
  if (payload.live) ask(true);
}

// The steps that are looked at, since a server gives more points of a shorter stretch.
function stretch() {
  if (!state.range) return "";
  const steps = payload.runs.flatMap((run) => {
    if (state.unit === "step") return state.range;
    const curve = Object.values(run.metrics)[0];
    return curve ? state.range.map((at) => stepAt(run, curve, at)) : [];
  });
  return steps.length ? `low=${Math.min(...steps)}&high=${Math.max(...steps)}` : "";
}

// The step at a place along the charts. The curve may be that of an earlier stretch; outside of it
// the step is about as far as the place is between the curve's end and the run's.
function stepAt(run, curve, at) {
  const along = curve[state.unit], last = along.length - 1;
  const between = (from, to, low, high) => low + (high - low) * Math.min(1, Math.max(0, (at - from) / (to - from || 1)));
  if (at < along[0]) return Math.floor(between(run.start[state.unit], along[0], run.start.step, curve.step[0]));
  if (at > along[last]) return Math.ceil(between(along[last], run.end[state.unit], curve.step[last], run.end.step));
  return curve.step[nearest(along, at)];
}

async function ask(again = false) {
  const mine = ++asked;
  try {
    const query = new URLSearchParams(stretch());
    if (!again) query.set("version", version);
    const answer = await fetch(`curves?${query}`, { cache: "no-store" });
    if (mine !== asked) return;
    document.body.dataset.live = "on";
    if (answer.status === 200) {
      const news = await answer.json();
      if (mine === asked && (again || news.version !== version)) await take(news);
    }
  } catch {
    document.body.dataset.live = "off";
  }
  if (mine === asked) setTimeout(() => { if (mine === asked) ask(); }, POLL);
}

async function take(news) {
  const before = payload.charts.map((chart) => chart.name).join();
  Object.assign(payload, { charts: news.charts, runs: news.runs });
  version = news.version;
  if (before === payload.charts.map((chart) => chart.name).join()) {
    payload.charts.forEach((chart, i) => { drawnCharts[i].chart = chart; });
    redraw();
  } else {
    show();
  }
  if (news.parts === shownParts) return;
  await parts();
  shownParts = news.parts;
}

// All that is no chart, as the server writes it now.
async function parts() {
  const answer = await fetch("./", { cache: "no-store" });
  if (answer.status !== 200) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  document.querySelectorAll("[data-part]").forEach((part) => {
    const other = page.querySelector(`[data-part="${part.dataset.part}"]`);
    if (!other || other.innerHTML === part.dataset.shown) return;
    const open = [...part.querySelectorAll("details[open]")].map((one) => one.id);
    part.dataset.shown = other.innerHTML;
    part.innerHTML = other.innerHTML;
    open.filter(Boolean).forEach((id) => { const one = document.getElementById(id); if (one) one.open = true; });
  });
  sliders();
}

function show() {
  document.getElementById("curves").hidden = !payload.charts.length;
  if (payload.charts.length) build();
}

function begin() {
  bar();
  show();
  sliders();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => { document.documentElement.dataset.print = ""; redraw(); });
  addEventListener("afterprint", () => { delete document.documentElement.dataset.print; redraw(); });
  if (payload.live) ask();
}

begin();
