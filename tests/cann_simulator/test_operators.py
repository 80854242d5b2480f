"""Operators on the simulated device give what the CPU gives; a small transformer's, and a page pool's."""

from __future__ import annotations

import pytest

from tests.cann_simulator.child import Child, ChildError
from tests.cann_simulator.simulator import Simulator

pytestmark = pytest.mark.full


# The value of each expression, with the tensors on the device, is that on the CPU.
ON_BOTH = """
def both(expression, **tensors):
    def value(device):
        there = {{name: tensor.clone().to(device) for name, tensor in tensors.items()}}
        found = eval(expression, {{"torch": torch, "F": torch.nn.functional, "device": device, **there}})
        return [one.cpu() for one in (found if isinstance(found, tuple) else (found,))]
    for here, there in zip(value("cpu"), value("npu")):
        assert here.dtype == there.dtype and here.shape == there.shape, (here, there)
        rtol = 1e-2 if here.dtype in (torch.float16, torch.bfloat16) else 1e-5
        torch.testing.assert_close(there, here, rtol=rtol, atol=1e-5)
torch.manual_seed(0)
x, y, w = torch.randn(6, 8), torch.rand(6, 8) + 0.5, torch.randn(8, 4)
i, j = torch.arange(1, 49).reshape(6, 8), torch.tensor([4, 0, 5])
{}
"""

EXPRESSIONS = [
    "x + y",
    "x + 2",
    "x - y",
    "x - 1",
    "1 - x",
    "x * y",
    "x * 3",
    "x / y",
    "x / 3",
    "1 / y",
    "-x",
    "x.add_(y).mul_(2).sub_(1).div_(y)",
    "x.add_(1).mul_(y).sub_(y).div_(2)",
    "i // 5",
    "i // j.sum()",
    "i % 5",
    "torch.div(i, 3, rounding_mode='floor')",
    "torch.div(i, i + 1, rounding_mode='trunc')",
    "x @ w",
    "torch.mm(x, w)",
    "torch.bmm(x[None], w[None])",
    "torch.addmm(torch.ones(4, device=device), x, w)",
    "torch.matmul(x[None, None], w)",
    "F.linear(x, w.t())",
    "F.linear(x, w.t(), w[0])",
    "F.embedding(i % 6, x)",
    "F.softmax(x, -1)",
    "F.softmax(x.half(), -1, dtype=torch.float32)",
    "F.log_softmax(x, -1)",
    "F.silu(x)",
    "F.gelu(x)",
    "F.relu(x)",
    "F.rms_norm(x, (8,), y[0], 1e-6)",
    "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)",
    "y ** 3",
    "2.0 ** x",
    "y ** x",
    "x.exp(), y.log(), y.sqrt(), x.abs(), x.tanh(), x.sigmoid(), x.cos(), x.sin(), y.reciprocal(), x.floor()",
    "x.sum(), x.sum(0), x.mean(), x.mean(1), x.amax(0), x.max(), x.min(), x.cumsum(0)",
    "x.max(dim=1).values, x.max(dim=1).indices, x.argmax(-1), x.argmax()",
    "x.topk(3).values",
    "x == y, x != y, x < y, x <= y, x > y, x >= y, i == 3, i != 3, x < 0, x <= 0, x > 0, x >= 0",
    "(x > 0) & (y > 1), (x > 0) | (y > 1), ~(x > 0), (x > 0).all(), (x > 0).any(), (x > 0).logical_not()",
    "torch.where(x > 0, x, y), torch.where(x > 0, x, 0.0)",
    "x.clamp(-1, 1), x.clamp(min=0), x.clamp(max=0), torch.maximum(x, y), torch.minimum(x, y)",
    "x.masked_fill(x > 0, 7), x.masked_fill_(x < 0, float('-inf'))",
    "torch.cat([x, y]), torch.cat([x, y], -1), torch.stack([x, y], 1), x.repeat(2, 3)",
    "x.repeat_interleave(2, dim=0), x.flip(0)",
    "(x[i[0, :0]], *x.sort(1), *x.sort(0, descending=True), *i.sort(stable=True))",
    "x.gather(1, i % 8), torch.zeros(6, 8, device=device).scatter(1, i % 8, y)",
    "x.triu(1), x.tril(), torch.ones(5, 5, dtype=torch.bool, device=device).triu(1)",
    "torch.arange(7, device=device), torch.arange(1, 9, 2, device=device), torch.arange(0., 1., .25, device=device)",
    "torch.zeros(3, device=device), torch.ones(3, device=device), torch.full((3,), 5, device=device)",
    "torch.eye(4, device=device)",
    "x.t().contiguous(), x[:, ::2].clone(), x[1:3, 2:].contiguous(), x.expand(2, 6, 8).contiguous()",
    "x[:, 1], x[j], x[j, j], x[:, j], x[None].transpose(1, 2).reshape(8, 6)",
    "x.half(), x.bfloat16(), x.to(torch.int32), i.float(), i.to(torch.int8), i.bool(), x.half().float()",
    "torch.outer(x[0], y[0]), torch.einsum('ab,bc->ac', x, w)",
    "F.pad(x, (1, 2))",
    "F.layer_norm(x, (8,), y[0], y[1])",
    "torch.equal(x, x) * torch.ones(1, device=device), torch.isclose(x, y), torch.isfinite(x)",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_same_as_on_the_cpu(expression: str, child: Child) -> None:
    child.do(ON_BOTH.format("both(" + repr(expression) + ", x=x, y=y, w=w, i=i, j=j)"))


DTYPES = ["uint8", "int8", "int16", "int32", "int64", "bfloat16", "float16", "float32", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_rows_of_a_pool(dtype: str, index: str, child: Child) -> None:
    child.do(
        f"""
        torch.manual_seed(1)
        pool, rows = (torch.randint(0, 100, (n, 3, 5)).to(torch.{dtype}) for n in (16, 4))
        at = torch.tensor([9, 2, 15, 0]); there, at_there = pool.npu(), at.to(torch.{index}).npu()
        assert torch.equal(there.index_select(0, at_there).cpu(), pool[at])
        assert torch.equal(there[at_there].cpu(), pool[at])
        there.index_copy_(0, at_there.long(), rows.npu()); pool.index_copy_(0, at, rows)
        assert torch.equal(there.cpu(), pool)
        there[at_there] = rows.flip(0).npu(); pool[at] = rows.flip(0)
        there.index_put_((at_there[:2],), rows[:2].npu()); pool.index_put_((at[:2],), rows[:2])
        assert torch.equal(there.cpu(), pool)
        there[1:3].zero_(); there[4].fill_(1); there[5] = rows[0].npu(); there[:, 1] = there[:, 0]
        pool[1:3].zero_(); pool[4].fill_(1); pool[5] = rows[0]; pool[:, 1] = pool[:, 0]
        assert torch.equal(there.cpu(), pool)
        """
    )


@pytest.mark.parametrize("sparse_mode", [0, 3])
def test_paged_attention_with_several_queries(sparse_mode: int, child: Child) -> None:
    child.do(
        f"""
        torch.manual_seed(2); H, KH, D, PAGE = 4, 2, 16, 8
        k, v, q = torch.randn(6, PAGE, KH * D), torch.randn(6, PAGE, KH * D), torch.randn(5, H, D)
        table = torch.tensor([[3, 1, 0], [5, 2, 4]], dtype=torch.int32); ends, lengths = [2, 5], [10, 20]
        mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu() if {sparse_mode} == 3 else None
        out, _ = torch_npu.npu_fused_infer_attention_score(q.npu(), k.npu(), v.npu(), num_heads=H,
            num_key_value_heads=KH, input_layout="TND", scale=0.25, block_table=table.npu(), block_size=PAGE,
            atten_mask=mask, actual_seq_lengths=ends, actual_seq_lengths_kv=lengths, sparse_mode={sparse_mode})
        begin = 0
        for end, length, pages in zip(ends, lengths, table.long()):
            kk, vv = (t[pages].reshape(-1, KH, D)[:length].transpose(0, 1) for t in (k, v))
            hidden = torch.ones(end - begin, length, dtype=torch.bool).tril(length - end + begin)
            expected = torch.nn.functional.scaled_dot_product_attention(
                q[begin:end].transpose(0, 1)[None], kk[None], vv[None],
                attn_mask=hidden if {sparse_mode} == 3 else None, scale=0.25, enable_gqa=True)[0].transpose(0, 1)
            torch.testing.assert_close(out[begin:end].cpu(), expected, rtol=1e-4, atol=1e-5); begin = end
        """
    )


@pytest.mark.parametrize("layout", ["BSH", "BSND"])
@pytest.mark.parametrize("masked", ["False", "True"])
@pytest.mark.parametrize("fractals", ["False", "True"])
def test_paged_attention_of_a_batch_of_decoding_requests(layout: str, masked: str, fractals: str, child: Child) -> None:
    child.do(
        f"""
        torch.manual_seed(3); H, KH, D, PAGE = 4, 2, 32, 8
        k, v, q = torch.randn(6, PAGE, KH * D), torch.randn(6, PAGE, KH * D), torch.randn(3, 1, H, D)
        table, lengths = torch.tensor([[3, 1], [5, 0], [0, 0]], dtype=torch.int32), [10, 3, 0]
        hidden = torch.zeros(3, 1, 16, dtype=torch.bool); hidden[:, :, 1] = {masked}
        asked = q if "{layout}" == "BSND" else q.reshape(3, 1, H * D)
        there = [t.view(6, PAGE, KH, D // 16, 16).permute(0, 2, 3, 1, 4).contiguous().npu() if {fractals} else t.npu()
                 for t in (k, v)]
        out, _ = torch_npu.npu_fused_infer_attention_score(asked.npu(), *there, num_heads=H,
            num_key_value_heads=KH, input_layout="{layout}", scale=0.25, block_table=table.npu(), block_size=PAGE,
            atten_mask=hidden.npu() if {masked} else None, actual_seq_lengths_kv=lengths)
        assert out.shape == asked.shape
        for got, one, length, pages, not_seen in zip(out.cpu(), q, lengths[:2], table.long(), hidden):
            kk, vv = (t[pages].reshape(-1, KH, D)[:length].transpose(0, 1) for t in (k, v))
            expected = torch.nn.functional.scaled_dot_product_attention(
                one.transpose(0, 1)[None], kk[None], vv[None], attn_mask=~not_seen[:, :length], scale=0.25,
                enable_gqa=True)[0].transpose(0, 1)
            torch.testing.assert_close(got.reshape(1, H, D), expected, rtol=1e-4, atol=1e-5)
        """
    )


CHUNKS = """
H, KH, PAGE = 4, 2, 8
table, chunks, lengths = torch.tensor([[3, 1, 0], [5, 2, 4]], dtype=torch.int32), [2, 3], [10, 20]
causal = torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu()
def expected(q, k, v, seen, sinks):
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(H // KH, 1)) * 0.2
    scores = scores.masked_fill(~seen, -float("inf"))
    if sinks is not None: scores = torch.cat([scores, sinks[:, None, None].expand(H, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :len(k)], v.repeat_interleave(H // KH, 1))
def check(layout, size, v_size, mode, before, after, has_sinks, mask=causal):
    torch.manual_seed(9)
    q, k, v = torch.randn(5, H, size), torch.randn(6, PAGE, KH * size), torch.randn(6, PAGE, KH * v_size)
    sinks = torch.randn(H) * 3 if has_sinks else None
    def ask(query, rows, queries, keys):
        return torch_npu.npu_fused_infer_attention_score_v2(query.npu(), k.npu(), v.npu(), num_query_heads=H,
            num_key_value_heads=KH, input_layout=layout, softmax_scale=0.2, block_table=table[rows].npu(),
            block_size=PAGE, atten_mask=mask, sparse_mode=mode, pre_tokens=before, next_tokens=after,
            learnable_sink=None if sinks is None else sinks.npu(), actual_seq_qlen=queries,
            actual_seq_kvlen=keys)[0].cpu()
    if layout == "TND": out = ask(q, slice(0, 2), [2, 5], lengths)
    else: out = torch.cat([ask(one[None], slice(i, i + 1), [len(one)], [lengths[i]])[0]
                           for i, one in enumerate(q.split(chunks))])
    for one, got, length, pages in zip(q.split(chunks), out.split(chunks), lengths, table.long()):
        at, keys = torch.arange(length - len(one), length)[:, None], torch.arange(length)
        seen = keys <= at if mode == 3 else (keys >= at - before) & (keys <= at + after)
        kk, vv = k[pages].reshape(-1, KH, size)[:length], v[pages].reshape(-1, KH, v_size)[:length]
        torch.testing.assert_close(got, expected(one, kk, vv, seen, sinks), rtol=1e-4, atol=1e-5)
"""
"""A chunk after a prefix, as SGLang asks for it: in pages, its window and its sinks too."""
EVERY = 2147483647


@pytest.mark.parametrize("layout", ["TND", "BSND"])
@pytest.mark.parametrize(("size", "v_size"), [(32, 32), (192, 128)])
def test_a_chunk_after_a_prefix_in_pages(layout: str, size: int, v_size: int, child: Child) -> None:
    child.do(CHUNKS)
    for sinks in (False, True):
        child.do(f"check({layout!r}, {size}, {v_size}, 3, {EVERY}, {EVERY}, {sinks})")
        for before, after in ((6, 0), (0, 0), (30, 0), (6, 2), (6, EVERY)):
            child.do(f"check({layout!r}, {size}, {v_size}, 4, {before}, {after}, {sinks})")


def test_a_window_of_decoding_requests_in_pages(child: Child) -> None:
    """TND counts it; in BSND a query of one token is masked as the whole mask says, where K and V are as wide."""
    child.do(
        """
        torch.manual_seed(10); H, KH, D, PAGE, W = 4, 2, 16, 8, 6
        k, v, q = torch.randn(6, PAGE, KH * D), torch.randn(6, PAGE, KH * D), torch.randn(2, H, D)
        table, lengths = torch.tensor([[3, 1, 0], [5, 2, 4]], dtype=torch.int32), [10, 20]
        seen = torch.stack([(torch.arange(24) >= n - 1 - W) & (torch.arange(24) < n) for n in lengths])
        causal = torch.ones(2048, 2048, dtype=torch.int8).triu(1).npu()
        common = dict(num_query_heads=H, num_key_value_heads=KH, softmax_scale=0.2, block_table=table.npu(),
                      block_size=PAGE, actual_seq_kvlen=lengths, sparse_mode=4)
        ask = torch_npu.npu_fused_infer_attention_score_v2
        tnd, _ = ask(q.npu(), k.npu(), v.npu(), input_layout="TND", atten_mask=causal, actual_seq_qlen=[1, 2],
                     pre_tokens=W, next_tokens=2147483647, **common)
        bsnd, _ = ask(q[:, None].npu(), k.npu(), v.npu(), input_layout="BSND", atten_mask=(~seen)[:, None].npu(),
                      actual_seq_qlen=[1, 1], pre_tokens=0, next_tokens=0, **common)
        for row, (one, mask, pages) in enumerate(zip(q, seen, table.long())):
            kk, vv = (t[pages].reshape(-1, KH, D).transpose(0, 1) for t in (k, v))
            expected = torch.nn.functional.scaled_dot_product_attention(
                one[None, :, None], kk[None], vv[None], attn_mask=mask[None], scale=0.2, enable_gqa=True)[0, :, 0]
            for got in (tnd[row], bsnd[row, 0]): torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-5)
        """
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("check('TND', 32, 32, 4, 6, 0, False, mask=None)", "without its mask"),
        ("check('TND', 32, 32, 3, 6, 0, False, mask=causal[:1024, :1024])", "without its mask"),
        ("table = table[:, :2]; check('TND', 32, 32, 3, 6, 0, False)", "a block table of 2 pages for 20 tokens"),
    ],
)
def test_attention_that_cann_refuses(
    change: str, says: str, simulator: Simulator, capfd: pytest.CaptureFixture[str]
) -> None:
    with Child(simulator) as process:
        process.do(CHUNKS)
        with pytest.raises(ChildError):
            process.do(change)
    assert says in capfd.readouterr().err


def test_attention_to_a_chunk_and_to_what_was_before_it(child: Child) -> None:
    """Latent attention's two halves, joined by the logarithms of their sums, are attention to all of it."""
    child.do(
        """
        torch.manual_seed(4); H, D, R = 2, 16, 8
        chunks, before = [3, 4], [5, 2]
        new, old = sum(chunks), sum(before)
        def tensors(tokens): return torch.randn(tokens, H, D), torch.randn(tokens, H, D), torch.randn(tokens, H, R)
        (q, _, qr), (k, v, kr), (pk, pv, pkr) = tensors(new), tensors(new), tensors(old)
        ends = torch.tensor(chunks).cumsum(0).tolist()
        common = dict(num_query_heads=H, num_key_value_heads=H, input_layout="TND", softmax_scale=0.2,
                      actual_seq_qlen=ends, return_softmax_lse=True)
        attend = torch_npu.npu_fused_infer_attention_score_v2
        causal = torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu()
        here = attend(q.npu(), k.npu(), v.npu(), query_rope=qr.npu(), key_rope=kr.npu(), atten_mask=causal,
                      sparse_mode=3, actual_seq_kvlen=ends, **common)
        there = attend(q.npu(), pk.npu(), pv.npu(), query_rope=qr.npu(), key_rope=pkr.npu(), sparse_mode=0,
                       actual_seq_kvlen=torch.tensor(before).cumsum(0).tolist(), **common)
        lse = [one[1].reshape(-1) for one in (here, there)]
        joined, _ = torch_npu.npu_attention_update(lse, [one[0].float().reshape(-1, D) for one in (here, there)], 0)
        joined, at, past = joined.cpu().reshape(new, H, D), 0, 0
        for n, m in zip(chunks, before):
            keys = torch.cat([torch.cat([pk[past:past+m], k[at:at+n]]), torch.cat([pkr[past:past+m], kr[at:at+n]])], -1)
            values = torch.cat([pv[past:past+m], v[at:at+n]])
            hidden = torch.ones(n, m + n, dtype=torch.bool).tril(m)
            expected = torch.nn.functional.scaled_dot_product_attention(
                torch.cat([q[at:at+n], qr[at:at+n]], -1).transpose(0, 1)[None], keys.transpose(0, 1)[None],
                values.transpose(0, 1)[None], attn_mask=hidden, scale=0.2)[0].transpose(0, 1)
            torch.testing.assert_close(joined[at:at+n], expected, rtol=1e-4, atol=1e-5); at += n; past += m
        """
    )


def test_sparse_attention_to_the_keys_that_an_indexer_finds(child: Child) -> None:
    child.do(
        """
        torch.manual_seed(7); H, D, R, PAGE, K = 4, 16, 8, 8, 5
        keys, latent, rope = (torch.randn(6, PAGE, 1, size) for size in (D, D, R))
        q, asked, qr, w = torch.randn(5, H, D), torch.randn(5, H, D), torch.randn(5, H, R), torch.randn(5, H)
        table = torch.tensor([[3, 1, 0], [5, 2, 4]], dtype=torch.int32)
        ends, lengths = torch.tensor([2, 5], dtype=torch.int32), torch.tensor([4, 20], dtype=torch.int32)
        common = dict(actual_seq_lengths_query=ends.npu(), block_table=table.npu(), layout_query="TND", sparse_mode=3)
        found, _ = torch_npu.npu_lightning_indexer(asked.npu(), keys.npu(), w.npu(), layout_key="PA_BSND",
            actual_seq_lengths_key=lengths.npu(), sparse_count=K, **common)
        out, *_ = torch_npu.npu_sparse_flash_attention(q.npu(), latent.npu(), latent.npu(), sparse_indices=found,
            scale_value=0.3, sparse_block_size=1, query_rope=qr.npu(), key_rope=rope.npu(), layout_kv="PA_BSND",
            actual_seq_lengths_kv=lengths.npu(), attention_mode=2, return_softmax_lse=False, **common)
        found, begin = found.cpu()[:, 0], 0
        for end, length, pages in zip(ends.tolist(), lengths.tolist(), table.long()):
            kk, ll, rr = (t[pages].flatten(0, 2) for t in (keys, latent, rope))
            for at in range(begin, end):
                seen = length - end + at + 1; kept = min(K, seen)
                best = torch.einsum("h,hk->k", w[at], (asked[at] @ kk[:seen].T).relu()).topk(kept).indices
                assert sorted(found[at][:kept].tolist()) == sorted(best.tolist())
                assert (found[at][kept:] == -1).all()
                scores = torch.cat([q[at], qr[at]], -1) @ torch.cat([ll, rr], -1)[best].T
                torch.testing.assert_close(out[at].cpu(), (scores * 0.3).softmax(-1) @ ll[best], rtol=1e-4, atol=1e-5)
            begin = end
        """
    )


def test_a_product_of_two_dtypes(child: Child) -> None:
    """The CPU refuses it."""
    child.do(
        """
        torch.manual_seed(8); x, w = torch.randn(3, 5), torch.randn(4, 5).bfloat16()
        found = torch.nn.functional.linear(x.npu(), w.npu())
        torch.testing.assert_close(found.cpu(), torch.nn.functional.linear(x, w.float()))
        """
    )


@pytest.mark.parametrize("perm", [(0, 1, 2), (1, 0, 2)])
def test_batched_products_of_transposed_matrices(perm: tuple[int, int, int], child: Child) -> None:
    child.do(
        f"""
        torch.manual_seed(5); a, b = torch.randn(3, 5, 4), torch.randn(3, 4, 6)
        given = a.permute({perm}).contiguous()
        found = torch_npu.npu_transpose_batchmatmul(given.npu(), b.npu(), perm_x1={perm}, perm_y=(1, 0, 2))
        torch.testing.assert_close(found.cpu(), torch.bmm(a, b).transpose(0, 1), rtol=1e-4, atol=1e-5)
        """
    )


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_what_transformers_call_of_torch_npu_alone(mode: str, child: Child) -> None:
    child.do(
        f"""
        torch.manual_seed(6); T, D, R = 5, 16, 12
        positions, cache = torch.tensor([0, 3, 1, 9, 2]), torch.randn(10, R)
        q, k = torch.randn(T, 4 * D), torch.randn(T, D)
        found = torch_npu.npu_mrope(positions.npu(), q.npu(), k.npu(), cache.npu(), D, mrope_section=[0, 0, 0],
                                    rotary_mode="{mode}")
        cosine, sine = cache[positions].chunk(2, -1)
        for one, got in zip((q, k), found):
            heads = one.view(T, -1, D)
            turning = heads[..., :R]
            first, second = turning.chunk(2, -1) if "{mode}" == "half" else (turning[..., ::2], turning[..., 1::2])
            turned = torch.complex(first, second) * torch.complex(cosine, sine)[:, None]
            kind = torch.cat if "{mode}" == "half" else torch.stack
            expected = torch.cat([kind([turned.real, turned.imag], -1).flatten(2), heads[..., R:]], -1)
            torch.testing.assert_close(got.cpu().view(T, -1, D), expected, rtol=1e-4, atol=1e-5)
        gate, up = q.chunk(2, -1)
        torch.testing.assert_close(torch_npu.npu_swiglu(q.npu()).cpu(), torch.nn.functional.silu(gate) * up)
        """
    )
