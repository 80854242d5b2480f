"""The transports between daemons behind one door: by mapping on one host, by landing slots between hosts.

Which one it is follows from the peer's address: ``ipc://`` is this host.
"""

from __future__ import annotations

from kvferry.daemon.rooms.remote import Incarnation, Target
from kvferry.daemon.rooms.sides import Piece
from kvferry.daemon.transports.landing_receiver import LandingReceiver
from kvferry.daemon.transports.landing_sender import LandingSender
from kvferry.daemon.transports.pull import PullTransport
from kvferry.protocol.errors import UnknownRoomError
from kvferry.protocol.peer_messages import Confirmed, Grant, Landed
from kvferry.protocol.peer_messages import Piece as PieceMessage

ON_THIS_HOST = "ipc://"


class RemoteTransports:
    """Moves pieces from other daemons' pools to this one's, and serves the other daemons' pieces from here.

    Attributes:
        receiver, sender: None where the configuration names no transport between hosts.
    """

    def __init__(self, pull: PullTransport) -> None:
        self._pull = pull
        self.receiver: LandingReceiver | None = None
        self.sender: LandingSender | None = None
        self._landing: set[int] = set()

    def __repr__(self) -> str:
        """Show the transports."""
        return f"<RemoteTransports {self._pull!r} {self.receiver!r} {self.sender!r}>"

    def can_reach(self, address: str) -> bool:
        """Return whether pieces can come from a daemon at this address."""
        return address.startswith(ON_THIS_HOST) or self.receiver is not None

    def start(self, piece: Piece) -> None:
        """Begin to move a piece of another daemon's offer; see ``Transport.start``."""
        assert piece.offer.origin is not None, piece
        if piece.offer.origin.peer.address.startswith(ON_THIS_HOST):
            self._pull.start(piece)
        else:
            assert self.receiver is not None, piece
            self._landing.add(piece.piece_id)
            self.receiver.start(piece)

    def stop(self, piece_id: int) -> None:
        """See ``Transport.stop``; unknown pieces are not ours."""
        if piece_id in self._landing and self.receiver is not None:
            self.receiver.stop(piece_id)
        else:
            self._pull.stop(piece_id)

    def forget(self, piece_id: int) -> None:
        """Note that a piece is over."""
        self._landing.discard(piece_id)

    def landed(self, peer: Incarnation, message: Landed) -> None:
        """Take a source's word on a grant."""
        if self.receiver is not None:
            self.receiver.landed(peer, message)

    def confirmed(self, peer: Incarnation, message: Confirmed) -> None:
        """Take a source's word on a piece that was read from its memory."""
        self._pull.confirmed(peer, message)

    def piece_asked(self, peer: Incarnation, message: PieceMessage) -> None:
        """Take a home's description of what it will grant slots for.

        Raises:
            UnknownRoomError: the offer is over, or nothing can be sent from here.
            InvalidFieldError: it names what the offer does not have.
        """
        if self.sender is None:
            raise UnknownRoomError("this daemon sends to no other host; set landing.transport", field="piece")
        self.sender.piece(peer, message)

    def granted(self, peer: Incarnation, message: Grant) -> None:
        """Take a home's grant."""
        if self.sender is not None:
            self.sender.grant(peer, message)

    def piece_over(self, peer: Incarnation, number: int) -> None:
        """Take a home's word that a piece needs no more."""
        if self.sender is not None:
            self.sender.piece_over(peer, number)

    def stop_sending(self, target: Target) -> None:
        """Send nothing more for a target."""
        if self.sender is not None:
            self.sender.stop(target)

    def peer_lost(self, peer: Incarnation, why: str) -> None:
        """Fail what depends on an incarnation that is gone."""
        self._pull.peer_lost(peer, why)
        if self.receiver is not None:
            self.receiver.peer_lost(peer, why)
        if self.sender is not None:
            self.sender.peer_lost(peer)

    def close(self) -> None:
        """Stop everything; nothing is reported after it."""
        self._pull.close()
        if self.receiver is not None:
            self.receiver.close()
