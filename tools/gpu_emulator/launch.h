// Running kernels.
#pragma once

#include <string>

#include "interface.h"

namespace emulator {

// The limits of a block, as on the emulated cards.
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

// Runs all blocks of a kernel on several CPU threads. One launch runs at a time.
void run(const Launch& launch);

// What the calling thread is running, as a message; empty if it runs no kernel.
std::string whereabouts();

// Whether these bytes belong to the running thread: its stack, its block's shared memory, its kernel's arguments.
bool is_own(const void* first, unsigned long bytes);

// Drops what checks remember of memory, because it may have been freed since the last launch.
void forget_recent();

// Reads an option from the environment.
long option(const char* name, long otherwise);

} // namespace emulator
