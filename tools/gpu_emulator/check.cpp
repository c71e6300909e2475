// With EMULATOR_GUARD=1, kernels are compiled so that they call these functions before they access memory. g++ supports
// that for the sanitizer of the Linux kernel, whose function names these are.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>

#include "launch.h"
#include "memory.h"

using namespace emulator;

namespace {

// The allocations that were accessed last, which are usually accessed next.
const unsigned RECENT = 4;
__thread Range recent[RECENT];
__thread unsigned next_recent = 0;

[[noreturn]] void refuse(const char* first, unsigned long bytes, const char* what) {
    fprintf(stderr, "emulator: %s %s %lu bytes at %p, %s\n", whereabouts().c_str(), what, bytes, (const void*)first,
            describe(first).c_str());
    abort();
}

// A kernel's constants are in its module.
bool is_constant(const void* place) {
    Dl_info module;
    return dladdr(place, &module) && strncmp(module.dli_fname, "/tmp/emulator-", 14) == 0;
}

void check(const char* first, unsigned long bytes, const char* what) {
    for (const Range& range : recent)
        if (first >= range.first && first + bytes <= range.end) return;
    if (is_own(first, bytes)) return;
    Range range = piece_of(first);
    if (!range.first && is_constant(first)) {
        range = {(const char*)((size_t)first & ~15ul), (const char*)((size_t)first | 15) + 1};
        if (first + bytes > range.end) range.end = first + bytes;
    }
    if (!range.first || first + bytes > range.end) refuse(first, bytes, what);
    recent[next_recent++ % RECENT] = range;
}

} // namespace

namespace emulator {

void forget_recent() { memset(recent, 0, sizeof recent); }

} // namespace emulator

#define CHECK(bytes)                                                                                                   \
    extern "C" void __asan_load##bytes##_noabort(const char* first) { check(first, bytes, "reads"); }                  \
    extern "C" void __asan_store##bytes##_noabort(const char* first) { check(first, bytes, "writes"); }
CHECK(1)
CHECK(2)
CHECK(4)
CHECK(8)
CHECK(16)
extern "C" void __asan_loadN_noabort(const char* first, unsigned long bytes) { check(first, bytes, "reads"); }
extern "C" void __asan_storeN_noabort(const char* first, unsigned long bytes) { check(first, bytes, "writes"); }
extern "C" void __asan_handle_no_return() {}
