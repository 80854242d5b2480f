// The values that operators take, and how they are queued; see operators.h.
#include "operators.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>

namespace cann_simulator {

// From libascendcl.so; see memory.h and streams.h.
void *shadow(const void *pointer);
bool touch(const void *pointer, size_t size, bool writes);
void flush_touches();
aclError submit_kernel(aclrtStream stream, const std::string &name, std::function<aclError()> run);
aclError fail_in_task(aclError code, const std::string &text);

namespace {

constexpr int64_t kMostRuns = 512;  // of contiguous bytes, told one by one; else the tensor's whole extent

struct TouchedFreedMemory {};

void touch_or_throw(const char *begin, int64_t size, bool writes) {
  if (!touch(begin, static_cast<size_t>(size), writes)) throw TouchedFreedMemory{};
}

struct Dimension {
  int64_t size;
  int64_t stride;
};

// The tensor's bytes do not depend on the order of its dimensions: a transposed one is as dense as a plain one.
std::vector<Dimension> by_stride(const at::Tensor &tensor) {
  std::vector<Dimension> dimensions;
  for (int64_t i = 0; i < tensor.dim(); i++)
    if (tensor.size(i) > 1 && tensor.stride(i) != 0) dimensions.push_back({tensor.size(i), tensor.stride(i)});
  std::sort(dimensions.begin(), dimensions.end(),
            [](const Dimension &a, const Dimension &b) { return a.stride > b.stride; });
  return dimensions;
}

void touch_runs(const char *begin, const std::vector<Dimension> &outer, size_t at, int64_t element, int64_t run,
                bool writes) {
  if (at == outer.size()) return touch_or_throw(begin, run * element, writes);
  for (int64_t i = 0; i < outer[at].size; i++)
    touch_runs(begin + i * outer[at].stride * element, outer, at + 1, element, run, writes);
}

void touch_tensor(const at::Tensor &tensor, const void *device, bool writes) {
  if (tensor.numel() == 0) return;
  std::vector<Dimension> outer = by_stride(tensor);
  int64_t run = 1, extent = 1, runs = 1;
  for (const Dimension &dimension : outer) extent += (dimension.size - 1) * dimension.stride;
  while (!outer.empty() && outer.back().stride <= run) {  // dense so far, or overlapping itself
    run += (outer.back().size - 1) * outer.back().stride;
    outer.pop_back();
  }
  for (const Dimension &dimension : outer) runs *= dimension.size;
  auto *begin = static_cast<const char *>(device);
  auto element = static_cast<int64_t>(tensor.element_size());
  if (runs > kMostRuns) return touch_or_throw(begin, extent * element, writes);
  touch_runs(begin, outer, 0, element, run, writes);
}

}  // namespace

void touch_all(const Placed &placed, bool writes) {
  if (placed.tensor.defined()) touch_tensor(placed.tensor, placed.device, writes);
}

void touch_rows(const Placed &placed, const at::Tensor &rows, bool writes) {
  const at::Tensor &tensor = placed.tensor;
  if (tensor.numel() == 0 || rows.numel() == 0) return;
  at::Tensor as_long = rows.reshape({-1}).to(at::kLong).contiguous();
  std::vector<int64_t> numbers(as_long.const_data_ptr<int64_t>(), as_long.const_data_ptr<int64_t>() + as_long.numel());
  int64_t count = tensor.size(0), stride = tensor.stride(0) * static_cast<int64_t>(tensor.element_size());
  for (int64_t &number : numbers) {
    if (number < -count || number >= count)
      throw std::out_of_range("row " + std::to_string(number) + " of " + std::to_string(count));
    if (number < 0) number += count;
  }
  std::sort(numbers.begin(), numbers.end());
  auto *begin = static_cast<const char *>(placed.device);
  for (size_t i = 0, next; i < numbers.size(); i = next) {  // neighbours are one range
    for (next = i + 1; next < numbers.size() && numbers[next] <= numbers[next - 1] + 1; next++) {
    }
    at::Tensor neighbours = tensor.slice(0, numbers[i], numbers[next - 1] + 1);
    touch_tensor(neighbours, begin + numbers[i] * stride, writes);
  }
}

at::ScalarType scalar_type(aclDataType type) {
  switch (type) {
    case ACL_FLOAT: return at::kFloat;
    case ACL_FLOAT16: return at::kHalf;
    case ACL_INT8: return at::kChar;
    case ACL_INT32: return at::kInt;
    case ACL_UINT8: return at::kByte;
    case ACL_INT16: return at::kShort;
    case ACL_INT64: return at::kLong;
    case ACL_DOUBLE: return at::kDouble;
    case ACL_BOOL: return at::kBool;
    case ACL_COMPLEX64: return at::kComplexFloat;
    case ACL_BF16: return at::kBFloat16;
    case ACL_FLOAT8_E5M2: return at::kFloat8_e5m2;
    case ACL_FLOAT8_E4M3FN: return at::kFloat8_e4m3fn;
    default: fprintf(stderr, "CANN simulator: aclDataType %d is not simulated\n", type); abort();
  }
}

at::Tensor Call::add(CTensor tensor, bool writes) {
  if (!tensor) return {};
  touched_.emplace_back(Placed{tensor->tensor, tensor->device}, writes);
  return tensor->tensor;
}

std::vector<at::Tensor> Call::in(CTensors list) {
  std::vector<at::Tensor> tensors;
  for (const aclTensor &tensor : list->tensors) tensors.push_back(add(&tensor, false));
  return tensors;
}

aclError Executor::launch(aclrtStream stream) const {
  auto kept = std::make_shared<const Call>(call);
  return submit_kernel(stream, call.name_, [kept]() -> aclError {
    c10::InferenceMode inference;
    try {
      for (const auto &[placed, writes] : kept->touched_) touch_all(placed, writes);
      flush_touches();
      kept->body_();
      flush_touches();
      return ACL_SUCCESS;
    } catch (const TouchedFreedMemory &) {
      return fail_in_task(ACL_ERROR_RT_AICORE_EXCEPTION, kept->name_ + " touches device memory that is not mapped");
    } catch (const std::exception &error) {
      return fail_in_task(ACL_ERROR_RT_AICORE_EXCEPTION, kept->name_ + ": " + error.what());
    }
  });
}

}  // namespace cann_simulator

#define ACLNN extern "C" __attribute__((visibility("default")))

ACLNN aclTensor *aclCreateTensor(const int64_t *sizes, uint64_t count, aclDataType type, const int64_t *strides,
                                 int64_t offset, aclFormat, const int64_t *, uint64_t, void *data) {
  std::vector<int64_t> shape(sizes, sizes + count), steps(count, 1);
  for (uint64_t i = count; i > 1; i--) steps[i - 2] = steps[i - 1] * shape[i - 1];
  if (strides) steps.assign(strides, strides + count);
  at::ScalarType element = cann_simulator::scalar_type(type);
  auto *device = static_cast<char *>(data) + offset * static_cast<int64_t>(c10::elementSize(element));
  auto options = at::TensorOptions().dtype(element);
  return new aclTensor{at::from_blob(cann_simulator::shadow(device), shape, steps, options), device};
}

ACLNN aclScalar *aclCreateScalar(void *value, aclDataType type) {
  auto one = at::from_blob(value, {}, at::TensorOptions().dtype(cann_simulator::scalar_type(type)));
  return new aclScalar{one.item()};
}

ACLNN aclIntArray *aclCreateIntArray(const int64_t *values, uint64_t count) {
  return new aclIntArray{{values, values + count}};
}
ACLNN aclFloatArray *aclCreateFloatArray(const float *values, uint64_t count) {
  return new aclFloatArray{{values, values + count}};
}
ACLNN aclBoolArray *aclCreateBoolArray(const bool *values, uint64_t count) {
  return new aclBoolArray{std::vector<bool>(values, values + count)};
}

// The list takes its tensors over.
ACLNN aclTensorList *aclCreateTensorList(const aclTensor *const *tensors, uint64_t count) {
  auto *list = new aclTensorList;
  for (uint64_t i = 0; i < count; i++) {
    list->tensors.push_back(tensors[i] ? *tensors[i] : aclTensor{});
    delete tensors[i];
  }
  return list;
}

ACLNN aclScalarList *aclCreateScalarList(const aclScalar *const *scalars, uint64_t count) {
  auto *list = new aclScalarList;
  for (uint64_t i = 0; i < count; i++) list->values.push_back(scalars[i]->value);
  return list;
}

#define DESTROY(type)                                 \
  ACLNN aclError aclDestroy##type(const acl##type *value) { \
    delete value;                                     \
    return ACL_SUCCESS;                               \
  }
DESTROY(Tensor)
DESTROY(Scalar)
DESTROY(IntArray)
DESTROY(FloatArray)
DESTROY(BoolArray)
DESTROY(TensorList)
DESTROY(ScalarList)
