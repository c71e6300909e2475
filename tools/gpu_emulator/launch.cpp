// Runs blocks of threads on the CPU. Each thread is a fibre with its own stack, which runs until it must wait for
// others of its block. Blocks are distributed to a few real threads.

#include "launch.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <signal.h>
#include <stdexcept>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>

__thread emulator::Thread* emulator_thread = nullptr;

// Saves a function's registers on the stack, stores the stack pointer, and continues on another stack.
extern "C" void emulator_switch(void** from, void* to);
#if defined(__x86_64__)
asm(R"(
.globl emulator_switch
.hidden emulator_switch
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
const unsigned KEPT_WORDS = 7, RETURN_WORD = 6, ENTRY_WORDS = 8;
#elif defined(__aarch64__)
asm(R"(
.globl emulator_switch
.hidden emulator_switch
emulator_switch:
    sub sp, sp, #160
    stp x19, x20, [sp]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x2, sp
    str x2, [x0]
    mov sp, x1
    ldp x19, x20, [sp]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");
const unsigned KEPT_WORDS = 20, RETURN_WORD = 11, ENTRY_WORDS = 20;
#else
#error "the emulator knows x86-64 and 64-bit ARM"
#endif

namespace emulator {

namespace {

// With its guard page an odd number of pages, so that stacks do not compete for the same cache sets.
const size_t STACK = 17 * (4 << 10);
const size_t PAGE = 4 << 10;
const unsigned WARP = 32;
const unsigned BARRIERS = 16;

enum class State { Ready, AtBarrier, Meeting, Ended };

struct Copy {
    void* to;
    const void* from;
    unsigned bytes, given;
};

struct Fibre : Thread {
    void* stack; // where it goes on
    State state;
    unsigned barrier;
    unsigned mask; // of the lanes that it meets
    Together together;
    void* mine;
    std::vector<std::vector<Copy>> copies; // groups, the last one open
};

struct Barrier {
    unsigned came, truths, count;
};

// A declaration of shared memory, and its address in a block.
struct Declared {
    const void* declaration;
    size_t at;
};

// Runs one block at a time.
struct Processor {
    const Launch* launch = nullptr;
    void* outside = nullptr;
    char* stacks;
    char* shared; // statics from the start, dynamic memory against the end
    std::vector<Declared> declared;
    size_t declared_bytes = 0;
    Fibre fibres[MOST_THREADS];
    unsigned count = 0, ended = 0;
    unsigned ready[MOST_THREADS / WARP];
    unsigned ready_warps = 0; // a bit for each warp with a thread that is ready
    unsigned meeting[MOST_THREADS / WARP]; // lanes that wait for others of their warp
    Barrier barriers[BARRIERS];

    Processor();
    void run_block(Dim block);
    void prepare(unsigned number);
    Fibre& current() { return *static_cast<Fibre*>(emulator_thread); }
    void wake(unsigned number);
    void go_on();
    [[noreturn]] void stuck();
};

__thread Processor* processor = nullptr;

const size_t SHARED = (MOST_STATIC_SHARED + MOST_SHARED + PAGE - 1) / PAGE * PAGE;

char* reserve(size_t bytes) {
    void* place = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) throw std::runtime_error("no memory for the emulator");
    return static_cast<char*>(place);
}

Processor::Processor() {
    stacks = reserve(MOST_THREADS * STACK);
    for (unsigned i = 0; i < MOST_THREADS; i++) mprotect(stacks + i * STACK, PAGE, PROT_NONE);
    char* place = reserve(SHARED + 2 * PAGE);
    mprotect(place, PAGE, PROT_NONE);
    mprotect(place + PAGE + SHARED, PAGE, PROT_NONE);
    shared = place + PAGE;
}

// The start of every fibre.
void begin() {
    Processor* here = processor;
    here->launch->kernel->run(here->launch->args);
    Fibre& fibre = here->current();
    fibre.state = State::Ended;
    if (++here->ended == here->count) {
        void* nowhere;
        emulator_switch(&nowhere, here->outside);
    }
    here->go_on();
}

void Processor::prepare(unsigned number) {
    Fibre& fibre = fibres[number];
    fibre.state = State::Ready;
    if (!fibre.copies.empty()) fibre.copies.clear();
    // Stacks end at different cache lines; otherwise all fibres would compete for the same ones.
    char* end = stacks + (number + 1) * STACK - (number % 60) * 64;
    void** words = reinterpret_cast<void**>(end) - ENTRY_WORDS;
    memset(words, 0, KEPT_WORDS * sizeof *words);
    words[RETURN_WORD] = reinterpret_cast<void*>(begin);
    fibre.stack = words;
}

void Processor::wake(unsigned number) {
    fibres[number].state = State::Ready;
    ready[number / WARP] |= 1u << number % WARP;
    ready_warps |= 1u << number / WARP;
}

// In odd orders the last threads run first, which reveals code that relies on the opposite.
bool backwards = false;

unsigned pick(unsigned bits, unsigned after) {
    if (backwards) {
        unsigned below = bits & ((1u << after) - 1);
        return 31 - __builtin_clz(below ? below : bits);
    }
    unsigned above = bits & ~((2u << after) - 1);
    return __builtin_ctz(above ? above : bits);
}

// Continues with a thread that is ready, of the same warp if possible. The current thread has recorded what it waits
// for.
void Processor::go_on() {
    Fibre& from = current();
    unsigned warp = from.number / WARP, lane = from.number % WARP;
    if (!ready[warp]) {
        if (!ready_warps) stuck();
        warp = pick(ready_warps, warp);
        lane = backwards ? 0 : WARP - 1;
    }
    lane = pick(ready[warp], lane);
    ready[warp] &= ~(1u << lane);
    if (!ready[warp]) ready_warps &= ~(1u << warp);
    Fibre& to = fibres[warp * WARP + lane];
    emulator_thread = &to;
    if (&to != &from) emulator_switch(&from.stack, to.stack);
}

void Processor::run_block(Dim block) {
    memset(shared, 0xff, declared_bytes);
    memset(shared + SHARED - launch->shared, 0xff, launch->shared);
    memset(barriers, 0, sizeof barriers);
    memset(ready, 0, sizeof ready);
    memset(meeting, 0, sizeof meeting);
    ready_warps = 0;
    ended = 0;
    const Dim& threads = launch->threads;
    count = threads.x * threads.y * threads.z;
    for (unsigned i = 0; i < count; i++) {
        Fibre& fibre = fibres[i];
        fibre.thread = {i % threads.x, i / threads.x % threads.y, i / threads.x / threads.y};
        fibre.block = block;
        fibre.threads = threads;
        fibre.blocks = launch->blocks;
        fibre.number = i;
        prepare(i);
        wake(i);
    }
    unsigned first = backwards ? count - 1 : 0;
    ready[first / WARP] &= ~(1u << first % WARP);
    if (!ready[first / WARP]) ready_warps &= ~(1u << first / WARP);
    emulator_thread = &fibres[first];
    emulator_switch(&outside, fibres[first].stack);
    emulator_thread = nullptr;
}

std::string place_of(const Launch& launch, const Thread& thread) {
    char text[256];
    snprintf(text, sizeof text, "kernel %s, block (%u, %u, %u), thread (%u, %u, %u)", launch.name.c_str(),
             thread.block.x, thread.block.y, thread.block.z, thread.thread.x, thread.thread.y, thread.thread.z);
    return text;
}

void Processor::stuck() {
    fprintf(stderr, "emulator: threads wait for others that do not come: %s\n",
            place_of(*launch, *emulator_thread).c_str());
    unsigned waiting = 0;
    for (unsigned i = 0; i < count; i++) waiting += fibres[i].state == State::AtBarrier;
    fprintf(stderr, "  of %u threads, %u have ended and %u wait at a barrier\n", count, ended, waiting);
    for (unsigned i = 0; i < count; i++)
        if (fibres[i].state == State::Meeting) {
            fprintf(stderr, "  thread %u waits for the lanes %08x of its warp", i, fibres[i].mask);
            fprintf(stderr, ", and maybe others do for other lanes or another instruction\n");
            break;
        }
    abort();
}

// The real threads that run blocks.
struct Workers {
    std::vector<std::unique_ptr<Processor>> processors;
    std::vector<std::thread> threads;
    std::mutex mutex;
    std::condition_variable change;
    const Launch* launch = nullptr;
    unsigned long round = 0;
    unsigned busy = 0;
    std::atomic<unsigned long> next{0};
    unsigned long blocks = 0, stride = 1, offset = 0;

    Workers();
    void serve(Processor* mine);
    void deal(Processor& mine);
};

Workers::Workers() {
    unsigned long cores = std::thread::hardware_concurrency();
    unsigned long count = option("EMULATOR_THREADS", cores < 1 ? 1 : cores > 8 ? 8 : cores);
    for (unsigned long i = 0; i < count; i++) processors.emplace_back(new Processor);
    for (unsigned long i = 1; i < count; i++) threads.emplace_back([this, i] { serve(processors[i].get()); });
    for (std::thread& thread : threads) thread.detach();
}

void Workers::serve(Processor* mine) {
    // Faults are reported on a separate stack, because the fibre's stack may have overflowed.
    stack_t alternate = {};
    alternate.ss_sp = reserve(STACK);
    alternate.ss_size = STACK;
    sigaltstack(&alternate, nullptr);
    unsigned long seen = 0;
    for (;;) {
        {
            std::unique_lock<std::mutex> lock(mutex);
            change.wait(lock, [&] { return round != seen; });
            seen = round;
        }
        deal(*mine);
        std::lock_guard<std::mutex> lock(mutex);
        if (--busy == 0) change.notify_all();
    }
}

// Runs blocks until none are left.
void Workers::deal(Processor& mine) {
    mine.declared.clear();
    mine.declared_bytes = 0;
    mine.launch = launch;
    processor = &mine;
    forget_recent();
    const Dim& grid = launch->blocks;
    for (;;) {
        unsigned long i = next.fetch_add(1, std::memory_order_relaxed);
        if (i >= blocks) break;
        unsigned long block = (offset + i * stride) % blocks;
        mine.run_block({unsigned(block % grid.x), unsigned(block / grid.x % grid.y), unsigned(block / grid.x / grid.y)});
    }
    processor = nullptr;
}

// In an order that EMULATOR_ORDER chooses, because the device guarantees none.
void choose_order(Workers& workers) {
    static const unsigned long seed = option("EMULATOR_ORDER", 0);
    static unsigned long state = seed;
    workers.stride = 1;
    workers.offset = 0;
    if (seed == 0) return;
    state = state * 6364136223846793005ul + 1442695040888963407ul;
    backwards = state >> 40 & 1;
    workers.offset = (state >> 33) % workers.blocks;
    unsigned long prime = 1000003;
    if (workers.blocks % prime) workers.stride = prime;
}

// With EMULATOR_PROFILE=1, prints the kernels' times when the process ends.
struct Profile {
    struct Line {
        unsigned long launches = 0, blocks = 0;
        double seconds = 0;
    };
    std::map<std::string, Line> lines;
    bool wanted = option("EMULATOR_PROFILE", 0);

    ~Profile() {
        for (auto& [name, line] : lines)
            fprintf(stderr, "emulator: %-24s %8lu launches %10lu blocks %9.3f s\n", name.c_str(), line.launches,
                    line.blocks, line.seconds);
    }
};
Profile profile;

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

} // namespace

long option(const char* name, long otherwise) {
    const char* text = getenv(name);
    if (!text || !*text) return otherwise;
    char* end;
    double value = strtod(text, &end);
    switch (*end) {
    case 'K': value *= 1 << 10; break;
    case 'M': value *= 1 << 20; break;
    case 'G': value *= 1 << 30; break;
    }
    return (long)value;
}

void run(const Launch& launch) {
    // Never destroyed, because its threads still exist when the process ends.
    static Workers& workers = *new Workers;
    workers.blocks = (unsigned long)launch.blocks.x * launch.blocks.y * launch.blocks.z;
    workers.next = 0;
    workers.launch = &launch;
    double start = profile.wanted ? seconds() : 0;
    choose_order(workers);
    bool together = workers.blocks > 1 && !workers.threads.empty();
    if (together) {
        std::lock_guard<std::mutex> lock(workers.mutex);
        workers.busy = workers.threads.size();
        workers.round++;
        workers.change.notify_all();
    }
    workers.deal(*workers.processors[0]);
    if (together) {
        std::unique_lock<std::mutex> lock(workers.mutex);
        workers.change.wait(lock, [&] { return workers.busy == 0; });
    }
    if (profile.wanted) {
        Profile::Line& line = profile.lines[launch.name];
        line.launches++;
        line.blocks += workers.blocks;
        line.seconds += seconds() - start;
    }
}

std::string whereabouts() {
    return processor && emulator_thread ? place_of(*processor->launch, *emulator_thread) : std::string();
}

bool is_own(const void* first, unsigned long bytes) {
    const Processor& here = *processor;
    auto in = [&](const void* from, size_t size) {
        size_t at = static_cast<const char*>(first) - static_cast<const char*>(from);
        return at <= size && bytes <= size - at;
    };
    const Launch& launch = *here.launch;
    return in(here.shared, here.declared_bytes) || in(here.shared + SHARED - launch.shared, launch.shared) ||
           in(here.stacks, MOST_THREADS * STACK) || in(here.fibres, sizeof here.fibres) ||
           in(launch.args, launch.kernel->args_bytes);
}

} // namespace emulator

using namespace emulator;

void emulator_fail(const char* why) {
    fprintf(stderr, "emulator: %s: %s\n", why, whereabouts().c_str());
    abort();
}

unsigned emulator_barrier(unsigned number, unsigned count, bool truth) {
    Processor* here = processor;
    if (number >= BARRIERS) emulator_fail("there are sixteen barriers");
    Barrier& barrier = here->barriers[number];
    barrier.truths += truth;
    if (++barrier.came == (count ? count : here->count)) {
        barrier.count = barrier.truths;
        barrier.came = barrier.truths = 0;
        for (unsigned i = 0; i < here->count; i++) {
            Fibre& fibre = here->fibres[i];
            if (fibre.state == State::AtBarrier && fibre.barrier == number) here->wake(i);
        }
    } else {
        Fibre& fibre = here->current();
        fibre.state = State::AtBarrier;
        fibre.barrier = number;
        here->go_on();
    }
    return barrier.count;
}

void emulator_arrive(unsigned number, unsigned count) {
    Processor* here = processor;
    if (number >= BARRIERS) emulator_fail("there are sixteen barriers");
    Barrier& barrier = here->barriers[number];
    if (++barrier.came < count) return;
    barrier.came = 0;
    for (unsigned i = 0; i < here->count; i++) {
        Fibre& fibre = here->fibres[i];
        if (fibre.state == State::AtBarrier && fibre.barrier == number) here->wake(i);
    }
}

void emulator_meet(unsigned mask, Together together, void* mine) {
    Processor* here = processor;
    Fibre& fibre = here->current();
    unsigned first = fibre.number / WARP * WARP;
    if (!(mask >> fibre.number % WARP & 1)) emulator_fail("a lane meets others with a mask that it is not in");
    fibre.state = State::Meeting;
    fibre.mask = mask;
    fibre.together = together;
    fibre.mine = mine;
    unsigned& meeting = here->meeting[fibre.number / WARP];
    meeting |= 1u << fibre.number % WARP;
    if ((meeting & mask) != mask) return here->go_on();
    void* lanes[WARP];
    for (unsigned i = 0; i < WARP; i++) {
        if (!(mask >> i & 1)) continue;
        Fibre& other = here->fibres[first + i];
        if (other.mask != mask || other.together != together) return here->go_on();
        lanes[i] = other.mine;
    }
    meeting &= ~mask;
    together(lanes, mask);
    for (unsigned i = 0; i < WARP; i++)
        if ((mask >> i & 1) && first + i != fibre.number) here->wake(first + i);
    fibre.state = State::Ready;
}

void* emulator_shared(const void* declaration, unsigned long bytes, unsigned long align) {
    Processor* here = processor;
    for (const Declared& known : here->declared)
        if (known.declaration == declaration) return here->shared + known.at;
    size_t at = (here->declared_bytes + align - 1) / align * align;
    if (at + bytes > MOST_STATIC_SHARED) emulator_fail("a kernel declares more than 48 KiB of shared memory");
    if (at + bytes + here->launch->shared > MOST_SHARED) emulator_fail("a block has more than 227 KiB of shared memory");
    memset(here->shared + at, 0xff, bytes);
    here->declared.push_back({declaration, at});
    here->declared_bytes = at + bytes;
    return here->shared + at;
}

void* emulator_dynamic_shared() { return processor->shared + SHARED - processor->launch->shared; }

unsigned emulator_shared_address(const void* place) {
    size_t at = static_cast<const char*>(place) - processor->shared;
    if (at > SHARED) emulator_fail("an address that is not of shared memory is taken for one");
    return at;
}

void* emulator_shared_place(unsigned address) { return processor->shared + address; }

void emulator_copy_later(void* to, const void* from, unsigned bytes, unsigned given) {
    Fibre& fibre = processor->current();
    if ((bytes != 4 && bytes != 8 && bytes != 16) || given > bytes) emulator_fail("cp.async copies 4, 8 or 16 bytes");
    if ((size_t)to % bytes || (size_t)from % bytes) emulator_fail("cp.async of an address that is not aligned");
    if (fibre.copies.empty()) fibre.copies.emplace_back();
    fibre.copies.back().push_back({to, from, bytes, given});
    // Until the kernel waits for the copy, the destination is invalid.
    memset(to, 0xff, bytes);
}

void emulator_commit_copies() { processor->current().copies.emplace_back(); }

void emulator_wait_copies(unsigned groups_left) {
    auto& groups = processor->current().copies;
    // The open group does not count.
    if (groups.size() <= groups_left + 1) return;
    size_t done = groups.size() - 1 - groups_left;
    for (size_t i = 0; i < done; i++)
        for (const Copy& copy : groups[i]) {
            memcpy(copy.to, copy.from, copy.given);
            memset(static_cast<char*>(copy.to) + copy.given, 0, copy.bytes - copy.given);
        }
    groups.erase(groups.begin(), groups.begin() + done);
}
