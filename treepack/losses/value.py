"""The value loss of a critic alone, computed by `objectives.value_loss`."""

from treepack.objectives.loss import Loss, Preset

LOSS = Loss(
    name="value",
    presets={
        "value": Preset(
            {"denominator": "token"}, "the [value loss](#values-of-a-critic) alone", "", "slime `value_loss`"
        )
    },
    over="values",
)
