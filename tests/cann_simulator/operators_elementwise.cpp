// Operators that work element by element, reduce, or make tensors; see operators.h.
#include <ATen/ops/abs.h>
#include <ATen/ops/add.h>
#include <ATen/ops/all.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/any.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_not.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/ceil.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/clamp_max.h>
#include <ATen/ops/clamp_min.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/div.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/floor.h>
#include <ATen/ops/floor_divide.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ge.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gt.h>
#include <ATen/ops/isclose.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/le.h>
#include <ATen/ops/log.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/logical_not.h>
#include <ATen/ops/logical_or.h>
#include <ATen/ops/logical_xor.h>
#include <ATen/ops/lt.h>
#include <ATen/ops/max.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/min.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/range.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/where.h>

#include "operators.h"

using namespace cann_simulator;

#define UNARY(name, expression)              \
  OPERATOR(name, (CTensor self, Tensor out), \
           call.run([a = call.in(self), o = call.out(out)] { o.copy_(expression); }))
#define BINARY(name, expression)                            \
  OPERATOR(name, (CTensor self, CTensor other, Tensor out), \
           call.run([a = call.in(self), b = call.in(other), o = call.out(out)] { o.copy_(expression); }))
#define WITH_SCALAR(name, expression)                       \
  OPERATOR(name, (CTensor self, CScalar other, Tensor out), \
           call.run([a = call.in(self), b = other->value, o = call.out(out)] { o.copy_(expression); }))
#define INPLACE(name, statement)                 \
  OPERATOR(name, (Tensor self, CTensor other), \
           call.run([b = call.in(other), a = call.out(self)] { statement; }))
#define INPLACE_SCALAR(name, statement) \
  OPERATOR(name, (Tensor self, CScalar other), call.run([b = other->value, a = call.out(self)] { statement; }))

// --- copies, fills, conversions
INPLACE(aclnnInplaceCopy, a.copy_(b))
OPERATOR(aclnnInplaceZero, (Tensor self), call.run([a = call.out(self)] { a.zero_(); }))
OPERATOR(aclnnInplaceOne, (Tensor self), call.run([a = call.out(self)] { a.fill_(1); }))
INPLACE_SCALAR(aclnnInplaceFillScalar, a.fill_(b))
INPLACE(aclnnInplaceFillTensor, a.fill_(b.reshape({})))
OPERATOR(aclnnCast, (CTensor self, aclDataType, Tensor out),
         call.run([a = call.in(self), o = call.out(out)] { o.copy_(a); }))
OPERATOR(aclnnArange, (CScalar from, CScalar to, CScalar step, Tensor out),
         call.run([f = from->value, t = to->value, s = step->value, o = call.out(out)] {
           o.copy_(at::arange(f, t, s, o.options()));
         }))
OPERATOR(aclnnRange, (CScalar from, CScalar to, CScalar step, Tensor out),
         call.run([f = from->value, t = to->value, s = step->value, o = call.out(out)] {
           o.copy_(at::range(f, t, s, o.options()));
         }))
OPERATOR(aclnnEye, (int64_t rows, int64_t columns, Tensor out),
         call.run([rows, columns, o = call.out(out)] { o.copy_(at::eye(rows, columns, o.options())); }))

// --- arithmetic
OPERATOR(aclnnAdd, (CTensor self, CTensor other, CScalar alpha, Tensor out),
         call.run([a = call.in(self), b = call.in(other), s = alpha->value, o = call.out(out)] {
           o.copy_(at::add(a, b, s));
         }))
OPERATOR(aclnnAdds, (CTensor self, CScalar other, CScalar alpha, Tensor out),
         call.run([a = call.in(self), b = other->value, s = alpha->value, o = call.out(out)] {
           o.copy_(at::add(a, b, s));
         }))
OPERATOR(aclnnAddV3, (CScalar self, CTensor other, CScalar alpha, Tensor out),
         call.run([a = self->value, b = call.in(other), s = alpha->value, o = call.out(out)] {
           o.copy_(at::add(at::mul(b, s), a));
         }))
OPERATOR(aclnnSub, (CTensor self, CTensor other, CScalar alpha, Tensor out),
         call.run([a = call.in(self), b = call.in(other), s = alpha->value, o = call.out(out)] {
           o.copy_(at::sub(a, b, s));
         }))
OPERATOR(aclnnSubs, (CTensor self, CScalar other, CScalar alpha, Tensor out),
         call.run([a = call.in(self), b = other->value, s = alpha->value, o = call.out(out)] {
           o.copy_(at::sub(a, b, s));
         }))
OPERATOR(aclnnRsubs, (CTensor self, CScalar other, CScalar alpha, Tensor out),
         call.run([a = call.in(self), b = other->value, s = alpha->value, o = call.out(out)] {
           o.copy_(at::rsub(a, b, s));
         }))
OPERATOR(aclnnRsub, (CTensor self, CTensor other, CScalar alpha, Tensor out),
         call.run([a = call.in(self), b = call.in(other), s = alpha->value, o = call.out(out)] {
           o.copy_(at::rsub(a, b, s));
         }))
#define INPLACE_ALPHA(name, statement)                          \
  OPERATOR(name, (Tensor self, CTensor other, CScalar alpha), \
           call.run([b = call.in(other), s = alpha->value, a = call.out(self)] { statement; }))
INPLACE_ALPHA(aclnnInplaceAdd, a.add_(b, s))
INPLACE_ALPHA(aclnnInplaceSub, a.sub_(b, s))
OPERATOR(aclnnInplaceAdds, (Tensor self, CScalar other, CScalar alpha),
         call.run([b = other->value, s = alpha->value, a = call.out(self)] { a.add_(b, s); }))
OPERATOR(aclnnInplaceSubs, (Tensor self, CScalar other, CScalar alpha),
         call.run([b = other->value, s = alpha->value, a = call.out(self)] { a.sub_(b, s); }))
BINARY(aclnnMul, at::mul(a, b))
WITH_SCALAR(aclnnMuls, at::mul(a, b))
INPLACE(aclnnInplaceMul, a.mul_(b))
INPLACE_SCALAR(aclnnInplaceMuls, a.mul_(b))
BINARY(aclnnDiv, at::div(a, b))
WITH_SCALAR(aclnnDivs, at::div(a, b))
INPLACE(aclnnInplaceDiv, a.div_(b))
INPLACE_SCALAR(aclnnInplaceDivs, a.div_(b))
#define ROUNDING (mode == 2 ? "floor" : "trunc")
OPERATOR(aclnnDivMod, (CTensor self, CTensor other, int mode, Tensor out),
         call.run([a = call.in(self), b = call.in(other), mode, o = call.out(out)] {
           o.copy_(mode ? at::div(a, b, ROUNDING) : at::div(a, b));
         }))
OPERATOR(aclnnDivMods, (CTensor self, CScalar other, int mode, Tensor out),
         call.run([a = call.in(self), b = other->value, mode, o = call.out(out)] {
           o.copy_(mode ? at::div(a, b, ROUNDING) : at::div(a, b));
         }))
OPERATOR(aclnnInplaceDivMod, (Tensor self, CTensor other, int mode),
         call.run([b = call.in(other), mode, a = call.out(self)] { mode ? a.div_(b, ROUNDING) : a.div_(b); }))
OPERATOR(aclnnInplaceDivMods, (Tensor self, CScalar other, int mode),
         call.run([b = other->value, mode, a = call.out(self)] { mode ? a.div_(b, ROUNDING) : a.div_(b); }))
BINARY(aclnnFloorDivide, at::floor_divide(a, b))
WITH_SCALAR(aclnnFloorDivides, at::floor_divide(a, b))
INPLACE(aclnnInplaceFloorDivide, a.floor_divide_(b))
INPLACE_SCALAR(aclnnInplaceFloorDivides, a.floor_divide_(b))
BINARY(aclnnRemainderTensorTensor, at::remainder(a, b))
WITH_SCALAR(aclnnRemainderTensorScalar, at::remainder(a, b))
BINARY(aclnnPowTensorTensor, at::pow(a, b))
WITH_SCALAR(aclnnPowTensorScalar, at::pow(a, b))
INPLACE_SCALAR(aclnnInplacePowTensorScalar, a.pow_(b))
OPERATOR(aclnnPowScalarTensor, (CScalar self, CTensor exponent, Tensor out),
         call.run([a = self->value, b = call.in(exponent), o = call.out(out)] { o.copy_(at::pow(a, b)); }))
BINARY(aclnnMaximum, at::maximum(a, b))
BINARY(aclnnMinimum, at::minimum(a, b))

// --- functions of one tensor
UNARY(aclnnNeg, at::neg(a))
UNARY(aclnnAbs, at::abs(a))
UNARY(aclnnRsqrt, at::rsqrt(a))
UNARY(aclnnSqrt, at::sqrt(a))
UNARY(aclnnExp, at::exp(a))
UNARY(aclnnLog, at::log(a))
UNARY(aclnnCos, at::cos(a))
UNARY(aclnnSin, at::sin(a))
UNARY(aclnnTanh, at::tanh(a))
UNARY(aclnnSigmoid, at::sigmoid(a))
UNARY(aclnnSilu, at::silu(a))
UNARY(aclnnGelu, at::gelu(a))
UNARY(aclnnRelu, at::relu(a))
UNARY(aclnnFloor, at::floor(a))
UNARY(aclnnCeil, at::ceil(a))
UNARY(aclnnReciprocal, at::reciprocal(a))
UNARY(aclnnIsFinite, at::isfinite(a))
UNARY(aclnnLogicalNot, at::logical_not(a))
UNARY(aclnnBitwiseNot, at::bitwise_not(a))
OPERATOR(aclnnGeluV2, (CTensor self, int64_t approximate, Tensor out),
         call.run([a = call.in(self), approximate, o = call.out(out)] {
           o.copy_(at::gelu(a, approximate ? "tanh" : "none"));
         }))
OPERATOR(aclnnClamp, (CTensor self, CScalar least, CScalar most, Tensor out),
         call.run([a = call.in(self), l = least ? std::optional<at::Scalar>(least->value) : std::nullopt,
                   m = most ? std::optional<at::Scalar>(most->value) : std::nullopt,
                   o = call.out(out)] { o.copy_(at::clamp(a, l, m)); }))
WITH_SCALAR(aclnnClampMin, at::clamp_min(a, b))
WITH_SCALAR(aclnnClampMax, at::clamp_max(a, b))
INPLACE_SCALAR(aclnnInplaceClampMin, a.clamp_min_(b))
INPLACE_SCALAR(aclnnInplaceClampMax, a.clamp_max_(b))
BINARY(aclnnClampMinTensor, at::clamp_min(a, b))
BINARY(aclnnClampMaxTensor, at::clamp_max(a, b))

// --- comparisons and logic
#define COMPARISON(name, function)                     \
  BINARY(aclnn##name##Tensor, at::function(a, b))      \
  WITH_SCALAR(aclnn##name##Scalar, at::function(a, b))
COMPARISON(Eq, eq)
COMPARISON(Ne, ne)
COMPARISON(Lt, lt)
COMPARISON(Le, le)
COMPARISON(Gt, gt)
COMPARISON(Ge, ge)
BINARY(aclnnLogicalAnd, at::logical_and(a, b))
BINARY(aclnnLogicalOr, at::logical_or(a, b))
BINARY(aclnnLogicalXor, at::logical_xor(a, b))
BINARY(aclnnBitwiseAndTensor, at::bitwise_and(a, b))
WITH_SCALAR(aclnnBitwiseAndScalar, at::bitwise_and(a, b))
BINARY(aclnnBitwiseOrTensor, at::bitwise_or(a, b))
WITH_SCALAR(aclnnBitwiseOrScalar, at::bitwise_or(a, b))
BINARY(aclnnBitwiseXorTensor, at::bitwise_xor(a, b))
BINARY(aclnnEqual, at::full({1}, at::equal(a, b)))
OPERATOR(aclnnIsClose, (CTensor self, CTensor other, double relative, double absolute, bool equal_nan, Tensor out),
         call.run([=, a = call.in(self), b = call.in(other), o = call.out(out)] {
           o.copy_(at::isclose(a, b, relative, absolute, equal_nan));
         }))
OPERATOR(aclnnSWhere, (CTensor condition, CTensor self, CTensor other, Tensor out),
         call.run([c = call.in(condition), a = call.in(self), b = call.in(other), o = call.out(out)] {
           o.copy_(at::where(c.to(at::kBool), a, b));
         }))

// --- reductions
OPERATOR(aclnnAll, (CTensor self, CInts dims, bool keep, Tensor out),
         call.run([a = call.in(self), d = dims->values, keep, o = call.out(out)] { o.copy_(at::all(a, d, keep)); }))
OPERATOR(aclnnAny, (CTensor self, CInts dims, bool keep, Tensor out),
         call.run([a = call.in(self), d = dims->values, keep, o = call.out(out)] { o.copy_(at::any(a, d, keep)); }))
OPERATOR(aclnnReduceSum, (CTensor self, CInts dims, bool keep, aclDataType type, Tensor out),
         call.run([a = call.in(self), d = dims->values, keep, t = scalar_type(type), o = call.out(out)] {
           o.copy_(at::sum(a, d, keep, t));
         }))
OPERATOR(aclnnMean, (CTensor self, CInts dims, bool keep, aclDataType type, Tensor out),
         call.run([a = call.in(self), d = dims->values, keep, t = scalar_type(type), o = call.out(out)] {
           o.copy_(at::mean(a, d, keep, t));
         }))
OPERATOR(aclnnAmax, (CTensor self, CInts dims, bool keep, Tensor out),
         call.run([a = call.in(self), d = dims->values, keep, o = call.out(out)] { o.copy_(at::amax(a, d, keep)); }))
OPERATOR(aclnnAmin, (CTensor self, CInts dims, bool keep, Tensor out),
         call.run([a = call.in(self), d = dims->values, keep, o = call.out(out)] { o.copy_(at::amin(a, d, keep)); }))
UNARY(aclnnMax, at::max(a))
UNARY(aclnnMin, at::min(a))
OPERATOR(aclnnMaxDim, (CTensor self, int64_t dim, bool keep, Tensor out, Tensor indices),
         call.run([a = call.in(self), dim, keep, o = call.out(out), i = call.out(indices)] {
           auto [values, found] = at::max(a, dim, keep);
           o.copy_(values);
           i.copy_(found);
         }))
OPERATOR(aclnnArgMax, (CTensor self, int64_t dim, bool keep, Tensor out),
         call.run([a = call.in(self), dim, keep, o = call.out(out)] { o.copy_(at::argmax(a, dim, keep)); }))
OPERATOR(aclnnCumsum, (CTensor self, int64_t dim, aclDataType type, Tensor out),
         call.run([a = call.in(self), dim, t = scalar_type(type), o = call.out(out)] {
           o.copy_(at::cumsum(a, dim, t));
         }))
OPERATOR(aclnnTopk, (CTensor self, int64_t k, int64_t dim, bool largest, bool sorted, Tensor out, Tensor indices),
         call.run([=, a = call.in(self), o = call.out(out), i = call.out(indices)] {
           auto [values, found] = at::topk(a, k, dim, largest, sorted);
           o.copy_(values);
           i.copy_(found);
         }))
OPERATOR(aclnnSoftmax, (CTensor self, int64_t dim, Tensor out),
         call.run([a = call.in(self), dim, o = call.out(out)] { o.copy_(at::softmax(a, dim, o.scalar_type())); }))
OPERATOR(aclnnLogSoftmax, (CTensor self, int64_t dim, Tensor out),
         call.run([a = call.in(self), dim, o = call.out(out)] { o.copy_(at::log_softmax(a, dim, o.scalar_type())); }))
