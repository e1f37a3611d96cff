// Lines and places of the nodes of a tree, its visible part, and the stripes of a block.
//
//   arrange(root, forest): x, right and wide of each node in tokens; lines, before and after of each
//   openSome(root, pixels)      itemsOf(root, scale) -> [item]      stripesOf(forest, node, width) -> [{x, width, kind}]
//
// A rollout is one line along its last sample. Branches of its earlier samples that nothing continues are put into the
// line, at their place in time. Templates that drop reasoning make such branches:
//
//   prompt --- history 1 --- history 2 --- answer 3          prompt | answer 1 | history 1 | answer 2 | history 2 | answer 3
//           \            \                             ->
//            answer 1     answer 2                           one line, and no token is drawn twice
//
// If the rollouts of such a branch continue on several lines, it is `after` their common node, before they separate;
// else it is `before` the first node of the one line on which they continue.

const ROWS = 160; // rows that are open at first, and maximum lines at once: a few screens
const MAX_OPEN = 1500; // nodes that are open at first
const NARROW = 3; // pixels: narrower branches are a stub
const THIN = 1; // pixels: thinner branches in a line are not drawn

// All nodes, parents first. No recursion here and below: trees can be thousands of nodes deep.
function preorder(root, below) {
  const nodes = [];
  const waiting = [root];
  while (waiting.length) {
    const node = waiting.pop();
    nodes.push(node);
    for (let k = below(node).length - 1; k >= 0; k--) waiting.push(below(node)[k]);
  }
  return nodes;
}

function arrange(root, forest) {
  const nodes = preorder(root, (node) => node.children);
  nodes.forEach((node, order) => Object.assign(node, { order, stop: order + 1 }));
  for (const node of [...nodes].reverse()) if (node.parent) node.parent.stop = Math.max(node.parent.stop, node.stop);
  const ends = endsOf(nodes, forest);
  countRollouts(nodes, ends);
  const last = new Map([...ends].map(([rollout, own]) => [rollout, own.at(-1)]));
  for (const node of last.values()) node.finals++;
  for (const node of last.values()) for (let at = node; at && !at.isMain; at = at.parent) at.isMain = true;
  for (const node of nodes) divide(node, nodes, last, forest);
  place(root);
}

// The nodes in which the samples of each rollout end, in the order of their numbers.
function endsOf(nodes, forest) {
  const ends = new Map();
  for (const node of nodes) {
    for (const i of node.ends) {
      const own = ends.get(forest.rolloutOf[i]) ?? [];
      ends.set(forest.rolloutOf[i], own);
      own.push([forest.number[i], node]);
    }
  }
  for (const [rollout, own] of ends) {
    if (own.length > 1) own.sort((a, b) => a[0] - b[0] || a[1].far - b[1].far);
    ends.set(rollout, own.map(([, node]) => node));
  }
  return ends;
}

// Rollouts through each node. Ends a, b of a rollout count 1 each, and -1 in the last node that both paths share.
function countRollouts(nodes, ends) {
  for (const own of ends.values()) {
    if (own.length === 1) {
      own[0].rollouts++;
      continue;
    }
    const sorted = [...new Set(own)].sort((a, b) => a.order - b.order);
    sorted.forEach((node, k) => {
      node.rollouts++;
      if (k) meeting(sorted[k - 1], node).rollouts--;
    });
  }
  for (const node of [...nodes].reverse()) if (node.parent) node.parent.rollouts += node.rollouts;
}

// Parents come before their children, so of two nodes the later one is never above the other.
function meeting(a, b) {
  while (a !== b) [a, b] = a.order > b.order ? [a.parent, b] : [a, b.parent];
  return a;
}

// Divide the children of a node into lines and branches in a line.
function divide(node, nodes, last, forest) {
  if (node.isMain && node.children.every((child) => child.isMain)) {
    node.lines = node.children;
    return;
  }
  const others = node.children.filter((child) => !child.isMain);
  const first = others.length > 1 ? new Map(others.map((child) => [child, firstNumber(child, nodes, forest)])) : null;
  others.sort((a, b) => first.get(a) - first.get(b));
  if (!node.isMain) {
    node.after = others;
    return;
  }
  node.lines = node.children.filter((child) => child.isMain);
  for (const child of others) {
    const hosts = new Set();
    for (let k = child.order; k < child.stop; k++) {
      for (const i of nodes[k].ends) {
        const { order } = last.get(forest.rolloutOf[i]);
        hosts.add(node.lines.find((line) => line.order <= order && order < line.stop) ?? null);
      }
    }
    const [host] = hosts;
    if (hosts.has(null)) node.lines.push(child); // its rollout continues elsewhere, so it is a line of its own
    else if (hosts.size === 1) host.before = [...host.before, child];
    else node.after = [...node.after, child];
  }
}

function firstNumber(node, nodes, forest) {
  let first = Infinity;
  for (let k = node.order; k < node.stop; k++) for (const i of nodes[k].ends) first = Math.min(first, forest.number[i]);
  return first;
}

// The branch and everything below it, in the order in which they are put into a line.
const inLine = (branch) => preorder(branch, (node) => [...node.before, ...node.lines, ...node.after]);

function place(root) {
  const put = (branches, x) => {
    if (!branches.length) return x;
    for (const node of branches.flatMap(inLine)) {
      node.x = x;
      node.right = node.wide = x += node.size;
    }
    return x;
  };
  const placed = preorder(root, (node) => node.lines);
  for (const node of placed) {
    node.x = put(node.before, node.parent ? node.parent.right : 0);
    node.right = node.wide = put(node.after, node.x + node.size);
  }
  for (const node of placed.reverse()) if (node.parent) node.parent.wide = Math.max(node.parent.wide, node.wide);
}

// Open level after level while there are free rows and the part after a node is wide enough.
function openSome(focus, pixelsPerToken) {
  let rows = 1;
  const waiting = [focus];
  for (let k = 0; k < Math.min(waiting.length, MAX_OPEN) && rows < ROWS; k++) {
    const node = waiting[k];
    if (!node.lines.length || (node !== focus && (node.wide - node.right) * pixelsPerToken < NARROW)) continue;
    node.shown = Math.max(node.shown, Math.min(node.lines.length, Math.max(8, Math.floor((ROWS - rows) / 3))));
    rows += node.shown - 1 + (node.shown < node.lines.length ? 1 : 0);
    waiting.push(...node.lines.slice(0, node.shown));
  }
}

// Visible items, depth-first, with the row and number of rows of each. `isBranch` items are put into the line of `owner`.
function itemsOf(focus, scale) {
  const items = [];
  const lines = [];
  const waiting = [{ node: focus, parent: null }];
  let row = 0;
  const add = (item) => {
    item.level = item.parent ? item.parent.level + 1 : 1;
    item.parent?.below.push(item);
    items.push(item);
  };
  const addBranches = (branches, parent, owner) => {
    for (const node of branches.flatMap(inLine)) {
      if (node.size * scale >= THIN) add({ node, parent, owner, below: [], isBranch: true });
    }
  };
  while (waiting.length) {
    const item = { ...waiting.pop(), row: 0, rows: 1, below: [], lines: [] };
    const { node } = item;
    if (!item.stub && node !== focus) addBranches(node.before, item.parent, item);
    add(item);
    lines.push(item);
    item.parent?.lines.push(item);
    if (item.stub) {
      item.row = row++;
      continue;
    }
    addBranches(node.after, item, item);
    const hidden = node.lines.length - node.shown;
    if (hidden) waiting.push({ node, stub: hidden, parent: item });
    for (let k = node.shown - 1; k >= 0; k--) waiting.push({ node: node.lines[k], parent: item });
    if (!node.shown && !hidden) item.row = row++;
  }
  for (const item of lines.reverse()) {
    if (!item.lines.length) continue;
    item.row = item.lines[0].row;
    item.rows = item.lines.reduce((sum, line) => sum + line.rows, 0);
  }
  for (const item of items) if (item.isBranch) Object.assign(item, { row: item.owner.row, rows: item.owner.rows });
  return items;
}

// Runs of pixels of one role, trained or not. Segments below a pixel are joined; the longest of them, number `segment`,
// decides.
function stripesOf(forest, node, width) {
  const stripes = [];
  const scale = width / Math.max(1, node.size);
  let start = 0, at = 0, longest = null;
  segmentsOf(forest, node).forEach(({ size, kind }, segment) => {
    at += size;
    if (!longest || size > longest.size) longest = { size, kind: kind & 15, segment };
    if ((at - start) * scale < 1 && at < node.size) return;
    const before = stripes.at(-1);
    if (before?.kind === longest.kind) before.width = at * scale - before.x;
    else stripes.push({ x: start * scale, width: (at - start) * scale, kind: longest.kind, segment: longest.segment });
    start = at;
    longest = null;
  });
  return stripes;
}
