#include "memory.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include "launch.h"

namespace emulator {

namespace {

const size_t PAGE = 4 << 10;
// Allocations are aligned to this. The real driver aligns more, but then their ends would not be at the guard page.
const size_t ALIGN = 16;
const size_t POISON = 16 << 20;

struct Piece {
    size_t bytes;
    char* mapping; // with a page before and one after it that nobody may touch
    size_t mapped;
};

std::map<char*, Piece> pieces; // of the device
std::map<char*, Piece> pinned;
size_t used = 0, most_used = 0;
unsigned open_count = 0;

bool guarded() {
    static const bool guarded = option("EMULATOR_GUARD", 0);
    return guarded;
}

size_t pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

// A file filled with 0xFF. Fresh memory is a private copy of it, so that only touched pages take time and space.
int poison() {
    static const int file = [] {
        int file = memfd_create("emulator", 0);
        std::string bytes(POISON, '\xff');
        if (file < 0 || write(file, bytes.data(), POISON) != (ssize_t)POISON) {
            perror("emulator: no memory to copy from");
            abort();
        }
        return file;
    }();
    return file;
}

char* map(size_t bytes, Piece& piece, int protection) {
    piece.bytes = bytes;
    piece.mapped = pages(bytes);
    void* place = mmap(nullptr, piece.mapped + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) return nullptr;
    piece.mapping = static_cast<char*>(place) + PAGE;
    for (size_t at = 0; at < piece.mapped; at += POISON) {
        size_t part = piece.mapped - at < POISON ? piece.mapped - at : POISON;
        if (mmap(piece.mapping + at, part, protection, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, poison(), 0) ==
            MAP_FAILED)
            return nullptr;
    }
    size_t rounded = (bytes + ALIGN - 1) / ALIGN * ALIGN;
    return piece.mapping + piece.mapped - rounded;
}

bool unmap(std::map<char*, Piece>& from, void* first) {
    auto found = from.find(static_cast<char*>(first));
    if (found == from.end() || !found->second.mapping) return false;
    const Piece& piece = found->second;
    munmap(piece.mapping - PAGE, piece.mapped + 2 * PAGE);
    from.erase(found);
    return true;
}

bool holds(const std::map<char*, Piece>& in, const void* first, size_t bytes) {
    char* place = static_cast<char*>(const_cast<void*>(first));
    auto after = in.upper_bound(place);
    if (after == in.begin()) return false;
    auto piece = std::prev(after);
    size_t at = place - piece->first;
    return at <= piece->second.bytes && bytes <= piece->second.bytes - at;
}

void protect(int protection) {
    for (auto& [first, piece] : pieces) mprotect(piece.mapping, piece.mapped, protection);
}

struct sigaction before;

std::string nearest(const char* place) {
    char text[160];
    auto after = pieces.upper_bound(const_cast<char*>(place));
    if (after != pieces.begin()) {
        auto piece = std::prev(after);
        long beyond = place - (piece->first + piece->second.bytes);
        if (beyond < (long)piece->second.mapped + (long)PAGE) {
            if (beyond < 0) snprintf(text, sizeof text, "inside a piece of the device's memory");
            else snprintf(text, sizeof text, "%ld bytes beyond a piece of %zu bytes", beyond, piece->second.bytes);
            return text;
        }
    }
    if (after != pieces.end() && after->first - place < (long)(2 * PAGE)) {
        snprintf(text, sizeof text, "%ld bytes before a piece of %zu bytes", after->first - place, after->second.bytes);
        return text;
    }
    return "far from the device's memory";
}

void on_fault(int number, siginfo_t* info, void* context) {
    std::string kernel = whereabouts(), where = nearest(static_cast<const char*>(info->si_addr));
    bool ours = !kernel.empty() || where.find("piece") != std::string::npos;
    if (ours) {
        fprintf(stderr, "emulator: %s touches %p, %s\n",
                kernel.empty() ? "the program itself" : kernel.c_str(), info->si_addr, where.c_str());
        signal(SIGABRT, SIG_DFL);
        abort();
    }
    if (before.sa_flags & SA_SIGINFO) before.sa_sigaction(number, info, context);
    else sigaction(number, &before, nullptr);
}

} // namespace

void* allocate(size_t bytes) {
    if (bytes == 0 || bytes > memory_free()) return nullptr;
    Piece piece;
    char* first = map(bytes, piece, guarded() && !open_count ? PROT_NONE : PROT_READ | PROT_WRITE);
    if (!first) return nullptr;
    pieces[first] = piece;
    used += bytes;
    if (used > most_used) most_used = used;
    return first;
}

bool give_back(void* first) {
    auto found = pieces.find(static_cast<char*>(first));
    if (found == pieces.end()) return false;
    used -= found->second.bytes;
    return unmap(pieces, first);
}

void* allocate_pinned(size_t bytes) {
    Piece piece;
    char* first = map(bytes, piece, PROT_READ | PROT_WRITE);
    if (first) pinned[first] = piece;
    return first;
}

bool give_back_pinned(void* first) { return unmap(pinned, first); }

void pin(void* first, size_t bytes) { pinned[static_cast<char*>(first)] = {bytes, nullptr, 0}; }

bool unpin(void* first) {
    auto found = pinned.find(static_cast<char*>(first));
    if (found == pinned.end() || found->second.mapping) return false;
    pinned.erase(found);
    return true;
}

bool is_device(const void* first, size_t bytes) { return holds(pieces, first, bytes); }
bool is_pinned(const void* first, size_t bytes) { return holds(pinned, first, bytes); }

Range piece_of(const void* place) {
    for (const auto* in : {&pieces, &pinned}) {
        auto after = in->upper_bound(static_cast<char*>(const_cast<void*>(place)));
        if (after == in->begin()) continue;
        auto piece = std::prev(after);
        const char* end = piece->first + piece->second.bytes;
        if (place < end) return {piece->first, end};
    }
    return {nullptr, nullptr};
}

std::string describe(const void* place) { return nearest(static_cast<const char*>(place)); }

size_t memory_total() {
    static const size_t total = option("EMULATOR_MEMORY", 8l << 30);
    return total;
}

size_t memory_free() { return memory_total() - used; }
size_t memory_peak() { return most_used; }
void forget_peak() { most_used = used; }

DeviceIsOpen::DeviceIsOpen() {
    if (open_count++ == 0 && guarded()) protect(PROT_READ | PROT_WRITE);
}

DeviceIsOpen::~DeviceIsOpen() {
    if (--open_count == 0 && guarded()) protect(PROT_NONE);
}

void watch_faults() {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &before);
    struct sigaction bus = action;
    sigaction(SIGBUS, &bus, nullptr);
}

} // namespace emulator
