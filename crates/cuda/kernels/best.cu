// Finds the likeliest tokens of rows of logits. Each row's logits are counted in bins by value. Those in the bins that
// can contain the result are gathered, and these few are sorted.

#include "matrix.cuh"

#define THREADS 256
// Logits per block.
#define SHARE 4096
#define BIN_BITS 12
#define BINS (1 << BIN_BITS)
// The most candidates per row. If more are as likely as the last one, the host ranks the whole row.
#define MOST 4096
#define SORT_THREADS 1024
#define TOO_MANY 0xffffffffu

struct BestArgs {
    const float* x; // [rows, width]
    u32* bins;      // [rows, BINS]
    u32* counts;    // [rows] how many were gathered
    u64* gathered;  // [rows, MOST]
    uint2* out;     // [rows, k] tokens and their logits, the likeliest first
    u32 width, k, rows;
};

// Maps a logit to an integer that is larger for a likelier token. NaN counts as minus infinity, and minus zero as zero.
__device__ inline u64 key_of(float x, u32 token) {
    x = x == x ? fminf(x, __int_as_float(0x7f7fffff)) + 0.0f : -INFINITE;
    u32 bits = __float_as_uint(x);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (u64)bits << 32 | (u32)~token;
}

__device__ inline u32 bin_of(u64 key) { return (u32)(key >> (64 - BIN_BITS)); }

// A thread's part of a row's logits. All of them are loaded before the first is used.
#define EACH (SHARE / THREADS)
struct Logits {
    float logit[EACH];
    u32 first, end;

    __device__ inline Logits(const BestArgs& a) {
        u32 start = blockIdx.x * SHARE;
        first = start + threadIdx.x, end = min(start + SHARE, a.width);
        const float* x = a.x + (u64)blockIdx.y * a.width;
#pragma unroll
        for (int j = 0; j < EACH; j++) logit[j] = token(j) < end ? x[token(j)] : 0;
    }
    __device__ inline u32 token(int j) const { return first + j * THREADS; }
};

extern "C" __global__ void best_clear(const BestArgs a) {
    await_previous();
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < (u64)a.rows * BINS) a.bins[i] = 0;
    if (i < a.rows) a.counts[i] = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS) best_count(const BestArgs a) {
    await_previous();
    __shared__ u32 bins[BINS];
    Logits x(a);
    for (u32 i = threadIdx.x; i < BINS; i += THREADS) bins[i] = 0;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < EACH; j++)
        if (x.token(j) < x.end) atomicAdd(bins + bin_of(key_of(x.logit[j], x.token(j))), 1);
    __syncthreads();
    for (u32 i = threadIdx.x; i < BINS; i += THREADS)
        if (bins[i]) atomicAdd(a.bins + (u64)blockIdx.y * BINS + i, bins[i]);
}

extern "C" __global__ void __launch_bounds__(THREADS) best_gather(const BestArgs a) {
    await_previous();
    __shared__ u32 sums[THREADS];
    __shared__ u32 last;
    u32 row = blockIdx.y;
    Logits x(a);

    // Every thread has the same number of bins, the first thread those of the largest logits.
    const u32 OWN_BINS = BINS / THREADS;
    const u32* bins = a.bins + (u64)row * BINS + BINS - 1 - threadIdx.x * OWN_BINS;
    u32 mine = 0;
    for (u32 i = 0; i < OWN_BINS; i++) mine += *(bins - i);
    sums[threadIdx.x] = mine;
    __syncthreads();
    for (u32 step = 1; step < THREADS; step *= 2) {
        u32 before = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
        __syncthreads();
        sums[threadIdx.x] += before;
        __syncthreads();
    }
    u32 sum = sums[threadIdx.x] - mine;
    if (sum < a.k && a.k <= sum + mine) {
        u32 i = 0;
        while ((sum += *(bins - i)) < a.k) i++;
        last = BINS - 1 - threadIdx.x * OWN_BINS - i;
    }
    __syncthreads();

#pragma unroll
    for (int j = 0; j < EACH; j++) {
        u64 key = key_of(x.logit[j], x.token(j));
        if (x.token(j) >= x.end || bin_of(key) < last) continue;
        u32 place = atomicAdd(a.counts + row, 1);
        if (place < MOST) a.gathered[(u64)row * MOST + place] = key;
    }
}

// Sorts a row's candidates in descending order. No two are equal.
extern "C" __global__ void __launch_bounds__(SORT_THREADS) best_sort(const BestArgs a) {
    await_previous();
    __shared__ u64 keys[MOST];
    u32 row = blockIdx.x, count = a.counts[row];
    uint2* out = a.out + (u64)row * a.k;
    if (count > MOST) {
        if (threadIdx.x == 0) out[0] = uint2{TOO_MANY, 0};
        return;
    }
    u32 size = 1;
    while (size < count) size *= 2;
    for (u32 i = threadIdx.x; i < size; i += SORT_THREADS) keys[i] = i < count ? a.gathered[(u64)row * MOST + i] : 0;
    __syncthreads();
    for (u32 run = 2; run <= size; run *= 2) {
        for (u32 step = run / 2; step > 0; step /= 2) {
            for (u32 i = threadIdx.x; i < size / 2; i += SORT_THREADS) {
                u32 low = i / step * 2 * step + i % step, high = low + step;
                u64 p = keys[low], q = keys[high];
                // Every other run is reversed, so that two of them form a bitonic sequence.
                bool falls = (low & run) == 0;
                if ((p < q) == falls) keys[low] = q, keys[high] = p;
            }
            __syncthreads();
        }
    }
    for (u32 i = threadIdx.x; i < a.k; i += SORT_THREADS) {
        u32 bits = (u32)(keys[i] >> 32);
        out[i] = uint2{(u32)~keys[i], bits >> 31 ? bits & 0x7fffffffu : ~bits};
    }
}
