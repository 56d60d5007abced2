"use strict";
// The page as a whole: what the reader has chosen, and newer data from `report.py --watch`. The choices live in
// `state` and in the controls, which newer data leave alone, so that the reader's place is kept.

const READ_AGAIN_MS = 3000;
const state = { axis: "step", smooth: 0, log: false, marks: true, hidden: new Set(), directions: {},
  step: Infinity, filter: "" };
const charts = new Map();
let data = { runs: [], groups: [] };
let groupsKey = null; // the groups on the page and their metrics, as JSON
let switchesKey = null; // the names of the runs that have a switch, and the colours, as JSON
let sources = new Map(); // of pictures, as data: URLs, by key

function prepare(received) {
  data = received;
  state.directions = Object.setPrototypeOf(data.directions, null);
  const short = shortNames(data.runs.map((run) => run.name));
  data.runs.forEach((run, index) => { run.short = short[index]; });
  for (const run of data.runs) {
    // Without a prototype a name such as "constructor" is found only where a run has it.
    for (const part of ["curves", "config", "costs", "best"]) Object.setPrototypeOf(run[part], null);
    run.clocks = { samples: cleanClock(run.clock.samples), seconds: cleanClock(run.clock.seconds) };
  }
}

function layOutCharts() {
  const key = JSON.stringify(data.groups);
  if (key === groupsKey) return;
  groupsKey = key;
  const states = [...document.querySelectorAll("#groups details")].map((each) => [each.dataset.name, each.open]);
  const openByName = new Map(states);
  put("groups", ...data.groups.map((group) => {
    for (const metric of group.metrics) if (!charts.has(metric)) charts.set(metric, new Chart(metric));
    const isOpen = openByName.has(group.name) ? openByName.get(group.name) : !group.is_folded;
    const details = element("details", { "data-name": group.name, open: isOpen },
      element("summary", {}, `${group.name} (${group.metrics.length})`),
      element("div", { class: "grid" }, ...group.metrics.map((metric) => charts.get(metric).figure)));
    details.addEventListener("toggle", drawCharts);
    return details;
  }));
  if (!data.groups.length) put("groups", element("p", { class: "quiet" }, "No curves yet."));
}

function drawCharts() {
  for (const chart of charts.values()) {
    chart.figure.hidden = !chart.metric.toLowerCase().includes(state.filter);
  }
  const groups = [...byId("groups").querySelectorAll("details")];
  for (const group of groups) group.hidden = !group.querySelector("figure:not([hidden])");
  const hasNone = groups.length && groups.every((group) => group.hidden);
  byId("no-match").textContent = hasNone ? "No metric has this in its name." : "";
  for (const chart of charts.values()) {
    if (chart.figure.clientWidth) chart.draw(data.runs, state); // a closed group has no width
  }
}

function showSwitches() {
  const runs = data.runs.length > 1 ? data.runs : [];
  const key = JSON.stringify([isDark(), ...runs.map((run) => run.name)]);
  if (key !== switchesKey) put("run-switches", ...runs.map((run, index) => {
    const box = element("input", { type: "checkbox", checked: !state.hidden.has(index) });
    box.addEventListener("change", () => {
      if (box.checked) state.hidden.delete(index);
      else state.hidden.add(index);
      drawCharts();
    });
    return element("label", {}, box, swatch(index), run.name);
  }));
  switchesKey = key;
  const kinds = Object.keys(KINDS).filter((kind) => data.runs.some((run) => run.marks.some((m) => m.kind === kind)));
  put("mark-legend", kinds.length && element("span", {}, kinds.map((kind) => KINDS[kind].join(" ")).join(" \u00B7 ")));
}

function pictureSteps() {
  return [...new Set(data.runs.flatMap((run) => run.pictures.map((picture) => picture.step)))].sort((a, b) => a - b);
}

function showSlider() {
  const steps = pictureSteps();
  const slider = byId("sample");
  slider.max = Math.max(0, steps.length - 1);
  slider.disabled = steps.length < 2;
  const at = state.step === Infinity ? steps.length - 1 : Math.max(0, lowerBound(steps, state.step));
  slider.value = Math.min(at, steps.length - 1);
  showChosenPictures();
}

function showChosenPictures() {
  const steps = pictureSteps();
  const step = steps[Number(byId("sample").value)];
  byId("sample-value").textContent = step === undefined ? "none" : step.toLocaleString("en");
  byId("sample").setAttribute("aria-valuetext", step === undefined ? "no pictures" : `update ${step}`);
  showPictures(data.runs, step === undefined ? 0 : step);
}

function showAll() {
  const number = data.runs.length;
  byId("created").textContent = `${number} run${number === 1 ? "" : "s"}, as of ${timeText(data.created)}`;
  showRuns(data.runs);
  showSwitches();
  layOutCharts();
  drawCharts();
  showSlider();
  showBest(data);
  byId("differs").disabled = data.runs.length < 2;
  showSettings(data.runs, byId("differs").checked);
  showCosts(data.runs);
  showFaults(data.runs);
  showStarts(data.runs);
}

let waiting = false;
function drawSoon() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    drawCharts();
  });
}

function listen() {
  byId("axis").addEventListener("change", (event) => { state.axis = event.target.value; drawCharts(); });
  byId("log").addEventListener("change", (event) => { state.log = event.target.checked; drawCharts(); });
  byId("show-marks").addEventListener("change", (event) => { state.marks = event.target.checked; drawCharts(); });
  byId("smooth").addEventListener("input", (event) => {
    state.smooth = Number(event.target.value);
    byId("smooth-value").textContent = `${state.smooth}%`;
    drawSoon();
  });
  byId("filter").addEventListener("input", (event) => {
    state.filter = event.target.value.trim().toLowerCase();
    drawSoon();
  });
  byId("sample").addEventListener("input", (event) => {
    const steps = pictureSteps();
    const at = Number(event.target.value);
    state.step = at === steps.length - 1 ? Infinity : steps[at]; // at the end, newer pictures are followed
    showChosenPictures();
  });
  byId("differs").addEventListener("change", (event) => showSettings(data.runs, event.target.checked));
  byId("theme").addEventListener("change", (event) => {
    if (event.target.value) document.documentElement.dataset.theme = event.target.value;
    else delete document.documentElement.dataset.theme;
    showAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showAll);
  let width = document.documentElement.clientWidth;
  addEventListener("resize", () => {
    if (document.documentElement.clientWidth === width) return;
    width = document.documentElement.clientWidth;
    for (const chart of charts.values()) chart.resize();
  });
}

// The contents of pictures, which data from --watch have by key alone, are asked for once each.
async function fetchPictures(runs) {
  const newer = new Map();
  for (const picture of runs.flatMap((run) => run.pictures).filter((each) => each.key)) {
    const { key } = picture;
    if (!newer.has(key)) {
      const answer = sources.has(key) ? null : await fetch(`/picture?${key}`);
      if (!answer || answer.ok) newer.set(key, answer ? await answer.text() : sources.get(key));
    }
    picture.src = newer.get(key);
  }
  sources = newer;
}

// Ask for newer data, as long as the page is open.
async function follow(version) {
  const lost = byId("lost");
  try {
    const answer = document.hidden ? null : await fetch(`/data?${version}`);
    if (answer && answer.status === 200) {
      const newer = await answer.json();
      await fetchPictures(newer.data.runs);
      version = newer.version;
      prepare(newer.data);
      showAll();
    }
    if (answer) lost.hidden = true;
  } catch {
    lost.textContent = "report.py --watch no longer answers: this is what it sent last.";
    lost.hidden = false;
  }
  setTimeout(() => follow(version), READ_AGAIN_MS);
}

prepare(JSON.parse(byId("data").textContent));
listen();
showAll();
// Milliseconds since the page was asked for.
document.documentElement.dataset.drawn = String(Math.round(performance.now()));
const { version } = document.body.dataset;
if (version) fetchPictures(data.runs).then(showChosenPictures, () => {}).then(() => follow(version));
