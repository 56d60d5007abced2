"use strict";
// What the other scripts share: elements, numbers as text, and arithmetic of curves. Every text enters the page as
// text (textContent), never as HTML.

function element(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

const byId = (id) => document.getElementById(id);

function put(id, ...children) {
  byId(id).replaceChildren(...children.filter(Boolean));
}

// One colour for each run; beyond eight runs the lines are dashed. All have a contrast of at least 3 to the card.
const COLOURS = {
  light: ["#0b62a8", "#b8470b", "#1b7a3d", "#8a3ea8", "#a8183a", "#4d5a66", "#7a6400", "#00727a"],
  dark: ["#6db3f2", "#ff9e5e", "#6fd08c", "#d59bf0", "#ff8296", "#b9c4cf", "#dcc54c", "#58d0d6"],
};
const KINDS = {
  killed: ["\u2716", "killed or failed, then started again"],
  resumed: ["\u25B6", "stopped when asked to, then started again"],
  extended: ["\u279C", "extended"],
  skipped: ["\u26A0", "updates skipped"],
  bad: ["\u25CB", "bad samples"],
};

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

const colourOf = (index) => COLOURS[isDark() ? "dark" : "light"][index % 8];
const dashOf = (index) => [[], [8, 4], [2, 3]][Math.floor(index / 8) % 3];
const styleOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function swatch(index) {
  const node = element("span", { class: "swatch", "aria-hidden": "true" });
  const colour = colourOf(index);
  const [on, off] = dashOf(index);
  node.style.background = on
    ? `repeating-linear-gradient(90deg, ${colour} 0 ${on}px, transparent ${on}px ${on + off}px)` : colour;
  return node;
}

function numberText(value, digits = 5) {
  if (value === null || value === undefined || Number.isNaN(value)) return "not finite";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en");
  if (size >= 1e7 || size < 1e-3) return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

function secondsText(seconds) {
  const whole = Math.round(seconds);
  if (seconds < 10) return `${Number(seconds.toPrecision(3))} s`;
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600).toLocaleString("en")} h ${Math.floor((whole % 3600) / 60)} min`;
}

function countText(value) {
  for (const [size, sign] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= size) return `${Number((value / (sign === "k" ? 1e3 : size)).toPrecision(4))}${sign}`;
  }
  return Number(value.toPrecision(5)).toLocaleString("en");
}

// First index whose value is not below `value`, in a sorted list.
function lowerBound(sorted, value) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Index of the nearest point that has a value; -1 if none has.
function nearest(xs, ys, x) {
  let right = lowerBound(xs, x);
  let left = right - 1;
  while (left >= 0 && ys[left] === null) left -= 1;
  while (right < xs.length && ys[right] === null) right += 1;
  if (left < 0) return right < xs.length ? right : -1;
  return right < xs.length && xs[right] - x < x - xs[left] ? right : left;
}

// A clock's value at an update, on straight lines between the updates at which it is known; null if it never is.
function clockAt(clock, step) {
  const { x, y } = clock;
  if (!x.length) return null;
  const next = lowerBound(x, step);
  if (next === 0) return x[0] > 0 ? (y[0] * step) / x[0] : y[0];
  if (next === x.length) return y[x.length - 1];
  const part = (step - x[next - 1]) / (x[next] - x[next - 1]);
  return y[next - 1] + part * (y[next] - y[next - 1]);
}

// A clock without gaps, that never goes back.
function cleanClock(curve) {
  const clock = { x: [], y: [] };
  let highest = 0;
  (curve ? curve.x : []).forEach((step, index) => {
    const value = curve.y[index];
    if (value === null) return;
    highest = Math.max(highest, value);
    clock.x.push(step);
    clock.y.push(highest);
  });
  return clock;
}

// Exponential average of the values so far: a value weighs exp(-d / length) at a distance d along the axis, whatever
// the number of points between, so that runs that logged at different intervals are smoothed alike. It is divided by
// the sum of its weights, so that it has no bias towards 0 at the beginning (Kingma and Ba 2015, section 3).
function smoothed(xs, values, length) {
  if (!length) return values;
  let sum = 0;
  let weights = 0;
  return values.map((value, index) => {
    const decay = index ? Math.exp((xs[index - 1] - xs[index]) / length) : 0;
    sum = decay * sum + (value === null ? 0 : value);
    weights = decay * weights + (value === null ? 0 : 1);
    return value === null ? null : sum / weights;
  });
}

// A time as the run folder has it, such as 2026-01-31T12:00:00+00:00, for people; any other text as it is.
const timeText = (text) => text.replace(/^(\d{4}-\d\d-\d\d)T(\d\d:\d\d):\d\d\+00:00$/, "$1 $2 UTC");

// A name that may be broken after / and _, as children of an element.
const breakable = (name) => (name.match(/[^/_]*[/_]|[^/_]+/g) || [])
  .flatMap((part, index) => (index ? [element("wbr"), part] : [part]));

// Names without the words that all begin with, if these are long.
function shortNames(names) {
  let shared = names.length > 1 ? names[0] : "";
  while (!names.every((name) => name.startsWith(shared))) shared = shared.slice(0, -1);
  shared = shared.replace(/[^/_.\-\s]*$/, "");
  return names.map((name) => (shared.length < 8 || name === shared ? name : `\u2026${name.slice(shared.length)}`));
}
