"""One rank of one stage at the daemon: its pool, its scattered pages, and what lies in them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch

from kvferry.attention.state_windows import PageWindow, window_of
from kvferry.attention.window_table import SwaMap
from kvferry.clients import CacheGroup, Client, ModelIdentity, Pages, Transfer, pages
from kvferry.protocol.codec import PageIds
from kvferry.protocol.tier_messages import Found
from tests.identity.caches import Arrays, Key
from tests.identity.models import DRAFTS, MODELS, TinyModel
from tests.identity.shares import Rank, part_of, spec_of, whole_shape
from tests.identity.topologies import PAGE_SIZE, Side, Topology
from tests.kit.bytes import fill_region

POISON = 0xFF
"""What fills a new pool's memory: every float is NaN."""


class Engine:
    """One rank of one stage; ``received`` are the logical pages of each component that a transfer fills."""

    def __init__(self, client: Client, topology: Topology, name: str, layers: range, rank: Rank, side: Side) -> None:
        self._client = client
        self._topology = topology
        self._rank = rank
        model = topology.tiny
        has_draft = side.draft and layers.stop == model.layers
        draft = MODELS[DRAFTS[model.kind]] if has_draft else None
        self._models = {"main": model, "swa": model, "mamba": model, **({"draft": draft} if draft else {})}
        total = window_of(0, topology.tokens, topology.tokens, PAGE_SIZE)
        spec = spec_of(model, layers, rank, draft, 2 * total.pages + 3, PAGE_SIZE, side.view)
        self.pool = client.create_pool(name, spec, model=ModelIdentity(name=topology.model))
        fill_region(self.pool.region, POISON)
        self._kinds = {one.name: one.kind for one in self.pool.manifest.components}
        self._spaces = {one.name: one.space for one in self.pool.manifest.components}
        self._taken = {space: client.allocate(name, 2 * total.pages, space) for space in set(self._spaces.values())}
        chance = random.Random(name)  # noqa: S311  page maps, no secrets
        self._ids = {
            space: np.array(chance.sample(taken.tolist(), total.pages), np.int64)
            for space, taken in self._taken.items()
        }
        self.received = dict.fromkeys(self._kinds, total)
        self._windows = dict.fromkeys(self._kinds, total)

    def hold(self, *, is_source: bool) -> None:
        """Fix which pages it holds and hands off: of a window only the last ones, of a prompt what is not there yet."""
        one = self._topology
        prefix = 0 if is_source else one.prefix_pages * PAGE_SIZE
        for component, kind in self._kinds.items():
            if kind == "state":
                self._windows[component] = self.received[component] = PageWindow(0, 1)
                continue
            window = one.tokens
            if kind == "window":
                assert one.tiny.window is not None
                window = (one.source_window if is_source else None) or one.tiny.window
            self._windows[component] = window_of(0, one.tokens, window, PAGE_SIZE)
            self.received[component] = window_of(prefix, one.tokens, window, PAGE_SIZE)
        if "swa" in self._kinds:
            self._bind_windows()

    def _bind_windows(self) -> None:
        """Let the window pages follow from a map of full pages, as an engine keeps one."""
        held = self._windows["swa"]
        full = np.arange(1, held.end_page + 1)[::-1].copy()  # an engine's own numbers of full pages
        total = len(self._ids["swa"])
        page_map = SwaMap(total + 1, int(self._ids["swa"].max()) + 1)
        page_map.bind(full[held.first_page :], self._ids["swa"][held.first_page :])
        self._ids["swa"] = np.concatenate([np.zeros(held.first_page, np.int64), page_map.pages[full[slice(*held)]]])

    def arrays(self) -> list[Key]:
        return [(entry.component, entry.role, entry.layer) for entry in self.pool.manifest.entries]

    def model_of(self, component: str) -> TinyModel:
        return self._models[component]

    # -- content

    def write(self, arrays: Arrays, *, only_prefix: bool = False) -> None:
        """Write its part of these arrays to its pages; ``only_prefix``: what no transfer brings."""
        for key in self.arrays():
            part = part_of(self.model_of(key[0]), self._rank, key[1]).of(arrays[key])
            layer = self._layer(key)
            if self._kinds[key[0]] == "state":
                if not only_prefix:
                    layer[self._slots(key[0])] = part[None]
                continue
            positions = torch.arange(self._topology.tokens)[-len(part) :]
            held = positions // PAGE_SIZE >= self._windows[key[0]].first_page
            if only_prefix:
                held &= positions < self._topology.prefix_pages * PAGE_SIZE
            layer.flatten(0, 1)[self._token_slots(key[0], positions[held])] = part[held]

    def read_into(self, arrays: Arrays) -> None:
        """Put its part into whole arrays, NaN where nothing is yet; what two ranks hold must be the same."""
        for key in self.arrays():
            model = self.model_of(key[0])
            tokens = self._topology.tokens
            if self._kinds[key[0]] == "window":
                assert model.window is not None
                tokens = min(tokens, model.window - 1)
            whole = arrays.setdefault(key, torch.full(whole_shape(model, key[1], tokens), torch.nan))
            part = part_of(model, self._rank, key[1])
            ours = self._read(key, tokens)
            there = part.of(whole)
            torch.testing.assert_close(torch.where(there.isnan(), ours, there), ours, rtol=0, atol=0, equal_nan=True)
            whole.index_copy_(part.axis, part.indices, ours)

    def zero(self, component: str, role: str) -> None:
        wanted = self.received[component]
        ids = torch.from_numpy(self._ids[self._spaces[component]][wanted.first_page : wanted.end_page])
        for key in self.arrays():
            if key[:2] == (component, role):
                self._layer(key)[ids] = 0

    def is_untouched(self, component: str) -> bool:
        """Return whether nothing was ever written to a component, if it has it."""
        return all(bool(self._layer(key).isnan().all()) for key in self.arrays() if key[0] == component)

    def _read(self, key: Key, tokens: int) -> torch.Tensor:
        layer = self._layer(key)
        if self._kinds[key[0]] == "state":
            return layer[self._slots(key[0])][0]
        positions = torch.arange(self._topology.tokens)[-tokens:]
        return layer.flatten(0, 1)[self._token_slots(key[0], positions)]

    def _layer(self, key: Key) -> torch.Tensor:
        """Return ``(pages, page_size, heads, dim)`` of one layer, or ``(slots, ...)`` of a state."""
        component, role, number = key
        tensor = self.pool.tensor(component, role)[self.pool.layers(component, role).index(number)]
        if self._kinds[component] == "state":
            return tensor
        return tensor.view(-1, PAGE_SIZE, *tensor.shape[-2:])

    def _slots(self, component: str) -> torch.Tensor:
        return torch.from_numpy(self._ids[self._spaces[component]][:1])

    def _token_slots(self, component: str, positions: torch.Tensor) -> torch.Tensor:
        ids = torch.from_numpy(self._ids[self._spaces[component]])
        return ids[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE

    # -- the transfer

    def receive(self, request_id: str, sources: int, destinations: int) -> Transfer:
        lists = self._lists(self.received.get("main", PageWindow(0, 1)), last=True)
        return self._client.receive(self.pool.name, request_id, lists, sources=sources, destinations=destinations)

    def send(self, request_id: str, first_token: int | None) -> Transfer:
        """Send its pages, in chunks if the topology says so."""
        total = self.received.get("main", PageWindow(0, 1)).end_page
        size = self._topology.chunk_pages or total
        for end in range(size, total, size):
            self._send(request_id, PageWindow(end - size, end), last=False)
        return self._send(request_id, PageWindow((total - 1) // size * size, total), last=True, first_token=first_token)

    def _send(self, request_id: str, chunk: PageWindow, *, last: bool, first_token: int | None = None) -> Transfer:
        return self._client.send(
            self.pool.name,
            request_id,
            self._lists(chunk, last=last),
            first_token=first_token,
            last=last,
        )

    # -- the prefix cache

    @property
    def groups(self) -> list[CacheGroup]:
        """Return what a prefix needs of each group."""
        window = self._topology.tiny.window or 0
        last = {"paged": None, "window": -(-(window - 1) // PAGE_SIZE), "state": 1}
        return [CacheGroup(group=one, last=last[kind]) for one, kind in self._kinds.items()]

    def store(self, hashes: Sequence[bytes]) -> None:
        """Store what it holds of a prompt that is in whole pages."""
        for one in self.groups:
            first = len(hashes) - (one.last or len(hashes))
            operation = self._client.store(
                self.pool.name,
                hashes[first:],
                self._blocks(one, first, len(hashes)),
                group=one.group,
                parent=hashes[first - 1] if first else None,
            )
            assert self._client.wait_done(operation).stored == len(hashes) - first

    def load(self, found: Found) -> None:
        """Load the prefix that was found."""
        for one in self.groups:
            first = found.blocks - (one.last or found.blocks)
            ids = self._blocks(one, first, found.blocks)
            operation = self._client.load(self.pool.name, found.lease, ids, group=one.group, first_block=first)
            assert self._client.wait_done(operation).loaded == found.blocks - first
        self._client.unpin(found.lease)

    def _blocks(self, of: CacheGroup, first: int, end: int) -> PageIds:
        ids = self._ids[self._spaces[of.group]]
        return ids[:1] if self._kinds[of.group] == "state" else ids[first:end]

    def close(self) -> None:
        for space, taken in self._taken.items():
            self._client.free(self.pool.name, taken, space)
        self.pool.close()
        self._client.delete_pool(self.pool.name)

    def _lists(self, main: PageWindow, *, last: bool) -> Sequence[Pages]:
        lists = []
        if "main" in self._kinds:
            end = min(main.end_page * PAGE_SIZE, self._topology.tokens)
            lists.append(
                pages(self._of("main", main), first_page=main.first_page, tokens=end - main.first_page * PAGE_SIZE)
            )
        for component in ("swa", "mamba") if last else ():
            if component in self._kinds:
                window = self.received[component]
                first_page = None if self._topology.plain else window.first_page
                lists.append(pages(self._of(component, window), first_page=first_page, component=component))
        return lists

    def _of(self, component: str, window: PageWindow) -> PageIds:
        return self._ids[self._spaces[component]][window.first_page : window.end_page]


def engines_of(client: Client, topology: Topology, *, is_source: bool) -> list[Engine]:
    side = topology.source if is_source else topology.destination
    made = []
    for stage, layers in enumerate(side.layers(topology.tiny)):
        for rank in range(side.tp):
            name = f"{'prefill' if is_source else 'decode'}-{stage}-{rank}"
            one = Engine(client, topology, name, layers, Rank(side.tp, rank), side)
            one.hold(is_source=is_source)
            made.append(one)
    return made
