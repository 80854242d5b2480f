"""``kvferry layout``: the manifest of a pool spec, or the memory that the pool of a well-known model needs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from kvferry.clients.cli.console import print_json, read_json, refuse, show, table
from kvferry.pools.layouts import manifest_of
from kvferry.pools.layouts.models import DEFAULT_PAGE_SIZE, DEFAULT_REQUESTS, MODELS, model_spec
from kvferry.pools.planning.arrays import engine_lists
from kvferry.pools.planning.manifest import SpaceSize, space_sizes
from kvferry.protocol.errors import InvalidFieldError, KvferryError
from kvferry.protocol.manifests import Manifest, PoolSpec

GIB = 1 << 30
DEFAULT_TOKENS = 65536
DEFAULT_TP_SIZE = 1


def add_layout(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments: a file, a model, or the list of models."""
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("file", nargs="?", metavar="FILE", help="a JSON file with a pool spec, or - for standard input")
    what.add_argument("--model", metavar="NAME", help="a well-known model: show the memory that its pool needs")
    what.add_argument("--models", action="store_true", help="list the models")
    command.add_argument(
        "--json",
        action="store_true",
        help="for programs: errors, specs and sizes",
    )
    of_model = command.add_argument_group("of the model's pool")
    of_model.add_argument(
        "--tokens", type=int, default=DEFAULT_TOKENS, help=f"capacity: whole pages ({DEFAULT_TOKENS})"
    )
    of_model.add_argument("--page-size", type=int, default=DEFAULT_PAGE_SIZE, help=f"in tokens ({DEFAULT_PAGE_SIZE})")
    of_model.add_argument("--dtype", help="of keys and values (the model's own)")
    of_model.add_argument("--tp", type=int, default=DEFAULT_TP_SIZE, help="ranks of tensor parallelism (1)")
    of_model.add_argument("--rank", type=int, default=0, help="which of them (0)")
    of_model.add_argument("--layers", metavar="FIRST:END", help="of the pipeline stage, END not included (all)")
    of_model.add_argument(
        "--requests",
        type=int,
        default=DEFAULT_REQUESTS,
        help=f"concurrent requests, for windows and states ({DEFAULT_REQUESTS})",
    )
    of_model.add_argument("--packed", choices=("ds_mla", "ascend"), help="latent attention in this float8 format")
    of_model.add_argument("--joined", action="store_true", help="latent attention with latent and rope in one row")
    of_model.add_argument("--draft", action="store_true", help="with the model's own draft layers")


def layout(options: argparse.Namespace) -> int:
    """Print a spec's manifest, a model's sizes, or the models."""
    try:
        if options.models:
            return print_json(_models_as_json()) if options.json else show(_model_lines())
        if options.model is None:
            return print_json(_as_json(manifest_of(read_json(options.file, PoolSpec))))  # type: ignore[arg-type]
        spec = _spec_of(options)
        manifest = manifest_of(spec)
    except KvferryError as error:
        return refuse("layout", error, as_json=options.json)
    if options.json:
        return print_json({"spec": spec, **_as_json(manifest)})
    return show(_size_lines(options, spec, manifest))


def _as_json(manifest: Manifest) -> dict[str, Any]:
    fields = msgspec.to_builtins(manifest)
    order = ("pages", "region_bytes", "layout_digest", "entries", "components", "optional_components")
    return {
        **{name: fields[name] for name in order},
        "memory": space_sizes(manifest),
        "engine_lists": engine_lists(manifest),
    }


def _spec_of(options: argparse.Namespace) -> PoolSpec:
    first, count = _stage(options.layers)
    return model_spec(
        options.model,
        tokens=options.tokens,
        page_size=options.page_size,
        dtype=options.dtype,
        tp_size=options.tp,
        tp_rank=options.rank,
        first_layer=first,
        layers=count,
        requests=options.requests,
        draft=options.draft,
        packed=options.packed,
        joined=options.joined,
    )


def _stage(text: str | None) -> tuple[int, int | None]:
    if text is None:
        return 0, None
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal()):
        raise InvalidFieldError(f"layers are FIRST:END, not {text!r}", field="layers")
    return int(first), int(end) - int(first)


def _size_lines(options: argparse.Namespace, spec: PoolSpec, manifest: Manifest) -> Iterable[str]:
    facts = MODELS[options.model.lower()]
    yield (
        f"{facts.name} ({facts.source}), {spec.dtype}, layers {options.layers or f'0:{facts.layers}'}, "
        f"rank {options.rank} of {options.tp}"
    )
    sizes = space_sizes(manifest)
    head = ("space", "pages", "page tokens", "bytes a token", "bytes a page", "GiB")
    yield from table("page spaces", head, [_row(one) for one in sizes])
    yield ""
    yield f"total {manifest.region_bytes} bytes, {manifest.region_bytes / GIB:.3f} GiB"
    for space in sizes:
        if space.kind == "state":
            yield f"state {space.page_bytes} bytes a request"
    yield f"layout {manifest.layout_digest}"


def _model_lines() -> Iterable[str]:
    head = ("model", "kind", "layers", "bytes a token", "bytes a page", "window", "state bytes", "source")
    yield from table("models", head, [_model_row(name) for name in MODELS])
    yield ""
    yield f"For a single rank, with pages of {DEFAULT_PAGE_SIZE} tokens and the model's own dtype of keys and values."


def _models_as_json() -> dict[str, Any]:
    specs = {name: model_spec(name, tokens=DEFAULT_TOKENS) for name in MODELS}
    return {name: {"spec": spec, "memory": space_sizes(manifest_of(spec))} for name, spec in specs.items()}


def _model_row(name: str) -> Sequence[object]:
    facts = MODELS[name]
    spec = model_spec(name, tokens=DEFAULT_TOKENS)
    by_kind = {one.kind: one for one in space_sizes(manifest_of(spec))}
    window, state = by_kind.get("window"), by_kind.get("state")
    return (
        name,
        spec.__struct_config__.tag,
        facts.layers,
        by_kind["paged"].token_bytes,
        by_kind["paged"].page_bytes,
        f"{window.token_bytes} x {facts.window}" if window else "-",
        state.page_bytes if state else "-",
        facts.source,
    )


def _row(size: SpaceSize) -> Sequence[object]:
    return (
        size.space,
        size.pages,
        "-" if size.page_tokens is None else size.page_tokens,
        "-" if size.token_bytes is None else size.token_bytes,
        size.page_bytes,
        f"{size.total_bytes / GIB:.3f}",
    )
