// Initialisation, devices and contexts, versions, and switches that only have to be kept. Pages of hicann/runtime
// docs/api_docs that are followed: aclInit, aclGetRecentErrMsg, aclrtSetDevice, aclrtGetDevice, aclrtGetCurrentContext,
// aclrtSetCurrentContext, aclsysGetCANNVersion, aclsysGetVersionStr.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "memory.h"
#include "simulator.h"
#include "teardown.h"

namespace cann_simulator {
namespace {

thread_local int thread_device = -1;
thread_local std::string thread_message;
std::atomic<bool> initialised{false};
char contexts[kMaxDevices];  // a context is an address in here: its device
std::atomic<int64_t> system_parameters[16];

const char *environment(const char *name, const char *otherwise) {
  const char *set = getenv(name);
  return set && *set ? set : otherwise;
}

const char *cann_version() { return environment("CANN_SIMULATOR_CANN", "9.0.0"); }
const char *driver_version() { return environment("CANN_SIMULATOR_DRIVER", "25.5.0"); }

}  // namespace

aclError fail(aclError code, const char *format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  thread_message = std::string("CANN simulator: ") + text;
  static const bool traces = *environment("CANN_SIMULATOR_TRACE", "") != 0;
  if (traces) fprintf(stderr, "CANN simulator: error %d: %s\n", code, text);
  return code;
}

int current_device() { return thread_device; }

uint32_t device_count() { return state() ? static_cast<uint32_t>(control().devices.load()) : 0; }

aclError lost(int device) {
  bool known = device >= 0 && device < static_cast<int>(kMaxDevices);
  return known ? static_cast<aclError>(control().lost_code[device].load()) : ACL_SUCCESS;
}

// As on a card, each thread has to set its device first (page aclrtSetDevice).
aclError cannot_call(const char *function) {
  static const bool traces = *environment("CANN_SIMULATOR_TRACE", "") != 0;
  if (traces) fprintf(stderr, "CANN simulator: %s\n", function);
  if (!state()) return fail(ACL_ERROR_UNINITIALIZE, "CANN_SIMULATOR_DIR is not set, or of no use");
  if (thread_device < 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, "%s: this thread has set no device", function);
  if (aclError code = lost(thread_device)) return fail(code, "%s: device %d is lost", function, thread_device);
  return ACL_SUCCESS;
}

bool cann_older_than(int major, int minor) {
  int have_major = 0, have_minor = 0;
  sscanf(cann_version(), "%d.%d", &have_major, &have_minor);
  return have_major < major || (have_major == major && have_minor < minor);
}

bool take_fault(std::atomic<uint64_t> &count) {
  uint64_t left = count;
  while (left && !count.compare_exchange_weak(left, left == UINT64_MAX ? left : left - 1)) {
  }
  return left != 0;
}

}  // namespace cann_simulator

using namespace cann_simulator;

SIMULATED aclError aclInit(const char *) {
  if (!state()) return fail(ACL_ERROR_INVALID_FILE, "CANN_SIMULATOR_DIR is not set, or of no use");
  return initialised.exchange(true) ? ACL_ERROR_REPEAT_INITIALIZE : ACL_SUCCESS;
}

SIMULATED aclError aclFinalize() {
  initialised = false;
  return ACL_SUCCESS;
}

SIMULATED const char *aclGetRecentErrMsg() {
  static thread_local std::string kept;
  kept.swap(thread_message);
  thread_message.clear();
  return kept.empty() ? nullptr : kept.c_str();
}

SIMULATED void aclAppLog(aclLogLevel level, const char *function, const char *, uint32_t line, const char *format,
                         ...) {
  static const int least = atoi(environment("ASCEND_GLOBAL_LOG_LEVEL", "3"));
  static const bool prints = atoi(environment("ASCEND_SLOG_PRINT_TO_STDOUT", "0"));
  if (!prints || level < least) return;
  va_list arguments;
  va_start(arguments, format);
  fprintf(stderr, "[%d] %s:%u ", level, function, line);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
}

// --- versions

SIMULATED const char *aclrtGetSocName() { return environment("CANN_SIMULATOR_SOC", "Ascend910B3"); }

SIMULATED aclError aclsysGetVersionStr(char *package, char *version) {
  bool driver = package && strcmp(package, "driver") == 0;
  snprintf(version, ACL_PKG_VERSION_MAX_SIZE, "%s", driver ? driver_version() : cann_version());
  return ACL_SUCCESS;
}

SIMULATED aclError aclsysGetCANNVersion(aclCANNPackageName package, aclCANNPackageVersion *version) {
  memset(version, 0, sizeof *version);
  snprintf(version->version, sizeof version->version, "%s",
           package == ACL_PKG_NAME_DRIVER ? driver_version() : cann_version());
  return ACL_SUCCESS;
}

// --- devices and contexts

SIMULATED aclError aclrtGetDeviceCount(uint32_t *count) {
  *count = device_count();
  return *count ? ACL_SUCCESS : fail(ACL_ERROR_RT_NO_DEVICE, "no device");
}

SIMULATED aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= static_cast<int32_t>(device_count()))
    return fail(ACL_ERROR_RT_INVALID_DEVICEID, "aclrtSetDevice: there are %u devices, not %d", device_count(), device);
  thread_device = device;
  start_undertaker();
  return lost(device) ? fail(lost(device), "aclrtSetDevice: device %d is lost", device) : ACL_SUCCESS;
}

SIMULATED aclError aclrtGetDevice(int32_t *device) {
  *device = thread_device;
  return thread_device < 0 ? fail(ACL_ERROR_RT_CONTEXT_NULL, "aclrtGetDevice: this thread has set no device")
                           : ACL_SUCCESS;
}

SIMULATED aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }

SIMULATED aclError aclrtGetCurrentContext(aclrtContext *context) {
  if (thread_device < 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, "this thread has set no device");
  *context = &contexts[thread_device];
  return ACL_SUCCESS;
}

SIMULATED aclError aclrtSetCurrentContext(aclrtContext context) {
  auto *address = static_cast<char *>(context);
  if (address < contexts || address >= contexts + kMaxDevices)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtSetCurrentContext: no such context");
  thread_device = static_cast<int>(address - contexts);
  return ACL_SUCCESS;
}

SIMULATED aclError aclrtGetPrimaryCtxState(int32_t, uint32_t *flags, int32_t *active) {
  if (flags) *flags = 0;
  if (active) *active = 1;
  return ACL_SUCCESS;
}

SIMULATED aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t, int32_t) {
  *can = control().no_peers == 0;
  return ACL_SUCCESS;
}

SIMULATED aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return ACL_SUCCESS; }

SIMULATED aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t *value) {
  *value = 0;
  if (attribute == ACL_DEV_ATTR_AICORE_CORE_NUM || attribute == ACL_DEV_ATTR_CUBE_CORE_NUM) *value = 24;
  if (attribute == ACL_DEV_ATTR_VECTOR_CORE_NUM) *value = 48;
  if (attribute == ACL_DEV_ATTR_L2_CACHE_SIZE) *value = 192 << 20;
  if (attribute == ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE && device < kMaxDevices)
    *value = static_cast<int64_t>(control().memory_bytes[device].load());
  return ACL_SUCCESS;
}

SIMULATED aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t *value) {
  *value = 24;
  return ACL_SUCCESS;
}

SIMULATED aclError aclrtGetDeviceUtilizationRate(int32_t, aclrtUtilizationInfo *info) {
  info->cubeUtilization = info->vectorUtilization = info->aicpuUtilization = info->memoryUtilization = 0;
  return ACL_SUCCESS;
}

// --- switches without an effect here

SIMULATED aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }
SIMULATED aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
SIMULATED aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
SIMULATED aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
SIMULATED aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }

namespace {
aclError get_parameter(aclSysParamOpt option, int64_t *value) {
  if (option < 0 || option >= 16) return fail(ACL_ERROR_RT_PARAM_INVALID, "parameter %d", option);
  *value = system_parameters[option];
  return ACL_SUCCESS;
}
aclError set_parameter(aclSysParamOpt option, int64_t value) {
  if (option < 0 || option >= 16) return fail(ACL_ERROR_RT_PARAM_INVALID, "parameter %d", option);
  system_parameters[option] = value;
  return ACL_SUCCESS;
}
}  // namespace

SIMULATED aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) { return get_parameter(option, value); }
SIMULATED aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) { return set_parameter(option, value); }
SIMULATED aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
  return get_parameter(option, value);
}
SIMULATED aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  return set_parameter(option, value);
}

