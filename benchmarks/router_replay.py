"""Router replay on one GPU: equal bits with own routes, and the time that replay adds to forward and backward.

    python benchmarks/router_replay.py [--layers 4] [--repeats 5]
    python benchmarks/router_replay.py --dry-run       tiny sizes on the CPU

Model and row come from `experts.py`. All ways recompute their layers.

    free       the routers choose
    own        the experts that the routers chose in `free`, replayed: loss and gradients must have the same bits
    others     random experts, replayed
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from typing import Any

import torch
from experts import TINY, WAYS, Way, forward_and_backward, load, make_row
from measure import seconds_of
from torch import Tensor
from workloads import make_workload, star

from treepack.attention import row_multiple
from treepack.costs.model_cost import PRESETS
from treepack.data.batch import Batch
from treepack.model.experts.routers import follow_routers
from treepack.model.loaded import LoadedModel


def routes_of(loaded: LoadedModel, row: Batch, way: Way) -> Tensor:
    """Return the experts that the routers choose, uint8 [T, layers, k]."""
    chosen: dict[int, Tensor] = {}
    switches = follow_routers(loaded.causal, "--routes replay")

    def keep(number: int) -> Any:
        def hook(router: Any, inputs: Any, output: Any) -> None:
            chosen[number] = output[2].to(torch.uint8)

        return hook

    hooks = [switch.router.register_forward_hook(keep(number)) for number, switch in enumerate(switches)]
    forward_and_backward(loaded, row, way)
    for hook in hooks:
        hook.remove()
    return torch.stack([chosen[number] for number in range(len(switches))], 1)


def step(loaded: LoadedModel, row: Batch, way: Way) -> tuple[float, list[Tensor]]:
    """Return loss and gradients of forward and backward."""
    loaded.model.zero_grad(set_to_none=True)
    loss = forward_and_backward(loaded, row, way)
    return loss, [parameter.grad for parameter in loaded.model.parameters() if parameter.grad is not None]


def measure(way: Way, config: dict[str, Any], row: Batch, repeats: int) -> list[str]:
    """Return the lines of the table of one way of training.

    Raises:
        SystemExit: own routes change a bit of the loss or of a gradient.
    """
    device = row.input_ids.device
    loaded = load(config, way, device)
    own = routes_of(loaded, row, way)
    torch.manual_seed(1)
    scores = torch.rand(*own.shape[:2], config["num_experts"], device=device)
    rows = {
        "free": row,
        "own": replace(row, routes=own),
        "others": replace(row, routes=scores.topk(own.shape[2]).indices.to(torch.uint8)),
    }
    loss, gradients = step(loaded, rows["free"], way)
    gradients = [gradient.clone() for gradient in gradients]
    same, again = step(loaded, rows["own"], way)
    if loss != same or not all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True)):
        raise SystemExit(f"{way.name}: own routes change bits of the loss or the gradients")
    del gradients, again
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(repeats):  # in turns, so that a slow second hits all of them
        for name, each in rows.items():
            times[name].append(seconds_of(device, lambda each=each: step(loaded, each, way)))  # type: ignore[misc]
    free = statistics.median(times["free"])
    lines = []
    for name, spent in times.items():
        median = statistics.median(spent)
        lines.append(f"| {way.name} | {name} | {median:.4f} | {100 * (median / free - 1):+.1f} % |")
    return lines


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure the experts of treepack, plain and compiled, and print the table."""
    options = parse(arguments)
    device = torch.device("cpu" if options.dry_run else "cuda")
    config = {**PRESETS["qwen3-30b-a3b"], "num_hidden_layers": options.layers, **(TINY if options.dry_run else {})}
    config["max_position_embeddings"] = 1 << 17
    workload = star("star", 30, 3, 40) if options.dry_run else make_workload("agent-32k")
    row = make_row(workload, config["vocab_size"], row_multiple("triton")).to(device)
    print(f"# {workload.tokens:,} tokens, {options.layers} layers, all bits equal with own routes")
    print("| way | routes | forward and backward, s | against free |\n|---|---|---|---|")
    for way in WAYS:
        if way.name in ("treepack", "compiled") and not (options.dry_run and way.compiled):
            print("\n".join(measure(way, config, row, options.repeats)), flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
