"""The table of losses in docs/objectives.md, from the losses of treepack."""

from __future__ import annotations

from treepack.objectives.loss import CLIPS
from treepack.objectives.objective import choose_objective
from treepack.objectives.registry import own_losses, presets_of


def losses() -> str:
    """Return the table in Markdown; the text below it in the page explains the letters."""
    lines = ["| `--loss` | loss of a term | clip | denominator | source | elsewhere |", "|---|---|---|---|---|---|"]
    for name, loss in presets_of(own_losses()).items():
        chosen, preset, options = choose_objective(name), loss.presets[name], loss.available_options
        clip = f"{chosen.clip_low:g}, {chosen.clip_high:g}" if options >= CLIPS else ""
        denominator = chosen.denominator if "denominator" in options else ""
        usual = [f"{constant} {value:g}" for constant, value in chosen.constants.items()]
        if chosen.dual_clip is not None:
            usual.append(f"D {chosen.dual_clip:g}")
        if "beta" in options:
            usual.append(f"beta {chosen.beta:g}")
        formula = f"{preset.formula} ({', '.join(usual)})" if usual else preset.formula
        lines.append(f"| `{name}` | {formula} | {clip} | {denominator} | {preset.source} | {preset.elsewhere} |")
    return "\n".join(lines) + "\n"
