// The device's memory, and pinned memory.
#pragma once

#include <cstddef>
#include <string>

namespace emulator {

// Allocates device memory. Each allocation ends at the end of its mapping, so that accesses beyond it fault. It is
// filled with 0xFF (NaN). Null if the device has not enough memory.
void* allocate(size_t bytes);
bool give_back(void* first);

// Allocates pinned memory, and pins existing memory.
void* allocate_pinned(size_t bytes);
bool give_back_pinned(void* first);
void pin(void* first, size_t bytes);
bool unpin(void* first);

// Whether all of these bytes are in one allocation.
bool is_device(const void* first, size_t bytes);
bool is_pinned(const void* first, size_t bytes);

// The allocation of either kind that contains an address, or nulls.
struct Range {
    const char *first, *end;
};
Range piece_of(const void* place);

size_t memory_total();
size_t memory_free();
// The most memory ever in use, or since it was reset.
size_t memory_peak();
void forget_peak();

// While one of these lives, the program may access device memory. Otherwise, with EMULATOR_GUARD=1, that faults.
struct DeviceIsOpen {
    DeviceIsOpen();
    ~DeviceIsOpen();
};

// Where an address is, as a message.
std::string describe(const void* place);

// Reports faults: which kernel, block and thread accessed what.
void watch_faults();

} // namespace emulator
