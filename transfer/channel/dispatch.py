"""Which side of a channel a control message is for."""

from __future__ import annotations

from transfer.channel.decode_side import DecodeSide
from transfer.channel.prefill_side import PrefillSide
from transfer.control import messages as control
from transfer.control.endpoint import Incoming


def hand_on(incoming: Incoming, decode: DecodeSide, prefill: PrefillSide) -> bool:
    """Give a message to its side. False: such a message is not taken on the connection that it came on.

    A sender of type `bytes` has connected to this worker. To one of type `str` this worker has connected.
    """
    sender, message = incoming.sender, incoming.message
    match message:
        case control.Hello() if isinstance(sender, bytes):
            prefill.hello(sender, message)
        case control.Offer() if isinstance(sender, bytes):
            prefill.offered(sender, message)
        case control.Fetch() if isinstance(sender, bytes):
            prefill.fetch(sender, message)
        case control.Cancel() if isinstance(sender, bytes):
            prefill.cancelled(sender, message)
        case control.Welcome() if isinstance(sender, str):
            return True
        case control.Nudge() if isinstance(sender, str):
            decode.nudged()
        case control.FirstToken(session, epoch, token):
            decode.first_token((session, epoch), token)
        case control.Found(session, epoch, blocks) if isinstance(sender, str):
            decode.found((session, epoch), blocks, sender)
        case control.Landed(session, epoch, digests) if isinstance(sender, str):
            decode.landed((session, epoch), sender, digests)
        case control.Failed(session, epoch, reason) if isinstance(sender, str):
            decode.failed((session, epoch), reason, sender)
        case control.Refused(reason) if isinstance(sender, str):
            decode.refused(sender, reason)
        case _:
            return False
    return True
