// The older operator interface: descriptions of tensors that torch_npu makes, and operators that are not here. An
// operator without an aclnn form ends up in aclopCompileAndExecute and fails with its name.
#include <cstring>
#include <utility>
#include <vector>

#include "simulator.h"

using cann_simulator::fail;

struct aclTensorDesc {
  std::vector<int64_t> sizes;
  aclDataType type;
  aclFormat format;
};

struct aclDataBuffer {
  void *pointer;
  size_t size;
};

struct aclopAttr {};

SIMULATED aclTensorDesc *aclCreateTensorDesc(aclDataType type, int count, const int64_t *sizes, aclFormat format) {
  return new aclTensorDesc{{sizes, sizes + count}, type, format};
}
SIMULATED void aclDestroyTensorDesc(const aclTensorDesc *description) { delete description; }
SIMULATED aclDataType aclGetTensorDescType(const aclTensorDesc *description) { return description->type; }
SIMULATED aclFormat aclGetTensorDescFormat(const aclTensorDesc *description) { return description->format; }
SIMULATED size_t aclGetTensorDescNumDims(const aclTensorDesc *description) { return description->sizes.size(); }
SIMULATED aclError aclGetTensorDescDimV2(const aclTensorDesc *description, size_t index, int64_t *size) {
  *size = description->sizes[index];
  return ACL_SUCCESS;
}
SIMULATED void aclSetTensorDescName(aclTensorDesc *, const char *) {}
SIMULATED aclError aclSetTensorFormat(aclTensorDesc *, aclFormat) { return ACL_SUCCESS; }
SIMULATED aclError aclSetTensorPlaceMent(aclTensorDesc *, aclMemType) { return ACL_SUCCESS; }
SIMULATED aclError aclSetTensorShape(aclTensorDesc *, int, const int64_t *) { return ACL_SUCCESS; }
SIMULATED aclDataBuffer *aclCreateDataBuffer(void *pointer, size_t size) { return new aclDataBuffer{pointer, size}; }
SIMULATED aclError aclDestroyDataBuffer(const aclDataBuffer *buffer) {
  delete buffer;
  return ACL_SUCCESS;
}

SIMULATED aclopAttr *aclopCreateAttr() { return new aclopAttr; }
SIMULATED void aclopDestroyAttr(const aclopAttr *attribute) { delete attribute; }
SIMULATED aclError aclopSetAttrBool(aclopAttr *, const char *, uint8_t) { return ACL_SUCCESS; }
SIMULATED aclError aclopSetAttrDataType(aclopAttr *, const char *, aclDataType) { return ACL_SUCCESS; }
SIMULATED aclError aclopSetAttrFloat(aclopAttr *, const char *, float) { return ACL_SUCCESS; }
SIMULATED aclError aclopSetAttrInt(aclopAttr *, const char *, int64_t) { return ACL_SUCCESS; }
SIMULATED aclError aclopSetAttrListBool(aclopAttr *, const char *, int, const uint8_t *) { return ACL_SUCCESS; }
SIMULATED aclError aclopSetAttrListFloat(aclopAttr *, const char *, int, const float *) { return ACL_SUCCESS; }
SIMULATED aclError aclopSetAttrListInt(aclopAttr *, const char *, int, const int64_t *) { return ACL_SUCCESS; }
SIMULATED aclError aclopSetAttrListListInt(aclopAttr *, const char *, int, const int *, const int64_t *const[]) {
  return ACL_SUCCESS;
}
SIMULATED aclError aclopSetAttrString(aclopAttr *, const char *, const char *) { return ACL_SUCCESS; }

namespace {
aclError missing(const char *operation) {
  return fail(ACL_ERROR_OP_NOT_FOUND, "the operator %s is not simulated", operation);
}
}  // namespace

SIMULATED aclError aclopCompileAndExecute(const char *operation, int, const aclTensorDesc *const[],
                                          const aclDataBuffer *const[], int, const aclTensorDesc *const[],
                                          aclDataBuffer *const[], const aclopAttr *, aclopEngineType, aclopCompileType,
                                          const char *, aclrtStream) {
  return missing(operation);
}

SIMULATED aclError aclopCompileAndExecuteV2(const char *operation, int, aclTensorDesc *[], aclDataBuffer *[], int,
                                            aclTensorDesc *[], aclDataBuffer *[], aclopAttr *, aclopEngineType,
                                            aclopCompileType, const char *, aclrtStream) {
  return missing(operation);
}

SIMULATED aclError aclSetCompileopt(aclCompileOpt, const char *) { return ACL_SUCCESS; }
SIMULATED size_t aclGetCompileoptSize(aclCompileOpt) { return 64; }
SIMULATED aclError aclGetCompileopt(aclCompileOpt, char *value, size_t) {
  *value = 0;
  return ACL_SUCCESS;
}
