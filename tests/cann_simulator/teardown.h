// What a driver does with a process that has ended: it takes it apart later, and until then its memory, its handles
// and the copies that its streams had queued live on. Off unless a test asks for it; see Simulator.late_teardown.
#pragma once

#include <cstdint>

namespace cann_simulator {

// Starts this process's undertaker if a test wants teardowns to come late; once.
void start_undertaker();

// Lets the undertaker hold memory too, under the same number.
void keep_descriptor(int descriptor);

// In an undertaker whose process has ended, that process's number; else 0.
int32_t ended_process();

}  // namespace cann_simulator
