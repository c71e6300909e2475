// What compiled kernels and the library share.
#pragma once

namespace emulator {

struct Dim {
    unsigned x, y, z;
};

// A thread of a block, as its kernel sees it.
struct Thread {
    Dim thread, block;   // its place
    Dim threads, blocks; // of a block, and of the grid
    unsigned number;     // in its block
};

// An operation of several lanes of a warp. The last lane to arrive executes it for all lanes in the mask.
typedef void (*Together)(void* const* lanes, unsigned mask);

// A kernel in a compiled module, which defines one for each as `emulator_kernel_NAME`.
struct Kernel {
    void (*run)(const void* args);
    unsigned long args_bytes;
    unsigned most_threads; // of a block, as the kernel promised, or 0
};

} // namespace emulator

extern "C" {

extern __thread emulator::Thread* emulator_thread __attribute__((tls_model("initial-exec")));

// Waits for `count` threads of the block at barrier `number`; 0 means all threads. Returns how many of them passed a
// true `truth`.
unsigned emulator_barrier(unsigned number, unsigned count, bool truth);
// Arrives at a barrier without waiting.
void emulator_arrive(unsigned number, unsigned count);

// Meets the lanes in the mask. `mine` is what other lanes see of this one.
void emulator_meet(unsigned mask, emulator::Together together, void* mine);

// Shared memory: the address of a declaration in this block, and the memory that the launch requested.
void* emulator_shared(const void* declaration, unsigned long bytes, unsigned long align);
void* emulator_dynamic_shared();
// Shared memory also has 32-bit addresses.
unsigned emulator_shared_address(const void* place);
void* emulator_shared_place(unsigned address);

// Copies that are done when they are waited for, and not earlier.
void emulator_copy_later(void* to, const void* from, unsigned bytes, unsigned given);
void emulator_commit_copies();
void emulator_wait_copies(unsigned groups_left);

// Ends the process with the kernel, the block and the thread.
[[noreturn]] void emulator_fail(const char* why);
}
