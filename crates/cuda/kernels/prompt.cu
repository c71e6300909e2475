// Attention for many tokens of a sequence, on the tensor cores.

#include "matrix.cuh"
#include "tensor.cuh"
#include "pages.cuh"

#define THREADS 128
// Queries per block: all query heads of a key head, for as many tokens as fit.
#define QUERIES 64

// Consecutive tokens of a sequence.
struct Tokens {
    u32 row, count;
};

struct PromptArgs {
    KvArgs kv;
    const float* q;     // [rows, q_heads * key_dim]
    float* out;         // [rows, q_heads * value_dim]
    const float* sinks; // [q_heads], or null
    const Tokens* tokens;
    u32 q_heads;
    float scale;
};

// The maximum and the sum of a row of scores, which four lanes share.
__device__ inline float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

__device__ inline float row_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

// Loads eight channels of a page to shared memory, with padding that puts eight rows in different banks. Memory beyond
// the last position is uninitialised.
template <int DIM> __device__ inline void load_eight(u16* to, const u16* from, u32 i, u32 positions) {
    u32 position = i / (DIM / 8), channel = i % (DIM / 8) * 8;
    uint4 nothing = {0, 0, 0, 0};
    *(uint4*)(to + position * (DIM + 8) + channel) = position < positions ? ((const uint4*)from)[i] : nothing;
}

// A warp has 16 queries and passes over all pages that its block sees. KEY and VALUE are the channels of heads.
template <int KEY, int VALUE> __device__ inline void attend(const PromptArgs& a) {
    await_previous();
    const int KEY_STRIDE = KEY + 8, VALUE_STRIDE = VALUE + 8;
    __shared__ __align__(16) u16 keys[PAGE * KEY_STRIDE];
    __shared__ __align__(16) u16 values[PAGE * VALUE_STRIDE];
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 kv_head = blockIdx.x, group = a.q_heads / a.kv.heads;
    Tokens tokens = a.tokens[blockIdx.y];
    u32 first = a.kv.position[tokens.row], last = first + tokens.count - 1;
    u8* const* pages = a.kv.pages + (u64)a.kv.sequence[tokens.row] * a.kv.capacity;

    // Each lane has two queries: their tokens, heads, and visible positions.
    u32 head[2], row[2], end[2], start[2];
    bool active[2];
    u32 q[KEY / 16][4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 query = 16 * warp + lane / 4 + 8 * i, token = query / group;
        active[i] = token < tokens.count;
        if (!active[i]) token = 0;
        head[i] = kv_head * group + query % group;
        row[i] = tokens.row + token;
        end[i] = first + token + 1;
        start[i] = a.kv.start(end[i]);
        const float* from = a.q + ((u64)row[i] * a.q_heads + head[i]) * KEY + lane % 4 * 2;
#pragma unroll
        for (int step = 0; step < KEY / 16; step++) {
            q[step][i] = two_halves(from[16 * step], from[16 * step + 1]);
            q[step][i + 2] = two_halves(from[16 * step + 8], from[16 * step + 9]);
        }
    }
    // If a block has few tokens, some warps have no queries and only help to load.
    bool working = 16 * warp < tokens.count * group;
    float max[2] = {-INFINITE, -INFINITE}, sum[2] = {0, 0};
    float out[VALUE / 8][4] = {};

    for (u32 page = a.kv.start(first + 1) / PAGE; page <= last / PAGE; page++) {
        const u16* from = (const u16*)pages[page] + (u64)kv_head * PAGE * KEY;
        const u16* values_from = (const u16*)pages[page] + (u64)PAGE * (a.kv.heads * KEY + kv_head * VALUE);
        u32 positions = last + 1 - page * PAGE;
        __syncthreads();
        // Several loads in flight: with few blocks, each is alone on its multiprocessor.
#pragma unroll 8
        for (u32 i = threadIdx.x; i < PAGE * KEY / 8; i += THREADS) {
            load_eight<KEY>(keys, from, i, positions);
            if (VALUE == KEY || i < PAGE * VALUE / 8) load_eight<VALUE>(values, values_from, i, positions);
        }
        __syncthreads();
        if (!working) continue;

        float score[PAGE / 8][4] = {};
#pragma unroll
        for (int key = 0; key < PAGE; key += 16) {
#pragma unroll
            for (int step = 0; step < KEY / 16; step++) {
                u32 k[4];
                load_four(k, keys + (key + lane % 8 + lane / 16 * 8) * KEY_STRIDE + 16 * step + lane / 8 % 2 * 8);
                multiply_add(score[key / 8], q[step], k);
                multiply_add(score[key / 8 + 1], q[step], k + 2);
            }
        }
        float largest[2] = {max[0], max[1]};
#pragma unroll
        for (int j = 0; j < PAGE / 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 position = page * PAGE + 8 * j + lane % 4 * 2 + i % 2;
                bool seen = position >= start[i / 2] && position < end[i / 2];
                score[j][i] = seen ? score[j][i] * a.scale : -INFINITE;
                largest[i / 2] = fmaxf(largest[i / 2], score[j][i]);
            }
        }
        float correction[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            largest[i] = row_max(largest[i]);
            // If no position was visible yet, there is nothing to correct.
            correction[i] = max[i] == -INFINITE ? 0 : expf(max[i] - largest[i]);
            max[i] = largest[i];
            sum[i] *= correction[i];
        }
        u32 p[PAGE / 8][2];
#pragma unroll
        for (int j = 0; j < PAGE / 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float weight = score[j][i] == -INFINITE ? 0 : expf(score[j][i] - max[i / 2]);
                score[j][i] = weight;
                sum[i / 2] += weight;
            }
            p[j][0] = two_halves(score[j][0], score[j][1]);
            p[j][1] = two_halves(score[j][2], score[j][3]);
        }
#pragma unroll
        for (int j = 0; j < VALUE / 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) out[j][i] *= correction[i / 2];
        }
#pragma unroll
        for (int key = 0; key < PAGE; key += 16) {
            u32 weights[4] = {p[key / 8][0], p[key / 8][1], p[key / 8 + 1][0], p[key / 8 + 1][1]};
#pragma unroll
            for (int col = 0; col < VALUE; col += 16) {
                u32 v[4];
                load_four_transposed(v, values + (key + lane % 16) * VALUE_STRIDE + col + lane / 16 * 8);
                multiply_add(out[col / 8], weights, v);
                multiply_add(out[col / 8 + 1], weights, v + 2);
            }
        }
    }

    if (!working) return;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float total = row_sum(sum[i]), factor = 1;
        if (a.sinks) {
            float largest = fmaxf(max[i], a.sinks[head[i]]);
            factor = expf(max[i] - largest);
            total = total * factor + expf(a.sinks[head[i]] - largest);
        }
        if (!active[i]) continue;
        float* to = a.out + ((u64)row[i] * a.q_heads + head[i]) * VALUE + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < VALUE / 8; j++) {
            to[8 * j] = out[j][2 * i] * factor / total;
            to[8 * j + 1] = out[j][2 * i + 1] * factor / total;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) attend_prompt_32(const PromptArgs a) { attend<32, 32>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) attend_prompt_64(const PromptArgs a) { attend<64, 64>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) attend_prompt_128(const PromptArgs a) { attend<128, 128>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) attend_prompt_192_128(const PromptArgs a) { attend<192, 128>(a); }
