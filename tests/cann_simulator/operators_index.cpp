// Operators that gather, scatter and rearrange; see operators.h. Those on rows of dimension 0 touch only these rows.
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/flip.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/index.h>
#include <ATen/ops/index_add.h>
#include <ATen/ops/index_copy.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/scatter.h>
#include <ATen/ops/scatter_add.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tril.h>
#include <ATen/ops/triu.h>

#include "operators.h"

using namespace cann_simulator;

namespace {

using Indices = c10::List<std::optional<at::Tensor>>;

at::Tensor as_index(const at::Tensor &index) {
  return index.scalar_type() == at::kBool || index.scalar_type() == at::kByte ? index : index.to(at::kLong);
}

Indices as_indices(const std::vector<at::Tensor> &tensors) {
  Indices indices;
  for (const at::Tensor &tensor : tensors)
    indices.push_back(tensor.defined() && tensor.numel() ? std::optional(as_index(tensor)) : std::nullopt);
  return indices;
}

// One index, into dimension 0, that is a list of rows and no mask.
bool is_rows(const std::vector<at::Tensor> &indices) {
  return indices.size() == 1 && indices[0].defined() && indices[0].scalar_type() != at::kBool &&
         indices[0].scalar_type() != at::kByte;
}

void touch_indexed(const Placed &self, const std::vector<at::Tensor> &indices, bool writes) {
  if (is_rows(indices))
    touch_rows(self, indices[0], writes);
  else
    touch_all(self, writes);
}

void touch_along(const Placed &self, int64_t dim, const at::Tensor &index, bool writes) {
  if (dim == 0 && self.tensor.dim() > 0)
    touch_rows(self, index, writes);
  else
    touch_all(self, writes);
}

}  // namespace

namespace cann_simulator {
void flush_touches();
}

OPERATOR(aclnnIndexSelect, (CTensor self, int64_t dim, CTensor index, Tensor out),
         call.run([a = call.rows(self), dim, i = call.in(index), o = call.out(out)] {
           touch_along(a, dim, i, false);
           flush_touches();
           o.copy_(at::index_select(a.tensor, dim, i.to(at::kLong)));
         }))
OPERATOR(aclnnInplaceIndexCopy, (Tensor self, int64_t dim, CTensor index, CTensor source),
         call.run([a = call.rows(self), dim, i = call.in(index), s = call.in(source)] {
           touch_along(a, dim, i, true);
           flush_touches();
           a.tensor.index_copy_(dim, i.to(at::kLong), s);
         }))
OPERATOR(aclnnIndexCopy, (CTensor self, int64_t dim, CTensor index, CTensor source, Tensor out),
         call.run([a = call.in(self), dim, i = call.in(index), s = call.in(source), o = call.out(out)] {
           o.copy_(at::index_copy(a, dim, i.to(at::kLong), s));
         }))
OPERATOR(aclnnIndexAddV2,
         (CTensor self, int64_t dim, CTensor index, CTensor source, CScalar alpha, int64_t, Tensor out),
         call.run([a = call.in(self), dim, i = call.in(index), s = call.in(source), f = alpha->value,
                   o = call.out(out)] { o.copy_(at::index_add(a, dim, i.to(at::kLong), s, f)); }))
OPERATOR(aclnnIndex, (CTensor self, CTensors indices, Tensor out),
         call.run([a = call.rows(self), l = call.in(indices), o = call.out(out)] {
           if (o.numel() == 0) return;  // an index without elements would be taken for one that is left out
           touch_indexed(a, l, false);
           flush_touches();
           o.copy_(at::index(a.tensor, as_indices(l)));
         }))
OPERATOR(aclnnIndexPutImpl, (Tensor self, CTensors indices, CTensor values, bool accumulate, bool),
         call.run([a = call.rows(self), l = call.in(indices), v = call.in(values), accumulate] {
           touch_indexed(a, l, true);
           flush_touches();
           a.tensor.index_put_(as_indices(l), v, accumulate);
         }))
OPERATOR(aclnnGather, (CTensor self, int64_t dim, CTensor index, Tensor out),
         call.run([a = call.in(self), dim, i = call.in(index), o = call.out(out)] {
           o.copy_(at::gather(a, dim, i.to(at::kLong)));
         }))
#define SCATTERED(self) \
  (reduction == 1 ? at::scatter_add(self, dim, i.to(at::kLong), s) : at::scatter(self, dim, i.to(at::kLong), s))
OPERATOR(aclnnScatter, (CTensor self, int64_t dim, CTensor index, CTensor source, int64_t reduction, Tensor out),
         call.run([=, a = call.in(self), i = call.in(index), s = call.in(source), o = call.out(out)] {
           o.copy_(SCATTERED(a));
         }))
OPERATOR(aclnnInplaceScatter, (Tensor self, int64_t dim, CTensor index, CTensor source, int64_t reduction),
         call.run([=, i = call.in(index), s = call.in(source), a = call.out(self)] { a.copy_(SCATTERED(a)); }))
OPERATOR(aclnnScatterValue, (CTensor self, int64_t dim, CTensor index, CScalar value, int64_t, Tensor out),
         call.run([=, a = call.in(self), i = call.in(index), v = value->value, o = call.out(out)] {
           o.copy_(at::scatter(a, dim, i.to(at::kLong), v));
         }))
OPERATOR(aclnnInplaceScatterValue, (Tensor self, int64_t dim, CTensor index, CScalar value, int64_t),
         call.run([=, i = call.in(index), v = value->value, a = call.out(self)] {
           a.scatter_(dim, i.to(at::kLong), v);
         }))
OPERATOR(aclnnScatterNdUpdate, (Tensor self, CTensor indices, CTensor updates),
         call.run([a = call.rows(self), i = call.in(indices), u = call.in(updates)] {
           std::vector<at::Tensor> columns;
           for (const at::Tensor &column : i.to(at::kLong).unbind(-1)) columns.push_back(column);
           touch_indexed(a, columns, true);
           flush_touches();
           a.tensor.index_put_(as_indices(columns), u);
         }))
OPERATOR(aclnnEmbedding, (CTensor weight, CTensor indices, Tensor out),
         call.run([w = call.rows(weight), i = call.in(indices), o = call.out(out)] {
           touch_rows(w, i, false);
           flush_touches();
           o.copy_(at::embedding(w.tensor, i.to(at::kLong)));
         }))
OPERATOR(aclnnCat, (CTensors tensors, int64_t dim, Tensor out),
         call.run([l = call.in(tensors), dim, o = call.out(out)] { o.copy_(at::cat(l, dim)); }))
OPERATOR(aclnnStack, (CTensors tensors, int64_t dim, Tensor out),
         call.run([l = call.in(tensors), dim, o = call.out(out)] { o.copy_(at::stack(l, dim)); }))
OPERATOR(aclnnRepeat, (CTensor self, CInts repeats, Tensor out),
         call.run([a = call.in(self), r = repeats->values, o = call.out(out)] { o.copy_(a.repeat(r)); }))
OPERATOR(aclnnRepeatInterleaveIntWithDim, (CTensor self, int64_t repeats, int64_t dim, int64_t, Tensor out),
         call.run([=, a = call.in(self), o = call.out(out)] { o.copy_(at::repeat_interleave(a, repeats, dim)); }))
OPERATOR(aclnnFlip, (CTensor self, CInts dims, Tensor out),
         call.run([a = call.in(self), d = dims->values, o = call.out(out)] { o.copy_(at::flip(a, d)); }))
OPERATOR(aclnnTriu, (CTensor self, int64_t diagonal, Tensor out),
         call.run([a = call.in(self), diagonal, o = call.out(out)] { o.copy_(at::triu(a, diagonal)); }))
OPERATOR(aclnnTril, (CTensor self, int64_t diagonal, Tensor out),
         call.run([a = call.in(self), diagonal, o = call.out(out)] { o.copy_(at::tril(a, diagonal)); }))
OPERATOR(aclnnInplaceTriu, (Tensor self, int64_t diagonal),
         call.run([a = call.out(self), diagonal] { a.triu_(diagonal); }))
OPERATOR(aclnnInplaceMaskedFillScalar, (Tensor self, CTensor mask, CScalar value),
         call.run([m = call.in(mask), v = value->value, a = call.out(self)] { a.masked_fill_(m.to(at::kBool), v); }))
OPERATOR(aclnnInplaceMaskedFillTensor, (Tensor self, CTensor mask, CTensor value),
         call.run([m = call.in(mask), v = call.in(value), a = call.out(self)] {
           a.masked_fill_(m.to(at::kBool), v.reshape({}));
         }))
OPERATOR(aclnnConstantPadNd, (CTensor self, CInts pad, CScalar value, Tensor out),
         call.run([a = call.in(self), p = pad->values, v = value->value, o = call.out(out)] {
           o.copy_(at::constant_pad_nd(a, p, v));
         }))
OPERATOR(aclnnSort, (CTensor self, bool stable, int64_t dim, bool descending, Tensor values, Tensor indices),
         call.run([=, a = call.in(self), v = call.out(values), i = call.out(indices)] {
           auto [sorted, from] = a.sort(stable, dim, descending);
           v.copy_(sorted);
           i.copy_(from);
         }))
