"""Dropout, which tree attention cannot train exactly: turn it off in a configuration, refuse it in a model.

    configuration --disable_dropout--> every rate set to 0, and a note on each change      before a model is built
    model         --stop_dropout-----> the same for a model that another program has built
    model         --check_dropout----> an error if a rate above 0 is active                before a forward pass

A token shared by branches has one hidden state for all of them, but trajectories run alone would draw a mask each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from treepack.errors import TreepackError

# Noise on the input of routers in training, by the model types whose code uses it so. In phimoe, router_jitter_noise is
# a threshold of the router, in eval mode too: another value gives another model.
_NOISE = {
    "router_jitter_noise": ("mixtral", "minimax", "minimax_m2"),
    "input_jitter_noise": ("phimoe",),
    "moe_jitter_eps": ("dbrx",),
}


def disable_dropout(config: Any) -> tuple[str, ...]:
    """Set every dropout of a configuration of transformers to 0, and return a note on each change."""
    notes = []
    for part, name in _active_rates(config):
        setattr(part, name, 0.0)
        notes.append(f"{name} set to 0: a token shared by branches has one hidden state for all of them")
    return tuple(notes)


def _active_rates(config: Any) -> Iterator[tuple[Any, str]]:
    """Yield every rate above 0: the configuration that has it, and its name."""
    # dbrx keeps the rates of its attention and its experts in configurations of their own.
    for part in (config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))):
        for name, value in sorted(vars(part).items()):
            if _is_rate(value) and ("drop" in name or config.model_type in _NOISE.get(name, ())):
                yield part, name


def _is_rate(value: Any) -> bool:
    # A rate is a positive number; True is an int, but a flag such as use_dropout is not a rate.
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def stop_dropout(model: nn.Module) -> tuple[str, ...]:
    """Set every dropout of a model of transformers, its adapters and its configuration to 0.

    Returns:
        a note on each rate, with the name that most modules of this rate have.
    """
    rates: dict[str, float] = {}
    for path, module in model.named_modules():
        names = ["p"] if isinstance(module, _DropoutNd) else [name for name in vars(module) if "drop" in name]
        for name in names:
            value = getattr(module, name)
            found = [each for each in (value.values() if isinstance(value, dict) else [value]) if _is_rate(each)]
            if found:
                setattr(module, name, dict.fromkeys(value, 0.0) if isinstance(value, dict) else 0.0)
                # "layers.0.attn.lora_dropout.default" -> lora_dropout; "h.0.attn.resid_dropout" -> resid_dropout
                owner = next((part for part in reversed(path.split(".")) if "drop" in part), path)
                rates[owner if name == "p" else name] = float(max(found))
    for config in {id(each): each for module in model.modules() if (each := getattr(module, "config", None))}.values():
        if hasattr(config, "model_type"):
            disable_dropout(config)
    return tuple(
        f"{name} of {rate:g} set to 0: a token shared by branches has one hidden state for all of them"
        for name, rate in sorted(rates.items())
    )


def check_dropout(model: nn.Module) -> None:
    """Refuse a model in which dropout is active: a module in training mode with a rate above 0.

    It finds dropout modules, for example in adapters, and rates that modules keep as numbers, by their names. It
    is fast enough to run before every batch.

    Args:
        model: a model, with or without wrappers and adapters.

    Raises:
        TreepackError: naming the module and its rate.
    """
    module = next((each for each in model.modules() if each.training and _active_rate(each) is not None), None)
    if module is not None:
        name = next(name for name, each in model.named_modules() if each is module) or "the model"
        remedy = "set lora_dropout to 0" if "lora" in name else "set it to 0, or switch the model to eval mode"
        raise TreepackError(
            f"{type(model).__name__}: {name} has a dropout of {_active_rate(module):g} in training mode, but a token "
            f"shared by branches has one hidden state for all of them; {remedy}"
        )


def _active_rate(module: nn.Module) -> float | None:
    """Return the rate of a module that is in training mode; None if it drops nothing."""
    if isinstance(module, _DropoutNd):
        return module.p if module.p > 0 else None
    for name in vars(module):
        if "drop" in name:
            # {"dropout": 0.1}, or {"rank_dropout": {"default": 0.1}}, which adapters have: a rate for each adapter
            value = vars(module)[name]
            rates = value.values() if isinstance(value, dict) else [value]
            rate = next((each for each in rates if _is_rate(each)), None)
            if rate is not None:
                return float(rate)
    return None
