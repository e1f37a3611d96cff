// The text of a node or of the whole path to it, as a conversation and as the tokens of the model.
//
//   new TextView({forest, tree}): show(node)
//
// A conversation has one block for each message, without headers and special tokens. Messages are known by their headers;
// without roles, a block is a run of tokens that are all trained or all not.

const LONG = 700; // characters of a message from which on it is folded
const LONG_OWN = 3000; // the same for messages of the opened node
const MAX_ENDS = 20; // samples that are listed by name
const THINK = "<think>", END_THINK = "</think>";

// Messages of the pieces of some nodes: {role, trained, tokens, own, runs: [{text, trained, own, quiet}]}.
function messagesOf(nodes, selected) {
  const messages = [];
  let now = null;
  for (const { node, pieces } of nodes) {
    const own = node === selected;
    // A chain of turns that the same rollouts share has no branch between its nodes.
    if (now && node.rollouts !== node.parent?.rollouts) now.runs.push({ branch: node });
    for (const piece of pieces) {
      const role = roleOf(piece.kind), trained = isTrained(piece.kind);
      const isNew = role ? startsMessage(piece.kind) || role !== now?.role : trained !== now?.trained;
      if (!now || (isNew && !piece.gap)) {
        now = { role, trained, tokens: 0, trainedTokens: 0, own, runs: [] };
        messages.push(now);
      }
      now.tokens += piece.size;
      now.trainedTokens += trained ? piece.size : 0;
      now.own ||= own;
      now.runs.push({ text: piece.gap ? piece.text : withoutHeader(piece), trained, own, gap: piece.gap });
    }
  }
  for (const message of messages) message.runs = readable(message.runs);
  return messages.filter((message) => message.runs.length);
}

// Runs without tags and special tokens, and without blanks at both ends; `quiet` runs are reasoning.
function readable(runs) {
  // In the text of all runs: a tag may be cut by the end of a run.
  const joined = runs.map((run) => run.text ?? "").join("");
  const marks = [...joined.matchAll(everyMark)].map((match) => ({ text: match[0], start: match.index }));
  const result = [];
  let at = 0, quiet = false;
  for (const run of runs) {
    if (run.branch) result.push(run);
    for (const end = at + (run.text ?? "").length; at < end; ) {
      const [mark] = marks;
      if (mark && mark.start <= at) {
        at = Math.min(end, mark.start + mark.text.length);
        if (at < mark.start + mark.text.length) break; // the mark continues in the next run
        quiet = mark.text === THINK || (quiet && mark.text !== END_THINK);
        marks.shift();
        continue;
      }
      const stop = Math.min(end, mark?.start ?? end);
      result.push({ ...run, text: joined.slice(at, stop), quiet });
      at = stop;
    }
  }
  return trimmed(result);
}

// One line break between reasoning and other text, and no blanks at both ends.
function trimmed(runs) {
  const words = runs.filter((run) => !run.branch && run.text.trim());
  words.forEach((run, k) => {
    const before = words[k - 1], after = words[k + 1];
    if (!before || before.quiet !== run.quiet) run.text = run.text.trimStart();
    if (!after) run.text = run.text.trimEnd();
    else if (after.quiet !== run.quiet) run.text = `${run.text.trimEnd()}\n`;
  });
  const first = runs.indexOf(words[0]), last = runs.lastIndexOf(words.at(-1));
  const isBlank = (run, k) => !run.branch && (!run.text || (!run.text.trim() && (k < first || k > last)));
  return runs.filter((run, k) => !isBlank(run, k));
}

class TextView {
  constructor({ forest, tree }) {
    Object.assign(this, { forest, tree, turn: 0, node: null });
    this.form = page.text === "text" && page.roles.length ? "talk" : "tokens";
    this.whole = this.form === "talk";
    for (const button of document.querySelectorAll("[data-whole]"))
      button.addEventListener("click", () => this.set({ whole: button.dataset.whole === "true" }));
    for (const button of document.querySelectorAll("[data-form]"))
      button.addEventListener("click", () => this.set({ form: button.dataset.form }));
    byId("text-legend").hidden = page.text === "none";
  }

  set(values) {
    Object.assign(this, values);
    this.show(this.node);
  }

  async show(node, fromStart = false) {
    const now = ++this.turn;
    this.node = node;
    this.showFacts(node);
    byId("text").hidden = false;
    for (const [name, value] of [["whole", String(this.whole)], ["form", this.form]])
      for (const button of document.querySelectorAll(`[data-${name}]`))
        button.setAttribute("aria-pressed", String(button.dataset[name] === value));
    const body = byId("text-body");
    body.dataset.ready = "false";
    const path = this.whole ? pathTo(node) : node.parts.length ? [node] : [];
    const load = (each) => (page.text === "none" ? [] : piecesOf(this.forest, each));
    const nodes = await Promise.all(path.map(async (each) => ({ node: each, pieces: await load(each) })));
    if (now !== this.turn) return; // another node was opened meanwhile
    const columns = [];
    if (this.form !== "tokens") columns.push(this.talk(nodes));
    if (this.form !== "talk") columns.push(this.tokens(nodes));
    body.replaceChildren(...columns);
    body.className = `columns-${columns.length}`;
    body.dataset.ready = "true";
    if (!this.whole || fromStart) return;
    for (const column of columns) {
      const own = column.querySelector(".own");
      // Only the column scrolls, never the page.
      if (own) column.scrollTop = Math.max(0, own.getBoundingClientRect().top - column.getBoundingClientRect().top - 40);
    }
  }

  showFacts(node) {
    const reward = meanOf(node, "reward"), advantage = meanOf(node, "advantage");
    byId("text-facts").textContent = [
      `tokens ${count(node.start)} to ${count(node.start + node.size)}`,
      plural(node.size, "token"),
      page.samplesAreRollouts ? null : plural(node.count, "trajectory"),
      plural(node.rollouts, "rollout"),
      Number.isNaN(reward) ? null : `mean reward ${short(reward)}`,
      Number.isNaN(advantage) ? null : `mean advantage ${short(advantage)}`,
    ].filter(Boolean).join(" \u00b7 ");
    const rewarded = (i) => (Number.isNaN(this.forest.reward[i]) ? "" : ` (${short(this.forest.reward[i])})`);
    const noted = (i) => (this.forest.notes[i] ? `: ${this.forest.notes[i]}` : "");
    const ends = node.ends.slice(0, MAX_ENDS).map((i) => `${this.forest.ids[i]}${rewarded(i)}${noted(i)}`);
    const more = node.ends.length > MAX_ENDS ? `, and ${count(node.ends.length - MAX_ENDS)} more` : "";
    byId("text-ends").textContent = ends.length ? `Ends here: ${ends.join(", ")}${more}` : "";
  }

  branch(node, text) {
    return make("button", { type: "button", class: "place", onclick: () => this.tree.reveal(node) }, text);
  }

  tokens(nodes) {
    const sections = nodes.map(({ node, pieces }) => {
      const facts = `tokens ${count(node.start)} to ${count(node.start + node.size)}, ${plural(node.rollouts, "rollout")}`;
      const text = make("pre", {}, ...textPieces(pieces));
      const head = this.whole ? [this.branch(node, facts)] : [];
      return make("section", { class: node === this.node ? "own" : null }, ...head, text);
    });
    return make("div", { class: "scroll column", tabindex: 0, role: "region", "aria-label": "Tokens" }, ...sections);
  }

  talk(nodes) {
    const messages = messagesOf(nodes, this.node).map((message) => this.message(message));
    return make("div", { class: "scroll column talk", tabindex: 0, role: "region", "aria-label": "Conversation" }, ...messages);
  }

  message(message) {
    const role = page.roles[message.role];
    const part = message.trainedTokens === message.tokens ? "" : `${count(message.trainedTokens)} of `;
    const facts = message.trainedTokens ? `${part}${plural(message.tokens, "token")} trained` : plural(message.tokens, "token");
    const name = role ?? (message.trained ? "trained" : "context");
    const head = make(
      "p", { class: "role" }, make("span", { class: `swatch role-${role ?? "unknown"}${message.trainedTokens ? " hatched" : ""}` }),
      make("strong", {}, name), make("span", { class: "muted" }, facts),
    );
    const runs = message.runs.map((run) => {
      if (run.branch) return this.branch(run.branch, `from here on ${count(run.branch.rollouts)} of ${plural(this.tree.root.rollouts, "rollout")}`);
      const classes = [run.trained && "trained", run.quiet && "quiet", run.gap && "gap"].filter(Boolean);
      return make("span", { class: classes.join(" ") || null }, run.text);
    });
    const body = make("div", { class: "said" }, ...runs);
    const letters = message.runs.reduce((sum, run) => sum + (run.text?.length ?? 0), 0);
    const box = make("section", { class: `message role-${role ?? "unknown"}${message.own ? " own" : ""}` }, head, body);
    if (letters > (message.own && role !== "system" ? LONG_OWN : LONG)) box.append(unfolding(body, letters));
    return box;
  }
}

// Fold a message, and return the button that unfolds it.
function unfolding(body, letters) {
  body.classList.add("folded");
  const button = make("button", { type: "button", class: "unfold", "aria-expanded": "false" }, `Show all ${count(letters)} characters`);
  button.addEventListener("click", () => {
    const folded = body.classList.toggle("folded");
    button.setAttribute("aria-expanded", String(!folded));
    button.textContent = folded ? `Show all ${count(letters)} characters` : "Show less";
  });
  return button;
}

function textPieces(pieces) {
  const dimmed = (text) =>
    special ? text.split(special).map((part, k) => (k % 2 ? make("span", { class: "special" }, part) : part)) : [text];
  return pieces.map((piece) => {
    if (piece.gap) return make("span", { class: "gap" }, piece.text);
    return make(isTrained(piece.kind) ? "mark" : "span", {}, ...dimmed(piece.text));
  });
}
