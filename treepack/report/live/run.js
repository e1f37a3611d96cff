// The start of the page of a run: facts, curves and rollouts, from the events of a server or from the page itself.
//
//   snapshot or reset {facts, charts, data}   charts anew       steps {facts, data}   the points are appended

const views = new Map(); // the view of Vega of each chart, by its name
let shownCharts = ""; // titles and specifications of the charts on the page
let pending = null; // points that are not drawn yet
let drawing = false;
let lastShown = 0; // the last step in the explorer
let reading = false; // while rollouts are on their way
let vega = null; // fulfilled when charts can be drawn
let since = null; // when the command started, in seconds since 1970, until its first step is done

const pristine = byId("explorer").cloneNode(true);

// Facts: every text is set as text.

const cells = (line) => line.map((text, k) => make(k ? "td" : "th", k ? {} : { scope: "row" }, text));

// The server is on this machine, so its clock is this one.
function showElapsed() {
  byId("elapsed").textContent = since === null ? "" : `, ${Math.max(0, Math.round(Date.now() / 1000 - since))} s since the command started`;
}

function showFacts(facts) {
  since = page.live ? facts.since : null;
  showElapsed();
  page.hasRollouts = page.live ? facts.has_rollouts : page.hasRollouts;
  byId("no-step")?.removeAttribute("hidden");
  byId("plan").hidden = !facts.plan.length && !facts.last_step;
  byId("start").hidden = !facts.start.length;
  byId("start").replaceChildren(...facts.start.map(([time, text]) => make("li", {}, make("span", {}, time), ` ${text}`)));
  byId("state").textContent = facts.state;
  byId("dot").className = `dot ${facts.kind}`;
  byId("progress").textContent = facts.progress;
  byId("track").hidden = facts.share === null;
  byId("done").style.width = `${(100 * (facts.share ?? 0)).toFixed(2)}%`;
  byId("track").setAttribute("aria-valuenow", Math.round(100 * (facts.share ?? 0)));
  byId("tiles").replaceChildren(...facts.tiles.map(([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  byId("notes").replaceChildren(...facts.notes.map((note) => make("li", {}, note)));
  byId("plan-rows").replaceChildren(...facts.plan.map((line) => make("tr", {}, ...cells(line))));
  byId("metrics").replaceChildren(...facts.metrics.map((line) => make("tr", {}, ...cells(line))));
  showSlowest("slowest", facts.slowest);
  showSlowest("passes", facts.passes.map((line) => line.slice(0, -1)));
  const command = facts.passes[0]?.at(-1);
  byId("no-passes").hidden = facts.passes.length > 0;
  byId("passes-table").hidden = !facts.passes.length;
  byId("show-row").hidden = !command;
  byId("show-command").textContent = command ?? "";
  document.title = `${facts.progress.split(",")[0]}: treepack run`;
  if (page.live && page.hasRollouts) {
    byId("newest").hidden = !(lastShown && facts.last_step && facts.last_step !== lastShown);
    if (!lastShown && facts.last_step) showRollouts(null);
  }
}

// Each step has a button that shows its rollouts, if the page has them or can get them.
function showSlowest(id, lines) {
  byId(id).replaceChildren(...lines.map(([step, ...others]) => {
    const number = Number(step);
    const known = page.hasRollouts && (page.live || (number >= page.first && number <= page.last));
    const name = known
      ? make("button", { type: "button", title: "Show its rollouts", onclick: () => showRollouts(number) }, count(number))
      : count(number);
    return make("tr", {}, make("th", { scope: "row" }, name), ...others.map((text) => make("td", {}, text)));
  }));
}

// Curves.

const rowsOf = (lines) => Object.entries(lines).flatMap(([line, [steps, values]]) =>
  steps.map((step, k) => ({ line, step, value: values[k] })));

const rowsOfChart = (data, name) => ({
  points: rowsOf(data[name].points), mean: rowsOf(data[name].mean), skipped: data.skipped.map((step) => ({ step })),
});

async function showCharts(charts, data) {
  const wanted = JSON.stringify(charts);
  if (wanted !== shownCharts) {
    for (const view of views.values()) view.finalize();
    views.clear();
    byId("charts").replaceChildren(...charts.map(({ name, title }) =>
      make("figure", { class: "card", "aria-labelledby": `title-${name}` },
        make("h3", { id: `title-${name}` }, title), make("div", { class: "chart", id: `chart-${name}` }))));
    for (const { name, spec } of charts) views.set(name, await drawChart(name, { ...spec, datasets: rowsOfChart(data, name) }));
    shownCharts = wanted;
    return;
  }
  for (const [name, view] of views) {
    for (const [kind, rows] of Object.entries(rowsOfChart(data, name))) view.data(kind, rows);
    await view.runAsync();
  }
}

async function appendPoints(data) {
  for (const [name, view] of views) {
    for (const [kind, rows] of Object.entries(rowsOfChart(data, name))) view.insert(kind, rows);
    await view.runAsync();
  }
}

function joined(before, after) {
  if (!before) return after;
  for (const [name, kinds] of Object.entries(after)) {
    if (name === "skipped") before.skipped.push(...kinds);
    else
      for (const [kind, lines] of Object.entries(kinds))
        for (const [line, columns] of Object.entries(lines))
          columns.forEach((column, k) => before[name][kind][line][k].push(...column));
  }
  return before;
}

// At most one drawing a second, and none while nobody looks: points that come meanwhile are drawn together.
async function draw() {
  if (drawing || document.hidden || !pending) return;
  drawing = true;
  const { charts, data } = pending;
  pending = null;
  try {
    await vega;
    if (charts) await showCharts(charts, data);
    else await appendPoints(data);
  } finally {
    document.documentElement.dataset.charts = "ready";
    setTimeout(() => ((drawing = false), draw()), page.live ? 1000 : 0);
  }
}

function showSnapshot({ facts, charts, data }) {
  showFacts(facts);
  if (facts.last_step) pending = { charts, data };
  draw();
}

function showSteps({ facts, data }) {
  showFacts(facts);
  if (Object.keys(data).length) pending = { charts: pending?.charts ?? null, data: joined(pending?.data, data) };
  draw();
}

// Rollouts: the explorer of the page about sharing, started again with other steps.

async function openExplorer(about) {
  byId("explorer").replaceWith(pristine.cloneNode(true));
  byId("rollouts").hidden = false;
  byId("rollouts-about").textContent = about;
  await startExplorer();
  document.documentElement.dataset.explorer = "ready";
}

async function fetchRollouts(step) {
  lastShown ||= 1; // asked once
  byId("rollouts-about").textContent = "Reading the rollouts.";
  byId("newest").hidden = true;
  const answer = await (await fetch(step ? `rollouts?step=${step}` : "rollouts")).json();
  if (answer.error) {
    byId("rollouts").hidden = false;
    byId("rollouts-about").textContent = `Rollouts are not shown: ${answer.error}`;
    return false;
  }
  lastShown = answer.last;
  usePage(answer.settings, answer.blocks);
  await openExplorer(answer.about);
  return true;
}

async function showRollouts(step) {
  if (reading) return;
  if (page.live) {
    reading = true;
    try {
      if (!(await fetchRollouts(step))) return;
    } finally {
      reading = false;
    }
  }
  if (!step) return;
  byId("search").value = `(step ${step})`;
  list.search();
  byId("rollouts").scrollIntoView();
}

function listen() {
  const source = new EventSource("events");
  const parsed = (show) => (event) => show(JSON.parse(event.data));
  for (const name of ["snapshot", "reset"]) source.addEventListener(name, parsed(showSnapshot));
  source.addEventListener("steps", parsed(showSteps));
  // After any end but the last one the browser asks again, because a resumed run has the same address.
  source.addEventListener("end", () => byId("dot").matches(".finished") && source.close());
  source.addEventListener("error", () => {
    if (byId("dot").matches(".running, .starting, .waiting")) byId("state").textContent = "the page has lost its connection, and tries again";
  });
  document.addEventListener("visibilitychange", draw);
  byId("newest").addEventListener("click", () => showRollouts(null));
}

startTheme();
redrawOnResize();
if (page.live) {
  vega = loadVega("vega.js"); // without waiting: the lines before the first step need no charts
  listen();
  setInterval(showElapsed, 1000);
} else {
  await loadVega();
  showSnapshot(JSON.parse(inText(await block("run"))));
  if (page.hasRollouts) await openExplorer(page.about);
}
