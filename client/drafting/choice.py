"""From ``--drafter`` and what a server says about itself to drafters that fit.

    auto    every draft model of the bundle that fits the target, and n-gram
    ssm     the bundle's draft models alone       ngram   prompt lookup alone
    none    no drafts                             wrong   nothing but wrong ones
    NAME    a bundle by name or folder, with n-gram

Not here: fetching a bundle that is missing (``bundles``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.client.drafting.drafter import Drafter
from paceline.client.drafting.ngram import NGramDrafter
from paceline.client.drafting.wrong import WrongDrafter
from paceline.models.catalogue import find_bundle
from paceline.models.manifest import Manifest, load_manifest
from paceline.shared.errors import ModelError, ParameterError
from paceline.shared.messages import Welcome

AUTO, SSM, NGRAM, NONE, WRONG = "auto", "ssm", "ngram", "none", "wrong"
KNOWN = (AUTO, SSM, NGRAM, NONE, WRONG)


@dataclass(frozen=True, slots=True)
class Bundle:
    """A draft bundle on this machine."""

    folder: Path
    manifest: Manifest


def named_bundle(name: str) -> Bundle:
    """The bundle that ``--drafter NAME`` names. Raises ``ParameterError`` that lists what else may be said."""
    try:
        folder = find_bundle(name)
    except ModelError as error:
        raise ParameterError("drafter", f"expected a drafter among {', '.join(KNOWN)}, or a bundle: {error}") from error
    return Bundle(folder, load_manifest(folder))


def model_drafters(bundle: Bundle, welcome: Welcome, threads: int | None) -> list[Drafter]:
    """The bundle's draft models. Raises ``BundleError`` with both names if it belongs to another target."""
    from paceline.client.drafting.onnx_ssm import OnnxDrafter

    manifest = bundle.manifest
    tokenizer = welcome.tokenizer or manifest.tokenizer_hash
    manifest.check(model=welcome.model, tokenizer=tokenizer, fingerprint=welcome.fingerprint or None)
    return [
        OnnxDrafter(bundle.folder / entry.file, name=entry.name, max_context=entry.context_len, threads=threads)
        for entry in manifest.drafters
    ]


def choose_drafters(
    wanted: str, welcome: Welcome, find: Callable[[], Bundle | None], threads: int | None
) -> tuple[Drafter, ...]:
    """The drafters that ``wanted`` stands for. find: looks for the bundle of this target, None if there is none.

    Raises ``ParameterError`` for an unknown name, ``ModelError`` if ``ssm`` is wanted and there is no bundle.
    """
    if wanted == NONE:
        return ()
    if wanted == WRONG:
        return (WrongDrafter(welcome.vocab_size),)
    if wanted == NGRAM:
        return (NGramDrafter(),)
    bundle = find() if wanted in (AUTO, SSM) else named_bundle(wanted)
    if bundle is None:
        if wanted == SSM:
            raise ModelError(f"no draft model for {welcome.model!r} here: run `paceline models build {welcome.model}`")
        return (NGramDrafter(),)
    models = model_drafters(bundle, welcome, threads)
    return tuple(models) if wanted == SSM else (*models, NGramDrafter())
