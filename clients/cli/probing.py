"""``kvferry probe TYPE [JSON]``: any message of the protocol, by hand."""

from __future__ import annotations

import argparse

import msgspec

from kvferry.clients.operations import Operation
from kvferry.clients.sync_client import Client
from kvferry.protocol.client_core import ReplyArrived
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.json_form import body_to_json, request_from_json
from kvferry.protocol.requests import REQUEST_TYPES


def probe(options: argparse.Namespace) -> int:
    """Send one message and print the reply as JSON; 2 where it was refused, here or by the daemon."""
    kind = options.type.upper()
    try:
        body, ids = request_from_json(kind, options.message)
    except KvferryError as error:
        _print_error(error)
        return 2
    needs_session = REQUEST_TYPES[kind].needs_session
    with Client.connect(options.runtime_dir, name="probe", session=needs_session, timeout_s=options.timeout) as client:
        try:
            reply = client.call(Operation(body, ids, _whole), deadline_s=options.timeout)
        except KvferryError as error:
            _print_error(error)
            return 2
    print(body_to_json(reply.body, reply.ids).decode())
    return 0


def _whole(reply: ReplyArrived) -> ReplyArrived:
    return reply


def _print_error(error: KvferryError) -> None:
    print(msgspec.json.encode({"type": "ERROR", "error": error.info()}).decode())
