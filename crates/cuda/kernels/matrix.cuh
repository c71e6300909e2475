// Weight matrices in their layout on the device, and how each type's bytes become numbers.
//
// A row is groups of 32 weights. A type is an unpacker: it converts a group to one form, lanes with a scale and a
// minimum for every 16 of them: `weight = lane * scale - minimum`. Everything else is written once over this form.
// Codes are separate from scales where a block's length would leave them unaligned: weights.rs defines how blocks are
// split.

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define WARP 32
#define ALL_LANES 0xffffffffu
#define INFINITE __int_as_float(0x7f800000)

// A kernel may start while its predecessor still runs (program.rs decides when). Every kernel calls this function
// first, or after reading only data that no kernel writes. It returns when the predecessor has ended and all its writes
// are visible. From then on the next kernel may start.
__device__ inline void await_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Loads a line of device memory into the cache, before it is read.
__device__ inline void fetch_ahead(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// The kinds of weights that the kernels are compiled for. A model has few.
#ifndef KINDS
#define KINDS 0xffffffffu
#endif

// The order is that of weights.rs.
enum Kind {
    F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q5_K, Q6_K, IQ4_XS, MXFP4, MXFP4_PAIRS, AFFINE4, AFFINE8, Q4_1, Q5_0, Q5_1, Q3_K,
    IQ4_NL, Q2_K, NVFP4, IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, AFFINE2, AFFINE3, AFFINE5, AFFINE6, FP8
};

struct Mat {
    const u8* plane[3]; // codes, scales, biases; for experts, offsets in an expert's slot
    const u64* slots;   // [experts] the address of each expert's slot, 0 if it has none; null for other matrices
    u32 stride[3];      // bytes of a row in each plane
    u32 rows;
    u32 cols;
    u32 kind;
    u32 group;  // weights of a row that share a scale, if scales are separate
    u32 floats; // the kind of such scales
    u32 share;  // rows that share their scales
    u32 unused;
};

// The most matrices that a kernel multiplies with the same rows.
#define MOST_PRODUCTS 4

// Rows of one expert that are computed together.
struct Tile {
    u32 expert, first, count;
};

// A row of a matrix.
struct Row {
    const u8* codes;
    const u8* scales;
    const u8* biases;
};

struct Group {
    float lane[32];
    float scale[2], min[2]; // each for sixteen
};

// The address of an expert's slot, 0 if it has none. Other matrices have fixed addresses.
__device__ inline u64 slot_of(const Mat& m, u32 expert) { return m.slots ? m.slots[expert] : 0; }
__device__ inline bool absent(const Mat& m, u64 slot) { return m.slots && !slot; }

__device__ inline Row row_of(const Mat& m, u64 slot, u32 row) {
    u32 scales = m.share > 1 ? row / m.share : row;
    // The offset is added to the planes, because the compiler knows that these are in device memory.
    return Row{m.plane[0] + slot + (u64)row * m.stride[0], m.plane[1] + slot + (u64)scales * m.stride[1],
               m.plane[2] + slot + (u64)row * m.stride[2]};
}

// Loads a region of memory into the device's cache at once.
__device__ inline void fetch_ahead(const u8* from, u32 bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    // Whole groups of 16 bytes, from the region's first to its last.
    u64 start = (u64)from / 16 * 16;
    u32 size = (u32)((u64)from + bytes + 15 - start) / 16 * 16;
    if (bytes) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(start), "r"(size));
#endif
}

// The same for rows of a matrix, by one thread. Missing rows and experts do no harm.
__device__ inline void fetch_rows(const Mat& m, u64 slot, u32 first, u32 count) {
    if (first >= m.rows || absent(m, slot)) return;
    Row r = row_of(m, slot, first);
    count = min(count, m.rows - first);
    fetch_ahead(r.codes, count * m.stride[0]);
    fetch_ahead(r.scales, (m.share > 1 ? 1 : count) * m.stride[1]);
    fetch_ahead(r.biases, count * m.stride[2]);
}

__device__ inline float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ inline u16 float_to_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// Two f16 in a word, the first in the lower half.
__device__ inline u32 two_halves(float first, float second) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
}

__device__ inline float bf16_to_float(u16 bits) { return __int_as_float((u32)bits << 16); }

__device__ inline u32 byte_of(const uint4& words, u32 i) {
    u32 word = i < 4 ? words.x : i < 8 ? words.y : i < 12 ? words.z : words.w;
    return word >> (8 * (i & 3)) & 255;
}

__device__ inline u32 word_of(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

#define LOW_NIBBLES 0x0f0f0f0fu

// The four bytes of a word as floats, less an offset. A byte in the low bits of 2^23 is a float without a conversion,
// which would take twice as long.
__device__ inline void four_lanes(u32 bytes, float offset, float* lane) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        lane[i] = __int_as_float(__byte_perm(bytes, 0x4b000000u, 0x7540 | i)) - (8388608.0f + offset);
}

__device__ inline float float_at(u32 kind, const u8* plane, u32 i) {
    switch (kind) {
    case F32: return ((const float*)plane)[i];
    case F16: return half_to_float(((const u16*)plane)[i]);
    default: return bf16_to_float(((const u16*)plane)[i]);
    }
}

// A type's bytes of a group, and how to unpack them. Loading is separate from unpacking so that it can be done ahead.
template <u32 KIND> struct Unpack;

#if KINDS
#include "blocks.cuh"
#include "planes.cuh"
#include "grids.cuh"
#endif

template <u32 KIND> __device__ inline void unpack_group(const Mat& m, const Row& r, u32 index, Group& g) {
    Unpack<KIND>::unpack(m, Unpack<KIND>::load(m, r, index), index, g);
}

// The weights themselves, rounded as in the CPU's kernels.
__device__ inline float weight(const Group& g, int i) {
    return __fsub_rn(__fmul_rn(g.scale[i / 16], g.lane[i]), g.min[i / 16]);
}

// Calls `body` with the kind of a matrix as a constant. Only the kinds in KINDS, one bit each, are compiled.
#define WITH_KIND(kind, body)                                                                                          \
    switch (kind) {                                                                                                    \
        KIND_CASE(F32, body)                                                                                           \
        KIND_CASE(F16, body)                                                                                           \
        KIND_CASE(BF16, body)                                                                                          \
        KIND_CASE(Q8_0, body)                                                                                          \
        KIND_CASE(Q4_0, body)                                                                                          \
        KIND_CASE(Q4_K, body)                                                                                          \
        KIND_CASE(Q5_K, body)                                                                                          \
        KIND_CASE(Q6_K, body)                                                                                          \
        KIND_CASE(IQ4_XS, body)                                                                                        \
        KIND_CASE(MXFP4, body)                                                                                         \
        KIND_CASE(MXFP4_PAIRS, body)                                                                                   \
        KIND_CASE(AFFINE4, body)                                                                                       \
        KIND_CASE(AFFINE8, body)                                                                                       \
        KIND_CASE(Q4_1, body)                                                                                          \
        KIND_CASE(Q5_0, body)                                                                                          \
        KIND_CASE(Q5_1, body)                                                                                          \
        KIND_CASE(Q3_K, body)                                                                                          \
        KIND_CASE(IQ4_NL, body)                                                                                        \
        KIND_CASE(Q2_K, body)                                                                                          \
        KIND_CASE(NVFP4, body)                                                                                         \
        KIND_CASE(IQ1_S, body)                                                                                         \
        KIND_CASE(IQ1_M, body)                                                                                         \
        KIND_CASE(IQ2_XXS, body)                                                                                       \
        KIND_CASE(IQ2_XS, body)                                                                                        \
        KIND_CASE(IQ2_S, body)                                                                                         \
        KIND_CASE(IQ3_XXS, body)                                                                                       \
        KIND_CASE(IQ3_S, body)                                                                                         \
        KIND_CASE(AFFINE2, body)                                                                                       \
        KIND_CASE(AFFINE3, body)                                                                                       \
        KIND_CASE(AFFINE5, body)                                                                                       \
        KIND_CASE(AFFINE6, body)                                                                                       \
        KIND_CASE(FP8, body)                                                                                           \
    }
#define KIND_CASE(KIND, body)                                                                                          \
    case KIND:                                                                                                         \
        if constexpr (KINDS >> KIND & 1) { body(KIND); }                                                               \
        break;

__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

__device__ inline float warp_max(float x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

// The sum over a block of at most 32 warps. Every thread gets it.
__device__ inline float block_sum(float x) {
    __shared__ float sums[WARP];
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = x;
    __syncthreads();
    u32 warps = blockDim.x / WARP;
    x = warp_sum(threadIdx.x % WARP < warps ? sums[threadIdx.x % WARP] : 0);
    __syncthreads();
    return x;
}

__device__ inline float block_max(float x) {
    __shared__ float largest[WARP];
    x = warp_max(x);
    if (threadIdx.x % WARP == 0) largest[threadIdx.x / WARP] = x;
    __syncthreads();
    u32 warps = blockDim.x / WARP;
    x = warp_max(threadIdx.x % WARP < warps ? largest[threadIdx.x % WARP] : -INFINITE);
    __syncthreads();
    return x;
}

__device__ inline float sigmoid(float x) { return 1 / (1 + expf(-x)); }
__device__ inline float silu(float x) { return x * sigmoid(x); }
__device__ inline float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

// How a feed-forward block combines its gate and up, or what it does with up if it has no gate; then that is `gate`
// here. The order is that of `put_activation` in products.rs.
enum ActivationKind { SWIGLU, CLAMPED, CLIPPED_BEFORE, CLIPPED_AFTER, GEGLU, REGLU, RELU_SQUARED };

struct Activation {
    u32 kind;
    float alpha, limit; // of the kinds that have them
};

// Unlike fminf and fmaxf, these keep a NaN.
__device__ inline float at_most(float x, float limit) { return x > limit ? limit : x; }
__device__ inline float within(float x, float limit) { return x < -limit ? -limit : at_most(x, limit); }

// With the approximation by a hyperbolic tangent: (1 + tanh(y)) / 2 is the sigmoid of 2y.
__device__ inline float gelu(float x) { return x * sigmoid(1.5957692f * fmaf(0.044715f * x * x, x, x)); }

__device__ inline float activate(float gate, float up, const Activation& a) {
    // Most models have this one.
    if (a.kind == SWIGLU) return silu(gate) * up;
    if (a.kind == GEGLU) return gelu(gate) * up;
    if (a.kind == REGLU) return (gate < 0 ? 0 : gate) * up;
    if (a.kind == RELU_SQUARED) return gate < 0 ? 0 : gate * gate;
    up = within(up, a.limit);
    if (a.kind == CLIPPED_AFTER) return at_most(silu(gate), a.limit) * up;
    gate = at_most(gate, a.limit);
    return a.kind == CLIPPED_BEFORE ? silu(gate) * up : (up + 1) * (gate * sigmoid(a.alpha * gate));
}

// A norm of activations before they are multiplied, and what is added to them first.
struct PriorNorm {
    const float* w;     // or null: then there is no norm
    const float* added; // or null
    float* sum;         // where the sum is stored, if something is added
    float* normed;      // where the normed activations are stored
    float eps;
};

// Increments a counter and returns its old value. Blocks that count later see what was written before.
__device__ inline u32 count_up(u32* counter) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(1u) : "memory");
    return before;
}

// Whether this is the last of `count` blocks that call this with the same counter. The last block sees everything that
// the others wrote before. The counter is zero before and after.
__device__ inline bool last_of(u32* counter, u32 count) {
    __shared__ u32 number;
    // The barrier orders the other threads' writes before the first thread's count.
    __syncthreads();
    if (threadIdx.x == 0) {
        number = count_up(counter);
        if (number == count - 1) *counter = 0;
    }
    __syncthreads();
    return number == count - 1;
}
