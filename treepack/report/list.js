// The list of groups or trees: sorted, filtered by outcome, and searched.
//
//   new PartList({forest, onOpen}): start(part), open(part, sample)

const MORE = 50; // rows of the list at first, and with each "Show more"
const MAX_HITS = 8; // samples listed for a search
const MAX_CELLS = 24; // cells in the picture of outcomes; of more rollouts, each cell is the mean of several
const FEW_CELLS = 12; // with at most as many, there are gaps between them
const FILTERS = {
  all: () => true,
  mixed: (parts, part) => parts.spread[part] > 0,
  one: (parts, part) => parts.one[part] > 0,
};
const VALUES = {
  name: (parts, part) => parts.names[part],
  tokens: (parts, part) => parts.flat[part],
  overlap: (parts, part) => 1 - parts.tree[part] / parts.flat[part],
  reward: (parts, part) => mean(parts.rewards[part]),
  mixed: (parts, part) => parts.spread[part],
};

// Number of letters that all names begin with; 0 if it is below 6, because then hiding them would not help.
function commonStart(names) {
  const [first, ...others] = names;
  let size = others.length ? shortest(names) : 0;
  for (const name of others) while (!name.startsWith(first.slice(0, size))) size--;
  while (size && size < first.length && /[\p{L}\p{N}]/u.test(first[size - 1])) size--; // cut no word and no number
  return size >= 6 ? size : 0;
}

const reversed = (name) => [...name].reverse().join("");
const shortest = (names) => names.reduce((least, name) => Math.min(least, name.length), Infinity);

// Names without the start and the end that all have in common.
function distinctParts(names) {
  const start = commonStart(names), end = commonStart(names.map(reversed));
  if (names.length < 2 || start + end >= shortest(names)) return names;
  return names.map((name) => `${start ? "\u2026" : ""}${name.slice(start, name.length - end)}${end ? "\u2026" : ""}`);
}

class PartList {
  constructor({ forest, onOpen }) {
    const rewarded = forest.reward.some((value) => !Number.isNaN(value));
    Object.assign(this, { forest, onOpen, kind: "groups", sort: rewarded ? "mixed" : "overlap", down: true, parts: {} });
    Object.assign(this, { shown: 0, query: "", filter: "all", part: null, openKind: null, matches: new Set() });
    const known = forest.reward.filter((value) => !Number.isNaN(value));
    this.range = known.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
    byId("list").classList.toggle("no-reward", !rewarded);
    byId("filter").hidden = !rewarded;
    this.listen();
  }

  listen() {
    byId("search").addEventListener("input", () => this.search());
    byId("search").addEventListener("keydown", (event) => {
      if (event.key === "Enter") (byId("hits").querySelector("button") ?? byId("rows").querySelector("button"))?.click();
    });
    byId("more").addEventListener("click", () => this.show(this.shown + MORE));
    for (const head of document.querySelectorAll("[data-sort]")) {
      head.addEventListener("click", () => {
        this.down = this.sort === head.dataset.sort ? !this.down : head.dataset.sort !== "name";
        this.sort = head.dataset.sort;
        this.show();
      });
    }
    for (const button of document.querySelectorAll("[data-filter]"))
      button.addEventListener("click", () => ((this.filter = button.dataset.filter), this.show()));
    for (const button of document.querySelectorAll("[data-kind]")) {
      button.addEventListener("click", async () => {
        await this.load(button.dataset.kind);
        this.kind = button.dataset.kind;
        this.search();
      });
    }
  }

  async load(kind) {
    if (this.parts[kind]) return;
    const parts = await loadParts(kind);
    parts.rewards = parts.members.map((members) => rewardsOf(this.forest, members));
    parts.rollouts = parts.members.map((members) => new Set(members.map((i) => this.forest.rolloutOf[i])).size);
    parts.shown = distinctParts(parts.names);
    this.parts[kind] = parts;
  }

  async start(part) {
    await this.load("groups");
    this.show();
    this.open(part);
  }

  get now() {
    return this.parts[this.kind];
  }

  sorted() {
    const parts = this.now;
    const value = VALUES[this.sort];
    const collator = new Intl.Collator("en", { numeric: true });
    const number = (part) => (Number.isNaN(value(parts, part)) ? -Infinity : value(parts, part));
    const overlap = (part) => VALUES.overlap(parts, part);
    const compare = (a, b) => {
      if (this.sort === "name") return collator.compare(parts.names[a], parts.names[b]);
      return Math.round((number(a) - number(b)) * 1e6) || overlap(a) - overlap(b);
    };
    return parts.names
      .map((name, part) => part)
      .filter((part) => FILTERS[this.filter](parts, part) && this.matchesQuery(parts, part))
      .sort((a, b) => (this.down ? compare(b, a) : compare(a, b)) || a - b);
  }

  matchesQuery(parts, part) {
    return !this.query || parts.names[part].toLowerCase().includes(this.query) || this.matches.has(part);
  }

  row(parts, part) {
    const name = parts.names[part];
    const shown = parts.shown[part];
    const go = () => this.open(part);
    const current = part === this.part && this.kind === this.openKind;
    const overlap = VALUES.overlap(parts, part);
    return make(
      "tr", { class: current ? "current" : null, "aria-current": current ? "true" : null },
      make("th", { scope: "row", title: name }, make("button", { type: "button", class: "open", "aria-label": name, onclick: go }, shown)),
      make("td", { class: "wide-only" }, count(parts.flat[part])),
      make("td", { class: "bar", style: `--share: ${(100 * overlap).toFixed(1)}%` }, percent(overlap)),
      make("td", { class: "with-reward" }, short(mean(parts.rewards[part]))),
      this.outcomes(parts, part),
    );
  }

  // The rewards of the rollouts in ascending order, as cells of one line; and their number.
  outcomes(parts, part) {
    const rewards = parts.rewards[part], rollouts = parts.rollouts[part];
    const text = make("span", { class: "times" }, `\u00d7${count(rollouts)}`);
    if (!rewards.length) return make("td", { class: "outcomes" }, text);
    const [low, high] = this.range;
    const share = (reward) => (high > low ? (reward - low) / (high - low) : 0.5);
    const cells = Math.min(rewards.length, MAX_CELLS);
    const gap = cells <= FEW_CELLS ? 100 / cells / 12 : 0;
    const stops = Array.from({ length: cells }, (_, k) => {
      // 100 rewards in 24 cells -> cell 1 is the mean of rewards 4 to 7
      const bounds = [k, k + 1].map((each) => Math.floor((each * rewards.length) / cells));
      const colour = `color-mix(in srgb, var(--pass) ${(100 * share(mean(rewards.slice(...bounds)))).toFixed(0)}%, var(--fail))`;
      const [start, end] = [(100 * k) / cells, (100 * (k + 1)) / cells - gap];
      return `${colour} ${start.toFixed(2)}% ${end.toFixed(2)}%, transparent ${end.toFixed(2)}% ${(end + gap).toFixed(2)}%`;
    });
    const label = `${plural(rollouts, "rollout")}: rewards ${short(rewards[0])} to ${short(rewards.at(-1))}`;
    const strip = make("span", { class: "strip", role: "img", "aria-label": label, style: `background: linear-gradient(90deg, ${stops.join(", ")})` });
    return make("td", { class: "outcomes", title: label }, strip, text);
  }

  show(more = MORE) {
    const parts = this.now;
    const order = this.sorted();
    this.shown = Math.min(order.length, more);
    byId("rows").replaceChildren(...order.slice(0, this.shown).map((part) => this.row(parts, part)));
    byId("more").hidden = this.shown === order.length;
    byId("shown").textContent = `${count(this.shown)} of ${plural(order.length, this.kind.slice(0, -1))}`;
    for (const head of document.querySelectorAll("[data-sort]")) {
      const on = head.dataset.sort === this.sort;
      head.parentElement.setAttribute("aria-sort", on ? (this.down ? "descending" : "ascending") : "none");
    }
    for (const button of document.querySelectorAll("[data-kind]"))
      button.setAttribute("aria-pressed", String(button.dataset.kind === this.kind));
    for (const button of document.querySelectorAll("[data-filter]")) {
      const { filter } = button.dataset;
      button.setAttribute("aria-pressed", String(filter === this.filter));
      button.dataset.count = count(parts.names.filter((_, part) => FILTERS[filter](parts, part)).length);
    }
  }

  // Names of groups, and ids of samples, which have a list of their own.
  search() {
    this.query = byId("search").value.trim().toLowerCase();
    this.matches = new Set();
    const parts = this.now, { forest } = this;
    const hits = [];
    if (this.query) {
      forest.lower ??= forest.ids.map((id) => String(id).toLowerCase());
      forest.lower.forEach((id, sample) => {
        if (!id.includes(this.query)) return;
        this.matches.add(parts.of[sample]);
        hits.push(sample);
      });
    }
    hits.sort((a, b) => forest.lower[a].length - forest.lower[b].length || a - b);
    const items = hits.slice(0, MAX_HITS).map((sample) => {
      const go = () => this.open(parts.of[sample], sample);
      const place = make("small", {}, ` in ${parts.names[parts.of[sample]]}`);
      return make("li", {}, make("button", { type: "button", onclick: go }, forest.ids[sample], place));
    });
    byId("hits").replaceChildren(...items);
    byId("hits").hidden = !items.length;
    const more = hits.length > MAX_HITS ? `, ${MAX_HITS} shown` : "";
    byId("hit-count").textContent = this.query ? `${plural(hits.length, "trajectory")} with this id${more}` : "";
    this.show();
  }

  // Open a part, and a sample in it; with `at`, the token of the sample that is marked.
  open(part, sample = null, at = null) {
    const parts = this.now;
    Object.assign(this, { part, openKind: this.kind });
    byId("part-name").textContent = parts.names[part];
    byId("part-facts").textContent = [
      plural(parts.rollouts[part], "rollout"),
      page.samplesAreRollouts ? null : plural(parts.members[part].length, "trajectory"),
      `${count(parts.flat[part])} tokens one by one`, `${count(parts.tree[part])} shared once`,
      `${percent(VALUES.overlap(parts, part))} repeats`,
    ].filter(Boolean).join(" \u00b7 ");
    this.show(Math.max(MORE, this.shown));
    this.onOpen(parts.members[part], sample, at);
  }

  // Open the group of a sample with the token `at` marked.
  openPlace(sample, at) {
    Object.assign(this, { kind: "groups", filter: "all" });
    byId("search").value = "";
    this.search();
    this.open(this.now.of[sample], sample, at);
  }
}
