"""Captured graphs: replay, update of host lists, and what a capture forbids."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cann_simulator.child import Child, ChildError
from tests.cann_simulator.simulator import Race, Simulator

pytestmark = pytest.mark.full


WAIT_TIMED_OUT = 507047

# Paged attention over two sequences, captured once; expected() is the same in plain torch.
PAGED = """
torch.manual_seed(0)
H, KH, D, PAGE = 4, 2, 16, 8
keys, values, queries = torch.randn(10, PAGE, KH * D), torch.randn(10, PAGE, KH * D), torch.randn(2, H, D)
def expected(table, lengths):
    rows = []
    for row, pages, length in zip(queries, table, lengths):
        k = keys[pages].reshape(-1, KH, D)[:length].repeat_interleave(H // KH, 1)
        v = values[pages].reshape(-1, KH, D)[:length].repeat_interleave(H // KH, 1)
        weights = torch.softmax(torch.einsum("hd,thd->ht", row, k) * D**-0.5, -1)
        rows.append(torch.einsum("ht,thd->hd", weights, v))
    return torch.stack(rows)
dk, dv, dq = keys.npu(), values.npu(), queries.npu()
table = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32).npu()
torch.npu.synchronize()
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph, auto_dispatch_capture=True):
    out, _ = torch_npu.npu_fused_infer_attention_score(dq, dk, dv, num_heads=H, num_key_value_heads=KH,
        input_layout="TND", scale=D**-0.5, block_table=table, block_size=PAGE,
        actual_seq_lengths=[1, 2], actual_seq_lengths_kv=[5, 5], sparse_mode=0)
def step(rows, lengths, updated=None):
    table.copy_(torch.tensor(rows, dtype=torch.int32))
    graph.update(cpu_update_input=[{"actual_seq_lengths_kv": updated or lengths}])
    graph.replay(); torch.npu.synchronize()
    return float((out.cpu() - expected(rows, lengths)).abs().max())
"""


def test_nothing_runs_before_the_replay(child: Child) -> None:
    child.do(
        """
        pool, rows = torch.zeros(8, 16, device="npu"), torch.ones(2, 16, device="npu")
        at = torch.tensor([1, 2], device="npu")
        graph = torch.npu.NPUGraph(); torch.npu.synchronize()
        with torch.npu.graph(graph):
            pool.index_copy_(0, at, rows)
            doubled = pool.index_select(0, at) * 2
        """
    )
    assert child.do("torch.npu.synchronize(); result = pool.sum().item()") == 0
    replay = "graph.replay(); torch.npu.synchronize(); result = pool[:, 0].tolist(), doubled[:, 0].tolist()"
    assert child.do(replay) == [[0, 1, 1, 0, 0, 0, 0, 0], [2, 2]]
    child.do("at.copy_(torch.tensor([5, 6])); rows.fill_(3)")
    assert child.do(replay) == [[0, 1, 1, 0, 0, 3, 3, 0], [6, 6]]


def test_paged_attention_follows_table_and_lengths(child: Child, new_races: Callable[[], list[Race]]) -> None:
    child.do(PAGED)
    assert child.do("result = step([[1, 2, 3], [4, 5, 6]], [9, 20])") < 1e-5
    assert child.do("result = step([[7, 8, 9], [1, 2, 4]], [24, 3])") < 1e-5
    assert child.do("result = step([[7, 8, 9], [1, 2, 4]], [24, 3], updated=[20, 3])") > 1e-3
    assert new_races() == []


def test_windows_and_v2_follow_their_own_list_of_lengths(child: Child) -> None:
    """By the name that the first version's list has, an update does not reach them."""
    child.do(PAGED)
    child.do(
        """
        causal, W = torch.ones(2048, 2048, dtype=torch.int8).triu(1).npu(), 6
        windows = torch.npu.NPUGraph()
        with torch.npu.graph(windows, auto_dispatch_capture=True):
            seen, _ = torch_npu.npu_fused_infer_attention_score_v2(dq, dk, dv, num_query_heads=H,
                num_key_value_heads=KH, input_layout="TND", softmax_scale=D**-0.5, block_table=table, block_size=PAGE,
                actual_seq_qlen=[1, 2], actual_seq_kvlen=[0, 0], sparse_mode=4, pre_tokens=W, next_tokens=2147483647,
                atten_mask=causal)
        def of_window(rows, lengths):
            found = []
            for row, pages, length in zip(queries, rows, lengths):
                k, v = (t[pages].reshape(-1, KH, D)[max(length - 1 - W, 0):length].repeat_interleave(H // KH, 1)
                        for t in (keys, values))
                weights = torch.softmax(torch.einsum("hd,thd->ht", row, k) * D**-0.5, -1)
                found.append(torch.einsum("ht,thd->hd", weights, v))
            return torch.stack(found)
        def step(rows, lengths, name="actual_seq_kvlen"):
            table.copy_(torch.tensor(rows, dtype=torch.int32))
            windows.update(cpu_update_input=[{name: lengths}]); windows.replay(); torch.npu.synchronize()
            return float((seen.cpu() - of_window(rows, lengths)).abs().max())
        """
    )
    assert child.do("result = step([[1, 2, 3], [0, 5, 6]], [9, 17])") < 1e-5
    assert child.do("result = step([[7, 8, 9], [0, 2, 4]], [24, 15])") < 1e-5
    assert child.do("result = step([[7, 8, 9], [0, 2, 4]], [20, 14], 'actual_seq_lengths_kv')") > 1e-3


def test_a_table_written_beside_the_replay_is_a_race(child: Child, new_races: Callable[[], list[Race]]) -> None:
    child.do(PAGED)
    change = """
        side = torch.npu.Stream(); fresh = torch.tensor([[3, 2, 1], [6, 5, 4]], dtype=torch.int32).npu()
        torch.npu.synchronize(); graph.update(cpu_update_input=[{{"actual_seq_lengths_kv": [9, 9]}}]); graph.replay()
        {wait}
        with torch.npu.stream(side): table.copy_(fresh)
        torch.npu.synchronize()
    """
    child.do(change.format(wait="side.wait_stream(torch.npu.current_stream())"))
    assert new_races() == []
    child.do(change.format(wait=""))
    assert "aclnnFusedInferAttentionScoreV3" in {new_races()[0].first.operation, new_races()[0].second.operation}


def test_a_page_outside_of_the_table_is_no_race(child: Child, new_races: Callable[[], list[Race]]) -> None:
    child.do(PAGED)
    write = """
        side = torch.npu.Stream(); torch.npu.synchronize()
        graph.update(cpu_update_input=[{{"actual_seq_lengths_kv": [9, 9]}}]); graph.replay()
        with torch.npu.stream(side): dk[{page}].fill_(0)
        torch.npu.synchronize()
    """
    child.do(write.format(page=3))  # in the table, beyond the length
    assert new_races() == []
    child.do(write.format(page=2))
    assert new_races()


def test_a_replay_waits_for_its_update(simulator: Simulator) -> None:
    simulator.limit_waits(500)
    with Child(simulator) as process:
        process.do(PAGED)
        process.do("step([[1, 2, 3], [4, 5, 6]], [9, 20])")
        with pytest.raises(ChildError) as raised:
            process.do("graph.replay(); torch.npu.synchronize()")
        assert f"error code is {WAIT_TIMED_OUT}" in raised.value.text
    simulator.limit_waits()


def test_a_synchronous_copy_ends_a_capture(simulator: Simulator) -> None:
    with Child(simulator) as process:
        with pytest.raises(ChildError) as raised:
            process.do(
                """
                pool = torch.zeros(8, device="npu"); graph = torch.npu.NPUGraph(); torch.npu.synchronize()
                with torch.npu.graph(graph): pool.cpu()
                """
            )
        assert "error code is 507903" in raised.value.text


def test_a_stream_that_does_not_join_again_spoils_a_capture(simulator: Simulator) -> None:
    with Child(simulator) as process:
        program = """
            pool, other = torch.zeros(8, device="npu"), torch.zeros(8, device="npu"); side = torch.npu.Stream()
            graph = torch.npu.NPUGraph(); torch.npu.synchronize()
            with torch.npu.graph(graph):
                main = torch.npu.current_stream(); pool.add_(1); side.wait_stream(main)
                with torch.npu.stream(side): other.copy_(pool)
                {join}
            graph.replay(); torch.npu.synchronize(); result = other[0].item()
        """
        assert process.do(program.format(join="main.wait_stream(side)")) == 1
        with pytest.raises(ChildError) as raised:
            process.do(program.format(join=""))
        assert "error code is 107025" in raised.value.text
