"""The transports between daemons behind one door: by mapping on one host, by bounce buffers between hosts.

Which one it is follows from the peer's address: ``ipc://`` is this host.
"""

from __future__ import annotations

from kvferry.daemon.transfer.endpoints import RemoteEndpoint, TransferOp
from kvferry.daemon.transfer.remote import Incarnation
from kvferry.daemon.transports.base import OnOpDone
from kvferry.daemon.transports.network_receiver import NetworkReceiver
from kvferry.daemon.transports.network_sender import NetworkSender
from kvferry.daemon.transports.pull import PullTransport
from kvferry.protocol.errors import UnknownTransferError
from kvferry.protocol.peer_messages import Confirmed, Grant, OpRequest, Written

ON_THIS_HOST = "ipc://"


class RemoteTransports:
    """Moves transfer ops from other daemons' pools to this one's, and serves the other daemons' transfer ops from here.

    Attributes:
        receiver, sender: None where the configuration names no transport between hosts.
    """

    def __init__(
        self, pull: PullTransport, receiver: NetworkReceiver | None = None, sender: NetworkSender | None = None
    ) -> None:
        self._pull = pull
        self.receiver = receiver
        self.sender = sender
        self._network: set[int] = set()

    def __repr__(self) -> str:
        """Show the transports."""
        return f"<RemoteTransports {self._pull!r} {self.receiver!r} {self.sender!r}>"

    def can_reach(self, address: str) -> bool:
        """Return whether transfer ops can come from a daemon at this address."""
        return address.startswith(ON_THIS_HOST) or self.receiver is not None

    def start(self, op: TransferOp, on_done: OnOpDone) -> None:
        """Begin to move a transfer op of another daemon's send request; see ``Transport.start``."""
        assert op.send_request.origin is not None, op
        if op.send_request.origin.peer.address.startswith(ON_THIS_HOST):
            self._pull.start(op, on_done)
        else:
            assert self.receiver is not None, op
            self._network.add(op.op_id)
            self.receiver.start(op, on_done)

    def stop(self, op_id: int) -> None:
        """See ``Transport.stop``; unknown transfer ops are not ours."""
        if op_id in self._network and self.receiver is not None:
            self.receiver.stop(op_id)
        else:
            self._pull.stop(op_id)

    def forget(self, op_id: int) -> None:
        """Note that a transfer op is over."""
        self._network.discard(op_id)

    def written(self, peer: Incarnation, message: Written) -> None:
        """Take a source's word on a grant."""
        if self.receiver is not None:
            self.receiver.written(peer, message)

    def confirmed(self, peer: Incarnation, message: Confirmed) -> None:
        """Take a source's word on a transfer op that was read from its memory."""
        self._pull.confirmed(peer, message)

    def op_asked(self, peer: Incarnation, message: OpRequest) -> None:
        """Take a home's description of what it will grant slots for.

        Raises:
            UnknownTransferError: the send request is over, or nothing can be sent from here.
            InvalidFieldError: it names what the send request does not have.
        """
        if self.sender is None:
            raise UnknownTransferError("this daemon sends to no other host; set network.transport", field="op")
        self.sender.op(peer, message)

    def granted(self, peer: Incarnation, message: Grant) -> None:
        """Take a home's grant."""
        if self.sender is not None:
            self.sender.grant(peer, message)

    def op_over(self, peer: Incarnation, number: int) -> None:
        """Take a home's word that a transfer op needs no more."""
        if self.sender is not None:
            self.sender.op_over(peer, number)

    def stop_sending(self, remote_endpoint: RemoteEndpoint) -> None:
        """Send nothing more for a remote endpoint."""
        if self.sender is not None:
            self.sender.stop(remote_endpoint)

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
