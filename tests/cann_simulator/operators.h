// How an operator is written: a line over ATen's CPU kernels, on tensors laid over the device memory's shadow.
//
//     OPERATOR(aclnnMul, (CTensor a, CTensor b, Tensor o), call.run([a = call.in(a), b = call.in(b), o = call.out(o)] {
//       o.copy_(a * b);
//     }))
//
// in() and out() also say which bytes the operator reads and writes, for the ordering record. An operator that
// touches only some rows of a tensor takes it with rows() and tells the rows from within, with touch_rows().
//
// The aclnn functions have no headers outside of CANN: the parameters are those that torch_npu passes (EXEC_NPU_CMD
// in Ascend/op-plugin), in that order, with the workspace's size and the executor after them.
#pragma once

#include <ATen/core/Tensor.h>
#include <acl/acl.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

struct aclTensor {
  at::Tensor tensor;
  const void *device;  // the device pointer of the first element
};
struct aclScalar {
  at::Scalar value;
};
struct aclIntArray {
  std::vector<int64_t> values;
};
struct aclFloatArray {
  std::vector<float> values;
};
struct aclBoolArray {
  std::vector<bool> values;
};
struct aclTensorList {
  std::vector<aclTensor> tensors;
};
struct aclScalarList {
  std::vector<at::Scalar> values;
};

namespace cann_simulator {

// A tensor with its place on the device.
struct Placed {
  at::Tensor tensor;
  const void *device = nullptr;
};

using CTensor = const aclTensor *;
using Tensor = aclTensor *;
using CScalar = const aclScalar *;
using CTensors = const aclTensorList *;
using CInts = const aclIntArray *;

at::ScalarType scalar_type(aclDataType type);

// One call of an operator, from its arguments to its task.
class Call {
 public:
  explicit Call(const char *name) : name_(name) {}
  at::Tensor in(CTensor tensor) { return add(tensor, false); }
  at::Tensor out(CTensor tensor) { return add(tensor, true); }
  std::vector<at::Tensor> in(CTensors list);
  Placed rows(CTensor tensor) const { return tensor ? Placed{tensor->tensor, tensor->device} : Placed{}; }
  void run(std::function<void()> body) { body_ = std::move(body); }

 private:
  friend struct Executor;
  at::Tensor add(CTensor tensor, bool writes);

  std::string name_;
  std::vector<std::pair<Placed, bool>> touched_;
  std::function<void()> body_;
};

struct Executor {
  Call call;
  explicit Executor(Call made) : call(std::move(made)) {}
  aclError launch(aclrtStream stream) const;
};

// From within an operator that has taken `placed` with rows(): it touches these rows of dimension 0.
void touch_rows(const Placed &placed, const at::Tensor &rows, bool writes);
void touch_all(const Placed &placed, bool writes);

}  // namespace cann_simulator

struct aclOpExecutor;

#define OPERATOR_UNPACK(...) __VA_ARGS__
#define OPERATOR(name, parameters, ...)                                                                            \
  extern "C" __attribute__((visibility("default"))) aclError name##GetWorkspaceSize(                               \
      OPERATOR_UNPACK parameters, uint64_t *workspace, aclOpExecutor **executor) {                                 \
    cann_simulator::Call call(#name);                                                                              \
    __VA_ARGS__;                                                                                                   \
    *workspace = 0;                                                                                                \
    *executor = reinterpret_cast<aclOpExecutor *>(new cann_simulator::Executor(std::move(call)));                  \
    return ACL_SUCCESS;                                                                                            \
  }                                                                                                                \
  extern "C" __attribute__((visibility("default"))) aclError name(void *, uint64_t, aclOpExecutor *executor,       \
                                                                  aclrtStream stream) {                            \
    auto *made = reinterpret_cast<cann_simulator::Executor *>(executor);                                           \
    aclError error = made->launch(stream);                                                                         \
    delete made;                                                                                                   \
    return error;                                                                                                  \
  }
