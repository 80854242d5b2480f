"""The transports between daemons, combined: by a mapping on one host, by bounce buffers between hosts.

The peer's address selects the transport: ``ipc://`` is this host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from kvferry.daemon.transfer.endpoints import Incarnation, RemoteEndpoint, TransferOp
from kvferry.daemon.transports.local import OnOpDone
from kvferry.daemon.transports.network_receiver import NetworkReceiver
from kvferry.daemon.transports.network_sender import NetworkSender
from kvferry.daemon.transports.pull import PullTransport
from kvferry.protocol.errors import UnknownTransferError
from kvferry.protocol.peer_messages import Confirmed, OpEnded, OpRequest, WriteCredit, Written

ON_THIS_HOST = "ipc://"


class RemoteTransports:
    """Copies transfer ops from other daemons' pools to this one's, and sends to other daemons from here.

    Attributes:
        receiver, sender: None where no transport between hosts is configured.
    """

    def __init__(
        self, pull: PullTransport, receiver: NetworkReceiver | None = None, sender: NetworkSender | None = None
    ) -> None:
        self._pull = pull
        self.receiver = receiver
        self.sender = sender

    def __repr__(self) -> str:
        """Show the transports."""
        return f"<RemoteTransports {self._pull!r} {self.receiver!r} {self.sender!r}>"

    def can_reach(self, address: str) -> bool:
        """Return whether bytes can be received from a daemon at this address."""
        return address.startswith(ON_THIS_HOST) or self.receiver is not None

    def way_of(self, op: TransferOp) -> Literal["pull", "network"]:
        """Return how a transfer op of another daemon's send request is copied."""
        assert op.send_request.origin is not None, op
        return "pull" if op.send_request.origin.peer.address.startswith(ON_THIS_HOST) else "network"

    def start(self, op: TransferOp, on_done: OnOpDone) -> None:
        """Start copying a transfer op of another daemon's send request; see ``Transport.start``."""
        if self.way_of(op) == "pull":
            self._pull.start(op, on_done)
        else:
            assert self.receiver is not None, op
            self.receiver.start(op, on_done)

    def stop(self, op_id: int) -> bool:
        """See ``Transport.stop``."""
        return self._pull.stop(op_id) or (self.receiver is not None and self.receiver.stop(op_id))

    def written(self, peer: Incarnation, message: Written) -> None:
        """Pass on a source's answer to a write credit."""
        if self.receiver is not None:
            self.receiver.written(peer, message)

    def confirmed(self, peer: Incarnation, message: Confirmed) -> None:
        """Pass on a source's confirmation of a transfer op that was read from its memory."""
        self._pull.confirmed(peer, message)

    def op_asked(self, peer: Incarnation, message: OpRequest, on_settled: Callable[[], None]) -> None:
        """Pass on a home's description of a transfer op that it gives write credits for; see ``NetworkSender.op``.

        Raises:
            UnknownTransferError: the send request is over, or this daemon cannot send to other hosts.
            InvalidFieldError: it names something that the send request does not have.
        """
        if self.sender is None:
            raise UnknownTransferError("this daemon does not send to other hosts; set network.transport", field="op")
        self.sender.op(peer, message, on_settled)

    def credited(self, peer: Incarnation, message: WriteCredit) -> None:
        """Pass on a home's write credit."""
        if self.sender is not None:
            self.sender.credit(peer, message)

    def op_over(self, peer: Incarnation, message: OpEnded) -> None:
        """Pass on that a home gives no more write credits for a transfer op."""
        if self.sender is not None:
            self.sender.op_over(peer, message.op)

    def stop_sending(self, remote_endpoint: RemoteEndpoint) -> None:
        """Stop sending for a remote endpoint."""
        if self.sender is not None:
            self.sender.stop(remote_endpoint)

    def peer_lost(self, peer: Incarnation, why: str) -> None:
        """Fail the transfer ops of a lost peer."""
        self._pull.peer_lost(peer, why)
        if self.receiver is not None:
            self.receiver.peer_lost(peer, why)
        if self.sender is not None:
            self.sender.peer_lost(peer)

    def close(self) -> None:
        """Stop everything; nothing is reported after that."""
        self._pull.close()
        if self.receiver is not None:
            self.receiver.close()
