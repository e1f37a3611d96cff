// The behaviour of the page: theme, charts, the list of groups and trees, search, and the text of a node.

const list = { kind: "groups", sort: "overlap", down: true, shown: 0, query: "", part: null, parts: {} };
const MORE = 50; // rows of the list at first, and with each "Show more"
const MAX_HITS = 8; // rollouts listed for a search
let forest, tree;

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

async function drawCharts() {
  const script = document.createElement("script");
  script.textContent = inText(await block("vega"));
  document.head.append(script);
  const formatTooltip = (value) => {
    const cell = (name, text) => `<tr><td class="key">${name}</td><td class="value">${text}</td></tr>`;
    return `<table>${Object.entries(value).map(([name, text]) => cell(name, text)).join("")}</table>`;
  };
  const options = { mode: "vega-lite", renderer: "svg", actions: false, tooltip: { theme: "page", formatTooltip } };
  for (const [name, spec] of Object.entries(page.charts)) {
    await window.vegaEmbed(`#chart-${name}`, spec, options);
    byId(`chart-${name}`).dataset.drawn = "true";
  }
}

// The list of groups or trees.

const rows = () => {
  const parts = list.parts[list.kind];
  return parts.names.map((name, part) => part).filter((part) => matches(parts, part));
};

function matches(parts, part) {
  if (!list.query) return true;
  return parts.names[part].toLowerCase().includes(list.query) || list.matches.has(part);
}

const VALUES = {
  name: (parts, part) => parts.names[part],
  rollouts: (parts, part) => parts.members[part].length,
  tokens: (parts, part) => parts.flat[part],
  overlap: (parts, part) => 1 - parts.tree[part] / parts.flat[part],
  reward: (parts, part) => parts.reward[part],
};

function sorted() {
  const parts = list.parts[list.kind];
  const value = VALUES[list.sort];
  const collator = new Intl.Collator("en", { numeric: true });
  const compare = (a, b) => {
    const x = value(parts, a), y = value(parts, b);
    if (list.sort === "name") return collator.compare(x, y);
    return (Number.isNaN(x) ? -Infinity : x) - (Number.isNaN(y) ? -Infinity : y);
  };
  return rows().sort((a, b) => (list.down ? compare(b, a) : compare(a, b)) || a - b);
}

function listRow(parts, part) {
  const overlap = VALUES.overlap(parts, part);
  const name = parts.names[part];
  const shown = parts.common ? `\u2026${name.slice(parts.common)}` : name;
  const go = () => openPart(part);
  const open = make("button", { type: "button", class: "open", "aria-label": name, onclick: go }, shown);
  const current = part === list.part && list.kind === list.openKind;
  return make(
    "tr", { class: current ? "current" : null, "aria-current": current ? "true" : null },
    make("th", { scope: "row", title: name }, open),
    make("td", {}, count(parts.members[part].length)),
    make("td", { class: "wide-only" }, count(parts.flat[part])),
    make("td", { class: "bar", style: `--share: ${(100 * overlap).toFixed(1)}%` }, percent(overlap)),
    make("td", {}, short(parts.reward[part])),
  );
}

function showList(more = MORE) {
  const parts = list.parts[list.kind];
  const order = sorted();
  list.shown = Math.min(order.length, more);
  byId("rows").replaceChildren(...order.slice(0, list.shown).map((part) => listRow(parts, part)));
  byId("more").hidden = list.shown === order.length;
  byId("shown").textContent = `${count(list.shown)} of ${plural(order.length, list.kind.slice(0, -1))}`;
  for (const head of document.querySelectorAll("[data-sort]")) {
    const on = head.dataset.sort === list.sort;
    head.parentElement.setAttribute("aria-sort", on ? (list.down ? "descending" : "ascending") : "none");
  }
  for (const button of document.querySelectorAll("[data-kind]")) {
    button.setAttribute("aria-pressed", String(button.dataset.kind === list.kind));
  }
}

// Search: names of groups, and ids of rollouts, which have a list of their own.

function search() {
  list.query = byId("search").value.trim().toLowerCase();
  list.matches = new Set();
  const parts = list.parts[list.kind];
  const hits = [];
  if (list.query) {
    forest.lower ??= forest.ids.map((id) => String(id).toLowerCase());
    forest.lower.forEach((id, rollout) => {
      if (!id.includes(list.query)) return;
      list.matches.add(parts.of[rollout]);
      hits.push(rollout);
    });
  }
  hits.sort((a, b) => forest.lower[a].length - forest.lower[b].length || a - b);
  const items = hits.slice(0, MAX_HITS).map((rollout) => {
    const name = parts.names[parts.of[rollout]];
    const go = () => openPart(parts.of[rollout], rollout);
    const where = make("small", {}, ` in ${name}`);
    return make("li", {}, make("button", { type: "button", onclick: go }, forest.ids[rollout], where));
  });
  byId("hits").replaceChildren(...items);
  byId("hits").hidden = !items.length;
  const more = hits.length > MAX_HITS ? `, ${MAX_HITS} shown` : "";
  byId("hit-count").textContent = list.query ? `${plural(hits.length, "rollout")} with this id${more}` : "";
  showList();
}

function openPart(part, rollout = null) {
  const parts = list.parts[list.kind];
  Object.assign(list, { part, openKind: list.kind });
  byId("part-name").textContent = parts.names[part];
  byId("part-facts").textContent = [
    plural(parts.members[part].length, "rollout"), `${count(parts.flat[part])} tokens one by one`,
    `${count(parts.tree[part])} shared once`, `${percent(VALUES.overlap(parts, part))} repeats`,
  ].join(" \u00b7 ");
  showList(Math.max(MORE, list.shown));
  const root = treeOf(forest, parts.members[part]);
  tree.show(root);
  if (rollout !== null) tree.reveal(nodeOfRollout(root, rollout));
  else tree.select(root);
}

// The text of a node, and of the whole path to it.

let whole = false, turn = 0;

function textPieces(pieces) {
  const dimmed = (text) =>
    special ? text.split(special).map((part, k) => (k % 2 ? make("span", { class: "special" }, part) : part)) : [text];
  return pieces.map((piece) => {
    if (piece.gap) return make("span", { class: "gap" }, piece.text);
    return make(piece.trained ? "mark" : "span", {}, ...dimmed(piece.text));
  });
}

async function section(node, own) {
  const facts = `tokens ${count(node.start)} to ${count(node.start + node.size)}, ${plural(node.count, "rollout")}`;
  const { pieces } = page.text === "none" ? { pieces: [] } : await piecesOf(forest, node);
  const head = make("button", { type: "button", class: "place", onclick: () => tree.reveal(node) }, facts);
  const text = make("pre", {}, ...textPieces(pieces));
  return make("section", { class: own ? "own" : null }, ...(whole ? [head] : []), text);
}

async function showText(node) {
  const now = ++turn;
  const reward = meanOf(node, "reward"), advantage = meanOf(node, "advantage");
  byId("text-facts").textContent = [
    `tokens ${count(node.start)} to ${count(node.start + node.size)}`,
    plural(node.size, "token"),
    plural(node.count, "rollout"),
    Number.isNaN(reward) ? null : `mean reward ${short(reward)}`,
    Number.isNaN(advantage) ? null : `mean advantage ${short(advantage)}`,
  ].filter(Boolean).join(" \u00b7 ");
  const rewarded = (i) => (Number.isNaN(forest.reward[i]) ? "" : ` (${short(forest.reward[i])})`);
  const ends = node.ends.slice(0, 20).map((i) => `${forest.ids[i]}${rewarded(i)}`);
  const more = node.ends.length > 20 ? `, and ${count(node.ends.length - 20)} more` : "";
  byId("text-ends").textContent = ends.length ? `Ends here: ${ends.join(", ")}${more}` : "";
  byId("text").hidden = false;
  for (const button of document.querySelectorAll("[data-whole]")) {
    button.setAttribute("aria-pressed", String((button.dataset.whole === "true") === whole));
  }
  byId("text-body").dataset.ready = "false";
  const nodes = whole ? pathTo(node) : node.parts.length ? [node] : [];
  const sections = await Promise.all(nodes.map((each) => section(each, each === node)));
  if (now !== turn) return; // another node was opened meanwhile
  byId("text-body").replaceChildren(...sections);
  byId("text-body").dataset.ready = "true";
  if (whole) byId("text-body").querySelector(".own")?.scrollIntoView({ block: "nearest" });
}

function showLegend({ key, domain, colour, zoomed }) {
  const stops = [0, 0.25, 0.5, 0.75, 1].map((at) => colour(at).fill);
  byId("legend-bar").style.background = `linear-gradient(90deg, ${stops.join(", ")})`;
  const [low, high] = key === "scale" ? [1, Math.round(2 ** domain[1])] : domain;
  byId("legend-low").textContent = short(low);
  byId("legend-high").textContent = short(high);
  byId("zoom-out").disabled = !zoomed;
}

function startColours() {
  const known = (key) => forest[key].some((value) => !Number.isNaN(value));
  const select = byId("colour");
  byId("list").classList.toggle("no-reward", !known("reward"));
  for (const option of select.options) option.disabled = option.value !== "scale" && !known(option.value);
  select.value = ["reward", "advantage", "scale"].find((key) => key === "scale" || known(key));
  select.addEventListener("change", () => tree.setColour(select.value));
  return select.value;
}

function listen() {
  byId("search").addEventListener("input", search);
  byId("search").addEventListener("keydown", (event) => {
    if (event.key === "Enter") (byId("hits").querySelector("button") ?? byId("rows").querySelector("button"))?.click();
  });
  byId("more").addEventListener("click", () => showList(list.shown + MORE));
  byId("zoom-in").addEventListener("click", () => tree.zoom(tree.selected));
  byId("zoom-out").addEventListener("click", () => tree.zoom(tree.root));
  for (const head of document.querySelectorAll("[data-sort]")) {
    head.addEventListener("click", () => {
      list.down = list.sort === head.dataset.sort ? !list.down : head.dataset.sort !== "name";
      list.sort = head.dataset.sort;
      showList();
    });
  }
  for (const button of document.querySelectorAll("[data-kind]")) {
    button.addEventListener("click", async () => {
      await loadKind(button.dataset.kind);
      list.kind = button.dataset.kind;
      search();
    });
  }
  for (const button of document.querySelectorAll("[data-whole]")) {
    button.addEventListener("click", () => ((whole = button.dataset.whole === "true"), showText(tree.selected)));
  }
  let width = innerWidth;
  addEventListener("resize", () => innerWidth !== width && ((width = innerWidth), tree.redraw()));
}

// Number of letters that all names begin with; 0 if it is below 6, because then hiding them would not help.
function commonStart(names) {
  let size = names.length > 1 ? names[0].length : 0;
  for (const name of names) while (!name.startsWith(names[0].slice(0, size))) size--;
  while (size && /[\p{L}\p{N}]/u.test(names[0][size - 1])) size--; // cut no word and no number
  return size >= 6 ? size : 0;
}

async function loadKind(kind) {
  if (list.parts[kind]) return;
  const parts = await loadParts(kind);
  parts.reward = parts.members.map((members) => mean(forest.reward, members));
  parts.common = commonStart(parts.names);
  list.parts[kind] = parts;
}

async function startExplorer() {
  forest = await loadForest();
  await loadKind("groups");
  tree = new TreeView({ svg: byId("tree"), forest, onOpen: showText, onChange: showLegend });
  const key = startColours();
  listen();
  showList();
  openPart(sorted()[0]);
  tree.setColour(key);
}

startTheme();
await startExplorer();
document.documentElement.dataset.explorer = "ready";
await drawCharts();
document.documentElement.dataset.charts = "ready";
