// Handles of physical memory: what aclrtMallocPhysical and aclrtMemImportFromShareableHandle give.
#pragma once

#include <memory>

#include "memory.h"

namespace cann_simulator {

aclrtDrvMemHandle keep_physical(std::shared_ptr<Physical> physical);
std::shared_ptr<Physical> physical_of(aclrtDrvMemHandle handle);  // null: no such handle

}  // namespace cann_simulator
