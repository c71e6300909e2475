// The driver's functions that Forebay calls. The device is the CPU.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unistd.h>
#include <vector>

#include "launch.h"
#include "memory.h"
#include "stream.h"

using namespace emulator;

enum Result {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_READY = 600,
    LAUNCH_OUT_OF_RESOURCES = 701,
    LAUNCH_FAILED = 719,
    STREAM_CAPTURE_UNSUPPORTED = 900,
    STREAM_CAPTURE_INVALIDATED = 901,
    STREAM_CAPTURE_UNMATCHED = 903,
    UNKNOWN = 999,
};

namespace {

struct Named {
    Result result;
    const char *name, *text;
};

const Named RESULTS[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "not permitted when stream is capturing"},
    {STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "a capture failed before"},
    {STREAM_CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not initiated in this stream"},
    {UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

// Locked by everything below.
std::recursive_mutex everything;
__thread bool context_is_current = false;
bool initialised = false;
// A lost device stays lost: every call fails.
bool lost = false;

// Requested faults: the number of calls until each.
std::map<std::string, long> faults;

bool fault_is_due(const std::string& kind) {
    auto found = faults.find(kind);
    return found != faults.end() && --found->second == 0;
}

// "allocation:3,lost:100"
void ask_for_faults(const char* text) {
    for (std::string rest = text ? text : ""; !rest.empty();) {
        std::string one = rest.substr(0, rest.find(','));
        rest = one.size() < rest.size() ? rest.substr(one.size() + 1) : "";
        size_t colon = one.find(':');
        faults[one.substr(0, colon)] = colon == std::string::npos ? 1 : atol(one.c_str() + colon + 1);
    }
}

struct Module {
    void* library;
};

struct Function {
    std::string name;
    const Kernel* kernel;
    Module* module;
    unsigned most_dynamic = MOST_STATIC_SHARED;
};

struct Event {
    Moment moment;
    std::shared_ptr<Graph> capture;
    std::shared_ptr<double> when = std::make_shared<double>(0); // milliseconds
};

// Handles are the addresses of these.
std::map<void*, std::shared_ptr<Stream>> streams;
std::set<Event*> events;
std::set<Module*> modules;
std::map<Function*, std::unique_ptr<Function>> functions;
std::set<std::shared_ptr<Graph>*> graphs, ready_graphs;
char context;

std::shared_ptr<Stream> stream_of(void* handle) {
    static const std::shared_ptr<Stream> standard = new_stream();
    if (!handle) return standard;
    auto found = streams.find(handle);
    return found == streams.end() ? nullptr : found->second;
}

double now() {
    auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double, std::milli>(since).count();
}

Operation work(std::function<void()> function) { return {std::move(function), {}}; }

// Waits, unless the stream is being captured.
Result finish(Stream& stream, const Moment& moment) {
    if (stream.capture) {
        stream.capture_broken = true;
        return STREAM_CAPTURE_UNSUPPORTED;
    }
    wait_for(moment);
    return lost ? LAUNCH_FAILED : SUCCESS;
}

Result copy(void* to, const void* from, size_t bytes, void* stream_handle) {
    auto stream = stream_of(stream_handle);
    if (!stream) return INVALID_HANDLE;
    if (fault_is_due("copy")) return UNKNOWN;
    bool to_device = is_device(to, bytes), from_device = is_device(from, bytes);
    if (!to_device && !from_device) return INVALID_VALUE;
    if (!from_device && !is_pinned(from, bytes)) {
        // The driver reads memory that is not pinned at once.
        if (stream->capture) return STREAM_CAPTURE_UNSUPPORTED;
        auto bytes_now = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + bytes);
        start(*stream, work([=] { memcpy(to, bytes_now->data(), bytes); }));
        return SUCCESS;
    }
    start(*stream, work([=] { memmove(to, from, bytes); }));
    // It also writes memory that is not pinned before it returns.
    if (!to_device && !is_pinned(to, bytes)) return finish(*stream, stream->now(stream));
    return SUCCESS;
}

// A copy that is done when the function returns. It does not wait for the program's streams.
Result copy_now(void* to, const void* from, size_t bytes) {
    if (fault_is_due("copy")) return UNKNOWN;
    if (!is_device(to, bytes) && !is_device(from, bytes)) return INVALID_VALUE;
    DeviceIsOpen open;
    memmove(to, from, bytes);
    return SUCCESS;
}

struct Shape {
    Dim blocks, threads;
    unsigned shared;
};

Result launch(Function* handle, const Shape& shape, void* stream_handle, void** params) {
    auto stream = stream_of(stream_handle);
    auto found = functions.find(handle);
    if (!stream || found == functions.end()) return INVALID_HANDLE;
    const Function& function = *found->second;
    const auto& [blocks, threads, shared] = shape;
    unsigned long count = (unsigned long)threads.x * threads.y * threads.z;
    unsigned most = function.kernel->most_threads ? function.kernel->most_threads : MOST_THREADS;
    if (!blocks.x || !blocks.y || !blocks.z || !count || blocks.x >> 31 || blocks.y >> 16 || blocks.z >> 16)
        return INVALID_VALUE;
    if (count > MOST_THREADS || shared > function.most_dynamic) return INVALID_VALUE;
    if (count > most || fault_is_due("launch")) return LAUNCH_OUT_OF_RESOURCES;
    auto args = std::make_shared<std::string>((const char*)params[0], function.kernel->args_bytes);
    start(*stream, work([=, name = function.name, kernel = function.kernel] {
        if (lost) return;
        if (fault_is_due("lost")) {
            lost = true;
            forget_everything();
            return;
        }
        run({name, kernel, args->data(), blocks, threads, shared});
    }));
    return SUCCESS;
}

} // namespace

#define API extern "C" __attribute__((visibility("default"))) Result
#define ENTER                                                                                                          \
    std::lock_guard<std::recursive_mutex> lock(everything);                                                            \
    if (!initialised) return NOT_INITIALIZED;                                                                          \
    if (lost) return LAUNCH_FAILED;
#define ENTER_CONTEXT                                                                                                  \
    ENTER                                                                                                              \
    if (!context_is_current) return INVALID_CONTEXT;

// Functions for tests. Tests recognise the emulator by their presence.
#define EMULATOR extern "C" __attribute__((visibility("default")))

// Makes the `after`-th allocation, pinned allocation, copy, launch, compilation or load of a module from now fail. With
// "lost", the device is lost at that kernel.
EMULATOR void emulatorFail(const char* kind, long after) {
    std::lock_guard<std::recursive_mutex> lock(everything);
    faults[kind] = after;
}

// Ends all faults. Work that was started and not done is dropped.
EMULATOR void emulatorRepair() {
    std::lock_guard<std::recursive_mutex> lock(everything);
    faults.clear();
    if (lost) forget_everything();
    lost = false;
}

EMULATOR bool emulatorFaultIsDue(const char* kind) {
    std::lock_guard<std::recursive_mutex> lock(everything);
    return fault_is_due(kind);
}

// The most memory in use since the last call.
EMULATOR size_t emulatorPeak() {
    std::lock_guard<std::recursive_mutex> lock(everything);
    size_t peak = memory_peak();
    forget_peak();
    return peak;
}

// The driver and its device.

// The most shared memory that a block may ask for.
static int most_shared() { return (int)option("EMULATOR_SHARED", MOST_SHARED); }

API cuInit(unsigned) {
    std::lock_guard<std::recursive_mutex> lock(everything);
    if (!initialised) {
        // Kernels look up the functions that they call among global symbols.
        Dl_info self;
        if (!dladdr((void*)cuInit, &self) || !dlopen(self.dli_fname, RTLD_NOW | RTLD_GLOBAL)) return UNKNOWN;
        watch_faults();
        ask_for_faults(getenv("EMULATOR_FAIL"));
        initialised = true;
    }
    return SUCCESS;
}

API cuGetErrorName(int result, const char** text) {
    for (const Named& named : RESULTS)
        if (named.result == result) return *text = named.name, SUCCESS;
    return INVALID_VALUE;
}

API cuGetErrorString(int result, const char** text) {
    for (const Named& named : RESULTS)
        if (named.result == result) return *text = named.text, SUCCESS;
    return INVALID_VALUE;
}

API cuDriverGetVersion(int* version) { return *version = 13000, SUCCESS; }
API cuDeviceGetCount(int* count) { return *count = 1, SUCCESS; }
API cuDeviceGet(int* device, int ordinal) { return *device = 0, ordinal ? INVALID_DEVICE : SUCCESS; }
API cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = memory_total(), SUCCESS; }

API cuDeviceGetName(char* name, int room, int) {
    snprintf(name, room, "Emulated GPU");
    return SUCCESS;
}

API cuDeviceGetUuid_v2(char* bytes, int) {
    memset(bytes, 0, 16);
    return SUCCESS;
}

API cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
    case 1: *value = MOST_THREADS; break;             // threads of a block
    case 8: *value = MOST_STATIC_SHARED; break;       // shared memory of a block
    case 10: *value = 32; break;                      // threads of a warp
    case 13: case 36: *value = 1000000; break;        // clocks
    case 16: *value = option("EMULATOR_MULTIPROCESSORS", 132); break;
    case 33: case 34: case 50: *value = 0; break;     // places on the bus
    case 37: *value = 1024; break;                    // bits of the memory bus
    case 38: *value = 1 << 20; break;                 // level 2 cache
    case 39: *value = 2048; break;                    // threads of a multiprocessor
    case 75: *value = 9; break;                       // capability
    case 76: *value = 0; break;
    case 81: *value = most_shared() + 1024; break;    // shared memory of a multiprocessor
    case 97: *value = most_shared(); break;           // shared memory that a block may ask for
    default: *value = 0;
    }
    return SUCCESS;
}

API cuDevicePrimaryCtxRetain(void** handle, int) {
    ENTER
    return *handle = &context, SUCCESS;
}
API cuDevicePrimaryCtxRelease_v2(int) {
    ENTER
    return SUCCESS;
}
API cuCtxSetCurrent(void* handle) {
    ENTER
    context_is_current = handle == &context;
    return handle && handle != &context ? INVALID_CONTEXT : SUCCESS;
}
API cuCtxGetCurrent(void** handle) {
    ENTER
    return *handle = context_is_current ? &context : nullptr, SUCCESS;
}
API cuCtxSynchronize() {
    ENTER_CONTEXT
    wait_for_everything();
    return lost ? LAUNCH_FAILED : SUCCESS;
}
API cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    ENTER_CONTEXT
    return *least = 0, *greatest = -5, SUCCESS;
}

// Memory.

API cuMemAlloc_v2(void** first, size_t bytes) {
    ENTER_CONTEXT
    if (!bytes) return INVALID_VALUE;
    if (fault_is_due("allocation") || !(*first = allocate(bytes))) return OUT_OF_MEMORY;
    return SUCCESS;
}
API cuMemFree_v2(void* first) {
    ENTER_CONTEXT
    // Like the driver. Pending work may use the memory.
    wait_for_everything();
    if (!first) return SUCCESS;
    return give_back(first) ? lost ? LAUNCH_FAILED : SUCCESS : INVALID_VALUE;
}
API cuMemGetInfo_v2(size_t* free, size_t* total) {
    ENTER_CONTEXT
    return *free = memory_free(), *total = memory_total(), SUCCESS;
}
API cuMemHostAlloc(void** first, size_t bytes, unsigned) {
    ENTER_CONTEXT
    if (!bytes) return INVALID_VALUE;
    if (fault_is_due("pinned") || !(*first = allocate_pinned(bytes))) return OUT_OF_MEMORY;
    return SUCCESS;
}
API cuMemFreeHost(void* first) {
    ENTER_CONTEXT
    wait_for_everything();
    return give_back_pinned(first) ? SUCCESS : INVALID_VALUE;
}
API cuMemHostRegister_v2(void* first, size_t bytes, unsigned) {
    ENTER_CONTEXT
    if (is_pinned(first, 1)) return INVALID_VALUE;
    pin(first, bytes);
    return SUCCESS;
}
API cuMemHostUnregister(void* first) {
    ENTER_CONTEXT
    wait_for_everything();
    return unpin(first) ? SUCCESS : INVALID_VALUE;
}
API cuMemHostGetDevicePointer_v2(void** there, void* first, unsigned) {
    ENTER_CONTEXT
    return *there = first, is_pinned(first, 1) ? SUCCESS : INVALID_VALUE;
}

API cuMemcpyHtoDAsync_v2(void* to, const void* from, size_t bytes, void* stream) {
    ENTER_CONTEXT
    return is_device(to, bytes) ? copy(to, from, bytes, stream) : INVALID_VALUE;
}
API cuMemcpyDtoHAsync_v2(void* to, const void* from, size_t bytes, void* stream) {
    ENTER_CONTEXT
    return is_device(from, bytes) ? copy(to, from, bytes, stream) : INVALID_VALUE;
}
API cuMemcpyDtoDAsync_v2(void* to, const void* from, size_t bytes, void* stream) {
    ENTER_CONTEXT
    return is_device(to, bytes) && is_device(from, bytes) ? copy(to, from, bytes, stream) : INVALID_VALUE;
}
API cuMemcpyHtoD_v2(void* to, const void* from, size_t bytes) {
    ENTER_CONTEXT
    return is_device(to, bytes) ? copy_now(to, from, bytes) : INVALID_VALUE;
}
API cuMemcpyDtoH_v2(void* to, const void* from, size_t bytes) {
    ENTER_CONTEXT
    return is_device(from, bytes) ? copy_now(to, from, bytes) : INVALID_VALUE;
}
API cuMemcpyDtoD_v2(void* to, const void* from, size_t bytes) {
    ENTER_CONTEXT
    return is_device(to, bytes) && is_device(from, bytes) ? copy_now(to, from, bytes) : INVALID_VALUE;
}
API cuMemsetD8Async(void* to, unsigned char value, size_t bytes, void* handle) {
    ENTER_CONTEXT
    auto stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    if (!is_device(to, bytes)) return INVALID_VALUE;
    start(*stream, work([=] { memset(to, value, bytes); }));
    return SUCCESS;
}
API cuMemsetD8_v2(void* to, unsigned char value, size_t bytes) {
    ENTER_CONTEXT
    if (!is_device(to, bytes)) return INVALID_VALUE;
    DeviceIsOpen open;
    memset(to, value, bytes);
    return SUCCESS;
}

// Streams and events.

API cuStreamCreate(void** handle, unsigned) {
    ENTER_CONTEXT
    auto stream = new_stream();
    streams[stream.get()] = stream;
    return *handle = stream.get(), SUCCESS;
}
API cuStreamCreateWithPriority(void** handle, unsigned flags, int) { return cuStreamCreate(handle, flags); }
API cuStreamDestroy_v2(void* handle) {
    ENTER_CONTEXT
    auto stream = stream_of(handle);
    if (!handle || !stream) return INVALID_HANDLE;
    wait_for(stream->now(stream));
    streams.erase(handle);
    return SUCCESS;
}
API cuStreamSynchronize(void* handle) {
    ENTER_CONTEXT
    auto stream = stream_of(handle);
    return stream ? finish(*stream, stream->now(stream)) : INVALID_HANDLE;
}
API cuStreamQuery(void* handle) {
    ENTER_CONTEXT
    auto stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    if (has_passed(stream->now(stream))) return SUCCESS;
    // A program that polls must make progress.
    wait_for({stream, stream->done + 1});
    return NOT_READY;
}
API cuStreamWaitEvent(void* handle, Event* event, unsigned) {
    ENTER_CONTEXT
    auto stream = stream_of(handle);
    if (!stream || !events.count(event)) return INVALID_HANDLE;
    if (event->capture) {
        // The stream joins the capture. Operations are captured in a valid order.
        if (stream->capture && stream->capture != event->capture) return STREAM_CAPTURE_UNSUPPORTED;
        stream->capture = event->capture;
    } else if (event->moment.stream) {
        start(*stream, {nullptr, event->moment});
    }
    return SUCCESS;
}
API cuLaunchHostFunc(void* handle, void (*function)(void*), void* data) {
    ENTER_CONTEXT
    auto stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    start(*stream, work([=] { function(data); }));
    return SUCCESS;
}
API cuEventCreate(Event** event, unsigned) {
    ENTER_CONTEXT
    events.insert(*event = new Event);
    return SUCCESS;
}
API cuEventDestroy_v2(Event* event) {
    ENTER_CONTEXT
    if (!events.erase(event)) return INVALID_HANDLE;
    delete event;
    return SUCCESS;
}
API cuEventRecord(Event* event, void* handle) {
    ENTER_CONTEXT
    auto stream = stream_of(handle);
    if (!stream || !events.count(event)) return INVALID_HANDLE;
    event->capture = stream->capture;
    if (event->capture) return SUCCESS;
    start(*stream, work([when = event->when] { *when = now(); }));
    event->moment = stream->now(stream);
    return SUCCESS;
}
API cuEventQuery(Event* event) {
    ENTER_CONTEXT
    if (!events.count(event)) return INVALID_HANDLE;
    if (has_passed(event->moment)) return SUCCESS;
    wait_for({event->moment.stream, event->moment.stream->done + 1});
    return lost ? LAUNCH_FAILED : NOT_READY;
}
API cuEventSynchronize(Event* event) {
    ENTER_CONTEXT
    if (!events.count(event)) return INVALID_HANDLE;
    if (event->capture) return STREAM_CAPTURE_UNSUPPORTED;
    wait_for(event->moment);
    return lost ? LAUNCH_FAILED : SUCCESS;
}
API cuEventElapsedTime_v2(float* milliseconds, Event* from, Event* to) {
    ENTER_CONTEXT
    if (!events.count(from) || !events.count(to)) return INVALID_HANDLE;
    if (!has_passed(from->moment) || !has_passed(to->moment)) return NOT_READY;
    return *milliseconds = *to->when - *from->when, SUCCESS;
}
API cuEventElapsedTime(float* milliseconds, Event* from, Event* to) {
    return cuEventElapsedTime_v2(milliseconds, from, to);
}

// Kernels.

API cuModuleLoadData(Module** handle, const void* image) {
    ENTER_CONTEXT
    // An ELF file for this CPU, preceded by its length; nvrtc.cpp makes it.
    static const char MAGIC[8] = {'E', 'M', 'U', 'C', 'U', 'B', 'I', 'N'};
    if (memcmp(image, MAGIC, sizeof MAGIC) || fault_is_due("module")) return INVALID_IMAGE;
    size_t bytes;
    memcpy(&bytes, (const char*)image + 8, sizeof bytes);
    char name[] = "/tmp/emulator-XXXXXX";
    int file = mkstemp(name);
    bool written = file >= 0 && write(file, (const char*)image + 16, bytes) == (ssize_t)bytes;
    if (file >= 0) close(file);
    void* library = written ? dlopen(name, RTLD_NOW | RTLD_LOCAL) : nullptr;
    if (file >= 0) unlink(name);
    if (!library) {
        const char* why = dlerror();
        fprintf(stderr, "emulator: a module cannot be loaded: %s\n", why ? why : "no room for it");
        return INVALID_IMAGE;
    }
    modules.insert(*handle = new Module{library});
    return SUCCESS;
}
API cuModuleUnload(Module* module) {
    ENTER_CONTEXT
    wait_for_everything();
    if (!modules.erase(module)) return INVALID_HANDLE;
    for (auto i = functions.begin(); i != functions.end();)
        i = i->first->module == module ? functions.erase(i) : std::next(i);
    dlclose(module->library);
    delete module;
    return SUCCESS;
}
API cuModuleGetFunction(Function** handle, Module* module, const char* name) {
    ENTER_CONTEXT
    if (!modules.count(module)) return INVALID_HANDLE;
    auto kernel = (const Kernel*)dlsym(module->library, (std::string("emulator_kernel_") + name).c_str());
    if (!kernel) return NOT_FOUND;
    auto function = std::make_unique<Function>(Function{name, kernel, module});
    *handle = function.get();
    functions[*handle] = std::move(function);
    return SUCCESS;
}
API cuFuncGetAttribute(int* value, int attribute, Function* handle) {
    ENTER_CONTEXT
    if (!functions.count(handle)) return INVALID_HANDLE;
    switch (attribute) {
    case 0: *value = handle->kernel->most_threads ? handle->kernel->most_threads : MOST_THREADS; break;
    case 8: *value = handle->most_dynamic; break;
    // Static shared memory is known and checked when the kernel runs.
    default: *value = 0;
    }
    return SUCCESS;
}
API cuFuncSetAttribute(Function* handle, int attribute, int value) {
    ENTER_CONTEXT
    if (!functions.count(handle)) return INVALID_HANDLE;
    if (attribute != 8) return SUCCESS;
    if (value < 0 || value > most_shared()) return INVALID_VALUE;
    handle->most_dynamic = value;
    return SUCCESS;
}
API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function*, int threads, size_t) {
    ENTER_CONTEXT
    return *blocks = 2048 / threads, SUCCESS;
}
API cuLaunchKernel(Function* function, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz,
                   unsigned shared, void* stream, void** params, void** extra) {
    ENTER_CONTEXT
    if (extra || !params) return INVALID_VALUE;
    return launch(function, {{x, y, z}, {tx, ty, tz}, shared}, stream, params);
}

struct LaunchConfig {
    Dim blocks, threads;
    unsigned shared;
    void* stream;
    void* attributes; // hints
    unsigned attribute_count;
};
API cuLaunchKernelEx(const LaunchConfig* config, Function* function, void** params, void** extra) {
    ENTER_CONTEXT
    if (extra || !params) return INVALID_VALUE;
    return launch(function, {config->blocks, config->threads, config->shared}, config->stream, params);
}

// Graphs.

API cuStreamBeginCapture_v2(void* handle, int) {
    ENTER_CONTEXT
    auto stream = stream_of(handle);
    if (!handle || !stream) return INVALID_HANDLE;
    if (stream->capture) return ILLEGAL_STATE;
    stream->capture = std::make_shared<Graph>();
    stream->capture_origin = true;
    stream->capture_broken = false;
    return SUCCESS;
}
API cuStreamEndCapture(void* handle, std::shared_ptr<Graph>** graph) {
    ENTER_CONTEXT
    auto stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    if (!stream->capture || !stream->capture_origin) return STREAM_CAPTURE_UNMATCHED;
    auto captured = stream->capture;
    bool broken = false;
    for (auto& [_, other] : streams) {
        if (other->capture != captured) continue;
        broken |= other->capture_broken;
        other->capture = nullptr;
        other->capture_origin = other->capture_broken = false;
    }
    *graph = nullptr;
    if (broken) return STREAM_CAPTURE_INVALIDATED;
    graphs.insert(*graph = new std::shared_ptr<Graph>(captured));
    return SUCCESS;
}
API cuStreamIsCapturing(void* handle, int* status) {
    ENTER_CONTEXT
    auto stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    return *status = !stream->capture ? 0 : stream->capture_broken ? 2 : 1, SUCCESS;
}
API cuGraphInstantiateWithFlags(std::shared_ptr<Graph>** ready, std::shared_ptr<Graph>* graph, unsigned long long) {
    ENTER_CONTEXT
    if (!graphs.count(graph)) return INVALID_HANDLE;
    ready_graphs.insert(*ready = new std::shared_ptr<Graph>(*graph));
    return SUCCESS;
}
API cuGraphLaunch(std::shared_ptr<Graph>* graph, void* handle) {
    ENTER_CONTEXT
    auto stream = stream_of(handle);
    if (!stream || !ready_graphs.count(graph)) return INVALID_HANDLE;
    if (fault_is_due("launch")) return LAUNCH_OUT_OF_RESOURCES;
    for (const Operation& operation : (*graph)->operations) start(*stream, operation);
    return SUCCESS;
}
API cuGraphUpload(std::shared_ptr<Graph>* graph, void*) {
    ENTER_CONTEXT
    return ready_graphs.count(graph) ? SUCCESS : INVALID_HANDLE;
}
API cuGraphDestroy(std::shared_ptr<Graph>* graph) {
    ENTER_CONTEXT
    if (!graphs.erase(graph)) return INVALID_HANDLE;
    delete graph;
    return SUCCESS;
}
API cuGraphExecDestroy(std::shared_ptr<Graph>* graph) {
    ENTER_CONTEXT
    if (!ready_graphs.erase(graph)) return INVALID_HANDLE;
    delete graph;
    return SUCCESS;
}
