// How kernels run.
#pragma once

#include <string>

#include "interface.h"

namespace emulator {

// The most that a block may have, as on the cards that this one stands for.
const unsigned MOST_THREADS = 1024;
const unsigned MOST_STATIC_SHARED = 48 << 10;
const unsigned MOST_SHARED = 227 << 10;

struct Launch {
    std::string name;
    const Kernel* kernel;
    const void* args;
    Dim blocks, threads;
    unsigned shared; // bytes of dynamic shared memory
};

// Runs all blocks of a kernel, on as many processors as there are. One launch at a time.
void run(const Launch& launch);

// What the calling thread of the process is running, for people; empty if it runs no kernel.
std::string whereabouts();

// Whether these bytes belong to the thread that runs: its stack, its block's shared memory, its kernel's arguments.
bool is_own(const void* first, unsigned long bytes);

// Memory may have been given back since the last launch: what checks remember of it is forgotten.
void forget_recent();

// Options come from the environment.
long option(const char* name, long otherwise);

} // namespace emulator
