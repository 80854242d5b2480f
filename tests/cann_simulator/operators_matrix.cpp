// Matrix products, norms and attention; see operators.h.
#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <limits>
#include <string>

#include "operators.h"

using namespace cann_simulator;

namespace cann_simulator {
void flush_touches();
}

// Of two dtypes the product is of the one to which both are promoted.
OPERATOR(aclnnMatmul, (CTensor self, CTensor other, Tensor out, int8_t),
         call.run([a = call.in(self), b = call.in(other), o = call.out(out)] {
           at::ScalarType both = at::promote_types(a.scalar_type(), b.scalar_type());
           o.copy_(at::matmul(a.to(both), b.to(both)));
         }))
OPERATOR(aclnnMm, (CTensor self, CTensor other, Tensor out, int8_t),
         call.run([a = call.in(self), b = call.in(other), o = call.out(out)] { o.copy_(at::mm(a, b)); }))
OPERATOR(aclnnBatchMatMul, (CTensor self, CTensor other, Tensor out, int8_t),
         call.run([a = call.in(self), b = call.in(other), o = call.out(out)] { o.copy_(at::bmm(a, b)); }))
OPERATOR(aclnnAddmm, (CTensor self, CTensor first, CTensor second, CScalar beta, CScalar alpha, Tensor out, int8_t),
         call.run([c = call.in(self), a = call.in(first), b = call.in(second), s = beta->value, f = alpha->value,
                   o = call.out(out)] { o.copy_(at::addmm(c, a, b, s, f)); }))
OPERATOR(aclnnBaddbmm, (CTensor self, CTensor first, CTensor second, CScalar beta, CScalar alpha, Tensor out, int8_t),
         call.run([c = call.in(self), a = call.in(first), b = call.in(second), s = beta->value, f = alpha->value,
                   o = call.out(out)] { o.copy_(at::baddbmm(c, a, b, s, f)); }))
OPERATOR(aclnnRmsNorm, (CTensor self, CTensor gamma, double epsilon, Tensor out, Tensor rstd),
         call.run([a = call.in(self), g = call.in(gamma), epsilon, o = call.out(out), r = call.out(rstd)] {
           at::Tensor x = a.to(at::kFloat);
           at::Tensor scale = at::rsqrt(at::mean(x * x, {-1}, true) + epsilon);
           o.copy_((x * scale).to(a.scalar_type()) * g);
           r.copy_(scale);
         }))

OPERATOR(aclnnSwiGlu, (CTensor self, int64_t dim, Tensor out),
         call.run([a = call.in(self), dim, o = call.out(out)] {
           std::vector<at::Tensor> halves = a.to(at::kFloat).chunk(2, dim);
           o.copy_(at::silu(halves[0]) * halves[1]);
         }))

namespace {

// (tokens, heads * size), of each head the first dimensions turned by their position's angles, (tokens, 1, turned / 2).
at::Tensor turned(const at::Tensor &rows, int64_t size, const at::Tensor &cosine, const at::Tensor &sine, bool halves) {
  at::Tensor heads = rows.to(at::kFloat).view({rows.size(0), -1, size}), out = heads.clone();
  int64_t pairs = cosine.size(-1);
  auto parts = [&](const at::Tensor &of) {
    if (halves) return std::pair(of.slice(-1, 0, pairs), of.slice(-1, pairs, 2 * pairs));
    return std::pair(of.slice(-1, 0, 2 * pairs, 2), of.slice(-1, 1, 2 * pairs, 2));
  };
  auto [first, second] = parts(heads);
  auto [to_first, to_second] = parts(out);
  to_first.copy_(first * cosine - second * sine);
  to_second.copy_(second * cosine + first * sine);
  return out.view(rows.sizes());
}

}  // namespace

OPERATOR(aclnnRopeWithSinCosCache,
         (CTensor positions, CTensor query, CTensor key, CTensor cache, CInts, int64_t size, bool halves, Tensor query_out,
          Tensor key_out),
         call.run([p = call.in(positions), q = call.in(query), k = call.in(key), c = call.in(cache), size, halves,
                   qo = call.out(query_out), ko = call.out(key_out)] {
           if (p.dim() != 1) throw std::runtime_error("several positions a token are not simulated");
           std::vector<at::Tensor> both = c.index_select(0, p.to(at::kLong)).to(at::kFloat).unsqueeze(1).chunk(2, -1);
           qo.copy_(turned(q, size, both[0], both[1], halves));
           ko.copy_(turned(k, size, both[0], both[1], halves));
         }))

namespace {

// npu_fused_infer_attention_score and _v2: what is used of their arguments. Quoted are the pages of CANN's
// ops-transformer that are followed: attention/fused_infer_attention_score/docs/aclnnFusedInferAttentionScoreV4.md and,
// for sparse modes, docs/en/context/sparse_mode_parameters.md.
struct Attention {
  Placed query, key, value, query_rope, key_rope, block_table, mask, sinks, out, lse;
  std::vector<int64_t> query_ends;   // TND: running sums of query tokens
  std::vector<int64_t> key_lengths;  // with a block table a sequence's length; without, a running sum
  int64_t heads, key_heads, sparse_mode, before, after;
  double scale;
  bool wants_lse;
  std::string layout;
};

// "When sparseMode is set to 2, 3, or 4, the shape of attenMaskOptional can be (2048, 2048), (1, 2048, 2048), or
// (1,1,2048,2048)", and "If attenMask is nullptr or the passed shape is incorrect, an error is reported".
void check_compressed_mask(const at::Tensor &mask) {
  if (!mask.defined() || mask.numel() != 2048 * 2048 || mask.size(-1) != 2048)
    throw std::runtime_error("a sparse mode without its mask of 2048 * 2048");
}

// What a sparse mode hides, (queries, keys). Both count from the lower right corner.
at::Tensor hidden_from(const Attention &attention, int64_t queries, int64_t keys) {
  if (attention.sparse_mode == 0) return {};
  check_compressed_mask(attention.mask.tensor);
  at::Tensor all = at::ones({queries, keys}, at::kBool);
  int64_t corner = keys - queries, most = queries + keys;
  if (attention.sparse_mode == 3)  // rightDownCausal: "preTokens and nextTokens are ignored"
    return all.triu(corner + 1);
  if (attention.sparse_mode == 4)  // band: "the part between preTokens and nextTokens is computed"
    return all.triu(corner + std::min(attention.after, most) + 1)
        .logical_or(all.tril(corner - std::min(attention.before, most) - 1));
  throw std::runtime_error("sparse_mode is not simulated");
}

// (heads, queries, size) over (key heads, keys, size): out, and the logarithm of the sum of exponents.
std::pair<at::Tensor, at::Tensor> attend(const Attention &attention, at::Tensor query, at::Tensor key, at::Tensor value,
                                         const at::Tensor &mask) {
  int64_t group = attention.heads / attention.key_heads;
  key = key.to(at::kFloat).repeat_interleave(group, 0);
  value = value.to(at::kFloat).repeat_interleave(group, 0);
  at::Tensor scores = at::matmul(query.to(at::kFloat), key.transpose(1, 2)) * attention.scale;
  at::Tensor hidden = mask.defined() ? mask.to(at::kBool) : hidden_from(attention, scores.size(1), scores.size(2));
  if (hidden.defined()) scores.masked_fill_(hidden, -std::numeric_limits<float>::infinity());
  at::Tensor lse = at::logsumexp(scores, {-1}), sums = lse;
  if (attention.sinks.tensor.defined())  // (Q_N): "Absorbs attention scores through learnable sink tokens."
    sums = at::logaddexp(lse, attention.sinks.tensor.to(at::kFloat).unsqueeze(-1));
  return {at::matmul(at::exp(scores - sums.unsqueeze(-1)), value), lse};
}

// A sequence's (keys, key heads, size), from its pages; reads just these. A page has a row a token, or fractals (NZ):
// (key heads, size / 16, page_size, 16).
at::Tensor paged(const Attention &attention, const Placed &pages, const at::Tensor &table, int64_t length) {
  bool fractals = pages.tensor.dim() == 5;
  int64_t page_size = pages.tensor.size(fractals ? 3 : 1);
  if (table.size(0) * page_size < length)  // "must be greater than or equal to maxBlockNumPerSeq"
    throw std::runtime_error("a block table of " + std::to_string(table.size(0)) + " pages for " +
                             std::to_string(length) + " tokens");
  at::Tensor numbers = table.slice(0, 0, (length + page_size - 1) / page_size).to(at::kLong);
  touch_rows(pages, numbers, false);
  at::Tensor rows = pages.tensor.index_select(0, numbers);
  if (fractals) rows = rows.permute({0, 3, 1, 2, 4});
  return rows.reshape({numbers.size(0) * page_size, attention.key_heads, -1}).slice(0, 0, length);
}

int64_t key_length(const Attention &attention, size_t sequence) {
  if (sequence >= attention.key_lengths.size())
    throw std::runtime_error(std::to_string(attention.key_lengths.size()) + " lengths of keys, and none for sequence " +
                             std::to_string(sequence));
  return attention.key_lengths[sequence];
}

at::Tensor keys_of(const Attention &attention, const Placed &source, size_t sequence) {
  int64_t end = key_length(attention, sequence);
  if (attention.block_table.tensor.defined()) {
    at::Tensor table = attention.block_table.tensor[static_cast<int64_t>(sequence)];
    return paged(attention, source, table, end);
  }
  return source.tensor.slice(0, sequence ? attention.key_lengths[sequence - 1] : 0, end);
}

// With ropes (MLA) they are further elements of query and key.
at::Tensor with_rope(at::Tensor plain, const at::Tensor &rope) {
  return rope.defined() ? at::cat({plain.to(at::kFloat), rope.to(at::kFloat)}, -1) : plain;
}

void attend_tnd(const Attention &attention) {
  int64_t begin = 0;
  for (size_t i = 0; i < attention.query_ends.size(); i++) {
    int64_t end = attention.query_ends[i];
    if (end > begin && key_length(attention, i) > 0) {
      at::Tensor rope, key_rope;
      if (attention.query_rope.tensor.defined()) rope = attention.query_rope.tensor.slice(0, begin, end);
      if (attention.key_rope.tensor.defined()) key_rope = keys_of(attention, attention.key_rope, i);
      at::Tensor query = with_rope(attention.query.tensor.slice(0, begin, end), rope);
      at::Tensor key = with_rope(keys_of(attention, attention.key, i), key_rope);
      auto [out, lse] = attend(attention, query.transpose(0, 1), key.transpose(0, 1),
                               keys_of(attention, attention.value, i).transpose(0, 1), {});
      attention.out.tensor.slice(0, begin, end).copy_(out.transpose(0, 1));
      if (attention.wants_lse)
        attention.lse.tensor.slice(0, begin, end).copy_(lse.transpose(0, 1).unsqueeze(-1));
    }
    begin = end;
  }
}

void attend_bnsd(const Attention &attention) {
  for (int64_t i = 0; i < attention.query.tensor.size(0); i++) {
    bool limited = i < static_cast<int64_t>(attention.key_lengths.size());
    int64_t keys = limited ? attention.key_lengths[i] : attention.key.tensor.size(2);
    at::Tensor mask = attention.mask.tensor;
    if (mask.defined() && mask.dim() > 2)
      mask = mask.reshape({-1, mask.size(-2), mask.size(-1)})[mask.size(0) > 1 ? i : 0];
    if (mask.defined()) mask = mask.slice(1, 0, keys);
    at::Tensor key = attention.key.tensor[i].slice(1, 0, keys), value = attention.value.tensor[i].slice(1, 0, keys);
    attention.out.tensor[i].copy_(attend(attention, attention.query.tensor[i], key, value, mask).first);
  }
}

// Queries of one sequence a row, over pages: BSH (batch, queries, heads * size) and BSND (batch, queries, heads, size). The
// mask, where there is one, is (batch, ..., keys), true: not seen. A sequence of length 0 leaves its output as it is.
// sparseMode, preTokens and nextTokens are "invalid when the input layout is BSH, BSND, or BNSD, Q_S is equal to 1, QK_D
// is equal to V_D, and queryRope and keyRope are not passed": then the mask is a whole one.
void attend_batch(const Attention &attention) {
  int64_t batch = attention.query.tensor.size(0), queries = attention.query.tensor.size(1);
  bool is_plain = queries == 1 && !attention.query_rope.tensor.defined() &&
                  attention.query.tensor.sizes() == attention.out.tensor.sizes();
  bool is_whole = attention.mask.tensor.defined() && (attention.sparse_mode == 0 || is_plain);
  for (int64_t i = 0; i < batch; i++) {
    int64_t length = key_length(attention, static_cast<size_t>(i));
    if (length == 0) continue;
    auto by_head = [&](const Placed &from) {
      return from.tensor[i].reshape({queries, attention.heads, -1}).transpose(0, 1);
    };
    at::Tensor rope, key_rope, mask;
    if (attention.query_rope.tensor.defined()) rope = by_head(attention.query_rope);
    if (attention.key_rope.tensor.defined()) key_rope = keys_of(attention, attention.key_rope, i);
    if (is_whole)
      mask = attention.mask.tensor.reshape({batch, -1, attention.mask.tensor.size(-1)})[i].slice(1, 0, length);
    at::Tensor key = with_rope(keys_of(attention, attention.key, i), key_rope).transpose(0, 1);
    at::Tensor value = keys_of(attention, attention.value, i).transpose(0, 1);
    at::Tensor out = attend(attention, with_rope(by_head(attention.query), rope), key, value, mask).first;
    attention.out.tensor[i].copy_(out.transpose(0, 1).reshape(attention.out.tensor[i].sizes()));
  }
}

void run_attention(const Attention &attention) {
  bool is_paged = attention.block_table.tensor.defined();
  for (const Placed *read :
       {&attention.query, &attention.query_rope, &attention.block_table, &attention.mask, &attention.sinks})
    touch_all(*read, false);
  for (const Placed *read : {&attention.key, &attention.value, &attention.key_rope})
    if (!is_paged) touch_all(*read, false);  // of pages, just those of the table
  touch_all(attention.out, true);
  if (attention.wants_lse) touch_all(attention.lse, true);
  flush_touches();
  if (attention.layout == "TND")
    attend_tnd(attention);
  else if (attention.layout == "BNSD" && !is_paged)
    attend_bnsd(attention);
  else if ((attention.layout == "BSH" || attention.layout == "BSND") && is_paged)
    attend_batch(attention);
  else
    throw std::runtime_error("layout " + attention.layout + " is not simulated");
}

std::vector<int64_t> values_of(CInts array) { return array ? array->values : std::vector<int64_t>{}; }

}  // namespace

#define ATTENTION_TENSORS                                                                                           \
  CTensor query, CTensors key, CTensors value, CTensor, CTensor mask, CInts query_ends, CInts key_lengths, CTensor, \
      CTensor, CTensor, CTensor, CTensor, CTensor, CTensor, CTensor table, CTensor, CTensor, CTensor, CTensor,      \
      CTensor, CTensor, CTensor, CTensor, CInts, CTensor query_rope, CTensor key_rope, CTensor
#define ATTENTION_NUMBERS                                                                                         \
  int64_t heads, double scale, int64_t before, int64_t after, char *layout, int64_t key_heads, int64_t sparse_mode, \
      int64_t, int64_t, int64_t, bool wants_lse, int64_t, int64_t
#define ATTENTION(sinks)                                                                                          \
  const aclTensor *keys = &key->tensors[0], *values = &value->tensors[0];                                         \
  Attention attention{call.rows(query),                                                                           \
                      call.rows(keys),                                                                            \
                      call.rows(values),                                                                          \
                      call.rows(query_rope),                                                                      \
                      call.rows(key_rope),                                                                        \
                      call.rows(table),                                                                           \
                      call.rows(mask),                                                                            \
                      call.rows(sinks),                                                                           \
                      call.rows(out),                                                                             \
                      call.rows(lse),                                                                             \
                      values_of(query_ends),                                                                      \
                      values_of(key_lengths),                                                                     \
                      heads,                                                                                      \
                      key_heads ? key_heads : heads,                                                              \
                      sparse_mode,                                                                                \
                      before,                                                                                     \
                      after,                                                                                      \
                      scale,                                                                                      \
                      wants_lse,                                                                                  \
                      layout};                                                                                    \
  call.run([attention] { run_attention(attention); });

// "Adapts to the FlashAttention operator in the decode (IncreFlashAttention) and prefill (PromptFlashAttention) inference
// scenarios."
OPERATOR(aclnnFusedInferAttentionScoreV3, (ATTENTION_TENSORS, ATTENTION_NUMBERS, Tensor out, Tensor lse),
         {ATTENTION(nullptr)})
// "Compared with FusedInferAttentionScoreV3, this API adds the dequantScaleQueryOptional, learnableSinkOptional, and
// queryQuantMode parameters".
OPERATOR(aclnnFusedInferAttentionScoreV4,
         (ATTENTION_TENSORS, CTensor, CTensor sinks, ATTENTION_NUMBERS, int64_t, Tensor out, Tensor lse),
         {ATTENTION(sinks)})
namespace {

// Sparse attention (DeepSeek V3.2): queries are TND, keys in pages, (pages, page_size, 1, size), all causal, aligned at the
// lower right (sparse_mode 3).
struct Sparse {
  at::Tensor query_ends, key_lengths, table;
  std::string query_layout, key_layout;
  int64_t mode;
};

// For each sequence: its number, its queries' range, and how many keys it has.
void each_sequence(const Sparse &sparse, const std::function<void(int64_t, int64_t, int64_t, int64_t)> &body) {
  if (sparse.query_layout != "TND" || sparse.key_layout != "PA_BSND" || sparse.mode != 3)
    throw std::runtime_error("this form of sparse attention is not simulated");
  int64_t begin = 0;
  for (int64_t i = 0; i < sparse.query_ends.size(0); i++) {
    int64_t end = sparse.query_ends[i].item<int64_t>(), keys = sparse.key_lengths[i].item<int64_t>();
    if (end > begin && keys > 0) body(i, begin, end, keys);
    begin = end;
  }
}

// A sequence's first keys, (keys, size), from its pages; reads just these.
at::Tensor sequence_of(const Placed &pages, const at::Tensor &table, int64_t keys) {
  int64_t page_size = pages.tensor.size(1);
  at::Tensor numbers = table.slice(0, 0, (keys + page_size - 1) / page_size).to(at::kLong);
  touch_rows(pages, numbers, false);
  return pages.tensor.index_select(0, numbers).flatten(0, 2).slice(0, 0, keys).to(at::kFloat);
}

}  // namespace

// Of each query the keys whose score, the sum over heads of weight * relu(query * key), is the greatest; after them -1.
OPERATOR(aclnnLightningIndexer,
         (CTensor query, CTensor key, CTensor weights, CTensor query_ends, CTensor key_lengths, CTensor table,
          char *query_layout, char *key_layout, int64_t count, int64_t mode, int64_t, int64_t, bool, Tensor out, Tensor),
         call.run([q = call.in(query), k = call.rows(key), w = call.in(weights), count, o = call.out(out),
                   sparse = Sparse{call.in(query_ends), call.in(key_lengths), call.in(table), query_layout, key_layout,
                                   mode}] {
           o.fill_(-1);
           each_sequence(sparse, [&](int64_t i, int64_t begin, int64_t end, int64_t keys) {
             at::Tensor scores = at::relu(at::matmul(q.slice(0, begin, end).to(at::kFloat),  // (queries, heads, keys)
                                                     sequence_of(k, sparse.table[i], keys).t()));
             scores = (scores * w.slice(0, begin, end).to(at::kFloat).unsqueeze(-1)).sum(1);
             for (int64_t j = 0; j < end - begin; j++) {
               int64_t seen = keys - (end - begin) + j + 1, kept = std::min(seen, count);
               if (kept > 0)
                 o[begin + j][0].slice(0, 0, kept).copy_(std::get<1>(scores[j].slice(0, 0, seen).topk(kept)));
             }
           });
         }))
// Attention of each query to the keys of these indices alone.
OPERATOR(aclnnSparseFlashAttention,
         (CTensor query, CTensor key, CTensor, CTensor indices, CTensor table, CTensor query_ends, CTensor key_lengths,
          CTensor query_rope, CTensor key_rope, double scale, int64_t block, char *query_layout, char *key_layout,
          int64_t mode, int64_t, int64_t, int64_t, bool, Tensor out, Tensor, Tensor),
         if (block != 1) throw std::runtime_error("sparse blocks of several tokens are not simulated");
         call.run([q = call.in(query), k = call.rows(key), n = call.in(indices), qr = call.in(query_rope),
                   kr = call.rows(key_rope), scale, o = call.out(out),
                   sparse = Sparse{call.in(query_ends), call.in(key_lengths), call.in(table), query_layout, key_layout,
                                   mode}] {
           each_sequence(sparse, [&](int64_t i, int64_t begin, int64_t end, int64_t keys) {
             at::Tensor latent = sequence_of(k, sparse.table[i], keys), rope = sequence_of(kr, sparse.table[i], keys);
             at::Tensor all = at::cat({latent, rope}, -1);
             for (int64_t j = begin; j < end; j++) {
               at::Tensor at = n[j][0].to(at::kLong);
               at = at.index({(at >= 0).logical_and(at <= keys - (end - j))});
               at::Tensor asks = at::cat({q[j], qr[j]}, -1).to(at::kFloat);
               at::Tensor scores = at::matmul(asks, all.index_select(0, at).t()) * scale;
               o[j].copy_(at::matmul(at::softmax(scores, -1), latent.index_select(0, at)));
             }
           });
         }))
OPERATOR(aclnnLayerNorm,
         (CTensor self, CInts shape, CTensor weight, CTensor bias, double epsilon, Tensor out, Tensor mean, Tensor rstd),
         call.run([a = call.in(self), s = shape->values, w = call.in(weight), b = call.in(bias), epsilon,
                   o = call.out(out), m = call.out(mean), r = call.out(rstd)] {
           auto [normed, means, scales] = at::native_layer_norm(a, s, w, b, epsilon);
           o.copy_(normed);
           if (m.defined()) m.copy_(means.view(m.sizes()));
           if (r.defined()) r.copy_(scales.view(r.sizes()));
         }))
// Joins what parts of the keys have given: `lse` has the logarithm of each part's sum of exponents.
OPERATOR(aclnnAttentionUpdate, (CTensors lse, CTensors parts, int64_t, Tensor out, Tensor lse_out),
         call.run([l = call.in(lse), p = call.in(parts), o = call.out(out)] {
           at::Tensor all = at::stack(l), weights = at::softmax(all.to(at::kFloat), 0);
           o.copy_((at::stack(p).to(at::kFloat) * weights.unsqueeze(-1)).sum(0));
         });
         (void)lse_out)
OPERATOR(aclnnTransposeBatchMatMul,
         (CTensor first, CTensor second, CTensor, CTensor, CInts perm_first, CInts perm_second, CInts perm_out, int8_t,
          int32_t, Tensor out),
         call.run([a = call.in(first), b = call.in(second), p = values_of(perm_first), q = values_of(perm_second),
                   r = values_of(perm_out), o = call.out(out)] {
           o.copy_(at::bmm(p.empty() ? a : a.permute(p), q.empty() ? b : b.permute(q)).permute(r));
         }))

namespace {

aclError fixed_workspace(uint64_t *workspace, aclOpExecutor **executor) {
  *workspace = 1 << 20;
  *executor = nullptr;
  return ACL_SUCCESS;
}

}  // namespace

#define MOST_WORKSPACE(name, ...)                                                                              \
  extern "C" __attribute__((visibility("default"))) aclError name##GetMaxWorkspaceSize(                        \
      __VA_ARGS__, uint64_t *workspace, aclOpExecutor **executor) {                                            \
    return fixed_workspace(workspace, executor);                                                               \
  }
#define UNNAMED_TENSORS                                                                                       \
  CTensor, CTensors, CTensors, CTensor, CTensor, CInts, CInts, CTensor, CTensor, CTensor, CTensor, CTensor,    \
      CTensor, CTensor, CTensor, CTensor, CTensor, CTensor, CTensor, CTensor, CTensor, CTensor, CTensor,      \
      CInts, CTensor, CTensor, CTensor
#define UNNAMED_NUMBERS \
  int64_t, double, int64_t, int64_t, char *, int64_t, int64_t, int64_t, int64_t, int64_t, bool, int64_t, int64_t
MOST_WORKSPACE(aclnnFusedInferAttentionScoreV3, UNNAMED_TENSORS, UNNAMED_NUMBERS, Tensor, Tensor)
MOST_WORKSPACE(aclnnFusedInferAttentionScoreV4, UNNAMED_TENSORS, CTensor, CTensor, UNNAMED_NUMBERS, int64_t, Tensor, Tensor)
