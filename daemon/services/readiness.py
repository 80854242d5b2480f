"""Whether engines should come to this daemon: PING, DRAIN, ``/healthz``, ``/readyz``, and metrics that say so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http import HTTPStatus

import structlog

from kvferry.daemon.control.dispatch import Dispatcher, OpenCall
from kvferry.daemon.control.http_socket import Asker, HttpAnswer, plain
from kvferry.daemon.process.access import check_operator
from kvferry.daemon.services.metric_catalogue import DRAINING, INFO, LISTENING, Sample
from kvferry.daemon.services.transfers import TransferService
from kvferry.protocol import VERSION
from kvferry.protocol.session_messages import Drain, Drained, Pong

log = structlog.get_logger(__name__)


class Readiness:
    """Answers those who ask.

    Attributes:
        serves: the daemon has begun.
    """

    serves = False

    def __init__(
        self,
        dispatcher: Dispatcher,
        tenant_of: Callable[[bytes], int | None],
        transfers: TransferService,
        ends: Callable[[], bool],
        listens: Callable[[], bool],
    ) -> None:
        """Ask ``ends`` whether the daemon ends or hands over, and ``listens`` whether it accepts connections.

        ``tenant_of`` returns the tenant who made a connection.
        """
        self._tenant_of = tenant_of
        self._transfers = transfers
        self._ends = ends
        self._listens = listens
        dispatcher.handle_open("PING", lambda _call: Pong(refuses_transfers=self.refuses_transfers))
        dispatcher.handle_open("DRAIN", self._drain)

    def __repr__(self) -> str:
        """Show why engines should not come, if so."""
        return f"<Readiness {self._why_not() or 'ready'}>"

    @property
    def ends(self) -> bool:
        """Return whether the daemon ends, or hands over to the next one."""
        return self._ends()

    @property
    def drained(self) -> bool:
        """Return whether an operator has drained it."""
        return self._transfers.drained

    @property
    def listens(self) -> bool:
        """Return whether it accepts connections."""
        return self._listens()

    @property
    def refuses_transfers(self) -> bool:
        """Return whether no transfer may begin."""
        return self.ends or self.drained

    async def healthz(self, _asker: Asker) -> HttpAnswer:
        """Answer: the control loop does."""
        return plain(HTTPStatus.OK)

    async def readyz(self, _asker: Asker) -> HttpAnswer:
        """Answer whether engines should come here."""
        why = self._why_not()
        return plain(HTTPStatus.OK) if why is None else plain(HTTPStatus.SERVICE_UNAVAILABLE, why)

    def samples(self, _asker: Asker) -> Iterator[Sample]:
        """Yield the metrics of the daemon itself."""
        yield Sample(INFO, (VERSION,), 1)
        yield Sample(DRAINING, (), self.refuses_transfers)
        yield Sample(LISTENING, (), self.listens)

    def _why_not(self) -> str | None:
        reasons = (
            (self.ends, "draining"),
            (self.drained, "drained"),
            (not self.serves, "starting"),
            (not self.listens, "no descriptor is left"),
        )
        return next((text for is_so, text in reasons if is_so), None)

    def _drain(self, call: OpenCall) -> Drained:
        body, tenant = call.body, self._tenant_of(call.identity)
        assert isinstance(body, Drain), body
        check_operator(tenant, "DRAIN refuses others' transfers")
        live = len(self._transfers.status())
        if self._transfers.drained != body.drain:
            log.warning("drained" if body.drain else "undrained", tenant=tenant, transfers=live)
        self._transfers.drained = body.drain
        return Drained(transfers=live)
