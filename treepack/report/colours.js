// Elements of SVG, and the colours of a tree: scales for rewards and numbers, and the pattern of trained tokens.
//
//   element(name, attributes, parent, text)      scaleOf(key) -> (value in [0, 1]) => {fill, dark}      hatch() -> <defs>

const SVG = "http://www.w3.org/2000/svg";
const FROM_LOW = ["--low", "--mid", "--high"];
const COLOURS = { reward: FROM_LOW, advantage: FROM_LOW, scale: ["--few", "--many"] };

function element(name, attributes = {}, parent = null, text = null) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

// A colour scale from the page's variables; value in [0, 1].
function scaleOf(key) {
  if (key === "role") return null;
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

// The range of a tree's colours: rewards of all samples, advantages symmetric around 0, or numbers of samples.
function domainOf(key, root, forest) {
  if (key === "role") return null;
  if (key === "scale") return [0, Math.log2(Math.max(2, root.count))];
  const values = forest[key].filter((value) => !Number.isNaN(value));
  let low = Infinity, high = -Infinity;
  for (const value of values) (low = Math.min(low, value)), (high = Math.max(high, value));
  const limit = Math.max(Math.abs(low), Math.abs(high), 1e-9);
  if (key === "advantage") return [-limit, limit];
  return high > low ? [low, high] : [low - 0.5, low + 0.5];
}

// The pattern over trained tokens, which is visible without colours.
function hatch() {
  const definitions = element("defs");
  const pattern = element("pattern", {
    id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)",
  }, definitions);
  element("rect", { width: 1.6, height: 6, class: "hatch-line" }, pattern);
  return definitions;
}
