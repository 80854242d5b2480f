// libnnopbase.so: torch_npu looks this one function up there.
struct aclOpExecutor;
extern "C" __attribute__((visibility("default"))) int aclDestroyAclOpExecutor(aclOpExecutor *) { return 0; }
