"""Command-line flags as settings: `--model.hidden-size 128` is `model.hidden_size` of `TrainConfig`.

Which flags there are follows from the settings themselves, so that a new setting is a new flag. `build_config` checks
the values, the same for a flag as for a file.
"""

from __future__ import annotations

import difflib
import tomllib
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from atoll.errors import ConfigError
from atoll.recipes import recipe
from atoll.train.config import TrainConfig, read_settings

YES, NO = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


@dataclass(frozen=True)
class Setting:
    """One setting of a run. key: dotted, as in a file."""

    key: str
    field: FieldInfo

    @property
    def flag(self) -> str:
        """
        >>> SETTINGS["model.hidden_size"].flag
        '--model.hidden-size'
        """
        return "--" + self.key.replace("_", "-")

    @property
    def is_bool(self) -> bool:
        return self.field.annotation in (bool, bool | None)

    @property
    def is_number(self) -> bool:
        return self.field.annotation in (int, float)

    @property
    def is_list(self) -> bool:
        return get_origin(self.field.annotation) is list

    @property
    def is_table(self) -> bool:
        """Whether it takes any keys below it, as in `--model.overrides.rope_theta`."""
        return get_origin(self.field.annotation) is dict


def _settings_of(model: type[BaseModel], prefix: str = "") -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= _settings_of(field.annotation, f"{prefix}{name}.")
        else:
            found[prefix + name] = Setting(prefix + name, field)
    return found


SETTINGS = _settings_of(TrainConfig)


def settings_from(args: Sequence[str]) -> dict[str, Any]:
    """The nested settings that `args` ask for: those of the recipe or file, changed by the flags. Not checked yet."""
    source, flags = parse_flags(args)
    return merge({} if source is None else read_source(source), flags)


def parse_flags(args: Sequence[str]) -> tuple[str | None, dict[str, Any]]:
    """The recipe or file that is named, if one is, and the flags as nested settings.

    >>> parse_flags(["quickstart", "--max-steps", "40", "--data.source=texts", "--no-average-inner-state"])
    ('quickstart', {'max_steps': 40, 'data': {'source': 'texts'}, 'average_inner_state': False})
    >>> parse_flags(["--report-to", "wandb,trackio", "--model.overrides.rope_theta", "1e4"])
    (None, {'report_to': ['wandb', 'trackio'], 'model': {'overrides': {'rope_theta': 10000.0}}})
    >>> parse_flags(["--iner-steps", "5"])
    Traceback (most recent call last):
    ...
    atoll.errors.ConfigError: --iner-steps is not a flag. Did you mean --inner-steps? All are in atoll train --help.
    """
    rest = deque(args)
    source: str | None = None
    flags: dict[str, Any] = {}
    while rest:
        word = rest.popleft()
        if word.startswith("-") and word != "-":
            _read_flag(word, rest, flags)
        elif source is None:
            source = word
        else:
            raise ConfigError(f"{word!r} is one name too many after {source!r}. Give one recipe or file, then --flags.")
    return source, flags


def read_source(source: str) -> dict[str, Any]:
    """The nested settings of a recipe, a TOML file, or the run in a folder."""
    path = Path(source)
    if (path / "config.toml").is_file():
        return read_settings(path / "config.toml")
    if path.suffix == ".toml" or path.is_file():
        return read_settings(path)
    if len(path.parts) > 1:
        raise ConfigError(f"{source!r} is neither a TOML file nor the folder of a run. Name one of them, or a recipe.")
    return recipe(source)


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings with those of `above` in place of those of `below`.

    >>> merge({"seed": 1, "data": {"source": "a", "shard": "iid"}}, {"data": {"source": "b"}})
    {'seed': 1, 'data': {'source': 'b', 'shard': 'iid'}}
    """
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


# --- one flag ---


def _read_flag(word: str, rest: deque[str], flags: dict[str, Any]) -> None:
    """Put the flag `word` into `flags`, with a value from `rest` where it needs one."""
    name, equals, given = word.partition("=")
    key = name.removeprefix("--").replace("-", "_")
    if not name.startswith("--"):
        raise ConfigError(f"{word!r} is not a flag: settings are --name value. All are in atoll train --help.")
    if (negated := SETTINGS.get(key.removeprefix("no_"))) and negated.is_bool and key.startswith("no_") and not equals:
        _put(flags, negated.key, False)
        return
    setting = _find(name, key)
    value = given if equals else _next_value(setting, rest)
    if setting.is_list:
        _extend(flags, setting.key, value)
    elif setting.is_table:
        _put(flags, _table_key(name, setting), _parse_any(value))
    else:
        _put(flags, setting.key, _number(value) if setting.is_number else value)


def _find(name: str, key: str) -> Setting:
    for setting in SETTINGS.values():
        if key == setting.key or (setting.is_table and key.startswith(setting.key + ".")):
            return setting
    raise ConfigError(f"{name} is not a flag.{_nearest_flag(key)} All are in atoll train --help.")


def _nearest_flag(key: str) -> str:
    """A hint naming the flag whose whole name, or whose last part, is most like `key`."""
    names = {setting.key.rpartition(".")[2]: setting for setting in SETTINGS.values()} | SETTINGS
    close = difflib.get_close_matches(key, list(names), n=1, cutoff=0.5)
    return f" Did you mean {names[close[0]].flag}?" if close else ""


def _next_value(setting: Setting, rest: deque[str]) -> Any:
    if setting.is_bool:
        is_value = bool(rest) and rest[0].lower() in YES + NO
        return rest.popleft() if is_value else True
    if not rest or rest[0].startswith("--"):
        raise ConfigError(f"{setting.flag} needs a value, as in {setting.flag} {_example(setting)}.")
    return rest.popleft()


def _example(setting: Setting) -> str:
    default = setting.field.get_default(call_default_factory=True, validated_data={})
    return str(default) if default not in ("", [], {}) else "VALUE"


def _table_key(name: str, setting: Setting) -> str:
    """The key as it was typed: names below a table belong to others, who may write them with a dash."""
    own = name.removeprefix("--")[len(setting.key) :].removeprefix(".")
    if not own:
        raise ConfigError(f"{setting.flag} needs a key of its own, as in {setting.flag}.rope_theta 1e4.")
    return f"{setting.key}.{own}"


def _number(value: str) -> int | float | str:
    """A number where `value` is one; other text as it is, for the settings to refuse.

    >>> _number("40"), _number("1e-3"), _number("many")
    (40, 0.001, 'many')
    """
    for number in (int, float):
        with suppress(ValueError):
            return number(value)
    return value


def _parse_any(value: str) -> Any:
    """A value of unknown type, read as TOML would read it; text where TOML would not.

    >>> _parse_any("1e4"), _parse_any("true"), _parse_any("[1, 2]"), _parse_any("silu")
    (10000.0, True, [1, 2], 'silu')
    """
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value


def _put(flags: dict[str, Any], key: str, value: Any) -> None:
    section, _, name = key.partition(".")
    if name:
        _put(flags.setdefault(section, {}), name, value)
    else:
        flags[section] = value


def _extend(flags: dict[str, Any], key: str, value: str) -> None:
    items = [item.strip() for item in value.split(",") if item.strip()]
    flags[key] = flags.get(key, []) + items
