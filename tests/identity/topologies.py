"""The topologies that are tested with models, and the table of them in ``docs/topologies.md``.

``python -m tests.identity.topologies`` prints the document as it must be; with ``--write`` it writes it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple

from tests.identity.models import MODELS, TinyModel

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "topologies.md"
TABLES: Final = re.compile(r"(<!-- (covered|models|refused): [^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)
PAGE_SIZE: Final = 4
LONG: Final = 41
"""Tokens of a prompt: more than any window, and no whole number of pages."""


class Side(NamedTuple):
    """How one side splits the model."""

    tp: int = 1
    stages: tuple[int, ...] = ()  # the layers of each; none: one stage with all of them
    draft: bool = False  # it runs the draft model, in its last stage
    view: Literal["paged", "fia"] = "paged"

    def layers(self, model: TinyModel) -> list[range]:
        sizes = self.stages or (model.layers,)
        assert sum(sizes) == model.layers, self
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]

    def __str__(self) -> str:
        parts = [f"TP {self.tp}"]
        if self.stages:
            parts.append("stages of " + "+".join(str(size) for size in self.stages))
        if self.draft:
            parts.append("draft")
        if self.view != "paged":
            parts.append(self.view.upper())
        return ", ".join(parts)


class Topology(NamedTuple):
    """One transfer: a model, both sides' splits, and how its pages are sent."""

    name: str
    model: str
    source: Side = Side()
    destination: Side = Side()
    tokens: int = LONG
    prefix_pages: int = 0  # that decode has already
    chunk_pages: int | None = None  # None: sent as a whole
    source_window: int | None = None  # tokens of window pages that prefill still has; None: just the model's window
    plain: bool = False  # window lists without ``first_page``, equally long on both sides

    @property
    def tiny(self) -> TinyModel:
        return MODELS[self.model]

    def notes(self) -> str:
        """Describe what else is special, for the table."""
        window = self.tiny.window
        parts = []
        if self.tokens != LONG:
            parts.append(f"prompt of {self.tokens} tokens")
        if window is not None and self.tokens < window:
            parts.append("shorter than the window")
        if self.source_window is not None:
            parts.append("prefill has more window pages")
        if self.plain:
            parts.append("window without first_page")
        if self.prefix_pages:
            parts.append("decode has a prefix")
        if self.chunk_pages:
            parts.append("in chunks")
        return ", ".join(parts)


TOPOLOGIES: Final = (
    Topology("gqa", "llama"),
    Topology("gqa, 1 to 2", "llama", Side(tp=1), Side(tp=2)),
    Topology("gqa, 2 to 1", "llama", Side(tp=2), Side(tp=1)),
    Topology("gqa, 2 to 4", "llama", Side(tp=2), Side(tp=4)),
    Topology("gqa, 4 to 2", "llama", Side(tp=4), Side(tp=2)),
    Topology("gqa, 1 to 8 ranks of 4 heads", "llama", Side(tp=1), Side(tp=8)),
    Topology("replicated heads, 2 to 4", "qwen3", Side(tp=2), Side(tp=4)),
    Topology("replicated heads, 4 to 2", "qwen3", Side(tp=4), Side(tp=2)),
    Topology("replicated heads, 4 to 1", "qwen3", Side(tp=4), Side(tp=1)),
    Topology("replicated heads, 4 to 8", "qwen3", Side(tp=4), Side(tp=8)),
    Topology("stages, 7+8 to one", "llama", Side(stages=(7, 8))),
    Topology("stages, one to 8+7", "llama", Side(), Side(stages=(8, 7))),
    Topology("stages, 7+8 to 5+6+4", "llama", Side(stages=(7, 8)), Side(stages=(5, 6, 4))),
    Topology("stages, 5+6+4 to 7+8", "llama", Side(stages=(5, 6, 4)), Side(stages=(7, 8))),
    Topology("stages, 1+13+1 to 14+1", "llama", Side(stages=(1, 13, 1)), Side(stages=(14, 1))),
    Topology("stages and ranks", "llama", Side(2, (7, 8)), Side(4, (8, 7))),
    Topology("stages and ranks, all mixed", "llama", Side(4, (5, 6, 4)), Side(2, (7, 8))),
    Topology("stages and replicated heads", "qwen3", Side(4, (1, 3)), Side(1, (2, 2))),
    Topology("views, paged to FIA", "llama", Side(), Side(view="fia")),
    Topology("views, FIA to paged, 2 to 1", "llama", Side(tp=2, view="fia"), Side()),
    Topology("chunks", "llama", Side(2, (7, 8)), Side(), chunk_pages=3),
    Topology("prefix", "qwen3", Side(tp=2), Side(tp=1), prefix_pages=4),
    Topology("prefix and chunks", "qwen3", Side(), Side(tp=2), prefix_pages=3, chunk_pages=2),
    Topology("one page", "qwen3", Side(tp=1), Side(tp=2), tokens=3),
    Topology("window", "gemma3"),
    Topology("window, short prompt", "gemma3", tokens=11),
    Topology("window, just full", "gemma3", tokens=16),
    Topology("window, on a page boundary", "gemma3", tokens=40),
    Topology("window, 2 to 1", "gemma3", Side(tp=2), Side(tp=1)),
    Topology("window, 1 to 4", "gemma3", Side(tp=1), Side(tp=4)),
    Topology("window, stages of one kind", "gemma3", Side(stages=(2, 1, 3)), Side(stages=(5, 1))),
    Topology("window, stages and ranks", "gemma3", Side(2, (3, 3)), Side(4, (2, 4))),
    Topology("window, surplus pages", "gemma3", Side(), Side(tp=2), source_window=27),
    Topology("window, plain lists", "gemma3", plain=True),
    Topology("window, prefix before it", "gemma3", Side(tp=2), Side(), prefix_pages=4),
    Topology("window, prefix into it", "gemma3", Side(), Side(tp=2), prefix_pages=8, chunk_pages=1),
    Topology("delta net", "qwen3-next"),
    Topology("delta net, 2 to 2", "qwen3-next", Side(tp=2), Side(tp=2)),
    Topology("delta net, 2 to 1", "qwen3-next", Side(tp=2), Side(tp=1)),
    Topology("delta net, 1 to 2", "qwen3-next", Side(tp=1), Side(tp=2)),
    Topology("delta net, 4 to 2", "qwen3-next", Side(tp=4), Side(tp=2)),
    Topology("delta net, stages", "qwen3-next", Side(stages=(3, 5)), Side(stages=(1, 3, 4))),
    Topology("delta net, stages and ranks", "qwen3-next", Side(2, (5, 3)), Side(2, (4, 4))),
    Topology("delta net, stages and ranks, all mixed", "qwen3-next", Side(2, (3, 5)), Side(4, (4, 1, 3))),
    Topology("delta net, chunks", "qwen3-next", Side(), Side(stages=(4, 4)), chunk_pages=4),
    Topology("mamba", "jamba"),
    Topology("mamba, 2 to 2", "jamba", Side(tp=2), Side(tp=2)),
    Topology("mamba, 4 to 1", "jamba", Side(tp=4), Side(tp=1)),
    Topology("mamba, stages", "jamba", Side(stages=(1, 3)), Side(stages=(2, 2))),
    Topology("latents", "deepseek-v3"),
    Topology("latents, 1 to 2", "deepseek-v3", Side(tp=1), Side(tp=2)),
    Topology("latents, 4 to 2", "deepseek-v3", Side(tp=4), Side(tp=2)),
    Topology("latents, stages and ranks", "deepseek-v3", Side(2, (1, 3)), Side(1, (2, 2))),
    Topology("index keys", "deepseek-v3.2"),
    Topology("index keys, stages and ranks", "deepseek-v3.2", Side(2, (1, 2)), Side(1, (2, 1)), chunk_pages=5),
    Topology("draft", "llama", Side(draft=True), Side(draft=True)),
    Topology("draft at prefill only", "llama", Side(draft=True), Side()),
    Topology("draft at decode only", "llama", Side(), Side(draft=True)),
    Topology("draft, stages", "llama", Side(stages=(7, 8), draft=True), Side(stages=(5, 6, 4), draft=True)),
    Topology("draft, ranks and replicated heads", "llama", Side(2, draft=True), Side(4, draft=True)),
    Topology("draft, all mixed", "llama", Side(4, (7, 8), draft=True), Side(2, (5, 6, 4), draft=True), chunk_pages=4),
    Topology("draft of latents", "deepseek-v3", Side(2, draft=True), Side(1, (3, 1), draft=True)),
    Topology("draft beside windows", "gemma3", Side(2, (3, 3), draft=True), Side(draft=True)),
    Topology("draft beside states", "qwen3-next", Side(2, draft=True), Side(2, (4, 4), draft=True)),
)
"""What is tested."""


class Refusal(NamedTuple):
    """What does not work: on which message, and with which error.

    Attributes:
        name: of the test.
        code: the error's.
        on: what is refused.
        remedy: what to do, for operators.
    """

    name: str
    code: str
    on: str
    remedy: str


REFUSALS: Final = (
    Refusal("KV heads and ranks of which neither is a multiple of the other", "HEADS_INDIVISIBLE", "`rank_heads`",
            "another TP size"),
    Refusal("a convolution's states at different TP sizes, without its parts", "GEOMETRY_MISMATCH", "SEND",
            "`conv_parts` on both sides"),
    Refusal("parts of a convolution that are not split by heads", "GEOMETRY_MISMATCH", "SEND",
            "the same TP size on both sides"),
    Refusal("FIA-NZ pages against ND pages", "GEOMETRY_MISMATCH", "SEND", "the same format on both sides"),
    Refusal("FIA-NZ pages at different TP sizes", "GEOMETRY_MISMATCH", "SEND", "the same TP size, or ND pages"),
    Refusal("page sizes that differ, of FIA-NZ pages", "GEOMETRY_MISMATCH", "SEND", "one page size, or ND pages"),
    Refusal("page sizes that differ, of windows", "GEOMETRY_MISMATCH", "SEND", "one page size"),
    Refusal("dtypes that differ", "GEOMETRY_MISMATCH", "SEND", "one dtype"),
    Refusal("fixed scales of 8-bit keys or values that differ", "SCALE_MISMATCH", "SEND",
            "the scales of one checkpoint on both sides"),
    Refusal("scales that travel with the pages, on one side only", "SCALE_MISMATCH", "SEND",
            "the same `k_scale`, `v_scale` and `index_scale` on both sides"),
    Refusal("scales a page at different TP sizes", "GEOMETRY_MISMATCH", "SEND",
            "the same TP size, or scales a page and head"),
    Refusal("other numbers of KV heads in the model", "GEOMETRY_MISMATCH", "SEND", "one model on both sides"),
    Refusal("a layer that no source sends", "UNCOVERED_ENTRY", "the last SEND", "let every stage send"),
    Refusal("heads that no source sends", "INCOMPLETE", "the last SEND", "let every rank send"),
    Refusal("no draft from prefill where decode's pool requires one", "UNCOVERED_ENTRY", "the last SEND",
            "leave `draft` in `optional_components`"),
    Refusal("another draft model", "GEOMETRY_MISMATCH", "SEND", "one draft model on both sides"),
    Refusal("one layer from two stages", "PAGE_OVERLAP", "the later SEND", "give each layer to one stage"),
    Refusal("ranks with the same heads or latents, but without `replicas`", "PAGE_OVERLAP", "the later SEND",
            "create the pools with `replicas`"),
    Refusal("more pools that send than the transfer expects", "UNEXPECTED_SOURCE", "the SEND too many",
            "`sources=` stages x ranks"),
    Refusal("a window page that prefill has not", "WINDOW_MISMATCH", "SEND", "the same sequence length on both sides"),
    Refusal("no state from prefill", "EMPTY_STATE", "SEND", "send the slot, or `no_pages` at decode"),
    Refusal("prompts of different lengths", "LENGTH_MISMATCH", "SEND", "the same sequence length on both sides"),
)  # fmt: skip
"""What is refused; ``test_refusals`` has one case for each name."""


def with_tables(text: str) -> str:
    """Return the document with its tables as this module has them."""
    rows = {"covered": _covered(), "models": _models(), "refused": _refused()}
    tables = {name: "\n".join(lines) for name, lines in rows.items()}
    return TABLES.sub(lambda found: f"{found[1]}{tables[found[2]]}\n{found[3]}", text)


def _covered() -> Iterator[str]:
    yield from _head("topology", "model", "layout", "prefill", "decode", "besides")
    for one in TOPOLOGIES:
        yield _row([one.name, one.model, one.tiny.kind, one.source, one.destination, one.notes()])


def _models() -> Iterator[str]:
    yield from _head("model", "attention", "its class in transformers")
    for name, one in MODELS.items():
        yield _row([name, one.about, f"`{one.library_class}ForCausalLM`"])


def _refused() -> Iterator[str]:
    yield from _head("what", "error", "refused is", "instead")
    for one in REFUSALS:
        yield _row([one.name, f"`{one.code}`", one.on, one.remedy])


def _head(*titles: str) -> tuple[str, str]:
    return _row(titles), "|".join(["", *["---"] * len(titles), ""])


def _row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


if __name__ == "__main__":
    document = with_tables(DOCUMENT.read_text())
    if "--write" in sys.argv[1:]:
        DOCUMENT.write_text(document)
    else:
        sys.stdout.write(document)
