// Shows that the emulator computes right results and finds errors. Each case is a separate process, because most cases
// end it.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

extern "C" {
int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(void**, int);
int cuCtxSetCurrent(void*);
int cuMemAlloc_v2(void**, size_t);
int cuMemHostAlloc(void**, size_t, unsigned);
int cuMemcpyHtoDAsync_v2(void*, const void*, size_t, void*);
int cuMemcpyDtoHAsync_v2(void*, const void*, size_t, void*);
int cuStreamCreate(void**, unsigned);
int cuStreamSynchronize(void*);
int cuStreamWaitEvent(void*, void*, unsigned);
int cuEventCreate(void**, unsigned);
int cuEventRecord(void*, void*);
int cuModuleLoadData(void**, const void*);
int cuModuleGetFunction(void**, void*, const char*);
int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
int nvrtcCreateProgram(void**, const char*, const char*, int, const char* const*, const char* const*);
int nvrtcCompileProgram(void*, int, const char* const*);
int nvrtcGetProgramLogSize(void*, size_t*);
int nvrtcGetProgramLog(void*, char*);
int nvrtcGetCUBINSize(void*, size_t*);
int nvrtcGetCUBIN(void*, char*);
}

namespace {

void expect(bool truth, const char* what) {
    if (truth) return;
    fprintf(stderr, "not so: %s\n", what);
    exit(1);
}
#define EXPECT(truth) expect(truth, #truth)

struct Args {
    float* x;
    unsigned count;
};

const char* KERNELS = R"(
struct Args { float* x; unsigned count; };
extern "C" __global__ void sum(const Args a) {
    __shared__ float sums[32];
    float x = threadIdx.x < a.count ? a.x[threadIdx.x] : 0;
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x == 0) {
        float total = 0;
        for (unsigned i = 0; i < blockDim.x / 32; i++) total += sums[i];
        a.x[0] = total;
    }
}
extern "C" __global__ void twice(const Args a) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.count) a.x[i] *= 2;
}
extern "C" __global__ void left_alone(const Args a) {
    if (threadIdx.x < 7) __syncthreads();
}
extern "C" __global__ void lanes_apart(const Args a) {
    if (threadIdx.x < 16) a.x[0] = __shfl_sync(0xffffffffu, a.x[0], 0);
}
extern "C" __global__ void beyond(const Args a) { a.x[0] = a.x[a.count]; }
// Reads the neighbour's number without waiting for it.
extern "C" __global__ void race(const Args a) {
    __shared__ float shared[64];
    shared[threadIdx.x] = threadIdx.x;
    float other = shared[63 - threadIdx.x];
    a.x[threadIdx.x] = other;
}
// A copy, with or without waiting for it.
extern "C" __global__ void ahead(const Args a) {
    __shared__ float shared[4];
    unsigned to = (unsigned)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(a.x));
    asm volatile("cp.async.commit_group;");
    if (a.count) asm volatile("cp.async.wait_group %0;" ::"n"(0));
    a.x[4] = shared[0];
}
)";

std::string compile(const char* source, std::string* image) {
    void* program;
    EXPECT(nvrtcCreateProgram(&program, source, "selftest.cu", 0, nullptr, nullptr) == 0);
    if (nvrtcCompileProgram(program, 0, nullptr) == 0) {
        size_t bytes;
        EXPECT(nvrtcGetCUBINSize(program, &bytes) == 0);
        image->resize(bytes);
        EXPECT(nvrtcGetCUBIN(program, &(*image)[0]) == 0);
        return "";
    }
    size_t bytes;
    nvrtcGetProgramLogSize(program, &bytes);
    std::string log(bytes, ' ');
    nvrtcGetProgramLog(program, &log[0]);
    return log;
}

struct Device {
    void *module, *stream;

    Device() {
        void* context;
        std::string image;
        EXPECT(cuInit(0) == 0 && cuDevicePrimaryCtxRetain(&context, 0) == 0 && cuCtxSetCurrent(context) == 0);
        EXPECT(cuStreamCreate(&stream, 1) == 0);
        std::string log = compile(KERNELS, &image);
        if (!log.empty()) fprintf(stderr, "%s\n", log.c_str());
        EXPECT(log.empty() && cuModuleLoadData(&module, image.data()) == 0);
    }
    float* numbers(const std::vector<float>& from) {
        void* there;
        EXPECT(cuMemAlloc_v2(&there, from.size() * 4) == 0);
        EXPECT(cuMemcpyHtoDAsync_v2(there, from.data(), from.size() * 4, stream) == 0);
        EXPECT(cuStreamSynchronize(stream) == 0);
        return static_cast<float*>(there);
    }
    void start(const char* name, float* x, unsigned count, unsigned threads, void* on = nullptr) {
        void* function;
        EXPECT(cuModuleGetFunction(&function, module, name) == 0);
        Args args = {x, count};
        void* params[] = {&args};
        EXPECT(cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, on ? on : stream, params, nullptr) == 0);
    }
    std::vector<float> read(float* x, size_t count) {
        std::vector<float> to(count);
        EXPECT(cuMemcpyDtoHAsync_v2(to.data(), x, count * 4, stream) == 0);
        EXPECT(cuStreamSynchronize(stream) == 0);
        return to;
    }
};

void computes() {
    Device d;
    float* x = d.numbers(std::vector<float>(200, 0.5f));
    d.start("sum", x, 200, 256);
    EXPECT(d.read(x, 1)[0] == 100);
    float* y = d.numbers(std::vector<float>(8, 1.0f));
    d.start("ahead", y, 1, 1);
    EXPECT(d.read(y, 5)[4] == 1);
    d.start("ahead", y, 0, 1);
    EXPECT(std::isnan(d.read(y, 5)[4]));
}

void waits() {
    Device d;
    void *pinned, *other, *event;
    EXPECT(cuMemHostAlloc(&pinned, 4, 0) == 0 && cuStreamCreate(&other, 1) == 0 && cuEventCreate(&event, 0) == 0);
    float* here = static_cast<float*>(pinned);
    float* x = d.numbers({1});
    *here = 0;
    d.start("twice", x, 1, 1);
    EXPECT(cuEventRecord(event, d.stream) == 0 && cuStreamWaitEvent(other, event, 0) == 0);
    EXPECT(cuMemcpyDtoHAsync_v2(here, x, 4, other) == 0);
    EXPECT(*here == 0);
    EXPECT(cuStreamSynchronize(other) == 0);
    EXPECT(*here == 2);
    // Pinned memory is read when the copy is done, not when it is started.
    EXPECT(cuMemcpyHtoDAsync_v2(x, here, 4, d.stream) == 0);
    *here = 5;
    EXPECT(d.read(x, 1)[0] == 5);
}

void left_alone() {
    Device d;
    float* x = d.numbers({1});
    d.start("left_alone", x, 1, 32);
    d.read(x, 1);
}

void lanes_apart() {
    Device d;
    float* x = d.numbers({1});
    d.start("lanes_apart", x, 1, 32);
    d.read(x, 1);
}

void beyond() {
    Device d;
    float* x = d.numbers(std::vector<float>(8));
    d.start("beyond", x, 8, 1);
    d.read(x, 1);
}

// Beyond by one number, not by a page.
void just_beyond() {
    Device d;
    float* x = d.numbers(std::vector<float>(7));
    d.start("beyond", x, 7, 1);
    d.read(x, 1);
}

void of_the_host() {
    Device d;
    float host[2] = {};
    d.start("beyond", host, 1, 1);
    cuStreamSynchronize(d.stream);
}

void by_the_host() {
    Device d;
    *d.numbers({1}) = 2;
}

void instruction() {
    std::string image, log = compile("extern \"C\" __global__ void k(const int a) { asm(\"brkpt;\"); }", &image);
    fprintf(stderr, "%s\n", log.c_str());
    exit(2);
}

// In the order of the threads, a race may have the right result.
void race() {
    Device d;
    float* x = d.numbers(std::vector<float>(64));
    for (int i = 0; i < 8; i++) {
        d.start("race", x, 64, 64);
        for (float y : d.read(x, 64))
            if (std::isnan(y)) fprintf(stderr, "a race shows\n"), exit(2);
    }
}

int failures = 0;

// Runs a case. `words` must be in its error message; without `words` it must succeed.
void run(const char* name, void (*body)(), const char* words, const char* variable = nullptr) {
    int ends[2];
    if (pipe(ends)) abort();
    pid_t child = fork();
    if (child == 0) {
        if (variable) putenv(const_cast<char*>(variable));
        dup2(ends[1], 2);
        body();
        _exit(0);
    }
    close(ends[1]);
    std::string told;
    char part[4096];
    for (ssize_t n; (n = ::read(ends[0], part, sizeof part)) > 0;) told.append(part, n);
    close(ends[0]);
    int status;
    waitpid(child, &status, 0);
    bool well = words ? status != 0 && told.find(words) != std::string::npos : status == 0;
    printf("%s %s\n", well ? "ok    " : "FAILED", name);
    if (!well) printf("%s", told.c_str()), failures++;
    fflush(stdout);
}

} // namespace

int main() {
    // Each case sets its own.
    for (const char* name : {"EMULATOR_GUARD", "EMULATOR_ORDER", "EMULATOR_FAIL", "EMULATOR_MEMORY"}) unsetenv(name);
    run("kernels compute", computes, nullptr);
    run("kernels compute in another order", computes, nullptr, "EMULATOR_ORDER=3");
    run("kernels compute while they are checked", computes, nullptr, "EMULATOR_GUARD=1");
    run("nothing is done before it is waited for", waits, nullptr);
    run("a barrier that not all reach", left_alone, "kernel left_alone, block (0, 0, 0)");
    run("lanes that do not meet", lanes_apart, "kernel lanes_apart, block (0, 0, 0)");
    run("a read beyond the end of memory", beyond, "kernel beyond, block (0, 0, 0), thread (0, 0, 0) touches");
    run("a read just beyond the end", just_beyond, "reads 4 bytes", "EMULATOR_GUARD=1");
    run("a kernel that reads the computer's memory", of_the_host, "far from the device's memory", "EMULATOR_GUARD=1");
    run("a program that writes the device's memory", by_the_host, "the program itself touches", "EMULATOR_GUARD=1");
    run("an instruction that is not known", instruction, "ptx_brkpt");
    run("a race", race, "a race shows", "EMULATOR_ORDER=1");
    return failures != 0;
}
