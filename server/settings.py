"""Everything that an operator can set, in one frozen value. Each field has a ``PACELINE_…`` environment twin.

The command line fills it (flag over environment over default); nothing else reads the environment. "auto" values are
resolved where they are used once, before the server listens.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PositiveInt, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from paceline.shared.errors import UsageError
from paceline.shared.options import EITHER_PADDING_OR_COMPRESSION, describe_mistake
from paceline.shared.padding import MAX_UNIT

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
LOOPBACK = ("localhost", "127.0.0.1", "::1", "[::1]")


def parse_bytes(value: Any) -> Any:
    """``2GiB``, ``512m`` or plain bytes to an integer; anything else is left for validation to refuse."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", str(value).strip().lower())
    return value if match is None else int(float(match[1]) * _UNITS[match[2]])


def _parse_patience(value: Any) -> Any:
    return None if value in ("auto", "") else value


def _parse_list(value: Any) -> Any:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_parse_list)]


class ServerSettings(BaseSettings):
    """See the module's text. Sizes in bytes, times in seconds.

    padding: unit of the size classes of frames, 0 for none. compression: permessage-deflate, for clients that offer it.
    """

    model_config = SettingsConfigDict(env_prefix="PACELINE_", frozen=True, extra="forbid", env_ignore_empty=True)

    model: str = "smollm2"
    draft: Names = ()
    host: str = "127.0.0.1"
    port: int = Field(8765, ge=0, le=65535)
    device: str = "auto"
    dtype: str = "auto"
    quantize: str | None = None
    attention: str = "auto"
    kv_memory: Annotated[PositiveInt | None, BeforeValidator(parse_bytes)] = None
    max_context: int | None = Field(None, ge=2)
    api_key_file: Path | None = None
    max_running: int = Field(64, ge=1, le=4096)
    max_queue: int = Field(256, ge=0, le=100_000)
    max_connections: int = Field(1024, ge=1)
    max_step_rows: int = Field(1024, ge=1)
    max_nodes: int = Field(128, ge=0, le=1024)
    patience: Annotated[Annotated[float, Field(ge=0, le=2)] | None, BeforeValidator(_parse_patience)] = None
    log_level: str = "info"
    cors_origins: Names = ()
    allowed_hosts: Names = ()
    hello_timeout: float = Field(10.0, gt=0)
    send_timeout: float = Field(20.0, gt=0)
    send_buffer: Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)] = 1 << 20
    ping_interval: float = Field(20.0, gt=0)
    ping_timeout: float = Field(90.0, gt=0)
    stall_timeout: float = Field(120.0, gt=0)
    grace: float = Field(20.0, ge=0)
    padding: int = Field(0, ge=0, le=MAX_UNIT)
    compression: bool = False
    max_body: Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)] = 8 << 20
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in LOOPBACK

    @property
    def scheme(self) -> str:
        """``https`` with a certificate, else ``http``."""
        return "http" if self.ssl_certfile is None else "https"


def make_settings(**values: Any) -> ServerSettings:
    """Settings from flags; None means not given. Raises ``UsageError`` in one sentence that names the setting."""
    try:
        settings = ServerSettings(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        raise UsageError(describe_mistake(error.errors()[0], values)[1]) from None
    if settings.padding and settings.compression:
        raise UsageError(EITHER_PADDING_OR_COMPRESSION)
    return settings
