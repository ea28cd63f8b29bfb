"""Complete runs by name: what `atoll train NAME` starts from. Flags and files change any setting of it.

A recipe is a function that returns nested settings for `atoll.train.config.build_config`: those that make it what it
is, and defaults for the rest. A new one is a function in this folder and a line in `RECIPES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atoll.errors import ConfigError, nearest
from atoll.recipes.diloco import diloco_60m, diloco_150m, diloco_400m
from atoll.recipes.dilocox import dilocox_107b, dilocox_opt_1_3b, dilocox_tiny, sparseloco_1b, streaming_1b
from atoll.recipes.opendiloco import opendiloco_1b, opendiloco_150m
from atoll.recipes.short import quickstart, small

RECIPES: dict[str, Callable[[], dict[str, Any]]] = {
    "quickstart": quickstart,
    "small": small,
    "diloco_60m": diloco_60m,
    "diloco_150m": diloco_150m,
    "diloco_400m": diloco_400m,
    "opendiloco_150m": opendiloco_150m,
    "opendiloco_1b": opendiloco_1b,
    "dilocox_tiny": dilocox_tiny,
    "dilocox_opt_1_3b": dilocox_opt_1_3b,
    "dilocox_107b": dilocox_107b,
    "streaming_1b": streaming_1b,
    "sparseloco_1b": sparseloco_1b,
}


def recipe(name: str) -> dict[str, Any]:
    """The nested settings of the recipe called `name`, fresh at each call.

    Raises ConfigError, naming the nearest, for a name that is not in `RECIPES`.

    >>> recipe("quickstart")["model"]["hidden_size"]
    192
    >>> recipe("quickstat")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    atoll.errors.ConfigError: 'quickstat' is not a recipe. Did you mean 'quickstart'?
    Known: quickstart, small, diloco_60m, diloco_150m, diloco_400m, opendiloco_150m, opendiloco_1b, dilocox_tiny, ...
    """
    if name not in RECIPES:
        raise ConfigError(f"{name!r} is not a recipe.{nearest(name, RECIPES)}\nKnown: {', '.join(RECIPES)}.")
    return RECIPES[name]()


__all__ = ["RECIPES", "recipe"]
