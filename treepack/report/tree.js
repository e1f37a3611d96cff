// One tree as SVG: root at the left, nodes as wide as their tokens and as tall as the visible rollouts below them.
//
//   new TreeView({svg, forest, onOpen, onChange}): show(root), select, reveal, mark and zoom(node), setColour(key)
//
// A visible node is an item. Its lines that are not drawn are one more item, a stub, which opens them. A common prompt
// that would take much of the width is folded. The left and right arrows move to the parent and the first branch, up and
// down to siblings; Enter opens a stub or the text of a node.

const STUB = 76; // pixels
const LETTER = 7; // pixels of a character, approximately
const MIN_WORDS = 60; // pixels: no words in narrower stripes
const FOLDED = 104; // pixels of a folded prompt
const WIDE_PROMPT = 0.2; // share of the width from which on a prompt is folded at first

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
    node.parts.length ? `${plural(node.size, "token")} from ${count(node.start)} on` : "trajectories that share nothing",
    page.samplesAreRollouts ? null : plural(node.count, "trajectory"),
    plural(node.rollouts, "rollout"),
    Number.isNaN(reward) ? null : `mean reward ${short(reward)}`,
    node.children.length ? plural(node.children.length, "branch") : forest.ids[node.ends[0]],
  ].filter(Boolean).join(", ");
}

class TreeView {
  constructor({ svg, forest, onOpen, onChange }) {
    Object.assign(this, { svg, forest, onOpen, onChange });
    Object.assign(this, { root: null, focus: null, selected: null, active: null, folded: false, marked: null });
    Object.assign(this, { key: "scale", items: [], path: new Set() });
    svg.addEventListener("keydown", (event) => this.onKey(event));
    svg.addEventListener("focusin", (event) => {
      const item = this.items.find((other) => other.element === event.target);
      if (item && item !== this.active) this.setActive(item, false);
    });
  }

  // Width of the picture, of the gutter at the right with the ends of lines, of the folded prompt, and pixels per token.
  geometry() {
    const width = Math.max(280, this.svg.parentElement.clientWidth - 6);
    const gutter = width < 620 ? 54 : Math.min(250, Math.max(80, 70 + LETTER * this.longestName));
    const fold = this.folded && this.focus === this.root ? FOLDED : 0;
    const from = fold ? this.root.size : this.focus.x;
    return { width, gutter, fold, from, scale: (width - gutter - fold - 6) / Math.max(1, this.focus.wide - from) };
  }

  // The place of a token on the line, in pixels.
  pixel(x, { fold, from, scale }) {
    return 2 + (fold && x <= from ? (fold * x) / from : fold + (x - from) * scale);
  }

  // Whether the root is a prompt, which all others continue.
  get canFold() {
    return this.focus === this.root && this.root.parts.length > 0 && this.root.wide > this.root.size;
  }

  fill(node, colour, domain) {
    if (this.key === "role") return { fill: "var(--card)", dark: false };
    const value = this.key === "scale" ? Math.log2(Math.max(1, node.count)) : meanOf(node, this.key);
    if (Number.isNaN(value)) return { fill: "var(--unknown)", dark: false };
    return colour((value - domain[0]) / (domain[1] - domain[0]));
  }

  boxOf(item, measures, height) {
    const { node } = item;
    if (item.stub) {
      const end = this.pixel(node.right, measures);
      const x = Math.min(end + 1, measures.width - measures.gutter - STUB);
      return { x, y: item.row * height, w: STUB, h: height - 2 };
    }
    const x = this.pixel(node.x, measures), end = this.pixel(node.x + node.size, measures);
    const tall = item.rows * height - 2;
    const inset = item.isBranch ? Math.min(14, tall * 0.2) : 0;
    return { x, y: item.row * height + inset, w: Math.max(1, end - x - 1), h: tall - 2 * inset };
  }

  drawItem(item, box, colour) {
    const { node } = item;
    const on = this.path.has(node) && !item.stub && box.w > 4;
    const classes = ["item", item.stub && "stub", item.isBranch && "branch", on && "on", colour.dark && "light-text"];
    const siblings = item.parent?.below ?? [item];
    const group = element("g", {
      role: "treeitem", tabindex: -1, "aria-level": item.level, "aria-setsize": siblings.length,
      "aria-posinset": siblings.indexOf(item) + 1, "aria-label": labelOf(item, this.forest),
      "aria-selected": String(!item.stub && this.selected === node), class: classes.filter(Boolean).join(" "),
      transform: `translate(${box.x.toFixed(1)} ${box.y.toFixed(1)})`,
    });
    if (item.lines?.length || (!item.stub && node.lines.length))
      group.setAttribute("aria-expanded", String(node.shown > 0));
    if (this.key === "role" && !item.stub) this.drawStripes(node, box, group);
    const frame = { width: box.w.toFixed(1), height: box.h.toFixed(1), rx: Math.min(3, box.w / 2), class: "frame" };
    element("rect", { ...frame, fill: this.key === "role" && !item.stub ? "none" : colour.fill }, group);
    if (item.stub) element("text", { x: 8, y: box.h / 2 + 4 }, group, `+ ${count(item.stub)} more`);
    else if (node === this.root && this.folded && this.focus === node) this.drawFold(box, group);
    else if (box.w > MIN_WORDS) this.drawWords(item, box, group);
    if (!item.stub && node.finals && node.lines.length && box.w > 5)
      element("circle", { cx: Math.max(1, box.w - 5), cy: box.h / 2, r: 2.5, class: "end" }, group);
    group.addEventListener("click", () => this.activate(item));
    item.element = group;
    return group;
  }

  drawStripes(node, box, group) {
    for (const { x, width, kind } of stripesOf(this.forest, node, box.w)) {
      const place = { x: x.toFixed(1), width: width.toFixed(1), height: box.h.toFixed(1) };
      element("rect", { ...place, class: `stripe role-${page.roles[roleOf(kind)] ?? "unknown"}` }, group);
      if (isTrained(kind)) element("rect", { ...place, fill: "url(#hatch)", class: "hatch" }, group);
    }
  }

  // The prompt that all share, with a break through it.
  drawFold(box, group) {
    const middle = box.w - 14;
    for (const x of [middle, middle + 5])
      element("path", { d: `M${x + 4} 0L${x - 4} ${box.h}`, class: "break" }, group);
    const lines = [`${count(this.root.size)} tokens`, "in common,", "folded"];
    const first = Math.max(12, box.h / 2 - 11);
    lines.slice(0, box.h > 50 ? 3 : 1).forEach((line, k) =>
      element("text", { x: 7, y: box.h > 50 ? first + 15 * k : box.h / 2 + 4, class: k ? "words" : "title" }, group, line));
  }

  // "x16, 1,024 tokens" and the first lines of the text, as many as fit; with roles, of the text of each stripe.
  drawWords(item, box, group) {
    const { node } = item;
    const clip = { width: (box.w - 3).toFixed(1), height: box.h };
    const title = `${node.rollouts > 1 ? `\u00d7${count(node.rollouts)}  ` : ""}${count(node.size)}`;
    const titled = box.h > 34 && title.length * LETTER < box.w - 10;
    if (titled) element("text", { x: 7, y: 16, class: "title" }, element("svg", clip, group), title);
    if (page.text === "none" || !node.parts.length) return;
    const stripes = this.key === "role" ? stripesOf(this.forest, node, box.w) : [{ x: 0, width: box.w, segment: 0 }];
    const wide = stripes.filter((stripe) => stripe.width > MIN_WORDS);
    if (!wide.length) return;
    const letters = wide.at(-1) === stripes[0] ? Math.ceil((box.w * box.h) / 60) : Infinity;
    piecesOf(this.forest, node, letters).then((pieces) => {
      for (const stripe of wide) {
        const last = this.key === "role" ? stripes[stripes.indexOf(stripe) + 1]?.segment : pieces.length;
        this.drawLines(pieces.slice(stripe.segment, last), stripe, { top: titled ? 32 : 18, height: box.h }, group);
      }
    });
  }

  drawLines(pieces, { x, width }, { top, height }, group) {
    const letters = Math.floor((width - 10) / LETTER);
    const lines = height > 34 ? Math.min(8, Math.floor((height - top + 10) / 15)) : 1;
    const inside = element("svg", { x: x.toFixed(1), width: (width - 2).toFixed(1), height }, group); // clips wide letters
    const shown = pieces.map((piece) => (piece.gap ? " \u2026 " : plain(withoutHeader(piece))));
    const text = shown.join("").replace(/\s+/g, " ").trim();
    for (let k = 0, at = 0; k < lines && at < text.length; k++) {
      const last = k === lines - 1 && text.length > at + letters;
      const end = lineEnd(text, at, last ? letters - 1 : letters);
      const y = height > 34 ? top + 15 * k : height / 2 + 4;
      element("text", { x: 7, y, class: "preview" }, inside, text.slice(at, end).trim() + (last ? "\u2026" : ""));
      at = end;
    }
  }

  // The names of the rollouts that end with a line.
  namesOf(node) {
    const rollouts = [...new Set(node.ends.map((i) => this.forest.rolloutOf[i]))];
    return rollouts.length > 1 ? `${count(rollouts.length)} rollouts` : this.forest.labels[rollouts[0]] ?? "";
  }

  drawEnd(item, box, { width, gutter }, layer, height, rewardColour) {
    const { node } = item;
    if (item.stub || item.isBranch || node.lines.length || height < 12) return;
    const y = (item.row + item.rows / 2) * height - 1;
    const x = width - gutter + 8;
    const end = node.ends.length ? node : node.after.at(-1);
    const left = this.lineEnd + 3;
    if (left < x - 6) element("line", { x1: left, x2: x - 4, y1: y, y2: y, class: "leader" }, layer);
    const reward = meanOf(node, "reward");
    const known = !Number.isNaN(reward);
    if (known) element("rect", { x, y: y - 5, width: 10, height: 10, rx: 2, fill: rewardColour(reward), class: "chip" }, layer);
    const name = this.namesOf(end);
    const room = Math.floor((gutter - 30) / LETTER) - (known ? 5 : 0);
    const shown = name.length > room ? `${name.slice(0, Math.ceil(room / 2) - 1)}\u2026${name.slice(1 - room / 2)}` : name;
    const label = element("text", { x: known ? x + 15 : x, y: y + 4, class: "gutter" }, layer);
    element("tspan", { class: "reward" }, label, known ? short(reward) : "");
    if (gutter >= 80) label.append(known ? `  ${shown}` : shown);
    element("title", {}, label, end.ends.slice(0, 5).map((i) => [this.forest.ids[i], this.forest.notes[i]].filter(Boolean).join(": ")).join(", "));
    label.addEventListener("click", () => this.activate(item));
  }

  redraw() {
    if (!this.root) return;
    const measures = this.geometry();
    const items = itemsOf(this.focus, measures.scale);
    this.path = new Set(this.selected ? pathTo(this.selected) : []);
    const rows = items.find((item) => item.node === this.focus).rows;
    const height = rows <= 2 ? 110 : rows <= 4 ? 64 : rows <= 8 ? 46 : rows <= 24 ? 28 : 19;
    const colour = scaleOf(this.key), domain = domainOf(this.key, this.root, this.forest);
    const byReward = scaleOf("reward"), rewards = domainOf("reward", this.root, this.forest);
    const rewardColour = (value) => byReward((value - rewards[0]) / (rewards[1] - rewards[0])).fill;
    const layer = document.createDocumentFragment();
    const ends = element("g", { "aria-hidden": "true" });
    for (const item of items) {
      const box = this.boxOf(item, measures, height);
      layer.append(this.drawItem(item, box, item.stub ? { fill: "var(--card)" } : this.fill(item.node, colour, domain)));
      this.lineEnd = item.stub ? 0 : this.pixel(item.node.wide, measures);
      this.drawEnd(item, box, measures, ends, height, rewardColour);
    }
    this.drawMark(items, measures, height, ends);
    this.svg.setAttribute("viewBox", `0 0 ${measures.width} ${rows * height}`);
    this.svg.setAttribute("width", measures.width);
    this.svg.setAttribute("height", rows * height);
    const hadFocus = this.svg.contains(document.activeElement);
    this.svg.replaceChildren(hatch(), layer, ends);
    const before = this.active;
    this.items = items;
    const same = items.filter((item) => item.node === before?.node);
    this.setActive(same.find((item) => !item.stub === !before.stub) ?? same[0] ?? items[0], hadFocus);
    this.onChange({ key: this.key, domain, colour, zoomed: this.focus !== this.root, view: this });
  }

  // A line at the token where sharing is lost.
  drawMark(items, measures, height, layer) {
    const item = items.find((other) => other.node === this.marked?.node && !other.stub);
    if (!item) return;
    const x = this.pixel(item.node.x + this.marked.at - item.node.start, measures);
    const y = item.row * height;
    element("path", { d: `M${x} ${y}v${item.rows * height - 2}`, class: "lost-line" }, layer);
    element("path", { d: `M${x} ${y}h13l-4 5l4 5h-13z`, class: "lost-flag" }, layer);
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
      node.shown = Math.min(node.lines.length, node.shown + ROWS / 2);
      this.redraw();
      this.setActive(this.items.find((other) => other.node === node.lines[before]) ?? this.items[0]);
      return;
    }
    if (node === this.root && this.folded) this.folded = false;
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
      ArrowLeft: active.parent, ArrowRight: active.below[0] ?? (active.isBranch ? siblings[at + 1] : null),
      ArrowUp: siblings[at - 1], ArrowDown: siblings[at + 1], Home: this.items[0],
    }[event.key];
    if (to) this.setActive(to);
    else if (event.key === "Enter" || event.key === " ") this.activate(active);
    else if (event.key === "z" && !active.stub) this.zoom(active.node);
    else if (event.key === "f") this.fold(!this.folded);
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

  fold(folded) {
    if (!this.canFold) return;
    this.folded = folded;
    this.redraw();
  }

  show(root) {
    Object.assign(this, { root, focus: root, selected: null, active: null, marked: null });
    this.longestName = this.firstEnds(200).reduce((most, node) => Math.max(most, this.namesOf(node).length), 0);
    this.folded = this.canFold && root.size > WIDE_PROMPT * root.wide;
    openSome(root, this.geometry().scale);
    this.redraw();
    this.svg.parentElement.scrollTo(0, 0);
  }

  // The whole tree, or else its largest part in which a node is wide enough to be visible.
  viewOf(node) {
    this.focus = this.root;
    const narrow = (above) => {
      this.focus = above;
      return node.size * this.geometry().scale < NARROW;
    };
    return [this.root, ...pathTo(node)].find((above) => !narrow(above)) ?? node;
  }

  // Make a node visible, however deep inside stubs, and open it.
  reveal(node) {
    for (let at = node; at.parent; at = at.parent) {
      const { lines } = at.parent;
      // A branch in a line is visible with the line that it is put into.
      const line = lines.find((other) => other === at || other.before.includes(at));
      const place = lines.indexOf(line);
      if (place >= at.parent.shown) {
        lines.splice(place, 1);
        lines.unshift(line);
        at.parent.shown = Math.max(1, at.parent.shown);
      }
    }
    this.focus = this.viewOf(node);
    this.redraw();
    const item = this.items.find((other) => other.node === node && !other.stub);
    if (node === this.root) this.select(node);
    else this.activate(item ?? this.items[0]);
    this.active.element.scrollIntoView({ block: "center", inline: "nearest" });
  }

  // Mark the token `at` of the path to a node, and open the node that contains it.
  mark(end, at) {
    const node = pathTo(end).find((each) => each.start + each.size > at) ?? end;
    this.marked = { node, at };
    this.reveal(node);
  }

  select(node, isFirst = false) {
    this.selected = node;
    this.redraw();
    this.onOpen(node, isFirst);
  }

  // The nodes in which the first lines end.
  firstEnds(number) {
    const ends = [];
    for (const waiting = [this.root]; waiting.length && ends.length < number; ) {
      const node = waiting.pop();
      if (!node.lines.length) ends.push(node);
      for (let k = Math.min(node.lines.length, number) - 1; k >= 0; k--) waiting.push(node.lines[k]);
    }
    return ends;
  }

  setColour(key) {
    this.key = key;
    this.redraw();
  }
}
