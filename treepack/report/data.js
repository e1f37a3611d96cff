// The blocks of the page as arrays, and the trie of the samples of one group or tree.
//
//   block(name) -> ArrayBuffer      loadForest() -> forest      treeOf(forest, samples) -> node, the root of their trie
//   textOf(node of the forest) -> [text of each segment]        segmentsOf(forest, node of a tree) -> [{size, kind}]
//
// A sample is one token sequence; a rollout has one or more samples, its turns or parts.

const byId = (name) => document.getElementById(name);
let page = JSON.parse(byId("data-page").textContent);
let loaded = null; // blocks that came later than the page, by their names; null for the blocks of the page

// A kind is a role, plus 8 if its tokens are trained, plus 16 if a message starts with them.
const roleOf = (kind) => kind & 7;
const isTrained = (kind) => (kind & 8) > 0;
const startsMessage = (kind) => (kind & 16) > 0;

async function block(name) {
  const coded = atob(loaded && name in loaded ? loaded[name] : byId(`data-${name}`).textContent);
  const bytes = new Uint8Array(coded.length);
  for (let i = 0; i < coded.length; i++) bytes[i] = coded.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

const inText = (buffer) => new TextDecoder().decode(buffer);
const jsonBlock = async (name) => JSON.parse(inText(await block(name)));
const numbers = async (name) => new Uint32Array(await block(name));
const floats = async (name) => new Float32Array(await block(name));

// Offsets of runs: [2, 0, 3] -> [0, 2, 2, 5]
function offsets(counts) {
  const first = new Uint32Array(counts.length + 1);
  for (let i = 0; i < counts.length; i++) first[i + 1] = first[i] + counts[i];
  return first;
}

async function loadForest() {
  const [size, up, gaps, rolloutOf, number, segmentSize, segmentCount] = await Promise.all(
    ["forest-size", "forest-up", "sample-end", "sample-rollout", "sample-number", "segment-size", "segment-count"]
      .map(numbers));
  const [reward, advantage] = await Promise.all(["sample-reward", "sample-advantage"].map(floats));
  const [ids, notes, labels] = await Promise.all(["sample-ids", "sample-notes", "rollout-labels"].map(jsonBlock));
  const segmentKind = new Uint8Array(await block("segment-kind"));
  // Parents and ends are stored as distances: up [0, 1, 1, 2] -> parent [-1, 0, 1, 1], gaps [2, 0, 3] -> end [2, 2, 5]
  const parent = new Int32Array(size.length);
  const start = new Float64Array(size.length);
  for (let u = 0; u < size.length; u++) {
    parent[u] = up[u] ? u - up[u] : -1;
    start[u] = up[u] ? start[parent[u]] + size[parent[u]] : 0;
  }
  const end = new Uint32Array(gaps.length);
  for (let i = 0, at = 0; i < gaps.length; i++) end[i] = at += gaps[i];
  return {
    size, parent, start, end, reward, advantage, ids, notes, labels, rolloutOf, number,
    segmentSize, segmentKind, segmentFirst: offsets(segmentCount), slot: new Int32Array(size.length).fill(-1),
  };
}

// The segments of a node of a tree.
function segmentsOf(forest, node) {
  const segments = [];
  for (const u of node.parts) {
    for (let k = forest.segmentFirst[u]; k < forest.segmentFirst[u + 1]; k++) {
      segments.push({ size: forest.segmentSize[k], kind: forest.segmentKind[k] });
    }
  }
  return segments;
}

async function loadParts(kind) {
  const [names, of, flat, tree, spread, one] = await Promise.all([
    jsonBlock(`${kind}-names`),
    numbers(`${kind}-of`),
    block(`${kind}-flat`).then((b) => new Float64Array(b)),
    block(`${kind}-tree`).then((b) => new Float64Array(b)),
    floats(`${kind}-spread`),
    block(`${kind}-one`).then((b) => new Uint8Array(b)),
  ]);
  const members = names.map(() => []);
  of.forEach((part, sample) => members[part].push(sample));
  return { kind, names, of, flat, tree, spread, one, members };
}

// The mean reward of each rollout of these samples, in ascending order; a rollout without rewards is left out.
function rewardsOf(forest, samples) {
  const sums = new Map();
  for (const i of samples) {
    if (Number.isNaN(forest.reward[i])) continue;
    const sum = sums.get(forest.rolloutOf[i]) ?? [0, 0];
    sums.set(forest.rolloutOf[i], [sum[0] + forest.reward[i], sum[1] + 1]);
  }
  return [...sums.values()].map(([sum, number]) => sum / number).sort((a, b) => a - b);
}

const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : NaN);

// The nodes on the paths of these samples, in depth-first order. slot[u] is the index of u among them; the caller resets
// it to -1.
function nodesOf(forest, samples) {
  const { parent, end, slot } = forest;
  const visited = [];
  for (const i of samples) {
    // A visited node has visited parents, so the walk up stops there.
    for (let u = end[i]; u >= 0 && slot[u] < 0; u = parent[u]) (slot[u] = 0), visited.push(u);
  }
  const nodes = Uint32Array.from(visited).sort();
  nodes.forEach((u, place) => (slot[u] = place));
  return nodes;
}

const NONE = Object.freeze([]); // most nodes have no branches in a line

const newNode = (start, parent) => ({
  parts: [], start, size: 0, parent, children: [], ends: [], count: 0, far: 0, shown: 0,
  sums: { reward: [0, 0], advantage: [0, 0] },
  // Places on the lines of a drawing, see layout.js.
  order: 0, stop: 0, rollouts: 0, finals: 0, isMain: false, lines: NONE, before: NONE, after: NONE, x: 0, right: 0, wide: 0,
});

// The trie of these samples alone: a chain of nodes in which none of them branches or ends is one node.
function treeOf(forest, samples) {
  const { size, parent, start, end, slot } = forest;
  const nodes = nodesOf(forest, samples);
  const branches = new Uint32Array(nodes.length);
  const endings = nodes.length ? Array.from(nodes, () => null) : [];
  for (const u of nodes) if (parent[u] >= 0) branches[slot[parent[u]]]++;
  for (const i of samples) (endings[slot[end[i]]] ??= []).push(i);
  const above = newNode(0, null);
  const made = new Array(nodes.length);
  const order = [];
  nodes.forEach((u, place) => {
    const up = parent[u] < 0 ? -1 : slot[parent[u]];
    const whole = up >= 0 && branches[up] === 1 && !endings[up];
    const node = whole ? made[up] : newNode(start[u], up < 0 ? above : made[up]);
    if (!whole) node.parent.children.push(node), order.push(node);
    node.parts.push(u);
    node.size += size[u];
    if (endings[place]) node.ends = endings[place];
    made[place] = node;
  });
  for (const u of nodes) slot[u] = -1;
  sumUp(forest, [above, ...order]);
  const root = above.children.length === 1 ? above.children[0] : above;
  root.parent = null;
  arrange(root, forest);
  return root;
}

// Samples of a rollout share its weight, so that a mean over nodes counts every rollout once.
function sumUp(forest, order) {
  const samples = new Map();
  for (const { ends } of order)
    for (const i of ends) samples.set(forest.rolloutOf[i], (samples.get(forest.rolloutOf[i]) ?? 0) + 1);
  for (let k = order.length - 1; k >= 0; k--) {
    const node = order[k];
    node.far = Math.max(node.far, node.start + node.size);
    node.count += node.ends.length;
    for (const key of ["reward", "advantage"]) {
      const sum = node.sums[key];
      for (const i of node.ends) {
        const weight = 1 / samples.get(forest.rolloutOf[i]);
        if (!Number.isNaN(forest[key][i])) (sum[0] += weight * forest[key][i]), (sum[1] += weight);
      }
      if (node.parent) (node.parent.sums[key][0] += sum[0]), (node.parent.sums[key][1] += sum[1]);
    }
    node.children.sort((a, b) => b.count - a.count || b.far - a.far || a.parts[0] - b.parts[0]);
    if (node.parent) {
      node.parent.count += node.count;
      node.parent.far = Math.max(node.parent.far, node.far);
    }
  }
}

const meanOf = (node, key) => (node.sums[key][1] ? node.sums[key][0] / node.sums[key][1] : NaN);

function pathTo(node) {
  const path = [];
  for (let at = node; at; at = at.parent) if (at.parts.length) path.push(at);
  return path.reverse();
}

// The node of a tree in which a sample ends.
function nodeOfSample(root, sample) {
  const waiting = [root];
  while (waiting.length) {
    const node = waiting.pop();
    if (node.ends.includes(sample)) return node;
    waiting.push(...node.children);
  }
  return null;
}

// Chunks of text; the most recently used ones stay in memory, 256 kB each.
const chunks = new Map();
const MAX_CHUNKS = 32;

function chunkOf(u) {
  const first = page.firstNode;
  let low = 0, high = first.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (first[middle] <= u) low = middle;
    else high = middle - 1;
  }
  return low;
}

async function textOf(u) {
  const number = chunkOf(u);
  const chunk = chunks.get(number) ?? jsonBlock(`text-${number}`);
  chunks.delete(number); // a Map keeps the order of insertion, so the first key is the least recently used
  chunks.set(number, chunk);
  if (chunks.size > MAX_CHUNKS) chunks.delete(chunks.keys().next().value);
  return (await chunk)[u - page.firstNode[number]];
}

// Pieces {text, size, kind} of a node of a tree, and {gap} for tokens that the page does not contain.
async function piecesOf(forest, node, most = Infinity) {
  const pieces = [];
  let length = 0;
  for (const u of node.parts) {
    if (length > most) break;
    const first = forest.segmentFirst[u];
    (await textOf(u)).forEach((text, k) => {
      pieces.push({ text, size: forest.segmentSize[first + k], kind: forest.segmentKind[first + k] });
      length += text.length;
    });
    if (page.kept !== null && forest.size[u] > page.kept) {
      const kind = forest.segmentKind[forest.segmentFirst[u + 1] - 1] & 7;
      pieces.push({ text: ` [${count(forest.size[u] - page.kept)} tokens left out] `, size: 0, kind, gap: true });
    }
  }
  return pieces;
}

// Special tokens: paler in texts, left out of previews.
let special;
const TAGS = /(<\/?think>|<\/?tool_call>|<\/?tool_response>)/; // of templates whose tokenizers may not know them
const everyTag = new RegExp(TAGS.source, "g");
let everyMark; // tags and special tokens

// Read other settings and blocks than those of the page.
function usePage(settings, blocks) {
  page = { ...page, ...settings };
  loaded = blocks;
  chunks.clear();
  readSpecial();
}

function readSpecial() {
  const quoted = (page.special ?? []).map((token) => token.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  special = quoted.length ? new RegExp(`(${quoted.join("|")})`) : null;
  everyMark = new RegExp([TAGS.source, ...(special ? [special.source] : [])].join("|"), "g");
}

readSpecial();
const plain = (text) => (special ? text.split(special).filter((_, k) => k % 2 === 0).join(" ") : text).replace(everyTag, " ");

// The text of a piece without the header that it starts with, if it starts a message.
function withoutHeader({ text, kind }) {
  if (!startsMessage(kind)) return text;
  const header = page.headers.find((each) => text.startsWith(each));
  return header ? text.slice(header.length) : text;
}

// Numbers for readers.
const count = (value) => Math.round(value).toLocaleString("en-US");
const plural = (value, noun) =>
  `${count(value)} ${value === 1 ? noun : noun.endsWith("ch") ? `${noun}es` : `${noun.replace(/y$/, "ie")}s`}`;
const percent = (value) => `${(100 * value).toFixed(1)}\u00a0%`;
const short = (value) => {
  if (Number.isNaN(value)) return "-";
  return Number.isInteger(value) ? count(value) : String(+value.toPrecision(3));
};
