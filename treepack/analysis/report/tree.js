// One tree as SVG: root at the left, nodes as wide as their tokens and as tall as the visible rollouts below them.
//
//   new TreeView({svg, forest, onOpen, onChange}): show(root), select, reveal and zoom(node), setColour(key)
//
// A visible node is an item. Its branches that are not drawn are one more item, a stub, which opens them. The left and
// right arrows move to the parent and the first branch, up and down to siblings; Enter opens a stub or the text of a node.

const SVG = "http://www.w3.org/2000/svg";
const ROWS = 160; // rows that are open at first, and maximum children at once: a few screens
const MAX_OPEN = 1500; // nodes that are open at first
const NARROW = 3; // pixels: narrower branches are a stub
const STUB = 76; // pixels
const LETTER = 7; // pixels of a character, approximately
const FROM_LOW = ["--low", "--mid", "--high"];
const COLOURS = { reward: FROM_LOW, advantage: FROM_LOW, scale: ["--few", "--many"] };

function element(name, attributes = {}, parent = null, text = null) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

// Open level after level while there are free rows and the part below a node is wide enough.
function openSome(focus, pixelsPerToken) {
  let rows = 1;
  const waiting = [focus];
  for (let k = 0; k < Math.min(waiting.length, MAX_OPEN) && rows < ROWS; k++) {
    const node = waiting[k];
    const below = node.far - node.start - node.size;
    if (!node.children.length || (node !== focus && below * pixelsPerToken < NARROW)) continue;
    node.shown = Math.max(node.shown, Math.min(node.children.length, Math.max(8, Math.floor((ROWS - rows) / 3))));
    rows += node.shown - 1 + (node.shown < node.children.length ? 1 : 0);
    waiting.push(...node.children.slice(0, node.shown));
  }
}

// Visible items, depth-first, with the row and number of rows of each. No recursion: trees can be thousands deep.
function itemsOf(focus) {
  const items = [];
  const waiting = [{ node: focus, parent: null, place: 1, of: 1 }];
  let row = 0;
  while (waiting.length) {
    const item = { ...waiting.pop(), row: 0, rows: 1, below: [] };
    item.level = item.parent ? item.parent.level + 1 : 1;
    item.parent?.below.push(item);
    items.push(item);
    const { node } = item;
    const hidden = item.stub ? 0 : node.children.length - node.shown;
    const of = node.shown + (hidden ? 1 : 0);
    if (hidden) waiting.push({ node, stub: hidden, parent: item, place: of, of });
    const last = item.stub ? -1 : node.shown - 1;
    for (let k = last; k >= 0; k--) waiting.push({ node: node.children[k], parent: item, place: k + 1, of });
    if (last < 0 && !hidden) item.row = row++;
  }
  for (const item of items.reverse()) {
    if (!item.below.length) continue;
    item.row = item.below[0].row;
    item.rows = item.below.reduce((sum, below) => sum + below.rows, 0);
  }
  return items.reverse();
}

// A colour scale from the page's variables; value in [0, 1].
function scaleOf(key) {
  const style = getComputedStyle(document.documentElement);
  const colours = COLOURS[key].map((name) => style.getPropertyValue(name));
  const stops = colours.map((colour) => colour.match(/\w\w/g).map((hex) => parseInt(hex, 16)));
  return (value) => {
    const at = Math.min(Math.max(value, 0), 1) * (stops.length - 1);
    const low = Math.min(Math.floor(at), stops.length - 2);
    const rgb = stops[low].map((part, k) => Math.round(part + (at - low) * (stops[low + 1][k] - part)));
    return { fill: `rgb(${rgb})`, dark: rgb[0] * 0.299 + rgb[1] * 0.587 + rgb[2] * 0.114 < 140 };
  };
}

// The range of a tree's colours: rewards of all rollouts, advantages symmetric around 0, or numbers of rollouts.
function domainOf(key, root, forest) {
  if (key === "scale") return [0, Math.log2(Math.max(2, root.count))];
  const values = forest[key].filter((value) => !Number.isNaN(value));
  let low = Infinity, high = -Infinity;
  for (const value of values) (low = Math.min(low, value)), (high = Math.max(high, value));
  const limit = Math.max(Math.abs(low), Math.abs(high), 1e-9);
  if (key === "advantage") return [-limit, limit];
  return high > low ? [low, high] : [low - 0.5, low + 0.5];
}

// The end of a line of text that begins at `at`: a space, if there is one in the second half of the line.
function lineEnd(text, at, letters) {
  const end = at + letters;
  if (end >= text.length) return text.length;
  const space = text.lastIndexOf(" ", end);
  return space > at + letters / 2 ? space : end;
}

function labelOf(item, forest) {
  const { node } = item;
  if (item.stub) return `${plural(item.stub, "more branch")}, Enter opens them`;
  const reward = meanOf(node, "reward");
  return [
    node.parts.length ? `${plural(node.size, "token")} from ${count(node.start)} on` : "rollouts that share nothing",
    plural(node.count, "rollout"),
    Number.isNaN(reward) ? null : `mean reward ${short(reward)}`,
    node.children.length ? plural(node.children.length, "branch") : forest.ids[node.ends[0]],
  ].filter(Boolean).join(", ");
}

class TreeView {
  constructor({ svg, forest, onOpen, onChange }) {
    Object.assign(this, { svg, forest, onOpen, onChange });
    Object.assign(this, { root: null, focus: null, selected: null, active: null });
    Object.assign(this, { key: "scale", items: [], path: new Set() });
    svg.addEventListener("keydown", (event) => this.onKey(event));
    svg.addEventListener("focusin", (event) => {
      const item = this.items.find((other) => other.element === event.target);
      if (item && item !== this.active) this.setActive(item, false);
    });
  }

  // Width of the picture, width of the gutter at the right with the ends of rows, and pixels per token between them.
  geometry() {
    const width = Math.max(280, this.svg.parentElement.clientWidth - 6);
    const gutter = width < 620 ? 54 : 190;
    return { width, gutter, scale: (width - gutter - 6) / Math.max(1, this.focus.far - this.focus.start) };
  }

  paint(item, colour, domain) {
    const { node } = item;
    const value = this.key === "scale" ? Math.log2(Math.max(1, node.count)) : meanOf(node, this.key);
    if (Number.isNaN(value)) return { fill: "var(--unknown)", dark: false, unknown: true };
    return colour((value - domain[0]) / (domain[1] - domain[0]));
  }

  boxOf(item, { scale, width, gutter }, height) {
    const x = 2 + (item.node.start - this.focus.start) * scale;
    const end = x + item.node.size * scale;
    if (item.stub) return { x: Math.min(end + 1, width - gutter - STUB), y: item.row * height, w: STUB, h: height - 2 };
    return { x, y: item.row * height, w: Math.max(1.5, end - x - 1), h: item.rows * height - 2 };
  }

  drawItem(item, box, colour) {
    const on = this.path.has(item.node) && !item.stub && box.w > 4;
    const group = element("g", {
      role: "treeitem", tabindex: -1, "aria-level": item.level, "aria-setsize": item.of, "aria-posinset": item.place,
      "aria-label": labelOf(item, this.forest), "aria-selected": String(!item.stub && this.selected === item.node),
      class: `item${item.stub ? " stub" : ""}${on ? " on" : ""}${colour.dark ? " light-text" : ""}`,
      transform: `translate(${box.x.toFixed(1)} ${box.y})`,
    });
    if (item.node.children.length && !item.stub) group.setAttribute("aria-expanded", String(item.node.shown > 0));
    element("rect", { width: box.w.toFixed(1), height: box.h, rx: Math.min(3, box.w / 2), fill: colour.fill }, group);
    if (item.stub) element("text", { x: 8, y: box.h / 2 + 4 }, group, `+ ${count(item.stub)} more`);
    else if (box.w > 44) this.drawWords(item, box, group);
    if (!item.stub && item.node.ends.length && item.node.children.length && box.w > 5)
      element("circle", { cx: Math.max(1, box.w - 5), cy: box.h / 2, r: 2.5, class: "end" }, group);
    group.addEventListener("click", () => this.activate(item));
    item.element = group;
    return group;
  }

  // "x16, 1,024 tokens" and the first lines of the text, as many as fit.
  drawWords(item, box, group) {
    const letters = Math.floor((box.w - 12) / LETTER);
    const { node } = item;
    const inside = element("svg", { width: (box.w - 3).toFixed(1), height: box.h }, group); // clips wide letters
    const title = `${node.count > 1 ? `\u00d7${count(node.count)}  ` : ""}${count(node.size)}`;
    if (box.h > 34 && title.length <= letters) element("text", { x: 7, y: 16, class: "title" }, inside, title);
    if (page.text === "none" || !node.parts.length || letters < 4) return;
    const lines = box.h > 34 ? Math.min(8, Math.floor((box.h - 22) / 15)) : 1;
    piecesOf(this.forest, node, letters * lines).then(({ pieces }) => {
      const shown = pieces.map((piece) => (piece.gap ? " \u2026 " : plain(piece.text)));
      const text = shown.join("").replace(/\s+/g, " ").trim();
      for (let k = 0, at = 0; k < lines && at < text.length; k++) {
        const last = k === lines - 1 && text.length > at + letters;
        const end = lineEnd(text, at, last ? letters - 1 : letters);
        const y = box.h > 34 ? 32 + 15 * k : box.h / 2 + 4;
        element("text", { x: 7, y, class: "preview" }, inside, text.slice(at, end).trim() + (last ? "\u2026" : ""));
        at = end;
      }
    });
  }

  // The rollouts in which a row ends, at the right edge.
  drawEnd(item, box, { width, gutter }, layer, height) {
    const { node } = item;
    if (item.stub || node.children.length || height < 12) return;
    const y = box.y + height / 2 - 1;
    const x = width - gutter + 8;
    element("line", { x1: box.x + box.w + 3, x2: x - 4, y1: y, y2: y, class: "leader" }, layer);
    const reward = meanOf(node, "reward");
    const name = node.ends.length > 1 ? `${count(node.ends.length)} rollouts` : String(this.forest.ids[node.ends[0]]);
    const room = Math.floor((gutter - 14) / LETTER) - (Number.isNaN(reward) ? 0 : 7);
    const shown = name.length > room ? `\u2026${name.slice(1 - room)}` : name;
    const text = gutter < 100 ? "" : Number.isNaN(reward) ? shown : `  ${shown}`;
    const label = element("text", { x, y: y + 4, class: "gutter" }, layer);
    const bold = document.createElementNS(SVG, "tspan");
    bold.textContent = Number.isNaN(reward) ? "" : short(reward);
    bold.setAttribute("class", "reward");
    label.append(bold, text);
    label.addEventListener("click", () => this.activate(item));
  }

  redraw() {
    if (!this.root) return;
    const measures = this.geometry();
    const items = itemsOf(this.focus);
    this.path = new Set(this.selected ? pathTo(this.selected) : []);
    const rows = items[0].rows;
    const height = rows <= 2 ? 110 : rows <= 8 ? 46 : rows <= 24 ? 26 : 19;
    const colour = scaleOf(this.key), domain = domainOf(this.key, this.root, this.forest);
    const layer = document.createDocumentFragment();
    const ends = element("g", { "aria-hidden": "true" });
    for (const item of items) {
      const box = this.boxOf(item, measures, height);
      layer.append(this.drawItem(item, box, item.stub ? { fill: "var(--card)" } : this.paint(item, colour, domain)));
      this.drawEnd(item, box, measures, ends, height);
    }
    this.svg.setAttribute("viewBox", `0 0 ${measures.width} ${rows * height}`);
    this.svg.setAttribute("width", measures.width);
    this.svg.setAttribute("height", rows * height);
    const hadFocus = this.svg.contains(document.activeElement);
    this.svg.replaceChildren(layer, ends);
    const before = this.active;
    this.items = items;
    const same = items.filter((item) => item.node === before?.node);
    this.setActive(same.find((item) => !item.stub === !before.stub) ?? same[0] ?? items[0], hadFocus);
    this.onChange({ key: this.key, domain, colour, zoomed: this.focus !== this.root });
  }

  setActive(item, focused = true) {
    this.active?.element?.setAttribute("tabindex", -1);
    this.active = item;
    item.element.setAttribute("tabindex", 0);
    if (focused) item.element.focus({ preventScroll: true });
    if (focused) item.element.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  activate(item) {
    this.active = item;
    const { node } = item;
    if (item.stub) {
      const before = node.shown;
      node.shown = Math.min(node.children.length, node.shown + ROWS / 2);
      this.redraw();
      this.setActive(this.items.find((other) => other.node === node.children[before]) ?? this.items[0]);
      return;
    }
    this.selected = node;
    this.redraw();
    this.active.element.focus({ preventScroll: true });
    this.onOpen(node);
  }

  onKey(event) {
    const { active } = this;
    if (!active || event.ctrlKey || event.metaKey || event.altKey) return;
    const siblings = active.parent ? active.parent.below : [active];
    const at = siblings.indexOf(active);
    const to = {
      ArrowLeft: active.parent, ArrowRight: active.below[0], ArrowUp: siblings[at - 1], ArrowDown: siblings[at + 1],
      Home: this.items[0],
    }[event.key];
    if (to) this.setActive(to);
    else if (event.key === "Enter" || event.key === " ") this.activate(active);
    else if (event.key === "z" && !active.stub) this.zoom(active.node);
    else if (event.key === "Escape") this.zoom(this.root);
    else if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
  }

  // Move a node to the left edge; without a node, the root.
  zoom(node) {
    this.focus = node ?? this.root;
    openSome(this.focus, this.geometry().scale);
    this.redraw();
  }

  show(root) {
    Object.assign(this, { root, focus: root, selected: null, active: null });
    openSome(root, this.geometry().scale);
    this.redraw();
    this.svg.parentElement.scrollTo(0, 0);
  }

  // The whole tree, or else its largest part in which a node is wide enough to be visible.
  viewOf(node) {
    this.focus = this.root;
    const widest = (node.size * this.geometry().scale * (this.root.far - this.root.start)) / NARROW;
    return [this.root, ...pathTo(node)].find((above) => above.far - above.start <= widest) ?? node;
  }

  // Make a node visible, however deep inside stubs, and open it.
  reveal(node) {
    for (let at = node; at.parent; at = at.parent) {
      const place = at.parent.children.indexOf(at);
      if (place >= at.parent.shown) {
        at.parent.children.splice(place, 1);
        at.parent.children.unshift(at);
        at.parent.shown = Math.max(1, at.parent.shown);
      }
    }
    this.focus = this.viewOf(node);
    this.redraw();
    this.activate(this.items.find((item) => item.node === node && !item.stub));
    this.active.element.scrollIntoView({ block: "center", inline: "nearest" });
  }

  select(node) {
    this.selected = node;
    this.redraw();
    this.onOpen(node);
  }

  setColour(key) {
    this.key = key;
    this.redraw();
  }
}
