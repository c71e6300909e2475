// Features of CUDA C++ that C++ lacks. Kernels are compiled with this in front of them.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "interface.h"

#define __CUDA_ARCH__ 900
#define __device__
#define __host__
#define __global__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define threadIdx (emulator_thread->thread)
#define blockIdx (emulator_thread->block)
#define blockDim (emulator_thread->threads)
#define gridDim (emulator_thread->blocks)
#define warpSize 32

// Vectors, aligned as on the device, so that a misaligned load faults.
#define EMULATOR_VECTORS(T, name, align2, align4)                                                                      \
    struct __align__(align2) name##2 { T x, y; };                                                                      \
    struct name##3 { T x, y, z; };                                                                                     \
    struct __align__(align4) name##4 { T x, y, z, w; };                                                                \
    static inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                                  \
    static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATOR_VECTORS(signed char, char, 2, 4)
EMULATOR_VECTORS(unsigned char, uchar, 2, 4)
EMULATOR_VECTORS(short, short, 4, 8)
EMULATOR_VECTORS(unsigned short, ushort, 4, 8)
EMULATOR_VECTORS(int, int, 8, 16)
EMULATOR_VECTORS(unsigned, uint, 8, 16)
EMULATOR_VECTORS(float, float, 8, 16)
EMULATOR_VECTORS(double, double, 16, 16)
EMULATOR_VECTORS(long long, longlong, 16, 16)
EMULATOR_VECTORS(unsigned long long, ulonglong, 16, 16)
#undef EMULATOR_VECTORS

// Bits.

template <class To, class From> static inline To emulator_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "bits of the same size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
static inline float __int_as_float(int x) { return emulator_bits<float>(x); }
static inline int __float_as_int(float x) { return emulator_bits<int>(x); }
static inline float __uint_as_float(unsigned x) { return emulator_bits<float>(x); }
static inline unsigned __float_as_uint(float x) { return emulator_bits<unsigned>(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned __brev(unsigned x) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= (x >> i & 1) << (31 - i);
    return r;
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) {
        unsigned choice = selector >> (4 * i) & 15, byte = bytes >> (8 * (choice & 7)) & 255;
        if (choice & 8) byte = byte & 128 ? 255 : 0;
        r |= byte << (8 * i);
    }
    return r;
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned n) {
    return (((uint64_t)high << 32 | low) << (n & 31)) >> 32;
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
    return ((uint64_t)high << 32 | low) >> (n & 31);
}
static inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; i++) c += (int)(signed char)(a >> (8 * i)) * (int)(signed char)(b >> (8 * i));
    return c;
}
static inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    for (int i = 0; i < 4; i++) c += (a >> (8 * i) & 255) * (b >> (8 * i) & 255);
    return c;
}
static inline unsigned __vsub4(unsigned a, unsigned b) {
    unsigned r = 0;
    for (int i = 0; i < 32; i += 8) r |= ((a >> i) - (b >> i) & 255) << i;
    return r;
}
static inline unsigned __vadd4(unsigned a, unsigned b) {
    unsigned r = 0;
    for (int i = 0; i < 32; i += 8) r |= ((a >> i) + (b >> i) & 255) << i;
    return r;
}
static inline unsigned __umulhi(unsigned a, unsigned b) { return (uint64_t)a * b >> 32; }

// Numbers. The compiler fuses products and sums like the device's, except those with explicit rounding.

#if defined(__x86_64__)
#define EMULATOR_ROUNDED(x) __asm__("" : "+x"(x))
typedef _Float16 EmulatorHalf;
#else
#define EMULATOR_ROUNDED(x) __asm__("" : "+w"(x))
typedef __fp16 EmulatorHalf;
#endif
static inline float __fmul_rn(float a, float b) {
    float r = a * b;
    EMULATOR_ROUNDED(r);
    return r;
}
static inline float __fadd_rn(float a, float b) {
    float r = a + b;
    EMULATOR_ROUNDED(r);
    return r;
}
static inline float __fsub_rn(float a, float b) {
    float r = a - b;
    EMULATOR_ROUNDED(r);
    return r;
}
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __frcp_rn(float a) { return 1 / a; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float rsqrtf(float x) { return 1 / sqrtf(x); }
static inline float __frsqrt_rn(float x) { return 1 / sqrtf(x); }
// The C library declares these names.
#define __expf expf
#define __logf logf
#define __sinf sinf
#define __cosf cosf
#define __powf powf
static inline float __saturatef(float x) { return x > 0 ? x < 1 ? x : 1 : 0; }
static inline int __float2int_rn(float x) { return (int)nearbyintf(x); }
static inline int __float2int_rz(float x) { return (int)x; }
static inline unsigned __float2uint_rn(float x) { return (unsigned)nearbyintf(x); }
static inline float __int2float_rn(int x) { return (float)x; }
static inline float __uint2float_rn(unsigned x) { return (float)x; }

template <class A, class B> static inline auto min(A a, B b) -> decltype(a + b) {
    typedef decltype(a + b) T;
    return (T)b < (T)a ? (T)b : (T)a;
}
template <class A, class B> static inline auto max(A a, B b) -> decltype(a + b) {
    typedef decltype(a + b) T;
    return (T)a < (T)b ? (T)b : (T)a;
}
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }

// Memory.

static inline size_t __cvta_generic_to_shared(const void* p) { return emulator_shared_address(p); }
static inline size_t __cvta_generic_to_global(const void* p) { return (size_t)p; }
template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> static inline T __ldcg(const T* p) { return *p; }
template <class T> static inline T __ldcs(const T* p) { return *p; }
template <class T> static inline T __ldlu(const T* p) { return *p; }
template <class T> static inline void __stcg(T* p, T x) { *p = x; }
template <class T> static inline void __stcs(T* p, T x) { *p = x; }

static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_block() { __threadfence(); }
static inline void __threadfence_system() { __threadfence(); }

template <class T, class Change> static inline T emulator_atomic(T* p, Change change) {
    T old, next;
    __atomic_load(p, &old, __ATOMIC_SEQ_CST);
    do next = change(old);
    while (!__atomic_compare_exchange(p, &old, &next, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return old;
}
// The second type is the first one, whatever type the argument has.
template <class T> struct EmulatorSame { typedef T Type; };
#define EMULATOR_ATOMIC(name, expression)                                                                              \
    template <class T> static inline T name(T* p, typename EmulatorSame<T>::Type x) {                                  \
        return emulator_atomic(p, [x](T old) -> T { return expression; });                                            \
    }
EMULATOR_ATOMIC(atomicAdd, old + x)
EMULATOR_ATOMIC(atomicSub, old - x)
EMULATOR_ATOMIC(atomicMax, old < x ? x : old)
EMULATOR_ATOMIC(atomicMin, x < old ? x : old)
EMULATOR_ATOMIC(atomicAnd, old & x)
EMULATOR_ATOMIC(atomicOr, old | x)
EMULATOR_ATOMIC(atomicXor, old ^ x)
EMULATOR_ATOMIC(atomicExch, ((void)old, x))
EMULATOR_ATOMIC(atomicInc, old >= x ? 0 : old + 1)
#undef EMULATOR_ATOMIC
template <class T>
static inline T atomicCAS(T* p, typename EmulatorSame<T>::Type compare, typename EmulatorSame<T>::Type x) {
    return emulator_atomic(p, [=](T old) -> T { return old == compare ? x : old; });
}

// Threads of a block.

static inline void __syncthreads() { emulator_barrier(0, 0, false); }
static inline int __syncthreads_count(int truth) { return emulator_barrier(0, 0, truth); }
static inline int __syncthreads_or(int truth) { return emulator_barrier(0, 0, truth) > 0; }
static inline int __syncthreads_and(int truth) { return emulator_barrier(0, 0, !truth) == 0; }
static inline void __nanosleep(unsigned) {}

#define EMULATOR_EACH_LANE(i, mask)                                                                                    \
    for (unsigned i = 0; i < 32; i++)                                                                                  \
        if ((mask) >> i & 1)

static inline void __syncwarp(unsigned mask = 0xffffffffu) {
    emulator_meet(mask, [](void* const*, unsigned) {}, nullptr);
}
static inline unsigned __activemask() { return 0xffffffffu; }

static inline unsigned __ballot_sync(unsigned mask, int truth) {
    struct Mine {
        bool truth;
        unsigned all;
    } mine = {truth != 0, 0};
    emulator_meet(mask, [](void* const* lanes, unsigned mask) {
        unsigned all = 0;
        EMULATOR_EACH_LANE(i, mask) all |= (unsigned)((Mine*)lanes[i])->truth << i;
        EMULATOR_EACH_LANE(i, mask) ((Mine*)lanes[i])->all = all;
    }, &mine);
    return mine.all;
}
static inline int __any_sync(unsigned mask, int truth) { return __ballot_sync(mask, truth) != 0; }
static inline int __all_sync(unsigned mask, int truth) { return __ballot_sync(mask, truth) == mask; }

// Returns the value of lane `from` to each lane.
template <class T> static inline T emulator_shuffle(unsigned mask, T value, unsigned from) {
    struct Mine {
        T value;
        unsigned from;
        T result;
    } mine = {value, from, value};
    emulator_meet(mask, [](void* const* lanes, unsigned mask) {
        EMULATOR_EACH_LANE(i, mask) {
            Mine* mine = (Mine*)lanes[i];
            if (!(mask >> mine->from & 1)) emulator_fail("a shuffle reads from a lane that is not in its mask");
            mine->result = ((Mine*)lanes[mine->from])->value;
        }
    }, &mine);
    return mine.result;
}
static inline unsigned emulator_lane() { return emulator_thread->number % 32; }
template <class T> static inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    unsigned mine = emulator_lane();
    return emulator_shuffle(mask, value, (mine & ~(width - 1)) | (lane & (width - 1)));
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    unsigned mine = emulator_lane(), from = mine ^ bits;
    return emulator_shuffle(mask, value, (from & (width - 1)) + (mine & ~(width - 1)) == from ? from : mine);
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    unsigned mine = emulator_lane();
    return emulator_shuffle(mask, value, (mine & (width - 1)) >= delta ? mine - delta : mine);
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    unsigned mine = emulator_lane();
    return emulator_shuffle(mask, value, (mine & (width - 1)) + delta < (unsigned)width ? mine + delta : mine);
}
#define EMULATOR_REDUCE(name, T, expression)                                                                           \
    static inline T name(unsigned mask, T value) {                                                                     \
        struct Mine {                                                                                                  \
            T value, result;                                                                                           \
        } mine = {value, value};                                                                                       \
        emulator_meet(mask, [](void* const* lanes, unsigned mask) {                                                    \
            bool first = true;                                                                                         \
            T a = 0;                                                                                                   \
            EMULATOR_EACH_LANE(i, mask) {                                                                              \
                T b = ((Mine*)lanes[i])->value;                                                                        \
                a = first ? b : expression;                                                                            \
                first = false;                                                                                         \
            }                                                                                                          \
            EMULATOR_EACH_LANE(i, mask) ((Mine*)lanes[i])->result = a;                                                 \
        }, &mine);                                                                                                     \
        return mine.result;                                                                                            \
    }
EMULATOR_REDUCE(__reduce_add_sync, unsigned, a + b)
EMULATOR_REDUCE(__reduce_add_sync, int, a + b)
EMULATOR_REDUCE(__reduce_max_sync, unsigned, a < b ? b : a)
EMULATOR_REDUCE(__reduce_max_sync, int, a < b ? b : a)
EMULATOR_REDUCE(__reduce_min_sync, unsigned, b < a ? b : a)
EMULATOR_REDUCE(__reduce_min_sync, int, b < a ? b : a)
EMULATOR_REDUCE(__reduce_or_sync, unsigned, a | b)
EMULATOR_REDUCE(__reduce_and_sync, unsigned, a & b)
#undef EMULATOR_REDUCE

#include "ptx.h"
