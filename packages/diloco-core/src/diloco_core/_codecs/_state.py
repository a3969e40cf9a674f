"""With which codecs state cannot be published, and where: the same for a run and for its plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._errors import ConfigurationError
from ._codec import is_sparse

if TYPE_CHECKING:
    from ._codec import Codec


def check_state_codec(codec: Codec, *, gather: bool) -> None:
    """Refuse a codec for state that cannot do it.

    Args:
        codec: The codec; a plain one changes nothing.
        gather: Whether the topology is ``gather``.

    Raises:
        ConfigurationError: It is sparse, or state is not published in every sync.
    """
    if codec.plain:
        return
    if gather:
        raise ConfigurationError(
            f"state_codec={codec.name!r} cannot be used with topology='gather', in which only a few syncs publish their "
            "state: use topology='sharded', or leave state_codec out"
        )
    if is_sparse(codec):
        raise ConfigurationError(
            f"state_codec={codec.name!r} sends only a few of the values, so most changes of the model would come many syncs "
            "late. Choose a codec that sends all of them, such as 'int8'; codec, which encodes contributions, can be sparse"
        )
