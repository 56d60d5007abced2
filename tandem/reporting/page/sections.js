"use strict";
// Everything on the page that is no curve: runs, pictures and tables.

function table(label, head, rows) {
  const node = element("table", {}, element("thead", {}, element("tr", {}, ...head.map((text) =>
    element("th", { scope: "col" }, text)))), element("tbody", {}, ...rows));
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, node);
}

// Put a table in place of the previous one. Keeps how far that was scrolled, and its focus.
function putTable(id, node) {
  const previous = byId(id).querySelector(".scroll");
  const left = previous ? previous.scrollLeft : 0;
  const hasFocus = previous !== null && previous === document.activeElement;
  put(id, node);
  if (left) node.scrollLeft = left;
  if (hasFocus) node.focus({ preventScroll: true });
}

function showRuns(runs) {
  put("run-list", ...runs.map((run, index) => element("div", { class: "card run" },
    element("h3", {}, swatch(index), run.name),
    element("p", {}, [run.script, run.status].filter(Boolean).join(" \u00B7 ")),
    element("p", { class: "quiet" }, run.path),
    ...run.notes.map((note) => element("p", { class: "note" }, note)))));
}

function showPictures(runs, step) {
  const figures = [];
  for (const run of runs) {
    const shown = run.pictures.filter((picture) => picture.step <= step);
    const steps = (shown.length ? shown : run.pictures).map((picture) => picture.step);
    const at = shown.length ? Math.max(...steps) : Math.min(...steps);
    for (const picture of run.pictures.filter((each) => each.step === at)) {
      const model = picture.model ? `, ${picture.model}` : "";
      const caption = element("figcaption", {}, `${run.name}${model}, update ${at.toLocaleString("en")}`);
      const small = picture.width < 300;
      const image = picture.src
        ? element("img", { src: picture.src, width: small ? 2 * picture.width : picture.width, class: small && "small",
          height: small ? 2 * picture.height : picture.height, alt: `Pictures of ${run.name}${model} at update ${at}` })
        : element("p", { class: "note" },
          picture.error ? `this picture cannot be shown: ${picture.error}` : "this picture is not loaded yet");
      figures.push(element("figure", {}, caption, image));
    }
  }
  put("pictures", ...(figures.length ? figures : [element("p", { class: "quiet" }, "No pictures yet.")]));
}

function showBest(data) {
  const rows = [];
  const several = data.runs.length > 1;
  for (const group of data.groups) {
    for (const metric of group.metrics) {
      const side = data.directions[metric];
      const ends = data.runs.map((run) => run.curves[metric] && side && run.curves[metric][side])
        .filter(Boolean).map((pair) => pair[0]);
      const best = ends.length ? (side === "low" ? Math.min(...ends) : Math.max(...ends)) : null;
      data.runs.forEach((run, index) => {
        const curve = run.curves[metric];
        if (!curve) return;
        const cell = (name) => {
          const pair = curve[name];
          if (!pair) return element("td", { class: "number" }, "\u2013");
          const star = name === side && pair[0] === best ? element("span", { class: "star" }, " \u2605") : null;
          return element("td", { class: "number" }, numberText(pair[0]), star, " ",
            element("span", { class: "quiet" }, `at ${numberText(pair[1], 7)}`));
        };
        const missing = curve.missing ? `, ${numberText(curve.missing)} not finite` : "";
        rows.push(element("tr", {}, element("th", { scope: "row" }, ...breakable(metric)),
          several ? element("td", { class: "run" }, swatch(index), ` ${run.name}`) : null,
          cell("last"), cell("low"), cell("high"),
          element("td", { class: "number" }, numberText(curve.count) + missing)));
      });
    }
  }
  for (const run of data.runs) {
    const facts = Object.entries(run.best).map(([name, value]) => `${name} ${value}`).join(", ");
    if (facts) {
      rows.push(element("tr", {}, element("th", { scope: "row" }, "best/"),
        element("td", { colspan: several ? 5 : 4 }, `${run.name}: ${facts}`)));
    }
  }
  const head = ["Metric", several && "Run", "Last", "Lowest", "Highest", "Values"].filter(Boolean);
  putTable("best-table", rows.length ? table("Best values", head, rows)
    : element("p", { class: "quiet" }, "No values yet."));
}

// Names in the order of the runs, each once.
const allNames = (runs, part) => [...new Set(runs.flatMap((run) => Object.keys(run[part])))];

function showSettings(runs, onlyDiffering) {
  const rows = [];
  const chosen = new Set(runs.flatMap((run) => run.chosen));
  const names = allNames(runs, "config");
  const isChosen = (name) => chosen.has(name);
  for (const name of [...names.filter(isChosen), ...names.filter((each) => !isChosen(each))]) {
    const values = runs.map((run) => (Object.hasOwn(run.config, name) ? run.config[name] : null));
    const differs = values.some((value) => value !== values[0]);
    if (onlyDiffering && !differs) continue;
    const kinds = [differs && "differs", isChosen(name) && "chosen"].filter(Boolean).join(" ");
    rows.push(element("tr", { class: kinds || null },
      element("th", { scope: "row" }, differs ? "\u2260 " : "", ...breakable(name)),
      ...values.map((value) => element("td", {}, value === null ? "\u2013" : value || "\u201C\u201D"))));
  }
  const nothing = onlyDiffering ? "No setting differs." : "No settings are known.";
  putTable("settings-table", rows.length ? table("Settings", ["Setting", ...runs.map((run) => run.name)], rows)
    : element("p", { class: "quiet" }, nothing));
}

function showCosts(runs) {
  const rows = allNames(runs, "costs").map((name) => element("tr", {}, element("th", { scope: "row" }, name),
    ...runs.map((run) => element("td", { class: "number" }, run.costs[name] || "\u2013"))));
  if (runs.some((run) => run.profiles.length)) {
    rows.push(element("tr", {}, element("th", { scope: "row" }, "files in profile/"),
      ...runs.map((run) => element("td", {}, run.profiles.join(", ") || "\u2013"))));
  }
  putTable("costs-table", rows.length ? table("Costs", ["", ...runs.map((run) => run.name)], rows)
    : element("p", { class: "quiet" }, "No costs are known."));
}

function showFaults(runs) {
  put("fault-list", ...runs.map((run, index) => element("div", { class: "card" },
    element("h3", {}, swatch(index), run.name),
    run.marks.length
      ? element("ul", { class: "faults" }, ...run.marks.map((mark) => element("li", {},
        element("span", { class: "sign", "aria-hidden": "true" }, KINDS[mark.kind][0]),
        ` ${mark.text}`)))
      : element("p", { class: "quiet" }, "Neither faults nor resumes."))));
}

let startsShown = null;

// Made anew only if something differs, so that what has the focus keeps it.
function showStarts(runs) {
  const facts = JSON.stringify([isDark(), runs.map((run) => run.starts)]);
  if (facts === startsShown) return;
  startsShown = facts;
  const open = new Set([...document.querySelectorAll("#start-list details[open]")].map((each) => each.dataset.key));
  const isFirst = !byId("start-list").children.length;
  put("start-list", ...runs.map((run, index) => element("div", { class: "card" },
    element("h3", {}, swatch(index), run.name),
    ...(run.starts.length ? run.starts.map((start, number) => {
      const key = `${run.path} ${number}`;
      const place = [start.backend, start.processes && `x ${start.processes}`, start.device].filter(Boolean).join(" ");
      const where = [timeText(start.time || ""), start.host, place].filter(Boolean).join(" \u00B7 ");
      const isOpen = isFirst ? number === run.starts.length - 1 && runs.length < 3 : open.has(key);
      return element("details", { "data-key": key, open: isOpen }, element("summary", {}, `${number + 1}. ${where}`),
        element("dl", {}, ...Object.entries(start).flatMap(([label, value]) =>
          [element("dt", {}, label), element("dd", {}, value)])));
    }) : [element("p", { class: "quiet" }, "Nothing is known.")]))));
}
