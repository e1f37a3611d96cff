// The blocks of the page as arrays, and the trie of the rollouts of one group or tree.
//
//   block(name) -> ArrayBuffer      loadForest() -> forest      treeOf(forest, rollouts) -> node, the root of their trie
//   textOf(node of the forest) -> [untrained, trained, untrained, ...]

const byId = (name) => document.getElementById(name);
const page = JSON.parse(byId("data-page").textContent);

async function block(name) {
  const coded = atob(byId(`data-${name}`).textContent);
  const bytes = new Uint8Array(coded.length);
  for (let i = 0; i < coded.length; i++) bytes[i] = coded.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

const inText = (buffer) => new TextDecoder().decode(buffer);
const jsonBlock = async (name) => JSON.parse(inText(await block(name)));

async function loadForest() {
  const [size, up, gaps, reward, advantage, ids] = await Promise.all([
    block("forest-size").then((b) => new Uint32Array(b)),
    block("forest-up").then((b) => new Uint32Array(b)),
    block("rollout-end").then((b) => new Uint32Array(b)),
    block("rollout-reward").then((b) => new Float32Array(b)),
    block("rollout-advantage").then((b) => new Float32Array(b)),
    jsonBlock("rollout-ids"),
  ]);
  // Parents and ends are stored as distances: up [0, 1, 1, 2] -> parent [-1, 0, 1, 1], gaps [2, 0, 3] -> end [2, 2, 5]
  const parent = new Int32Array(size.length);
  const start = new Float64Array(size.length);
  for (let u = 0; u < size.length; u++) {
    parent[u] = up[u] ? u - up[u] : -1;
    start[u] = up[u] ? start[parent[u]] + size[parent[u]] : 0;
  }
  const end = new Uint32Array(gaps.length);
  for (let i = 0, at = 0; i < gaps.length; i++) end[i] = at += gaps[i];
  return { size, parent, start, end, reward, advantage, ids, slot: new Int32Array(size.length).fill(-1) };
}

async function loadParts(kind) {
  const [names, of, flat, tree] = await Promise.all([
    jsonBlock(`${kind}-names`),
    block(`${kind}-of`).then((b) => new Uint32Array(b)),
    block(`${kind}-flat`).then((b) => new Float64Array(b)),
    block(`${kind}-tree`).then((b) => new Float64Array(b)),
  ]);
  const members = names.map(() => []);
  of.forEach((part, rollout) => members[part].push(rollout));
  return { kind, names, of, flat, tree, members };
}

// Mean of the values that are known, NaN if none are.
function mean(values, rollouts) {
  let sum = 0, count = 0;
  for (const i of rollouts) if (!Number.isNaN(values[i])) (sum += values[i]), count++;
  return count ? sum / count : NaN;
}

// The nodes on the paths of these rollouts, in depth-first order. slot[u] is the index of u among them; the caller resets
// it to -1.
function nodesOf(forest, rollouts) {
  const { parent, end, slot } = forest;
  const visited = [];
  for (const i of rollouts) {
    // A visited node has visited parents, so the walk up stops there.
    for (let u = end[i]; u >= 0 && slot[u] < 0; u = parent[u]) (slot[u] = 0), visited.push(u);
  }
  const nodes = Uint32Array.from(visited).sort();
  nodes.forEach((u, place) => (slot[u] = place));
  return nodes;
}

const newNode = (start, parent) => ({
  parts: [], start, size: 0, parent, children: [], ends: [], count: 0, far: 0, shown: 0,
  sums: { reward: [0, 0], advantage: [0, 0] },
});

// The trie of these rollouts alone: a chain of nodes in which none of them branches or ends is one node.
function treeOf(forest, rollouts) {
  const { size, parent, start, end, slot } = forest;
  const nodes = nodesOf(forest, rollouts);
  const branches = new Uint32Array(nodes.length);
  const endings = nodes.length ? Array.from(nodes, () => null) : [];
  for (const u of nodes) if (parent[u] >= 0) branches[slot[parent[u]]]++;
  for (const i of rollouts) (endings[slot[end[i]]] ??= []).push(i);
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
  return root;
}

function sumUp(forest, order) {
  for (let k = order.length - 1; k >= 0; k--) {
    const node = order[k];
    node.far = Math.max(node.far, node.start + node.size);
    node.count += node.ends.length;
    for (const key of ["reward", "advantage"]) {
      const sum = node.sums[key];
      for (const i of node.ends) if (!Number.isNaN(forest[key][i])) (sum[0] += forest[key][i]), sum[1]++;
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

// The node of a tree in which a rollout ends.
function nodeOfRollout(root, rollout) {
  const waiting = [root];
  while (waiting.length) {
    const node = waiting.pop();
    if (node.ends.includes(rollout)) return node;
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

// Pieces {text, trained} of a node of a tree, and the number of its tokens that the page does not contain.
async function piecesOf(forest, node, most = Infinity) {
  const pieces = [];
  let leftOut = 0, length = 0;
  for (const u of node.parts) {
    if (length > most) break;
    (await textOf(u)).forEach((text, k) => {
      if (text) pieces.push({ text, trained: k % 2 === 1 });
      length += text.length;
    });
    if (page.kept !== null && forest.size[u] > page.kept) {
      leftOut += forest.size[u] - page.kept;
      pieces.push({ text: ` [${count(forest.size[u] - page.kept)} tokens left out] `, gap: true });
    }
  }
  return { pieces, leftOut };
}

// Special tokens: paler in texts, left out of previews.
const special = page.special.length
  ? new RegExp(`(${page.special.map((token) => token.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|")})`)
  : null;
const plain = (text) => (special ? text.split(special).filter((_, k) => k % 2 === 0).join(" ") : text);

// Numbers for readers.
const count = (value) => Math.round(value).toLocaleString("en-US");
const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : noun.endsWith("ch") ? "es" : "s"}`;
const percent = (value) => `${(100 * value).toFixed(1)}\u00a0%`;
const short = (value) => {
  if (Number.isNaN(value)) return "-";
  return Number.isInteger(value) ? count(value) : String(+value.toPrecision(3));
};
