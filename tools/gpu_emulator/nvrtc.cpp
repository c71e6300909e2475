// The compiler of kernels: g++. Results are cached beside this library, because compiling takes seconds.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "translate.h"

enum Result { SUCCESS = 0, INVALID_INPUT = 3, INVALID_PROGRAM = 4, COMPILATION = 6 };

#define API extern "C" __attribute__((visibility("default"))) Result

namespace {

struct Program {
    std::string source, file, log, image;
};

std::string folder() {
    Dl_info self;
    if (!dladdr((void*)folder, &self)) return ".";
    std::string path = self.dli_fname;
    return path.substr(0, path.rfind('/'));
}

std::string read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return file ? text.str() : "";
}

#if defined(__x86_64__)
// Nearly all CPUs have these: conversions of f16, and fused multiply-adds, as on the device.
const char* MACHINE = "-march=x86-64-v3";
#else
const char* MACHINE = "";
#endif

std::string command() {
    const char* compiler = getenv("CXX");
    std::string flags = " -x c++ -std=c++17 -O1 -w -shared -fPIC -fvisibility=hidden -fno-strict-aliasing -fno-exceptions"
                        " -fno-math-errno -fno-trapping-math -ffp-contract=fast -ftls-model=initial-exec ";
    // Checks every load and store: check.cpp.
    const char* guard = getenv("EMULATOR_GUARD");
    if (guard && *guard && *guard != '0')
        flags += "-fsanitize=kernel-address --param asan-instrumentation-with-call-threshold=0 --param asan-stack=0"
                 " --param asan-globals=0 ";
    return (compiler && *compiler ? compiler : "g++") + flags + MACHINE;
}

// Kernels are compiled for the kinds of weights that a model has. g++ would take longer for many such sets than once
// for all kinds.
std::string for_all_kinds(const std::string& source) {
    const char* DEFINE = "#define KINDS ";
    size_t at = source.find(DEFINE);
    if (at != 0 || source.compare(0, 16, "#define KINDS 0u") == 0) return source;
    return std::string(DEFINE) + "0xffffffffu" + source.substr(source.find('\n'));
}

unsigned long hash(const std::string& text, unsigned long h = 0xcbf29ce484222325ul) {
    for (unsigned char c : text) h = (h ^ c) * 0x100000001b3ul;
    return h;
}

// Runs g++. Returns the library, or nothing and a log.
std::string build(const std::string& text, const std::string& into, std::string& log) {
    std::string base = into + "." + std::to_string(getpid());
    std::ofstream(base + ".cpp") << text;
    std::string line = command() + " -I'" + folder() + "' '" + base + ".cpp' -o '" + base + ".so' > '" + base + ".log' 2>&1";
    bool made = system(line.c_str()) == 0;
    log = read(base + ".log");
    std::string library = made ? read(base + ".so") : "";
    if (made) rename((base + ".so").c_str(), into.c_str());
    for (const char* end : {".cpp", ".log", ".so"}) unlink((base + end).c_str());
    return library;
}

// Compiles, or uses the cached result of this or another process.
std::string build_once(const std::string& text, std::string& log) {
    std::string cache = folder() + "/compiled";
    mkdir(cache.c_str(), 0777);
    unsigned long key = hash(command(), hash(text));
    for (const char* head : {"interface.h", "device.h", "ptx.h"}) key = hash(read(folder() + "/" + head), key);
    char name[32];
    snprintf(name, sizeof name, "/%016lx.so", key);
    int lock = open((cache + name + ".lock").c_str(), O_CREAT | O_RDWR, 0666);
    flock(lock, LOCK_EX);
    std::string library = read(cache + name);
    if (library.empty()) library = build(text, cache + name, log);
    close(lock);
    return library;
}

} // namespace

API nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, SUCCESS; }

extern "C" __attribute__((visibility("default"))) const char* nvrtcGetErrorString(Result result) {
    return result == SUCCESS ? "NVRTC_SUCCESS" : result == COMPILATION ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR";
}

API nvrtcCreateProgram(Program** program, const char* source, const char* name, int heads, const char* const*,
                       const char* const*) {
    if (heads) return INVALID_INPUT;
    *program = new Program{source, name ? name : "default_program", "", ""};
    return SUCCESS;
}

API nvrtcDestroyProgram(Program** program) {
    delete *program;
    *program = nullptr;
    return SUCCESS;
}

API nvrtcCompileProgram(Program* program, int, const char* const*) {
    auto due = (bool (*)(const char*))dlsym(RTLD_DEFAULT, "emulatorFaultIsDue");
    if (due && due("compile")) {
        program->log = program->file + "(1): error: a failure that was asked for";
        return COMPILATION;
    }
    try {
        std::string source = for_all_kinds(program->source);
        std::string text = "#include \"device.h\"\n#line 1 \"" + program->file + "\"\n" +
                           emulator::translate(source, program->file);
        std::string library = build_once(text, program->log);
        if (library.empty()) return COMPILATION;
        unsigned long bytes = library.size();
        program->image = "EMUCUBIN" + std::string((char*)&bytes, sizeof bytes) + library;
        return SUCCESS;
    } catch (const std::runtime_error& error) {
        program->log = error.what();
        return COMPILATION;
    }
}

API nvrtcGetProgramLogSize(Program* program, size_t* size) { return *size = program->log.size() + 1, SUCCESS; }
API nvrtcGetProgramLog(Program* program, char* log) { return strcpy(log, program->log.c_str()), SUCCESS; }
API nvrtcGetCUBINSize(Program* program, size_t* size) {
    *size = program->image.size();
    return program->image.empty() ? INVALID_PROGRAM : SUCCESS;
}
API nvrtcGetCUBIN(Program* program, char* image) {
    memcpy(image, program->image.data(), program->image.size());
    return program->image.empty() ? INVALID_PROGRAM : SUCCESS;
}
