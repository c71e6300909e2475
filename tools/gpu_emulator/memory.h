// The memory of the device, and what of the computer's is pinned.
#pragma once

#include <cstddef>
#include <string>

namespace emulator {

// Memory of the device: each piece against the end of a mapping of its own, so that what reads or writes beyond it
// faults. It holds no number (0xFF) until it is written to. Null if the device has no such memory left.
void* allocate(size_t bytes);
bool give_back(void* first);

// Pinned memory of the computer, and such that becomes pinned.
void* allocate_pinned(size_t bytes);
bool give_back_pinned(void* first);
void pin(void* first, size_t bytes);
bool unpin(void* first);

// Whether all of these bytes are in one piece.
bool is_device(const void* first, size_t bytes);
bool is_pinned(const void* first, size_t bytes);

// The piece of either that an address is in, or nulls.
struct Range {
    const char *first, *end;
};
Range piece_of(const void* place);

size_t memory_total();
size_t memory_free();
// The most that was ever in use, or since it was forgotten.
size_t memory_peak();
void forget_peak();

// While one of these lives the device's memory can be touched. Otherwise, with EMULATOR_GUARD=1, the process faults.
struct DeviceIsOpen {
    DeviceIsOpen();
    ~DeviceIsOpen();
};

// Where an address is, for people.
std::string describe(const void* place);

// Tells people of faults: which kernel, block and thread touched what.
void watch_faults();

} // namespace emulator
