// The parts of a page: theme, charts, and the explorer with its list, tree and text.
//
//   startTheme()      loadVega() and drawChart(name, spec) -> view of Vega      startExplorer()

let forest, tree, text, list;

function make(name, attributes = {}, ...inside) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "onclick") made.addEventListener("click", value);
    else if (value !== null) made.setAttribute(key, value);
  }
  made.append(...inside);
  return made;
}

// Theme: that of the system until a reader presses the button.

const systemDark = matchMedia("(prefers-color-scheme: dark)");

function setTheme(theme) {
  const other = theme === "dark" ? "Light" : "Dark";
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = other;
  byId("theme").setAttribute("aria-label", `Use ${other.toLowerCase()} colours`);
  tree?.redraw();
}

function startTheme() {
  const system = () => setTheme(systemDark.matches ? "dark" : "light");
  systemDark.addEventListener("change", system);
  byId("theme").addEventListener("click", () => {
    systemDark.removeEventListener("change", system);
    setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  });
  system();
}

// Charts: the page contains Vega compressed, and Vega draws into the figures.

const escaped = (text) => String(text).replace(/[&<>"]/g, (letter) => `&#${letter.charCodeAt(0)};`);

const formatTooltip = (value) => {
  const cell = (name, text) => `<tr><td class="key">${escaped(name)}</td><td class="value">${escaped(text)}</td></tr>`;
  return `<table>${Object.entries(value).map(([name, text]) => cell(name, text)).join("")}</table>`;
};
// ast: expressions are interpreted, so that the content policy of a page can forbid `eval`.
// logLevel 1: Vega warns of lines that have no point yet.
const CHARTS = { mode: "vega-lite", renderer: "svg", actions: false, ast: true, logLevel: 1, tooltip: { theme: "page", formatTooltip } };

// Vega is a block of the page, or a file of the server that sends the page.
async function loadVega(address = null) {
  const script = document.createElement("script");
  if (!address) script.textContent = inText(await block("vega"));
  else script.src = address;
  const loaded = new Promise((resolve, reject) => Object.assign(script, { onload: resolve, onerror: reject }));
  document.head.append(script);
  if (address) await loaded;
}

async function drawChart(name, spec) {
  const { view } = await window.vegaEmbed(`#chart-${name}`, spec, CHARTS);
  byId(`chart-${name}`).dataset.drawn = "true";
  return view;
}

// The explorer.

const ROLE_NAMES = ["system", "user", "assistant", "tool"];

function showLegend({ key, domain, colour, zoomed, view }) {
  const swatch = (name, label) => make("span", { class: "legend-key" }, make("span", { class: `swatch ${name}` }), label);
  if (key === "role") {
    const roles = page.roles.length ? ROLE_NAMES.map((role) => swatch(`role-${role}`, role)) : [];
    byId("legend").replaceChildren(...roles, swatch("hatched role-unknown", "trained"));
  } else {
    const stops = [0, 0.25, 0.5, 0.75, 1].map((at) => colour(at).fill);
    const [low, high] = key === "scale" ? [1, Math.round(2 ** domain[1])] : domain;
    const bar = make("span", { class: "ramp", style: `background: linear-gradient(90deg, ${stops.join(", ")})` });
    byId("legend").replaceChildren(short(low), bar, short(high));
  }
  byId("zoom-out").disabled = !zoomed;
  byId("fold").disabled = !view.canFold;
  byId("fold").textContent = view.folded ? "Unfold prompt" : "Fold prompt";
}

function startColours() {
  const known = (key) => key === "role" || key === "scale" || forest[key].some((value) => !Number.isNaN(value));
  const select = byId("colour");
  for (const option of select.options) option.disabled = !known(option.value);
  if (!page.roles.length) select.options[0].textContent = "training";
  select.value = page.roles.length ? "role" : ["reward", "advantage", "role"].find(known);
  select.addEventListener("change", () => tree.setColour(select.value));
  return select.value;
}

// Open the tree of some samples, and in it a sample; with `at`, the place where the sample parts is marked.
function openTree(samples, sample, at) {
  const root = treeOf(forest, samples);
  tree.show(root);
  byId("mark-note").textContent = "";
  if (at !== null) {
    tree.mark(nodeOfSample(root, sample), at);
    byId("mark-note").textContent = `Marked: ${forest.ids[sample]} parts from the others at token ${count(at)}.`;
  } else if (sample !== null) tree.reveal(nodeOfSample(root, sample));
  else tree.select(text.whole ? tree.firstEnds(1)[0] : root, true); // a conversation to read from its start
}

async function startExplorer() {
  forest = await loadForest();
  tree = new TreeView({
    svg: byId("tree"), forest, onOpen: (node, isFirst) => text.show(node, isFirst), onChange: showLegend,
  });
  text = new TextView({ forest, tree });
  list = new PartList({ forest, onOpen: openTree });
  tree.key = startColours();
  byId("zoom-in").addEventListener("click", () => tree.zoom(tree.selected));
  byId("zoom-out").addEventListener("click", () => tree.zoom(tree.root));
  byId("fold").addEventListener("click", () => tree.fold(!tree.folded));
  await list.start(page.group);
  for (const button of document.querySelectorAll(".go")) {
    button.addEventListener("click", () => {
      list.openPlace(Number(button.dataset.sample), Number(button.dataset.at));
      byId("part-name").scrollIntoView({ block: "start" });
    });
  }
}

function redrawOnResize() {
  let width = innerWidth;
  addEventListener("resize", () => innerWidth !== width && ((width = innerWidth), tree?.redraw()));
}
