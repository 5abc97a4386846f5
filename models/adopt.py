"""Takes a model that exists as a draft for a target: a small Hugging Face model, or a draft that `distill` saved.

Tokenizers are compared, not rows of embeddings: padded rows of a head are never candidates. Not for: training.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from paceline.models.draft import Draft, check_family
from paceline.models.manifest import TOKENIZER_NAME
from paceline.models.pipeline import Distilled, load_target
from paceline.models.store import read_json
from paceline.models.tokenizer_hash import tokenizer_hash, tokenizer_size
from paceline.shared.errors import ModelError

DRAFT_NAME = "draft.safetensors"


def adopt_draft(model: Path, target: Path) -> Distilled:
    """The model as a draft for `target`.

    Raises: ModelError when the folder holds no model, its family is unknown to the graph, or its tokenizer is another.
    """
    if (model / DRAFT_NAME).is_file():
        draft = Draft.load(model).eval()
        told = model / "provenance.json"
        provenance = read_json(told) if told.is_file() else {"origin": model.name}
    else:
        if not (model / "config.json").is_file():
            raise ModelError(f"{model} holds neither a Hugging Face model nor a draft, expected config.json")
        _check_tokenizers(model, target)
        draft = _whole_model(model)
        provenance = {"origin": model.name, "num_layers": draft.config.num_hidden_layers}
    _check_width(draft, model, target)
    return Distilled(draft, provenance, None)


def _whole_model(folder: Path) -> Draft:
    """Every layer and every id that the tokenizer has."""
    model, _ = load_target(folder, torch.device("cpu"))
    check_family(model.config)
    rows = model.get_output_embeddings().weight.shape[0]
    vocabulary = np.arange(min(rows, tokenizer_size(folder / TOKENIZER_NAME)), dtype=np.int64)
    return Draft.from_target(model, range(model.config.num_hidden_layers), vocabulary).eval()


def _check_tokenizers(model: Path, target: Path) -> None:
    if tokenizer_hash(model / TOKENIZER_NAME) != tokenizer_hash(target / TOKENIZER_NAME):
        raise ModelError(
            f"expected a draft with the tokenizer of {target.name!r}, got {model.name!r} with another one: "
            "only models of one tokenizer can draft for each other"
        )


def _check_width(draft: Draft, model: Path, target: Path) -> None:
    """Every id of the target must be an input of the draft."""
    needed, rows = tokenizer_size(target / TOKENIZER_NAME), draft.decoder.embed_tokens.weight.shape[0]
    if rows < needed or int(draft.vocabulary.max()) >= needed:
        raise ModelError(
            f"expected a draft that reads and writes the {needed} ids of {target.name!r}, got {model.name!r} with "
            f"{rows} rows and ids up to {int(draft.vocabulary.max())}"
        )
