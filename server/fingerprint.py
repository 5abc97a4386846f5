"""Names a target: the same weights and configuration give the same name on every machine, other ones another."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from transformers import PreTrainedModel

from paceline.models.tokenizer_hash import target_fingerprint

_SAMPLES = 64


def fingerprint(model: PreTrainedModel, folder: Path | None) -> str:
    """What draft bundles call this target: the fingerprint of its folder, or of its parameters if it has no folder."""
    if folder is not None and any(folder.glob("*.safetensors")):
        return target_fingerprint(folder)
    return _of_parameters(model)


def _of_parameters(model: PreTrainedModel) -> str:
    """32 hex digits over every parameter's name, shape and 64 evenly spread values, rounded to bfloat16."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        flat = tensor.detach().reshape(-1)
        picks = torch.linspace(0, len(flat) - 1, min(_SAMPLES, len(flat)), dtype=torch.float64).long().to(flat.device)
        digest.update(flat[picks].to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()
