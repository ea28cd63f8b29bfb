"""Causal language models by way of transformers: built from settings, counted without memory, loaded from a folder.

Nothing here ever reaches for the network.
"""

from atoll.models.build import build_model, count_parameters
from atoll.models.families import FAMILIES
from atoll.models.generate import generate_text
from atoll.models.load import load_model
from atoll.models.save import save_model

__all__ = ["FAMILIES", "build_model", "count_parameters", "generate_text", "load_model", "save_model"]
