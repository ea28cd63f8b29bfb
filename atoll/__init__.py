"""Atoll: train one language model on islands of accelerators joined by slow links.

`import atoll` loads nothing else; `atoll.OuterSync` is fetched when it is first asked for.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.integrations.outer_sync import OuterSync

__version__ = "0.1.0"

__all__ = ["OuterSync", "__version__"]


def __getattr__(name: str) -> object:
    if name == "OuterSync":
        from atoll.integrations.outer_sync import OuterSync

        return OuterSync
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
