"""Everything that a client's owner can set, in one frozen value. Each field has a ``PACELINE_…`` environment twin.

Flags are filled in over the environment over the defaults. Not here: what to write (``SamplingParams``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PositiveInt, SecretStr, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from paceline.client.link import LinkSettings
from paceline.client.transport import RetrySettings
from paceline.shared.errors import ParameterError
from paceline.shared.options import EITHER_PADDING_OR_COMPRESSION, describe_mistake
from paceline.shared.padding import MAX_UNIT


def _parse_widths(value: Any) -> Any:
    return tuple(part.strip() for part in value.strip("<>[]() ").split(",")) if isinstance(value, str) else value


Widths = Annotated[tuple[PositiveInt, ...], NoDecode, BeforeValidator(_parse_widths)]


class ClientSettings(BaseSettings):
    """See the module's text. Times in seconds.

    server: one URL, or several separated by commas. drafter: see ``drafting.choice``. tokenizer: a folder or
    tokenizer.json, where no draft bundle brings one. draft_threads: None chooses. expansion: widths of a static tree
    instead of the dynamic one. always_draft: never switch speculation off. pull: fetch a missing bundle.
    padding: unit of the size classes of frames, both ways, 0 for none. compression: where the server takes it.
    remember: keep conversations on this machine for the n-gram drafter, at most remember_tokens of them (``history``).
    """

    model_config = SettingsConfigDict(env_prefix="PACELINE_", frozen=True, extra="forbid", env_ignore_empty=True)

    server: str = "http://127.0.0.1:8765"
    api_key: SecretStr | None = None
    drafter: str = "auto"
    tokenizer: Path | None = None
    draft_threads: int | None = Field(None, ge=1, le=256)
    expansion: Widths = ()
    always_draft: bool = False
    pull: bool = True
    remember: bool = False
    remember_tokens: int = Field(250_000, ge=1_000, le=4_000_000)
    connect_timeout: float = Field(10.0, gt=0)
    ping_interval: float = Field(5.0, gt=0)
    ping_timeout: float = Field(60.0, gt=0)
    reconnect_timeout: float = Field(60.0, ge=0)
    compression: bool = False
    padding: int = Field(0, ge=0, le=MAX_UNIT)

    @property
    def link(self) -> LinkSettings:
        """The link's part."""
        return LinkSettings(
            connect_s=self.connect_timeout,
            ping_s=self.ping_interval,
            dead_s=self.ping_timeout,
            compression=self.compression,
        )

    @property
    def retry(self) -> RetrySettings:
        """What happens after a lost link."""
        return RetrySettings(give_up_s=self.reconnect_timeout)


def make_settings(**given: object) -> ClientSettings:
    """Settings from what was given (None counts as not given) and the environment. Raises ``ParameterError``."""
    try:
        settings = ClientSettings(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    except ValidationError as error:
        raise ParameterError(*describe_mistake(error.errors()[0], given)) from None
    if settings.padding and settings.compression:
        raise ParameterError("padding", EITHER_PADDING_OR_COMPRESSION)
    return settings
